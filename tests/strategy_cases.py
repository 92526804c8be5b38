"""Strategies of one, two and three axes, by name and as hypothesis draws them; and meshes to place them on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from fsdp_fn.groups import axes_of, default_mesh
from fsdp_fn.placement import (
    Partial,
    Placement,
    Placements,
    Replicate,
    Sharded,
    Strategy,
    checked_strategy,
    ddp,
    hfsdp,
    hsdp,
    zero1,
    zero2,
    zero3,
)
from fsdp_fn.state import Axis

Kinds = tuple[Placement, Placement, Placement]
"""Placement of parameter, gradient and optimizer on one axis."""

ONE_AXIS: dict[str, Strategy] = {
    "ddp": (ddp(),),
    "zero1": (zero1(),),
    "zero2": (zero2(),),
    "zero3": (zero3(),),
    "sharded weights, local sums": (Placements(Sharded(), Partial(), Sharded()),),
    "sharded weights, whole gradients": (Placements(Sharded(), Replicate(), Sharded()),),
    "sharded optimizer alone": (Placements(Replicate(), Replicate(), Sharded()),),
    "all replicated": (Placements(Replicate(), Replicate(), Replicate()),),
}
TWO_AXES: dict[str, Strategy] = {
    "hsdp": hsdp("outer", "inner"),
    "hfsdp": hfsdp("outer", "inner"),
    "zero3 over both": (zero3(axis="outer"), zero3(axis="inner")),
    "zero2 over both": (zero2("outer"), zero2("inner")),
    "zero1 over both": (zero1("outer"), zero1("inner")),
    "ddp over both": (ddp("outer"), ddp("inner")),
    "zero2 outside, zero3 inside": (zero2("outer"), zero3(axis="inner")),
    "zero3 outside, ddp inside": (zero3(axis="outer"), ddp("inner")),
    "zero1 outside, all replicated inside": (
        zero1("outer"),
        Placements(Replicate(), Replicate(), Replicate(), "inner"),
    ),
    "local sums outside, whole gradients inside": (
        Placements(Sharded(), Partial(), Sharded(), "outer"),
        Placements(Sharded(), Replicate(), Sharded(), "inner"),
    ),
}


def served(kinds: Kinds) -> bool:
    """Whether one axis may be placed so, written down apart from what refuses it."""
    parameter, gradient, optimizer = kinds
    if isinstance(parameter, Partial) or isinstance(optimizer, Partial):
        return False
    return all(not isinstance(placed, Sharded) or placed == optimizer for placed in (parameter, gradient))


SERVED = [placed for placed in itertools.product([Replicate(), Partial(), Sharded()], repeat=3) if served(placed)]


def served_together(placed: Sequence[Kinds]) -> bool:
    """Whether parameters and gradients are sharded over inner axes before outer ones, where the optimizer's are."""
    cut = [kinds for kinds in placed if isinstance(kinds[2], Sharded)]
    return all(
        not (isinstance(outer[kind], Sharded) and not isinstance(inner[kind], Sharded))
        for kind in (0, 1)
        for outer, inner in itertools.combinations(cut, 2)
    )


def combinations(max_axes: int = 3) -> st.SearchStrategy[list[Kinds]]:
    """Served placements of one to three axes; not all of them are served together."""
    return st.lists(st.sampled_from(SERVED), min_size=1, max_size=max_axes)


def strategies(max_axes: int = 3) -> st.SearchStrategy[Strategy]:
    """Valid strategies of one to three axes, named axis0 (the outermost), axis1, …"""
    return combinations(max_axes).filter(served_together).map(named_strategy)


def named_strategy(placed: Sequence[Kinds]) -> Strategy:
    """As a strategy, checked."""
    return checked_strategy([Placements(*kinds, f"axis{number}") for number, kinds in enumerate(placed)])


def ranks_of(*sizes: int) -> Iterator[tuple[Axis, ...]]:
    """The axes of a mesh as each of its ranks sees them, outermost first; no collective can be called on them."""
    for coordinates in itertools.product(*map(range, sizes)):
        pairs = enumerate(zip(sizes, coordinates, strict=True))
        yield tuple(Axis(f"axis{number}", "none", size, rank) for number, (size, rank) in pairs)


# --- on ranks that have a process group ---


def cases() -> Iterator[tuple[str, Strategy, tuple[Axis, ...]]]:
    """Every strategy on the axes that this world has: one, and with four ranks two of two."""
    axes = axes_of(default_mesh("cpu"))
    for name, strategy in ONE_AXIS.items():
        yield name, checked_strategy(strategy), axes
    if axes[0].size == 4:
        axes = axes_of(init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")))
        for name, strategy in TWO_AXES.items():
            yield name, checked_strategy(strategy), axes


def each_case(check: Callable[[Strategy, tuple[Axis, ...]], None]) -> None:
    """``check`` on every case, and its name where it fails."""
    for name, strategy, axes in cases():
        try:
            check(strategy, axes)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
