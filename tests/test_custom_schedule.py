"""The example of a schedule of one's own: plain PyTorch's numbers, and an overlap that is real."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import fsdp_fn
from fsdp_fn.groups import default_mesh
from harness import run_distributed

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "docs" / "examples" / "custom_schedule.py"
sys.path.insert(0, str(SCRIPT.parent))

import custom_schedule  # noqa: E402


def plain_gradients(weights: dict[str, dict[str, torch.Tensor]], ranks: int) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of the whole batch, unsharded."""
    inputs, targets = custom_schedule.make_batch(ranks)
    leaves = [tensor.clone().requires_grad_() for unit in weights.values() for tensor in unit.values()]
    hidden = torch.relu(F.linear(inputs, leaves[0], leaves[1]))
    loss = F.cross_entropy(F.linear(hidden, leaves[2], leaves[3]), targets)
    return loss.item(), list(torch.autograd.grad(loss, leaves))


def own_part() -> tuple[custom_schedule.Network, torch.Tensor, torch.Tensor]:
    mesh = default_mesh("cpu")
    axis = fsdp_fn.axis_of(mesh)
    rows = slice(axis.rank * custom_schedule.ROWS_PER_RANK, (axis.rank + 1) * custom_schedule.ROWS_PER_RANK)
    inputs, targets = custom_schedule.make_batch(axis.size)
    return custom_schedule.make_network(mesh, torch.device("cpu")), inputs[rows], targets[rows]


def owned_parts(units: list[tuple[fsdp_fn.UnitState, fsdp_fn.Buffer]]) -> list[torch.Tensor]:
    return [buffer.owned(index) for unit, buffer in units for index in range(len(unit.layout.tensors))]


def gradients_of_one_step() -> tuple[float, list[torch.Tensor]]:
    network, inputs, targets = own_part()
    loss, reduced = custom_schedule.gradients(network, inputs, targets, custom_schedule.Trace())
    dist.all_reduce(loss)
    return loss.item(), owned_parts([(unit, reduced[unit.name]) for unit in (network.first, network.second)])


def assert_close(parts: list[list[torch.Tensor]], whole: list[torch.Tensor]) -> None:
    for index, expected in enumerate(whole):
        torch.testing.assert_close(torch.cat([part[index] for part in parts]), expected, rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_plain_pytorch_on_the_whole_batch(world_size: int) -> None:
    loss, expected = plain_gradients(custom_schedule.make_weights(), world_size)
    results = run_distributed(world_size, gradients_of_one_step)
    assert [total / world_size for total, _ in results] == pytest.approx([loss] * world_size, rel=1e-5)
    assert_close([parts for _, parts in results], expected)


def weights_after(steps: int, learning_rate: float) -> list[torch.Tensor]:
    network, inputs, targets = own_part()
    for _ in range(steps):
        network, _ = custom_schedule.train_step(network, inputs, targets, learning_rate, custom_schedule.Trace())
    assert network.first.version == network.second.version == steps
    return owned_parts([(unit, unit.main) for unit in (network.first, network.second)])


def test_weights_after_five_steps_are_those_of_plain_pytorch() -> None:
    weights = custom_schedule.make_weights()
    flat = [tensor for unit in weights.values() for tensor in unit.values()]
    for _ in range(5):
        _, grads = plain_gradients(weights, 2)
        for tensor, grad in zip(flat, grads, strict=True):
            tensor.sub_(0.1 * grad)
    assert_close(run_distributed(2, weights_after, 5, 0.1), flat)


# --- the schedule, seen from outside it ---------------------------------------------------------------------


@contextmanager
def spied(happened: list[str]) -> Iterator[None]:
    """Note when each primitive of the library is called, and when its result is waited for."""

    def spy(what: str, primitive: Callable[..., Any], unit_at: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            name = args[unit_at].name
            happened.append(f"start {what} {name}")
            pending = primitive(*args, **kwargs)

            def wait() -> Any:
                happened.append(f"wait {what} {name}")
                return pending.wait()

            return fsdp_fn.Pending(wait)

        return call

    with (
        mock.patch.object(fsdp_fn, "gather_planes", spy("gather", fsdp_fn.gather_planes, 0)),
        mock.patch.object(fsdp_fn, "reduce_scatter", spy("reduce", fsdp_fn.reduce_scatter, 1)),
    ):
        yield


def what_one_step_does() -> list[str]:
    network, inputs, targets = own_part()
    happened: list[str] = []

    def noted(name: str, stage: custom_schedule.Stage) -> custom_schedule.Stage:
        def compute(weights: custom_schedule.Weights, value: torch.Tensor) -> torch.Tensor:
            happened.append(f"compute {name}")
            return stage(weights, value)

        return compute

    watched = dataclasses.replace(
        network,
        first_stage=noted("first", network.first_stage),
        second_stage=noted("second", network.second_stage),
    )
    with spied(happened):
        custom_schedule.gradients(watched, inputs, targets, custom_schedule.Trace())
    return happened


def test_the_next_weights_and_the_last_gradients_travel_while_a_unit_computes() -> None:
    for happened in run_distributed(2, what_one_step_does):
        assert happened == [
            "start gather first",
            "wait gather first",
            "start gather second",
            "compute first",
            "wait gather second",
            "start gather first",
            "compute second",
            "start reduce second",
            "wait gather first",
            "compute first",
            "start reduce first",
            "wait reduce second",
            "wait reduce first",
        ]


def bytes_alive_at_each_stage() -> list[set[str]]:
    """Which units' full weights are in memory while each stage computes."""
    network, inputs, targets = own_part()
    alive: dict[str, list[Any]] = {"first": [], "second": []}
    seen: list[set[str]] = []
    gather: Callable[..., Any] = fsdp_fn.gather_planes

    def watched_gather(unit: fsdp_fn.UnitState, *args: Any, **kwargs: Any) -> Any:
        pending = gather(unit, *args, **kwargs)

        def wait() -> fsdp_fn.Gathered:
            gathered = pending.wait()
            flats = gathered.planes[fsdp_fn.PlaneKind.DENSE].segments
            alive[unit.name] += [
                torch.multiprocessing.reductions.StorageWeakRef(flat.untyped_storage()) for flat in flats
            ]
            return gathered

        return fsdp_fn.Pending(wait)

    def noted(stage: custom_schedule.Stage) -> custom_schedule.Stage:
        def compute(weights: custom_schedule.Weights, value: torch.Tensor) -> torch.Tensor:
            seen.append({name for name, refs in alive.items() if any(not ref.expired() for ref in refs)})
            return stage(weights, value)

        return compute

    watched = dataclasses.replace(
        network, first_stage=noted(network.first_stage), second_stage=noted(network.second_stage)
    )
    with mock.patch.object(fsdp_fn, "gather_planes", watched_gather):
        custom_schedule.gradients(watched, inputs, targets, custom_schedule.Trace())
    return seen


def test_full_weights_are_gone_once_their_unit_has_computed() -> None:
    assert run_distributed(2, bytes_alive_at_each_stage) == [[{"first"}, {"second"}, {"first"}]] * 2


# --- as a user runs it --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_the_program_prints_its_trace_and_learns(processes: int) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"] if processes == 2 else []
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    outside = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=120,
        env=outside | environment,
    )
    assert done.returncode == 0, done.stderr
    assert f"rank 0 of {processes}" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    started, computed = lines.index(["start", "gather", "second"]), lines.index(["compute", "first"])
    assert started < computed < lines.index(["wait", "for", "gather", "second"])
    first, last = (float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout))
    assert last < 0.6 * first
