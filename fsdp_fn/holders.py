"""Holders: which live unit holds a parameter, found by the plain one that it was or by the sharded one that it is.

Promises: no unit and no parameter is kept alive. There is no weak reference to a sharded parameter either, for
``nn.Module.to`` swaps such tensors, which torch refuses where there is one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from torch import nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

if TYPE_CHECKING:
    from fsdp_fn.face import ShardedUnit


class _Place:
    """Where a sharded parameter is now: a unit, which keeps it alive, and its index there."""

    __slots__ = ("index", "reference")

    def __init__(self, reference: weakref.ref[ShardedUnit], index: int) -> None:
        self.reference, self.index = reference, index

    def held(self) -> tuple[ShardedUnit, int] | None:
        unit = self.reference()
        return None if unit is None else (unit, self.index)

    def holds(self, parameter: nn.Parameter) -> bool:
        unit = self.reference()
        return unit is not None and self.index < len(unit.parameters) and unit.parameters[self.index] is parameter


_places: Final[dict[int, _Place]] = {}
"""By the identity of the sharded parameter, which is its own as long as the place holds it."""

_originals: Final = WeakTensorKeyDictionary()
"""Plain parameters that were sharded: their places, and their names."""


def hold(unit: ShardedUnit) -> None:
    """Note that ``unit`` holds its parameters from now on."""
    reference = weakref.ref(unit, functools.partial(_forget, tuple(id(parameter) for parameter in unit.parameters)))
    for index, parameter in enumerate(unit.parameters):
        place = _places.get(id(parameter))
        if place is not None and place.holds(parameter):
            place.reference, place.index = reference, index
        else:
            _places[id(parameter)] = _Place(reference, index)


def _forget(identities: tuple[int, ...], reference: weakref.ref[ShardedUnit]) -> None:
    for identity in identities:
        place = _places.get(identity)
        if place is not None and place.reference is reference:
            del _places[identity]


def note_original(original: nn.Parameter, sharded: nn.Parameter, name: str) -> None:
    """Note what a plain parameter became; ``name``: for errors."""
    _originals[original] = _places[id(sharded)], name


def name_of_original(parameter: object) -> str | None:
    """Under which name a plain parameter was sharded; None for any other."""
    known = _originals.get(parameter)
    return None if known is None else known[1]


def holder(parameter: nn.Parameter) -> tuple[ShardedUnit, int] | None:
    """The unit that holds a parameter, given as it was or as it is now, and its index there."""
    known = _originals.get(parameter)
    if known is not None:
        place: _Place = known[0]
        return place.held()
    found = _places.get(id(parameter))
    return found.held() if found is not None and found.holds(parameter) else None


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
