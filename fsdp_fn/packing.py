"""Packing: gradients of a unit's tensors into the flat buffers that are reduced, and views of flat buffers.

Promises: one fused copy, cast included, and one fused fill of what has no gradient; padding is always zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_fn.layout import Layout, gaps
from fsdp_fn.state import UnitState, trainable_segments, trainable_tensors


def allocate_packed(unit: UnitState) -> list[torch.Tensor]:
    """Uninitialised full flat tensors for the gradients of the trainable segments, in their reduce dtypes."""
    packed = []
    for index in trainable_segments(unit.layout):
        segment = unit.layout.segments[index]
        dtype = unit.precision.reduce(segment.dtype)
        packed.append(torch.empty(segment.size, dtype=dtype, device=unit.compute_device))
    return packed


def pack(grads: Sequence[torch.Tensor | None], unit: UnitState, flats: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copy gradients, cast, into their places of ``flats``; missing ones and padding become zeros."""
    if torch.compiler.is_compiling():
        return _pack_by_concatenation(grads, unit, flats)
    layout, held = unit.layout, trainable_segments(unit.layout)
    copy_packed(grads, tensor_views(layout, held, flats), gap_views(layout, held, flats))
    return flats


def copy_packed(
    grads: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor], padding: Sequence[torch.Tensor]
) -> None:
    """One fused copy of ``grads`` into ``views``, one fused fill of what has no gradient."""
    zeros = list(padding)
    targets, sources = [], []
    for view, grad in zip(views, grads, strict=True):
        if grad is None:
            zeros.append(view)
        else:
            targets.append(view)
            sources.append(grad)
    if targets:
        torch._foreach_copy_(targets, sources)
    if zeros:
        torch._foreach_zero_(zeros)


def tensor_views(layout: Layout, held: Sequence[int], flats: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Views of the tensors of the held segments, in layout order, in full flat tensors of those segments."""
    flat_of = dict(zip(held, flats, strict=True))
    views = []
    for index, spec in enumerate(layout.tensors):
        segment, offset = layout.location(index)
        if segment in flat_of:
            views.append(flat_of[segment].narrow(0, offset, spec.numel).view(spec.shape))
    return tuple(views)


def gap_views(layout: Layout, held: Sequence[int], flats: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Views of the padding in full flat tensors of the held segments."""
    pairs = zip(held, flats, strict=True)
    return tuple(flat.narrow(0, gap.start, len(gap)) for index, flat in pairs for gap in gaps(layout.segments[index]))


def _pack_by_concatenation(
    grads: Sequence[torch.Tensor | None], unit: UnitState, flats: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The same as one expression per segment, which a compiler fuses; ``flats`` give dtype and size only."""
    layout = unit.layout
    by_tensor = dict(zip(trainable_tensors(layout), grads, strict=True))
    packed = []
    for index, flat in zip(trainable_segments(layout), flats, strict=True):
        segment = layout.segments[index]
        pieces = {gap.start: flat.new_zeros(len(gap)) for gap in gaps(segment)}
        for tensor, offset in zip(segment.tensors, segment.offsets, strict=True):
            grad = by_tensor[tensor]
            numel = layout.tensors[tensor].numel
            if numel:
                pieces[offset] = flat.new_zeros(numel) if grad is None else grad.reshape(-1).to(flat.dtype)
        packed.append(torch.cat([pieces[start] for start in sorted(pieces)]))
    return packed
