"""Ragged reduce: what all ranks must agree on about ragged tensors, of which each sees its own part.

Promises: a norm counts every element once, whatever the placement: the ranks' norms are combined by one all-reduce for
each mesh dimension that splits a tensor, for a whole list. What a gradient scaler finds on one rank, all are told.
A NaN is never lost. Values travel on the mesh's device and come back on the tensors'. All ranks must call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh

from fsdp_fn.ragged_placement import RaggedSpec, is_ragged
from fsdp_fn.ragged_whole import Make, aten, replicated, run_whole

NORMS = {aten.linalg_vector_norm.default, aten.norm.Scalar, aten._foreach_norm.Scalar}


def run_norms(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> Any:
    """Norms of whole tensors, each replicated on its own mesh. Raises UnfinishedGradient where a sum is to come."""
    single = isinstance(args[0], torch.Tensor)
    values = [args[0]] if single else args[0]
    if not _is_total_norm(args, kwargs):
        return run_whole(func, args, kwargs, make)
    by_mesh: dict[DeviceMesh | None, list[int]] = {}
    for index, value in enumerate(values):
        if is_ragged(value):
            value._spec.require_finished(func)
        by_mesh.setdefault(value._spec.mesh if is_ragged(value) else None, []).append(index)
    norms: list[Any] = [None] * len(values)
    for mesh, indices in by_mesh.items():
        members = [values[index] for index in indices]
        if mesh is None:
            found = func(members, *args[1:], **kwargs)
        else:
            # Some norms are refused of no elements; a zero adds nothing to any of them.
            local = [
                v._local_tensor if v._local_tensor.numel() else v._local_tensor.new_zeros((1,) * v.ndim)
                for v in members
            ]
            parts = func(local[0] if single else local, *args[1:], **kwargs)
            found = _combined([parts] if single else parts, [v._spec for v in members], _order(args, kwargs), mesh)
            found = [replicated(norm, value) for norm, value in zip(found, members, strict=True)]
        for index, norm in zip(indices, found, strict=True):
            norms[index] = norm
    return norms[0] if single else norms


def _some_elements(local: torch.Tensor) -> torch.Tensor:
    # Some norms are refused of no elements; a zero adds nothing to any of them.
    return local if local.numel() else local.new_zeros((1,) * local.ndim)


def _order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("ord", 2))


def _is_total_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    dims = args[2] if len(args) > 2 and isinstance(args[2], list | tuple) else kwargs.get("dim")
    return _order(args, kwargs) >= 0 and not dims


def _combined(
    parts: Sequence[torch.Tensor], specs: Sequence[RaggedSpec], order: float, mesh: DeviceMesh
) -> list[torch.Tensor]:
    """Norms of the whole tensors from those of this rank's parts."""
    split = [
        [index for index, spec in enumerate(specs) if dim in spec.ragged_dims or dim in spec.even_dims]
        for dim in range(mesh.ndim)
    ]
    if not any(members and mesh.size(dim) > 1 for dim, members in enumerate(split)):
        return list(parts)
    maximum = order == math.inf
    wide = torch.stack([part.reshape(()).to(mesh.device_type) for part in parts]).double()
    if maximum:
        # A backend's maximum may lose a NaN that only one rank has.
        terms = torch.stack([wide.nan_to_num(nan=0.0, posinf=math.inf), wide.isnan().double()], dim=1)
    else:
        terms = wide.pow(order) if order else wide
    separate = list(terms.unbind())
    for dim, members in enumerate(split):
        if members and mesh.size(dim) > 1:
            together = torch.stack([separate[index] for index in members])
            dist.all_reduce(together, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, mesh.get_group(dim))
            for index, term in zip(members, together.unbind(), strict=True):
                separate[index] = term
    terms = torch.stack(separate)
    if maximum:
        norms = terms[:, 0].masked_fill(terms[:, 1] > 0, math.nan)
    else:
        norms = terms.pow(1.0 / order) if order else terms
    return [norm.to(part).reshape(part.shape) for norm, part in zip(norms.unbind(), parts, strict=True)]


def run_unscale(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> None:
    """A gradient scaler's check and unscaling, of the local parts.

    All ranks of every mesh in the list learn what one finds: replicas too, lest a faulty one step alone.
    """
    grads, found_inf, inverse_scale = args
    meshes: dict[DeviceMesh, None] = {}
    local = []
    for grad in grads:
        if is_ragged(grad):
            grad._spec.require_finished(func)
            meshes[grad._spec.mesh] = None
        local.append(grad._local_tensor if is_ragged(grad) else grad)
    func(local, found_inf, inverse_scale, **kwargs)
    increment_version(local)
    groups = {mesh.get_group(dim): mesh.device_type for mesh in meshes for dim in range(mesh.ndim)}
    # In one order on every rank, smaller groups first: the ranks of a mesh are of one mind when it meets a larger one.
    for group in sorted(groups, key=dist.ProcessGroup.size):
        if group.size() > 1:
            found = found_inf.to(groups[group])
            dist.all_reduce(found, dist.ReduceOp.MAX, group)
            if found is not found_inf:
                found_inf.copy_(found)
