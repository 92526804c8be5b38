"""Ragged specs: descriptions of how a parameter lies on a mesh, checked once when they are made.

Promises: a spec that is made here places every element on at least one rank, on exactly one rank of every set of
ranks that differ only in dimensions that split it; whatever does not fit is refused by name, before any tensor is
touched. No collective.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import Placement

from fsdp_fn.ragged_placement import RaggedShard, RaggedSpec, dim_name


def ragged_spec(
    mesh: DeviceMesh, bounds: Sequence[int], shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> RaggedSpec:
    """What ``from_spec`` needs: made once a parameter, shared by its gradient and optimizer state.

    ``mesh``: one-dimensional. ``bounds``: see :class:`RaggedShard`. ``shape``: of the whole tensor, at least
    one dimension. Raises ValueError, naming what does not fit.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"ragged_spec: expected a mesh of one dimension, got {mesh.ndim}; take one axis of it by name, or give "
            "mesh_spec a placement for each"
        )
    return _made("ragged_spec", mesh, (RaggedShard(bounds),), torch.Size(shape), dtype)


def mesh_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> RaggedSpec:
    """As :func:`ragged_spec`, on a mesh of any number of dimensions.

    ``placements``, one a mesh dimension:

    - ``Replicate()``: all copies are equal.
    - ``Shard(d)``: the tensor-parallel split of dimension ``d``, which must be even.
    - ``RaggedShard(bounds)``: of the rows (dimension 0) that the tensor-parallel splits leave on a rank. Several mesh
      dimensions may carry it, then an equal one, with bounds for the product of their sizes. A rank's place among them
      is that of its coordinates with the last of these dimensions as the major one.
    - ``Partial()``: the sum over this dimension is still to come (an unfinished gradient).

    ``shape``: of the whole tensor. Raises ValueError, naming what does not fit.
    """
    shape = torch.Size(shape)
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"mesh_spec: expected one placement for each of the {mesh.ndim} mesh dimensions, got {len(placements)}: "
            f"{tuple(placements)}"
        )
    known = tuple(_known(placed, shape, dim_name(mesh, dim)) for dim, placed in enumerate(placements))
    return _made("mesh_spec", mesh, known, shape, dtype)


def _known(placed: Any, shape: torch.Size, name: str) -> Placement:
    """``placed``, with a dimension counted from the front."""
    if isinstance(placed, Replicate | RaggedShard) or (type(placed) is Partial and placed.reduce_op == "sum"):
        return placed
    if type(placed) is not Shard:
        raise ValueError(
            f"mesh_spec: {placed!r} on mesh dimension {name}: expected Replicate(), Partial(), Shard(d) or "
            "RaggedShard(bounds)"
        )
    if not -len(shape) <= placed.dim < len(shape):
        raise ValueError(
            f"mesh_spec: {placed!r} on mesh dimension {name}: a tensor of shape {tuple(shape)} has no dimension "
            f"{placed.dim}"
        )
    return Shard(placed.dim % len(shape))


def _made(
    caller: str, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> RaggedSpec:
    sizes = list(shape)
    for dim, placed in enumerate(placements):
        if isinstance(placed, Shard) and not isinstance(placed, RaggedShard):
            if sizes[placed.dim] % mesh.size(dim):
                raise ValueError(
                    f"{caller}: {placed!r} on mesh dimension {dim_name(mesh, dim)} splits dimension {placed.dim} of "
                    f"shape {tuple(shape)}, of size {sizes[placed.dim]}, over {mesh.size(dim)} ranks, which does not "
                    "come out even; pad the parameter, or replicate it there"
                )
            sizes[placed.dim] //= mesh.size(dim)
    ragged = [(dim, placed) for dim, placed in enumerate(placements) if isinstance(placed, RaggedShard)]
    if ragged:
        _check_bounds(caller, [placed for _, placed in ragged], math.prod(mesh.size(dim) for dim, _ in ragged), sizes)
    stride = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        stride[axis - 1] = stride[axis] * max(1, shape[axis])
    return RaggedSpec(mesh, placements, tensor_meta=TensorMeta(shape, tuple(stride), dtype))


def _check_bounds(caller: str, ragged: list[RaggedShard], ranks: int, sizes: list[int]) -> None:
    placement = ragged[0]
    if any(other != placement for other in ragged):
        raise ValueError(
            f"{caller}: mesh dimensions that share the rows carry one equal RaggedShard, over the product of their "
            f"sizes; got {ragged}"
        )
    if not sizes:
        raise ValueError(f"{caller}: a 0-dim tensor has no rows to share out; give the parameter shape (1,)")
    if placement.rows != sizes[0] or len(placement.bounds) != ranks + 1:
        raise ValueError(
            f"{caller}: bounds {placement.bounds} are for {placement.rows} rows on {len(placement.bounds) - 1} ranks, "
            f"but the tensor's shape is {tuple(sizes)} (after even splits) and the mesh has {ranks} ranks to share its "
            "rows"
        )
