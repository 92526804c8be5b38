"""A small byte-level decoder, as plain PyTorch: it knows nothing of sharding.

Promises: ordinary modules with ordinary parameters and no buffers; the same seed gives the same weights
everywhere. Pre-norm blocks with RMSNorm (Zhang & Sennrich, 2019), rotary positions (Su et al., 2021) and
SwiGLU (Shazeer, 2020).
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional

VOCABULARY = 256
ROTARY_BASE = 10_000.0


def rotate(heads: torch.Tensor) -> torch.Tensor:
    """Rotary position encoding of ``heads``, shape ``(batch, head, position, channel)``, channel even."""
    half = heads.shape[-1] // 2
    frequency = ROTARY_BASE ** (-torch.arange(half, device=heads.device, dtype=torch.float32) / half)
    angle = torch.arange(heads.shape[-2], device=heads.device, dtype=torch.float32)[:, None] * frequency
    cosine, sine = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    first, second = heads.split(half, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1)


class Attention(nn.Module):
    """Causal self-attention over ``(batch, position, dim)``."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.output = nn.Linear(dim, dim, bias=False)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        query, key, value = rearrange(
            self.query_key_value(stream), "b p (three h c) -> three b h p c", three=3, h=self.heads
        )
        mixed = functional.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        merged: torch.Tensor = self.output(rearrange(mixed, "b h p c -> b p (h c)"))
        return merged


class FeedForward(nn.Module):
    """SwiGLU over ``(batch, position, dim)``; hidden width 8/3 of dim, in steps of 32."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        hidden = -(-8 * dim // 96) * 32
        self.gate_up = nn.Linear(dim, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(stream).chunk(2, dim=-1)
        result: torch.Tensor = self.down(functional.silu(gate) * up)
        return result


class Block(nn.Module):
    """One layer: attention, then feed-forward, each behind its norm and added to the stream."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.feed_forward_norm = nn.RMSNorm(dim)
        self.feed_forward = FeedForward(dim)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        stream = stream + self.attention(self.attention_norm(stream))
        result: torch.Tensor = stream + self.feed_forward(self.feed_forward_norm(stream))
        return result


class Transformer(nn.Module):
    """Byte-level language model: tokens ``(batch, position)`` int64 to logits ``(batch, position, 256)``."""

    def __init__(self, dim: int, layers: int, heads: int, *, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY, bias=False)
        self._initialise(seed, layers)

    def _initialise(self, seed: int, layers: int) -> None:
        """Normal weights by a generator of their own; what adds to the stream is scaled down by its depth."""
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            spread = weight.shape[1] ** -0.5
            if name.endswith(("output.weight", "down.weight")):
                spread *= (2 * layers) ** -0.5
            nn.init.normal_(weight, std=spread, generator=generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        stream = self.embedding(tokens)
        for block in self.blocks:
            stream = block(stream)
        logits: torch.Tensor = self.head(self.norm(stream))
        return logits


def next_byte_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per byte, a float32 scalar; logits ``(batch, position, 256)``, any dtype."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
