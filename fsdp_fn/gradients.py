"""Gradients as parameters hold them: DTensor views of a unit's flat gradient shard, made once and used again.

Promises: what a user still holds is never overwritten. A generation of gradients is used again only when nobody but
this room refers to any of its tensors or storages; otherwise a fresh one is made, as plain PyTorch would. A generation
that nobody refers to holds no bytes while the next forward runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from fsdp_fn.layout import local_offset, owned_range
from fsdp_fn.ragged import RaggedSpec, RaggedTensor, from_spec
from fsdp_fn.state import UnitState, trainable_segments, trainable_tensors


class GradientShards:
    """One generation: the flat shards of the trainable segments, and the face of each trainable tensor's rows."""

    def __init__(self, unit: UnitState, specs: Sequence[RaggedSpec]) -> None:
        mains = [unit.main.segment(index) for index in trainable_segments(unit.layout)]
        with torch.inference_mode(False), torch.no_grad():
            self.flats = [torch.empty_like(flat, requires_grad=False) for flat in mains]
            self.locals = _local_views(unit, self.flats)
        self.faces: list[RaggedTensor] = [
            from_spec(local, specs[index], False)
            for local, index in zip(self.locals, trainable_tensors(unit.layout), strict=True)
        ]
        self._storages = [flat.untyped_storage() for flat in self.flats]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._at_rest = self._holders()

    def _holders(self) -> list[int]:
        """How many hold each tensor and storage of this generation, counted in one way whenever it is asked."""
        counts = []
        for tensors in (self.faces, self.locals, self.flats):
            for tensor in tensors:
                counts.append(sys.getrefcount(tensor))
                counts.append(tensor._use_count())  # type: ignore[attr-defined]
        for storage in self._storages:
            # Python has one object for a storage, however many names it has there, and that counts as one use.
            counts.append(sys.getrefcount(storage))
            counts.append(torch._C._storage_Use_Count(storage._cdata))
        return counts

    def unused(self) -> bool:
        """Whether nobody outside refers to any of it."""
        return self._holders() == self._at_rest

    def free(self) -> None:
        """Give the bytes back; only where unused."""
        for storage in self._storages:
            storage.resize_(0)

    def allocate(self) -> None:
        """Have the bytes, uninitialised."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            if storage.nbytes() != size:
                storage.resize_(size)


def _local_views(unit: UnitState, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's rows of every trainable tensor, as views of the flat shards."""
    flat_of: dict[int, Any] = dict(zip(trainable_segments(unit.layout), flats, strict=True))
    views = []
    for index in trainable_tensors(unit.layout):
        segment, _ = unit.layout.location(index)
        start = local_offset(unit.layout, index, unit.axis.rank)
        length = len(owned_range(unit.layout, index, unit.axis.rank))
        views.append(flat_of[segment].narrow(0, start, length).view(unit.main.owned(index).shape))
    return views
