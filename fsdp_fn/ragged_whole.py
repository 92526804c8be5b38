"""Ragged whole: operations for which this rank's part does not suffice, and what they have in common.

Promises: a random fill draws the whole tensor and keeps this rank's part, so it is what the unsharded tensor would get
where ranks share a seed. Anything else runs on gathered tensors and gives a replicated DTensor. A write that could not
reach the shards (a view, an in-place matrix operation) is refused by name, and so is a gradient whose sum is still to
come. All ranks must call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils import _pytree as pytree

from fsdp_fn.ragged_gather import gather_rows
from fsdp_fn.ragged_placement import RaggedSpec, is_ragged

aten = torch.ops.aten
Make = Callable[[torch.Tensor, RaggedSpec], DTensor]

NEW = {aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
_RANDOM_LIKE = {aten.rand_like.default, aten.randn_like.default}


def whole(value: DTensor) -> torch.Tensor:
    """The full tensor behind a DTensor of any placement, without autograd. All ranks of its mesh must call.

    It is the local tensor itself where nothing is split. Raises UnfinishedGradient where a sum is still to come, and
    ValueError where the local tensor is not of the shape that its placement says: a label that an operation outside
    this library put there.
    """
    if is_ragged(value):
        return _gathered(value._local_tensor, cast(RaggedSpec, value._spec))
    if all(placement.is_replicate() for placement in value.placements):
        return value._local_tensor
    _check_label(value)
    with torch.no_grad():
        travelling = cast(DTensor, value.detach().to(value.device_mesh.device_type))
        full = travelling.redistribute(placements=[Replicate()] * value.device_mesh.ndim).to_local()
        return full.to(value._local_tensor.device)


def _gathered(local: torch.Tensor, spec: RaggedSpec) -> torch.Tensor:
    """The whole tensor on the device of ``local``, from what each rank holds. The mesh's own device carries it."""
    spec.require_finished("gathering")
    mesh, device = spec.mesh, local.device
    part = local.to(mesh.device_type)
    bounds, rank, stride = spec.placement.bounds, spec.virtual_rank(), 1
    for dim in spec.ragged_dims:
        # One rank of this dimension holds by now the rows of `stride` consecutive places.
        across = stride * mesh.size(dim)
        first = rank - rank % across
        cut = [row - bounds[first] for row in bounds[first : first + across + 1 : stride]]
        part = gather_rows(part, cut, mesh.get_group(dim))
        stride = across
    for dim in reversed(spec.even_dims):
        if mesh.size(dim) > 1:
            axis = cast(Shard, spec.placements[dim]).dim
            slices = part.movedim(axis, 0)
            cut = [place * slices.shape[0] for place in range(mesh.size(dim) + 1)]
            part = gather_rows(slices, cut, mesh.get_group(dim)).movedim(0, axis).contiguous()
    return part.to(device)


def part_of(full: torch.Tensor, spec: RaggedSpec) -> torch.Tensor:
    """What ``full``, which broadcasts to the shape of ``spec``, is against this rank's part: a view."""
    shape, lead = spec.shape, len(spec.shape) - full.ndim
    held = zip(shape[lead:], spec.offsets()[lead:], spec.local_shape()[lead:], full.shape, strict=True)
    return full[tuple(slice(at, at + size) if rows == total else slice(None) for total, at, size, rows in held)]


def _check_label(value: DTensor) -> None:
    expected, _ = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if tuple(value._local_tensor.shape) != tuple(expected):
        raise ValueError(
            f"a DTensor of shape {tuple(value.shape)} is labelled {value.placements} but holds "
            f"{tuple(value._local_tensor.shape)} here, where that label means {tuple(expected)}: it was made from the "
            "local tensor of a ragged one, whose rows lie otherwise"
        )


@functools.cache
def written_arguments(func: torch._ops.OpOverload) -> tuple[tuple[int, str], ...]:
    """Positions and names of the arguments that an operation writes."""
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def written(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument that an in-place or out= operation writes and returns; None for a functional one."""
    for position, name in written_arguments(func):
        return kwargs[name] if name in kwargs else args[position]
    return None


# --- random fills, new tensors ------------------------------------------------------------------------------


def run_random(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> Any:
    """A random fill in place, or a new tensor filled at random."""
    value = args[0]
    fills = written(func, args, kwargs) is value
    others = pytree.tree_leaves((args[1:], kwargs))
    if not is_ragged(value) or any(map(is_ragged, others)) or not (fills or func in _RANDOM_LIKE):
        return run_whole(func, args, kwargs, make)
    spec = value._spec
    if fills:
        spec.require_finished(func)
    drawn = func(value._local_tensor.new_empty(value.shape), *args[1:], **kwargs)
    part = part_of(drawn, spec)
    if not fills:
        return make(part.clone(), spec.finished.like(part.dtype))
    value._local_tensor.copy_(part)
    increment_version(value._local_tensor)
    return value


def run_new(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> Any:
    """A new tensor of the dtype and device of a ragged one: placed alike if of its shape, else replicated."""
    value, size, *rest = args
    local = value._local_tensor
    if tuple(size) == tuple(value.shape):
        made = func(local, list(local.shape), *rest, **kwargs)
        return make(made, value._spec.finished.like(made.dtype))
    return replicated(func(local, size, *rest, **kwargs), value)


# --- everything else ----------------------------------------------------------------------------------------


def run_whole(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> Any:
    """The operation on gathered tensors; its result is replicated."""
    if func.is_view or any(map(is_ragged, pytree.tree_leaves(written(func, args, kwargs)))):
        what = "a view of" if func.is_view else "writing"
        raise NotImplementedError(
            f"{func}: {what} a ragged DTensor could not reach its shards; work on to_local() (this rank's "
            "rows) or on full_tensor() (a copy of all rows), and write back with copy_"
        )
    gathered = pytree.tree_map_only(
        DTensor, lambda value: replicated(whole(value), value) if is_ragged(value) else value, (args, kwargs)
    )
    return func(*gathered[0], **gathered[1])


def replicated(full: torch.Tensor, like: DTensor) -> DTensor:
    """A plain DTensor on the mesh of ``like`` of which every rank holds all."""
    mesh = like._spec.mesh
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    # The constructor: from_local would record a gradient, and move what lies in host memory to the mesh's device.
    return DTensor(full, DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta), requires_grad=False)
