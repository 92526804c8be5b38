"""Random module trees under random set-ups train as in plain PyTorch."""

from __future__ import annotations

import pytest
from random_models import describe, outcomes_of_seeds
from random_sides import refreezes
from random_specs import draw

CHUNKS, EACH = 4, 75
MOST_REFUSED = 0.05
"""Of the draws; a refusal may be the right answer, but not the usual one."""


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.timeout(900)
def test_random_models_train_as_in_plain_pytorch(chunk: int) -> None:
    outcomes = list(outcomes_of_seeds(range(chunk * EACH, (chunk + 1) * EACH)))
    failed = [describe(outcome) for outcome in outcomes if outcome.kind == "failed"]
    assert not failed, "\n".join(failed)
    assert len(outcomes) == EACH
    odd = [describe(outcome) for outcome in outcomes if outcome.kind != "trained"]
    assert len(odd) <= MOST_REFUSED * EACH, "\n".join(odd)


def test_the_draws_cover_what_they_are_to_cover() -> None:
    draws = [draw(seed) for seed in range(CHUNKS * EACH)]
    assert {drawn.world_size for drawn in draws} == {1, 2, 3, 4}
    assert {drawn.sharding.path for drawn in draws} == {"wrapper", "functional"}
    assert len({drawn.sharding.strategy for drawn in draws}) > 10
    assert {drawn.training.microbatches for drawn in draws} == {1, 2, 3}
    assert sum(refreezes(drawn) for drawn in draws) > 10


def test_a_seed_draws_the_same_every_time() -> None:
    for seed in range(20):
        assert draw(seed) == draw(seed)
