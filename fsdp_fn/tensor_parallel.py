"""Tensor parallel: parameters that are DTensors of another mesh axis already, sharded over the data-parallel axes too.

Promises: the unit holds each rank's tensor-parallel part as it would a plain tensor. Forward and backward see DTensors
on the tensor-parallel mesh, as before wrapping; the optimizer sees DTensors on both. What cannot be combined is refused
by name: parts of uneven size, sums that are still to come, axes that are data-parallel as well, meshes of other roots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from fsdp_fn.groups import axes_of
from fsdp_fn.state import Axis


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """How a parameter was distributed before it was wrapped: its mesh, placements, and the whole's shape and stride."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The tensor-parallel axes, outermost first."""
        return axes_of(self.mesh)

    def splits(self, axis: Axis) -> bool:
        """Whether the ranks of ``axis`` hold different parts."""
        pairs = zip(self.axes, self.placements, strict=True)
        return any(own == axis and isinstance(placement, Shard) for own, placement in pairs)

    def present(self, local: torch.Tensor) -> DTensor:
        """The DTensor that the model computes with, over this rank's part. Differentiable."""
        return DTensor.from_local(
            local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that this rank holds of a parameter: the parameter itself where it is no DTensor."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def tensor_parallel_of(
    parameter: nn.Parameter, label: str, data_parallel: Sequence[str | None]
) -> TensorParallel | None:
    """How ``parameter`` is distributed; None for a plain one.

    ``data_parallel``: names of the axes that the unit is sharded over. Raises ValueError, naming the parameter.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh, placements = parameter.device_mesh, parameter.placements
    names = mesh.mesh_dim_names
    if names is None or set(names) & set(data_parallel):
        raise ValueError(
            f"{label} is a DTensor already, on a mesh with the axes {names}; expected axes with names other than "
            f"{list(data_parallel)}, over which it is to be sharded now"
        )
    for name, placement in zip(names, placements, strict=True):
        if type(placement) is Shard:
            size, ranks = parameter.shape[placement.dim], mesh.size(names.index(name))
            if size % ranks:
                raise ValueError(
                    f"{label} is a DTensor whose dimension {placement.dim}, of size {size}, lies on the {ranks} ranks "
                    f"of axis {name!r} in uneven parts, which is not served: pad it, or replicate it there"
                )
        elif not isinstance(placement, Replicate):
            raise ValueError(
                f"{label} is a DTensor placed {placement} on axis {name!r}; expected Shard(dim) or Replicate()"
            )
    return TensorParallel(mesh, tuple(placements), parameter.shape, tuple(parameter.stride()))


def on_both(
    mesh: DeviceMesh, placements: Sequence[Placement], parallel: TensorParallel, label: str
) -> tuple[DeviceMesh, list[Placement]]:
    """The mesh of data-parallel and tensor-parallel axes together, and placements on it.

    Raises ValueError where the two are not parts of one mesh.
    """
    root = mesh._get_root_mesh()
    names = dict(zip(mesh.mesh_dim_names or (), placements, strict=False))
    names |= dict(zip(parallel.mesh.mesh_dim_names or (), parallel.placements, strict=True))
    known = root.mesh_dim_names or ()
    if root != parallel.mesh._get_root_mesh() or not set(names) <= set(known) or len(names) == len(parallel.placements):
        raise ValueError(
            f"{label} is a DTensor on {parallel.mesh}, which is not part of one mesh with {mesh}, over which it is to "
            "be sharded: take both by name from the same DeviceMesh, mesh['data'] and mesh['tensor']"
        )
    order = tuple(name for name in known if name in names)
    both = root if order == tuple(known) else root[order]
    return both, [names[name] for name in order]
