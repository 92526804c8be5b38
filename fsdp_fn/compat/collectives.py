"""Collectives: a script's own all-gather, reduce-scatter and hooks, by the interface that PyTorch gives them.

Promises: one call for all of a unit's tensors of one dtype, as in PyTorch, with buffers from the collective's own
``allocate``. Reductions are always asked for sums, which are divided apart. Another group over the same ranks is made
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from fsdp_fn.gathering import Launch
from fsdp_fn.groups import process_group, twin_of
from fsdp_fn.reducing import Scatter
from fsdp_fn.state import Axis

Hook = Callable[[torch.Tensor], None]


class _Done:
    def wait(self) -> None:
        """It was waited for."""


def gathering_by(comm: Any) -> Launch:
    """Gathers that call ``comm``, an ``AllGather`` of ``torch.distributed.fsdp``."""

    def launch(wholes: list[torch.Tensor], pieces: list[torch.Tensor], axis: Axis) -> Any:
        for places in _by_dtype(pieces):
            sizes = [pieces[place].numel() for place in places]
            output = _allocate(comm, axis.size * sum(sizes), pieces[places[0]])
            rows = output.view(axis.size, -1)
            torch.cat([pieces[place] for place in places], out=rows[axis.rank])
            group = process_group(axis)
            _wait(comm(output_tensor=output, input_tensor=rows[axis.rank], group=group, async_op=False))
            for place, part in zip(places, rows.split(sizes, 1), strict=True):
                wholes[place].view(axis.size, -1).copy_(part)
        return _Done()

    return launch


def scattering_by(comm: Any) -> Scatter:
    """Reduce-scatters that call ``comm``, a ``ReduceScatter`` of ``torch.distributed.fsdp``."""

    def scatter(shards: list[torch.Tensor], flats: list[torch.Tensor], axis: Axis) -> Callable[[], list[torch.Tensor]]:
        for places in _by_dtype(flats):
            sizes = [shards[place].numel() for place in places]
            whole = _allocate(comm, axis.size * sum(sizes), flats[places[0]])
            torch.cat([flats[place].view(axis.size, -1) for place in places], 1, out=whole.view(axis.size, -1))
            own = _allocate(comm, sum(sizes), flats[places[0]])
            group, op = process_group(axis), dist.ReduceOp.SUM
            _wait(comm(output_tensor=own, input_tensor=whole, group=group, op=op, async_op=False))
            torch._foreach_copy_([shards[place] for place in places], list(own.split(sizes)))
        return lambda: shards

    return scatter


def hooked_together(hook: Hook, stream: torch.cuda.Stream | None) -> Callable[[list[torch.Tensor]], None]:
    """A hook on all of a unit's reduced gradients of one dtype, which it may change, as one flat tensor."""

    def run(flats: list[torch.Tensor]) -> None:
        for places in _by_dtype(flats):
            reduced = torch.cat([flats[place] for place in places])
            if stream is None:
                hook(reduced)
            else:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    hook(reduced)
                torch.cuda.current_stream().wait_stream(stream)
            sizes = [flats[place].numel() for place in places]
            torch._foreach_copy_([flats[place] for place in places], list(reduced.split(sizes)))

    return run


def over_other_groups(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """The same axes over process groups of their own. All their ranks must call."""
    return tuple(replace(axis, group=twin_of(axis)) for axis in axes)


def _by_dtype(tensors: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Where the tensors of each dtype are."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        yield [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]


def _allocate(comm: Any, numel: int, like: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = comm.allocate((numel,), dtype=like.dtype, device=like.device)
    return made


def _wait(work: Any) -> None:
    if work is not None:
        work.wait()
