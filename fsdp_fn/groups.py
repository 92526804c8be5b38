"""Groups: live process groups behind the names that state holds, and how ranks agree on what comes next.

Promises: state names a group, this room finds it. At set-up every rank of an axis calls
:func:`raise_together` once; either all go on or all raise, so that one rank's fault never leaves the others
waiting in a collective.
"""

from __future__ import annotations

import hashlib
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group

from fsdp_fn.state import Axis


class RankFault(RuntimeError):
    """Another rank of the group could not go on; the message says which, and why."""


def default_mesh(device_type: str) -> DeviceMesh:
    """A one-dimensional mesh over the default process group; RuntimeError where there is none."""
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised: start the program with torchrun and call "
            "torch.distributed.init_process_group() before sharding"
        )
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))


def axis_of(mesh: DeviceMesh) -> Axis:
    """The axis that a one-dimensional mesh spans. Raises ValueError where it does not fit this process."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh: expected one dimension, got {mesh.ndim} of sizes {tuple(mesh.shape)}; take one axis "
            "of it by name, mesh['data']"
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh: rank {dist.get_rank()} is not part of {mesh}; call on the mesh's ranks only")
    group = mesh.get_group()
    if group.size() != mesh.size():
        raise ValueError(f"mesh: has {mesh.size()} ranks, its process group {group.size()}")
    name = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "data"
    return Axis(name=name, group=group.group_name, size=group.size(), rank=group.rank())


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """The device of this process on ``mesh``: the current one where there are several."""
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def process_group(axis: Axis) -> dist.ProcessGroup:
    """The live group that an axis names; RuntimeError where none here has its name, size and rank."""
    try:
        group = _resolve_process_group(cast(Any, axis.group))  # a str, for which some versions have a type
    except (RuntimeError, ValueError, LookupError) as error:
        raise RuntimeError(
            f"axis {axis.name!r}: this process has no process group named {axis.group!r}; state made "
            "under another process group must be loaded through a checkpoint"
        ) from error
    if group.size() != axis.size or group.rank() != axis.rank:
        raise RuntimeError(
            f"axis {axis.name!r}: expected rank {axis.rank} of {axis.size} in group {axis.group!r}, "
            f"which has rank {group.rank()} of {group.size()}"
        )
    return group


def raise_together(error: Exception | None, axis: Axis, device: torch.device, agreed: str, what: str) -> None:
    """Exchange status; returns only if no rank has an ``error`` and all give the same ``agreed`` text.

    The rank with an error raises it; the others raise :class:`RankFault` naming it. Where ``agreed`` (a
    description of what is about to be made, such as a layout) differs, all raise ValueError with the first
    two versions. All ranks of the axis must call. One all-reduce of three integers when all is well.
    """
    digest = int.from_bytes(hashlib.sha256(agreed.encode()).digest()[:7], "big")
    status = torch.tensor([int(error is not None), digest, -digest], dtype=torch.int64, device=device)
    group = process_group(axis)
    dist.all_reduce(status, op=dist.ReduceOp.MAX, group=group)
    failed, most, least = status.tolist()
    if not failed and most == -least:
        return
    reports: list[tuple[str | None, str]] = [(None, "")] * axis.size
    own = None if error is None else f"{type(error).__name__}: {error}"
    dist.all_gather_object(reports, (own, agreed), group=group)
    if error is not None:
        raise error
    faults = [f"rank {rank}: {report}" for rank, (report, _) in enumerate(reports) if report is not None]
    if faults:
        raise RankFault(f"{what} failed on {len(faults)} of {axis.size} ranks; " + "; ".join(faults))
    other = next(rank for rank, (_, text) in enumerate(reports) if text != reports[0][1])
    raise ValueError(f"{what}: ranks disagree. Rank 0 has {reports[0][1]}; rank {other} has {reports[other][1]}")
