"""Escapes: tensors of a unit's graph that leave its forward otherwise than as its outputs.

Promises: a tensor that a module keeps (``self.aux_loss = …``, in a list, a dict or a buffer) is found, so that it can
be led through Close like an output. A tensor that a forward hook captured cannot be found; so where a module is
observed by hooks, what its graph saves of the weights is watched, and backward enters the unit when it asks for it.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as module_hooks

from fsdp_fn.containers import map_tensors

_PLAIN = frozenset((int, float, bool, str, type(None)))
_INTERNALS = frozenset(vars(nn.Module()))


class WatchedModules:
    """A unit's modules, held weakly: the unit must not keep the module tree alive."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # torch's own attributes come first in a module's dict; those behind them may come and go.
        self._entries = tuple((weakref.ref(module), _count_internals(module)) for module in modules)
        self._sizes = tuple((len(module._modules), len(module._parameters)) for module in modules)
        self._identities = frozenset(id(module) for module in modules)

    def has(self, module: nn.Module) -> bool:
        """Whether ``module`` is one of them."""
        return id(module) in self._identities and any(reference() is module for reference, _ in self._entries)

    def attributes(self) -> list[tuple[dict[str, Any], int, nn.Module]]:
        """Of each module that lives: its dict, how many of torch's own attributes lead it, and itself."""
        return [
            (vars(module), internals, module)
            for reference, internals in self._entries
            if (module := reference()) is not None
        ]

    def alive(self) -> tuple[nn.Module, ...]:
        """Those that still are."""
        return tuple(module for reference, _ in self._entries if (module := reference()) is not None)

    def grown(self) -> str | None:
        """Class of a module that has more submodules or parameters, or fewer, than it had; None where none has."""
        for (reference, _), size in zip(self._entries, self._sizes, strict=True):
            module = reference()
            if module is not None and (len(module._modules), len(module._parameters)) != size:
                return type(module).__name__
        return None

    def observed(self) -> bool:
        """Whether a forward hook may see what one of the modules computes."""
        if module_hooks._global_forward_hooks:
            return True
        return any(
            module._forward_hooks or module._forward_pre_hooks
            for reference, _ in self._entries
            if (module := reference()) is not None
        )


def _count_internals(module: nn.Module) -> int:
    return sum(1 for _ in takewhile(_INTERNALS.__contains__, vars(module)))


def kept_values(modules: WatchedModules) -> list[tuple[Any, Any, Any]]:
    """What the modules keep that may hold a tensor, as holder, key and value: attributes, buffers.

    A value is a tensor, a tuple or a dataclass; lists and dicts are holders, for what is led through Close is put back
    into them.
    """
    found: list[tuple[Any, Any, Any]] = []
    for attributes, internals, module in modules.attributes():
        if len(attributes) > internals:
            for key, value in islice(attributes.items(), internals, None):
                if type(value) not in _PLAIN:
                    _look(attributes, key, value, found)
        if module._buffers:
            _look(attributes, "_buffers", module._buffers, found)
    return found


def _look(holder: Any, key: Any, value: Any, found: list[tuple[Any, Any, Any]]) -> None:
    if isinstance(value, tuple):
        # Sizes, strides and the like: most tuples of a module.
        if any(type(item) not in _PLAIN for item in value):
            found.append((holder, key, value))
    elif isinstance(value, torch.Tensor) or hasattr(type(value), "__dataclass_fields__"):
        found.append((holder, key, value))
    elif type(value) is list:
        for position, item in enumerate(value):
            _look(value, position, item, found)
    elif type(value) is dict:
        for name, item in value.items():
            _look(value, name, item, found)


def map_kept(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """``value`` of :func:`kept_values`, ``function`` applied to its tensors; what cannot be opened stays as it is."""
    if isinstance(value, torch.Tensor):
        return function(value)
    try:
        return map_tensors(function, value, "a kept value")
    except TypeError:
        return value


class Top(NamedTuple):
    """An attribute of a module, held weakly, and the container of parameters that it is.

    A forward may put another container there. What a module keeps may hold a graph that leads back to the unit, in
    links that Python's collector does not see; so a unit must not keep the module.
    """

    module: weakref.ref[nn.Module]
    name: str
    container: Any

    def put_back(self) -> None:
        """Have the module hold the container again."""
        module = self.module()
        if module is not None:
            vars(module)[self.name] = self.container


class Held(NamedTuple):
    """A parameter that a module holds past its name: ``container[key]`` is it; without a container, out of reach.

    ``top``: the module's attribute that leads there, where that is a container of its own.
    """

    where: str
    container: Any
    key: Any
    parameter: nn.Parameter
    top: Top | None


def held_parameters(modules: Iterable[nn.Module]) -> Iterator[Held]:
    """Parameters that modules hold as plain attributes too, or in containers in them (``nn.LSTM``'s flat weights)."""
    for module in modules:
        attributes = vars(module)
        for key, value in islice(attributes.items(), _count_internals(module), None):
            where = f"{type(module).__name__}.{key}"
            if isinstance(value, nn.Parameter):
                yield Held(where, attributes, key, value, None)
            elif isinstance(value, (list, tuple, dict)):
                yield from _held_in(where, value, Top(weakref.ref(module), key, value))


def _held_in(where: str, holder: Any, top: Top) -> Iterator[Held]:
    """What is in a container. An immutable one gives what it holds without a way to put anything else there."""
    writable = type(holder) in (list, dict, OrderedDict)
    for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
        if isinstance(value, nn.Parameter):
            yield Held(where, holder if writable else None, key, value, top)
        elif isinstance(value, (list, tuple, dict)):
            yield from _held_in(where, value, top)


def held_at(container: Any, key: Any) -> Any:
    """``container[key]``, None where nothing is there."""
    try:
        return container[key]
    except LookupError:
        return None


def is_later(tensor: torch.Tensor, token: torch.Tensor) -> bool:
    """Whether ``tensor`` was computed after ``token``: autograd numbers nodes as they are made."""
    if tensor.grad_fn is None or token.grad_fn is None:
        return False
    return bool(tensor.grad_fn._sequence_nr() > token.grad_fn._sequence_nr())


def aliases(tensor: torch.Tensor, storages: frozenset[int]) -> bool:
    """Whether ``tensor``, or what a DTensor holds here, is a view of one of ``storages``."""
    held = tensor._local_tensor if type(tensor) is DTensor else tensor
    return type(held) is torch.Tensor and held.untyped_storage()._cdata in storages


def shared_storages(outputs: Iterable[torch.Tensor], inputs: Iterable[Any]) -> frozenset[int]:
    """Storages that two of ``outputs`` share, or one of them and one of ``inputs``."""
    own = [output.untyped_storage()._cdata for output in outputs if type(output) is torch.Tensor]
    given = [value.untyped_storage()._cdata for value in inputs if type(value) is torch.Tensor]
    if len(own) == 1:
        return frozenset(own) if own[0] in given else frozenset()
    return frozenset(storage for storage in own if own.count(storage) > 1 or storage in given)


def saving_is_watched() -> bool:
    """Whether hooks for saved tensors are in place already, such as those of a checkpoint around the unit."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def watch_saved(
    storages: frozenset[int], enter_backward: weakref.WeakMethod[Callable[[], None]]
) -> saved_tensors_hooks:
    """Enter the unit's backward before it takes up a saved view of one of ``storages``.

    Autograd does not check version counters of what such hooks keep, so they do.
    """

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
        # Detached, for a node's own output would keep the node alive.
        return tensor.detach(), tensor._version, aliases(tensor, storages)

    def unpack(packed: tuple[torch.Tensor, int, bool]) -> torch.Tensor:
        tensor, version, weight = packed
        enter = enter_backward() if weight else None
        if enter is not None:
            enter()
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, expected version {version}"
            )
        return tensor

    return saved_tensors_hooks(pack, unpack)
