"""Ragged operations: what torch's operations do on ragged tensors, and what they refuse.

Promises: the result of every operation is that of the unsharded tensors. An elementwise one (all that torch's
optimizers do: single, multi-tensor and fused) runs on the local rows and its result is ragged as well, with
no communication; torch's own propagation would relabel it ``Shard(0)``, which is another partition. Whatever it writes
is counted as written on the local tensor, where autograd does not see it. The rest is in ``ragged_whole``,
``ragged_reduce`` and, of gradients whose sum is still to come, ``ragged_unfinished``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from fsdp_fn.holders import say_which
from fsdp_fn.ragged_placement import RaggedSpec, is_ragged
from fsdp_fn.ragged_reduce import NORMS, run_norms, run_unscale
from fsdp_fn.ragged_unfinished import unfinished_result
from fsdp_fn.ragged_whole import (
    NEW,
    Make,
    part_of,
    run_new,
    run_random,
    run_whole,
    whole,
    written,
    written_arguments,
)

aten = torch.ops.aten
Rule = Callable[[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any], Make], Any]

_SAME_VALUE = {aten.detach.default, aten.alias.default}
_ELEMENTWISE = {
    aten.copy_.default,
    aten.zero_.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.detach_.default,
    aten._to_copy.default,
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
}
_FOREACH_REDUCTIONS = ("_foreach_norm", "_foreach_max", "_foreach_powsum")


def run(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> Any:
    """Run one dispatched operation of which some argument is ragged. ``make`` builds a ragged tensor."""
    try:
        return _rule(func)(func, args, kwargs, make)
    except (RuntimeError, TypeError) as error:
        # Subclasses are about something else: a collective that failed, a gradient that is not complete.
        if type(error) in (RuntimeError, NotImplementedError, TypeError):
            say_which(error, (args, kwargs))
        raise


@functools.cache
def _rule(func: torch._ops.OpOverload) -> Rule:
    name = func._schema.name.removeprefix("aten::")
    if func in _SAME_VALUE:
        return _run_same_value
    if func in NORMS:
        return run_norms
    if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
        return run_unscale
    if name.startswith(("_foreach_", "_fused_")) and name not in _FOREACH_REDUCTIONS:
        return _run_each
    if torch.Tag.nondeterministic_seeded in func.tags:
        return run_random
    if func in NEW:
        return run_new
    if func in _ELEMENTWISE or (torch.Tag.pointwise in func.tags and torch.Tag.data_dependent_output not in func.tags):
        return _run_elementwise
    return run_whole


@functools.cache
def _argument_names(func: torch._ops.OpOverload) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


# --- elementwise --------------------------------------------------------------------------------------------


def _run_same_value(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> Any:
    # The local tensor itself: an alias of it that is made here, below autograd, would count its versions apart.
    return make(args[0]._local_tensor, args[0]._spec)


def _run_elementwise(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> Any:
    local = None if kwargs and any(isinstance(v, torch.Tensor) for v in kwargs.values()) else _alike(args)
    if local is not None:
        # Operands on one spec: what every optimizer step is made of.
        result = func(*local, **kwargs)
        spec, target = args[0]._spec, args[0] if written_arguments(func) else None
    else:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        target = written(func, args, kwargs)
        if target is not None and not is_ragged(target):
            return run_whole(func, args, kwargs, make)
        lead = target
        if target is None:
            shape = torch.broadcast_shapes(*(leaf.shape for leaf in leaves if isinstance(leaf, torch.Tensor)))
            lead = _first(leaf for leaf in leaves if is_ragged(leaf) and leaf.shape == shape)
        if lead is None:
            return run_whole(func, args, kwargs, make)
        spec = lead._spec
        if spec.unfinished:
            spec = unfinished_result(func, args, kwargs, spec)
        operands = [_operand(leaf, lead, func) for leaf in leaves]
        local_args, local_kwargs = pytree.tree_unflatten(operands, structure)
        result = func(*local_args, **local_kwargs)
    if target is not None:
        increment_version(target._local_tensor)
        return target
    if isinstance(result, torch.Tensor):
        return make(result, spec.like(result.dtype))
    return pytree.tree_map_only(torch.Tensor, lambda part: make(part, spec.like(part.dtype)), result)


def _alike(args: tuple[Any, ...]) -> list[Any] | None:
    """Local operands, where the first is ragged and complete and each other tensor has its spec or no dimension."""
    spec, local = getattr(args[0], "_spec", None), []
    if type(spec) is not RaggedSpec or spec.unfinished:
        return None
    for value in args:
        if not isinstance(value, torch.Tensor):
            local.append(value)
        elif not isinstance(value, DTensor):
            if value.ndim:
                return None
            local.append(value)
        elif value._spec is spec:
            local.append(value._local_tensor)
        else:
            return None
    return local


def _operand(value: Any, lead: DTensor, func: torch._ops.OpOverload) -> Any:
    """``value`` as an operand on the part that this rank holds of ``lead``."""
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, DTensor):
        if value.ndim == 0:
            return value
        # No TypeError: of one Python's operators would say no more than that they do not know the types.
        raise NotImplementedError(
            f"{func}: got a ragged DTensor of shape {tuple(lead.shape)} and a plain tensor of shape "
            f"{tuple(value.shape)}; give a DTensor on the same mesh, or work on to_local() or full_tensor()"
        )
    spec: Any = lead._spec
    if value._spec is spec:
        return value._local_tensor
    if value.device_mesh != lead.device_mesh:
        raise ValueError(f"{func}: operands lie on different meshes, {lead.device_mesh} and {value.device_mesh}")
    alike = value.placements == lead.placements and value.ndim == lead.ndim
    if alike and all(value.shape[dim] == lead.shape[dim] for dim in spec.split_dims):
        return value._local_tensor
    return part_of(whole(value), spec)


# --- lists of tensors ---------------------------------------------------------------------------------------


def _run_each(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> Any:
    """A multi-tensor or fused operation: each position of its lists is an elementwise operation by itself."""
    names = _argument_names(func)
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    lists = {name: value for name, value in named.items() if _is_tensor_list(value)}
    length = max(len(values) for values in lists.values())
    leads = [_first(v[i] for v in lists.values() if i < len(v) and is_ragged(v[i])) for i in range(length)]
    specs = [None if lead is None else lead._spec for lead in leads]
    for index, spec in enumerate(specs):
        if spec is not None and spec.unfinished:
            operands = tuple(
                named[name][index] if isinstance(named[name], list | tuple) else named[name]
                for name in names
                if name in named
            )
            specs[index] = unfinished_result(func, operands, kwargs, spec)
    outputs = written_arguments(func)
    for _, name in outputs:
        _check_written(func, name, lists.get(name, ()), leads)
    for name, value in named.items():
        if name in lists:
            named[name] = [_list_operand(each, lead, func) for each, lead in zip(value, leads, strict=False)]
        elif isinstance(value, DTensor):
            named[name] = whole(value)
    result = func(**named)
    for _, name in outputs:
        if name in lists:
            increment_version(named[name])
    if result is None or outputs:
        return result
    return [
        part if spec is None else make(part, spec.like(part.dtype)) for part, spec in zip(result, specs, strict=True)
    ]


def _list_operand(value: torch.Tensor, lead: DTensor | None, func: torch._ops.OpOverload) -> Any:
    if lead is None:
        if isinstance(value, DTensor):
            raise TypeError(f"{func}: ragged and other DTensors in one list; use an optimizer with foreach=False")
        return value
    if isinstance(value, DTensor):
        if value._spec is lead._spec:
            return value._local_tensor
    elif not value.ndim:
        return value
    if torch.broadcast_shapes(value.shape, lead.shape) != lead.shape:
        raise NotImplementedError(
            f"{func}: a ragged tensor of shape {tuple(lead.shape)} against one of shape {tuple(value.shape)}"
        )
    return _operand(value, lead, func)


def _check_written(
    func: torch._ops.OpOverload,
    argument: str,
    values: Sequence[Any],
    leads: Sequence[DTensor | None],
) -> None:
    for value, lead in zip(values, leads, strict=False):
        if (
            value is lead
            or lead is None
            or value.ndim == 0
            or (is_ragged(value) and value.placements == lead.placements)
        ):
            continue
        if is_ragged(value):
            value._spec.require_finished(func)
        placed = value.placements if isinstance(value, DTensor) else "no mesh"
        raise TypeError(
            f"{func}: {argument} of shape {tuple(value.shape)} is on {placed}, expected {lead.placements}; "
            "optimizer state that was loaded in another placement is brought back by "
            "restore_optimizer_state(optimizer)"
        )


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], torch.Tensor)


def _first(values: Iterable[Any]) -> Any:
    return next(iter(values), None)
