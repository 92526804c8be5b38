"""Small models that tests shard: dims of 7 and 11, so that shards are uneven and some ranks hold nothing.

Promises: every model is deterministic (``build`` seeds it), runs on CPU, and is plain PyTorch, with no
knowledge of sharding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN, VOCABULARY = 7, 11, 5

Model = TypeVar("Model", bound=nn.Module)


def build(make: Callable[[], Model]) -> Model:
    """``make()`` with the same weights on every rank, the generator left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make()


def vectors(seed: int = 0, rows: int = 4, *, requires_grad: bool = False) -> torch.Tensor:
    """Normal numbers of shape ``(rows, WIDTH)``, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, WIDTH, generator=generator).requires_grad_(requires_grad)


class Block(nn.Module):
    """A residual block; ``checkpointing`` says which kind of checkpoint is around its inside, if any."""

    def __init__(self, checkpointing: str | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.checkpointing = checkpointing

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(torch.relu(self.up(self.norm(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + maybe_checkpoint(self.inside, x, self.checkpointing)


class Stack(nn.Module):
    """Embedding, three blocks, head. ``around`` says which kind of checkpoint goes around each block."""

    def __init__(self, inside: str | None = None, around: str | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(inside, dropout) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.around = around

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = maybe_checkpoint(block, x, self.around)
        return self.head(x)


class Chain(nn.Module):
    """Two blocks and a head over vectors, for cases in which the input needs a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


class Tied(nn.Module):
    """Embedding and output layer are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCABULARY, 3)
        self.out = nn.Linear(3, VOCABULARY, bias=False)
        self.out.weight = self.emb.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.emb(tokens))


class Normalised(nn.Module):
    """Module buffers: BatchNorm's, changed in place, and one that forward assigns anew."""

    calls: torch.Tensor

    def __init__(self, checkpointing: str | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.block = Block(checkpointing)
        self.last = nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.block(self.last(torch.relu(self.norm(self.first(x)))))


def maybe_checkpoint(
    function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, kind: str | None
) -> torch.Tensor:
    """``function(x)``, under no, a ``"reentrant"`` or a ``"non-reentrant"`` checkpoint."""
    if kind is None:
        return function(x)
    return checkpoint(function, x, use_reentrant=kind == "reentrant")


def tokens(seed: int = 0) -> torch.Tensor:
    """Token indices of shape ``(2, 6)``."""
    return torch.randint(VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(seed))
