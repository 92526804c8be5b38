"""Collectives: gather a unit's planes, reduce its gradients; at once, asynchronously, or while compiling.

Promises: one launch per unit, call and axis, for all its tensors together. A gathered weight is a view of the
buffer that the collective wrote, never a copy out of it. A group of one rank issues no collective at all; there the
gathered buffer of an uncast weight *is* the main weight. Every argument is checked before anything is sent, and on an
error the inputs are as they were. All ranks of the unit's axes must call, in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar, overload

import torch

from fsdp_fn.collective_checks import (
    check_accumulate,
    check_gather_out,
    check_gradients,
    check_main,
    check_planes,
    checked_kinds,
)
from fsdp_fn.gathering import gather_traced, plan_gather
from fsdp_fn.groups import process_group
from fsdp_fn.packing import allocate_packed, pack
from fsdp_fn.placement import Placement, Replicate, arriving, completing, gradient_placements, parameter_placements
from fsdp_fn.planes import Phase, PlaneKind, planes_for_phase
from fsdp_fn.policy import SchedulePolicy
from fsdp_fn.reducing import divided, divides_on_arrival, start_steps, sum_dtypes
from fsdp_fn.state import (
    Buffer,
    Gathered,
    UnitState,
    accumulates_apart,
    needs_planes,
    piece_of,
    trainable_segments,
)

Result = TypeVar("Result")


@dataclass
class Pending(Generic[Result]):
    """A collective under way; :meth:`wait` gives its result, and may be called more than once.

    On CUDA ``wait`` orders the current stream after the collective; on CPU it blocks. Until then neither the
    inputs nor the output may be written.
    """

    finish: Callable[[], Result]
    _result: list[Result] = field(default_factory=list)

    def wait(self) -> Result:
        """Complete the collective and return what it made."""
        if not self._result:
            self._result.append(self.finish())
        return self._result[0]


@overload
def gather_planes(
    unit: UnitState,
    phase: Phase,
    policy: SchedulePolicy = ...,
    *,
    kinds: tuple[PlaneKind, ...] | None = None,
    out: Gathered | None = None,
    async_op: Literal[False] = False,
) -> Gathered: ...
@overload
def gather_planes(
    unit: UnitState,
    phase: Phase,
    policy: SchedulePolicy = ...,
    *,
    kinds: tuple[PlaneKind, ...] | None = None,
    out: Gathered | None = None,
    async_op: Literal[True],
) -> Pending[Gathered]: ...
def gather_planes(
    unit: UnitState,
    phase: Phase,
    policy: SchedulePolicy = SchedulePolicy(),  # noqa: B008 (frozen)
    *,
    kinds: tuple[PlaneKind, ...] | None = None,
    out: Gathered | None = None,
    async_op: bool = False,
) -> Gathered | Pending[Gathered]:
    """Gather the planes that ``phase`` needs (or exactly ``kinds``), all tensors of the unit in one launch.

    Returns a :class:`Gathered` whose weights are views, in the compute dtype, of one flat buffer per segment
    (``(shard_size * shard_count,)``), or a :class:`Pending` of it with ``async_op``. ``out``: a ``Gathered``
    of this unit to write into. Where nothing has to be gathered or cast, without ``out``, the weights are views of the
    main weights, or of the unit's planes, themselves. The result carries the unit's version. Not differentiable:
    gradients come back through :func:`reduce_scatter`.
    """
    needed = planes_for_phase(unit.kinds, phase, policy) if kinds is None else checked_kinds(unit, kinds)
    check_main(unit)
    check_planes(unit)
    if out is not None:
        check_gather_out(unit, out, needed)
    whole: tuple[Placement, ...] = (Replicate(),) * len(unit.axes)
    source = unit.main if unit.planes is None else unit.planes[PlaneKind.DENSE]
    finish = _start_gather(unit, source, whole, None if out is None else out.planes[PlaneKind.DENSE].segments)

    def complete() -> Gathered:
        return Gathered(unit.name, dict.fromkeys(needed, finish()), unit.version)

    return Pending(complete) if async_op else complete()


def refresh_planes(unit: UnitState) -> UnitState:
    """The unit with the planes that its strategy keeps at rest, made from the main weights as they are now.

    Gathers over the axes that shard the optimizer state and not the parameters; all their ranks must call. A strategy
    that keeps no planes, and a unit that has its planes, are given back as they are: an optimizer's update, which
    changes the weights, leaves a state without planes.
    """
    if not needs_planes(unit) or unit.planes is not None:
        return unit
    check_main(unit)
    finish = _start_gather(unit, unit.main, parameter_placements(unit.strategy), None)
    return dataclasses.replace(unit, planes={PlaneKind.DENSE: finish()})


@overload
def reduce_scatter(
    grads: Sequence[torch.Tensor | None],
    unit: UnitState,
    *,
    accumulate: Buffer | None = None,
    last_microbatch: bool = True,
    async_op: Literal[False] = False,
) -> Buffer: ...
@overload
def reduce_scatter(
    grads: Sequence[torch.Tensor | None],
    unit: UnitState,
    *,
    accumulate: Buffer | None = None,
    last_microbatch: bool = True,
    async_op: Literal[True],
) -> Pending[Buffer]: ...
def reduce_scatter(
    grads: Sequence[torch.Tensor | None],
    unit: UnitState,
    *,
    accumulate: Buffer | None = None,
    last_microbatch: bool = True,
    async_op: bool = False,
) -> Buffer | Pending[Buffer]:
    """Reduce gradients over the unit's axes, as its strategy says, and average them.

    ``grads``: one per trainable tensor of the unit, in layout order, with the tensor's full shape and any
    floating-point dtype; None counts as zeros (on every rank alike: the collective has a fixed shape). They
    are packed by one fused copy into the reduce dtype, summed over ranks in one launch per axis, and divided by the
    number of ranks times ``grad_divisor`` once the sum is complete.

    ``last_microbatch``: the result is placed and typed as the main weights. Without it, as gradients are between
    microbatches: in the accumulation dtype, and not yet summed over axes whose gradient is ``Partial``. ``accumulate``:
    a gradient buffer of an earlier microbatch of this unit, which this one is added into in place; what it then says
    is returned, completed on the last microbatch.
    """
    check_gradients(grads, unit)
    if accumulate is not None:
        check_accumulate(unit, accumulate)
    if not torch.compiler.is_compiling():
        _check_groups(unit)
    apart = accumulates_apart(unit)
    direct = not apart or (last_microbatch and accumulate is None)
    steps = arriving(unit.strategy) + (completing(unit.strategy) if apart and direct else ())
    with torch.no_grad():
        started = start_steps(pack(grads, unit, allocate_packed(unit)), unit.axes, steps)

    def complete() -> Buffer:
        with torch.no_grad():
            gradient = _arrived(started(), unit, finished=direct)
            if accumulate is not None:
                if gradient.segments:
                    torch._foreach_add_(list(accumulate.segments), list(gradient.segments))
                gradient = accumulate
        return finish_gradient(gradient, unit) if last_microbatch and not direct else gradient

    return Pending(complete) if async_op else complete()


def finish_gradient(gradient: Buffer, unit: UnitState) -> Buffer:
    """A gradient summed over microbatches, completed over the axes on which it is not yet, as the optimizer needs it.

    ``gradient``: from :func:`reduce_scatter` with ``last_microbatch=False``; it is left as it was. Where a strategy
    leaves nothing to do, the result is ``gradient`` itself. All ranks of the unit's axes must call.
    """
    check_accumulate(unit, gradient)
    if not accumulates_apart(unit):
        return gradient
    steps = completing(unit.strategy)
    dtypes = sum_dtypes(unit, gradient.held, steps)
    with torch.no_grad():
        pairs = zip(gradient.segments, dtypes, strict=True)
        flats = [flat.detach().to(unit.compute_device, dtype, copy=True) for flat, dtype in pairs]
        sums = start_steps(flats, unit.axes, steps)()
        divisor = 1.0 if divides_on_arrival(unit.strategy) else unit.divisor
        means = divided(sums, divisor, unit.main_dtypes(gradient.held))
    at_home = tuple(flat.to(unit.home_device) for flat in means)
    return dataclasses.replace(unit.main, segments=at_home, held=gradient.held)


def _arrived(flats: list[torch.Tensor], unit: UnitState, *, finished: bool) -> Buffer:
    """What arrived of one microbatch: ``finished`` as the optimizer needs it, or as it is summed up."""
    held = trainable_segments(unit.layout)
    divisor = unit.divisor if finished or divides_on_arrival(unit.strategy) else 1.0
    accumulated = [unit.precision.accumulate(unit.layout.segments[index].dtype) for index in held]
    means = divided(flats, divisor, unit.main_dtypes(held) if finished else accumulated)
    placed = unit.main.placements if finished else gradient_placements(unit.strategy)
    return Buffer(tuple(flat.to(unit.home_device) for flat in means), unit.layout, placed, unit.axes, held)


def _check_groups(unit: UnitState) -> None:
    """Their errors come before anything is written."""
    for axis in unit.axes:
        process_group(axis)


def _start_gather(
    unit: UnitState, source: Buffer, target: tuple[Placement, ...], out: tuple[torch.Tensor, ...] | None
) -> Callable[[], Buffer]:
    """Start to gather ``source`` into ``out`` or into new tensors, in the compute dtypes; the result completes it."""
    flats = [flat.detach() for flat in source.segments]
    dtypes = unit.compute_dtypes()

    def placed(segments: Sequence[torch.Tensor]) -> Buffer:
        return Buffer(tuple(segments), unit.layout, target, unit.axes, unit.main.held)

    if torch.compiler.is_compiling():
        with torch.no_grad():
            cast = [flat.to(dtype) for flat, dtype in zip(flats, dtypes, strict=True)]
            arrive = gather_traced(cast, source.placements, target, unit.axes)

        def arrived() -> Buffer:
            whole = arrive()
            if out is None:
                return placed(whole)
            torch._foreach_copy_(list(out), whole)
            return placed(out)

        return arrived
    _check_groups(unit)
    (_, pieces), (_, count) = piece_of(source.placements, unit.axes), piece_of(target, unit.axes)
    device = unit.compute_device
    # What is made while somebody evaluates may be computed with in training afterwards.
    with torch.inference_mode(False), torch.no_grad():
        if pieces == count and out is None and all(flat.device == device for flat in flats):
            whole = placed([flat.to(dtype) for flat, dtype in zip(flats, dtypes, strict=True)])
            return lambda: whole
        if out is None:
            pairs = zip([unit.layout.segments[index] for index in unit.main.held], dtypes, strict=True)
            targets = [torch.empty(s.size // count, dtype=dtype, device=device) for s, dtype in pairs]
        else:
            targets = list(out)
        gather = plan_gather(targets, source.placements, target, unit.axes)
        gather.fill(flats)
        complete = gather.start()

    def finished() -> Buffer:
        complete()
        return placed(targets)

    return finished
