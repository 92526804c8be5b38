"""Checkpoints that fail: every rank says which and why; model, optimizer and disk are as they were."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_worlds import WORLDS, Functional, Net, Wrapped, mesh_of_all
from torch import nn

import fsdp_fn
from fsdp_fn.checkpoint import CheckpointError, load_checkpoint, remove_old_checkpoints, save_checkpoint
from harness import run_distributed, run_expecting_error


def save_with_a_full_disk(root: Path) -> None:
    job = Wrapped(1)
    save_checkpoint(root, 1, job.model, job.optimizer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, limits[1]))
    try:
        save_checkpoint(root, 2, job.model, job.optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_rank_that_cannot_write_fails_the_save_on_every_rank_and_leaves_the_last_one_whole(
    tmp_path: Path,
) -> None:
    for error in run_expecting_error(3, save_with_a_full_disk, tmp_path):
        assert isinstance(error, CheckpointError)
        assert "saving step 2" in str(error)
        assert "rank 1: OSError" in str(error) or "rank 1: RuntimeError" in str(error)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    run_distributed(3, load_weights, tmp_path / "step-00000001", 7)


def load_weights(path: Path, width: int) -> None:
    load_checkpoint(path, Wrapped(2, width=width).model)


def save_twice(root: Path) -> None:
    job = Functional(1)
    save_checkpoint(root, 1, job.model)
    save_checkpoint(root, 1, job.model)


def test_a_step_that_is_there_already_is_not_overwritten(tmp_path: Path) -> None:
    for error in run_expecting_error(2, save_twice, tmp_path):
        assert isinstance(error, CheckpointError)
        assert "is there already" in str(error)


def save_to_a_file(root: Path) -> None:
    save_checkpoint(root, 1, Wrapped(1).model)


def test_a_root_that_is_a_file_is_named_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for error in run_expecting_error(2, save_to_a_file, tmp_path / "file"):
        assert isinstance(error, CheckpointError)
        assert "rank 0: FileExistsError" in str(error)


def save_with_unpicklable_extra(root: Path) -> None:
    save_checkpoint(root, 1, Wrapped(1).model, extra={"function": lambda: None})


def test_extra_that_cannot_be_pickled_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    for error in run_expecting_error(2, save_with_unpicklable_extra, tmp_path):
        assert isinstance(error, CheckpointError)
        assert "rank 0" in str(error)
    assert not list(tmp_path.iterdir())


def load_what_does_not_fit(root: Path, world: str, damage: str, message: str) -> None:
    saved = Wrapped(1, "sgd" if damage == "optimizer" else "adamw")
    saved.train(0, 1)
    path = save_checkpoint(root, 1, saved.model, saved.optimizer)
    other = WORLDS[world](2, width=9 if damage == "shape" else 7)
    other.train(0, 1)
    if dist.get_rank() == 0:
        if damage == "missing":
            shutil.rmtree(path)
        elif damage == "truncated":
            data = path / "__1_0.distcp"
            data.write_bytes(data.read_bytes()[:-100])
        elif damage == "lost file":
            (path / "__1_0.distcp").unlink()
        elif damage == "no manifest":
            (path / "checkpoint.json").unlink()
    dist.barrier()
    before = {name: value.clone() for name, value in other.whole().items()}
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(path, other.model, other.optimizer)
    for name, value in other.whole().items():
        assert torch.equal(value, before[name])
    other.train(1, 1)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "is not a checkpoint: there is no such folder"),
        ("no manifest", "is not a checkpoint: it has no"),
        ("truncated", "rank 0: .* is damaged: __1_0.distcp has"),
        ("lost file", "rank 0: .* is damaged: __1_0.distcp is missing"),
        (
            "shape",
            r"tensor 'embedding.weight' is \(5, 7\) of torch.float32 in the checkpoint, expected \(5, 9\)",
        ),
        ("optimizer", "optimizer state '.*exp_avg' is not in the checkpoint"),
    ],
)
def test_what_does_not_fit_is_named_on_every_rank_and_changes_nothing(
    damage: str, message: str, world: str, tmp_path: Path
) -> None:
    run_distributed(2, load_what_does_not_fit, tmp_path, world, damage, message)


class Other(nn.Module):
    def __init__(self, names: list[str], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.ones(3, 2, dtype=dtype)))

    def forward(self) -> torch.Tensor:
        return sum((parameter.sum() for parameter in self.parameters()), torch.zeros(()))


def load_another_model(root: Path, functional: bool) -> None:
    def made(*args: Any) -> Any:
        model, mesh = Other(*args), mesh_of_all()
        return fsdp_fn.shard(model, mesh)[1] if functional else fsdp_fn.fully_shard(model, mesh=mesh)

    path = save_checkpoint(root, 1, made(["a", "b"]))
    for args, message in (
        ((["a", "b", "c"],), "tensor 'c' is not in the checkpoint"),
        ((["a"],), "tensor 'b' is in the checkpoint, but .* has none of that name"),
        (
            (["a", "b"], torch.float64),
            r"tensor 'a' is \(3, 2\) of torch.float32 .*, expected \(3, 2\) of torch.float64",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(path, made(*args))


@pytest.mark.parametrize("functional", [False, True])
def test_a_checkpoint_of_another_model_is_refused_naming_the_tensor(functional: bool, tmp_path: Path) -> None:
    run_distributed(2, load_another_model, tmp_path, functional)


def misuse(root: Path) -> None:
    wrapped, functional = Wrapped(1), Functional(1)
    with pytest.raises(TypeError, match="no sharded parameter"):
        save_checkpoint(root, 1, Net(1))
    with pytest.raises(TypeError, match=r"expected torch\.optim\.Optimizer"):
        save_checkpoint(root, 1, wrapped.model, functional.optimizer)
    with pytest.raises(TypeError, match="expected OptimizerState"):
        save_checkpoint(root, 1, functional.model, wrapped.optimizer)
    with pytest.raises(ValueError, match="not in the model"):
        save_checkpoint(root, 1, wrapped.model, torch.optim.SGD(Net(1).parameters(), lr=0.1))
    with pytest.raises(ValueError, match="at least 0"):
        save_checkpoint(root, -1, wrapped.model)
    with pytest.raises(ValueError, match="at least 1"):
        remove_old_checkpoints(root, 0)


def test_misuse_is_refused_by_name(tmp_path: Path) -> None:
    run_distributed(2, misuse, tmp_path)
