"""Placements: where parameters, gradients and optimizer state live along each mesh axis.

Promises: pure, hashable values; a strategy that cannot be served is refused here, by name and with the reason, before
any buffer is made. What a strategy must communicate (which axes are gathered, how gradients arrive and are completed)
is decided here and nowhere else.

A strategy is one :class:`Placements` per mesh axis, outermost first. Flat tensors are cut over the *inner* axis first:
what the outer axis cuts is a piece of the inner axis' piece. So a gradient is reduced over inner axes before outer
ones, a weight gathered over outer axes before inner ones, and each step meets contiguous ranges only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fsdp_fn.layout import BlockAtomic, Flat, Granularity, TensorAtomic


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds all of it."""


@dataclass(frozen=True)
class Partial:
    """Every rank of the axis holds one addend of it."""


@dataclass(frozen=True)
class Sharded:
    """Every rank of the axis holds its own range, cut as ``granularity`` allows."""

    granularity: Granularity = field(default_factory=Flat)

    def __post_init__(self) -> None:
        if not isinstance(self.granularity, Flat | BlockAtomic | TensorAtomic):
            raise TypeError(
                f"Sharded.granularity: expected Flat, BlockAtomic or TensorAtomic, got {self.granularity!r}"
            )


Placement = Replicate | Partial | Sharded


@dataclass(frozen=True)
class Placements:
    """Placement along one mesh axis of each kind of training state.

    ``parameter``: the weights that compute reads, at rest. ``gradient``: the sum over microbatches, between two
    backward passes; the last one completes it. ``optimizer``: main weights, finished gradients, optimizer state.
    ``axis``: name of the mesh axis; None stands for the only axis of a one-dimensional mesh.

    Raises ValueError for a combination that no order of collectives serves.
    """

    parameter: Placement
    gradient: Placement
    optimizer: Placement
    axis: str | None = None

    def __post_init__(self) -> None:
        where = "Placements" if self.axis is None else f"Placements of axis {self.axis!r}"
        for kind in ("parameter", "gradient", "optimizer"):
            if not isinstance(getattr(self, kind), Replicate | Partial | Sharded):
                raise TypeError(
                    f"{where}: {kind}: expected Replicate(), Partial() or Sharded(), got {getattr(self, kind)!r}"
                )
        if self.axis is not None and (type(self.axis) is not str or not self.axis):
            raise TypeError(f"Placements.axis: expected the name of a mesh axis or None, got {self.axis!r}")
        for kind in ("parameter", "optimizer"):
            if isinstance(getattr(self, kind), Partial):
                raise ValueError(f"{where}: {kind} cannot be Partial(): only gradients are sums that are still to come")
        for kind in ("parameter", "gradient"):
            placement = getattr(self, kind)
            if isinstance(placement, Sharded) and placement != self.optimizer:
                raise ValueError(
                    f"{where}: {kind} is {placement}, but optimizer is {self.optimizer}: a shard of one is made from, "
                    "or given to, a shard of the other, so both must be Sharded with one granularity"
                )


Strategy = tuple[Placements, ...]
"""Placements of each axis, outermost first."""


def ddp(axis: str | None = None) -> Placements:
    """Everything on every rank; one all-reduce of the gradients on the last microbatch (Li et al., 2020)."""
    return Placements(Replicate(), Partial(), Replicate(), axis)


def zero1(axis: str | None = None, *, granularity: Granularity | None = None) -> Placements:
    """Optimizer state sharded; gradients summed locally and reduce-scattered on the last microbatch, weights gathered
    once after each update (ZeRO stage 1: Rajbhandari et al., 2020)."""
    return Placements(Replicate(), Partial(), _sharded(granularity), axis)


def zero2(axis: str | None = None, *, granularity: Granularity | None = None) -> Placements:
    """Optimizer state and gradients sharded: reduce-scattered on every microbatch (ZeRO stage 2)."""
    sharded = _sharded(granularity)
    return Placements(Replicate(), sharded, sharded, axis)


def zero3(granularity: Granularity | None = None, *, axis: str | None = None) -> Placements:
    """Parameters, gradients and optimizer state all sharded alike (ZeRO stage 3).

    ``granularity`` defaults to ``Flat()``: whole rows.
    """
    sharded = _sharded(granularity)
    return Placements(sharded, sharded, sharded, axis)


def hsdp(outer: str, inner: str, *, granularity: Granularity | None = None) -> Strategy:
    """ZeRO-3 over ``inner``, copies over ``outer``: gradients meet over ``outer`` on the last microbatch."""
    return (ddp(outer), zero3(granularity, axis=inner))


def hfsdp(outer: str, inner: str, *, granularity: Granularity | None = None) -> Strategy:
    """As :func:`hsdp`, with the optimizer state sharded over both axes.

    Weights are gathered over ``outer`` once after each update, and stay sharded over ``inner``.
    """
    return (zero1(outer, granularity=granularity), zero3(granularity, axis=inner))


def _sharded(granularity: Granularity | None) -> Sharded:
    return Sharded(Flat() if granularity is None else granularity)


def checked_strategy(placements: Placements | Sequence[Placements] | None) -> Strategy:
    """``placements`` as a strategy, ``zero3()`` for None.

    Raises TypeError for anything else, ValueError where axes repeat, lack a name beside others, differ in granularity,
    or where an outer axis shards parameters or gradients that an inner axis of the optimizer's does not.
    """
    if placements is None:
        return (zero3(),)
    given: object = (placements,) if isinstance(placements, Placements) else placements
    if not isinstance(given, Sequence) or not given or not all(isinstance(p, Placements) for p in given):
        raise TypeError(f"placements: expected Placements (for example zero3()) or one for each axis, got {given!r}")
    strategy: Strategy = tuple(given)
    names = [p.axis for p in strategy]
    if len(strategy) > 1 and None in names:
        raise ValueError(f"placements: each of several axes needs its name, got {names}")
    twice = sorted({str(name) for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"placements: axis {twice[0]!r} is used twice, in {names}")
    cuts = {p.optimizer.granularity for p in strategy if isinstance(p.optimizer, Sharded)}
    if len(cuts) > 1:
        raise ValueError(f"placements: expected one granularity on all axes, got {sorted(map(str, cuts))}")
    for kind in ("parameter", "gradient"):
        whole_inside: str | None = None
        for p in reversed(strategy):
            if not isinstance(p.optimizer, Sharded):
                continue
            if not isinstance(getattr(p, kind), Sharded):
                whole_inside = p.axis
            elif whole_inside is not None:
                raise ValueError(
                    f"placements: {kind} is sharded over axis {p.axis!r} and not over axis {whole_inside!r} inside it, "
                    "over which the optimizer state is sharded too: shard over inner axes first"
                )
    return strategy


def without_axes_of_one(strategy: Strategy, sizes: Sequence[int]) -> Strategy:
    """The same strategy, where an axis of one rank has nothing to communicate: all it holds is placed alike."""
    return tuple(
        p if size > 1 else dataclasses.replace(p, parameter=p.optimizer, gradient=p.optimizer)
        for p, size in zip(strategy, sizes, strict=True)
    )


def granularity_of(strategy: Strategy) -> Granularity:
    """The granularity with which a strategy cuts tensors; ``Flat()`` where it cuts none."""
    return next((p.optimizer.granularity for p in strategy if isinstance(p.optimizer, Sharded)), Flat())


def parameter_placements(strategy: Strategy) -> tuple[Placement, ...]:
    """Placement of the weights at rest, for each axis."""
    return tuple(p.parameter for p in strategy)


def gradient_placements(strategy: Strategy) -> tuple[Placement, ...]:
    """Placement of gradients between microbatches, for each axis."""
    return tuple(p.gradient for p in strategy)


def optimizer_placements(strategy: Strategy) -> tuple[Placement, ...]:
    """Placement of main weights, finished gradients and optimizer state, for each axis."""
    return tuple(p.optimizer for p in strategy)


def axes_to_gather(source: Sequence[Placement], target: Sequence[Placement]) -> tuple[int, ...]:
    """Axes over which ``source`` is gathered to be placed as ``target``, in the order of the gathers."""
    pairs = enumerate(zip(source, target, strict=True))
    return tuple(i for i, (old, new) in pairs if isinstance(old, Sharded) and isinstance(new, Replicate))


class Reduction(StrEnum):
    """One step on a gradient's way from every rank's own to what the optimizer reads."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    SLICE = "slice"
    """Each rank keeps its part of what all have: no communication."""


def arriving(strategy: Strategy) -> tuple[tuple[int, Reduction], ...]:
    """Steps of every microbatch: (axis, what is done over it), from full gradients to the ``gradient`` placement."""
    steps = []
    for index in reversed(range(len(strategy))):
        gradient = strategy[index].gradient
        if not isinstance(gradient, Partial):
            sharded = isinstance(gradient, Sharded)
            steps.append((index, Reduction.REDUCE_SCATTER if sharded else Reduction.ALL_REDUCE))
    return tuple(steps)


def completing(strategy: Strategy) -> tuple[tuple[int, Reduction], ...]:
    """Steps of the last microbatch: from the ``gradient`` placement to the ``optimizer`` placement."""
    steps = []
    for index in reversed(range(len(strategy))):
        gradient, sharded = strategy[index].gradient, isinstance(strategy[index].optimizer, Sharded)
        if isinstance(gradient, Partial):
            steps.append((index, Reduction.REDUCE_SCATTER if sharded else Reduction.ALL_REDUCE))
        elif isinstance(gradient, Replicate) and sharded:
            steps.append((index, Reduction.SLICE))
    return tuple(steps)
