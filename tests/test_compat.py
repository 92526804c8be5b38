"""FSDP2-style scripts with one import changed come to the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from compat_scripts import SCRIPTS, TWO_AXES, Scaled, batch, full, loss_of, same, wrapped
from models import build

import fsdp_fn.compat
from harness import run_distributed


def run_with_both(name: str, folder: Path) -> None:
    script = {**SCRIPTS, **TWO_AXES}[name]
    same(script(fsdp_fn.compat, folder), script(torch.distributed.fsdp, folder))


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_script_runs_by_changing_one_import(world_size: int, script: str, tmp_path: Path) -> None:
    run_distributed(world_size, run_with_both, script, tmp_path)


def clip_with_empty_shards(norm_type: float) -> None:
    plain, model = build(Scaled), wrapped(fsdp_fn.compat, build(Scaled))
    loss_of(model, batch(0)).backward()
    for rank in range(dist.get_world_size()):
        (loss_of(plain, batch(0, rank=rank)) / dist.get_world_size()).backward()
    assert plain.scale.grad is not None
    assert plain.scale.grad.abs().item() == max(float(p.grad.abs().max()) for p in plain.parameters())  # type: ignore[union-attr]
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=norm_type)
    wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, norm_type=norm_type)
    torch.testing.assert_close(full(norm), wanted)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(full(model.get_parameter(name).grad), parameter.grad, msg=name)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_torchs_clipping_is_right_where_a_rank_has_nothing_of_a_parameter(norm_type: float) -> None:
    for world_size in (1, 2, 3):
        run_distributed(world_size, clip_with_empty_shards, norm_type)


@pytest.mark.parametrize("script", TWO_AXES)
def test_a_script_on_two_axes_runs_by_changing_one_import(script: str, tmp_path: Path) -> None:
    run_distributed(4, run_with_both, script, tmp_path)
