"""Runtime: where gathered weights and packed gradients live between uses.

Promises: flat tensors are made once, as views of one storage; their bytes come and go with
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

import torch

from fsdp_fn.layout import Layout
from fsdp_fn.packing import gap_views, tensor_views
from fsdp_fn.policy import Release

_ALIGNMENT = 256
_POISON_BYTE = 0xFF  # every byte 0xFF is a NaN in fp32, fp16, bf16 and both fp8 formats


class ResizedBuffer:
    """Flat tensors of some segments of a layout over one storage, whose bytes come and go (any backend).

    ``pieces``: the flat tensors are one of so many equal pieces of their segments; with 1, the whole, ``views`` and
    ``padding`` are there.
    """

    def __init__(
        self,
        layout: Layout,
        held: Sequence[int],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        pieces: int = 1,
    ) -> None:
        sizes = [layout.segments[i].size // pieces * dtype.itemsize for i, dtype in zip(held, dtypes, strict=True)]
        offsets, self.nbytes = [], 0
        for size in sizes:
            offsets.append(self.nbytes)
            self.nbytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        with torch.inference_mode(False), torch.no_grad():
            readable = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
            self._storage = readable.untyped_storage()
            writable = torch.empty(0, dtype=torch.uint8, device=device)
            writable.set_(self._storage, 0, (self.nbytes,), (1,))
            places = list(zip(offsets, sizes, dtypes, strict=True))
            self._bytes = writable
            self.flats = [readable.narrow(0, start, size).view(dtype) for start, size, dtype in places]
            self.writers = [writable.narrow(0, start, size).view(dtype) for start, size, dtype in places]
            self.views = tensor_views(layout, held, self.flats) if pieces == 1 else ()
            self.padding = gap_views(layout, held, self.writers) if pieces == 1 else ()
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
    def released(self) -> bool:
        """Whether what it held is gone: its bytes are, or they are poison."""
        return self._version is not None

    @property
    def allocated(self) -> int:
        """Bytes held now."""
        return int(self._storage.nbytes())


class LastingBuffer(ResizedBuffer):
    """One whose bytes stay, from the start."""

    def __init__(
        self, layout: Layout, held: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device, pieces: int = 1
    ) -> None:
        super().__init__(layout, held, dtypes, device, pieces)
        self.allocate()


def _set_version(tensor: torch.Tensor, version: int) -> None:
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))
