"""Ragged whole: operations for which this rank's rows do not suffice, and what they have in common.

Promises: a norm is combined from the ranks' norms by one all-reduce, for a whole list. A random fill draws
the whole tensor and keeps this rank's rows, so it is what the unsharded tensor would get where ranks share a
seed. Anything else runs on gathered tensors and gives a replicated DTensor. A write that could not reach the
shards (a view, an in-place matrix operation) is refused by name. All ranks must call.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils import _pytree as pytree

from fsdp_fn.ragged_placement import RaggedShard, RaggedSpec, gather_rows, is_ragged

aten = torch.ops.aten
Make = Callable[[torch.Tensor, RaggedSpec], DTensor]

NEW = {aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default}
NORMS = {aten.linalg_vector_norm.default, aten.norm.Scalar, aten._foreach_norm.Scalar}
_RANDOM_LIKE = {aten.rand_like.default, aten.randn_like.default}


def whole(value: DTensor) -> torch.Tensor:
    """The full tensor behind a DTensor of any placement, without autograd. All ranks of its mesh must call.

    Raises ValueError where the local tensor is not of the shape that its placement says: a label that an
    operation outside this library put there.
    """
    mesh = value._spec.mesh
    if is_ragged(value):
        return gather_rows(value._local_tensor, placement_of(value), mesh.get_group())
    if all(placement.is_replicate() for placement in value.placements):
        return value._local_tensor
    _check_label(value)
    with torch.no_grad():
        detached = cast(DTensor, value.detach())
        return detached.redistribute(placements=[Replicate()] * mesh.ndim).to_local()


def placement_of(value: DTensor) -> RaggedShard:
    """The placement of a ragged DTensor."""
    return cast(RaggedSpec, value._spec).placement


def _check_label(value: DTensor) -> None:
    placements, mesh = value.placements, value.device_mesh
    placement = placements[0]
    if mesh.ndim != 1 or type(placement) is not Shard:
        return
    rows, _ = placement._local_shard_size_and_offset(value.shape[placement.dim], mesh.size(), mesh.get_local_rank())
    if value._local_tensor.shape[placement.dim] != rows:
        raise ValueError(
            f"a DTensor of shape {tuple(value.shape)} is labelled {placement} but holds "
            f"{tuple(value._local_tensor.shape)} here, where that label means {rows} along dimension "
            f"{placement.dim}: it was made from the local tensor of a ragged one, whose rows lie otherwise"
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


def spec_like(lead: DTensor, dtype: torch.dtype) -> RaggedSpec:
    """The spec of a result that lies as ``lead`` does: the same object where the dtype is the same."""
    spec = cast(RaggedSpec, lead._spec)
    meta = spec.tensor_meta
    if meta is not None and meta.dtype == dtype:
        return spec
    return RaggedSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(lead.shape, lead.stride(), dtype))


# --- norms, random fills, new tensors -----------------------------------------------------------------------


def _order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("ord", 2))


def _is_total_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dims = args[2] if len(args) > 2 and isinstance(args[2], list | tuple) else kwargs.get("dim")
    return _order(args, kwargs) >= 0 and not dims


def run_norms(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> Any:
    """Norms of whole tensors: local norms, combined by one all-reduce for a list. Results are replicated."""
    single = isinstance(args[0], torch.Tensor)
    values = [args[0]] if single else args[0]
    mesh = values[0]._spec.mesh
    if not _is_total_norm(args, kwargs) or not all(is_ragged(v) and v._spec.mesh is mesh for v in values):
        return run_whole(func, args, kwargs, make)
    # Some norms are refused of no elements; a zero adds nothing to any of them.
    local = [v._local_tensor if v._local_tensor.numel() else v._local_tensor.new_zeros((1,) * v.ndim) for v in values]
    parts = func(local[0] if single else local, *args[1:], **kwargs)
    parts = [parts] if single else parts
    together = torch.stack([part.reshape(()) for part in parts])
    norms = _combined(together, _order(args, kwargs), mesh.get_group()).unbind()
    combined = [norm.reshape(part.shape) for norm, part in zip(norms, parts, strict=True)]
    if single:
        return _replicated(combined[0], values[0])
    spec = _replicated(combined[0], values[0])._spec
    return [_dtensor(norm, spec) for norm in combined]


def _combined(norms: torch.Tensor, order: float, group: dist.ProcessGroup) -> torch.Tensor:
    if group.size() == 1:
        return norms
    wide = norms.double()
    if order == math.inf:
        # A backend's maximum may lose a NaN that only one rank has.
        both = torch.stack([wide.nan_to_num(nan=0.0, posinf=math.inf), wide.isnan().double()])
        dist.all_reduce(both, dist.ReduceOp.MAX, group)
        return both[0].masked_fill(both[1] > 0, math.nan).to(norms.dtype)
    powers = wide.pow(order) if order else wide
    dist.all_reduce(powers, group=group)
    return (powers.pow(1.0 / order) if order else powers).to(norms.dtype)


def run_unscale(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> None:
    """A gradient scaler's check and unscaling, of the local rows; what one rank finds, all are told."""
    grads, found_inf, inverse_scale = args
    func([grad._local_tensor if is_ragged(grad) else grad for grad in grads], found_inf, inverse_scale, **kwargs)
    mesh = next(grad for grad in grads if is_ragged(grad))._spec.mesh
    dist.all_reduce(found_inf, dist.ReduceOp.MAX, mesh.get_group())


def run_random(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> Any:
    """A random fill in place, or a new tensor filled at random."""
    value = args[0]
    fills = written(func, args, kwargs) is value
    others = pytree.tree_leaves((args[1:], kwargs))
    if not is_ragged(value) or any(map(is_ragged, others)) or not (fills or func in _RANDOM_LIKE):
        return run_whole(func, args, kwargs, make)
    drawn = func(value._local_tensor.new_empty(value.shape), *args[1:], **kwargs)
    part = drawn[placement_of(value).row_range(value.device_mesh.get_local_rank())]
    if not fills:
        return make(part.clone(), spec_like(value, part.dtype))
    value._local_tensor.copy_(part)
    return value


def run_new(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> Any:
    """A new tensor of the dtype and device of a ragged one: ragged if of its shape, else replicated."""
    value, size, *rest = args
    local = value._local_tensor
    if tuple(size) == tuple(value.shape):
        made = func(local, list(local.shape), *rest, **kwargs)
        return make(made, spec_like(value, made.dtype))
    return _replicated(func(local, size, *rest, **kwargs), value)


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
        DTensor, lambda value: _replicated(whole(value), value) if is_ragged(value) else value, (args, kwargs)
    )
    return func(*gathered[0], **gathered[1])


def _replicated(full: torch.Tensor, like: DTensor) -> DTensor:
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    return _dtensor(full, DTensorSpec(like._spec.mesh, (Replicate(),), tensor_meta=meta))


def _dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    # The constructor, which from_local calls: neither autograd nor a check of the shape is wanted here.
    return DTensor(local, spec, requires_grad=False)
