"""What a unit keeps between its forward and its backward: nothing, all, or its part of a smaller group's weights."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import PATHS, Wrapper, check_equal, check_named, check_nothing_gathered, reference_gradients
from models import WIDTH, Block, build, vectors
from strategies import Wrapped
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_fn
from fsdp_fn.module import FsdpModule
from harness import run_distributed, run_expecting_error

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def network(inside: str | None = None) -> nn.Sequential:
    return nn.Sequential(Block(inside), Block(inside), nn.Linear(WIDTH, 3))


def compare(path: str, kept: bool | int, inside: str | None) -> None:
    plain = build(lambda: network(inside))
    policy = fsdp_fn.SchedulePolicy(reshard_after_forward=kept)
    model = PATHS[path](copy.deepcopy(plain), (Block,), policy=policy)
    for step in range(3):
        x = vectors(10 * step + dist.get_rank(), requires_grad=True)
        again = vectors(10 * step + dist.get_rank() + 5, requires_grad=True)
        for one in (model, plain):
            with torch.no_grad():
                one(x)  # an evaluation in between changes nothing
            # Two forwards before either backward, backward in both orders.
            first, second = one(x).square().sum(), one(again).square().sum()
            for loss in (first, second) if step % 2 else (second, first):
                loss.backward()
        check_named(model.gradients(), reference_gradients(plain), f"gradient in step {step}", **CLOSE)
        check_nothing_gathered()
        model.step(0.05)
        mean = reference_gradients(plain)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter -= 0.05 * mean[name]
                parameter.grad = None


@pytest.mark.parametrize("inside", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kept", [False, 1, 2, 4])
def test_training_is_the_same_whatever_is_kept(path: str, kept: bool | int, inside: str | None) -> None:
    run_distributed(4, compare, path, kept, inside)


def stale_part() -> None:
    """What a forward kept whose graph was dropped is not what a later step's recomputation reads."""
    plain = build(lambda: network("reentrant"))
    for kept in (True, False, 2, 4):
        policy = fsdp_fn.SchedulePolicy(reshard_after_forward=kept)
        model = Wrapped.of(copy.deepcopy(plain), (Block,), policy=policy)
        model.module(vectors(1))  # its graph is dropped
        with torch.no_grad():
            for parameter in model.module.parameters():
                parameter.mul_(0.5)
        reference = copy.deepcopy(plain)
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.mul_(0.5)
        for one in (model.module, reference):
            x = vectors(dist.get_rank(), requires_grad=True)
            torch.utils.checkpoint.checkpoint(one, x, use_reentrant=True).square().sum().backward()
        for key, grad in reference_gradients(reference).items():
            assert grad is not None
            check_equal(model.gradients()[key], grad, f"kept {kept}: {key}", **CLOSE)


def test_a_part_that_was_kept_is_never_taken_for_weights_of_a_later_step() -> None:
    run_distributed(4, stale_part)


def count_gathers(kept: bool | int) -> dict[str, tuple[int, int]]:
    """Bytes that this rank's gathers of the first block moved in forward and in backward, and bytes kept between."""
    policy = fsdp_fn.SchedulePolicy(reshard_after_forward=kept, release=fsdp_fn.Release.FREE)
    model = Wrapped.of(build(network), (Block,), policy=policy)
    model.module(vectors(0)).sum().backward()
    with fsdp_fn.record_events(model.module) as log:
        loss = model.module(vectors(0)).sum()
        between = sum(
            unit.weights.buffer.allocated + (unit.weights._kept._part.allocated if unit.weights._kept else 0)
            for unit in (m._fsdp_unit for m in model.module.modules() if isinstance(m, FsdpModule))
        )
        loss.backward()
    moved: Counter[str] = Counter()
    for event in log:
        if event.action is fsdp_fn.Action.GATHER:
            moved[event.phase.value] += event.transferred
    check_nothing_gathered()
    return {"moved": (moved["forward"], moved["backward"]), "between": (between, 0)}


def test_traffic_and_memory_are_what_was_asked_for() -> None:
    released, held, of_one, of_two, of_four = (
        run_distributed(4, count_gathers, kept)[0] for kept in (True, False, 1, 2, 4)
    )
    whole = released["moved"][0]
    assert whole > 0
    assert released == {"moved": (whole, whole), "between": (0, 0)}
    assert held == {"moved": (whole, 0), "between": (whole, 0)}
    assert of_one["moved"] == (whole, 0)
    assert of_two["moved"] == (whole, whole), "within a group of two"
    # Each flat buffer is aligned, so a part may take a little more than its share.
    assert whole / 2 <= of_two["between"][0] <= whole * 0.75
    assert whole / 4 <= of_four["between"][0] <= whole * 0.5


def groups_are_found_again() -> int:
    policy = fsdp_fn.SchedulePolicy(reshard_after_forward=2)
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(3):
        model = Wrapper(build(network), (Block,), policy=policy)
        model(vectors(0)).sum().backward()
    return len(dist.distributed_c10d._world.pg_map) - before


def test_units_share_one_smaller_group() -> None:
    # One group for the mesh of each of nine wraps is torch's; ours is one.
    assert run_distributed(4, groups_are_found_again) == [1] * 4


def wrap(kept: int, placements: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    policy = fsdp_fn.SchedulePolicy(reshard_after_forward=kept)
    fsdp_fn.fully_shard(nn.Linear(4, 4), mesh, placements=placements, policy=policy)


@pytest.mark.parametrize(
    ("world_size", "kept", "placements", "said"),
    [
        (3, 2, fsdp_fn.zero3(), "expected a divisor of the 3 ranks of axis 'data'"),
        (2, 4, fsdp_fn.zero3(), "expected a divisor of the 2 ranks"),
        (2, 2, fsdp_fn.ddp(), "shards parameters over no axis"),
        (2, 2, fsdp_fn.zero2(), "shards parameters over no axis"),
    ],
)
def test_a_group_that_does_not_divide_is_refused_on_every_rank(
    world_size: int, kept: int, placements: Any, said: str
) -> None:
    for error in run_expecting_error(world_size, wrap, kept, placements):
        assert isinstance(error, ValueError)
        assert said in str(error)


def inner_axis_is_grouped() -> None:
    """Of two axes it is the inner one whose neighbours keep a part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    policy = fsdp_fn.SchedulePolicy(reshard_after_forward=2)
    plain = build(network)
    for strategy in (fsdp_fn.hsdp("outer", "inner"), (fsdp_fn.zero3(axis="outer"), fsdp_fn.zero3(axis="inner"))):
        model = Wrapped.of(copy.deepcopy(plain), (Block,), mesh=mesh, placements=strategy, policy=policy)
        x = vectors(dist.get_rank())
        model.module(x).square().sum().backward()
        plain(x).square().sum().backward()
        for key, grad in reference_gradients(plain).items():
            assert grad is not None
            check_equal(model.gradients()[key], grad, key, **CLOSE)
        plain.zero_grad()


def test_a_part_is_kept_within_the_innermost_axis() -> None:
    run_distributed(4, inner_axis_is_grouped)
