"""State on a mesh of several axes: which piece a rank holds, and what a strategy keeps apart."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharded_units import Described, described_tensors, local_axis, make_unit, raw, values_of
from strategy_cases import ONE_AXIS, ranks_of, strategies

from fsdp_fn.placement import (
    Placement,
    Replicate,
    Sharded,
    Strategy,
    gradient_placements,
    optimizer_placements,
    parameter_placements,
)
from fsdp_fn.policy import PrecisionPolicy
from fsdp_fn.state import accumulates_apart, accumulation_buffer, needs_planes, piece_of, trainable_segments

sizes = st.lists(st.integers(1, 3), min_size=3, max_size=3)


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=3))
def test_each_piece_is_held_once_in_every_copy(described: list[tuple[int, bool]]) -> None:
    placements: list[Placement] = [Sharded() if cut else Replicate() for _, cut in described]
    of = [size for size, _ in described]
    found = [piece_of(placements, axes) for axes in ranks_of(*of)]
    count = math.prod(size for size, cut in described if cut)
    assert {pieces for _, pieces in found} == {count}
    assert sorted(index for index, _ in found) == sorted(list(range(count)) * (math.prod(of) // count))


@given(st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=2, max_size=3))
def test_what_an_outer_axis_cuts_is_a_piece_of_the_inner_axes_piece(described: list[tuple[int, bool]]) -> None:
    placements: list[Placement] = [Sharded() if cut else Replicate() for _, cut in described]
    for axes in ranks_of(*(size for size, _ in described)):
        fine, pieces = piece_of(placements, axes)
        coarse, fewer = piece_of([Replicate(), *placements[1:]], axes)
        assert fine * fewer // pieces == coarse


@given(described_tensors(), strategies(), sizes)
def test_on_a_mesh_the_parts_of_the_pieces_make_up_each_tensor_and_copies_are_equal(
    described: Described, strategy: Strategy, of: list[int]
) -> None:
    tensors = values_of(described)
    units = [make_unit(tensors, axes, strategy=strategy) for axes in ranks_of(*of[: len(strategy)])]
    by_piece = {unit.main.piece[0]: unit for unit in units}
    assert sorted(by_piece) == list(range(units[0].layout.shard_count))
    for index, whole in enumerate(tensors.values()):
        parts = [raw(by_piece[piece].main.owned(index)) for piece in sorted(by_piece)]
        assert torch.equal(torch.cat(parts), raw(whole))
    for unit in units:
        twin = by_piece[unit.main.piece[0]]
        for own, other in zip(unit.main.segments, twin.main.segments, strict=True):
            assert torch.equal(raw(own), raw(other))


@given(strategies(), st.lists(st.integers(2, 3), min_size=3, max_size=3))
def test_planes_and_sums_are_kept_apart_where_they_are_placed_otherwise_than_the_main_weights(
    strategy: Strategy, of: list[int]
) -> None:
    axes = next(ranks_of(*of[: len(strategy)]))
    unit = make_unit({"weight": torch.ones(5, 3)}, axes, strategy=strategy)
    assert needs_planes(unit) == (parameter_placements(strategy) != optimizer_placements(strategy))
    assert accumulates_apart(unit) == (gradient_placements(strategy) != optimizer_placements(strategy))


@pytest.mark.parametrize("name", ONE_AXIS)
def test_an_axis_of_one_rank_keeps_neither_planes_nor_sums(name: str) -> None:
    unit = make_unit({"weight": torch.ones(5, 3)}, local_axis(1, 0), strategy=ONE_AXIS[name])
    assert not needs_planes(unit)
    assert not accumulates_apart(unit)


def test_sums_of_another_dtype_are_kept_apart_on_one_rank_too() -> None:
    precision = PrecisionPolicy(main_dtype=torch.bfloat16, accumulate_dtype=torch.float32)
    for size in (1, 2):
        unit = make_unit({"weight": torch.ones(5, 3)}, local_axis(size, 0), precision=precision)
        assert accumulates_apart(unit)
        frozen = make_unit({"weight": torch.ones(5, 3)}, local_axis(size, 0), precision=precision, frozen={"weight"})
        assert not accumulates_apart(frozen)


@given(described_tensors(), strategies(), sizes)
def test_a_sum_has_the_gradients_piece_of_each_trainable_segment_in_the_accumulation_dtype(
    described: Described, strategy: Strategy, of: list[int]
) -> None:
    precision = PrecisionPolicy(accumulate_dtype=torch.float64)
    for axes in ranks_of(*of[: len(strategy)]):
        unit = make_unit(values_of(described), axes, strategy=strategy, precision=precision)
        made = accumulation_buffer(unit, lambda numel, dtype: torch.zeros(numel, dtype=dtype))
        assert made.held == trainable_segments(unit.layout)
        assert made.placements == gradient_placements(unit.strategy)
        assert made.axes == axes
        _, count = made.piece
        for index, flat in zip(made.held, made.segments, strict=True):
            segment = unit.layout.segments[index]
            assert flat.numel() * count == segment.size
            assert flat.dtype == (torch.float64 if segment.dtype.is_floating_point else segment.dtype)


@given(strategies(), sizes, st.sampled_from([1.0, 0.5, 3.0]))
def test_the_divisor_is_the_number_of_ranks_times_the_users_own(
    strategy: Strategy, of: list[int], grad_divisor: float
) -> None:
    axes = next(ranks_of(*of[: len(strategy)]))
    unit = make_unit({"weight": torch.ones(2)}, axes, strategy=strategy, grad_divisor=grad_divisor)
    assert unit.divisor == grad_divisor * math.prod(of[: len(strategy)])
