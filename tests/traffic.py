"""Traffic: bytes of full buffers that are launched on process groups, by kind of collective and group."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

Traffic = Counter[tuple[str, str]]
"""Bytes of full buffers, by kind of collective and group."""

_CALLS = {
    "allgather_into_tensor_coalesced": ("gather", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 1),
    "allreduce_coalesced": ("all_reduce", 0),
}


class _Counting:
    """Stands before a process group and counts what is launched through it."""

    def __init__(self, group: dist.ProcessGroup, found: Traffic) -> None:
        self._group, self._found = group, found

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._group, name)
        if name not in _CALLS:
            return method
        kind, whole = _CALLS[name]

        def counted(*args: Any) -> Any:
            self._found[kind, self._group.group_name] += sum(t.numel() * t.element_size() for t in args[whole])
            return method(*args)

        return counted


@contextlib.contextmanager
def counted() -> Iterator[Traffic]:
    """Traffic of what runs inside."""
    found: Traffic = Counter()
    from fsdp_fn import gathering, reducing

    before = gathering.process_group
    replaced: Any = lambda axis: _Counting(before(axis), found)  # noqa: E731
    gathering.process_group = reducing.process_group = replaced
    try:
        yield found
    finally:
        gathering.process_group = reducing.process_group = before
