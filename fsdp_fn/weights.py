"""Weights: the full weights of a live unit, and where they come from each time.

Promises: which of the three kinds a unit needs follows from its strategy alone. *Standing* weights are there already
(nothing to gather, nothing to cast). *Resident* ones are kept whole and refreshed when the main weights changed.
*Gathered* ones come and go with each use, from the main weights, from planes that the strategy keeps at rest, or in
backward from what a smaller group kept after forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

import torch

from fsdp_fn.gathering import InPlaceGather, Launch, plan_gather
from fsdp_fn.groups import subgroup_of
from fsdp_fn.packing import tensor_views
from fsdp_fn.placement import Placement, Replicate, Sharded, parameter_placements
from fsdp_fn.planes import Phase, PlaneKind
from fsdp_fn.policy import Release, SchedulePolicy
from fsdp_fn.runtime import LastingBuffer, ResizedBuffer
from fsdp_fn.state import Axis, Buffer, UnitState, needs_planes, piece_of


class Sent(Enum):
    """What an acquisition sends: the weights, or planes at rest first, because main weights changed."""

    WEIGHTS = "weights"
    CHANGED_WEIGHTS = "changed weights"


class Weights(Protocol):
    """Full weights of a unit: one view per tensor of its layout."""

    views: tuple[torch.Tensor, ...]
    storages: frozenset[int]
    nbytes: int

    def writes(self) -> int:
        """How often the full weights were changed in place where such a change would be lost."""

    def sends(self, phase: Phase) -> Sent | None:
        """What the next ``acquire`` will send to other ranks, if anything."""

    def acquire(self, phase: Phase) -> int:
        """Have the weights; the bytes of the buffers that were gathered into."""

    def keep_part(self) -> None:
        """Before a release after forward: keep what the policy says is kept for backward."""

    def release(self, how: Release, phase: Phase) -> None:
        """Let them go, as ``phase`` ends."""

    def launch_with(self, launch: Launch) -> None:
        """Gather by these collectives from now on, where each use gathers."""


class StandingWeights:
    """The weights themselves, whole and uncast: a strategy or a group of one that gathers nothing."""

    nbytes = 0

    def __init__(self, source: Buffer) -> None:
        with torch.inference_mode(False), torch.no_grad():
            flats = [flat.detach() for flat in source.segments]
            self.views = tensor_views(source.layout, source.held, flats)
        self.storages = frozenset(flat.untyped_storage()._cdata for flat in flats)
        # Where ranks hold copies, each of them would change its own.
        self._counted = flats if any(axis.size > 1 for axis in source.axes) else []

    def writes(self) -> int:
        """Changes in place. At one rank 0: there such a change is one of the main weights, and stays."""
        return sum(flat._version for flat in self._counted)

    def sends(self, phase: Phase) -> Sent | None:
        """Nothing."""
        return None

    def acquire(self, phase: Phase) -> int:
        """They are always there."""
        return 0

    def keep_part(self) -> None:
        """They stay anyway."""

    def release(self, how: Release, phase: Phase) -> None:
        """They are not a copy."""

    def launch_with(self, launch: Launch) -> None:
        """Nothing is gathered."""


class Changes:
    """How often the main weights of a live unit were changed, as all ranks can tell alike.

    ``marked``: changes that were announced, by an optimizer's hook or by the user. ``laps``: backward passes that
    finished gradients. ``stepped``: whether a torch optimizer is known to step all of these weights.

    Writes through tensors are counted by the flat tensors themselves. Those that nothing counts (kernels that get an
    address) are a hand-written optimizer's; so as long as no torch optimizer is known, each lap counts as a change for
    those who keep a copy of the weights.
    """

    def __init__(self, flats: Sequence[torch.Tensor]) -> None:
        self._flats = tuple(flats)
        self.marked, self.laps, self.stepped = 0, 0, False

    def count(self) -> int:
        """Changes that are known of."""
        return self.marked + sum(flat._version for flat in self._flats)

    def copied(self) -> tuple[int, int]:
        """What a copy made now is a copy of: equal as long as it need not be made again."""
        return self.count(), 0 if self.stepped else self.laps


class AtRest:
    """Planes that a live unit keeps beside its main weights, made from them again when they changed."""

    def __init__(self, unit: UnitState, changes: Changes) -> None:
        placements = parameter_placements(unit.strategy)
        _, pieces = piece_of(placements, unit.axes)
        held, dtypes = unit.main.held, unit.compute_dtypes()
        self.buffer = LastingBuffer(unit.layout, held, dtypes, unit.compute_device, pieces)
        self.plane = Buffer(tuple(self.buffer.writers), unit.layout, placements, unit.axes, held)
        self._main = unit.main.segments
        self._gather = plan_gather(self.buffer.writers, unit.main.placements, placements, unit.axes)
        self._changes = changes
        self._made_of: tuple[int, int] | None = None

    @property
    def sends(self) -> bool:
        """Whether the next refresh will gather."""
        return bool(self._gather.stages) and self._changes.copied() != self._made_of

    def refresh(self) -> int:
        """Gather them again if the main weights changed; the bytes of the buffer that was gathered into."""
        now = self._changes.copied()
        if now == self._made_of:
            return 0
        self._made_of = None
        self._gather.fill(self._main)
        self._gather.start()()
        self._made_of = now
        return self.buffer.nbytes if self._gather.stages else 0


class ResidentWeights:
    """Whole weights at rest (ZeRO-1 and 2): refreshed before a forward, never released."""

    def __init__(self, at_rest: AtRest) -> None:
        self._at_rest = at_rest
        self.views = at_rest.buffer.views
        self.storages = at_rest.buffer.storages
        self.nbytes = at_rest.buffer.nbytes

    def writes(self) -> int:
        """How often they were changed in place; such changes do not reach the shards."""
        return self._at_rest.buffer.writes()

    def sends(self, phase: Phase) -> Sent | None:
        """Something, if they changed."""
        return Sent.CHANGED_WEIGHTS if phase is Phase.FORWARD and self._at_rest.sends else None

    def acquire(self, phase: Phase) -> int:
        """Bring them up to date before a forward; later phases compute with what forward computed with."""
        return self._at_rest.refresh() if phase is Phase.FORWARD else 0

    def keep_part(self) -> None:
        """All of them stay."""

    def release(self, how: Release, phase: Phase) -> None:
        """They stay."""

    def launch_with(self, launch: Launch) -> None:
        """No use gathers them."""


class GatheredWeights:
    """Full weights that exist while they are used."""

    def __init__(self, unit: UnitState, source: Buffer, at_rest: AtRest | None, group_kept: int | None) -> None:
        device = unit.compute_device
        held, dtypes = unit.main.held, unit.compute_dtypes()
        self.buffer = ResizedBuffer(unit.layout, held, dtypes, device)
        self.views, self.storages, self.nbytes = self.buffer.views, self.buffer.storages, self.buffer.nbytes
        self._source, self._at_rest = source.segments, at_rest
        whole: tuple[Placement, ...] = (Replicate(),) * len(unit.axes)
        self.buffer.allocate()  # views are made of bytes that are there
        self._gather = plan_gather(self.buffer.writers, source.placements, whole, unit.axes)
        self.buffer.free(Release.FREE)
        self._kept: _Kept | None = None
        if group_kept is not None and self._gather.stages:
            innermost = next(a for a, p in zip(unit.axes[::-1], source.placements[::-1], strict=True) if _cut(p))
            part = ResizedBuffer(unit.layout, held, dtypes, device, group_kept)
            self._kept = _Kept(part, innermost, group_kept, self.buffer.writers)

    def writes(self) -> int:
        """How often they were changed in place; such changes do not reach the shards."""
        return self.buffer.writes()

    def sends(self, phase: Phase) -> Sent | None:
        """The weights, and before them what they are gathered from, if it changed."""
        if self._at_rest is not None and phase is Phase.FORWARD and self._at_rest.sends:
            return Sent.CHANGED_WEIGHTS
        return Sent.WEIGHTS if self._gather.stages else None

    def acquire(self, phase: Phase) -> int:
        """Allocate and gather: after a forward that kept a part, within the smaller group."""
        self.buffer.allocate()
        if phase is Phase.FORWARD and self._kept is not None:
            self._kept.drop()  # it is of an earlier forward, whose weights may have changed since
        try:
            if self._kept is not None and self._kept.filled:
                return self._kept.gather(self.buffer.nbytes)
            refreshed = self._at_rest.refresh() if self._at_rest is not None and phase is Phase.FORWARD else 0
            self._gather.fill(self._source)
            self._gather.start()()
        except BaseException:
            self.buffer.free(Release.FREE)
            raise
        return refreshed + (self.nbytes if self._gather.stages else 0)

    def keep_part(self) -> None:
        """Keep this rank's piece of the smaller group's, if the policy names one."""
        if self._kept is not None:
            self._kept.fill()

    def release(self, how: Release, phase: Phase) -> None:
        """Give the bytes back; after backward those of a part that was kept, too."""
        self.buffer.free(how)
        if self._kept is not None and phase is Phase.BACKWARD:
            self._kept.drop()

    def launch_with(self, launch: Launch) -> None:
        """All but what a smaller group gathers, and planes at rest."""
        self._gather = self._gather.launched_with(launch)


def _cut(placement: Placement) -> bool:
    return isinstance(placement, Sharded)


class _Kept:
    """This rank's piece, of as many as a smaller group has ranks, of the full weights, between forward and backward."""

    def __init__(self, part: ResizedBuffer, axis: Axis, size: int, wholes: list[torch.Tensor]) -> None:
        self._part, self._axis, self._size, self._wholes = part, axis, size, wholes
        self._gather: InPlaceGather | None = None
        self.filled = False

    def fill(self) -> None:
        # Made on first use: every rank comes here alike, and making a group is a collective.
        if self._gather is None:
            group = subgroup_of(self._axis, self._size)
            self._gather = plan_gather(self._wholes, (Sharded(),), (Replicate(),), (group,))
        self._part.allocate()
        torch._foreach_copy_(self._part.writers, self._gather.slots)
        self.filled = True

    def gather(self, nbytes: int) -> int:
        assert self._gather is not None
        self._gather.fill(self._part.writers)
        self._gather.start()()
        return nbytes if self._gather.stages else 0

    def drop(self) -> None:
        self._part.free(Release.FREE)
        self.filled = False


def weights_of(unit: UnitState, policy: SchedulePolicy, changes: Changes | None = None) -> Weights:
    """The full weights of ``unit``. ``changes``: of a live unit, which makes the planes that it keeps at rest itself.

    Without ``changes``, planes must be in the state already where the strategy keeps any.
    """
    source, at_rest = unit.main, None
    if unit.planes is not None:
        source = unit.planes[PlaneKind.DENSE]
    elif needs_planes(unit) and changes is not None:
        at_rest = AtRest(unit, changes)
        source = at_rest.plane
    _, pieces = piece_of(source.placements, unit.axes)
    if pieces == 1 and at_rest is not None:
        return ResidentWeights(at_rest)
    if pieces == 1 and _computes_as_it_is(source.segments, unit):
        return StandingWeights(source)
    kept = policy.reshard_after_forward
    return GatheredWeights(unit, source, at_rest, None if isinstance(kept, bool) else kept)


def _computes_as_it_is(flats: Sequence[torch.Tensor], unit: UnitState) -> bool:
    pairs = zip(flats, unit.compute_dtypes(), strict=True)
    return all(flat.dtype == dtype and flat.device == unit.compute_device for flat, dtype in pairs)
