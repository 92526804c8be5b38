"""Holders: which live unit holds a parameter, found by the plain parameter from before or by the sharded one.

Promises: nothing here keeps a unit, a model or a parameter alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from fsdp_fn.face import ShardedUnit

sharded_originals = WeakTensorKeyDictionary()
"""Plain parameters that were sharded: weakly the DTensor parameter in their place, and their name."""

_holders = WeakTensorKeyDictionary()
"""DTensor parameters: weakly the unit that holds each, and its index there."""


def note_holder(parameter: nn.Parameter, unit: ShardedUnit, index: int) -> None:
    """``unit`` holds the sharded ``parameter`` from now on."""
    _holders[parameter] = (weakref.ref(unit), index)


def note_original(original: nn.Parameter, parameter: nn.Parameter, name: str) -> None:
    """The sharded ``parameter`` stands in the place of ``original`` from now on."""
    sharded_originals[original] = (weakref.ref(parameter), name)


def holder(parameter: nn.Parameter) -> tuple[ShardedUnit, int] | None:
    """The unit that holds a parameter, given as it was or as it is now, and its index there."""
    known = sharded_originals.get(parameter)
    face = parameter if known is None else known[0]()
    reference, index = (None, 0) if face is None else _holders.get(face, (None, 0))
    unit = None if reference is None else reference()
    return None if unit is None else (unit, index)


def say_which(error: Exception, operands: Sequence[Any]) -> None:
    """Have the message of ``error`` name the sharded parameter among ``operands`` of the operation that was refused."""
    for value in pytree.tree_leaves(operands):
        found = holder(value) if isinstance(value, nn.Parameter) else None
        if found is not None and len(error.args) == 1:
            unit, index = found
            name = unit.state.layout.tensors[index].name
            said = (
                f"parameter {name!r} of {unit.label} is sharded here, for the unit is not running: compute with it in "
                "the unit's forward or in a method that register_forward_method made an entrance, or look at it inside "
                f"unsharded() ({error.args[0]})"
            )
            error.args = (said,)
            return
