"""Layouts: every element has exactly one place, and every cut is legal."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import GRANULARITIES, LAYERS, SPECS

from fsdp_fn.layout import (
    BlockAtomic,
    Flat,
    Granularity,
    Layout,
    TensorAtomic,
    TensorSpec,
    gaps,
    local_offset,
    owned_range,
    owner,
    plan_layout,
    row_bounds,
    shard_range,
)

LAYOUTS = st.builds(
    plan_layout,
    SPECS,
    st.integers(1, 9),
    granularity=GRANULARITIES,
    itemsize=st.sampled_from([None, 1, 2]),
)


def cut_atom(layout: Layout, tensor: int) -> int:
    """Elements at whose multiples a tensor may be cut, from the definition of the granularities."""
    spec = layout.tensors[tensor]
    match spec.granularity or layout.granularity:
        case Flat():
            atom = spec.row_width
        case BlockAtomic(rows):
            atom = rows * spec.row_width
        case TensorAtomic():
            atom = spec.numel
    return max(1, atom)


@given(LAYOUTS)
def test_every_tensor_lies_in_one_segment_of_its_dtype_and_requires_grad(layout: Layout) -> None:
    placed = sorted(tensor for segment in layout.segments for tensor in segment.tensors)
    assert placed == list(range(len(layout.tensors)))
    for index, segment in enumerate(layout.segments):
        assert segment.shard_count == layout.shard_count
        for tensor, offset, numel in zip(segment.tensors, segment.offsets, segment.numels, strict=True):
            spec = layout.tensors[tensor]
            assert (spec.dtype, spec.requires_grad) == (segment.dtype, segment.requires_grad)
            assert layout.location(tensor) == (index, offset)
            assert numel == spec.numel


@given(LAYOUTS)
def test_tensors_and_gaps_tile_the_whole_without_overlap(layout: Layout) -> None:
    for segment in layout.segments:
        tensors = [range(o, o + n) for o, n in zip(segment.offsets, segment.numels, strict=True) if n]
        pieces = sorted([*tensors, *gaps(segment)], key=lambda piece: piece.start)
        assert all(len(piece) for piece in pieces)
        edges = [0, *(piece.stop for piece in pieces)]
        assert [piece.start for piece in pieces] == edges[:-1]
        assert edges[-1] == segment.size
    padding = sum(len(gap) for segment in layout.segments for gap in gaps(segment))
    assert layout.padding == padding
    assert layout.padding_fraction == (padding and padding / sum(spec.numel for spec in layout.tensors))


@given(LAYOUTS)
def test_every_element_is_found_by_its_owner_at_the_place_that_the_owned_range_says(layout: Layout) -> None:
    taken: set[tuple[int, int, int]] = set()
    for tensor, spec in enumerate(layout.tensors):
        held_by: dict[int, tuple[int, int]] = {}
        for rank in range(layout.shard_count):
            held = owned_range(layout, tensor, rank)
            start = local_offset(layout, tensor, rank)
            assert 0 <= start <= start + len(held) <= layout.segments[layout.location(tensor)[0]].shard_size
            for element in held:
                assert element not in held_by
                held_by[element] = (rank, start + element - held.start)
        assert sorted(held_by) == list(range(spec.numel))
        for element, place in held_by.items():
            assert owner(layout, tensor, element) == place
            taken.add((layout.location(tensor)[0], *place))
    assert len(taken) == sum(spec.numel for spec in layout.tensors)


@given(LAYOUTS)
def test_shards_are_equally_long_and_follow_one_another(layout: Layout) -> None:
    for segment in layout.segments:
        shards = [shard_range(segment, rank) for rank in range(layout.shard_count)]
        assert {len(shard) for shard in shards} == {segment.shard_size}
        assert shards[0].start == 0
        assert shards[-1].stop == segment.size
        assert all(before.stop == after.start for before, after in pairwise(shards))


@given(LAYOUTS)
def test_a_boundary_inside_a_tensor_falls_at_a_multiple_of_its_atom(layout: Layout) -> None:
    for tensor, spec in enumerate(layout.tensors):
        for rank in range(layout.shard_count):
            held = owned_range(layout, tensor, rank)
            assert held.start % cut_atom(layout, tensor) == 0 or held.start == spec.numel
            assert held.stop % cut_atom(layout, tensor) == 0 or held.stop == spec.numel


@given(LAYOUTS)
def test_row_bounds_say_which_rows_each_rank_holds(layout: Layout) -> None:
    for tensor, spec in enumerate(layout.tensors):
        bounds = row_bounds(layout, tensor)
        assert len(bounds) == layout.shard_count + 1
        assert bounds[0] == 0
        assert bounds[-1] == spec.rows
        assert list(bounds) == sorted(bounds)
        for rank in range(layout.shard_count if spec.numel else 0):
            held = owned_range(layout, tensor, rank)
            assert (bounds[rank + 1] - bounds[rank]) * spec.row_width == len(held)
            assert not held or bounds[rank] * spec.row_width == held.start


@given(SPECS, st.integers(1, 9), GRANULARITIES, st.sampled_from([None, 1, 2]))
def test_shards_start_at_multiples_of_16_bytes(
    specs: tuple[TensorSpec, ...], shard_count: int, granularity: Granularity, itemsize: int | None
) -> None:
    layout = plan_layout(specs, shard_count, granularity=granularity, itemsize=itemsize)
    for segment in layout.segments:
        smallest = min(itemsize or segment.dtype.itemsize, segment.dtype.itemsize)
        assert segment.shard_size * smallest % 16 == 0


def test_itemsize_makes_alignment_hold_for_a_smaller_representation() -> None:
    specs = [TensorSpec("a", (24, 1), torch.float32)]
    assert plan_layout(specs, 2).segments[0].shard_size == 12
    assert plan_layout(specs, 2, itemsize=1).segments[0].shard_size == 16


def test_whole_tensors_are_balanced_over_ranks() -> None:
    sizes = (7, 5, 4, 3, 3, 2)
    specs = [TensorSpec(f"{i}", (64, size), torch.float32) for i, size in enumerate(sizes)]
    layout = plan_layout(specs, 2, granularity=TensorAtomic())
    assert layout.segments[0].shard_size == 64 * 12
    assert layout.padding == 0


def test_whole_tensors_leave_ranks_empty_where_there_are_more_ranks() -> None:
    layout = plan_layout([TensorSpec("a", (4, 4), torch.float32)], 3, granularity=TensorAtomic())
    assert [len(owned_range(layout, 0, rank)) for rank in range(3)] == [16, 0, 0]
    assert row_bounds(layout, 0) == (0, 4, 4, 4)


def test_a_tensor_may_have_its_own_granularity() -> None:
    specs = [
        TensorSpec("whole", (64, 8), torch.float32, granularity=TensorAtomic()),
        TensorSpec("blocks", (64, 8), torch.float32, granularity=BlockAtomic(32)),
        TensorSpec("rows", (64, 8), torch.float32),
    ]
    layout = plan_layout(specs, 4)
    held = [[len(owned_range(layout, tensor, rank)) // 8 for rank in range(4)] for tensor in range(3)]
    assert sorted(held[0]) == [0, 0, 0, 64]
    assert all(rows % 32 == 0 for rows in held[1])
    assert sum(held[2]) == 64


def test_frozen_tensors_never_share_a_segment_with_trained_ones() -> None:
    specs = [
        TensorSpec("base", (64, 64), torch.bfloat16, requires_grad=False),
        TensorSpec("adapter", (8, 64), torch.bfloat16),
    ]
    assert [segment.requires_grad for segment in plan_layout(specs, 2).segments] == [False, True]


def test_tensors_above_two_to_the_31_elements_keep_every_place() -> None:
    specs = [
        TensorSpec("huge", (3_000_000, 4096), torch.bfloat16),
        TensorSpec("norm", (4096,), torch.bfloat16),
    ]
    layout = plan_layout(specs, 3, granularity=BlockAtomic(32), itemsize=1)
    last = specs[0].numel - 1
    rank, place = owner(layout, 0, last)
    held = owned_range(layout, 0, rank)
    assert last > 2**33
    assert last in held
    assert place == local_offset(layout, 0, rank) + last - held.start
    assert sum(len(owned_range(layout, 0, rank)) for rank in range(3)) == specs[0].numel


def test_units_without_elements_have_layouts() -> None:
    assert plan_layout([], 4).segments == ()
    layout = plan_layout([TensorSpec("none", (0, 5), torch.float32), TensorSpec("hollow", (5, 0), torch.float32)], 4)
    assert (layout.segments[0].size, layout.padding, layout.padding_fraction) == (0, 0, 0.0)
    assert row_bounds(layout, 0) == (0, 0, 0, 0, 0)
    assert row_bounds(layout, 1) == (0, 5, 5, 5, 5)
    assert gaps(layout.segments[0]) == ()


def test_a_tensor_without_dimensions_is_one_row() -> None:
    layout = plan_layout([TensorSpec("scale", (), torch.float32)], 2)
    assert row_bounds(layout, 0) == (0, 1, 1)
    assert owner(layout, 0, 0) == (0, 0)


def test_equal_layouts_are_equal_keys_and_survive_pickling() -> None:
    first, second = (plan_layout(LAYERS["llama3-8b"], 4) for _ in range(2))
    assert {first: "found"}[second] == "found"
    assert pickle.loads(pickle.dumps(first)) == first
    with pytest.raises(FrozenInstanceError):
        first.shard_count = 2  # type: ignore[misc]


def test_another_process_plans_the_same_layout_and_finds_it_by_its_own_hash() -> None:
    shapes = [(64, 7), (32, 9), (5,), (48, 12), (3, 3), (64, 33), (96, 10), (7, 7)]
    specs = [TensorSpec(f"t{i}", shape, torch.float32) for i, shape in enumerate(shapes)]
    layout = plan_layout(specs, 5, granularity=BlockAtomic(4))
    hash(layout)
    program = (
        "import pickle, sys; from fsdp_fn.layout import BlockAtomic, plan_layout;"
        "loaded = pickle.loads(sys.stdin.buffer.read());"
        "made = plan_layout(loaded.tensors, 5, granularity=BlockAtomic(4));"
        "print({made: 'found'}.get(loaded, 'lost'))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(layout),
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        check=True,
        timeout=200,
    )
    assert finished.stdout.split() == [b"found"]


def test_places_can_be_asked_for_inside_a_compiled_function() -> None:
    layout = plan_layout(LAYERS["llama3-8b"], 4)

    def own_part(flat: torch.Tensor) -> torch.Tensor:
        held, start = owned_range(layout, 5, 1), local_offset(layout, 5, 1)
        return flat[start : start + len(held)] * row_bounds(layout, 5)[1]

    flat = torch.arange(layout.segments[layout.location(5)[0]].shard_size, dtype=torch.float32)
    compiled = torch.compile(own_part, backend="eager", fullgraph=True)
    assert torch.equal(compiled(flat), own_part(flat))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan_layout([], 0), "shard_count must be at least 1, but is 0"),
        (lambda: BlockAtomic(0), "rows must be at least 1, but is 0"),
        (lambda: TensorSpec("w", (2, -1), torch.float32), r"'w' has a negative dimension: shape \(2, -1\)"),
        (lambda: plan_layout([], 1, itemsize=3), "itemsize must be 1, 2, 4, 8 or 16 bytes, but is 3"),
        (
            lambda: plan_layout([TensorSpec("w", (1,), torch.float32), TensorSpec("w", (2,), torch.int8)], 1),
            "two tensors of one unit are named 'w'",
        ),
    ],
    ids=["shard_count", "rows", "dimension", "itemsize", "names"],
)
def test_bad_values_are_refused_by_name(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan_layout([], 1, granularity=Flat), "the layout needs Flat"),
        (lambda: TensorSpec("w", (1,), torch.float32, granularity=32), "'w' needs Flat.*but has 32"),
        (lambda: TensorSpec("w", [1], torch.float32), "'w' needs a tuple as its shape"),
        (lambda: TensorSpec("w", (1,), "float32"), "'w' needs a torch.dtype, but has 'float32'"),
    ],
    ids=["layout", "granularity", "shape", "dtype"],
)
def test_bad_types_are_refused_by_name(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("index", [-1, 2])
def test_a_tensor_or_rank_out_of_range_is_refused_by_name(index: int) -> None:
    specs = [TensorSpec("a", (4, 2), torch.float32), TensorSpec("b", (2,), torch.float32)]
    layout = plan_layout(specs, 2)
    for query in (layout.location, lambda tensor: row_bounds(layout, tensor)):
        with pytest.raises(ValueError, match=rf"tensor {index} is out of range: there are 2"):
            query(index)
    for query in (
        lambda rank: shard_range(layout.segments[0], rank),
        lambda rank: owned_range(layout, 0, rank),
        lambda rank: local_offset(layout, 0, rank),
    ):
        with pytest.raises(ValueError, match=rf"rank {index} is out of range: there are 2"):
            query(index)
    with pytest.raises(ValueError, match="element of tensor 'b' 2 is out of range: there are 2"):
        owner(layout, 1, 2)
