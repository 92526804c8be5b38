"""Gradients as parameters hold them: DTensor views of a unit's flat gradients, made once and used again.

Promises: what a user still holds is never overwritten. A generation of gradients is used again only when nobody but
this room refers to any of its tensors or storages; otherwise a fresh one is made, as plain PyTorch would. A generation
that nobody refers to holds no bytes while the next forward runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from fsdp_fn.ragged import RaggedSpec, RaggedTensor, from_spec
from fsdp_fn.state import Buffer, trainable_tensors


class GradientShards:
    """One generation: flat gradients of the trainable segments, and the face of each trainable tensor's rows.

    ``make``: a new buffer for them. ``specs``: of every tensor of the layout, placed as the buffer is.
    """

    def __init__(self, make: Callable[[], Buffer], specs: Sequence[RaggedSpec]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            buffer = make()
            trainable = trainable_tensors(buffer.layout)
            self.flats = list(buffer.segments)
            self.locals = [buffer.owned(index) for index in trainable]
        del buffer
        self.faces: list[RaggedTensor] = [
            from_spec(local, specs[index], False) for local, index in zip(self.locals, trainable, strict=True)
        ]
        # Pinned memory that is given back does not come back pinned.
        self._storages = [flat.untyped_storage() for flat in self.flats]
        self._sizes = [0 if flat.is_pinned() else flat.untyped_storage().nbytes() for flat in self.flats]
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
        for storage, size in zip(self._storages, self._sizes, strict=True):
            if size:
                storage.resize_(0)

    def allocate(self) -> None:
        """Have the bytes, uninitialised."""
        for storage, size in zip(self._storages, self._sizes, strict=True):
            if size and storage.nbytes() != size:
                storage.resize_(size)
