"""Agreement: ranks run the same units in the same order, or say so before collectives of different units meet.

Promises: two ranks' collectives of different units are never taken for one another (where shapes agree their numbers
would mix in silence: pytorch/pytorch#158719). What is about to be sent is held against what came next when things were
last as they are now, which costs no communication; a step that does what an earlier one did compares nothing. Anything
else is compared between ranks first: all come to it and go on, or each that came raises :class:`RankDivergence`, at
once where all came to something, after a while where others wait elsewhere.

[Note: why nothing slips through] What is expected next is a function of the history alone, and the history is the same
on all ranks: what was as expected is what every rank that did not stop to compare expected, and the rest was compared.
So either all ranks send what was expected, or those that do not are heard of, and never send.

With nothing to expect (a first lap) every rank knows that every rank compares, and one small all-reduce does. Otherwise
only those come that met with something else, and they meet in the store.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from fsdp_fn.groups import process_group
from fsdp_fn.state import Axis

REMEMBERED: Final = 100_000
"""Events of which what followed is known for certain: many laps of a large model."""

_registry: dict[tuple[int, ...], tuple[dist.Store, Agreement]] = {}
"""By ranks: one for all models and meshes of these, for meshes of other names and shapes may share process groups."""


_ALL_CAME: Final = "all came"


class RankDivergence(RuntimeError):
    """Ranks came to different units; the message says which rank to which."""


class Event:
    """Something that a unit sends. ``number``: the same on all ranks, and unlike others'."""

    __slots__ = ("number",)

    def __init__(self, name: str) -> None:
        self.number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


class AgreedUnit:
    """A unit among those that some ranks agree on. Made in the same order on all of them.

    ``agreements``: of all its ranks, and of those of each of its axes, whose group other units may have to themselves.
    """

    def __init__(self, agreements: Sequence[Agreement], device: torch.device, timeout: float) -> None:
        self._agreements = [(agreement, agreement.next_identity()) for agreement in agreements]
        self._device, self._timeout = device, timeout
        self._events: dict[str, list[tuple[Agreement, Event]]] = {}

    def check(self, what: str, label: str) -> None:
        """Before ``what`` (such as "the gather for forward") is sent: returns if all ranks of the unit are at it."""
        events = self._events.get(what)
        if events is None:
            events = self._events[what] = [(one, Event(f"{identity} {what}")) for one, identity in self._agreements]
        for agreement, event in events:
            if not agreement.expects(event):
                if not (agreement.expects_nothing() and agreement.all_at(event, self._device)):
                    agreement.meet(event, f"{what} of {label}", self._timeout)
                agreement.add(event)


class Agreement:
    """What some ranks have sent so far, for all models that they run. ``axes``: of the last mesh of theirs."""

    def __init__(self, ranks: tuple[int, ...], store: dist.Store, axes: tuple[Axis, ...]) -> None:
        self._ranks, self._store, self.axes = ranks, store, axes
        self._scope = "fsdp_fn/" + hashlib.sha256(str(ranks).encode()).hexdigest()[:16]
        self._identities = itertools.count()
        self._history: list[Event] = []
        self._dropped = 0
        self._next = 0
        self._seen: dict[tuple[Event | None, Event], int] = {}
        self._last: Event | None = None
        self._comparisons = self._meetings = 0
        self._posted: list[str] = []

    # --- what happened ------------------------------------------------------------------------------------------

    def next_identity(self) -> int:
        """A number for a unit; ranks ask in the same order."""
        return next(self._identities)

    def expects(self, event: Event) -> bool:
        """Whether ``event`` is what came next last time; then it has happened again."""
        at = self._next - self._dropped
        if not 0 <= at < len(self._history) or self._history[at] is not event:
            return False
        self._remember(event, self._next + 1)
        return True

    def expects_nothing(self) -> bool:
        """Whether no event was expected, on any rank."""
        return not 0 <= self._next - self._dropped < len(self._history)

    def add(self, event: Event) -> None:
        """All ranks are at ``event``, which was not expected."""
        self._comparisons += 1
        # What follows is expected as it followed the last time that these two came one after the other.
        seen = self._seen.get((self._last, event))
        self._remember(event, None if seen is None else seen + 1)

    @property
    def compared(self) -> int:
        """How often ranks compared what they are at."""
        return self._comparisons

    def _remember(self, event: Event, following: int | None) -> None:
        self._seen[self._last, event] = self._dropped + len(self._history)
        self._last = event
        self._history.append(event)
        self._next = self._dropped + len(self._history) if following is None else following
        if len(self._history) > 2 * REMEMBERED:
            del self._history[:REMEMBERED]
            self._dropped += REMEMBERED
            self._seen = {pair: at for pair, at in self._seen.items() if at >= self._dropped}

    # --- between ranks ------------------------------------------------------------------------------------------

    def all_at(self, event: Event, device: torch.device) -> bool:
        """Whether all ranks are at ``event``, where all are known to ask."""
        with torch.inference_mode(False), torch.no_grad():
            pair = torch.tensor([event.number, -event.number], dtype=torch.int64, device=device)
            for axis in self.axes:
                dist.all_reduce(pair, op=dist.ReduceOp.MAX, group=process_group(axis))
            most, least = pair.tolist()
        return bool(most == -least)

    def meet(self, event: Event, label: str, timeout: float) -> None:
        """Post what this rank is at, and wait until all ranks have posted the same.

        Either all ranks hear that all came, or each that comes hears that one did not wait for it.
        """
        store, rank = self._store, dist.get_rank()
        where = f"{self._scope}/{self._meetings}"
        self._meetings += 1
        alike, outcome = f"{where}/at {event.number}", f"{where}/outcome"
        store.set(f"{where}/rank {rank}", f"{event.number} {label}")
        store.add(alike, 1)
        if store.add(f"{where}/posted", 1) == len(self._ranks):
            store.compare_set(outcome, "", _ALL_CAME)
        deadline, pause = time.monotonic() + timeout, 0.0002
        while not store.check([outcome]):
            if time.monotonic() > deadline:
                store.compare_set(outcome, "", f"rank {rank} waited {timeout:g} s for the others, and waits no more")
                break
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        if store.get(outcome).decode() != _ALL_CAME or store.add(alike, 0) != len(self._ranks):
            raise RankDivergence(self._report(where, event, label, timeout))
        for key in self._posted:
            store.delete_key(key)  # of the last meeting, which all have left
        shared = [alike, outcome, f"{where}/posted"] if rank == self._ranks[0] else []
        self._posted = [f"{where}/rank {rank}", *shared]

    def _report(self, where: str, event: Event, label: str, timeout: float) -> str:
        here, found = dist.get_rank(), []
        for rank in self._ranks:
            key = f"{where}/rank {rank}"
            posted = self._store.get(key).decode() if self._store.check([key]) else ""
            number, _, other = posted.partition(" ")
            if not posted:
                found.append(f"rank {rank} did not come here within {timeout:g} s, and waits elsewhere or has ended")
            elif number != str(event.number):
                found.append(f"rank {rank} came to {other}{', another one of that name' if other == label else ''}")
        outcome = self._store.get(f"{where}/outcome").decode()
        if outcome != _ALL_CAME and not outcome.startswith(f"rank {here} "):
            found.append(outcome)
        return (
            f"ranks run different units: rank {here} came to {label}; {'; '.join(found)}. "
            "All ranks of a mesh must run the same units in the same order: where each chooses among experts, shard "
            "the module that holds them as one unit, not each expert"
        )


def agreed_unit(
    axes: tuple[Axis, ...], ranks: Sequence[int], device: torch.device, timeout: float
) -> AgreedUnit | None:
    """The next unit on ``axes``, which ``ranks`` (global) share; None for a single rank. They all must call."""
    if math.prod(axis.size for axis in axes) == 1:
        return None
    by_ranks = {tuple(sorted(ranks)): axes}
    for axis in axes:
        if axis.size > 1:
            by_ranks.setdefault(tuple(sorted(dist.get_process_group_ranks(process_group(axis)))), (axis,))
    return AgreedUnit([_agreement(*entry) for entry in by_ranks.items()], device, timeout)


def _agreement(ranks: tuple[int, ...], axes: tuple[Axis, ...]) -> Agreement:
    store = _get_default_store()
    known = _registry.get(ranks)
    if known is None or known[0] is not store:
        known = _registry[ranks] = store, Agreement(ranks, store, axes)
    known[1].axes = axes  # those of earlier meshes may be gone
    return known[1]
