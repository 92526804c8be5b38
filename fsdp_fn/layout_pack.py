"""Packing of one segment: where each tensor begins, and how long every rank's shard is.

Pure integers, in elements. Given tensors that may be cut only at multiples of their atom, this room finds a
short shard length, the same for all ranks, and an offset for each tensor such that every shard boundary that
falls inside a tensor falls at a multiple of that tensor's atom, counted from the tensor's own start.

The classical answer is a grid: a shard length divisible by every atom, and each tensor at a multiple of its
own. A tensor over which two or more boundaries fall does need that. One shorter than two shards does not: it
can be placed so that at most one boundary falls inside it, at a legal row. Shard lengths that only the long
tensors divide are therefore tried as well, and where row widths share few factors they are much shorter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from math import gcd, lcm
from typing import NamedTuple

# Shares are whole divisors: a least common multiple may be far beyond what a float holds.
# A stronger alignment of tensor offsets may lengthen the segment by one part in so many.
ALIGNMENT_COST_DIVISOR = 100
# Padding below one part in so many of a segment's own elements is not worth a longer search.
GOOD_ENOUGH_DIVISOR = 1024
# Shard lengths tried one by one on a grid. Beyond, each is longer by one part in so many, where the search
# must succeed or could still halve the segment.
PATIENCE = 2
STRIDE_DIVISOR = 256
# Grids tried beside that of all tensors, and holes between tensors that are kept to be filled.
MOST_GRIDS = 8
MOST_HOLES = 16


class Kind(NamedTuple):
    """Tensors that lay out alike: `size` elements, cut only at multiples of `atom` (at `size`: never)."""

    atom: int
    size: int
    copies: int


class Run(NamedTuple):
    """`copies` tensors of the kind number `kind`, back to back from element `offset` on."""

    kind: int
    offset: int
    copies: int


class Packing(NamedTuple):
    """One segment: every rank's shard has `shard_size` elements, a multiple of `grid`."""

    shard_size: int
    grid: int
    runs: tuple[Run, ...]


class Alignment(NamedTuple):
    """In elements: what shard starts are multiples of; what tensor offsets may be, strongest first."""

    shard: int
    offsets: tuple[int, ...]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def pack_aligned(kinds: Sequence[Kind], shard_count: int, alignment: Alignment, *, one_grid: bool = False) -> Packing:
    """The shortest segment found for `kinds` (none of size 0) over `shard_count` equal shards.

    Tensor offsets have the strongest alignment, whatever it costs. With `one_grid` only shard lengths
    divisible by every atom are tried: the classical layout.
    """
    packing = _shortest(kinds, shard_count, alignment, alignment.offsets[0], one_grid, bound=None)
    assert packing is not None, "without a bound the search goes on until everything fits"
    return packing


def pack(kinds: Sequence[Kind], shard_count: int, alignment: Alignment, *, one_grid: bool = False) -> Packing:
    """As `pack_aligned`, but an alignment of offsets that costs too much gives way to a weaker one."""
    best = pack_aligned(kinds, shard_count, alignment, one_grid=one_grid)
    costly = best.shard_size * ALIGNMENT_COST_DIVISOR // (ALIGNMENT_COST_DIVISOR + 1)
    shorter = _shortest(kinds, shard_count, alignment, alignment.offsets[-1], one_grid, bound=costly)
    if shorter is None:
        return best
    # The strongest alignment costs too much: the strongest that does not, then.
    affordable = shorter.shard_size + shorter.shard_size // ALIGNMENT_COST_DIVISOR + 1
    for offset_alignment in alignment.offsets[1:-1]:
        aligned = _shortest(kinds, shard_count, alignment, offset_alignment, one_grid, bound=affordable)
        if aligned is not None:
            return aligned
    return shorter


def balance(kinds: Sequence[Kind], shard_count: int, alignment: Alignment) -> Packing:
    """Whole tensors, the largest first, each to the emptiest shard (the lowest of equals)."""

    def attempt(offset_alignment: int) -> Packing:
        order = sorted(range(len(kinds)), key=lambda kind: (-kinds[kind].size, kind))
        loads = [(0, shard) for shard in range(shard_count)]
        heapify(loads)
        placed: list[tuple[int, int, int]] = []
        for kind in order:
            for _ in range(kinds[kind].copies):
                load, shard = loads[0]
                placed.append((kind, shard, load))
                heapreplace(loads, (load + round_up(kinds[kind].size, offset_alignment), shard))
        grid = lcm(alignment.shard, offset_alignment)
        shard_size = round_up(max(load + kinds[kind].size for kind, _, load in placed), grid)
        runs = (Run(kind, shard * shard_size + load, 1) for kind, shard, load in placed)
        return Packing(shard_size, grid, tuple(sorted(runs, key=lambda run: run.offset)))

    attempts = [attempt(offset_alignment) for offset_alignment in alignment.offsets]
    limit = attempts[-1].shard_size + attempts[-1].shard_size // ALIGNMENT_COST_DIVISOR
    return next(packing for packing in attempts if packing.shard_size <= limit)


def _least_shard_size(kinds: Sequence[Kind], shard_count: int, offset_alignment: int) -> int:
    """No packing with offsets so aligned has shorter shards than this."""
    extent = sum(round_up(kind.size, offset_alignment) * kind.copies for kind in kinds)
    uncut = max((kind.size for kind in kinds if kind.atom >= kind.size), default=0)
    # Nothing needs to follow the last tensor.
    return max(-(-(extent - offset_alignment + 1) // shard_count), uncut)


def _shortest(
    kinds: Sequence[Kind],
    shard_count: int,
    alignment: Alignment,
    offset_alignment: int,
    one_grid: bool,
    *,
    bound: int | None,
) -> Packing | None:
    """The packing with the shortest shards found; with a `bound`, one with shards below it, or None."""
    least = _least_shard_size(kinds, shard_count, offset_alignment)
    elements = sum(kind.size * kind.copies for kind in kinds)
    good_enough = elements + elements // GOOD_ENOUGH_DIVISOR
    whole, *partial = _grids(kinds, alignment)
    best: Packing | None = None
    # On the whole grid they certainly fit; the others count where they give shorter shards, the finest first.
    for grid in (whole, *(() if one_grid else reversed(partial[-MOST_GRIDS:]))):
        for shard_size in _shard_sizes(least, grid, bound):
            runs = _place_all(kinds, shard_size, shard_count, offset_alignment)
            if runs is not None:
                best, bound = Packing(shard_size, grid, runs), shard_size
                break
        if best is not None and best.shard_size * shard_count <= good_enough:
            break
    return best


def _grids(kinds: Sequence[Kind], alignment: Alignment) -> list[int]:
    """Grids to try: that of all kinds first, then of ever fewer, the longest tensors always among them."""
    grids = [alignment.shard]
    for kind in sorted(kinds, key=lambda kind: kind.size, reverse=True):
        if kind.atom < kind.size:
            grids.append(lcm(grids[-1], kind.atom))
    return list(dict.fromkeys(reversed(grids)))


def _shard_sizes(least: int, grid: int, bound: int | None) -> Iterator[int]:
    """Multiples of `grid` from `least` on: the first few below `bound`, then in strides below half of it.

    Without a `bound` they go on for ever.
    """
    shard_size, tried = max(round_up(least, grid), grid), 0
    while bound is None or shard_size < (bound if tried < PATIENCE else bound // 2):
        yield shard_size
        tried += 1
        shard_size += grid if tried < PATIENCE else round_up(max(shard_size // STRIDE_DIVISOR, 1), grid)


def _place_all(
    kinds: Sequence[Kind], shard_size: int, shard_count: int, offset_alignment: int
) -> tuple[Run, ...] | None:
    """First fit, coarse atoms first (fine ones fill what is left); None where something does not fit."""
    if not all(_fits_somewhere(kind, shard_size) for kind in kinds):
        return None
    end = shard_size * shard_count
    free = [(0, end)]
    # What alignment alone leaves free is not worth a second look.
    worthwhile = max(offset_alignment, min(kind.size for kind in kinds))
    runs: list[Run] = []
    for index in sorted(range(len(kinds)), key=lambda i: (-kinds[i].atom, -kinds[i].size, i)):
        kind = kinds[index]
        remaining, hole = kind.copies, 0
        while remaining:
            if hole == len(free):
                return None
            start, stop = free[hole]
            offset = _first_legal(kind, start, shard_size, offset_alignment)
            if offset is None or offset + kind.size > stop:
                hole += 1
                continue
            count = min(remaining, _run_length(kind, offset, stop, shard_size, offset_alignment))
            runs.append(Run(index, offset, count))
            remaining -= count
            rest = ((start, offset), (offset + count * kind.size, stop))
            free[hole : hole + 1] = [(low, high) for low, high in rest if high - low >= worthwhile or low < high == end]
            dropped = max(0, len(free) - MOST_HOLES)
            del free[:dropped]
            hole = max(0, hole - dropped)
    return tuple(sorted(runs, key=lambda run: run.offset))


def _fits_somewhere(kind: Kind, shard_size: int) -> bool:
    """Whether a tensor of this kind may be cut by such shards at all, wherever it begins."""
    # Across a single boundary: at least `size - shard_size` elements lie before it, at most `shard_size`.
    needed = round_up(max(0, kind.size - shard_size), kind.atom)
    return shard_size % kind.atom == 0 or needed <= shard_size


def _first_legal(kind: Kind, start: int, shard_size: int, offset_alignment: int) -> int | None:
    """The first offset from `start` on where `kind` may lie; None where two shards offer none."""
    offset = round_up(start, offset_alignment)
    boundary = (offset // shard_size + 1) * shard_size
    if offset + kind.size <= boundary:
        return offset
    if shard_size % kind.atom == 0:
        return round_up(offset, lcm(kind.atom, offset_alignment))
    # At most one boundary may fall inside: look back from it in whole atoms, the farthest first. Offsets
    # repeat modulo the alignment, so one period decides.
    period = offset_alignment // gcd(kind.atom, offset_alignment)
    for _ in range(2):
        farthest = (boundary - offset) // kind.atom * kind.atom
        for before in range(farthest, max(farthest - period * kind.atom, -1), -kind.atom):
            if before + shard_size < kind.size:
                break
            if (boundary - before) % offset_alignment == 0:
                return boundary - before
        offset, boundary = round_up(boundary, offset_alignment), boundary + shard_size
        if offset + kind.size <= boundary:
            return offset
    return None


def _run_length(kind: Kind, offset: int, stop: int, shard_size: int, offset_alignment: int) -> int:
    """How many of `kind` may lie back to back from the legal `offset` to `stop`."""
    if kind.size % offset_alignment:
        return 1
    step = lcm(kind.atom, offset_alignment)
    if shard_size % kind.atom == 0 and kind.size % step == 0 and offset % step == 0:
        return (stop - offset) // kind.size
    boundary = (offset // shard_size + 1) * shard_size
    return max(1, (min(boundary, stop) - offset) // kind.size)
