"""Entrances: ways into a wrapped module besides its forward.

Promises: a registered method runs as forward does, gathered before and released after, its backward included; full
weights can be looked at in between, and are plain tensors then. A module's class, names and lifetime stay as they were.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from fsdp_fn.face import ShardedUnit
from fsdp_fn.module import FsdpModule, run_eagerly


def register_forward_method(module: nn.Module, name: str) -> None:
    """Have method ``name`` of a wrapped module run with its unit's full weights in place, as ``forward`` does.

    For modules with more entrances than one (``encode``, ``generate``). Called from within the unit's own forward it
    is the plain method. Raises TypeError for a module that is not wrapped, AttributeError or TypeError for what is no
    method of its class.
    """
    if not isinstance(module, FsdpModule):
        raise TypeError(f"register_forward_method: {type(module).__name__} is not wrapped: call fully_shard first")
    method = getattr(type(module), name, None)
    if method is None:
        raise AttributeError(f"register_forward_method: {type(module).__name__} has no method {name!r}")
    if not callable(method) or name in vars(module):
        raise TypeError(f"register_forward_method: {name!r} of {type(module).__name__} is no method of its class")
    cast(nn.Module, module).__class__ = _class_with_method(cast(Any, type(module)), name)


@functools.cache
def _class_with_method(cls: type[Any], name: str) -> type[nn.Module]:
    method = getattr(cls, name)

    @functools.wraps(method)
    def entered(self: Any, *args: Any, **kwargs: Any) -> Any:
        unit: ShardedUnit = self._fsdp_unit
        bound = functools.partial(method, self)
        return bound(*args, **kwargs) if not unit.idle else run_eagerly(self, bound, args, kwargs)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__, name: entered}
    return type(cls.__name__, (cls,), names)


@contextlib.contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Inside, the wrapped modules under ``module`` hold their full weights as plain tensors, to be read.

    In the compute dtype. All ranks must call. A write to them is refused on leaving, for it would be lost. Raises
    ValueError for a module without wrapped ones.
    """
    units = [child._fsdp_unit for child in module.modules() if isinstance(child, FsdpModule)]
    if not units:
        raise ValueError(f"unsharded: {type(module).__name__} has no wrapped module")
    with contextlib.ExitStack() as stack:
        for unit in units:
            stack.enter_context(unit.weights_in_place())
        yield
