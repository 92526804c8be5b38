"""State: the frozen dataclasses that every function here takes and gives back.

Promises: each is a pytree whose leaves are tensors and nothing else. Layouts, placements, axes, names and
versions are its static context, hashable and compared by value, so ``tree_map`` never touches them and
``torch.compile`` guards on them. A process group is held by name, size and this rank's coordinate, never as a
live object.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fsdp_fn.layout import Layout, local_offset, owned_range
from fsdp_fn.placement import Placement, Replicate, Sharded
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
    """Flat tensors of a unit, one per held segment of its layout, as placed along one axis.

    ``segments[k]`` belongs to ``layout.segments[held[k]]``. Its shape is ``(shard_size,)`` where the
    placement is ``Sharded`` (this rank's shard) and ``(shard_size * shard_count,)`` where it is
    ``Replicate``.
    """

    segments: tuple[torch.Tensor, ...]
    layout: Layout
    placement: Placement
    axis: Axis
    held: tuple[int, ...]

    def segment(self, index: int) -> torch.Tensor:
        """The flat tensor of ``layout.segments[index]``; KeyError where this buffer does not hold it."""
        if index not in self.held:
            raise KeyError(f"segment {index} is not held by this buffer, which holds segments {self.held}")
        return self.segments[self.held.index(index)]

    def tensor(self, index: int) -> torch.Tensor:
        """The whole of tensor ``index``, a view; ValueError where this rank holds only a part of it."""
        if not isinstance(self.placement, Replicate) and self.axis.size > 1:
            raise ValueError(
                f"tensor {self.layout.tensors[index].name!r} is {self.placement} over "
                f"{self.axis.size} ranks: gather it first, or take owned(i) for the part held here"
            )
        segment, offset = self.layout.location(index)
        spec = self.layout.tensors[index]
        return self.segment(segment)[offset : offset + spec.numel].view(spec.shape)

    def owned(self, index: int) -> torch.Tensor:
        """The part of tensor ``index`` that belongs to this rank, a view: whole rows, perhaps none.

        Shape ``(rows, *shape[1:])`` for whole-row granularities; a 0-dim tensor gives ``()`` or ``(0,)``.
        """
        spec = self.layout.tensors[index]
        segment, _ = self.layout.location(index)
        elements = owned_range(self.layout, index, self.axis.rank)
        start = local_offset(self.layout, index, self.axis.rank)
        if isinstance(self.placement, Replicate):
            start += self.axis.rank * self.layout.segments[segment].shard_size
        flat = self.segment(segment)[start : start + len(elements)]
        if not spec.shape:
            return flat.view(()) if len(elements) else flat
        # As row_bounds has it: the rows of a tensor without elements are all the first rank's.
        empty_rows = spec.rows if self.axis.rank == 0 else 0
        rows = len(elements) // spec.row_width if spec.row_width else empty_rows
        return flat.view(rows, *spec.shape[1:])


@dataclass(frozen=True)
class UnitState:
    """Sharded state of one unit.

    ``main``: the optimizer's copy of the weights, sharded. A dense weight's one plane is its main weight,
    cast to the compute dtype while it is put into its slot of the gathered buffer, so nothing is stored for
    it twice. ``gradient``: as left by the last reduction, or None. ``version`` counts changes of the weights.
    """

    name: str
    main: Buffer
    precision: PrecisionPolicy
    gradient: Buffer | None = None
    version: int = 0

    @property
    def layout(self) -> Layout:
        return self.main.layout

    @property
    def axis(self) -> Axis:
        return self.main.axis

    @property
    def kinds(self) -> tuple[PlaneKind, ...]:
        """Plane kinds that this unit stores."""
        return (PlaneKind.DENSE,)


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


def zeros_like_main(unit: UnitState) -> Buffer:
    """A sharded buffer of zeros for the trainable segments, in the main weights' dtype."""
    held = trainable_segments(unit.layout)
    return Buffer(
        tuple(torch.zeros_like(unit.main.segment(index)) for index in held),
        unit.layout,
        Sharded(unit.layout.granularity),
        unit.axis,
        held,
    )


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
register_state(UnitState, ("main", "gradient"))
register_state(ModelState, ("units", "buffers"))
register_state(Gathered, ("planes",))
