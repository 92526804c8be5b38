"""Layout padding: what equal shards cost on released models' layers, one grid beside ours, as Markdown.

Nothing is measured but the time of planning: the padding is computed, and the same on every machine.

    python benchmarks/layout_padding.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from model_shapes import (
    Shapes,
    deepseek_v3_dense_layer,
    deepseek_v3_moe_layer,
    deepseek_v3_units,
    llama3_8b_layer,
    llama3_70b_layer,
    qwen3_235b_layer,
)

from fsdp_fn.layout import BlockAtomic, Flat, Granularity, Layout, TensorSpec, plan_layout, plan_one_grid

SHARD_COUNTS = (2, 8, 64, 256, 1024)
ROW_ATOMS = (1, 32, 128)
UNITS: dict[str, Callable[[], Shapes]] = {
    "Llama-3-8B layer": llama3_8b_layer,
    "Llama-3-70B layer": llama3_70b_layer,
    "Qwen3-235B-A22B layer": qwen3_235b_layer,
    "DeepSeek-V3 dense layer": deepseek_v3_dense_layer,
    "DeepSeek-V3 expert layer": deepseek_v3_moe_layer,
}


def specs_of(shapes: Shapes) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, shape, torch.bfloat16) for name, shape in shapes.items())


def planned(plan: Callable[..., Layout], specs: tuple[TensorSpec, ...], shard_count: int, row_atom: int) -> Layout:
    """bf16 weights cut between any two rows; blocks are those of FP8 planes, one byte per element."""
    granularity: Granularity = Flat() if row_atom == 1 else BlockAtomic(row_atom)
    return plan(specs, shard_count, granularity=granularity, itemsize=None if row_atom == 1 else 1)


def percent(fraction: float) -> str:
    if fraction == 0:
        return "0"
    return f"{fraction:.2%}" if fraction < 0.1 else f"{fraction:,.0%}"


def padding_cell(specs: tuple[TensorSpec, ...], shard_count: int, row_atom: int) -> str:
    one_grid, ours = (planned(plan, specs, shard_count, row_atom) for plan in (plan_one_grid, plan_layout))
    before, after = percent(one_grid.padding_fraction), percent(ours.padding_fraction)
    return f"{before} → {after} ({len(ours.segments)})"


def print_padding() -> None:
    print("| unit | row atom |", " | ".join(f"{count} shards" for count in SHARD_COUNTS), "|")
    print("| --- " * (2 + len(SHARD_COUNTS)) + "|")
    for name, shapes in UNITS.items():
        specs = specs_of(shapes())
        for row_atom in ROW_ATOMS:
            cells = (padding_cell(specs, count, row_atom) for count in SHARD_COUNTS)
            print(f"| {name} | {row_atom} |", " | ".join(cells), "|")


def print_planning_time() -> None:
    """To be called first, while no plan is cached. It is one thread, so CPU time is what it takes."""
    units = [specs_of(shapes) for shapes in deepseek_v3_units()]
    print("| all of DeepSeek-V3 at 1024 shards, nothing cached | CPU seconds |")
    print("| --- | --- |")
    for row_atom in ROW_ATOMS:
        start = time.process_time()
        for specs in units:
            planned(plan_layout, specs, 1024, row_atom)
        print(f"| row atom {row_atom} | {time.process_time() - start:.2f} |")


if __name__ == "__main__":
    print_planning_time()
    print()
    print_padding()
