"""Ragged tensors under torch's distributed checkpoints: saved at one placement, read at any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ragged_tensors import Case, face, mesh_of, ragged, values
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from harness import run_distributed

SHAPE = (6, 4)
HYBRID = {"outer": 2, "inner": 2}
PARALLEL = {"data": 2, "tensor": 2}
LAYOUTS: dict[int, dict[str, Case]] = {
    1: {"alone": Case({"data": 1}, (ragged(0, 6),), SHAPE)},
    2: {
        "one rank has all": Case({"data": 2}, (ragged(0, 0, 6),), SHAPE),
        "tensor": Case({"data": 1, "tensor": 2}, (ragged(0, 6), Shard(1)), SHAPE),
    },
    3: {"data": Case({"data": 3}, (ragged(0, 4, 4, 6),), SHAPE)},
    4: {
        "hybrid": Case(HYBRID, (Replicate(), ragged(0, 1, 6)), SHAPE),
        "hybrid, one rank has all": Case(HYBRID, (Replicate(), ragged(0, 0, 6)), SHAPE),
        "fully hybrid": Case(HYBRID, (ragged(0, 1, 1, 3, 6),) * 2, SHAPE),
        "rows": Case(PARALLEL, (ragged(0, 1, 3), Shard(0)), SHAPE),
        "rows, one rank has all": Case(PARALLEL, (ragged(0, 3, 3), Shard(0)), SHAPE),
        "columns": Case(PARALLEL, (ragged(0, 2, 6), Shard(1)), SHAPE),
        "columns, one rank has all": Case(PARALLEL, (ragged(0, 0, 6), Shard(1)), SHAPE),
        "tensor first": Case({"tensor": 2, "data": 2}, (Shard(0), ragged(0, 1, 3)), SHAPE),
        "replicated": Case(HYBRID, (Replicate(), Replicate()), SHAPE),
        "tensor alone": Case(PARALLEL, (Replicate(), Shard(1)), SHAPE),
        "plain": Case({"data": 4}, (ragged(0, 2, 2, 3, 6),), SHAPE),
    },
}


def wholes(ranks: int) -> dict[str, torch.Tensor]:
    """What a checkpoint of that many ranks holds: one tensor for each layout, and one plain DTensor."""
    return {name: values(SHAPE, seed) for seed, name in enumerate([*LAYOUTS[ranks], "torch's own"])}


def save(path: Path) -> None:
    ranks = dist.get_world_size()
    state = {
        name: face(wholes(ranks)[name], mesh_of(layout), layout.placements) for name, layout in LAYOUTS[ranks].items()
    }
    mesh = mesh_of(next(iter(LAYOUTS[ranks].values())))
    plain = distribute_tensor(wholes(ranks)["torch's own"], mesh, [Replicate()] * (mesh.ndim - 1) + [Shard(1)])
    dcp.save({**state, "torch's own": plain}, checkpoint_id=path)


def load(path: Path, saved_by: int) -> None:
    saved = wholes(saved_by)
    for layout in LAYOUTS[dist.get_world_size()].values():
        mesh = mesh_of(layout)
        state = {name: face(torch.zeros(SHAPE), mesh, layout.placements, requires_grad=True) for name in saved}
        dcp.load(state, checkpoint_id=path)
        for name, whole in saved.items():
            expected = face(whole, mesh, layout.placements)
            assert torch.equal(state[name].to_local(), expected.to_local()), (name, layout)
    unsharded = {name: torch.zeros(SHAPE) for name in saved}
    dcp.load(unsharded, checkpoint_id=path)
    assert all(torch.equal(unsharded[name], whole) for name, whole in saved.items())


@pytest.mark.parametrize(("saving", "loading"), [(1, 4), (2, 3), (2, 4), (3, 4), (4, 1), (4, 2), (4, 3), (4, 4)])
def test_a_checkpoint_of_any_placement_is_read_at_any_other(saving: int, loading: int, tmp_path: Path) -> None:
    run_distributed(saving, save, tmp_path)
    run_distributed(loading, load, tmp_path, saving)


def saved_bytes(path: Path) -> None:
    layout = LAYOUTS[4]["hybrid"]
    dcp.save({"x": face(values((600, 40)), mesh_of(layout), (Replicate(), ragged(0, 100, 600)))}, checkpoint_id=path)


def test_copies_are_written_once(tmp_path: Path) -> None:
    run_distributed(4, saved_bytes, tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.distcp"))
    assert 600 * 40 * 4 <= size < 1.2 * 600 * 40 * 4
