"""Reducing: packed gradients over one axis after another, to where the strategy wants them.

Promises: one launch per step for all of a unit's gradients. The mean over ranks is a sum followed by one division, so
that it is exact on every backend (some backends' own average is not: pytorch/pytorch#162338). Sums are divided where
they are complete, in a dtype that holds both the sum and its mean.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp_fn.groups import process_group
from fsdp_fn.placement import Partial, Reduction, Strategy
from fsdp_fn.state import Axis, UnitState

_functional = torch.ops._c10d_functional
Steps = Sequence[tuple[int, Reduction]]
Scatter = Callable[[list[torch.Tensor], list[torch.Tensor], Axis], Callable[[], list[torch.Tensor]]]
"""Starts the reduce-scatter of flat tensors into shards over an axis; the result waits for them."""


def start_steps(
    flats: list[torch.Tensor], axes: Sequence[Axis], steps: Steps, scatter: Scatter | None = None
) -> Callable[[], list[torch.Tensor]]:
    """Start reducing ``flats``, whose memory may be written; the result waits, and gives the reduced tensors."""
    steps = [(index, step) for index, step in steps if axes[index].size > 1]
    if not steps or not flats:
        return lambda: flats
    first = _start(flats, axes[steps[0][0]], steps[0][1], scatter)

    def complete() -> list[torch.Tensor]:
        reduced = first()
        for index, step in steps[1:]:
            reduced = _start(reduced, axes[index], step, scatter)()
        return reduced

    return complete


def _start(
    flats: list[torch.Tensor], axis: Axis, step: Reduction, scatter: Scatter | None
) -> Callable[[], list[torch.Tensor]]:
    if step is Reduction.SLICE:
        sizes = [flat.numel() // axis.size for flat in flats]
        # Copies: a view would keep the whole.
        return lambda: [f.narrow(0, axis.rank * n, n).clone() for f, n in zip(flats, sizes, strict=True)]
    if torch.compiler.is_compiling():
        if step is Reduction.ALL_REDUCE:
            sums = _functional.all_reduce_coalesced(flats, "sum", axis.group)
        else:
            sums = _functional.reduce_scatter_tensor_coalesced(flats, "sum", axis.size, axis.group)
        return lambda: [_functional.wait_tensor(flat) for flat in sums]
    if step is Reduction.ALL_REDUCE:
        works = _start_all_reduce(flats, axis)
        return lambda: _waited(works, flats)
    shards = [flat.new_empty(flat.numel() // axis.size) for flat in flats]
    return (scatter or scatter_into)(shards, flats, axis)


def scatter_into(shards: list[torch.Tensor], flats: list[torch.Tensor], axis: Axis) -> Callable[[], list[torch.Tensor]]:
    """Start the reduce-scatter of ``flats`` into ``shards``, of their dtypes."""
    work = process_group(axis).reduce_scatter_tensor_coalesced(shards, flats)
    return lambda: _waited([work], shards)


def _start_all_reduce(flats: list[torch.Tensor], axis: Axis) -> list[Any]:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for flat in flats:
        by_dtype.setdefault(flat.dtype, []).append(flat)
    group = process_group(axis)
    return [group.allreduce_coalesced(same) for same in by_dtype.values()]


def _waited(works: Sequence[Any], flats: list[torch.Tensor]) -> list[torch.Tensor]:
    for work in works:
        work.wait()
    return flats


def sum_dtypes(unit: UnitState, held: Sequence[int], steps: Steps) -> list[torch.dtype]:
    """Dtypes in which sums over microbatches go through the last ``steps``: the reduce dtypes if these add anything."""
    if all(step is Reduction.SLICE for _, step in steps):
        return unit.main_dtypes(held)
    return [unit.precision.reduce(unit.layout.segments[index].dtype) for index in held]


def divides_on_arrival(strategy: Strategy) -> bool:
    """Whether each microbatch's gradients are complete sums over all ranks, and so divided at once."""
    return not any(isinstance(placements.gradient, Partial) for placements in strategy)


def divided(flats: Sequence[torch.Tensor], divisor: float, dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    """``flats`` over ``divisor``, in ``dtypes``; those of the right dtype are changed in place."""
    if divisor == 1.0 or not flats:
        return [flat.to(dtype) for flat, dtype in zip(flats, dtypes, strict=True)]
    wide = [flat.to(torch.promote_types(flat.dtype, dtype)) for flat, dtype in zip(flats, dtypes, strict=True)]
    torch._foreach_div_(wide, divisor)
    return [flat.to(dtype) for flat, dtype in zip(wide, dtypes, strict=True)]


def reduce_packed(
    packed: list[torch.Tensor],
    out: list[torch.Tensor],
    axes: Sequence[Axis],
    steps: Steps,
    divisor: float,
    scatter: Scatter | None = None,
) -> None:
    """Reduce packed gradients by ``steps``, divide, and write them, cast, into ``out``; complete on return.

    ``packed`` may be written. One reduce-scatter without a cast goes straight into ``out``. ``scatter``: default,
    :func:`scatter_into`.
    """
    if not out:
        return
    steps = [(index, step) for index, step in steps if axes[index].size > 1]
    direct = (
        len(steps) == 1
        and steps[0][1] is Reduction.REDUCE_SCATTER
        and all(a.dtype is b.dtype and a.device == b.device for a, b in zip(packed, out, strict=True))
    )
    if direct:
        (scatter or scatter_into)(out, packed, axes[steps[0][0]])()
        if divisor != 1.0:
            torch._foreach_div_(out, divisor)
        return
    means = divided(start_steps(packed, axes, steps, scatter)(), divisor, [flat.dtype for flat in out])
    for flat, mean in zip(out, means, strict=True):
        flat.copy_(mean, non_blocking=True)
