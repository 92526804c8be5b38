"""Passes: which units are open in which backward pass, and what happens when it ends.

Promises: whatever a backward pass opened is closed when it ends, however it ends.

[Note: sweep] ``autograd.grad`` for an input only never reaches Open. So the first Close of a backward queues a
callback for its end, which releases what is still gathered. If that backward raises, the callback is dropped unrun;
dropping it is then the signal to put everything back.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from fsdp_fn.events import EventLog
from fsdp_fn.policy import Release

if TYPE_CHECKING:
    from fsdp_fn.bracket import Unit


def in_backward() -> bool:
    """Whether the caller runs inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


class Bracket:
    """What the units of one model share: the backward passes under way, and the log, if any.

    ``last_microbatch``: whether the backward passes that come complete the gradients.
    """

    def __init__(self, release: Release, log: EventLog | None = None) -> None:
        self.release = release
        self.log = log
        self.last_microbatch = True
        self._unfinished: list[weakref.ref[Unit]] = []
        self.open: list[UnitCall] = []
        self._held: weakref.WeakSet[Unit] = weakref.WeakSet()
        self._passes: dict[int, weakref.ref[BackwardPass]] = {}

    def expect_more(self, unit: Unit) -> None:
        """A unit's gradients are a sum that the last microbatch completes, whether or not it uses the unit."""
        if all(reference() is not unit for reference in self._unfinished):
            self._unfinished.append(weakref.ref(unit))

    def take_unfinished(self) -> list[Unit]:
        """Units of which that was said since the last call, in the order in which it was."""
        references, self._unfinished = self._unfinished, []
        return [unit for reference in references if (unit := reference()) is not None]

    def hold(self, unit: Unit) -> None:
        """Keep a unit's weights gathered until a backward pass without ``create_graph`` ends."""
        self._held.add(unit)

    def holds(self, unit: Unit) -> bool:
        """Whether they are kept."""
        return unit in self._held

    def let_go(self) -> None:
        """Such a backward pass ended."""
        held, self._held = self._held, weakref.WeakSet()
        for unit in held:
            unit.drop_kept()

    def current_pass(self) -> BackwardPass:
        """The backward pass that is running now; the first call in one queues the callback for its end."""
        task = torch._C._current_graph_task_id()
        reference = self._passes.get(task)
        current = reference() if reference is not None else None
        if current is None:
            current = BackwardPass(self)
            self._passes = {k: r for k, r in self._passes.items() if r() is not None}
            self._passes[task] = weakref.ref(current)
            torch.autograd.Variable._execution_engine.queue_callback(current)
        return current


class BackwardPass:
    """What is open in one backward pass. Owned by the engine alone, so that its end is ours to see."""

    def __init__(self, bracket: Bracket) -> None:
        # The engine owns this pass, and this pass the bracket: nothing points back.
        self._bracket, self.makes_graph = bracket, False
        self.calls: dict[UnitCall, None] = {}
        self.kept: dict[Unit, None] = {}
        self.delivered: dict[Unit, None] = {}
        self._ended = False

    def __call__(self) -> None:
        """The backward pass ended as it should."""
        self._close()
        if self.delivered:
            for unit in self._bracket.take_unfinished():
                if unit.last_microbatch:
                    unit.complete_sum()
                    self.delivered[unit] = None
                else:
                    self._bracket.expect_more(unit)
        waiting = list(self.delivered)
        try:
            while waiting:
                waiting.pop(0).finish_backward()
        finally:
            # A user's hook raised: what the other units reduced must not be added to the next backward's.
            for unit in waiting:
                unit.drop_backward()

    def __del__(self) -> None:
        if not self._ended:
            self._close()
            for unit in self.delivered:
                unit.drop_backward()

    def _close(self) -> None:
        self._ended = True
        for call in list(self.calls):
            call.unit.leave_backward(call, self)
        for unit in self.kept:
            if not self._bracket.holds(unit) and not unit.keeps_after_backward:
                unit.drop_kept()
        if not self.makes_graph:
            self._bracket.let_go()


class UnitCall:
    """One call of a unit's forward, as its backward will need it. ``parent``: the call in which it was made."""

    __slots__ = ("__weakref__", "opened_at", "parent", "unit", "version")

    def __init__(self, unit: Unit, parent: UnitCall | None) -> None:
        self.unit = unit
        self.parent = parent
        self.version = unit.weights_version()
        self.opened_at = 0.0

    def enter_backward(self) -> None:
        """Backward has come to this call."""
        self.unit.enter_backward(self)
