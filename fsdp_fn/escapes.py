"""Escapes: tensors of a unit's graph that leave its forward otherwise than as its outputs.

Promises: a tensor that a module keeps (``self.aux_loss = …``, in a list, a dict or a buffer) is found, so that it can
be led through Close like an output. A tensor that a forward hook captured cannot be found; so where a module is
observed by hooks, what its graph saves of the weights is watched, and backward enters the unit when it asks for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as module_hooks

_INTERNALS = frozenset(vars(nn.Module()))


class WatchedModules:
    """A unit's modules, held weakly: the unit must not keep the module tree alive."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        # torch's own attributes come first in a module's dict; those behind them may come and go.
        self._entries = tuple((weakref.ref(module), _count_internals(module)) for module in modules)

    def attributes(self) -> list[tuple[dict[str, Any], int, nn.Module]]:
        """Of each module that lives: its dict, how many of torch's own attributes lead it, and itself."""
        return [
            (vars(module), internals, module)
            for reference, internals in self._entries
            if (module := reference()) is not None
        ]

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


def kept_tensors(modules: WatchedModules, token: torch.Tensor) -> list[tuple[Any, Any, torch.Tensor]]:
    """Holder, key and tensor of everything that the modules keep of the graph that began with ``token``.

    Nodes are numbered as they are made: those above the token's were made in this call.
    """
    since = _number(token)
    found: list[tuple[Any, Any, torch.Tensor]] = []

    def look(holder: Any, key: Any, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.grad_fn is not None and _number(value) > since:
                found.append((holder, key, value))
        elif type(value) is list:
            for position, item in enumerate(value):
                look(value, position, item)
        elif type(value) is dict:
            for name, item in value.items():
                look(value, name, item)

    for attributes, internals, module in modules.attributes():
        if len(attributes) > internals:
            for key, value in islice(attributes.items(), internals, None):
                if isinstance(value, (torch.Tensor, list, dict)):
                    look(attributes, key, value)
        if module._buffers:
            look(attributes, "_buffers", module._buffers)
    return found


def _number(tensor: torch.Tensor) -> int:
    return int(tensor.grad_fn._sequence_nr())  # type: ignore[union-attr]


def watch_saved(storages: frozenset[int], before_use: Callable[[], None]) -> saved_tensors_hooks:
    """Call ``before_use`` before backward takes up a saved view of one of ``storages``.

    Autograd does not check version counters of what such hooks keep, so they do.
    """

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int, bool]:
        weight = type(tensor) is torch.Tensor and tensor.untyped_storage()._cdata in storages
        return tensor, tensor._version, weight

    def unpack(packed: tuple[torch.Tensor, int, bool]) -> torch.Tensor:
        tensor, version, weight = packed
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {tuple(tensor.shape)} is at version {tensor._version}, expected version {version}"
            )
        if weight:
            before_use()
        return tensor

    return saved_tensors_hooks(pack, unpack)
