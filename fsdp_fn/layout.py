"""Where every element of a unit lives: shapes to segments, offsets and each rank's range.

Pure integers: no tensors, no process group, no hidden state. A `Layout` is hashable and the same on every
rank that plans it from the same arguments. It promises that

- every element of every tensor lies in exactly one segment, on exactly one rank, and no two elements share a
  place;
- a segment holds tensors of one dtype that agree in `requires_grad` and `group`, and all its shards are equally long;
- where a shard boundary falls inside a tensor, it falls at a multiple of that tensor's atom (the
  granularity's rows times the row width), counted from the tensor's own start; only a tensor's last block may
  be short;
- each shard starts at a multiple of 16 bytes, and each tensor at a multiple of 256 bytes where that costs
  less than 1% of the segment.

Offsets and sizes are in elements. Ranks are coordinates on the sharding axis, from 0 to `shard_count - 1`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from fsdp_fn.layout_pack import Alignment, Kind
from fsdp_fn.layout_plan import PlannedSegment, plan_balanced, plan_one_segment, plan_segments
from fsdp_fn.layout_types import (
    BlockAtomic,
    Flat,
    Granularity,
    Layout,
    Segment,
    TensorAtomic,
    TensorSpec,
    check_granularity,
    check_index,
)

__all__ = [
    "BlockAtomic",
    "Flat",
    "Granularity",
    "Layout",
    "Segment",
    "TensorAtomic",
    "TensorSpec",
    "gaps",
    "local_offset",
    "owned_range",
    "owner",
    "plan_layout",
    "plan_one_grid",
    "row_bounds",
    "shard_range",
]

SHARD_ALIGNMENT_BYTES = 16
TENSOR_ALIGNMENT_BYTES = 256


def plan_layout(
    tensors: Iterable[TensorSpec],
    shard_count: int,
    *,
    granularity: Granularity = Flat(),  # noqa: B008  (frozen and without fields)
    itemsize: int | None = None,
) -> Layout:
    """Plans segments for one unit, with little padding. Deterministic; the same on every rank.

    Args:
        tensors: the unit's tensors, with distinct names.
        shard_count: ranks on the sharding axis.
        granularity: for tensors that name none.
        itemsize: bytes per element (1, 2, 4, 8 or 16) of the smallest representation that is stored in this
            layout, for example 1 where FP8 planes share the layout of their main weights. Alignment in
            elements follows from it. Default: each segment's own dtype.

    Raises:
        ValueError: `shard_count` below 1, two tensors of one name, or an `itemsize` that is none of these.
        TypeError: `granularity` is none of the three.
    """
    return _plan(tensors, shard_count, granularity, itemsize, plan_segments)


def plan_one_grid(
    tensors: Iterable[TensorSpec],
    shard_count: int,
    *,
    granularity: Granularity = Flat(),  # noqa: B008  (frozen and without fields)
    itemsize: int | None = None,
) -> Layout:
    """As `plan_layout`, but with one segment on the least common multiple of all atoms: for comparison.

    One segment for each dtype and `requires_grad`; whole tensors are balanced as in `plan_layout`.
    """
    return _plan(tensors, shard_count, granularity, itemsize, plan_one_segment)


def shard_range(segment: Segment, rank: int) -> range:
    """The elements of the segment's flat whole that `rank` holds.

    Raises:
        ValueError: there is no such rank.
    """
    check_index("rank", rank, segment.shard_count)
    return range(rank * segment.shard_size, (rank + 1) * segment.shard_size)


def owned_range(layout: Layout, tensor: int, rank: int) -> range:
    """The elements of `tensor`, flattened, that `rank` holds; may be empty.

    Raises:
        ValueError: there is no such tensor or rank.
    """
    index, offset = layout.location(tensor)
    held = shard_range(layout.segments[index], rank)
    numel = layout.tensors[tensor].numel
    return range(_clamp(held.start - offset, numel), _clamp(held.stop - offset, numel))


def local_offset(layout: Layout, tensor: int, rank: int) -> int:
    """Where in `rank`'s local shard of the tensor's segment its `owned_range` begins.

    Where that range is empty: 0 if the tensor lies before the shard, the shard's size if it lies behind it.

    Raises:
        ValueError: there is no such tensor or rank.
    """
    index, offset = layout.location(tensor)
    held = shard_range(layout.segments[index], rank)
    return _clamp(offset - held.start, len(held))


def owner(layout: Layout, tensor: int, element: int) -> tuple[int, int]:
    """(rank, offset in that rank's local shard of the segment) of one element of `tensor`, flattened.

    Raises:
        ValueError: there is no such tensor or element.
    """
    index, offset = layout.location(tensor)
    spec = layout.tensors[tensor]
    check_index(f"element of tensor {spec.name!r}", element, spec.numel)
    return divmod(offset + element, layout.segments[index].shard_size)


def row_bounds(layout: Layout, tensor: int) -> tuple[int, ...]:
    """`shard_count + 1` row numbers, never decreasing: rank r holds rows `bounds[r]` to `bounds[r + 1]`.

    A tensor without dimensions counts as one row. Rows of a tensor without elements are all rank 0's.

    Raises:
        ValueError: there is no such tensor.
    """
    index, offset = layout.location(tensor)
    spec = layout.tensors[tensor]
    if spec.numel == 0:
        return (0,) + (spec.rows,) * layout.shard_count
    shard_size = layout.segments[index].shard_size
    width, numel = spec.row_width, spec.numel
    return tuple(_clamp(rank * shard_size - offset, numel) // width for rank in range(layout.shard_count + 1))


def gaps(segment: Segment) -> tuple[range, ...]:
    """The padding of the segment's flat whole, in ascending order: between tensors, and at the end."""
    found: list[range] = []
    reached = 0
    for offset, numel in (*zip(segment.offsets, segment.numels, strict=True), (segment.size, 0)):
        if offset > reached:
            found.append(range(reached, offset))
        reached = max(reached, offset + numel)
    return tuple(found)


# How one group of kinds becomes segments.
_Planner = Callable[[tuple[Kind, ...], int, Alignment], tuple[PlannedSegment, ...]]


def _plan(
    tensors: Iterable[TensorSpec],
    shard_count: int,
    granularity: Granularity,
    itemsize: int | None,
    planner: _Planner,
) -> Layout:
    specs = tuple(tensors)
    check_granularity(granularity, "the layout")
    if shard_count < 1:
        raise ValueError(f"shard_count must be at least 1, but is {shard_count}")
    if itemsize is not None and itemsize not in (1, 2, 4, 8, 16):
        raise ValueError(f"itemsize must be 1, 2, 4, 8 or 16 bytes, but is {itemsize}")
    _check_names(specs)
    # Tensors that may share a segment, in the order of their first member.
    groups: dict[tuple[torch.dtype, bool, str, bool], list[int]] = {}
    for index, spec in enumerate(specs):
        whole = isinstance(spec.granularity or granularity, TensorAtomic)
        groups.setdefault((spec.dtype, spec.requires_grad, spec.group, whole), []).append(index)
    segments: list[Segment] = []
    for (dtype, _, _, whole), members in groups.items():
        smallest = dtype.itemsize if itemsize is None else min(itemsize, dtype.itemsize)
        chosen = plan_balanced if whole else planner
        segments += _plan_group(specs, members, shard_count, granularity, smallest, chosen)
    return Layout(specs, tuple(segments), shard_count, granularity)


def _plan_group(
    specs: tuple[TensorSpec, ...],
    members: list[int],
    shard_count: int,
    granularity: Granularity,
    itemsize: int,
    planner: _Planner,
) -> list[Segment]:
    alike: dict[tuple[int, int], list[int]] = {}
    for index in members:
        spec = specs[index]
        alike.setdefault((_atom(spec, granularity), spec.numel), []).append(index)
    empty = [index for (_, size), indices in alike.items() if size == 0 for index in indices]
    # Sorted, so that units which differ only in order and names share one plan.
    filled = sorted(key for key in alike if key[1])
    kinds = tuple(Kind(atom, size, len(alike[atom, size])) for atom, size in filled)
    shard_alignment = max(1, SHARD_ALIGNMENT_BYTES // itemsize)
    tensor_alignments = tuple(dict.fromkeys((TENSOR_ALIGNMENT_BYTES // itemsize, shard_alignment, 1)))
    planned: tuple[PlannedSegment, ...] = (PlannedSegment(0, ()),)
    if kinds:
        planned = planner(kinds, shard_count, Alignment(shard_alignment, tensor_alignments))
    unplaced = [iter(alike[key]) for key in filled]
    first = specs[members[0]]
    segments: list[Segment] = []
    for segment in planned:
        placed = [(index, 0) for index in (empty if not segments else ())]
        for kind, offset, count in segment.runs:
            size = kinds[kind].size
            placed += [(next(unplaced[kind]), offset + size * number) for number in range(count)]
        segments.append(
            Segment(
                dtype=first.dtype,
                requires_grad=first.requires_grad,
                tensors=tuple(index for index, _ in placed),
                offsets=tuple(offset for _, offset in placed),
                shard_size=segment.shard_size,
                shard_count=shard_count,
                numels=tuple(specs[index].numel for index, _ in placed),
                group=first.group,
            )
        )
    return segments


def _atom(spec: TensorSpec, default: Granularity) -> int:
    """Elements at whose multiples the tensor may be cut; all of them where it may not."""
    granularity = spec.granularity or default
    if isinstance(granularity, TensorAtomic):
        return spec.numel
    rows = granularity.rows if isinstance(granularity, BlockAtomic) else 1
    return min(rows * spec.row_width, spec.numel)


def _check_names(specs: tuple[TensorSpec, ...]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise ValueError(f"two tensors of one unit are named {spec.name!r}; names must be distinct")
        seen.add(spec.name)


def _clamp(value: int, high: int) -> int:
    return max(0, min(value, high))
