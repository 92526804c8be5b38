"""Collectives: gather a unit's planes, reduce its gradients; at once, asynchronously, or while compiling.

Promises: one launch per unit and call, for all its tensors together. A gathered weight is a view of the
buffer that the collective wrote, never a copy out of it. The mean over ranks is a sum followed by one
division, so that it is exact on every backend (some backends' own average is not: pytorch/pytorch#162338). A
group of one rank issues no collective at all; there the gathered buffer of an uncast weight *is* the main
weight. Every argument is checked before anything is sent, and on an error the inputs are as they were. All
ranks of the unit's axis must call, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, overload

import torch

from fsdp_fn.collective_checks import (
    check_accumulate,
    check_gather_out,
    check_gradients,
    check_main,
    checked_kinds,
)
from fsdp_fn.groups import process_group
from fsdp_fn.packing import allocate_packed, pack
from fsdp_fn.placement import Replicate, Sharded
from fsdp_fn.planes import Phase, PlaneKind, planes_for_phase
from fsdp_fn.policy import SchedulePolicy
from fsdp_fn.state import Axis, Buffer, Gathered, UnitState, trainable_segments

# What every backend gathers as it is. Others (float8, complex, 16-bit integers, bool) some backend refuses.
_GATHERED_AS_TYPED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_functional = torch.ops._c10d_functional
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
    of this unit to write into. A group of one rank issues no collective: there, without ``out`` and without
    a cast, the weights are views of the main weights themselves. The result carries the unit's version. Not
    differentiable: gradients come back through :func:`reduce_scatter`.
    """
    needed = planes_for_phase(unit.kinds, phase, policy) if kinds is None else checked_kinds(unit, kinds)
    check_main(unit)
    if out is not None:
        check_gather_out(unit, out, needed)
    with torch.no_grad():
        flats, finish = _gather_dense(unit, None if out is None else out.planes[PlaneKind.DENSE].segments)

    def complete() -> Gathered:
        buffer = Buffer(finish(flats), unit.layout, Replicate(), unit.axis, unit.main.held)
        return Gathered(unit.name, dict.fromkeys(needed, buffer), unit.version)

    return Pending(complete) if async_op else complete()


@overload
def reduce_scatter(
    grads: Sequence[torch.Tensor | None],
    unit: UnitState,
    *,
    accumulate: Buffer | None = None,
    async_op: Literal[False] = False,
) -> Buffer: ...
@overload
def reduce_scatter(
    grads: Sequence[torch.Tensor | None],
    unit: UnitState,
    *,
    accumulate: Buffer | None = None,
    async_op: Literal[True],
) -> Pending[Buffer]: ...
def reduce_scatter(
    grads: Sequence[torch.Tensor | None],
    unit: UnitState,
    *,
    accumulate: Buffer | None = None,
    async_op: bool = False,
) -> Buffer | Pending[Buffer]:
    """Average gradients over the unit's axis; every rank keeps its own shard, in the main weights' dtype.

    ``grads``: one per trainable tensor of the unit, in layout order, with the tensor's full shape and any
    floating-point dtype; None counts as zeros (on every rank alike: the collective has a fixed shape). They
    are packed by one fused copy into the reduce dtype, summed over ranks in one launch and divided by the
    axis' size. ``accumulate``: a gradient buffer of this unit that the mean is added into, and returned.
    """
    check_gradients(grads, unit)
    if accumulate is not None:
        check_accumulate(unit, accumulate)
    with torch.no_grad():
        packed = pack(grads, unit, allocate_packed(unit))
        work, shards = _start_reduce(packed, unit.axis)

    def complete() -> Buffer:
        with torch.no_grad():
            mean = _mean(work, shards, unit)
            if accumulate is not None:
                if mean:
                    torch._foreach_add_(list(accumulate.segments), list(mean))
                return accumulate
        held = trainable_segments(unit.layout)
        return Buffer(mean, unit.layout, Sharded(unit.layout.granularity), unit.axis, held)

    return Pending(complete) if async_op else complete()


# --- gather -------------------------------------------------------------------------------------------------


def _gather_dense(
    unit: UnitState, out: tuple[torch.Tensor, ...] | None
) -> tuple[list[torch.Tensor], Callable[[list[torch.Tensor]], tuple[torch.Tensor, ...]]]:
    """Start a dense gather: the tensors in flight, and the function that completes them."""
    axis = unit.axis
    mains = [flat.detach() for flat in unit.main.segments]
    if not mains:
        return [], tuple
    dtypes = [unit.precision.compute(unit.layout.segments[index].dtype) for index in unit.main.held]
    if axis.size == 1:
        if out is None:
            return [flat.to(dtype) for flat, dtype in zip(mains, dtypes, strict=True)], tuple
        torch._foreach_copy_(list(out), mains)
        return list(out), tuple
    if torch.compiler.is_compiling():
        shards = as_gathered([flat.to(dtype) for flat, dtype in zip(mains, dtypes, strict=True)])
        flats = _functional.all_gather_into_tensor_coalesced(shards, axis.size, axis.group)

        def wait(pending: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            arrived = [_functional.wait_tensor(flat) for flat in pending]
            whole = tuple(flat.view(dtype) for flat, dtype in zip(arrived, dtypes, strict=True))
            if out is None:
                return whole
            torch._foreach_copy_(list(out), list(whole))
            return out

        return flats, wait
    process_group(axis)  # its errors come before anything is written
    flats = list(out) if out is not None else allocate_gathered(unit)
    work = fill_gathered(flats, unit)

    def complete(whole: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        work.wait()
        return tuple(whole)

    return flats, complete


def allocate_gathered(unit: UnitState) -> list[torch.Tensor]:
    """Uninitialised full flat tensors of the unit's segments, in their compute dtypes."""
    segments = [unit.layout.segments[index] for index in unit.main.held]
    pairs = zip(unit.main.segments, segments, strict=True)
    return [flat.new_empty(segment.size, dtype=unit.precision.compute(segment.dtype)) for flat, segment in pairs]


def fill_gathered(flats: list[torch.Tensor], unit: UnitState) -> Any:
    """Put this rank's shards into their slots of ``flats`` (cast on the way) and start the in-place gather.

    Returns the work handle. The shard goes into its own slot first so that the collective is in place: then
    it moves only what other ranks hold.
    """
    axis = unit.axis
    slots = own_slots(flats, axis)
    torch._foreach_copy_(slots, list(unit.main.segments))
    return start_gather(flats, slots, axis)


def own_slots(flats: list[torch.Tensor], axis: Axis) -> list[torch.Tensor]:
    """Views of this rank's slot in each full flat tensor."""
    sizes = [flat.numel() // axis.size for flat in flats]
    return [flat.narrow(0, axis.rank * size, size) for flat, size in zip(flats, sizes, strict=True)]


def start_gather(flats: list[torch.Tensor], slots: list[torch.Tensor], axis: Axis) -> Any:
    """One in-place launch that fills ``flats`` from every rank's ``slots``; returns the work handle."""
    return process_group(axis).allgather_into_tensor_coalesced(as_gathered(flats), as_gathered(slots))


def as_gathered(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same memory in the dtype in which it is sent: as it is, or as bytes.

    gloo concatenates what is gathered together and so promotes several dtypes to one: the bytes that arrive
    are then wrong, with no error. Bytes are also what every backend gathers of the dtypes that it has no name
    for.
    """
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) == 1 and dtypes.issubset(_GATHERED_AS_TYPED):
        return tensors
    return [tensor.view(torch.uint8) for tensor in tensors]


# --- reduce -------------------------------------------------------------------------------------------------


def reduce_packed(packed: list[torch.Tensor], out: list[torch.Tensor], axis: Axis) -> None:
    """Mean over ranks of packed gradients, into this rank's shards ``out``, in their dtype and complete."""
    if axis.size == 1:
        torch._foreach_copy_(out, packed)
        return
    shards = out
    if any(flat.dtype is not shard.dtype for flat, shard in zip(packed, out, strict=True)):
        shards = [flat.new_empty(flat.numel() // axis.size) for flat in packed]
    process_group(axis).reduce_scatter_tensor_coalesced(shards, packed).wait()
    wide = _wider(shards, [flat.dtype for flat in out])
    if all(dtype is flat.dtype for dtype, flat in zip(wide, out, strict=True)):
        if shards is not out:
            torch._foreach_copy_(out, shards)
        torch._foreach_div_(out, axis.size)
    else:
        means = [shard.to(dtype) for shard, dtype in zip(shards, wide, strict=True)]
        torch._foreach_div_(means, axis.size)
        torch._foreach_copy_(out, means)


def _start_reduce(packed: list[torch.Tensor], axis: Axis) -> tuple[Any, list[torch.Tensor]]:
    """Start the sum over ranks: a work handle (None for nothing to wait for) and the shards to come."""
    if axis.size == 1 or not packed:
        return None, packed
    if torch.compiler.is_compiling():
        return None, _functional.reduce_scatter_tensor_coalesced(packed, "sum", axis.size, axis.group)
    shards = [flat.new_empty(flat.numel() // axis.size) for flat in packed]
    return process_group(axis).reduce_scatter_tensor_coalesced(shards, packed), shards


def _mean(work: Any, shards: list[torch.Tensor], unit: UnitState) -> tuple[torch.Tensor, ...]:
    """Complete the sum and divide it, into the main weights' dtype."""
    if work is not None:
        work.wait()
    elif torch.compiler.is_compiling() and unit.axis.size > 1:
        shards = [_functional.wait_tensor(shard) for shard in shards]
    held = trainable_segments(unit.layout)
    mains = [unit.precision.main(unit.layout.segments[index].dtype) for index in held]
    if unit.axis.size > 1 and shards:
        shards = [shard.to(dtype) for shard, dtype in zip(shards, _wider(shards, mains), strict=True)]
        torch._foreach_div_(shards, unit.axis.size)
    return tuple(shard.to(dtype) for shard, dtype in zip(shards, mains, strict=True))


def _wider(shards: list[torch.Tensor], dtypes: list[torch.dtype]) -> list[torch.dtype]:
    """Where a sum is divided: a sum may overflow, or be rounded, in a dtype that its mean fits."""
    return [torch.promote_types(shard.dtype, dtype) for shard, dtype in zip(shards, dtypes, strict=True)]
