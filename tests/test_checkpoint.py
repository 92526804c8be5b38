"""Checkpoints of both worlds: resumed training is as if it had never stopped, at any world size."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_worlds import WORLDS, Net, Wrapped, mesh_of_all
from torch import nn

import fsdp_fn
from fsdp_fn import checkpoint_files as files
from fsdp_fn.checkpoint import (
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    remove_old_checkpoints,
    save_checkpoint,
)
from harness import DistributedFailure, run_distributed

# --- resuming -----------------------------------------------------------------------------------------------


def save_after_training(root: Path, world: str, kind: str) -> list[float]:
    job = WORLDS[world](1, kind)
    job.train(0, 3)
    path = save_checkpoint(root, 3, job.model, job.optimizer, extra={"note": "three"})
    assert path == root / "step-00000003"
    assert latest_checkpoint(root) == path
    return job.train(3, 3)


def resume(root: Path, world: str, kind: str) -> list[float]:
    path = latest_checkpoint(root)
    assert path is not None
    job = WORLDS[world](2, kind)
    job.train(50, 1)
    found = job.load(path)
    assert found.step == 3
    assert found.extra == {"note": "three"}
    assert job.whole()["calls"] == 3
    return job.train(3, 3)


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("loading", WORLDS)
@pytest.mark.parametrize("saving", WORLDS)
def test_training_resumed_in_either_world_goes_on_bit_for_bit(
    saving: str, loading: str, kind: str, tmp_path: Path
) -> None:
    expected = run_distributed(2, save_after_training, tmp_path, saving, kind)
    assert run_distributed(2, resume, tmp_path, loading, kind) == expected


@pytest.mark.parametrize(("saving", "loading"), [(1, 3), (2, 4), (3, 2), (4, 1)])
@pytest.mark.parametrize("world", WORLDS)
def test_training_resumes_at_another_world_size(world: str, saving: int, loading: int, tmp_path: Path) -> None:
    expected = run_distributed(saving, save_after_training, tmp_path, world, "adamw")[0]
    for losses in run_distributed(loading, resume, tmp_path, world, "adamw"):
        assert losses == pytest.approx(expected, rel=1e-5)


def load_into_fresh(root: Path, world: str) -> list[float]:
    job = WORLDS[world](2)
    job.load(root / "step-00000003")
    return job.train(3, 3)


@pytest.mark.parametrize("world", WORLDS)
def test_an_optimizer_that_made_no_step_yet_resumes_as_well(world: str, tmp_path: Path) -> None:
    expected = run_distributed(2, save_after_training, tmp_path, world, "adamw")
    assert run_distributed(2, load_into_fresh, tmp_path, world) == expected


def check_learning_rate(root: Path) -> float:
    job = Wrapped(1)
    job.train(0, 1)
    job.optimizer.param_groups[0]["lr"] = 0.125
    path = save_checkpoint(root, 1, job.model, job.optimizer)
    other = Wrapped(2)
    other.load(path)
    return float(other.optimizer.param_groups[0]["lr"])


def test_a_torch_optimizer_gets_its_hyperparameters_back(tmp_path: Path) -> None:
    assert run_distributed(2, check_learning_rate, tmp_path) == [0.125, 0.125]


# --- names and files ----------------------------------------------------------------------------------------


def names_on_disk(root: Path, world: str) -> set[str]:
    job = WORLDS[world](1)
    job.train(0, 1)
    path = save_checkpoint(root / world, 1, job.model, job.optimizer)
    return set(dcp.FileSystemReader(path).read_metadata().state_dict_metadata)


def test_both_worlds_store_plain_names(tmp_path: Path) -> None:
    model = Net(1)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    expected = {f"model.{name}" for name in model.state_dict() if name != "head.weight"}
    for name in trained:
        expected |= {f"optimizer.state.{name}.{slot}" for slot in ("exp_avg", "exp_avg_sq", "step")}
    for found in run_distributed(2, names_on_disk, tmp_path, "wrapper"):
        assert found == expected
    for found in run_distributed(2, names_on_disk, tmp_path, "functional"):
        assert found == expected | {"model.scale"}


def check_plain_reader(root: Path) -> None:
    job = Wrapped(1)
    job.train(0, 2)
    path = save_checkpoint(root, 2, job.model, job.optimizer)
    plain = Net(3)
    state = {f"model.{name}": value for name, value in plain.state_dict().items() if name != "head.weight"}
    dcp.load(state, checkpoint_id=path)
    for name, value in job.whole().items():
        if name != "head.weight":
            assert torch.equal(plain.state_dict()[name], value)


def test_an_unwrapped_model_reads_a_checkpoint_by_torch_alone(tmp_path: Path) -> None:
    run_distributed(2, check_plain_reader, tmp_path)


def check_weights_only(root: Path, saving: str, loading: str) -> None:
    job = WORLDS[saving](1)
    job.train(0, 2)
    path = save_checkpoint(root, 2, job.model)
    other = WORLDS[loading](2)
    found = load_checkpoint(path, other.model)
    assert found.optimizer is None
    other.model = found.model
    expected, got = job.whole(), other.whole()
    for name in got.keys() & expected.keys() - {"scale"}:
        assert torch.equal(got[name], expected[name]), name
    with pytest.raises(CheckpointError, match="saved without an optimizer"):
        load_checkpoint(path, other.model, other.optimizer)


@pytest.mark.parametrize("loading", WORLDS)
@pytest.mark.parametrize("saving", WORLDS)
def test_a_model_is_saved_and_loaded_without_an_optimizer(saving: str, loading: str, tmp_path: Path) -> None:
    run_distributed(3, check_weights_only, tmp_path, saving, loading)


def save_steps(root: Path, steps: list[int]) -> None:
    job = Wrapped(1)
    for step in steps:
        save_checkpoint(root, step, job.model)
    remove_old_checkpoints(root, 2)


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    run_distributed(2, save_steps, tmp_path, [1, 2, 10])
    assert [path.name for path in files.published(tmp_path)] == ["step-00000002", "step-00000010"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000010"]


def test_partial_folders_are_never_found_and_go_with_the_next_save(tmp_path: Path) -> None:
    files.begin(tmp_path, 5)
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / ".step-00000004.removed").mkdir()
    (tmp_path / "notes").mkdir()
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "nowhere") is None
    run_distributed(2, save_steps, tmp_path, [6])
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000006"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step-00000006", "step-00000009"]


def check_no_dimension(root: Path) -> None:
    class Scalar(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(value))
            self.weight = nn.Parameter(torch.ones(3, 2))

    saved = fsdp_fn.shard(Scalar(4.0), mesh_of_all())[1]
    fresh = fsdp_fn.shard(Scalar(1.0), mesh_of_all())[1]
    found = load_checkpoint(save_checkpoint(root, 1, saved), fresh)
    gathered = fsdp_fn.gather_planes(found.model.units[""], fsdp_fn.Phase.FORWARD)
    assert gathered.weights()["scale"] == 4.0


def test_a_functional_parameter_without_dimensions_is_stored_by_its_owner(tmp_path: Path) -> None:
    run_distributed(3, check_no_dimension, tmp_path)


class Counting(nn.Module):
    """A module with extra state."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.arange(15.0).view(5, 3) / 10 + count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def check_factored_state(root: Path) -> None:
    def job(count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = fsdp_fn.fully_shard(Counting(count), mesh=mesh_of_all())
        return model, torch.optim.Adafactor(model.parameters(), lr=0.1)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        model(torch.ones(2, 5)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model.weight.full_tensor()

    model, optimizer = job(1)
    train(model, optimizer)
    path = save_checkpoint(root, 1, model, optimizer)
    expected = train(model, optimizer)
    fresh, fresh_optimizer = job(2)
    load_checkpoint(path, fresh, fresh_optimizer)
    assert fresh.count == 1
    assert torch.equal(train(fresh, fresh_optimizer), expected)


def test_extra_state_and_optimizer_state_of_other_shapes_are_kept(tmp_path: Path) -> None:
    run_distributed(2, check_factored_state, tmp_path)


def save_and_die(root: Path) -> None:
    job = Wrapped(1)
    save_checkpoint(root, 1, job.model, job.optimizer)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    save_checkpoint(root, 2, job.model, job.optimizer)


def test_a_rank_that_is_killed_leaves_the_last_checkpoint_whole(tmp_path: Path) -> None:
    with pytest.raises(DistributedFailure):
        run_distributed(2, save_and_die, tmp_path)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    run_distributed(2, resume_at_step_one, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def resume_at_step_one(root: Path) -> None:
    job = Wrapped(2)
    assert job.load(root / "step-00000001").step == 1
    save_checkpoint(root, 2, job.model, job.optimizer)


def check_unused_parameters(root: Path) -> None:
    def job(used: list[int]) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ModuleList(nn.Linear(3, 4) for _ in range(3))
        for layer in model:
            fsdp_fn.fully_shard(layer, mesh=mesh_of_all())
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
        for index in used:
            model[index](torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = job([0, 1])
    path = save_checkpoint(root, 1, model, optimizer)
    fresh, fresh_optimizer = job([1, 2])
    load_checkpoint(path, fresh, fresh_optimizer)
    for ours, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())
        assert fresh_optimizer.state[ours].keys() == optimizer.state[theirs].keys()
    assert fresh_optimizer.param_groups[0]["lr"] == 0.5


def test_state_is_there_for_the_parameters_that_were_stepped_and_no_others(tmp_path: Path) -> None:
    run_distributed(2, check_unused_parameters, tmp_path)
