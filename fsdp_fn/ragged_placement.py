"""Placement of a tensor whose rows lie on ranks in ragged ranges, which torch's own ``Shard(0)`` cannot say.

Promises: wherever torch asks a placement about this rank's part (distributed checkpoints, scattering,
redistribution to and from ``Replicate``), it hears the true row range, or is refused by name where it asks about one
mesh dimension of several that share the rows. A placement equals only one of the same bounds, never a ``Shard(0)``. A
spec knows this rank's part of the whole tensor, worked out once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp_fn.ragged_gather import gather_rows


class UnfinishedGradient(RuntimeError):
    """A gradient was used whose sum over a mesh dimension is still to come (its placement there is ``Partial``)."""


class RaggedShard(Shard):
    """Rank ``r`` of the mesh axis holds rows ``bounds[r]`` up to ``bounds[r + 1]`` of dimension 0.

    ``bounds``: one more number than there are ranks, beginning with 0, never decreasing, ending with the
    number of rows. A rank may hold no row. Where several mesh dimensions carry the placement, the bounds are for the
    product of their sizes, and the last of them is the major one. Raises ValueError for other bounds.
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
        return gather_rows(local_tensor, self._bounds, mesh.get_group(mesh_dim))

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
                f"{self!r} describes {self.rows} rows on {len(self._bounds) - 1} ranks, but is asked about {rows} rows "
                f"on {ranks} ranks. Where several mesh dimensions share the rows (hybrid or tensor-parallel sharding), "
                "torch cannot ask one at a time: load by torch.distributed.checkpoint, or a full state dict on every "
                "rank (broadcast_from_rank0=False)"
            )


class RaggedSpec(DTensorSpec):
    """What a ragged DTensor is: mesh, placements, shape, stride, dtype. Made by ``ragged_spec`` and ``mesh_spec``.

    torch's own spec insists that a shard of dimension 0 equals ``Shard(0)``. It does not, so only this class
    takes the placement, and no plain DTensor can carry it into an operation that would relabel it.

    A whole tensor is first split evenly by the ``Shard`` of each mesh dimension that has one, in mesh order. The rows
    of what is local then are shared out by the ``RaggedShard``.
    """

    def _verify_shard_order(self, shard_order: Any) -> None:
        """Says nothing: ``mesh_spec`` has checked the placements, by other rules than torch's."""

    def __getstate__(self) -> dict[str, Any]:
        # What is worked out below is worked out again, and a hash belongs to its process.
        kept = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**kept, "_hash": None}

    def like(self, dtype: torch.dtype) -> RaggedSpec:
        """The same but for the dtype: this very spec where that is the same too."""
        meta = cast(TensorMeta, self.tensor_meta)
        if meta.dtype == dtype:
            return self
        return RaggedSpec(self.mesh, self.placements, tensor_meta=meta._replace(dtype=dtype))

    @cached_property
    def placement(self) -> RaggedShard:
        """The ragged placement; one part of all the rows where no mesh dimension carries one."""
        if self.ragged_dims:
            return cast(RaggedShard, self.placements[self.ragged_dims[0]])
        return RaggedShard((0, self._part[1][0] if self.shape else 1))

    @cached_property
    def ragged_dims(self) -> tuple[int, ...]:
        """Mesh dimensions that share the rows in ragged parts, the minor one first."""
        return tuple(dim for dim, placed in enumerate(self.placements) if isinstance(placed, RaggedShard))

    @cached_property
    def even_dims(self) -> tuple[int, ...]:
        """Mesh dimensions that carry torch's ``Shard``."""
        return tuple(dim for dim, placed in enumerate(self.placements) if type(placed) is Shard)

    @cached_property
    def unfinished(self) -> tuple[int, ...]:
        """Mesh dimensions over which the sum is still to come."""
        return tuple(dim for dim, placed in enumerate(self.placements) if placed.is_partial())

    @cached_property
    def finished(self) -> RaggedSpec:
        """The spec with every sum complete: this very spec where no sum is to come."""
        if not self.unfinished:
            return self
        complete = tuple(Replicate() if placed.is_partial() else placed for placed in self.placements)
        return RaggedSpec(self.mesh, complete, tensor_meta=self.tensor_meta)

    @cached_property
    def split_dims(self) -> frozenset[int]:
        """Tensor dimensions of which a rank may hold a part."""
        return frozenset(cast(Shard, self.placements[dim]).dim for dim in (*self.ragged_dims, *self.even_dims))

    def virtual_rank(self) -> int:
        """This rank's place among the parts of the ragged placement: the last mesh dimension is the major one."""
        return self._place

    def row_range(self) -> slice:
        """Rows that this rank holds, of what the even shards leave it."""
        return self.placement.row_range(self._place)

    def local_shape(self) -> torch.Size:
        """Shape of this rank's part."""
        return torch.Size(self._part[1])

    def offsets(self) -> tuple[int, ...]:
        """Where this rank's part begins in the whole tensor."""
        return self._part[0]

    def require_finished(self, what: Any) -> None:
        """Raise :class:`UnfinishedGradient` where a sum is still to come. ``what`` needs it complete."""
        if self.unfinished:
            over = " and ".join(dim_name(self.mesh, dim) for dim in self.unfinished)
            raise UnfinishedGradient(
                f"{what}: this gradient of shape {tuple(self.shape)} is not complete: its sum over mesh dimension "
                f"{over} is still to come, with the backward of the last microbatch. Mark that backward as the last "
                "one, and use the gradient after it"
            )

    @cached_property
    def _coordinate(self) -> tuple[int, ...]:
        coordinate = self.mesh.get_coordinate()
        if coordinate is None:
            raise ValueError(f"a ragged DTensor on {self.mesh}: this rank is not in that mesh and holds no part")
        return tuple(coordinate)

    @cached_property
    def _place(self) -> int:
        place = 0
        for dim in reversed(self.ragged_dims):
            place = place * self.mesh.size(dim) + self._coordinate[dim]
        return place

    @cached_property
    def _part(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        offsets, sizes = [0] * len(self.shape), list(self.shape)
        for mesh_dim in self.even_dims:
            dim = cast(Shard, self.placements[mesh_dim]).dim
            sizes[dim] //= self.mesh.size(mesh_dim)
            offsets[dim] += self._coordinate[mesh_dim] * sizes[dim]
        if self.ragged_dims:
            rows = self.row_range()
            offsets[0] += rows.start
            sizes[0] = rows.stop - rows.start
        return tuple(offsets), tuple(sizes)


def dim_name(mesh: DeviceMesh, dim: int) -> str:
    """How a message names a mesh dimension."""
    return repr(mesh.mesh_dim_names[dim]) if mesh.mesh_dim_names else str(dim)


def is_ragged(value: Any) -> bool:
    """Whether a value is a DTensor with a spec of this library."""
    return isinstance(value, DTensor) and type(value._spec) is RaggedSpec
