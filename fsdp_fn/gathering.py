"""Gathering: flat pieces into the flat whole, in place, over one axis after another.

Promises: this rank's piece is put into its own slot of the target first, so that each collective is in place and moves
only what other ranks hold. Outer axes come first (see ``placement``): every stage fills one contiguous range. An axis
of one rank has no stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fsdp_fn.groups import process_group
from fsdp_fn.placement import Placement, Replicate, axes_to_gather
from fsdp_fn.state import Axis, piece_of

# What every backend gathers as it is. Others (float8, complex, 16-bit integers, bool) some backend refuses.
_GATHERED_AS_TYPED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

_functional = torch.ops._c10d_functional


Launch = Callable[[list[torch.Tensor], list[torch.Tensor], Axis], Any]
"""Starts gathering pieces, which lie in their wholes already, over an axis; what it returns can ``wait()``."""


def all_gather(wholes: list[torch.Tensor], pieces: list[torch.Tensor], axis: Axis) -> Any:
    """By one collective of the process group."""
    return process_group(axis).allgather_into_tensor_coalesced(as_gathered(wholes), as_gathered(pieces))


@dataclass(frozen=True, eq=False)
class Stage:
    """One launch over one axis: ``pieces``, parts of ``wholes``, become all of them."""

    axis: Axis
    wholes: list[torch.Tensor]
    pieces: list[torch.Tensor]
    launch: Launch = all_gather

    def start(self) -> Any:
        """Launch it; returns the work handle."""
        return self.launch(self.wholes, self.pieces, self.axis)


@dataclass(frozen=True, eq=False)
class InPlaceGather:
    """Where this rank's pieces go, and the launches that then complete the target. Views are made once."""

    slots: list[torch.Tensor]
    stages: tuple[Stage, ...]

    def fill(self, pieces: Sequence[torch.Tensor]) -> None:
        """Put this rank's pieces, cast, into their slots. From another device the copy may still be under way."""
        if not self.slots:
            return
        if pieces[0].device == self.slots[0].device:
            torch._foreach_copy_(self.slots, list(pieces))
            return
        for slot, piece in zip(self.slots, pieces, strict=True):
            # Pinned memory: the device's own stream orders it, and the cast is done over there.
            slot.copy_(piece.to(slot.device, non_blocking=True))

    def launched_with(self, launch: Launch) -> InPlaceGather:
        """The same gather by other collectives."""
        return replace(self, stages=tuple(replace(stage, launch=launch) for stage in self.stages))

    def start(self) -> Callable[[], None]:
        """Launch the first stage; the result waits for it and runs the others."""
        if not self.stages:
            return lambda: None
        work = self.stages[0].start()

        def complete() -> None:
            work.wait()
            for stage in self.stages[1:]:
                stage.start().wait()

        return complete


def plan_gather(
    targets: Sequence[torch.Tensor],
    source: Sequence[Placement],
    target: Sequence[Placement],
    axes: Sequence[Axis],
) -> InPlaceGather:
    """How flat ``targets``, one per segment and placed as ``target``, are filled from pieces placed as ``source``."""
    placed = list(source)

    def parts() -> list[torch.Tensor]:
        (first, pieces), (index, count) = piece_of(target, axes), piece_of(placed, axes)
        ratio = count // pieces
        return [flat.narrow(0, (index - first * ratio) * (n // ratio), n // ratio) for flat, n in sized]

    sized = [(flat, flat.numel()) for flat in targets]
    slots = parts()
    stages, pieces = [], slots
    for index in axes_to_gather(source, target):
        placed[index] = Replicate()
        wholes = parts()
        if axes[index].size > 1 and wholes:
            stages.append(Stage(axes[index], wholes, pieces))
        pieces = wholes
    return InPlaceGather(slots, tuple(stages))


def gather_traced(
    pieces: Sequence[torch.Tensor],
    source: Sequence[Placement],
    target: Sequence[Placement],
    axes: Sequence[Axis],
) -> Callable[[], list[torch.Tensor]]:
    """The same while compiling: new tensors. The last stage is waited for by the result."""
    flats = list(pieces)
    order = [axes[index] for index in axes_to_gather(source, target) if axes[index].size > 1]
    dtypes = [flat.dtype for flat in flats]
    if not order or not flats:
        return lambda: flats
    flats = as_gathered(flats)
    for position, axis in enumerate(order):
        if position:
            flats = [_functional.wait_tensor(flat) for flat in flats]
        flats = _functional.all_gather_into_tensor_coalesced(flats, axis.size, axis.group)
    pending = flats

    def complete() -> list[torch.Tensor]:
        arrived = [_functional.wait_tensor(flat) for flat in pending]
        return [flat.view(dtype) for flat, dtype in zip(arrived, dtypes, strict=True)]

    return complete


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
