"""Ties: parameters that modules of several units share, and which unit holds each.

Promises: a parameter is stored, gathered and reduced once, by the lowest wrapped module that contains every module that
has it; it moves up there when that module is wrapped. It stays one object under all of its names. A unit that has one
which no unit around it holds refuses to run, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fsdp_fn.bracket import Slot
from fsdp_fn.face import Borrowed, ShardedUnit
from fsdp_fn.layout import TensorSpec
from fsdp_fn.relayout import check_movable, tensor_spec
from fsdp_fn.units import OwnedParameters, Setting

Holder = Callable[[nn.Parameter], tuple[ShardedUnit, int] | None]
"""The unit that holds a parameter, under its old or its sharded object, and its index there."""


@dataclass(frozen=True, eq=False)
class Tie:
    """A parameter that a nested unit holds and the unit around it is to hold; ``name``: there."""

    name: str
    parameter: nn.Parameter
    unit: ShardedUnit
    index: int

    def spec(self) -> TensorSpec:
        """What the layout needs to know of it."""
        return tensor_spec(self.unit, self.index)


def find_ties(
    owned: OwnedParameters, module: nn.Module, nested: Mapping[str, ShardedUnit], holder: Holder
) -> tuple[OwnedParameters, list[Tie], tuple[Borrowed, ...]]:
    """What of ``owned`` is new, what moves up from ``nested`` units (by path), and what units elsewhere hold."""
    paths = {id(unit): path for path, unit in nested.items()}
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(as_sharded(parameter, holder)), name)
    ties: dict[int, Tie] = {}

    def tie(unit: ShardedUnit, index: int) -> None:
        parameter = unit.parameters[index]
        ties.setdefault(id(parameter), Tie(names[id(parameter)], parameter, unit, index))

    place: dict[int, int] = {}
    elsewhere: set[int] = set()
    for index, parameter in enumerate(owned.parameters):
        found = holder(parameter)
        if found is None:
            place[index] = len(place)
        elif id(found[0]) in paths:
            tie(*found)
        else:
            elsewhere.add(index)
    for path, unit in nested.items():
        for slot in unit.borrowed:
            found = holder(slot.container[slot.key])
            above = None if found is None else paths.get(id(found[0]))
            if found is not None and above is not None and not path.startswith(f"{above}."):
                tie(*found)
    borrowed = tuple(Borrowed(str(key), c, key) for c, key, index in owned.slots if index in elsewhere)
    new = replace(
        owned,
        names=tuple(owned.names[index] for index in place),
        parameters=tuple(owned.parameters[index] for index in place),
        slots=tuple((c, key, place[index]) for c, key, index in owned.slots if index in place),
    )
    return new, list(ties.values()), borrowed


def with_ties(
    new: OwnedParameters, all_slots: Sequence[tuple[Any, Any, nn.Parameter]], ties: Sequence[Tie]
) -> OwnedParameters:
    """``new`` and the tied parameters. ``all_slots``: of the module's own and of borrowers, each with what it holds."""
    slots: list[Slot] = list(new.slots)
    tops = list(new.tops)
    for position, tie in enumerate(ties, len(new.parameters)):
        own = [(c, key) for c, key, index in tie.unit.slots if index == tie.index]
        own += [(c, key) for c, key, held in all_slots if held is tie.parameter]
        known = {(id(c), key): (c, key) for c, key in own}
        slots += [(c, key, position) for c, key in known.values()]
        tops += [top for top in tie.unit.tops if top not in tops]
    return replace(
        new,
        names=(*new.names, *(tie.name for tie in ties)),
        parameters=(*new.parameters, *(tie.parameter for tie in ties)),
        slots=tuple(slots),
        tops=tuple(tops),
    )


def check_ties(ties: Sequence[Tie], setting: Setting, unit: str) -> None:
    """Raise ValueError where a tied parameter cannot be held as ``setting`` says, RuntimeError where it cannot move."""
    for tie in ties:
        label = f"parameter {tie.name!r} of unit {unit!r} is tied to one of {tie.unit.label}"
        if tie.unit.mesh != setting.mesh:
            raise ValueError(f"{label}, on another mesh, {tie.unit.mesh}, not {setting.mesh}; put both on one mesh")
        if tie.unit.parallel[tie.index] is not None:
            raise ValueError(f"{label}, which is tensor-parallel; put both under one unit")
        wanted = setting.precision.main(tie.spec().dtype)
        if tie.parameter.dtype != wanted:
            raise ValueError(f"{label}, whose main dtype is {tie.parameter.dtype}, here {wanted}; choose one of them")
        if tie.unit.setting.grad_divisor != setting.grad_divisor:
            raise ValueError(
                f"{label}, whose grad_divisor is {tie.unit.setting.grad_divisor}, here {setting.grad_divisor}; "
                "give both the same"
            )
        check_movable(tie.unit)


def as_sharded(parameter: nn.Parameter, holder: Holder) -> nn.Parameter:
    """The sharded object of a parameter that a unit holds; itself where none does."""
    found = holder(parameter)
    return parameter if found is None else found[0].parameters[found[1]]
