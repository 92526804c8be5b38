"""Planes: the stored representations of a weight, and which of them each phase computes with.

Promises: pure functions of their arguments. Which planes a phase needs is decided here and nowhere else, so a
schedule can be planned, tested and simulated with no tensor and no process group.
"""

from __future__ import annotations

from enum import StrEnum

from fsdp_fn.policy import SchedulePolicy


class PlaneKind(StrEnum):
    """One stored representation of a weight."""

    DENSE = "dense"
    """The weight itself: serves every phase."""

    ROWWISE = "rowwise"
    """Quantized along the last axis: read by the forward matmul."""

    COLUMNWISE = "columnwise"
    """Quantized along the first axis: read by the input-gradient matmul."""


class Phase(StrEnum):
    """What a unit is being used for."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    """A forward that autograd runs again inside backward."""


def planes_for_phase(available: tuple[PlaneKind, ...], phase: Phase, policy: SchedulePolicy) -> tuple[PlaneKind, ...]:
    """Kinds among ``available`` (the kinds that a unit stores) that ``phase`` computes with, in stored order.

    Forward and recomputation read rowwise planes, backward columnwise ones; a dense plane serves every phase.
    ``policy.unshard_all_planes_in_backward`` adds the rowwise planes in backward. Raises ValueError where a
    unit stores a plane of one direction only and the phase needs the other, TypeError for what is no phase.
    """
    if not isinstance(phase, Phase):
        raise TypeError(f"phase: expected a Phase, got {phase!r}")
    directed = PlaneKind.COLUMNWISE if phase is Phase.BACKWARD else PlaneKind.ROWWISE
    widened = phase is Phase.BACKWARD and policy.unshard_all_planes_in_backward
    needed = tuple(kind for kind in available if widened or kind in (PlaneKind.DENSE, directed))
    quantized = [kind for kind in available if kind is not PlaneKind.DENSE]
    if not available or (quantized and directed not in available):
        raise ValueError(
            f"phase {phase.value} needs a {directed.value} or a dense plane; stored: "
            f"{', '.join(kind.value for kind in available) or 'none'}"
        )
    return needed
