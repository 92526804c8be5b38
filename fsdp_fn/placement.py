"""Placements: where parameters, gradients and optimizer state live along a mesh axis.

Promises: pure, hashable values; a strategy that the collectives cannot serve is refused here, by name, before
any buffer is made.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """Placement along the data-parallel axis of each kind of training state."""

    parameter: Placement
    gradient: Placement
    optimizer: Placement


def zero3(granularity: Granularity | None = None) -> Placements:
    """Parameters, gradients and optimizer state all sharded alike (ZeRO stage 3: Rajbhandari et al., 2020).

    ``granularity`` defaults to ``Flat()``: whole rows.
    """
    sharded = Sharded(Flat() if granularity is None else granularity)
    return Placements(parameter=sharded, gradient=sharded, optimizer=sharded)


def sharded_granularity(placements: Placements) -> Granularity:
    """Granularity of a strategy that shards all three kinds of state alike.

    Raises ValueError, naming the combination, for any other: no collective here serves it.
    """
    if not isinstance(placements, Placements):
        raise TypeError(f"placements: expected Placements (for example zero3()), got {placements!r}")
    parameter = placements.parameter
    if isinstance(parameter, Sharded) and parameter == placements.gradient == placements.optimizer:
        return parameter.granularity
    raise ValueError(
        "placements: expected parameter, gradient and optimizer state sharded with one granularity, "
        f"as by zero3(); got parameter={placements.parameter}, gradient={placements.gradient}, "
        f"optimizer={placements.optimizer}"
    )
