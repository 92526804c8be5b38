"""Gradient flow: a live unit's gradients, from backward through the strategy's reductions to finished shards.

Promises: what one backward delivers is packed once, reduced as the strategy says, and is either *finished* (placed and
typed as the main weights) or, between microbatches of a strategy that sums apart, added to a *sum* that the last
microbatch finishes. Only new gradients are ever scaled, each once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from fsdp_fn.gradients import GradientShards
from fsdp_fn.layout import Layout
from fsdp_fn.packing import copy_packed
from fsdp_fn.placement import Partial, Replicate, arriving, completing, gradient_placements
from fsdp_fn.policy import Release
from fsdp_fn.ragged import RaggedSpec
from fsdp_fn.reducing import Scatter, Steps, divides_on_arrival, reduce_packed, sum_dtypes
from fsdp_fn.runtime import ResizedBuffer
from fsdp_fn.state import (
    Axis,
    Buffer,
    UnitState,
    accumulates_apart,
    accumulation_buffer,
    trainable_segments,
    trainable_tensors,
)


class GradientFlow:
    """``finished``: what this backward completed, None before. ``summed``: microbatches that are not finished yet.

    ``axes``: the unit's, or the same over other groups; ``scatter``: what reduces over shards, None as usual.
    """

    def __init__(
        self, unit: UnitState, finished_specs: Sequence[RaggedSpec], summed_specs: Sequence[RaggedSpec]
    ) -> None:
        self._unit = unit
        self._finished_specs, self._summed_specs = finished_specs, summed_specs
        held = trainable_segments(unit.layout)
        self._reduces = [unit.precision.reduce(unit.layout.segments[index].dtype) for index in held]
        self._packed = ResizedBuffer(unit.layout, held, self._reduces, unit.compute_device)
        self.apart = accumulates_apart(unit)
        self._offloaded = unit.home_device != unit.compute_device
        self._arriving, self._completing = arriving(unit.strategy), completing(unit.strategy)
        on_arrival = divides_on_arrival(unit.strategy)
        self._divisors = (unit.divisor, 1.0) if on_arrival else (1.0, unit.divisor)
        self._generation: GradientShards | None = None
        self.axes: Sequence[Axis] = unit.axes
        self.scatter: Scatter | None = None
        self.finished: GradientShards | None = None
        self.summed: GradientShards | None = None
        self._completed = False

    def arrive(self, grads: Sequence[torch.Tensor | None], *, last_microbatch: bool) -> None:
        """Take the gradients of one call of the unit; calls add up."""
        packed = self._packed
        packed.allocate()
        copy_packed(grads, packed.views, packed.padding)
        if not self.apart:
            self._finish(packed.flats, self._arriving, self._unit.divisor)
        elif not last_microbatch:
            self._add(packed.flats)
        elif self.summed is None or self._completed:
            self._finish(packed.flats, self._arriving + self._completing, self._unit.divisor)
        else:
            self.finish_sum(packed.flats)
        packed.free(Release.FREE)

    def _add(self, flats: list[torch.Tensor]) -> None:
        if self.summed is None:
            self.summed = GradientShards(self._make_sum, self._summed_specs)
            self._reduce(flats, self.summed.flats, self._arriving, self._divisors[0])
        elif not self._arriving and self._divisors[0] == 1.0 and not self._offloaded:
            torch._foreach_add_(self.summed.flats, flats)
        else:
            self._add_reduced(self.summed.flats, flats, self._arriving, self._divisors[0])

    def finish_sum(self, more: list[torch.Tensor] | None = None) -> None:
        """Complete what was summed up over microbatches, with ``more``, the last one's packed gradients.

        The sum itself stays as it was until the backward pass is through: one that fails takes nothing away.
        """
        if self.summed is None or self._completed:
            return
        dtypes = sum_dtypes(self._unit, trainable_segments(self._unit.layout), self._completing)
        device = self._unit.compute_device
        self.settle()
        flats = [flat.to(device, dtype, copy=True) for flat, dtype in zip(self.summed.flats, dtypes, strict=True)]
        if more is not None:
            arrived = [torch.empty_like(flat) for flat in flats]
            self._reduce(more, arrived, self._arriving, self._divisors[0])
            torch._foreach_add_(flats, arrived)
        self._completed = True
        self._finish(flats, self._completing, self._divisors[1])

    def take_finished(self) -> GradientShards | None:
        """The backward pass is through: what it finished, and with it the sum that went into that."""
        finished, self.finished = self.finished, None
        if self._completed:
            self.summed, self._completed = None, False
        return finished

    def drop_finished(self) -> None:
        """The backward pass failed: what it finished is nothing; the sum of earlier microbatches is still there."""
        self.finished, self._completed = None, False

    def _finish(self, flats: list[torch.Tensor], steps: Steps, divisor: float) -> None:
        if self.finished is None:
            self.finished = self._next_generation()
            self._reduce(flats, self.finished.flats, steps, divisor)
        else:
            self._add_reduced(self.finished.flats, flats, steps, divisor)

    def _add_reduced(self, total: list[torch.Tensor], flats: list[torch.Tensor], steps: Steps, divisor: float) -> None:
        reduced = [torch.empty_like(flat) for flat in total]
        self._reduce(flats, reduced, steps, divisor)
        self.settle()
        torch._foreach_add_(total, reduced)

    def _reduce(self, flats: list[torch.Tensor], out: list[torch.Tensor], steps: Steps, divisor: float) -> None:
        reduce_packed(flats, out, self.axes, steps, divisor, self.scatter)

    def settle(self) -> None:
        """Have gradients that are on their way to the host there, before the host reads them."""
        if self._offloaded:
            torch.cuda.current_stream(self._unit.compute_device).synchronize()

    def _next_generation(self) -> GradientShards:
        """Finished gradients that nobody holds: the last ones if so, else new ones."""
        if self._generation is None or not self._generation.unused():
            self._generation = GradientShards(self._make_finished, self._finished_specs)
        self._generation.allocate()
        return self._generation

    def _make_finished(self) -> Buffer:
        held = trainable_segments(self._unit.layout)
        mains = [self._unit.main.segment(index) for index in held]
        flats = tuple(torch.empty_like(flat, pin_memory=flat.is_pinned()) for flat in mains)
        return dataclasses.replace(self._unit.main, segments=flats, held=held)

    def _make_sum(self) -> Buffer:
        device, pinned = self._unit.home_device, self._offloaded
        return accumulation_buffer(
            self._unit, lambda size, dtype: torch.empty(size, dtype=dtype, device=device, pin_memory=pinned)
        )

    @property
    def layout(self) -> Layout:
        """Of the unit whose gradients these are."""
        return self._unit.layout

    def own_numel(self, position: int) -> int:
        """Elements of finished trainable tensor ``position`` that are this rank's."""
        return len(self._unit.main.owned_elements(trainable_tensors(self._unit.layout)[position]))

    def free_unused(self) -> None:
        """Give back the bytes of finished gradients that nobody holds."""
        # What a backward has reduced and not yet handed over is nobody's either, and is still needed: a checkpoint
        # may recompute this unit's next call when its last one is through.
        if self.finished is None and self._generation is not None and self._generation.unused():
            self._generation.free()

    def fold(self, position: int, finished: torch.Tensor) -> None:
        """Put a finished gradient (this rank's rows) back into the sum, so that finishing the sum gives it again."""
        assert self.summed is not None
        unit = self._unit
        copies = [
            axis.rank
            for axis, p in zip(unit.axes, unit.strategy, strict=True)
            if isinstance(p.gradient, Partial) and isinstance(p.optimizer, Replicate)
        ]
        if any(copies):
            return  # the sum over the axis counts it once, from its first rank
        index = trainable_tensors(unit.layout)[position]
        summed = Buffer((), unit.layout, gradient_placements(unit.strategy), unit.axes, ()).owned_elements(index)
        own = unit.main.owned_elements(index)
        target = self.summed.locals[position].view(-1)[own.start - summed.start :][: len(own)]
        target.add_(finished.to(target.device).reshape(-1), alpha=self._divisors[1])
