"""Event log: what was gathered, computed, reduced and released, when, and how many bytes travelled.

Promises: a log only listens. It is an argument of whoever wants one, never ambient; with none, nothing is
recorded. Times are seconds of ``time.perf_counter`` on the host: on CPU the work itself, on CUDA when it was
enqueued.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from fsdp_fn.planes import Phase


class Action(StrEnum):
    """What was done to a unit."""

    GATHER = "gather"
    COMPUTE = "compute"
    REDUCE = "reduce"
    RELEASE = "release"


@dataclass(frozen=True)
class LoggedEvent:
    """One action on one unit in one phase; ``transferred`` counts the bytes of the full buffer that moved."""

    unit: str
    phase: Phase
    action: Action
    start: float
    end: float
    transferred: int = 0


@dataclass
class EventLog:
    """An append-only list of events; iterate it, take totals from it, clear it between steps."""

    events: list[LoggedEvent] = field(default_factory=list)

    def add(self, unit: str, phase: Phase, action: Action, start: float, transferred: int = 0) -> None:
        """Append an event that began at ``start`` and ends now."""
        self.events.append(LoggedEvent(unit, phase, action, start, time.perf_counter(), transferred))

    def transferred(self, action: Action) -> int:
        """Bytes that this rank's events of ``action`` moved, full buffers counted."""
        return sum(event.transferred for event in self.events if event.action is action)

    def clear(self) -> None:
        """Forget what was recorded."""
        self.events.clear()

    def __iter__(self) -> Iterator[LoggedEvent]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)
