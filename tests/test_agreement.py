"""Ranks that come to different units are told so: no gradient of one expert ever meets another's, and nothing hangs.

After pytorch/pytorch#158719 and deepspeedai/DeepSpeed#6557: where shapes agree, what different ranks sent for different
modules was added together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import PATHS, Wrapper
from models import Block, build, vectors
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_fn
from fsdp_fn.agreement import _registry
from harness import run_distributed, run_expecting_error

PATIENT = fsdp_fn.SchedulePolicy(divergence_timeout=2.0)


class Expert(nn.Linear):
    pass


class Experts(nn.Module):
    """Equal shapes, so that no collective would notice."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.ModuleList(Expert(4, 4, bias=False) for _ in range(3))
        self.head = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
        return self.e[k](x) * self.head


def step(model: Any, k: int) -> None:
    model(torch.full((1, 4), dist.get_rank() + 1.0), k).sum().backward()


@contextmanager
def as_if_alone() -> Iterator[None]:
    """A rank that raises ends, and with it its connections: those who wait for it in a collective hear of that."""
    try:
        yield
    except fsdp_fn.RankDivergence:
        dist.destroy_process_group()
        raise


@as_if_alone()
def choose_by_rank(path: str, same_first: int) -> float:
    """After so many steps in which all ranks choose alike, each rank chooses for itself."""
    model = PATHS[path](build(Experts), (Expert,), policy=PATIENT)
    for number in range(same_first):
        step(model, number % 2)
        step(model, number % 2)
    step(model, dist.get_rank() % 3)
    return 0.0


@pytest.mark.parametrize("same_first", [0, 1, 3])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_experts_chosen_by_rank_are_refused(world_size: int, path: str, same_first: int) -> None:
    started = time.monotonic()
    errors = run_expecting_error(world_size, choose_by_rank, path, same_first, timeout=50)
    assert time.monotonic() - started < 40
    told = [error for error in errors if isinstance(error, fsdp_fn.RankDivergence)]
    assert told, errors
    assert all("ranks run different units" in str(error) and "'e." in str(error) for error in told)
    # The others fail with the group, or are told as well: none returns a number.
    assert all(error is not None for error in errors), errors


def choose_without_a_root(way: str) -> None:
    experts = [fsdp_fn.fully_shard(expert, policy=PATIENT) for expert in build(Experts).e]
    x = torch.ones(1, 4)
    if way == "evaluation":
        with torch.no_grad():
            experts[dist.get_rank()](x)
    else:
        experts[dist.get_rank()](x).sum().backward()


@pytest.mark.parametrize("way", ["training", "evaluation"])
def test_so_they_are_where_no_module_around_them_is_wrapped(way: str) -> None:
    for rank, error in enumerate(run_expecting_error(2, choose_without_a_root, way, timeout=50)):
        assert isinstance(error, fsdp_fn.RankDivergence)
        # None has a path in a wrapped module, and so a name of its own.
        what = "the gather for forward of the root unit"
        assert f"rank {rank} came to {what}; rank {1 - rank} came to {what}, another one of that name" in str(error)


@as_if_alone()
def leave_early_on_one_rank(same_first: int) -> None:
    model = Wrapper(build(Experts), (Expert,), policy=PATIENT)
    for _ in range(same_first):
        step(model, 0)
    for _ in range(2):
        loss = model(torch.ones(1, 4), 0).sum()
        if dist.get_rank() == 0:
            loss.backward()


@pytest.mark.parametrize("same_first", [0, 2])
def test_a_rank_that_skips_its_backward_is_refused(same_first: int) -> None:
    errors = run_expecting_error(2, leave_early_on_one_rank, same_first, timeout=50)
    assert any(isinstance(error, fsdp_fn.RankDivergence) for error in errors), errors


def vary_alike(path: str) -> None:
    """Whatever all ranks do alike is right: other experts, evaluation, unused backward, exceptions."""
    model = PATHS[path](build(Experts), (Expert,), policy=PATIENT)
    for number in range(6):
        step(model, number % 3)
        with torch.no_grad():
            model(torch.ones(1, 4), 2)
        if number % 2:
            model(torch.ones(1, 4), 1)  # a graph without a backward
        with pytest.raises(IndexError):
            model(torch.ones(1, 4), 7)
        first, second = model(torch.ones(1, 4), 0), model(torch.ones(1, 4), 1)
        (second if number % 2 else first).sum().backward()
    model.check_at_rest()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ranks_that_change_alike_go_on(world_size: int, path: str) -> None:
    run_distributed(world_size, vary_alike, path)


def count_comparisons(path: str) -> int:
    model = PATHS[path](build(lambda: nn.Sequential(Block(), Block(), nn.Linear(7, 3))), (Block,))
    model(vectors()).sum().backward()
    model(vectors()).sum().backward()
    agreement = _registry[tuple(range(dist.get_world_size()))][1]
    first = agreement.compared
    for _ in range(3):
        model(vectors()).sum().backward()
    return agreement.compared - first


@pytest.mark.parametrize("path", PATHS)
def test_a_step_that_does_what_the_last_did_compares_nothing(path: str) -> None:
    assert run_distributed(2, count_comparisons, path) == [0, 0]


def two_models() -> None:
    """Models that take turns, unevenly, on the same ranks."""
    first, second = (Wrapper(build(Experts), (Expert,), policy=PATIENT) for _ in range(2))
    for number in range(4):
        step(first, 0)
        if number % 2:
            (first(torch.ones(1, 4), 0) + second(torch.ones(1, 4), 1)).sum().backward()
        step(second, number % 3)
    first.check_at_rest()
    second.check_at_rest()


def test_several_models_share_what_their_ranks_agree_on() -> None:
    run_distributed(2, two_models)


@as_if_alone()
def take_turns_on_meshes_of_one_group(which: str) -> None:
    """Two models whose meshes differ and whose collectives meet in one process group; then each rank runs another."""
    count = dist.get_world_size()
    if which == "names":
        meshes = [init_device_mesh("cpu", (count,), mesh_dim_names=(name,)) for name in ("data", "dp")]
        first = fsdp_fn.zero3()
    else:
        whole = init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("outer", "inner"))
        meshes, first = [whole, whole["inner"]], fsdp_fn.hsdp("outer", "inner")
    models = [
        fsdp_fn.fully_shard(build(lambda: nn.Linear(4, 4)), mesh, placements=strategy, policy=PATIENT)
        for mesh, strategy in zip(meshes, (first, fsdp_fn.zero3()), strict=True)
    ]
    for _ in range(2):
        for model in models:
            model(torch.ones(1, 4)).sum().backward()
    with torch.no_grad():
        models[dist.get_rank() % 2](torch.ones(1, 4))


@pytest.mark.parametrize(("which", "world_size"), [("names", 2), ("one in the other", 2), ("one in the other", 4)])
def test_meshes_that_share_a_process_group_are_held_against_each_other(which: str, world_size: int) -> None:
    errors = run_expecting_error(world_size, take_turns_on_meshes_of_one_group, which, timeout=50)
    assert any(isinstance(error, fsdp_fn.RankDivergence) for error in errors), errors
    # The others fail with the group, or are told as well: none returns a number.
    assert all(error is not None for error in errors), errors


@as_if_alone()
def clip_on_one_rank() -> None:
    model = Wrapper(build(Experts), (Expert,), policy=PATIENT)
    for _ in range(2):
        step(model, 0)
        fsdp_fn.clip_grad_norm_(model.module, 1.0)
    step(model, 0)
    if dist.get_rank() == 0:
        fsdp_fn.clip_grad_norm_(model.module, 1.0)
    step(model, 0)


def test_a_norm_that_only_some_ranks_take_is_refused() -> None:
    errors = run_expecting_error(2, clip_on_one_rank, timeout=50)
    assert isinstance(errors[1], fsdp_fn.RankDivergence), errors
    assert all(error is not None for error in errors), errors


def come_late() -> None:
    net = fsdp_fn.fully_shard(build(lambda: nn.Linear(4, 4)), policy=PATIENT)
    for _ in range(2):
        net(torch.ones(1, 4)).sum().backward()
    net(torch.ones(1, 4))
    if dist.get_rank() == 1:
        time.sleep(3.0)
    net(torch.ones(1, 4))


def test_a_rank_that_comes_after_the_others_gave_up_is_told_and_sends_nothing() -> None:
    waited, late = run_expecting_error(2, come_late, timeout=50)
    assert "rank 1 did not come here within 2 s" in str(waited), waited
    assert isinstance(late, fsdp_fn.RankDivergence), late
    assert "rank 0 waited 2 s for the others, and waits no more" in str(late), late


@as_if_alone()
def write_on_one_rank(strategy: fsdp_fn.Placements) -> None:
    """Weights at rest are made again where they changed: each rank sees its own writes."""
    net = fsdp_fn.fully_shard(build(lambda: nn.Linear(4, 4)), placements=strategy, policy=PATIENT)
    for _ in range(2):
        net(torch.ones(1, 4)).sum().backward()
    fsdp_fn.mark_weights_changed(net)
    net(torch.ones(1, 4))
    if dist.get_rank() == 1:
        with torch.no_grad():
            net.weight._local_tensor.mul_(2)
    net(torch.ones(1, 4)).sum().backward()


@pytest.mark.parametrize("strategy", [fsdp_fn.zero1(), fsdp_fn.zero2()], ids=["zero1", "zero2"])
def test_ranks_that_gather_changed_weights_are_not_taken_for_others(strategy: fsdp_fn.Placements) -> None:
    errors = run_expecting_error(2, write_on_one_rank, strategy, timeout=50)
    assert any("changed weights" in str(error) for error in errors if isinstance(error, fsdp_fn.RankDivergence)), errors
