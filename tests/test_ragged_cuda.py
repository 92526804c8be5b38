"""Ragged tensors over NCCL on two GPUs, also where the parts lie in host memory: what travels, travels on the GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ragged_tensors import Case, part, ragged, values
from test_nccl import RANKS, on_two_gpus
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_fn.ragged import from_spec, mesh_spec, restore_placement

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two CUDA GPUs"),
]

CASES = [
    Case({"data": 2}, (ragged(0, 1, 3),), (3, 4)),
    Case({"data": 2}, (ragged(0, 0, 3),), (3, 4)),
    Case({"outer": 2, "inner": 1}, (Replicate(), ragged(0, 3)), (3, 4)),
    Case({"outer": 2, "inner": 1}, (ragged(0, 1, 3),) * 2, (3, 4)),
    Case({"data": 1, "tensor": 2}, (ragged(0, 3), Shard(1)), (3, 4)),
]


def check(device: str) -> None:
    for case in CASES:
        mesh = init_device_mesh("cuda", tuple(case.mesh.values()), mesh_dim_names=tuple(case.mesh))
        whole, gradient = values(case.shape, 1).to(device), values(case.shape, 2).to(device)
        spec = mesh_spec(mesh, case.placements, case.shape)
        parameter: Any = nn.Parameter(from_spec(part(whole, mesh, case.placements), spec, False))
        full = parameter.full_tensor()
        assert full.device.type == device
        assert torch.equal(full, whole)
        loaded: Any = distribute_tensor(whole, mesh, [Shard(0)] * mesh.ndim).to(device)
        back = restore_placement(loaded, parameter)
        assert back.to_local().device.type == device
        assert torch.equal(back.to_local(), parameter.to_local())
        torch.testing.assert_close((parameter.data + loaded).sum(0).to_local(), (whole + whole).sum(0))
        plain = nn.Parameter(whole.clone())
        plain.grad = gradient.clone()
        parameter.grad = from_spec(part(gradient, mesh, case.placements), spec, False)
        norm: Any = nn.utils.clip_grad_norm_([parameter], 0.5)
        torch.testing.assert_close(norm.to_local(), nn.utils.clip_grad_norm_([plain], 0.5))
        for each in (parameter, plain):
            torch.optim.AdamW([each], lr=0.1).step()
        torch.testing.assert_close(parameter.full_tensor(), plain.detach())
        found = torch.zeros(1, device=device)
        if dist.get_rank() == 1:
            parameter.grad.to_local().fill_(float("inf"))
        torch._amp_foreach_non_finite_check_and_unscale_([parameter.grad], found, torch.ones((), device=device))
        assert found.item() == 1.0


def check_on_gpus() -> None:
    check("cuda")


def check_in_host_memory() -> None:
    check("cpu")


def test_gathers_norms_and_scalers_agree_over_nccl(tmp_path: Path) -> None:
    on_two_gpus(check_on_gpus, tmp_path)


def test_parts_in_host_memory_are_gathered_and_reduced_by_the_gpus(tmp_path: Path) -> None:
    on_two_gpus(check_in_host_memory, tmp_path)
