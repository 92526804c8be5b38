"""Clipping: the norm of all gradients of a model, the same on every rank, and gradients scaled down to it.

Promises: every element counts once. A rank adds what it holds, divided by the number of ranks that hold the same;
padding is zero; a rank with empty shards takes part. Units may lie on different meshes: the sum goes over all ranks of
the widest one, for what ranks outside a smaller mesh hold are other parameters (experts of their own). A NaN or an
infinity on one rank is seen by all.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from fsdp_fn.groups import process_group
from fsdp_fn.module import FsdpModule
from fsdp_fn.placement import Partial, Placement, Replicate
from fsdp_fn.ragged import UnfinishedGradient
from fsdp_fn.state import Axis, Buffer, trainable_segments

_functional = torch.ops._c10d_functional
_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


def clip_grad_norm(
    gradients: Mapping[str, Buffer], max_norm: float, norm_type: float = 2.0
) -> tuple[dict[str, Buffer], torch.Tensor]:
    """Gradients scaled so that their norm is at most ``max_norm``, in new buffers; and the norm before, a scalar.

    ``norm_type``: any p above 0, or inf. Works inside ``torch.compile``. All ranks must call. Raises ValueError for
    another ``norm_type``, UnfinishedGradient for sums that :func:`~fsdp_fn.finish_gradients` has still to complete.
    """
    norm = grad_norm(gradients, norm_type)
    scale = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    clipped = {}
    for name, buffer in gradients.items():
        flats = tuple(
            flat * scale.to(flat.dtype if not flat.is_complex() else flat.real.dtype) for flat in buffer.segments
        )
        clipped[name] = dataclasses.replace(buffer, segments=flats)
    return clipped, norm


def grad_norm(gradients: Mapping[str, Buffer], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of all gradients together, a scalar; see :func:`clip_grad_norm`."""
    _check_order(norm_type)
    for name, buffer in gradients.items():
        if any(isinstance(placement, Partial) for placement in buffer.placements):
            raise UnfinishedGradient(
                f"unit {name!r}: its gradients are sums that ranks have still to complete: call "
                "finish_gradients(state, gradients) before taking their norm"
            )
    held = [(list(buffer.segments), _copies(buffer.placements, buffer.axes)) for buffer in gradients.values()]
    axes = _widest([buffer.axes for buffer in gradients.values()]) if gradients else ()
    dtypes = [flat.dtype for buffer in gradients.values() for flat in buffer.segments]
    return _total_norm(held, axes, norm_type, None, dtypes)


def clip_grad_norm_(
    module: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale the gradients of a wrapped module, in place, so that their norm is at most ``max_norm``.

    Returns the norm before, a plain scalar, the same on all ranks. ``module``: the outermost wrapped one, or one above;
    gradients of DTensor parameters or of the plain shards that stand in for them. ``norm_type``: any p above 0, or
    inf. All ranks must call. Raises ValueError for another ``norm_type`` and for a module without wrapped units,
    UnfinishedGradient between microbatches, RuntimeError for a norm that is not finite with ``error_if_nonfinite``,
    :class:`~fsdp_fn.agreement.RankDivergence` where other ranks came to something else.
    """
    _check_order(norm_type)
    units = [child._fsdp_unit for child in module.modules() if isinstance(child, FsdpModule)]
    if not units:
        raise ValueError(f"clip_grad_norm_: {type(module).__name__} has no wrapped module")
    parallel_axes = list(
        dict.fromkeys(axis for unit in units for p in unit.parallel if p is not None for axis in p.axes)
    )
    held, gradients = [], []
    for unit in units:
        if unit.delivery.unfinished():
            raise UnfinishedGradient(
                f"{unit.label}: its gradients are sums over microbatches that are not complete: run the backward of "
                "the last microbatch outside accumulating() before taking their norm"
            )
        copies = _copies(unit.state.main.placements, unit.state.axes)
        by_copies: dict[int, list[torch.Tensor]] = {}
        for index, gradient in unit.delivery.local_gradients():
            parallel = unit.parallel[index]
            others = [axis for axis in parallel_axes if axis not in unit.state.axes]
            same = [axis.size for axis in others if parallel is None or not parallel.splits(axis)]
            by_copies.setdefault(copies * math.prod(same), []).append(gradient)
            gradients.append(gradient)
        held += [(local, count) for count, local in by_copies.items()]
    widest = _widest([unit.state.axes for unit in units])
    next(unit for unit in units if unit.state.axes == widest).agree("the norm of all gradients, in the name")
    axes = widest + tuple(axis for axis in parallel_axes if axis not in widest)
    dtypes = [d for unit in units for d in unit.state.main_dtypes(trainable_segments(unit.state.layout))]
    norm = _total_norm(held, axes, norm_type, units[0].state.compute_device, dtypes)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} is {norm.item()}; nothing was scaled. To scale all the "
            "same, leave error_if_nonfinite off"
        )
    scale = torch.clamp(max_norm / (norm + _EPSILON), max=1.0)
    if gradients:
        torch._foreach_mul_(gradients, scale.to(gradients[0].device))
    return norm


def _check_order(norm_type: float) -> None:
    if not float(norm_type) > 0:
        raise ValueError(f"norm_type: expected a number above 0, or inf, got {norm_type}")


def _copies(placements: Sequence[Placement], axes: Sequence[Axis]) -> int:
    """How many ranks hold what this rank holds."""
    pairs = zip(placements, axes, strict=True)
    return math.prod(axis.size for placement, axis in pairs if isinstance(placement, Replicate))


def _widest(candidates: Sequence[tuple[Axis, ...]]) -> tuple[Axis, ...]:
    """The axes whose ranks are all there are; ValueError where others lead to ranks outside them."""
    widest = max(candidates, key=_ranks)
    reached = set(dist.get_process_group_ranks(process_group(widest[0]))) if len(widest) == 1 else None
    for axes in candidates:
        for axis in axes:
            if axis in widest or torch.compiler.is_compiling():
                continue
            if reached is not None and not set(dist.get_process_group_ranks(process_group(axis))) <= reached:
                raise ValueError(
                    f"units lie on axis {axis.name!r} and on axis {widest[0].name!r}, neither of which has all ranks "
                    "of the other: there is no mesh to sum the norm over. Shard the root over a mesh of all ranks"
                )
    return widest


def _ranks(axes: Sequence[Axis]) -> int:
    return math.prod(axis.size for axis in axes)


def _total_norm(
    held: Sequence[tuple[list[torch.Tensor], int]],
    axes: Sequence[Axis],
    order: float,
    device: torch.device | None,
    dtypes: Sequence[torch.dtype],
) -> torch.Tensor:
    """The norm over all ranks of ``axes``; ``held``: local gradients, and how many ranks hold the same.

    ``dtypes``: of all gradients, on this rank or not: ranks that hold nothing reduce in the same one.
    """
    real = [dtype.to_real() for dtype in dtypes]
    wide = functools.reduce(torch.promote_types, real, torch.float32)
    infinite = math.isinf(order)
    parts = []
    for gradients, copies in held:
        filled = [flat.abs() if flat.is_complex() else flat for flat in gradients if flat.numel()]
        if not filled:
            continue
        norms = torch.stack([norm.to(wide) for norm in _norms(filled, order)])
        parts.append(norms.max() if infinite else norms.pow(order).sum() / copies)
    if device is None:
        device = next((flat.device for gradients, _ in held for flat in gradients), torch.device("cpu"))
    total = torch.zeros((), dtype=wide, device=device)
    if parts:
        moved = torch.stack([part.to(device) for part in parts])
        total = moved.max() if infinite else moved.sum()
    total = _over_ranks(total, axes, maximum=infinite)
    return total if infinite else total.pow(1.0 / order)


def _norms(flats: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for flat in flats:
        by_dtype.setdefault(flat.dtype, []).append(flat)
    norms: list[torch.Tensor] = []
    for dtype, same in by_dtype.items():
        norms += torch._foreach_norm(same, order, _wide(dtype))
    return norms


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _over_ranks(value: torch.Tensor, axes: Sequence[Axis], *, maximum: bool) -> torch.Tensor:
    """Sum or maximum over all ranks of the axes; a NaN of one rank is everyone's, where a maximum might lose it."""
    axes = [axis for axis in axes if axis.size > 1]
    if not axes:
        return value
    together = (
        torch.stack([value.nan_to_num(nan=0.0, posinf=math.inf), value.isnan().to(value.dtype)]) if maximum else value
    )
    for axis in axes:
        if torch.compiler.is_compiling():
            reduced = _functional.all_reduce(together, "max" if maximum else "sum", axis.group)
            together = _functional.wait_tensor(reduced)
        else:
            group = process_group(axis)
            together = together.to(_device_of(group, together.device))
            dist.all_reduce(together, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=group)
    together = together.to(value.device)
    return torch.where(together[1] > 0, math.nan, together[0]) if maximum else together


def _device_of(group: dist.ProcessGroup, preferred: torch.device) -> torch.device:
    """Where a group communicates: ``preferred`` if it can, for offloaded gradients are on the host."""
    served = group._device_types
    return preferred if preferred.type in {device.type for device in served} else served[0]
