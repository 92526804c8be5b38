"""Axes name live groups; a fault or a disagreement on one rank ends on all of them, by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_fn.groups import RankFault, axis_of, default_mesh, mesh_device, process_group, raise_together
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
    raise_together(error, axis, CPU, texts[axis.rank % len(texts)], "shard(Model)")
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
