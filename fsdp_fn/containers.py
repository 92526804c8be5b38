"""Containers: find and replace tensors in what a module takes and returns.

Promises: tensors in tuples, lists, dicts, named tuples, dataclasses and every node type registered with
torch's pytree are found; the container's type and everything else in it is kept. An object of another type
that carries a tensor of a graph is refused by name, never passed over.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fsdp_fn.policy import is_cast

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


def cast_floating(value: Any, dtype: torch.dtype | None) -> Any:
    """``value`` with each tensor of a castable floating-point dtype in it cast to ``dtype``; None casts nothing.

    Objects that cannot be opened are passed through as they are.
    """
    if dtype is None:
        return value
    return map_tensors(lambda tensor: tensor.to(dtype) if is_cast(tensor.dtype) else tensor, value, None)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any, where: str | None) -> Any:
    """``value`` with ``function`` applied to each tensor in it; ``where`` names the module in errors.

    Containers in which nothing changes are returned as they are. Raises TypeError for an object that holds a
    tensor with a gradient history and that neither pytree nor the dataclass protocol can open; with ``where`` None
    such an object is passed through.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, _PLAIN):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not _registered(value):
        return _map_dataclass(function, value, where)
    leaves, spec = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        if where is not None:
            _refuse_hidden_tensor(value, where)
        return value
    mapped = [map_tensors(function, leaf, where) for leaf in leaves]
    if all(new is old for new, old in zip(mapped, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(mapped, spec)


def _registered(value: Any) -> bool:
    return type(value) in pytree.SUPPORTED_NODES


def _map_dataclass(function: Callable[[torch.Tensor], torch.Tensor], value: Any, where: str | None) -> Any:
    changed = {}
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            old = getattr(value, field.name)
            new = map_tensors(function, old, where)
            if new is not old:
                changed[field.name] = new
    if not changed:
        return value
    # Neither dataclasses.replace nor the constructor: both run __post_init__ and refuse fields with
    # init=False.
    result = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(result, name, new)
    return result


def _refuse_hidden_tensor(value: Any, where: str) -> None:
    for name, held in _contents(value):
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(held)):
            raise TypeError(
                f"{where}: its output holds a {type(value).__qualname__}, whose tensor {name!r} needs a "
                "gradient and cannot be followed; return a tuple, list, dict or dataclass, or register the "
                "type with torch.utils._pytree.register_pytree_node"
            )


def _contents(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds that pytree does not open: attributes, slots, items of other collections."""
    yield from getattr(value, "__dict__", {}).items()
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)
    if isinstance(value, Mapping):
        yield from ((str(key), item) for key, item in value.items())
    elif isinstance(value, Sequence | Set):
        yield from ((str(index), item) for index, item in enumerate(value))
