"""Strategies are values; what no order of collectives serves is refused by axis, kind and reason.

What a strategy communicates is checked by playing it out: every rank's gradient must end as the piece that its
optimizer holds, every gather must put contiguous pieces together, until the weights are whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategy_cases import SERVED, Kinds, combinations, named_strategy, ranks_of, served, served_together, strategies

from fsdp_fn.layout import BlockAtomic, Flat, Granularity, TensorAtomic
from fsdp_fn.placement import (
    Partial,
    Placement,
    Placements,
    Reduction,
    Replicate,
    Sharded,
    Strategy,
    arriving,
    axes_to_gather,
    checked_strategy,
    completing,
    ddp,
    gradient_placements,
    granularity_of,
    hfsdp,
    hsdp,
    optimizer_placements,
    parameter_placements,
    without_axes_of_one,
    zero1,
    zero2,
    zero3,
)
from fsdp_fn.state import Axis, piece_of

granularities = st.sampled_from([Flat(), BlockAtomic(32), BlockAtomic(128), TensorAtomic()])
placements = st.sampled_from([Replicate(), Partial(), Sharded(), Sharded(BlockAtomic(32)), Sharded(TensorAtomic())])
sizes = st.lists(st.integers(1, 4), min_size=3, max_size=3)

# --- one axis -----------------------------------------------------------------------------------------------


@given(placements, placements, placements, st.none() | st.just("data"))
def test_an_axis_that_no_collective_serves_is_refused_by_axis_kind_and_reason(
    parameter: Placement, gradient: Placement, optimizer: Placement, axis: str | None
) -> None:
    kinds = {"parameter": parameter, "gradient": gradient, "optimizer": optimizer}
    if served((parameter, gradient, optimizer)):
        assert Placements(**kinds, axis=axis).optimizer == optimizer
        return
    with pytest.raises(ValueError, match=r"^Placements( of axis 'data')?: ") as refusal:
        Placements(**kinds, axis=axis)
    message = str(refusal.value)
    assert ("'data'" in message) == (axis is not None)
    partial = [kind for kind in ("parameter", "optimizer") if isinstance(kinds[kind], Partial)]
    if partial:
        assert f"{partial[0]} cannot be Partial()" in message
        assert "only gradients are sums" in message
    else:
        kind = next(k for k, p in kinds.items() if isinstance(p, Sharded) and p != optimizer)
        assert f"{kind} is {kinds[kind]}, but optimizer is {optimizer}" in message
        assert "Sharded with one granularity" in message


@pytest.mark.parametrize("value", [Sharded, "sharded", None, Flat()])
@pytest.mark.parametrize("kind", ["parameter", "gradient", "optimizer"])
def test_what_is_no_placement_is_refused_by_kind(kind: str, value: Any) -> None:
    kinds = dict.fromkeys(("parameter", "gradient", "optimizer"), Replicate()) | {kind: value}
    with pytest.raises(TypeError, match=rf"axis 'data': {kind}: expected Replicate\(\)"):
        Placements(**kinds, axis="data")


@pytest.mark.parametrize("axis", ["", 0, ("data",)])
def test_an_axis_without_a_name_is_refused(axis: Any) -> None:
    with pytest.raises(TypeError, match=r"Placements\.axis: expected the name of a mesh axis or None"):
        zero3(axis=axis)


@pytest.mark.parametrize("value", [Flat, 32, "flat", Replicate()])
def test_a_granularity_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="granularity"):
        Sharded(value)


def test_placements_are_compared_and_hashed_by_value() -> None:
    def made() -> list[object]:
        named = [ddp(), zero1(), zero2(), zero3(), zero3(TensorAtomic()), zero3(axis="data"), hsdp("a", "b")]
        return [Replicate(), Partial(), Sharded(), Sharded(BlockAtomic(32)), *named, hfsdp("a", "b")]

    assert made() == made()
    assert len({*made(), *made()}) == len(made())
    assert all(one != other for one, other in itertools.combinations(made(), 2))


# --- named strategies ---------------------------------------------------------------------------------------


@given(granularities, st.none() | st.just("data"))
def test_the_named_strategies_of_one_axis_place_what_the_literature_says(
    granularity: Granularity, axis: str | None
) -> None:
    whole, part, cut = Replicate(), Partial(), Sharded(granularity)
    assert ddp(axis) == Placements(whole, part, whole, axis)
    assert zero1(axis, granularity=granularity) == Placements(whole, part, cut, axis)
    assert zero2(axis, granularity=granularity) == Placements(whole, cut, cut, axis)
    assert zero3(granularity, axis=axis) == Placements(cut, cut, cut, axis)


@given(granularities)
def test_hybrid_strategies_are_zero3_inside_and_copies_or_a_sharded_optimizer_outside(
    granularity: Granularity,
) -> None:
    inner = zero3(granularity, axis="node")
    assert hsdp("rack", "node", granularity=granularity) == (ddp("rack"), inner)
    assert hfsdp("rack", "node", granularity=granularity) == (zero1("rack", granularity=granularity), inner)


def test_whole_rows_are_the_default_granularity() -> None:
    for strategy in ((zero1(),), (zero2(),), (zero3(),), hsdp("a", "b"), hfsdp("a", "b"), (ddp(),)):
        assert granularity_of(strategy) == Flat()
        cut = {placed for placed in optimizer_placements(strategy) if isinstance(placed, Sharded)}
        assert cut <= {Sharded(Flat())}


# --- several axes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [Sharded(), "zero3", [], (), [zero3(), None], zero3])
def test_what_is_no_strategy_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match=r"placements: expected Placements \(for example zero3\(\)\)"):
        checked_strategy(value)


def test_one_placement_a_list_and_none_are_strategies_too() -> None:
    assert checked_strategy(None) == checked_strategy(zero3()) == checked_strategy([zero3()]) == (zero3(),)
    assert checked_strategy(list(hsdp("a", "b"))) == hsdp("a", "b")


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ((zero3(axis="data"), ddp()), r"several axes needs its name, got \['data', None\]"),
        ((zero3(), ddp()), r"several axes needs its name, got \[None, None\]"),
        ((ddp("data"), ddp("node"), zero3(axis="data")), r"axis 'data' is used twice, in \['data', 'node', 'data'\]"),
        (
            (zero1("rack"), zero3(TensorAtomic(), axis="node")),
            r"one granularity on all axes, got \['Flat\(\)', 'TensorAtomic\(\)'\]",
        ),
        (
            (zero3(axis="rack"), zero2("node")),
            "parameter is sharded over axis 'rack' and not over axis 'node' inside it, over which the optimizer",
        ),
        (
            (zero2("rack"), zero1("node")),
            "gradient is sharded over axis 'rack' and not over axis 'node' inside it, over which the optimizer",
        ),
        (
            (zero3(axis="rack"), ddp("row"), zero1("node")),
            "parameter is sharded over axis 'rack' and not over axis 'node' inside it",
        ),
    ],
    ids=["unnamed", "all unnamed", "twice", "granularities", "parameter", "gradient", "one between"],
)
def test_axes_that_do_not_go_together_are_refused_by_name(strategy: Strategy, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        checked_strategy(strategy)


@given(combinations())
def test_axes_are_served_together_unless_an_outer_one_shards_what_an_inner_one_does_not(placed: list[Kinds]) -> None:
    if served_together(placed):
        strategy = named_strategy(placed)
        found = zip(
            parameter_placements(strategy), gradient_placements(strategy), optimizer_placements(strategy), strict=True
        )
        assert list(found) == placed
    else:
        with pytest.raises(ValueError, match=r"(parameter|gradient) is sharded over axis 'axis\d' and not over axis"):
            named_strategy(placed)


@given(strategies(), sizes)
def test_an_axis_of_one_rank_places_all_alike_and_other_axes_stay(strategy: Strategy, of: list[int]) -> None:
    reduced = without_axes_of_one(strategy, of[: len(strategy)])
    for before, after, size in zip(strategy, reduced, of, strict=False):
        assert after.optimizer == before.optimizer
        if size == 1:
            assert after.parameter == after.gradient == after.optimizer
        else:
            assert after == before


# --- what is communicated -----------------------------------------------------------------------------------

Steps = Sequence[tuple[int, Reduction]]
LEADS: dict[Reduction, tuple[Placement, type[Placement]]] = {
    Reduction.ALL_REDUCE: (Partial(), Replicate),
    Reduction.REDUCE_SCATTER: (Partial(), Sharded),
    Reduction.SLICE: (Replicate(), Sharded),
}


def reduced_by(
    steps: Steps, placed: list[Placement], held: range, axes: Sequence[Axis]
) -> tuple[list[Placement], range]:
    """Placements and the elements that a rank holds after ``steps``, each of which must fit what is there."""
    placed = list(placed)
    for index, step in steps:
        needed, becomes = LEADS[step]
        assert placed[index] == needed, f"{step} over axis {index} of a gradient placed {placed}"
        placed[index] = becomes()
        if becomes is Sharded:
            length = len(held) // axes[index].size
            start = held.start + axes[index].rank * length
            held = range(start, start + length)
    return placed, held


def elements_of(placed: Sequence[Placement], axes: Sequence[Axis], total: int) -> range:
    index, count = piece_of(placed, axes)
    return range(index * total // count, (index + 1) * total // count)


@given(strategies(), sizes)
def test_gradients_arrive_and_are_completed_to_the_piece_that_the_optimizer_holds(
    strategy: Strategy, of: list[int]
) -> None:
    total = 4**3 * 3**3
    for axes in ranks_of(*of[: len(strategy)]):
        start: list[Placement] = [Partial()] * len(axes)
        arrived, held = reduced_by(arriving(strategy), start, range(total), axes)
        assert tuple(arrived) == gradient_placements(strategy)
        assert held == elements_of(arrived, axes, total)
        finished, held = reduced_by(completing(strategy), arrived, held, axes)
        assert tuple(finished) == optimizer_placements(strategy)
        assert held == elements_of(finished, axes, total)


@given(strategies(), sizes)
def test_an_axis_is_communicated_over_once_and_what_is_large_goes_over_inner_axes_first(
    strategy: Strategy, of: list[int]
) -> None:
    for steps in (arriving(strategy), completing(strategy)):
        order = [index for index, _ in steps]
        assert order == sorted(order, reverse=True)
    sums = [index for index, step in arriving(strategy) + completing(strategy) if step is not Reduction.SLICE]
    assert sorted(sums) == list(range(len(strategy)))


def gathers_of(source: Sequence[Placement], target: Sequence[Placement], axes: Sequence[Axis]) -> list[Placement]:
    """Placements after the gathers of ``source``, each of which must put contiguous pieces in their order."""
    placed = list(source)
    for index in axes_to_gather(source, target):
        piece, count = piece_of(placed, axes)
        assert isinstance(placed[index], Sharded)
        placed[index] = Replicate()
        whole, fewer = piece_of(placed, axes)
        assert fewer * axes[index].size == count
        assert divmod(piece, axes[index].size) == (whole, axes[index].rank)
    return placed


@given(strategies(), sizes)
def test_weights_are_gathered_from_contiguous_pieces_to_those_at_rest_and_then_to_the_whole(
    strategy: Strategy, of: list[int]
) -> None:
    whole = [Replicate()] * len(strategy)
    for axes in ranks_of(*of[: len(strategy)]):
        at_rest = gathers_of(optimizer_placements(strategy), parameter_placements(strategy), axes)
        assert tuple(at_rest) == parameter_placements(strategy)
        assert gathers_of(at_rest, whole, axes) == whole
        assert gathers_of(optimizer_placements(strategy), whole, axes) == whole


REFUSED = [pair for pair in itertools.product(SERVED, repeat=2) if not served_together(pair)]


@pytest.mark.parametrize("pair", REFUSED, ids=str)
def test_two_axes_are_refused_only_where_some_rank_would_end_with_another_piece(pair: tuple[Kinds, Kinds]) -> None:
    strategy = tuple(Placements(*kinds, f"axis{number}") for number, kinds in enumerate(pair))
    misplaced = []
    for axes in ranks_of(2, 2):
        try:
            at_rest = gathers_of(optimizer_placements(strategy), parameter_placements(strategy), axes)
            gathers_of(at_rest, [Replicate()] * 2, axes)
            arrived, held = reduced_by(arriving(strategy), [Partial(), Partial()], range(4), axes)
            _, held = reduced_by(completing(strategy), arrived, held, axes)
            misplaced.append(held != elements_of(optimizer_placements(strategy), axes, 4))
        except AssertionError:
            misplaced.append(True)
    assert any(misplaced)
