"""Which tensors of a unit share a segment: a search over partitions, in pure integers.

Given the kinds of tensor of a unit that may share a segment at all, this room chooses how to divide them into
segments so that little is padded. One segment per row width wastes up to one atom per rank and width; one
segment for all of them needs a shard length that suits every width, which may be far too long; what is best
between the two depends on the shapes and on the number of shards. Every segment is one more buffer to pack,
gather and reduce, so one more must save one part in `SEGMENT_PRICE_DIVISOR` of the unit's elements. The
result never pads more than a single segment on one grid does, and is the same on every rank, as nothing here
depends on a hash or on names.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, reduce
from math import isqrt
from typing import NamedTuple

from fsdp_fn.layout_pack import Alignment, Kind, Packing, balance, pack, pack_aligned

# One more segment must save one part in so many of the unit's elements; a move between segments, likewise.
SEGMENT_PRICE_DIVISOR = 1024
LEAST_GAIN_DIVISOR = 4096
# Up to so many row widths every partition is looked at (3 ** widths steps); more are joined greedily.
EXHAUSTIVE_WIDTHS = 6
# Packings looked at in one search: so many, and so many kinds in all of them.
PACKING_BUDGET = 300
KIND_BUDGET = 20_000

# How many tensors of each kind lie in one segment.
Counts = tuple[int, ...]


class PlannedSegment(NamedTuple):
    """`runs` of (kind number, element offset, count), in the order of their offsets."""

    shard_size: int
    runs: tuple[tuple[int, int, int], ...]


@lru_cache(maxsize=1024)
def plan_segments(kinds: tuple[Kind, ...], shard_count: int, alignment: Alignment) -> tuple[PlannedSegment, ...]:
    """Segments for tensors that may be cut at multiples of their atom. No kind may have size 0."""
    search = _Search(kinds, shard_count, alignment)
    searched = tuple(search.planned(counts) for counts in search.partition())
    one_grid = plan_one_segment(kinds, shard_count, alignment)
    # The search aligns offsets strictly, so where alignment gives way the single grid may still turn out
    # shorter.
    return min(searched, one_grid, key=search.planned_cost)


@lru_cache(maxsize=1024)
def plan_one_segment(kinds: tuple[Kind, ...], shard_count: int, alignment: Alignment) -> tuple[PlannedSegment, ...]:
    """The classical layout, for comparison: one segment, its shard length a multiple of every atom."""
    packing = pack(kinds, shard_count, alignment, one_grid=True)
    return (PlannedSegment(packing.shard_size, packing.runs),)


@lru_cache(maxsize=1024)
def plan_balanced(kinds: tuple[Kind, ...], shard_count: int, alignment: Alignment) -> tuple[PlannedSegment, ...]:
    """One segment of whole tensors, balanced over the shards. No kind may have size 0."""
    packing = balance(kinds, shard_count, alignment)
    return (PlannedSegment(packing.shard_size, packing.runs),)


class _Search:
    """One search: the packings it has seen, and the cost of a set of segments in elements."""

    def __init__(self, kinds: tuple[Kind, ...], shard_count: int, alignment: Alignment) -> None:
        self.kinds = kinds
        self.shard_count = shard_count
        self.alignment = alignment
        elements = sum(kind.size * kind.copies for kind in kinds)
        self.price = max(1, elements // SEGMENT_PRICE_DIVISOR)
        self.least_gain = max(1, elements // LEAST_GAIN_DIVISOR)
        self.budget = max(2, min(PACKING_BUDGET, KIND_BUDGET // len(kinds)))
        self.packings: dict[Counts, Packing] = {}

    def partition(self) -> list[Counts]:
        """The counts of each segment."""
        together = tuple(kind.copies for kind in self.kinds)
        if self.cost(together) <= self.least_cost(together) + self.price:
            return [together]  # a second segment would cost more than all padding
        widths = self.counts_by_width()
        exhaustive = len(widths) <= EXHAUSTIVE_WIDTHS and 2 ** len(widths) <= self.budget
        united = self.best_partition(widths) if exhaustive else self.joined(widths)
        # The cheapest start is not always the one that moves improve most.
        return min(map(self.improved, (united, widths)), key=lambda partition: sum(map(self.cost, partition)))

    def planned(self, counts: Counts) -> PlannedSegment:
        present = [number for number, count in enumerate(counts) if count]
        packing = pack([self.kinds[k]._replace(copies=counts[k]) for k in present], self.shard_count, self.alignment)
        runs = tuple((present[run.kind], run.offset, run.copies) for run in packing.runs)
        return PlannedSegment(packing.shard_size, runs)

    def planned_cost(self, segments: tuple[PlannedSegment, ...]) -> int:
        return sum(segment.shard_size * self.shard_count + self.price for segment in segments)

    def packing(self, counts: Counts) -> Packing:
        found = self.packings.get(counts)
        if found is None:
            kinds = [kind._replace(copies=count) for kind, count in zip(self.kinds, counts, strict=True) if count]
            found = self.packings[counts] = pack_aligned(kinds, self.shard_count, self.alignment)
        return found

    def cost(self, counts: Counts) -> int:
        """Elements that this segment takes, and its price; an empty one takes nothing."""
        if not any(counts):
            return 0
        return self.packing(counts).shard_size * self.shard_count + self.price

    def least_cost(self, counts: Counts) -> int:
        """`cost`, were nothing padded."""
        return self._filled(counts) + self.price if any(counts) else 0

    def counts_by_width(self) -> list[Counts]:
        """One segment per row width (that is, per atom); tensors that are never cut share one."""
        atoms = [kind.atom if kind.atom < kind.size else 0 for kind in self.kinds]
        return [
            tuple(kind.copies if own == atom else 0 for kind, own in zip(self.kinds, atoms, strict=True))
            for atom in sorted(set(atoms))
        ]

    def best_partition(self, widths: list[Counts]) -> list[Counts]:
        """The cheapest of all ways to share segments, by dynamic programming over subsets of `widths`."""
        everything = (1 << len(widths)) - 1
        united: dict[int, Counts] = {0: tuple(0 for _ in self.kinds)}
        cheapest: dict[int, int] = {0: 0}
        choice: dict[int, int] = {}
        for chosen in range(1, everything + 1):
            lowest = chosen & -chosen
            united[chosen] = _plus(united[chosen ^ lowest], widths[lowest.bit_length() - 1])
            cheapest[chosen], choice[chosen] = self.cost(united[chosen]), chosen
            part = (chosen - 1) & chosen
            while part:
                # The part that holds the lowest width is split off first, so that no partition is seen twice.
                if part & lowest:
                    cost = self.cost(united[part]) + cheapest[chosen ^ part]
                    if cost < cheapest[chosen]:
                        cheapest[chosen], choice[chosen] = cost, part
                part = (part - 1) & chosen
        segments: list[Counts] = []
        rest = everything
        while rest:
            segments.append(united[choice[rest]])
            rest ^= choice[rest]
        return segments

    def joined(self, widths: list[Counts]) -> list[Counts]:
        """Greedy: each width, the fullest first, joins the segment where that is cheapest, or opens one.

        Or all in one segment, where that is cheaper still.
        """
        # Every width is tried with every segment, so the budget bounds how many there may be: the least share
        # one.
        most = isqrt(2 * self.budget)
        ranked = sorted(widths, key=self._filled, reverse=True)
        rest = ranked[most - 1 :]
        segments: list[Counts] = []
        for width in (*ranked[: most - 1], *([reduce(_plus, rest)] if rest else [])):
            alone = self.cost(width)
            added = [self.cost(_plus(segment, width)) - self.cost(segment) for segment in segments]
            cheapest = min(range(len(added)), key=added.__getitem__, default=None)
            if cheapest is None or added[cheapest] > alone:
                segments.append(width)
            else:
                segments[cheapest] = _plus(segments[cheapest], width)
        together = tuple(kind.copies for kind in self.kinds)
        return min(segments, [together], key=lambda partition: sum(map(self.cost, partition)))

    def improved(self, segments: list[Counts]) -> list[Counts]:
        """Moves kinds, whole or in part, to another segment or to one of their own, while that pays."""
        while len(self.packings) < self.budget:
            better = next(self._better(segments), None)
            if better is None:
                break
            segments = better
        return segments

    def _better(self, segments: list[Counts]) -> Iterator[list[Counts]]:
        """The partitions one move away from `segments` that are cheaper by something worth the change."""
        nothing = tuple(0 for _ in self.kinds)
        for source, target, kind, count in self._moves(segments):
            if len(self.packings) >= self.budget:
                return
            moved = tuple(count if number == kind else 0 for number in range(len(self.kinds)))
            receiver = segments[target] if target < len(segments) else nothing
            less, more = _minus(segments[source], moved), _plus(receiver, moved)
            worth = self.cost(segments[source]) + self.cost(receiver) - self.least_gain
            # Packing takes time: not where even packings without padding would not do.
            if self.least_cost(less) + self.least_cost(more) > worth or self.cost(less) + self.cost(more) > worth:
                continue
            others = [counts for number, counts in enumerate(segments) if number not in (source, target)]
            yield [*others, *(counts for counts in (less, more) if any(counts))]

    def _moves(self, segments: list[Counts]) -> Iterator[tuple[int, int, int, int]]:
        """(source, target, kind, how many) of every move to try.

        How many: all of a kind, what the target has room for, and what the source must lose for its shards to
        be one step shorter.
        """
        for source, counts in enumerate(segments):
            excesses = self._excesses(counts)
            for kind, present in enumerate(counts):
                size = self.kinds[kind].size
                for target in range(len(segments) + 1 if present else 0):
                    if target == source:
                        continue
                    amounts = [present, *(-(-excess // size) for excess in excesses)]
                    if target < len(segments):
                        room = self.packing(segments[target]).shard_size * self.shard_count
                        amounts.append((room - self._filled(segments[target])) // size)
                    for amount in dict.fromkeys(amounts):
                        if 0 < amount <= present:
                            yield source, target, kind, amount

    def _excesses(self, counts: Counts) -> list[int]:
        """Elements too many for shards shorter by one step: of the segment's grid, or of one of its atoms."""
        packing = self.packing(counts)
        present = [kind for kind, count in zip(self.kinds, counts, strict=True) if count]
        steps = dict.fromkeys((packing.grid, *(kind.atom for kind in present if kind.atom < kind.size)))
        filled = self._filled(counts)
        return [filled - (packing.shard_size - 1) // step * step * self.shard_count for step in steps]

    def _filled(self, counts: Counts) -> int:
        return sum(kind.size * count for kind, count in zip(self.kinds, counts, strict=True))


def _plus(a: Counts, b: Counts) -> Counts:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _minus(a: Counts, b: Counts) -> Counts:
    return tuple(x - y for x, y in zip(a, b, strict=True))
