"""Strategies under test, by name: what each needs of the world, and a model sharded by one, on either path.

Promises: full tensors are put together here from the parts that ranks report, by the ranges that the layout gives
them, and parts that several ranks hold must agree to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from models import VOCABULARY, WIDTH, Block
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_fn
from fsdp_fn.module import FsdpModule
from fsdp_fn.placement import Placements, Strategy
from fsdp_fn.state import UnitState

_SHARDED, _PARTIAL, _WHOLE = fsdp_fn.Sharded(), fsdp_fn.Partial(), fsdp_fn.Replicate()

ONE_AXIS: dict[str, Placements] = {
    "ddp": fsdp_fn.ddp(),
    "ddp reducing each microbatch": Placements(_WHOLE, _WHOLE, _WHOLE),
    "zero1": fsdp_fn.zero1(),
    "zero1 reducing each microbatch": Placements(_WHOLE, _WHOLE, _SHARDED),
    "zero2": fsdp_fn.zero2(),
    "zero3": fsdp_fn.zero3(),
    "zero3 without sync": Placements(_SHARDED, _PARTIAL, _SHARDED),
    "zero3 of whole tensors": fsdp_fn.zero3(fsdp_fn.TensorAtomic()),
    "zero3 of blocks": fsdp_fn.zero3(fsdp_fn.BlockAtomic(3)),
}
TWO_AXES: dict[str, Strategy] = {
    "hsdp": fsdp_fn.hsdp("outer", "inner"),
    "hfsdp": fsdp_fn.hfsdp("outer", "inner"),
    "zero3 over both": (fsdp_fn.zero3(axis="outer"), fsdp_fn.zero3(axis="inner")),
    "zero2 over both": (fsdp_fn.zero2("outer"), fsdp_fn.zero2("inner")),
    "zero1 over both": (fsdp_fn.zero1("outer"), fsdp_fn.zero1("inner")),
    "ddp over both": (fsdp_fn.ddp("outer"), fsdp_fn.ddp("inner")),
    "hsdp reducing each microbatch": (Placements(_WHOLE, _WHOLE, _WHOLE, "outer"), fsdp_fn.zero3(axis="inner")),
}


class Small(nn.Module):
    """Embedding, block, head: two units where the block is one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embedding(tokens)))


def strategies_for(world_size: int) -> dict[str, Placements | Strategy]:
    """Those that a world of this size can show; four ranks are two by two for those of two axes."""
    return {**ONE_AXIS, **(TWO_AXES if world_size == 4 else {})}


def mesh_for(strategy: Placements | Strategy, device: str = "cpu") -> DeviceMesh:
    """A mesh of all ranks with the axes that the strategy names."""
    if isinstance(strategy, Placements):
        return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("data",))
    return init_device_mesh(device, (2, dist.get_world_size() // 2), mesh_dim_names=("outer", "inner"))


@dataclass
class Wrapped:
    """``model``, wrapped in place, and how its parameters are read."""

    module: nn.Module

    @classmethod
    def of(cls, model: nn.Module, units: Sequence[type[nn.Module]], **options: Any) -> Wrapped:
        """Each module of a class in ``units``, then the model."""
        for module in reversed(list(model.modules())):
            if isinstance(module, tuple(units)) and module is not model:
                fsdp_fn.fully_shard(module, **options)
        return cls(fsdp_fn.fully_shard(model, **options))

    def weights(self) -> dict[str, torch.Tensor]:
        """Full parameters by name."""
        return self._assembled(lambda parameter: parameter)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Full gradients by name."""
        return self._assembled(lambda parameter: parameter.grad)

    def _assembled(self, take: Any) -> dict[str, torch.Tensor]:
        found = {}
        for path, child in self.module.named_modules():
            if isinstance(child, FsdpModule):
                state = child._fsdp_unit.state
                locals_ = [take(parameter)._local_tensor for parameter in child._fsdp_unit.parameters]
                prefix = f"{path}." if path else ""
                found |= {prefix + name: value for name, value in assembled(state, locals_).items()}
        return found


def assembled(state: UnitState, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Full tensors of a unit from every rank's parts, which are placed as the main weights."""
    flat = [part.detach().reshape(-1).cpu().clone() for part in parts]
    own = [(state.main.owned_elements(index), part) for index, part in enumerate(flat)]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    found = {}
    for index, spec in enumerate(state.layout.tensors):
        whole = torch.zeros(spec.numel, dtype=parts[index].dtype)
        seen = torch.zeros(spec.numel, dtype=torch.bool)
        for one in everywhere:
            elements, part = one[index]
            place = slice(elements.start, elements.stop)
            again = seen[place]
            assert torch.equal(whole[place][again], part[again]), f"{spec.name}: ranks hold different values"
            whole[place] = part
            seen[place] = True
        assert bool(seen.all()), f"{spec.name}: no rank holds some of it"
        found[spec.name] = whole.view(spec.shape)
    return found


def assembled_model(state: fsdp_fn.ModelState) -> dict[str, torch.Tensor]:
    """Full parameters of a functional state."""
    found = {}
    for unit in state.units.values():
        found |= assembled(unit, [unit.main.owned(index) for index in range(len(unit.layout.tensors))])
    return found


def assembled_gradients(state: fsdp_fn.ModelState, gradients: Mapping[str, fsdp_fn.Buffer]) -> dict[str, torch.Tensor]:
    """Full finished gradients of a functional state, all of whose parameters are trained."""
    found = {}
    for name, unit in state.units.items():
        found |= assembled(unit, [gradients[name].owned(index) for index in range(len(unit.layout.tensors))])
    return found
