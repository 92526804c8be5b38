"""Fuzzing: many random set-ups, trained beside plain PyTorch.

    python tests/random_models.py --draws 2000 --start 0

Promises: a failure says what was drawn, and the command that draws it again. A hang or a dead rank costs its own draw
alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from random_specs import Draw, draw, world_size_of
from random_training import Outcome, train_all

from harness import DistributedFailure, run_distributed

TOGETHER = 25
"""Draws of one call of the workers."""
SECONDS_EACH = 10.0


def outcomes_of(draws: Sequence[Draw]) -> Iterator[Outcome]:
    """What became of ``draws``, all of one world size."""
    waiting = list(draws)
    while waiting:
        now = waiting[:TOGETHER]
        failure: DistributedFailure | None = None
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "outcomes"
            try:
                run_distributed(now[0].world_size, train_all, now, report, timeout=30.0 + SECONDS_EACH * len(now))
            except DistributedFailure as error:
                failure = error
            lines = report.read_text().splitlines() if report.exists() else []
        told = [Outcome(**json.loads(line)) for line in lines]
        ended = [outcome for outcome in told if outcome.kind not in ("begun", "failing")]
        yield from ended
        if failure is not None:
            if len(ended) == len(now):
                raise failure
            seed = now[len(ended)].seed
            errors = [outcome.text for outcome in told if outcome.kind == "failing" and outcome.seed == seed]
            ended.append(Outcome(seed, "failed", "\n".join([*errors, str(failure)])))
            yield ended[-1]
        waiting = waiting[len(ended) :]


def outcomes_of_seeds(seeds: Iterable[int]) -> Iterator[Outcome]:
    """What became of them, world size by world size."""
    by_size: dict[int, list[Draw]] = {}
    for seed in seeds:
        by_size.setdefault(world_size_of(seed), []).append(draw(seed))
    for size in sorted(by_size):
        yield from outcomes_of(by_size[size])


def describe(outcome: Outcome) -> str:
    """What was drawn, what came of it, and how to see that again."""
    drawn = draw(outcome.seed)
    parts = [f"  {field.name}: {getattr(drawn, field.name)}" for field in dataclasses.fields(drawn)]
    again = f"python tests/random_models.py --draws 1 --start {outcome.seed}"
    return "\n".join([f"seed {outcome.seed} {outcome.kind}: {again}", *parts, outcome.text.rstrip(), ""])


def main() -> int:
    """The command; its exit status is 1 where a draw failed."""
    parser = argparse.ArgumentParser(description="Train random models sharded, beside plain PyTorch.")
    parser.add_argument("--draws", type=int, default=300, help="how many (default: %(default)s)")
    parser.add_argument("--start", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--refusals", action="store_true", help="tell of refused and void draws too")
    arguments = parser.parse_args()
    counts = {"trained": 0, "refused": 0, "void": 0, "failed": 0}
    for outcome in outcomes_of_seeds(range(arguments.start, arguments.start + arguments.draws)):
        counts[outcome.kind] += 1
        if outcome.kind == "failed" or (arguments.refusals and outcome.kind != "trained"):
            print(describe(outcome), flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
