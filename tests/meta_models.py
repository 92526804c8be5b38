"""Models on the meta device, their set-up on either path, and the same in plain PyTorch.

Promises: what is compared with is plain PyTorch alone. All ranks call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from comparison import Functional, Wrapper, check_named, reference_gradients, same_weights
from models import HIDDEN, VOCABULARY, WIDTH, Model, build
from torch import nn

import fsdp_fn

Made = Wrapper | Functional


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def children_first(model: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    model.apply(found.append)
    return found


def sharded(path: str, model: nn.Module, units: Sequence[type[nn.Module]] = (), **options: Any) -> Made:
    """``model`` on a path, its units bottom-up in the order of the model."""
    if path == "functional":
        return Functional(model, units, **options)
    for module in children_first(model):
        if isinstance(module, tuple(units)) and module is not model:
            fsdp_fn.fully_shard(module, **options)
    return Wrapper(model, **options)


def reset(module: nn.Module) -> None:
    """What ``init="reset_parameters"`` is to do for one module."""
    if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
        module.reset_parameters()  # type: ignore[operator]


def initialised(make: Callable[[], Model], init: Callable[[nn.Module], None], seed: int = 11) -> Model:
    """The model in plain PyTorch, initialised children first.

    Built with memory, for ``to_empty`` parts tied weights; what it was built with is overwritten.
    """
    plain = build(make)
    with torch.no_grad():
        for tensor in (*plain.parameters(), *plain.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
        torch.manual_seed(seed)
        plain.apply(init)
    return plain


def check_training(model: Made, plain: nn.Module, inputs: Any, steps: int = 2) -> None:
    """Both train alike; to the bit at one rank."""
    tolerance = {} if dist.get_world_size() == 1 else {"rtol": 1e-4, "atol": 1e-5}
    for step in range(steps):
        for call in (plain, model):
            (call(inputs) * (dist.get_rank() + 1)).pow(2).mean().backward()
        mean = reference_gradients(plain)
        check_named(model.gradients(), mean, f"step {step}: gradient", zeros_for_none=True, **tolerance)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.sub_(mean[name], alpha=0.01)
        plain.zero_grad()
        model.step(lr=0.01)
        check_named(model.weights(), same_weights(plain), f"step {step}: weight", **tolerance)


def buffers_of(model: Made) -> dict[str, torch.Tensor]:
    return dict(model.module.named_buffers()) if isinstance(model, Wrapper) else dict(model.state.buffers)


class Rotary(nn.Module):
    """Buffers of three kinds and no parameter: frequencies, a mask, positions."""

    inv_freq: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in self.values().items():
            self.register_buffer(name, tensor, persistent=False)

    def values(self) -> dict[str, torch.Tensor]:
        return {
            "inv_freq": 1.0 / 100.0 ** (torch.arange(0, WIDTH) / WIDTH),
            "mask": torch.ones(6, 6, dtype=torch.bool).tril(),
            "positions": torch.arange(6),
        }

    def reset_parameters(self) -> None:
        """One is assigned anew, one registered anew, one written."""
        values = self.values()
        self.inv_freq = values["inv_freq"]
        self.register_buffer("mask", values["mask"], persistent=False)
        self.positions.copy_(values["positions"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = self.positions[:, None] * self.inv_freq
        return torch.where(self.mask.any(1, keepdim=True), x * angle.cos(), 0.0)


class Mixing(nn.Module):
    """A block with a batch norm, and positions that all blocks share."""

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.rotary(x)).relu()
        return x + self.down(self.norm(y.flatten(0, 1)).view(y.shape))


class Language(nn.Module):
    """Blocks first, then an embedding that is tied to the head: ``nn.Module.apply`` meets units before the rest."""

    def __init__(self) -> None:
        super().__init__()
        rotary = Rotary()
        self.blocks = nn.ModuleList(Mixing(rotary) for _ in range(2))
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = self.embedding(indices)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
