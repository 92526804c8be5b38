"""FSDP2-style scripts with one import changed come to the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed.fsdp
from compat_scripts import SCRIPTS, TWO_AXES, same

import fsdp_fn.compat
from harness import run_distributed


def run_with_both(name: str, folder: Path) -> None:
    script = {**SCRIPTS, **TWO_AXES}[name]
    same(script(fsdp_fn.compat, folder), script(torch.distributed.fsdp, folder))


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_script_runs_by_changing_one_import(world_size: int, script: str, tmp_path: Path) -> None:
    run_distributed(world_size, run_with_both, script, tmp_path)


@pytest.mark.parametrize("script", TWO_AXES)
def test_a_script_on_two_axes_runs_by_changing_one_import(script: str, tmp_path: Path) -> None:
    run_distributed(4, run_with_both, script, tmp_path)
