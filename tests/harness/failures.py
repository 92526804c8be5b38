"""How a failed call is told: one line that names the ranks, then every rank's traceback or stack."""

from collections.abc import Iterable, Sequence

from harness.messages import Died, Outcome, Raised, Returned, Stuck


class DistributedFailure(Exception):
    """A call did not end on every rank as the test expects. The message shows each rank."""


class DistributedTimeout(DistributedFailure):
    """At least one rank had not answered within the time limit, and no rank had failed before that."""


def failure_of(call_name: str, outcomes: Sequence[Outcome]) -> DistributedFailure:
    """The exception that tells `outcomes`, of which at least one is not `Returned`."""
    failed_first = any(isinstance(outcome, Raised | Died) for outcome in outcomes)
    kind = DistributedFailure if failed_first else DistributedTimeout
    summary = "; ".join(_summary(rank, outcome) for rank, outcome in enumerate(outcomes))
    details = _details(enumerate(outcomes))
    return kind("\n".join([f"{call_name} on {len(outcomes)} ranks: {summary}", *details]))


def _summary(rank: int, outcome: Outcome) -> str:
    match outcome:
        case Returned():
            return f"rank {rank} returned"
        case Raised(summary=summary):
            return f"rank {rank} raised {summary}"
        case Stuck(seconds=seconds):
            return f"rank {rank} was stuck after {seconds:.1f} s"
        case Died(exit_code=exit_code):
            return f"rank {rank} died with exit code {exit_code}"


def _details(outcomes: Iterable[tuple[int, Outcome]]) -> list[str]:
    details = []
    for rank, outcome in outcomes:
        match outcome:
            case Raised(traceback=text) | Stuck(stack=text) | Died(stack=text) if text:
                details.append(f"--- rank {rank} ---\n{text.rstrip()}")
    return details
