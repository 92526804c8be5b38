"""Axes name live groups; a fault or a disagreement on one rank ends on all of them, by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from refusals import refused
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _world

from fsdp_fn.groups import (
    RankFault,
    axes_of,
    axis_of,
    default_mesh,
    group_over,
    mesh_device,
    mesh_over,
    process_group,
    raise_together,
    strategy_on,
    subgroup_of,
)
from fsdp_fn.placement import Placements, Replicate, hsdp, zero3
from fsdp_fn.state import Axis
from harness import run_distributed, run_expecting_error

CPU = torch.device("cpu")


def own_axis() -> tuple[Axis, str]:
    mesh = default_mesh("cpu")
    assert mesh_device(mesh) == CPU
    axis = axis_of(mesh)
    return axis, process_group(axis).group_name


def test_the_default_mesh_is_one_axis_over_all_ranks(world_size: int) -> None:
    for rank, (axis, group) in enumerate(run_distributed(world_size, own_axis)):
        assert (axis.name, axis.size, axis.rank, axis.group) == ("data", world_size, rank, group)


def axis_by_name() -> tuple[Axis, int]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    axis = axis_of(mesh["inner"])
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total, group=process_group(axis))
    return axis, int(total)


def test_one_axis_of_a_larger_mesh_is_taken_by_name() -> None:
    found = run_distributed(4, axis_by_name)
    assert [(axis.name, axis.size, axis.rank) for axis, _ in found] == [("inner", 2, rank % 2) for rank in range(4)]
    assert [total for _, total in found] == [1, 1, 5, 5]


def axis_of_two_dimensions() -> Axis:
    return axis_of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")))


def test_a_mesh_of_two_dimensions_is_refused_with_what_to_do() -> None:
    for error in run_expecting_error(4, axis_of_two_dimensions):
        assert isinstance(error, ValueError)
        assert "(2, 2)" in str(error)
        assert "by name" in str(error)


def axis_of_a_mesh_elsewhere() -> Axis:
    return axis_of(DeviceMesh("cpu", [0, 1], mesh_dim_names=("data",)))


def test_a_rank_outside_the_mesh_is_refused_and_the_others_are_served() -> None:
    *inside, outside = run_expecting_error(3, axis_of_a_mesh_elsewhere)
    assert inside == [None, None]
    assert isinstance(outside, ValueError)
    assert "rank 2 is not part of" in str(outside)


def test_what_is_no_mesh_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a DeviceMesh, got str"):
        axis_of("cpu")  # type: ignore[arg-type]


def test_without_a_process_group_the_default_mesh_says_how_to_start() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="torchrun"):
        default_mesh("cpu")


def groups_that_do_not_fit() -> list[str]:
    axis = axis_of(default_mesh("cpu"))
    wrong = [
        dataclasses.replace(axis, group="gone"),
        dataclasses.replace(axis, size=axis.size + 1),
        dataclasses.replace(axis, rank=axis.rank + 1),
    ]
    messages = []
    for other in wrong:
        with pytest.raises(RuntimeError, match="axis 'data'") as refusal:
            process_group(other)
        messages.append(str(refusal.value))
    return messages


def test_an_axis_that_does_not_fit_this_process_is_refused() -> None:
    for rank, (gone, size, coordinate) in enumerate(run_distributed(2, groups_that_do_not_fit)):
        assert "'gone'" in gone
        assert f"expected rank {rank} of 3" in size
        assert f"expected rank {rank + 1} of 2" in coordinate


# --- agreement ----------------------------------------------------------------------------------------------


def agree(failing: tuple[int, ...], texts: tuple[str, ...]) -> float:
    """Raises together where it must, and otherwise shows that the group still works."""
    axis = axis_of(default_mesh("cpu"))
    error = ValueError(f"'bias' does not fit on rank {axis.rank}") if axis.rank in failing else None
    raise_together(error, (axis,), CPU, texts[axis.rank % len(texts)], "shard(Model)")
    total = torch.tensor(1.0)
    dist.all_reduce(total)
    return total.item()


def recover(failing: tuple[int, ...]) -> float:
    """A second attempt after a fault that all ranks were told of."""
    with pytest.raises((ValueError, RankFault)):
        agree(failing, ("same",))
    return agree((), ("same",))


def test_ranks_that_agree_go_on(world_size: int) -> None:
    assert run_distributed(world_size, agree, (), ("same",)) == [world_size] * world_size


@pytest.mark.parametrize(("world_size", "failing"), [(1, (0,)), (2, (1,)), (3, (0, 2)), (3, (0, 1, 2))])
def test_a_fault_is_raised_where_it_is_and_told_everywhere_else(world_size: int, failing: tuple[int, ...]) -> None:
    for rank, error in enumerate(run_expecting_error(world_size, agree, failing, ("same",))):
        if rank in failing:
            assert type(error) is ValueError
            assert str(error) == f"'bias' does not fit on rank {rank}"
        else:
            assert type(error) is RankFault
            told = [f"rank {other}: ValueError: 'bias' does not fit on rank {other}" for other in failing]
            assert all(report in str(error) for report in told)
            assert f"shard(Model) failed on {len(failing)} of {world_size} ranks" in str(error)


def test_a_fault_counts_more_than_the_disagreement_that_it_causes() -> None:
    first, second = run_expecting_error(2, agree, (1,), ("weight [4]", ""))
    assert type(first) is RankFault
    assert type(second) is ValueError


@pytest.mark.parametrize("texts", [("weight [4]", "weight [5]"), ("weight [4]", "weight [4]", "weight [5]")])
def test_ranks_that_disagree_all_raise_with_both_versions(texts: tuple[str, ...]) -> None:
    for error in run_expecting_error(len(texts), agree, (), texts):
        assert type(error) is ValueError
        assert "Rank 0 has weight [4]" in str(error)
        assert f"rank {len(texts) - 1} has weight [5]" in str(error)


def test_after_a_fault_the_group_works_as_before() -> None:
    assert run_distributed(2, recover, (0,)) == [2.0, 2.0]


# --- smaller groups -----------------------------------------------------------------------------------------


def smaller_groups() -> list[tuple[list[int], int, int]]:
    """Of each size that divides the axis: its ranks, this rank on it, and how many groups it took, twice."""
    axis = axis_of(default_mesh("cpu"))
    found = []
    for size in (1, 2, 4):
        before = len(_world.pg_map)
        smaller = subgroup_of(axis, size)
        made = len(_world.pg_map) - before
        assert (smaller.name, smaller.size) == (axis.name, size)
        assert subgroup_of(axis, size) == smaller
        assert len(_world.pg_map) == before + made, "a group was made twice"
        ranks = [torch.zeros((), dtype=torch.int64) for _ in range(size)]
        dist.all_gather(ranks, torch.tensor(dist.get_rank()), group=process_group(smaller))
        found.append(([int(rank) for rank in ranks], smaller.rank, made))
    assert subgroup_of(axis, 4) is axis
    return found


def test_a_smaller_group_is_made_of_neighbours_once_and_found_again() -> None:
    for rank, (alone, pair, whole) in enumerate(run_distributed(4, smaller_groups)):
        assert alone == ([rank], 0, 1)
        assert pair == ([rank // 2 * 2, rank // 2 * 2 + 1], rank % 2, 1)
        assert whole == ([0, 1, 2, 3], rank, 0)


def smaller_groups_of_two_axes() -> list[list[int]]:
    """Axes of different groups have different smaller groups; neighbours are those on the axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    found = []
    for axis in (*axes_of(mesh), axis_of(default_mesh("cpu"))):
        group = process_group(subgroup_of(axis, 2))
        found.append(dist.get_process_group_ranks(group))
        total = torch.tensor(dist.get_rank())
        dist.all_reduce(total, group=group)
        assert int(total) == sum(found[-1])
    return found


def test_neighbours_are_those_on_the_axis() -> None:
    for rank, (outer, inner, data) in enumerate(run_distributed(4, smaller_groups_of_two_axes)):
        assert outer == [rank % 2, rank % 2 + 2]
        assert inner == data == [rank // 2 * 2, rank // 2 * 2 + 1]


# --- several axes -------------------------------------------------------------------------------------------


def strategies_on_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    outer, inner = axes_of(mesh)
    rank = dist.get_rank()
    assert [(axis.name, axis.size, axis.rank) for axis in (outer, inner)] == [
        ("outer", 2, rank // 2),
        ("inner", 2, rank % 2),
    ]
    both = hsdp("outer", "inner")
    assert strategy_on(mesh, both) == (both, (outer, inner), mesh)
    one = (zero3(axis="inner"),)
    strategy, axes, part = strategy_on(mesh, one)
    assert (strategy, axes) == (one, (inner,))
    assert (part.mesh_dim_names, part.get_group().group_name) == (("inner",), inner.group)
    line = default_mesh("cpu")
    assert strategy_on(line, (zero3(),)) == ((zero3(),), axes_of(line), line)
    thin = init_device_mesh("cpu", (1, 4), mesh_dim_names=("outer", "inner"))
    strategy, _, _ = strategy_on(thin, both)
    assert strategy == (Placements(Replicate(), Replicate(), Replicate(), "outer"), zero3(axis="inner"))
    for wanted, message in (
        ((zero3(),), r"one dimension, got 2 of sizes \(2, 2\); name the axis to shard over, as in zero3\(axis='outer'"),
        ((zero3(axis="row"),), r"the mesh has no axis 'row', only \['outer', 'inner'\]"),
        (hsdp("inner", "outer"), r"axes in the mesh's order.*\['outer', 'inner'\]; got \['inner', 'outer'\]"),
    ):
        with refused(ValueError, message, str(wanted)):
            strategy_on(mesh, wanted)


def test_a_strategy_finds_its_axes_in_the_mesh_by_name_and_is_refused_where_it_cannot() -> None:
    run_distributed(4, strategies_on_meshes)


def meshes_and_groups_over_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    axes = axes_of(mesh)
    again = mesh_over(axes, "cpu")
    assert torch.equal(again.mesh, mesh.mesh)
    assert axes_of(again) == axes
    assert axes_of(mesh_over(axes[:1], "cpu")) == axes[:1]
    assert group_over(mesh) is dist.group.WORLD
    assert group_over(mesh["inner"]).group_name == axes[1].group
    part = DeviceMesh("cpu", torch.tensor([[0, 2]]), mesh_dim_names=("outer", "inner"))
    if dist.get_rank() in (0, 2):
        group = group_over(part)
        assert dist.get_process_group_ranks(group) == [0, 2]
        assert group_over(part) is group


def test_a_mesh_and_a_group_are_found_again_over_axes() -> None:
    run_distributed(4, meshes_and_groups_over_axes)


def agree_on_two_axes(failing: tuple[int, ...], texts: tuple[str, ...]) -> None:
    axes = axes_of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")))
    rank = dist.get_rank()
    error = ValueError(f"'bias' does not fit on rank {rank}") if rank in failing else None
    raise_together(error, axes, CPU, texts[rank], "shard(Model)")


def test_over_two_axes_a_fault_of_one_corner_reaches_every_rank() -> None:
    same = ("same",) * 4
    assert run_distributed(4, agree_on_two_axes, (), same) == [None] * 4
    for rank, error in enumerate(run_expecting_error(4, agree_on_two_axes, (3,), same)):
        assert type(error) is (ValueError if rank == 3 else RankFault)
        assert "'bias' does not fit on rank 3" in str(error)
        assert rank == 3 or "failed on 1 of 4 ranks" in str(error)
    for error in run_expecting_error(
        4, agree_on_two_axes, (), ("weight [4]", "weight [4]", "weight [5]", "weight [4]")
    ):
        assert type(error) is ValueError
        assert "Rank 0 has weight [4]; rank 2 has weight [5]" in str(error)
