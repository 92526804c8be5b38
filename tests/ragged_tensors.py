"""Ragged tensors for tests: cuts with empty, single and uneven parts, wholes cut so, and what is done to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_fn.ragged import RaggedShard, RaggedTensor, as_ragged, from_spec, mesh_spec

CUTS = {
    1: [(0, 5), (0, 1)],
    2: [(0, 4, 5), (0, 0, 5), (0, 5, 5), (0, 1, 4)],
    3: [(0, 1, 3, 5), (0, 0, 5, 5), (0, 4, 4, 5)],
    4: [(0, 0, 1, 5, 6), (0, 6, 6, 6, 6), (0, 2, 3, 5, 9)],
}

ELEMENTWISE: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b,
    lambda a, b: a * 2 - b / 3,
    lambda a, b: torch.lerp(a, b, 0.3),
    lambda a, b: torch.addcmul(a, a, b, value=0.5),
    lambda a, b: torch.maximum(a, b).abs().sqrt(),
    lambda a, b: torch.where(a > b, a, b),
    lambda a, b: a.clone().add_(b, alpha=2).mul_(0.5),
    lambda a, b: a.clone().copy_(b),
    lambda a, b: a.clone().zero_() + b.clone().fill_(3.0),
    lambda a, b: torch.zeros_like(a) + torch.ones_like(b) + torch.full_like(a, 2.0),
    lambda a, b: a.to(torch.float64) + b,
    lambda a, b: a.new_zeros(a.shape) + b,
    lambda a, b: a.clone().masked_fill_(a > 0, 7.0),
    lambda a, b: (a.detach() + torch.tensor(2.0)).neg_(),
    lambda a, b: torch._foreach_add([a, b], [b, a], alpha=2)[1],
    lambda a, b: torch._foreach_sqrt(torch._foreach_mul([a, b], [a, b]))[0],
]
OTHER: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a.sum(),
    lambda a, b: a.mean(dim=0),
    lambda a, b: (a - b).abs().max(),
    lambda a, b: a.sum(1),
    lambda a, b: torch.cumsum(a, 0),
    lambda a, b: torch.cat([a, b]),
    lambda a, b: a.softmax(0),
    lambda a, b: a.norm(),
    lambda a, b: torch.linalg.vector_norm(a, 1),
    lambda a, b: torch.linalg.vector_norm(a, float("inf")),
    lambda a, b: torch.linalg.vector_norm(a, 2, dim=1),
    lambda a, b: torch.stack(torch._foreach_norm([a, b], 2)).norm(),
    lambda a, b: a.new_zeros((2, 3)),
    lambda a, b: a + a.sum(dim=0, keepdim=True),
    lambda a, b: a * a.sum(dim=1, keepdim=True),
]


def collectives(call: Callable[[], Any]) -> list[str]:
    """Names of the collectives that a call launches, in order; a dispatch mode would not see those of a subclass."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return [event.name for event in events if event.name.startswith("c10d::")]


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))


def shard(whole: torch.Tensor, bounds: Sequence[int], mesh: DeviceMesh, requires_grad: bool = False) -> RaggedTensor:
    rank = mesh.get_local_rank()
    local = whole[bounds[rank] : bounds[rank + 1]].clone()
    return as_ragged(local, mesh, bounds, whole.shape, requires_grad)


def values(shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- meshes of several dimensions ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Mesh sizes by dimension, the placement on each, and the shape of the whole tensor."""

    mesh: dict[str, int]
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]


def ragged(*bounds: int) -> RaggedShard:
    return RaggedShard(bounds)


HYBRID = {"outer": 2, "inner": 2}
PARALLEL = {"data": 2, "tensor": 2}
CASES = {
    "hybrid": Case(HYBRID, (Replicate(), ragged(0, 1, 5)), (5, 4)),
    "hybrid, one rank has all": Case(HYBRID, (Replicate(), ragged(0, 0, 5)), (5, 4)),
    "fully hybrid": Case(HYBRID, (ragged(0, 1, 1, 3, 5), ragged(0, 1, 1, 3, 5)), (5, 4)),
    "fully hybrid, one rank has all": Case(HYBRID, (ragged(0, 0, 5, 5, 5), ragged(0, 0, 5, 5, 5)), (5, 4)),
    "rows over tensor": Case(PARALLEL, (ragged(0, 1, 3), Shard(0)), (6, 4)),
    "rows over tensor, one rank has all": Case(PARALLEL, (ragged(0, 3, 3), Shard(0)), (6, 4)),
    "columns over tensor": Case(PARALLEL, (ragged(0, 2, 3), Shard(1)), (3, 4)),
    "replicated over tensor": Case(PARALLEL, (ragged(0, 2, 5), Replicate()), (5,)),
    "tensor before data": Case({"tensor": 2, "data": 2}, (Shard(0), ragged(0, 1, 3)), (6, 4)),
    "tensor twice": Case(PARALLEL, (Shard(0), Shard(0)), (8, 3)),
    "data alone": Case(HYBRID, (Replicate(), Replicate()), (5, 4)),
    "tensor alone": Case(PARALLEL, (Replicate(), Shard(1)), (3, 4)),
    "three dimensions": Case(
        {"outer": 2, "tensor": 1, "inner": 2}, (ragged(0, 2, 2, 3, 5), Shard(1), ragged(0, 2, 2, 3, 5)), (5, 4)
    ),
    "plain data": Case({"data": 4}, (ragged(0, 2, 2, 3, 5),), (5, 4)),
}


def mesh_of(case: Case) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))


def part(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's part of a whole tensor, cut step by step as the words of ``mesh_spec`` say."""
    coordinate: Any = mesh.get_coordinate()
    for dim, placement in enumerate(placements):
        if type(placement) is Shard:
            whole = whole.chunk(mesh.size(dim), placement.dim)[coordinate[dim]]
    place, bounds = 0, (0, whole.shape[0])
    for dim, placement in reversed(list(enumerate(placements))):
        if isinstance(placement, RaggedShard):
            place, bounds = place * mesh.size(dim) + coordinate[dim], placement.bounds
    return whole[bounds[place] : bounds[place + 1]].clone()


def face(
    whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], requires_grad: bool = False
) -> RaggedTensor:
    spec = mesh_spec(mesh, placements, whole.shape, whole.dtype)
    return from_spec(part(whole, mesh, placements), spec, requires_grad)
