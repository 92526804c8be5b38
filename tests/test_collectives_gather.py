"""Gathers give the whole weights to the bit, in one launch, as views of what the launch wrote."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import Launches
from sharded_units import (
    EVERY_DTYPE,
    FEW_ROWS,
    Described,
    described_tensors,
    gathered_now,
    reduced_now,
    same_bits,
    unit_on_ranks,
    values_of,
)

from fsdp_fn.collectives import Pending, gather_planes
from fsdp_fn.layout import BlockAtomic, Flat, Granularity, TensorAtomic
from fsdp_fn.planes import Phase, PlaneKind
from fsdp_fn.policy import PrecisionPolicy
from fsdp_fn.state import zeros_like_main
from harness import run_distributed

across_ranks = settings(max_examples=12)


def gather_and_compare(described: Described, granularity: Granularity) -> bool:
    gathered = gathered_now(unit_on_ranks(described, granularity=granularity))
    expected = values_of(described)
    found = gathered.weights()
    return list(found) == list(expected) and all(same_bits(found[name], expected[name]) for name in expected)


def test_weights_of_every_dtype_in_one_unit_arrive_to_the_bit(world_size: int) -> None:
    assert run_distributed(world_size, gather_and_compare, EVERY_DTYPE, Flat()) == [True] * world_size


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.int16, torch.bool])
def test_a_unit_of_a_dtype_that_the_backend_has_no_name_for_is_gathered(dtype: torch.dtype) -> None:
    described: Described = (((5, 4), dtype), ((3,), dtype))
    assert run_distributed(2, gather_and_compare, described, Flat()) == [True] * 2


def test_ranks_that_own_nothing_gather_the_whole_as_well(world_size: int) -> None:
    assert run_distributed(world_size, gather_and_compare, FEW_ROWS, TensorAtomic()) == [True] * world_size


@across_ranks
@given(described_tensors(), st.sampled_from([Flat(), BlockAtomic(2), TensorAtomic()]))
def test_whatever_the_shapes_the_whole_weights_arrive(described: Described, granularity: Granularity) -> None:
    assert run_distributed(3, gather_and_compare, described, granularity) == [True] * 3


def gather_in_compute_dtype() -> bool:
    unit = unit_on_ranks(EVERY_DTYPE, precision=PrecisionPolicy(torch.float32, torch.bfloat16))
    expected = values_of(EVERY_DTYPE)
    found = gathered_now(unit).weights()
    return all(
        same_bits(found[name], value.float().bfloat16() if value.is_floating_point() else value)
        for name, value in expected.items()
        if value.dtype is not torch.float8_e4m3fn
    )


def test_weights_are_gathered_in_the_compute_dtype_cast_once_from_the_main_weights(world_size: int) -> None:
    assert run_distributed(world_size, gather_in_compute_dtype) == [True] * world_size


def storages_of_one_gather() -> tuple[int, int, bool]:
    unit = unit_on_ranks((((7, 3), torch.float32), ((5,), torch.float32), ((2, 2), torch.bfloat16)))
    gathered = gathered_now(unit)
    flats = gathered.planes[PlaneKind.DENSE].segments
    storages = {flat.untyped_storage().data_ptr() for flat in flats}
    weights = [weight.untyped_storage().data_ptr() for weight in gathered.weights().values()]
    sizes = all(flat.shape == (segment.size,) for flat, segment in zip(flats, unit.layout.segments, strict=True))
    return len(set(weights) - storages), len(storages) - len(unit.layout.segments), sizes


def test_weights_are_views_of_one_flat_buffer_per_segment(world_size: int) -> None:
    assert run_distributed(world_size, storages_of_one_gather) == [(0, 0, True)] * world_size


def launches_of_a_gather(described: Described, precision: PrecisionPolicy) -> list[str]:
    unit = unit_on_ranks(described, precision=precision)
    with Launches() as launches:
        gathered_now(unit)
    return launches.collectives


def test_all_tensors_of_a_unit_are_gathered_in_one_launch() -> None:
    launched = run_distributed(2, launches_of_a_gather, EVERY_DTYPE, PrecisionPolicy())
    assert launched == [["c10d::allgather_into_tensor_coalesced_"]] * 2


@pytest.mark.parametrize("precision", [PrecisionPolicy(), PrecisionPolicy(torch.float32, torch.bfloat16)])
def test_a_single_rank_gathers_with_no_collective(precision: PrecisionPolicy) -> None:
    assert run_distributed(1, launches_of_a_gather, EVERY_DTYPE, precision) == [[]]


def gather_alone() -> tuple[bool, bool, bool]:
    unit = unit_on_ranks(EVERY_DTYPE)
    for flat in unit.main.segments:
        flat.requires_grad_(flat.is_floating_point())
    gathered = gathered_now(unit)
    pairs = list(zip(gathered.planes[PlaneKind.DENSE].segments, unit.main.segments, strict=True))
    itself = all(whole.untyped_storage().data_ptr() == main.untyped_storage().data_ptr() for whole, main in pairs)
    cast = gathered_now(unit_on_ranks(FEW_ROWS, precision=PrecisionPolicy(compute_dtype=torch.bfloat16)))
    apart = all(flat.dtype is torch.bfloat16 for flat in cast.planes[PlaneKind.DENSE].segments)
    return itself, apart, any(weight.requires_grad for weight in gathered.weights().values())


def test_alone_the_gathered_buffer_is_the_main_weight_itself_outside_any_graph() -> None:
    assert run_distributed(1, gather_alone) == [(True, True, False)]


def gather_and_wait_twice() -> tuple[bool, bool, bool]:
    unit = dataclasses.replace(unit_on_ranks(EVERY_DTYPE), version=5)
    pending = gather_planes(unit, Phase.BACKWARD, async_op=True)
    assert isinstance(pending, Pending)
    first = pending.wait()
    right = all(same_bits(first.weights()[name], value) for name, value in values_of(EVERY_DTYPE).items())
    return right, pending.wait() is first, (first.unit, first.version) == ("block", 5)


def test_a_pending_gather_may_be_waited_for_twice(world_size: int) -> None:
    assert run_distributed(world_size, gather_and_wait_twice) == [(True, True, True)] * world_size


def gather_into_given(asynchronous: bool) -> tuple[bool, bool, int]:
    precision = PrecisionPolicy(torch.float32, torch.bfloat16)
    described: Described = (((7, 3), torch.float32), ((5,), torch.float32))
    unit = unit_on_ranks(described, precision=precision)
    out = gathered_now(unit)
    addresses = [flat.data_ptr() for flat in out.planes[PlaneKind.DENSE].segments]
    for flat in unit.main.segments:
        flat.mul_(2)
    newer = dataclasses.replace(unit, version=unit.version + 1)
    with Launches() as launches:
        result = gather_planes(newer, Phase.FORWARD, out=out, async_op=asynchronous)
        gathered = result.wait() if isinstance(result, Pending) else result
    expected = {name: (value * 2).bfloat16() for name, value in values_of(described).items()}
    right = all(same_bits(gathered.weights()[name], value) for name, value in expected.items())
    same = [flat.data_ptr() for flat in gathered.planes[PlaneKind.DENSE].segments] == addresses
    assert gathered.version == unit.version + 1
    return right, same, launches.count("aten::empty") + launches.count("aten::new_empty")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_gather_writes_into_the_buffer_that_it_is_given_and_allocates_none(
    world_size: int, asynchronous: bool
) -> None:
    assert run_distributed(world_size, gather_into_given, asynchronous) == [(True, True, 0)] * world_size


def two_gathers_under_way() -> bool:
    first, second = (unit_on_ranks((((7, 3), dtype),), name=str(dtype)) for dtype in (torch.float32, torch.bfloat16))
    one, other = (gather_planes(unit, Phase.FORWARD, async_op=True) for unit in (first, second))
    assert isinstance(one, Pending)
    assert isinstance(other, Pending)
    found = [pending.wait().weight(0) for pending in (other, one)]
    expected = [values_of((((7, 3), dtype),))["weight0"] for dtype in (torch.bfloat16, torch.float32)]
    return all(same_bits(new, old) for new, old in zip(found, expected, strict=True))


def test_gathers_under_way_together_may_be_waited_for_in_any_order(world_size: int) -> None:
    assert run_distributed(world_size, two_gathers_under_way) == [True] * world_size


def units_without_elements() -> tuple[list[tuple[int, ...]], int, list[tuple[int, ...]], int]:
    bare = unit_on_ranks(())
    with Launches() as launches:
        nothing = [tuple(weight.shape) for weight in gathered_now(bare).weights().values()]
        held = len(reduced_now([], bare).segments)
    empty = unit_on_ranks((((0, 3), torch.float32),))
    shapes = [tuple(weight.shape) for weight in gathered_now(empty).weights().values()]
    reduced_now([torch.empty(0, 3)], empty, accumulate=zeros_like_main(empty))
    return nothing, held, shapes, len(launches.collectives)


def test_units_with_no_tensor_or_no_element_are_served(world_size: int) -> None:
    assert run_distributed(world_size, units_without_elements) == [([], 0, [(0, 3)], 0)] * world_size


def gather_alone_into_given() -> None:
    """With ``out`` a group of one rank copies, so that a schedule with buffers of its own runs at any size."""
    unit = unit_on_ranks((((4, 4), torch.float32), ((8,), torch.bfloat16)))
    whole = gather_planes(unit, Phase.FORWARD)
    flats = tuple(torch.full_like(flat, 9) for flat in whole.planes[PlaneKind.DENSE].segments)
    given = dataclasses.replace(
        whole, planes={PlaneKind.DENSE: dataclasses.replace(whole.planes[PlaneKind.DENSE], segments=flats)}
    )
    result = gather_planes(unit, Phase.FORWARD, out=given)
    for flat, mine, main in zip(result.planes[PlaneKind.DENSE].segments, flats, unit.main.segments, strict=True):
        assert flat.data_ptr() == mine.data_ptr() != main.data_ptr()
        assert torch.equal(flat, main)


def test_alone_a_given_buffer_is_written() -> None:
    run_distributed(1, gather_alone_into_given)
