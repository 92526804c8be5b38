"""Unit states from plain tensors, for tests, with a process group or without; and what is asked of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from fsdp_fn.collectives import gather_planes, reduce_scatter
from fsdp_fn.groups import axis_of, default_mesh
from fsdp_fn.layout import Granularity, TensorSpec, plan_layout
from fsdp_fn.placement import (
    Placements,
    Strategy,
    checked_strategy,
    granularity_of,
    optimizer_placements,
    without_axes_of_one,
    zero3,
)
from fsdp_fn.planes import Phase
from fsdp_fn.policy import PrecisionPolicy, SchedulePolicy
from fsdp_fn.state import Axis, Buffer, Gathered, UnitState, piece_of
from fsdp_fn.units import Setting, shard_unit

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
NEVER_TRAINED = (torch.int64, torch.uint8, torch.bool, torch.int16, torch.float8_e4m3fn)

# Shape and dtype of each tensor of a unit; their names are weight0, weight1, …
Described = tuple[tuple[tuple[int, ...], torch.dtype], ...]

EVERY_DTYPE: Described = (
    ((7, 3), torch.float32),
    ((5,), torch.bfloat16),
    ((), torch.float32),
    ((1, 9), torch.float16),
    ((3, 2), torch.complex64),
    ((4, 2), torch.uint8),
    ((9,), torch.bool),
    ((3,), torch.int64),
    ((2, 2), torch.int16),
    ((6, 2), torch.float8_e4m3fn),
    ((0, 4), torch.float32),
)
# Rows, and no more than two of them: at three and four ranks some own nothing.
FEW_ROWS: Described = (((2, 16), torch.float32), ((1, 8), torch.float32))


def described_tensors(max_tensors: int = 5) -> st.SearchStrategy[Described]:
    """Shapes with empty, single and uneven dimensions, in several dtypes."""
    shape = st.lists(st.integers(0, 7), max_size=3).map(tuple)
    dtype = st.sampled_from(FLOATING + NEVER_TRAINED)
    return st.lists(st.tuples(shape, dtype), min_size=1, max_size=max_tensors).map(tuple)


def values_of(described: Described) -> dict[str, torch.Tensor]:
    """Values that differ everywhere they can, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    return {
        f"weight{index}": (torch.randn(shape, generator=generator) * 50).to(dtype)
        for index, (shape, dtype) in enumerate(described)
    }


def local_axis(size: int, rank: int, group: str = "none") -> Axis:
    """An axis on which no collective can be called, unless `group` names one."""
    return Axis("data", group, size, rank)


def make_unit(
    tensors: Mapping[str, torch.Tensor],
    axis: Axis | Sequence[Axis],
    *,
    frozen: Collection[str] = (),
    precision: PrecisionPolicy = PrecisionPolicy(),  # noqa: B008  (frozen)
    strategy: Placements | Strategy | None = None,
    granularity: Granularity | None = None,
    grad_divisor: float = 1.0,
    name: str = "block",
) -> UnitState:
    """One rank's state of a unit of `tensors`, not trained where `frozen` or of a dtype without gradients.

    `strategy`: default `zero3(granularity)` over the one axis.
    """
    axes = (axis,) if isinstance(axis, Axis) else tuple(axis)
    chosen = checked_strategy(zero3(granularity) if strategy is None else strategy)
    setting = Setting(
        without_axes_of_one(chosen, [axis.size for axis in axes]),
        axes,
        None,  # type: ignore[arg-type]  (no face, no mesh)
        precision,
        SchedulePolicy(),
        grad_divisor,
        torch.device("cpu"),
    )
    specs = [
        TensorSpec(key, tuple(value.shape), value.dtype, value.dtype not in NEVER_TRAINED and key not in frozen)
        for key, value in tensors.items()
    ]
    _, count = piece_of(optimizer_placements(setting.strategy), axes)
    layout = plan_layout(specs, count, granularity=granularity_of(setting.strategy))
    return shard_unit(name, list(tensors.values()), layout, setting)


# --- on ranks that have a process group --------------------------------------------------------------------


def unit_on_ranks(described: Described, **options: Any) -> UnitState:
    """This rank's state of the unit that `values_of` describes, over the default process group."""
    return make_unit(values_of(described), axis_of(default_mesh("cpu")), **options)


def gathered_now(unit: UnitState, **options: Any) -> Gathered:
    """The result of a synchronous gather."""
    gathered = gather_planes(unit, Phase.FORWARD, **options)
    assert isinstance(gathered, Gathered)
    return gathered


def reduced_now(grads: Sequence[torch.Tensor | None], unit: UnitState, **options: Any) -> Buffer:
    """The result of a synchronous reduction."""
    reduced = reduce_scatter(grads, unit, **options)
    assert isinstance(reduced, Buffer)
    return reduced


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes in order: NaN, and dtypes without an equality of their own, compare as well."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors are of one dtype and shape, and equal to the bit."""
    alike = found.dtype == expected.dtype and found.shape == expected.shape
    return alike and torch.equal(raw(found), raw(expected))
