"""Buffer specs: how the rows of a unit's tensors lie on a device mesh, as a DTensor says it.

Promises: of a buffer placed anyhow, each tensor's part (``Buffer.owned``) is the local tensor of its spec.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor import placement_types as dtensor

from fsdp_fn import placement
from fsdp_fn.layout import Layout, row_bounds
from fsdp_fn.ragged import RaggedShard, RaggedSpec, mesh_spec
from fsdp_fn.state import Axis, piece_of
from fsdp_fn.tensor_parallel import TensorParallel, on_both


def spec_of(
    layout: Layout,
    index: int,
    mesh: DeviceMesh,
    placements: Sequence[placement.Placement],
    axes: Sequence[Axis],
    dtype: torch.dtype,
    parallel: TensorParallel | None = None,
) -> RaggedSpec:
    """Spec of tensor ``index`` in a buffer placed as ``placements`` over ``axes``, which are those of ``mesh``.

    ``parallel``: how the tensor is a part of a larger one.
    """
    spec = layout.tensors[index]
    _, count = piece_of(placements, axes)
    rows = RaggedShard(row_bounds(layout, index)[:: layout.shard_count // count])
    placed = [_of_torch(p, rows) for p in placements]
    if parallel is None:
        return mesh_spec(mesh, placed, spec.shape, dtype)
    both, on_mesh = on_both(mesh, placed, parallel, f"parameter {spec.name!r}")
    return mesh_spec(both, on_mesh, parallel.shape, dtype)


def _of_torch(placed: placement.Placement, rows: RaggedShard) -> dtensor.Placement:
    if isinstance(placed, placement.Sharded):
        return rows
    return Partial() if isinstance(placed, placement.Partial) else Replicate()
