"""Placements are values, and a strategy that no collective serves is refused by name."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_fn.layout import BlockAtomic, Flat, Granularity, TensorAtomic
from fsdp_fn.placement import Partial, Placement, Placements, Replicate, Sharded, sharded_granularity, zero3

granularities = st.sampled_from([Flat(), BlockAtomic(32), BlockAtomic(128), TensorAtomic()])
placements = st.sampled_from([Replicate(), Partial(), Sharded(), Sharded(BlockAtomic(32)), Sharded(TensorAtomic())])


def test_zero3_shards_all_three_kinds_of_state_by_whole_rows() -> None:
    assert zero3() == Placements(Sharded(Flat()), Sharded(Flat()), Sharded(Flat()))


@given(granularities)
def test_zero3_keeps_the_granularity_that_it_is_given(granularity: Granularity) -> None:
    assert sharded_granularity(zero3(granularity)) == granularity


@given(placements, placements, placements)
def test_only_three_like_sharded_placements_are_served(
    parameter: Placement, gradient: Placement, optimizer: Placement
) -> None:
    chosen = Placements(parameter, gradient, optimizer)
    if isinstance(parameter, Sharded) and parameter == gradient == optimizer:
        assert sharded_granularity(chosen) == parameter.granularity
    else:
        with pytest.raises(ValueError, match="optimizer state sharded") as refusal:
            sharded_granularity(chosen)
        assert all(str(placement) in str(refusal.value) for placement in (parameter, gradient, optimizer))


@pytest.mark.parametrize("value", [Flat, 32, "flat", Replicate()])
def test_a_granularity_that_is_none_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="granularity"):
        Sharded(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [Sharded(), None, "zero3"])
def test_what_is_no_strategy_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="expected Placements"):
        sharded_granularity(value)  # type: ignore[arg-type]


def test_placements_are_compared_and_hashed_by_value() -> None:
    def made() -> list[object]:
        return [Replicate(), Partial(), Sharded(), Sharded(BlockAtomic(32)), zero3(), zero3(TensorAtomic())]

    assert made() == made()
    assert len({*made(), *made()}) == len(made())
    assert all(one != other for one, other in itertools.combinations(made(), 2))
