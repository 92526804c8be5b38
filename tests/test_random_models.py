"""Random models, strategies, precisions and schedules train as plain PyTorch does.

What is drawn is in ``random_specs``; ``make fuzz ARGS="--draws 2000"`` draws more of them.
"""

from __future__ import annotations

import pytest
from random_models import describe, outcomes_of_seeds

DRAWS = 300
EACH = 75


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("start", range(0, DRAWS, EACH))
def test_random_set_ups_train_as_plain_pytorch(start: int) -> None:
    outcomes = list(outcomes_of_seeds(range(start, start + EACH)))
    assert len(outcomes) == EACH
    failed = [describe(outcome) for outcome in outcomes if outcome.kind == "failed"]
    assert not failed, "\n".join(failed)
    refused = [describe(outcome) for outcome in outcomes if outcome.kind != "trained"]
    assert len(refused) <= 0.15 * EACH, "too many are refused:\n" + "\n".join(refused)
