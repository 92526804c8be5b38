"""Placement of a tensor whose rows lie on ranks in ragged ranges, which torch's own ``Shard(0)`` cannot say.

Promises: wherever torch asks a placement about this rank's part (distributed checkpoints, scattering,
redistribution to and from ``Replicate``), it hears the true row range. It equals only a placement of the same
bounds, never a ``Shard(0)``; what cannot be served is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec


class RaggedShard(Shard):
    """Rank ``r`` of the mesh axis holds rows ``bounds[r]`` up to ``bounds[r + 1]`` of dimension 0.

    ``bounds``: one more number than there are ranks, beginning with 0, never decreasing, ending with the
    number of rows. A rank may hold no row. Raises ValueError for other bounds.
    """

    def __init__(self, bounds: Sequence[int]) -> None:
        bounds = tuple(bounds)
        if len(bounds) < 2 or bounds[0] != 0 or any(low > high for low, high in pairwise(bounds)):
            raise ValueError(
                f"RaggedShard: expected bounds that begin with 0 and never decrease, one more than ranks, got {bounds}"
            )
        super().__init__(0)
        self._bounds = bounds
        self._hash = hash((RaggedShard, bounds))

    @property
    def bounds(self) -> tuple[int, ...]:
        """Row numbers, one more than there are ranks."""
        return self._bounds

    @property
    def rows(self) -> int:
        """Rows of the whole tensor."""
        return self._bounds[-1]

    def row_range(self, rank: int) -> slice:
        """Rows of the whole tensor that ``rank`` holds."""
        return slice(self._bounds[rank], self._bounds[rank + 1])

    # --- a value: compared, hashed, shown, pickled ----------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, RaggedShard) and self._bounds == other._bounds)

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"RaggedShard(bounds={self._bounds})"

    def __str__(self) -> str:
        return f"RS{self._bounds}"

    def __fx_repr__(self) -> tuple[str, dict[str, type[object]]]:
        return repr(self), {"RaggedShard": RaggedShard}

    def __reduce__(self) -> tuple[type[RaggedShard], tuple[tuple[int, ...]]]:
        return RaggedShard, (self._bounds,)

    # --- what torch asks of a placement ---------------------------------------------------------------------

    def _local_shard_size_and_offset(self, curr_local_size: int, num_chunks: int, rank: Any) -> tuple[int, Any]:
        self._check(curr_local_size, num_chunks)
        return self._bounds[rank + 1] - self._bounds[rank], self._bounds[rank]

    def _split_tensor(
        self, tensor: torch.Tensor, num_chunks: int, *, with_padding: bool = True, contiguous: bool = True
    ) -> tuple[list[torch.Tensor], list[int]]:
        self._check(tensor.size(0), num_chunks)
        parts = [tensor[self.row_range(rank)] for rank in range(num_chunks)]
        if not with_padding:
            return [part.contiguous() for part in parts] if contiguous else parts, []
        most = max(part.size(0) for part in parts)
        missing = [most - part.size(0) for part in parts]
        return [
            torch.cat([part, part.new_zeros(rows, *part.shape[1:])]) for part, rows in zip(parts, missing, strict=True)
        ], missing

    def _to_replicate_tensor(
        self,
        local_tensor: torch.Tensor,
        mesh: DeviceMesh,
        mesh_dim: int,
        current_logical_shape: Sequence[Any],
    ) -> torch.Tensor:
        self._check(current_logical_shape[0], mesh.size(mesh_dim))
        return gather_rows(local_tensor, self, mesh.get_group(mesh_dim))

    def _reduce_shard_tensor(
        self, tensor: torch.Tensor, mesh: DeviceMesh, reduce_op: str, mesh_dim: int
    ) -> torch.Tensor:
        # torch has no reduce-scatter to ragged parts; gradients are reduced elsewhere: this is no hot path.
        self._check(tensor.size(0), mesh.size(mesh_dim))
        group = mesh.get_group(mesh_dim)
        reduced = torch.ops._c10d_functional.all_reduce(tensor, reduce_op.lower(), group.group_name)
        whole: torch.Tensor = torch.ops._c10d_functional.wait_tensor(reduced)
        return whole[self.row_range(mesh.get_local_rank(mesh_dim))].clone()

    def _to_new_shard_dim(self, local_tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        raise NotImplementedError(f"redistribute from {self} to a shard of another dimension: go through Replicate()")

    def _check(self, rows: int, ranks: int) -> None:
        if rows != self.rows or ranks != len(self._bounds) - 1:
            raise ValueError(
                f"{self!r} describes {self.rows} rows on {len(self._bounds) - 1} ranks, but is asked about "
                f"{rows} "
                f"rows on {ranks} ranks"
            )


class RaggedSpec(DTensorSpec):
    """What a ragged DTensor is: mesh, placement, shape, stride, dtype.

    torch's own spec insists that a shard of dimension 0 equals ``Shard(0)``. It does not, so only this class
    takes the placement, and no plain DTensor can carry it into an operation that would relabel it.
    """

    def _verify_shard_order(self, shard_order: Any) -> None:
        if len(self.placements) != 1 or not isinstance(self.placements[0], RaggedShard):
            raise ValueError(f"RaggedSpec: expected one RaggedShard, got {self.placements}")

    @property
    def placement(self) -> RaggedShard:
        """The one placement."""
        return cast(RaggedShard, self.placements[0])


def is_ragged(value: Any) -> bool:
    """Whether a value is a DTensor with a ragged placement."""
    return isinstance(value, DTensor) and type(value._spec) is RaggedSpec


@torch.no_grad()
def gather_rows(local: torch.Tensor, placement: RaggedShard, group: dist.ProcessGroup) -> torch.Tensor:
    """The whole tensor, ``(rows, *local.shape[1:])``, from each rank's rows. All ranks must call.

    Any dtype: bytes travel. One gather padded to the longest part; where that would move over twice the
    tensor (one rank holds nearly all of it), one broadcast from each owner.
    """
    whole = local.new_empty((placement.rows, *local.shape[1:]))
    if not whole.numel():
        return whole
    counts = [high - low for low, high in pairwise(placement.bounds)]
    row_bytes = whole[0].numel() * whole.element_size()
    flat, most = _bytes(whole), max(counts) * row_bytes
    own = _bytes(local.contiguous())
    if len(counts) == 1:
        flat.copy_(own)
    elif most * len(counts) <= 2 * flat.numel():
        padded = flat.new_zeros(most)
        padded[: own.numel()] = own
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(padded, len(counts), group.group_name)
        gathered = torch.ops._c10d_functional.wait_tensor(gathered)
        parts = [gathered[rank * most :][: rows * row_bytes] for rank, rows in enumerate(counts)]
        torch.cat(parts, out=flat)
    else:
        for rank, rows in enumerate(counts):
            part = flat[placement.bounds[rank] * row_bytes :][: rows * row_bytes]
            if rank == group.rank():
                part.copy_(own)
            if rows:
                dist.broadcast(part, group=group, group_src=rank)
    return whole


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
