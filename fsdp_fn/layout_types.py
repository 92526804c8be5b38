"""What a layout is: the description of tensors, segments and the whole, as frozen, hashable data.

Sizes and offsets are in elements and are Python ints, of any size. How a layout comes about, and what can be
asked of it, is in `fsdp_fn.layout`, which offers these names too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch


@dataclass(frozen=True)
class Flat:
    """A tensor is cut between any two rows."""


@dataclass(frozen=True)
class BlockAtomic:
    """A tensor is cut only at multiples of `rows` rows: 32 for MXFP8, 128 for FP8 in blocks of 128 by 128."""

    rows: int

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"BlockAtomic.rows must be at least 1, but is {self.rows}")


@dataclass(frozen=True)
class TensorAtomic:
    """A tensor is never cut: each lies whole on one rank. For optimizers that work on whole matrices."""


Granularity = Flat | BlockAtomic | TensorAtomic


@dataclass(frozen=True)
class TensorSpec:
    """What a layout needs to know of one tensor.

    A row is a slice of dimension 0, flattened. `granularity` None means the layout's own. A weight whose
    blocks run over several leading dimensions is described by its flattened shape, `(E * N, K)`. Tensors of
    different `group`s never share a segment: an optimizer that treats them apart finds each in flat tensors of
    its own.

    Raises:
        ValueError: a dimension is negative.
        TypeError: the shape is no tuple, the dtype no torch.dtype, or the granularity none of the three.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    granularity: Granularity | None = None
    group: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.shape, tuple):
            raise TypeError(f"tensor {self.name!r} needs a tuple as its shape, but has {self.shape!r}")
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"tensor {self.name!r} needs a torch.dtype, but has {self.dtype!r}")
        if self.granularity is not None:
            check_granularity(self.granularity, f"tensor {self.name!r}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name!r} has a negative dimension: shape {self.shape}")

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def rows(self) -> int:
        """Size of dimension 0; 1 for a tensor without dimensions."""
        return self.shape[0] if self.shape else 1

    @property
    def row_width(self) -> int:
        """Elements of one row; 1 for tensors of no or one dimension."""
        return prod(self.shape[1:])


@dataclass(frozen=True)
class Segment:
    """One flat buffer: its whole is `shard_count` shards of `shard_size` elements, one after the other.

    Attributes:
        dtype: of all its tensors.
        requires_grad: of all its tensors.
        group: of all its tensors.
        tensors: indices into `Layout.tensors`, in the order of their offsets.
        offsets: the element of the flat whole at which each of `tensors` begins.
        shard_size: elements of one rank's shard; 0 where all tensors are empty.
        shard_count: number of ranks.
        numels: elements of each of `tensors`.
    """

    dtype: torch.dtype
    requires_grad: bool
    tensors: tuple[int, ...]
    offsets: tuple[int, ...]
    shard_size: int
    shard_count: int
    numels: tuple[int, ...]
    group: str = ""

    @property
    def size(self) -> int:
        """Elements of the flat whole, padding included."""
        return self.shard_size * self.shard_count


@dataclass(frozen=True)
class Layout:
    """A unit's tensors, and the segments in which they lie. Made by `plan_layout`."""

    tensors: tuple[TensorSpec, ...]
    segments: tuple[Segment, ...]
    shard_count: int
    granularity: Granularity

    def location(self, tensor: int) -> tuple[int, int]:
        """(segment index, element offset in that segment's flat whole) of a tensor.

        Raises:
            ValueError: there is no such tensor.
        """
        check_index("tensor", tensor, len(self.tensors))
        return self._locations[tensor]

    @cached_property
    def padding(self) -> int:
        """Elements of all segments that belong to no tensor."""
        return sum(segment.size - sum(segment.numels) for segment in self.segments)

    @property
    def padding_fraction(self) -> float:
        """Padding as a share of the tensors' own elements; 0 for a unit without elements."""
        own = sum(segment.size for segment in self.segments) - self.padding
        return self.padding / own if own else 0.0

    @cached_property
    def _locations(self) -> tuple[tuple[int, int], ...]:
        found = {
            tensor: (index, offset)
            for index, segment in enumerate(self.segments)
            for tensor, offset in zip(segment.tensors, segment.offsets, strict=True)
        }
        return tuple(found[tensor] for tensor in range(len(self.tensors)))

    @cached_property
    def _hash(self) -> int:
        return hash((self.tensors, self.segments, self.shard_count, self.granularity))

    def __hash__(self) -> int:
        # A layout of a mixture-of-experts unit holds hundreds of tensors and is a key of many caches.
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # Hashes of strings differ between processes: a stored hash must not travel with a pickled layout.
        return {key: value for key, value in self.__dict__.items() if key != "_hash"}


def check_granularity(granularity: object, whose: str) -> None:
    if not isinstance(granularity, (Flat, BlockAtomic, TensorAtomic)):
        raise TypeError(f"{whose} needs Flat(), BlockAtomic(rows) or TensorAtomic(), but has {granularity!r}")


def check_index(what: str, index: int, count: int) -> None:
    if not 0 <= index < count:
        raise ValueError(f"{what} {index} is out of range: there are {count}, counted from 0")
