"""Groups: live process groups behind the names that state holds, and how ranks agree on what comes next.

Promises: state names a group, this room finds it. At set-up every rank of an axis calls
:func:`raise_together` once; either all go on or all raise, so that one rank's fault never leaves the others
waiting in a collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _resolve_process_group, _world

from fsdp_fn.placement import Strategy, without_axes_of_one
from fsdp_fn.state import Axis

Made = TypeVar("Made")


class RankFault(RuntimeError):
    """Another rank of the group could not go on; the message says which, and why."""


def default_mesh(device_type: str | None) -> DeviceMesh:
    """A one-dimensional mesh over the default process group; RuntimeError where there is none.

    ``device_type``: None for the accelerator where the group has the backend that is made for it, else the CPU.
    """
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised: start the program with torchrun and call "
            "torch.distributed.init_process_group() before sharding"
        )
    if device_type is None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        kind = "cpu" if accelerator is None else accelerator.type
        backend = f"{kind}:{dist.get_default_backend_for_device(kind)}"
        device_type = kind if backend in dist.get_backend_config().split(",") else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("data",))


def axis_of(mesh: DeviceMesh) -> Axis:
    """The axis that a one-dimensional mesh spans. Raises ValueError where it does not fit this process."""
    axes = axes_of(mesh)
    if len(axes) != 1:
        raise ValueError(
            f"mesh: expected one dimension, got {mesh.ndim} of sizes {tuple(mesh.shape)}; take one axis "
            "of it by name, mesh['data']"
        )
    return axes[0]


def axes_of(mesh: DeviceMesh) -> tuple[Axis, ...]:
    """All axes of a mesh, outermost first. Raises TypeError or ValueError where it does not fit this process."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh: rank {dist.get_rank()} is not part of {mesh}; call on the mesh's ranks only")
    names = mesh.mesh_dim_names or ("data",) * mesh.ndim
    axes = []
    for dim, name in enumerate(names):
        group = mesh.get_group(dim)
        if group.size() != mesh.size(dim):
            raise ValueError(f"mesh: axis {name!r} has {mesh.size(dim)} ranks, its process group {group.size()}")
        axes.append(Axis(name=name, group=group.group_name, size=group.size(), rank=group.rank()))
    return tuple(axes)


def strategy_on(mesh: DeviceMesh, strategy: Strategy) -> tuple[Strategy, tuple[Axis, ...], DeviceMesh]:
    """The strategy as it is on ``mesh``, its axes, and the part of the mesh that they span.

    Raises ValueError for an axis that the mesh lacks, axes in another order than the mesh's, or a strategy without a
    name for its axis on a mesh of several.
    """
    axes = axes_of(mesh)
    names = list(mesh.mesh_dim_names or ())
    wanted = [placements.axis for placements in strategy]
    if wanted == [None]:
        if len(axes) != 1:
            raise ValueError(
                f"mesh: expected one dimension, got {mesh.ndim} of sizes {tuple(mesh.shape)}; name the axis to shard "
                f"over, as in zero3(axis={names[0] if names else 'data'!r}), or take one axis of the mesh"
            )
        return without_axes_of_one(strategy, [axes[0].size]), axes, mesh
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ValueError(f"placements: the mesh has no axis {missing[0]!r}, only {names}")
    places = [names.index(str(name)) for name in wanted]
    if places != sorted(places):
        raise ValueError(f"placements: expected axes in the mesh's order, outermost first, {names}; got {wanted}")
    chosen = tuple(axes[place] for place in places)
    part = mesh if len(chosen) == len(axes) else mesh[tuple(str(name) for name in wanted)]
    return without_axes_of_one(strategy, [axis.size for axis in chosen]), chosen, part


def mesh_over(axes: Sequence[Axis], device_type: str) -> DeviceMesh:
    """A mesh that the axes span, outermost first, over their own groups. All their ranks must call."""
    groups = [process_group(axis) for axis in axes]
    names = tuple(axis.name for axis in axes)
    if len(axes) == 1:
        return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
    ranks: Any = dist.get_rank()
    for group in reversed(groups):
        lines: list[Any] = [None] * group.size()
        dist.all_gather_object(lines, ranks, group=group)
        ranks = lines
    return DeviceMesh.from_group(groups, device_type, mesh=torch.tensor(ranks), mesh_dim_names=names)


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


def subgroup_of(axis: Axis, size: int) -> Axis:
    """The ``size`` neighbouring ranks of ``axis`` that this rank is one of, as an axis of their own.

    Made on first use and found again afterwards; all ranks of the axis must call. ``size`` divides the axis.
    """
    parent = process_group(axis)
    if size == axis.size:
        return axis
    first = axis.rank // size * size
    ranks = [dist.get_global_rank(parent, rank) for rank in range(first, first + size)]
    group = _found_or_made(ranks, f"fsdp_fn: {size} neighbours of {axis.group}")
    return Axis(axis.name, group.group_name, size, axis.rank - first)


def twin_of(axis: Axis) -> str:
    """Name of another group over the ranks of ``axis``, made on first use. All of them must call."""
    ranks = dist.get_process_group_ranks(process_group(axis))
    return str(_found_or_made(ranks, f"fsdp_fn: reductions beside {axis.group}").group_name)


def group_over(mesh: DeviceMesh) -> dist.ProcessGroup:
    """A group of all ranks of a mesh: its own where it has one dimension. All its ranks must call."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = sorted(mesh.mesh.flatten().tolist())
    if len(ranks) == dist.get_world_size():
        return cast(dist.ProcessGroup, dist.group.WORLD)
    return _found_or_made(ranks, "fsdp_fn: all ranks of a mesh")


def _found_or_made(ranks: list[int], name: str) -> dist.ProcessGroup:
    named = [group for group in _world.pg_map if group.group_desc == name]
    known = [group for group in named if dist.get_process_group_ranks(group) == ranks]
    # Its members alone make it: other ranks may be making theirs at the same time.
    made = known[0] if known else dist.new_group(ranks, use_local_synchronization=True, group_desc=name)
    return cast(dist.ProcessGroup, made)


def raise_together(error: Exception | None, axes: Sequence[Axis], device: torch.device, agreed: str, what: str) -> None:
    """Exchange status; returns only if no rank has an ``error`` and all give the same ``agreed`` text.

    The rank with an error raises it; the others raise :class:`RankFault` naming it. Where ``agreed`` (a
    description of what is about to be made, such as a layout) differs, all raise ValueError with the first
    two versions. All ranks of the axes must call. One all-reduce of three integers over each axis when all is well.
    """
    digest = int.from_bytes(hashlib.sha256(agreed.encode()).digest()[:7], "big")
    status = torch.tensor([int(error is not None), digest, -digest], dtype=torch.int64, device=device)
    for axis in axes:
        dist.all_reduce(status, op=dist.ReduceOp.MAX, group=process_group(axis))
    failed, most, least = status.tolist()
    if not failed and most == -least:
        return
    own = None if error is None else f"{type(error).__name__}: {error}"
    reports: list[tuple[int, str | None, str]] = [(dist.get_rank(), own, agreed)]
    for axis in axes:
        everywhere: list[list[tuple[int, str | None, str]]] = [[]] * axis.size
        dist.all_gather_object(everywhere, reports, group=process_group(axis))
        reports = sorted(report for some in everywhere for report in some)
    if error is not None:
        raise error
    faults = [f"rank {rank}: {report}" for rank, report, _ in reports if report is not None]
    if faults:
        raise RankFault(f"{what} failed on {len(faults)} of {len(reports)} ranks; " + "; ".join(faults))
    rank, _, first = reports[0]
    other, _, text = next(report for report in reports if report[2] != first)
    here, there = _where_they_differ(first, text)
    raise ValueError(f"{what}: ranks disagree. Rank {rank} has {here}; rank {other} has {there}")


def make_together(
    make: Callable[[], Made],
    axes: Sequence[Axis],
    device: torch.device,
    what: str,
    describe: Callable[[Made], str] = lambda made: "",
) -> Made:
    """``make()``, where all ranks succeed and :func:`raise_together` finds their descriptions of it alike."""
    made: list[Made] = []
    fault: Exception | None = None
    agreed = ""
    try:
        made.append(make())
        agreed = describe(made[0])
    except Exception as error:
        fault = error
    raise_together(fault, axes, device, agreed, what)
    return made[0]


def _where_they_differ(first: str, second: str) -> tuple[str, str]:
    """The parts of two descriptions, between semicolons, that are not in the other."""
    parts = first.split("; "), second.split("; ")
    own = ["; ".join(part for part in mine if part not in other) for mine, other in (parts, parts[::-1])]
    return own[0] or "no more than that", own[1] or "no more than that"
