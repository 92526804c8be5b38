"""Collective checks: what a gather or a reduction is given, against the unit that it is for.

Promises: every check comes before anything is sent or written, changes nothing, and names the unit, the
tensor or segment, what was expected and what came.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fsdp_fn.placement import Placement, Replicate, gradient_placements, parameter_placements
from fsdp_fn.planes import PlaneKind
from fsdp_fn.state import (
    Buffer,
    Gathered,
    UnitState,
    needs_planes,
    piece_of,
    trainable_segments,
    trainable_tensors,
)


def check_main(unit: UnitState) -> None:
    """ValueError unless the main weights are what the unit's layout and precision say."""
    main, home = unit.main, unit.home_device
    _check_buffer(unit, "main weights", main, main.placements, main.held, unit.precision.main, home)


def check_planes(unit: UnitState) -> None:
    """ValueError unless stored planes are what the unit's strategy keeps at rest."""
    if unit.planes is None:
        return
    if not needs_planes(unit):
        raise ValueError(f"unit {unit.name!r}: its strategy keeps no planes beside the main weights, but it has some")
    for kind, buffer in unit.planes.items():
        placed = parameter_placements(unit.strategy)
        label, device = f"{kind.value} plane", unit.compute_device
        _check_buffer(unit, label, buffer, placed, unit.main.held, unit.precision.compute, device)


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
        whole = (Replicate(),) * len(unit.axes)
        given, device = out.planes[kind], unit.compute_device
        _check_buffer(unit, "out", given, whole, unit.main.held, unit.precision.compute, device)


def check_gradients(grads: Sequence[torch.Tensor | None], unit: UnitState) -> None:
    """ValueError or TypeError unless there is one fitting gradient, or None, per trainable tensor."""
    indices = trainable_tensors(unit.layout)
    if len(grads) != len(indices):
        raise ValueError(
            f"unit {unit.name!r}: expected {len(indices)} gradients, one per trainable tensor, got {len(grads)}"
        )
    device = unit.compute_device
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
    """ValueError unless ``accumulate`` is a gradient buffer of this unit, as it is between microbatches."""
    placed, held = gradient_placements(unit.strategy), trainable_segments(unit.layout)
    label, dtype_of = "accumulated gradient", unit.precision.accumulate
    _check_buffer(unit, label, accumulate, placed, held, dtype_of, unit.home_device)


def _check_buffer(
    unit: UnitState,
    label: str,
    buffer: Buffer,
    placements: tuple[Placement, ...],
    held: tuple[int, ...],
    dtype_of: Callable[[torch.dtype], torch.dtype],
    device: torch.device,
) -> None:
    label = f"unit {unit.name!r}: {label}"
    if buffer.layout != unit.layout or buffer.axes != unit.axes:
        raise ValueError(f"{label}: has another layout or other axes than the unit")
    if buffer.placements != placements or buffer.held != held:
        raise ValueError(
            f"{label}: expected the segments {held} placed {_placed(placements)}, got the segments {buffer.held} "
            f"placed {_placed(buffer.placements)}"
        )
    if len(buffer.segments) != len(held):
        raise ValueError(f"{label}: expected a flat tensor for each of the segments {held}, got {len(buffer.segments)}")
    _, count = piece_of(placements, unit.axes)
    for index, flat in zip(held, buffer.segments, strict=True):
        shape, dtype = (unit.layout.segments[index].size // count,), dtype_of(unit.layout.segments[index].dtype)
        if flat.shape != shape or flat.dtype != dtype or flat.device != device or not flat.is_contiguous():
            raise ValueError(
                f"{label}, segment {index}: expected a contiguous {dtype} tensor of shape {shape} on {device}, "
                f"got {flat.dtype} of shape {tuple(flat.shape)} on {flat.device}"
            )


def _placed(placements: tuple[Placement, ...]) -> str:
    return ", ".join(map(str, placements))
