"""Gather of rows that lie on the ranks of one process group in ragged ranges.

Promises: every rank gets all rows, of any dtype, bit for bit; the bytes travel on the device that the group serves, and
the result lies there. What moves is at most twice the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist


@torch.no_grad()
def gather_rows(local: torch.Tensor, bounds: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """The rows ``(bounds[-1], *local.shape[1:])`` of all ranks. All ranks of ``group`` must call.

    ``local``: rows ``bounds[r]`` up to ``bounds[r + 1]`` on rank ``r`` of the group, on a device that the group serves.
    One gather padded to the longest part; where that would move over twice the tensor (one rank holds nearly all of
    it), one broadcast from each owner.
    """
    rows = local.new_empty((bounds[-1], *local.shape[1:]))
    if not rows.numel():
        return rows
    counts = [high - low for low, high in pairwise(bounds)]
    row_bytes = rows[0].numel() * rows.element_size()
    flat, most = _bytes(rows), max(counts) * row_bytes
    own = _bytes(local.contiguous())
    if len(counts) == 1:
        flat.copy_(own)
    elif most * len(counts) <= 2 * flat.numel():
        padded = flat.new_zeros(most)
        padded[: own.numel()] = own
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(padded, len(counts), group.group_name)
        gathered = torch.ops._c10d_functional.wait_tensor(gathered)
        parts = [gathered[rank * most :][: count * row_bytes] for rank, count in enumerate(counts)]
        torch.cat(parts, out=flat)
    else:
        for rank, count in enumerate(counts):
            part = flat[bounds[rank] * row_bytes :][: count * row_bytes]
            if rank == group.rank():
                part.copy_(own)
            if count:
                dist.broadcast(part, group=group, group_src=rank)
    return rows


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
