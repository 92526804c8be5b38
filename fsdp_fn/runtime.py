"""Runtime: where gathered weights and packed gradients live between uses.

Promises: a unit's full tensors are made once, as views of one storage; their bytes come and go with
:meth:`ResizedBuffer.allocate` and :meth:`ResizedBuffer.free`, and nothing else about them changes, so what
autograd saved stays valid and holds no bytes in between.

[Note: two tensors, two version counters] Autograd refuses a saved tensor whose version counter moved. A
refill is a write, so it goes through ``writers``: tensors over the same storage made apart from ``flats``,
with a counter of their own. The views that a model computes with are made from ``flats``, whose counter a
refill never moves, while an in-place change by the model still does, and is still caught.

[Note: a released weight is a changed one] Reading a storage that holds no bytes ends the process. So while it is
released, the counter of ``flats`` stands one higher than autograd saw it: whatever backward would read of it, reached
by a way that gathers nothing, is refused before it is read. The next allocation sets the counter back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from fsdp_fn.collectives import own_slots, start_gather
from fsdp_fn.layout import Layout
from fsdp_fn.packing import gap_views, tensor_views
from fsdp_fn.policy import Release
from fsdp_fn.state import Axis, UnitState

_ALIGNMENT = 256
_POISON_BYTE = 0xFF  # every byte 0xFF is a NaN in fp32, fp16, bf16 and both fp8 formats


class WeightStorage(Protocol):
    """Full weights of a unit: one view per tensor of its layout."""

    views: tuple[torch.Tensor, ...]
    storages: frozenset[int]
    nbytes: int

    def writes(self) -> int: ...
    def allocate(self) -> None: ...
    def free(self, release: Release) -> None: ...


class ResizedBuffer:
    """Flat tensors of some segments of a layout over one storage, whose bytes come and go (any backend)."""

    def __init__(
        self,
        layout: Layout,
        held: Sequence[int],
        dtypes: Sequence[torch.dtype],
        axis: Axis,
        device: torch.device,
    ) -> None:
        offsets, self.nbytes = [], 0
        for index, dtype in zip(held, dtypes, strict=True):
            offsets.append(self.nbytes)
            self.nbytes += -(-layout.segments[index].size * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        with torch.inference_mode(False), torch.no_grad():
            readable = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            self._storage = readable.untyped_storage()
            writable = torch.empty(0, dtype=torch.uint8, device=device)
            writable.set_(self._storage, 0, (self.nbytes,), (1,))
            sizes = [layout.segments[index].size * dtype.itemsize for index, dtype in zip(held, dtypes, strict=True)]
            places = list(zip(offsets, sizes, dtypes, strict=True))
            self._bytes = writable
            self.flats = [readable.narrow(0, start, size).view(dtype) for start, size, dtype in places]
            self.writers = [writable.narrow(0, start, size).view(dtype) for start, size, dtype in places]
            self.slots = own_slots(self.writers, axis)
            self.views = tensor_views(layout, held, self.flats)
            self.padding = gap_views(layout, held, self.writers)
        self.storages = frozenset({self._storage._cdata})
        self._readable = readable
        self._version: int | None = None
        self.free(Release.FREE)

    def allocate(self) -> None:
        """Give the buffer its bytes, uninitialised."""
        if self._storage.nbytes() != self.nbytes:
            self._storage.resize_(self.nbytes)
        if self._version is not None:
            _set_version(self._readable, self._version)
            self._version = None

    def free(self, release: Release) -> None:
        """Give the bytes back, or poison them, as ``release`` says."""
        if release is Release.POISON:
            self._bytes.fill_(_POISON_BYTE)
        else:
            self._storage.resize_(0)
        if self._version is None:
            self._version = self._readable._version
            _set_version(self._readable, self._version + 1)

    def writes(self) -> int:
        """How often the full weights were changed in place; such changes do not reach the shards."""
        return int(self._readable._version)

    @property
    def allocated(self) -> int:
        """Bytes held now."""
        return int(self._storage.nbytes())


class MainWeights:
    """The main weights themselves as full weights: a group of one rank whose unit needs no cast."""

    nbytes = 0

    def __init__(self, unit: UnitState) -> None:
        with torch.inference_mode(False), torch.no_grad():
            flats = [flat.detach() for flat in unit.main.segments]
            self.views = tensor_views(unit.layout, unit.main.held, flats)
        self.storages = frozenset(flat.untyped_storage()._cdata for flat in flats)

    def writes(self) -> int:
        """Always 0: a change in place is one of the main weights, and stays."""
        return 0

    def allocate(self) -> None:
        """Nothing to do: the weights are always there."""

    def free(self, release: Release) -> None:
        """Nothing to do: they are not a copy."""


def _set_version(tensor: torch.Tensor, version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def weight_storage(unit: UnitState, device: torch.device) -> ResizedBuffer | MainWeights:
    """Where the full weights of ``unit`` will be: its main weights where those serve, else a buffer."""
    segments = [unit.layout.segments[index] for index in unit.main.held]
    computes = [unit.precision.compute(segment.dtype) for segment in segments]
    if unit.axis.size == 1 and computes == [unit.precision.main(segment.dtype) for segment in segments]:
        return MainWeights(unit)
    return ResizedBuffer(unit.layout, unit.main.held, computes, unit.axis, device)


def fill_weights(storage: ResizedBuffer | MainWeights, unit: UnitState) -> int:
    """Put the shard, cast, into its slot and gather in place; the bytes that travelled (full buffer).

    A group of one rank issues no collective, and has nothing to do at all where the main weights serve as
    they are.
    """
    if isinstance(storage, MainWeights) or not storage.slots:
        return 0
    torch._foreach_copy_(storage.slots, list(unit.main.segments))
    if unit.axis.size == 1:
        return 0
    start_gather(storage.writers, storage.slots, unit.axis).wait()
    return storage.nbytes
