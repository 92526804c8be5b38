"""Layouts waste little: the bounds on padding, on alignment and on the time that a plan takes."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import GRANULARITIES, LAYERS, SPECS

from fsdp_fn.layout import BlockAtomic, Flat, Granularity, Layout, TensorSpec, plan_layout, plan_one_grid


def plan_cut_by(row_atom: int, layer: str, shard_count: int) -> Layout:
    if row_atom == 1:
        return plan_layout(LAYERS[layer], shard_count)
    return plan_layout(LAYERS[layer], shard_count, granularity=BlockAtomic(row_atom), itemsize=1)


@given(SPECS, st.integers(1, 40), st.sampled_from([Flat(), BlockAtomic(2), BlockAtomic(5)]))
def test_nothing_is_padded_more_than_on_one_grid(
    specs: tuple[TensorSpec, ...], shard_count: int, granularity: Granularity
) -> None:
    searched = plan_layout(specs, shard_count, granularity=granularity)
    one_grid = plan_one_grid(specs, shard_count, granularity=granularity)
    assert searched.padding <= one_grid.padding


@given(SPECS, st.integers(1, 9), GRANULARITIES, st.randoms(use_true_random=False))
def test_names_and_order_do_not_change_how_much_is_padded(
    specs: tuple[TensorSpec, ...], shard_count: int, granularity: Granularity, random: Random
) -> None:
    shuffled = [replace(spec, name=f"other.{spec.name}") for spec in specs]
    random.shuffle(shuffled)
    first = plan_layout(specs, shard_count, granularity=granularity)
    second = plan_layout(shuffled, shard_count, granularity=granularity)
    assert first.padding == second.padding
    assert len(first.segments) == len(second.segments)


@pytest.mark.parametrize("shard_count", [2, 8, 64, 256])
@pytest.mark.parametrize("layer", LAYERS)
def test_whole_layers_cut_by_rows_are_padded_by_at_most_one_percent(layer: str, shard_count: int) -> None:
    assert plan_cut_by(1, layer, shard_count).padding_fraction <= 0.01


@pytest.mark.parametrize("shard_count", [2, 8, 64])
@pytest.mark.parametrize("layer", LAYERS)
def test_whole_layers_cut_by_32_rows_are_padded_by_at_most_five_percent(layer: str, shard_count: int) -> None:
    assert plan_cut_by(32, layer, shard_count).padding_fraction <= 0.05


@pytest.mark.parametrize("row_atom", [1, 32, 128])
@pytest.mark.parametrize("layer", LAYERS)
def test_no_layer_of_a_released_model_is_padded_more_than_on_one_grid(layer: str, row_atom: int) -> None:
    for shard_count in (2, 8, 64, 256, 1024):
        one_grid = plan_one_grid(
            LAYERS[layer],
            shard_count,
            granularity=BlockAtomic(row_atom) if row_atom > 1 else Flat(),
            itemsize=1 if row_atom > 1 else None,
        )
        assert plan_cut_by(row_atom, layer, shard_count).padding <= one_grid.padding


@pytest.mark.parametrize("row_atom", [1, 32, 128])
def test_a_layer_with_hundreds_of_experts_is_planned_for_1000_ranks_in_seconds(row_atom: int) -> None:
    start = time.perf_counter()
    layout = plan_cut_by(row_atom, "deepseek-v3-experts", 1000)
    assert time.perf_counter() - start < 20
    assert layout.padding_fraction < 0.1


def test_tensors_of_coprime_widths_do_not_need_a_common_grid() -> None:
    specs = [TensorSpec(f"{width}", (512, width), torch.float32) for width in (1021, 1031, 1033)]
    layout = plan_layout(specs, 8, granularity=BlockAtomic(4))
    one_grid = plan_one_grid(specs, 8, granularity=BlockAtomic(4))
    assert layout.padding_fraction < 0.05
    assert one_grid.padding_fraction > 100


def test_one_grid_is_one_segment_on_the_least_common_multiple() -> None:
    (segment,) = plan_one_grid(LAYERS["llama3-8b"], 64, granularity=BlockAtomic(32)).segments
    assert segment.shard_size % (7 * 4096 * 32) == 0


@pytest.mark.parametrize(
    ("shape", "copies", "offset_bytes"),
    [((257, 640), 3, 256), ((257, 5), 300, 16), ((3,), 8, 2)],
    ids=["large", "small", "tiny"],
)
def test_offsets_are_aligned_as_far_as_the_size_of_the_tensors_affords(
    shape: tuple[int, ...], copies: int, offset_bytes: int
) -> None:
    specs = [TensorSpec(f"{i}", shape, torch.bfloat16) for i in range(copies)]
    layout = plan_layout(specs, 1)
    assert math.gcd(256, *(2 * offset for offset in layout.segments[0].offsets)) == offset_bytes
    assert layout.padding_fraction < 0.01


@settings(max_examples=5)
@given(st.integers(300, 500))
def test_hundreds_of_odd_widths_are_planned_within_bounds(count: int) -> None:
    specs = [TensorSpec(f"{i}", (3 + i % 90, 1 + 7 * i), torch.float32) for i in range(count)]
    start = time.perf_counter()
    assert plan_layout(specs, 16).padding_fraction < 0.2
    assert time.perf_counter() - start < 30
