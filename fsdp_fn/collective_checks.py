"""Collective checks: what a gather or a reduction is given, against the unit that it is for.

Promises: every check comes before anything is sent or written, changes nothing, and names the unit, the
tensor or segment, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_fn.placement import Replicate, Sharded
from fsdp_fn.planes import PlaneKind
from fsdp_fn.state import Buffer, Gathered, UnitState, trainable_segments, trainable_tensors


def check_main(unit: UnitState) -> None:
    """ValueError unless the main weights are what the unit's layout and precision say."""
    _check_count(unit, "main weights", unit.main)
    for index, flat in zip(unit.main.held, unit.main.segments, strict=True):
        segment = unit.layout.segments[index]
        label = f"unit {unit.name!r}: main weights, segment {index}"
        dtype = unit.precision.main(segment.dtype)
        _check_flat(label, flat, segment.shard_size, dtype, unit.main.segments[0].device)


def checked_kinds(unit: UnitState, kinds: tuple[PlaneKind, ...]) -> tuple[PlaneKind, ...]:
    """``kinds`` as given; ValueError unless they are one or more of those that the unit stores."""
    absent = [kind for kind in kinds if kind not in unit.kinds]
    if absent or not kinds:
        raise ValueError(
            f"unit {unit.name!r}: expected plane kinds among {[kind.value for kind in unit.kinds]}, got "
            f"{[str(kind) for kind in kinds]}"
        )
    return tuple(PlaneKind(kind) for kind in kinds)


def check_gather_out(unit: UnitState, out: Gathered, needed: tuple[PlaneKind, ...]) -> None:
    """ValueError unless ``out`` is a ``Gathered`` of this unit that can be written into."""
    if out.unit != unit.name:
        raise ValueError(f"gather_planes: out belongs to unit {out.unit!r}, expected {unit.name!r}")
    for kind in needed:
        if kind not in out.planes:
            raise ValueError(f"unit {unit.name!r}: out has no {kind.value} plane to gather into")
        buffer = out.planes[kind]
        if buffer.layout != unit.layout or buffer.held != unit.main.held or buffer.axis != unit.axis:
            raise ValueError(f"unit {unit.name!r}: out has another layout or axis than the unit")
        if not isinstance(buffer.placement, Replicate):
            raise ValueError(f"unit {unit.name!r}: out is placed {buffer.placement}, expected Replicate")
        _check_count(unit, "out", buffer)
        for index, flat in zip(buffer.held, buffer.segments, strict=True):
            segment = unit.layout.segments[index]
            _check_flat(
                f"unit {unit.name!r}: out segment {index}",
                flat,
                segment.size,
                unit.precision.compute(segment.dtype),
                unit.main.segments[0].device,
            )


def check_gradients(grads: Sequence[torch.Tensor | None], unit: UnitState) -> None:
    """ValueError or TypeError unless there is one fitting gradient, or None, per trainable tensor."""
    indices = trainable_tensors(unit.layout)
    if len(grads) != len(indices):
        raise ValueError(
            f"unit {unit.name!r}: expected {len(indices)} gradients, one per trainable tensor, got {len(grads)}"
        )
    device = unit.main.segments[0].device if unit.main.segments else None
    for index, grad in zip(indices, grads, strict=True):
        spec = unit.layout.tensors[index]
        if grad is None:
            continue
        label = f"gradient of {spec.name!r} in unit {unit.name!r}"
        if not isinstance(grad, torch.Tensor):
            raise TypeError(f"{label}: expected a tensor or None, got {type(grad).__name__}")
        if tuple(grad.shape) != spec.shape:
            raise ValueError(f"{label}: expected shape {spec.shape}, got {tuple(grad.shape)}")
        # Inside a traced backward the attribute is out of bounds; there gradients come from autograd and are
        # strided.
        if not torch.compiler.is_compiling() and grad.layout is not torch.strided:
            raise ValueError(f"{label}: expected a dense tensor, got {grad.layout}: call to_dense() first")
        kind = "complex" if spec.dtype.is_complex else "floating-point"
        if not (grad.dtype.is_complex if spec.dtype.is_complex else grad.dtype.is_floating_point):
            raise ValueError(f"{label}: expected a {kind} dtype, got {grad.dtype}")
        if grad.device != device:
            raise ValueError(f"{label}: expected it on {device}, got {grad.device}")


def check_accumulate(unit: UnitState, accumulate: Buffer) -> None:
    """ValueError unless ``accumulate`` is a gradient buffer of this unit."""
    held = trainable_segments(unit.layout)
    if (
        accumulate.layout != unit.layout
        or accumulate.axis != unit.axis
        or accumulate.held != held
        or not isinstance(accumulate.placement, Sharded)
    ):
        raise ValueError(
            f"unit {unit.name!r}: accumulate: expected a sharded buffer of the trainable segments {held}, "
            f"got one of segments {accumulate.held} placed {accumulate.placement} on {accumulate.axis}"
        )
    _check_count(unit, "accumulate", accumulate)
    for index, flat in zip(held, accumulate.segments, strict=True):
        segment = unit.layout.segments[index]
        dtype = unit.precision.main(segment.dtype)
        label = f"unit {unit.name!r}: accumulate segment {index}"
        _check_flat(label, flat, segment.shard_size, dtype, unit.main.segments[0].device)


def _check_count(unit: UnitState, label: str, buffer: Buffer) -> None:
    if len(buffer.segments) != len(buffer.held):
        raise ValueError(
            f"unit {unit.name!r}: {label}: expected one flat tensor for each of the segments {buffer.held}, "
            f"got {len(buffer.segments)}"
        )


def _check_flat(label: str, flat: torch.Tensor, numel: int, dtype: torch.dtype, device: torch.device) -> None:
    if flat.shape != (numel,) or flat.dtype != dtype or flat.device != device or not flat.is_contiguous():
        raise ValueError(
            f"{label}: expected a contiguous {dtype} tensor of shape ({numel},) on {device}, "
            f"got {flat.dtype} of shape {tuple(flat.shape)} on {flat.device}"
        )
