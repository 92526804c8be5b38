"""Writes of ragged tensors are counted on the flat shards that they are views of, on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ragged_tensors import CASES, Case, mesh_of, part, values
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor

from fsdp_fn.ragged import RaggedTensor, from_spec, mesh_spec
from harness import run_distributed

WRITES: dict[str, Callable[[RaggedTensor, RaggedTensor], Any]] = {
    "add_": lambda p, other: p.add_(1.0),
    "mul_ of data": lambda p, other: p.data.mul_(2.0),
    "copy_": lambda p, other: p.copy_(other),
    "copy_ of a replicated one": lambda p, other: p.copy_(
        distribute_tensor(torch.ones(p.shape), p.device_mesh, [Replicate()] * p.device_mesh.ndim)
    ),
    "zero_": lambda p, other: p.zero_(),
    "masked_fill_": lambda p, other: p.masked_fill_(other > 0, 1.0),
    "add, out": lambda p, other: torch.add(other, other, out=p),
    "normal_": lambda p, other: p.normal_(),
    "data =": lambda p, other: setattr(p, "data", other),
    "foreach add": lambda p, other: torch._foreach_add_([p, other], [other, other]),
    "foreach copy": lambda p, other: torch._foreach_copy_([p], [other]),
    "write through an alias": lambda p, other: p.detach().add_(other),
    "scaler": lambda p, other: torch._amp_foreach_non_finite_check_and_unscale_([p], torch.zeros(1), torch.ones(())),
}
STEPS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, weight_decay=0.0, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, weight_decay=0.0, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, weight_decay=0.0, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}


def check_versions(case: Case) -> None:
    mesh = mesh_of(case)
    spec = mesh_spec(mesh, case.placements, case.shape)
    own = part(values(case.shape), mesh, case.placements)
    flat = torch.cat([torch.zeros(3), own.flatten()])
    parameter: Any = nn.Parameter(from_spec(flat[3:].view(own.shape), spec, False))
    other = from_spec(own.clone(), spec, False)
    parameter.grad = from_spec(own.clone(), spec, False)
    makers = {name: maker([parameter]).step for name, maker in STEPS.items()}
    with torch.no_grad():
        for name, write in WRITES.items():
            before = flat._version
            write(parameter, other)
            assert flat._version > before, name
            assert torch.equal(flat[3:], parameter.to_local().flatten())
    for name, step in makers.items():
        before = flat._version
        step()
        assert flat._version > before, name
    before = flat._version
    with torch.no_grad():
        parameter + other
        parameter.detach()
        parameter.full_tensor()
    assert flat._version == before


@pytest.mark.parametrize(
    "case", ["hybrid, one rank has all", "fully hybrid", "rows over tensor, one rank has all", "data alone"]
)
def test_every_write_is_counted_on_the_flat_shard_also_where_it_is_empty(case: str) -> None:
    run_distributed(4, check_versions, CASES[case])
