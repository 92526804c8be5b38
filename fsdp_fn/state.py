"""State: the frozen dataclasses that every function here takes and gives back.

Promises: each is a pytree whose leaves are tensors and nothing else. Layouts, placements, axes, names and
versions are its static context, hashable and compared by value, so ``tree_map`` never touches them and
``torch.compile`` guards on them. A process group is held by name, size and this rank's coordinate, never as a
live object.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fsdp_fn.layout import Layout
from fsdp_fn.placement import Placement, Sharded, Strategy, gradient_placements, parameter_placements
from fsdp_fn.planes import PlaneKind
from fsdp_fn.policy import PrecisionPolicy


@dataclass(frozen=True)
class Axis:
    """A mesh axis that state is placed along: its name, process group by name, size, this rank on it."""

    name: str
    group: str
    size: int
    rank: int


@dataclass(frozen=True)
class Buffer:
    """Flat tensors of a unit, one per held segment of its layout, as placed along each axis (outermost first).

    ``segments[k]`` belongs to ``layout.segments[held[k]]`` and holds the range of its flat whole that
    ``placements`` give to this rank: all ``size`` elements where no axis is ``Sharded``, else one piece of as many as
    the sharded axes have ranks together (``shard_size`` elements where these are the layout's ``shard_count``).
    """

    segments: tuple[torch.Tensor, ...]
    layout: Layout
    placements: tuple[Placement, ...]
    axes: tuple[Axis, ...]
    held: tuple[int, ...]

    @property
    def piece(self) -> tuple[int, int]:
        """(index, count): each flat tensor is piece ``index`` of the ``count`` equal pieces of its segment."""
        return piece_of(self.placements, self.axes)

    def segment(self, index: int) -> torch.Tensor:
        """The flat tensor of ``layout.segments[index]``; KeyError where this buffer does not hold it."""
        if index not in self.held:
            raise KeyError(f"segment {index} is not held by this buffer, which holds segments {self.held}")
        return self.segments[self.held.index(index)]

    def tensor(self, index: int) -> torch.Tensor:
        """The whole of tensor ``index``, a view; ValueError where this rank holds only a part of it."""
        _, count = self.piece
        if count > 1:
            raise ValueError(
                f"tensor {self.layout.tensors[index].name!r} is in {count} pieces, placed "
                f"{', '.join(map(str, self.placements))}: gather it first, or take owned(i) for the part held here"
            )
        segment, offset = self.layout.location(index)
        spec = self.layout.tensors[index]
        return self.segment(segment)[offset : offset + spec.numel].view(spec.shape)

    def owned_elements(self, index: int) -> range:
        """The elements of tensor ``index``, flattened, that are held here: whole rows, perhaps none."""
        segment, offset = self.layout.location(index)
        piece, count = self.piece
        size, numel = self.layout.segments[segment].size // count, self.layout.tensors[index].numel
        first = min(max(piece * size - offset, 0), numel)
        return range(first, min(max((piece + 1) * size - offset, 0), numel))

    def owned(self, index: int) -> torch.Tensor:
        """The part of tensor ``index`` that is held here, a view: whole rows, perhaps none.

        Shape ``(rows, *shape[1:])`` for whole-row granularities; a 0-dim tensor gives ``()`` or ``(0,)``.
        """
        spec = self.layout.tensors[index]
        segment, offset = self.layout.location(index)
        piece, count = self.piece
        elements = self.owned_elements(index)
        start = offset + elements.start - piece * (self.layout.segments[segment].size // count) if elements else 0
        flat = self.segment(segment)[start : start + len(elements)]
        if not spec.shape:
            return flat.view(()) if len(elements) else flat
        # As row_bounds has it: the rows of a tensor without elements are all the first piece's.
        empty_rows = spec.rows if piece == 0 else 0
        rows = len(elements) // spec.row_width if spec.row_width else empty_rows
        return flat.view(rows, *spec.shape[1:])


def piece_of(placements: Sequence[Placement], axes: Sequence[Axis]) -> tuple[int, int]:
    """(index, count): which of how many equal pieces of a flat whole this rank holds. Inner axes cut first."""
    index, count = 0, 1
    for placement, axis in reversed(list(zip(placements, axes, strict=True))):
        if isinstance(placement, Sharded):
            index, count = index * axis.size + axis.rank, count * axis.size
    return index, count


@dataclass(frozen=True)
class UnitState:
    """Sharded state of one unit.

    ``main``: the optimizer's copy of the weights. ``planes``: the weights that compute reads, at rest, where these are
    placed otherwise than the main weights (see :func:`needs_planes`), by kind; None where they are to be made from the
    main weights (``refresh_planes``). Elsewhere a dense weight's one plane is its main weight, cast to the compute
    dtype while it is put into its slot of the gathered buffer, so nothing is stored for it twice.

    ``strategy``: placements of each axis of ``main.axes``. ``grad_divisor``: what the mean over ranks is divided by
    besides. ``gradient``: as left by the last reduction, or None. ``carrier``: leaves that receive gradients as they
    are between microbatches, where these are placed or typed otherwise than the main weights. ``device``: where the
    weights are gathered; None for where the main weights are. ``version`` counts changes of the weights.
    """

    name: str
    main: Buffer
    precision: PrecisionPolicy
    strategy: Strategy
    grad_divisor: float = 1.0
    planes: dict[PlaneKind, Buffer] | None = None
    gradient: Buffer | None = None
    carrier: Buffer | None = None
    device: torch.device | None = None
    version: int = 0

    @property
    def layout(self) -> Layout:
        return self.main.layout

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The data-parallel axes, outermost first."""
        return self.main.axes

    @property
    def kinds(self) -> tuple[PlaneKind, ...]:
        """Plane kinds that this unit stores."""
        return (PlaneKind.DENSE,)

    @property
    def compute_device(self) -> torch.device:
        """Where the weights are gathered and gradients come from."""
        if self.device is not None or not self.main.segments:
            return self.device or torch.device("cpu")
        return self.main.segments[0].device

    @property
    def home_device(self) -> torch.device:
        """Where main weights and gradients are at rest: the host, where they are offloaded."""
        return self.main.segments[0].device if self.main.segments else self.compute_device

    @property
    def divisor(self) -> float:
        """What the sum of gradients over all axes is divided by."""
        return self.grad_divisor * math.prod([axis.size for axis in self.axes])  # a list: torch.compile follows it

    def main_dtypes(self, held: Sequence[int]) -> list[torch.dtype]:
        """Dtypes of the main weights and finished gradients of the given segments."""
        return [self.precision.main(self.layout.segments[index].dtype) for index in held]

    def compute_dtypes(self) -> list[torch.dtype]:
        """Dtypes of the gathered weights of all held segments."""
        return [self.precision.compute(self.layout.segments[index].dtype) for index in self.main.held]


def needs_planes(unit: UnitState) -> bool:
    """Whether the weights at rest are placed otherwise than the main weights, so that they are kept beside them."""
    return parameter_placements(unit.strategy) != unit.main.placements


@dataclass(frozen=True)
class ModelState:
    """Sharded state of a model: its units by name, in the order of the module tree, and its buffers."""

    units: dict[str, UnitState]
    buffers: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Gathered:
    """Full weights of one unit, as gathered at ``version``: one replicated buffer per plane kind."""

    unit: str
    planes: dict[PlaneKind, Buffer]
    version: int

    def weight(self, index: int) -> torch.Tensor:
        """Dense weight of tensor ``index`` of the layout: a view of the gathered buffer."""
        return self.planes[PlaneKind.DENSE].tensor(index)

    def weights(self) -> dict[str, torch.Tensor]:
        """Every dense weight by parameter name, as views of the gathered buffer."""
        tensors = self.planes[PlaneKind.DENSE].layout.tensors
        return {spec.name: self.weight(index) for index, spec in enumerate(tensors)}


def trainable_segments(layout: Layout) -> tuple[int, ...]:
    """Indices of the segments whose tensors require gradients."""
    return tuple(index for index, segment in enumerate(layout.segments) if segment.requires_grad)


def trainable_tensors(layout: Layout) -> tuple[int, ...]:
    """Indices of the tensors that require gradients, in layout order."""
    return tuple(index for index, spec in enumerate(layout.tensors) if spec.requires_grad)


def reduced_bytes(unit: UnitState) -> int:
    """Bytes of a unit's full gradients as ranks send them; 0 where every axis is one rank."""
    if all(axis.size == 1 for axis in unit.axes):
        return 0
    segments = (unit.layout.segments[index] for index in trainable_segments(unit.layout))
    return sum(segment.size * unit.precision.reduce(segment.dtype).itemsize for segment in segments)


def zeros_like_main(unit: UnitState) -> Buffer:
    """A buffer of zeros for the trainable segments, placed and typed as the main weights."""
    held = trainable_segments(unit.layout)
    flats = tuple(torch.zeros_like(unit.main.segment(index)) for index in held)
    return dataclasses.replace(unit.main, segments=flats, held=held)


def accumulates_apart(unit: UnitState) -> bool:
    """Whether gradients between microbatches are placed or typed otherwise than finished ones."""
    held = trainable_segments(unit.layout)
    return gradient_placements(unit.strategy) != unit.main.placements or [
        unit.precision.accumulate(unit.layout.segments[index].dtype) for index in held
    ] != unit.main_dtypes(held)


def accumulation_buffer(unit: UnitState, make: Callable[[int, torch.dtype], torch.Tensor]) -> Buffer:
    """A buffer for gradients between microbatches: ``make(numel, dtype)`` for each trainable segment."""
    held, placements = trainable_segments(unit.layout), gradient_placements(unit.strategy)
    _, count = piece_of(placements, unit.axes)
    flats = tuple(
        make(
            unit.layout.segments[index].size // count,
            unit.precision.accumulate(unit.layout.segments[index].dtype),
        )
        for index in held
    )
    return Buffer(flats, unit.layout, placements, unit.axes, held)


def register_state(cls: type[Any], children: tuple[str, ...]) -> None:
    """Register a dataclass as a pytree: ``children`` hold tensors or pytrees, every other field is static.

    A child that is None is static too: torch's pytree would make it a leaf, and leaves here are tensors.
    """
    fields = tuple(field.name for field in dataclasses.fields(cls))

    def flatten(value: Any) -> tuple[list[Any], Any]:
        held = tuple(name for name in children if getattr(value, name) is not None)
        static = tuple((name, getattr(value, name)) for name in fields if name not in held)
        return [getattr(value, name) for name in held], (held, static)

    def unflatten(leaves: Iterable[Any], context: Any) -> Any:
        held, static = context
        return cls(**dict(zip(held, leaves, strict=True)), **dict(static))

    def flatten_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, context = flatten(value)
        return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(context[0], leaves, strict=True)], context

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


register_state(Buffer, ("segments",))
register_state(UnitState, ("main", "planes", "gradient", "carrier"))
register_state(ModelState, ("units", "buffers"))
register_state(Gathered, ("planes",))
