"""Relayout: a live unit laid out anew, where what it holds or which gradients are wanted has changed.

Promises: parameters stay the same objects, with their values, gradients, hooks and attributes; the optimizer's state
follows at its next step. It happens between steps, on all ranks alike, or an error says which rank stood out. A
backward of a forward from before is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fsdp_fn.delivery import FaceDelivery
from fsdp_fn.face import Borrowed, ShardedUnit
from fsdp_fn.groups import make_together
from fsdp_fn.layout import Layout, TensorSpec
from fsdp_fn.units import OwnedParameters, Setting, describe_layout, plan_unit, shard_unit


def tensor_spec(unit: ShardedUnit, index: int) -> TensorSpec:
    """What the layout knows of a parameter, by whether its gradient is wanted now."""
    return replace(unit.state.layout.tensors[index], requires_grad=unit.parameters[index].requires_grad)


def check_movable(unit: ShardedUnit) -> None:
    """Raise RuntimeError where what others hold of the unit would be left behind."""
    if not isinstance(unit.delivery, FaceDelivery):
        raise RuntimeError(
            f"{unit.label}: its flat_shards or local_shards were taken, which a new layout would leave behind; set "
            "requires_grad and tie weights before taking them"
        )
    if unit.flow.summed is not None:
        raise RuntimeError(
            f"{unit.label}: requires_grad of its parameters, or how it reduces, was changed between microbatches, "
            "whose gradients are not complete; change it after the backward of the last one"
        )


def successor(unit: ShardedUnit, kept: Sequence[int], setting: Setting | None = None) -> ShardedUnit:
    """A unit of the parameters ``kept``, by index, in place of ``unit``; its ``adopt`` takes them over.

    ``setting``: default, as ``unit`` has.
    """
    setting = unit.setting if setting is None else setting
    place = {index: position for position, index in enumerate(kept)}
    layout = plan_unit([tensor_spec(unit, index) for index in kept], setting)
    parameters = tuple(unit.parameters[index] for index in kept)
    owned = OwnedParameters(
        unit.modules.alive(),
        tuple(layout.tensors[position].name for position in range(len(kept))),
        parameters,
        tuple((container, key, place[index]) for container, key, index in unit.slots if index in place),
        unit.tops,
    )
    given_up = [
        Borrowed(unit.state.layout.tensors[index].name, container, key)
        for container, key, index in unit.slots
        if index not in place
    ]
    state = shard_unit(unit.state.name, parameters, layout, setting)
    parallel = [unit.parallel[index] for index in kept]
    made = ShardedUnit(owned, state, setting, unit.bracket, (*unit.borrowed, *given_up), parallel)
    made.rename(unit.name)
    made.agreed, made.changes.stepped = unit.agreed, unit.changes.stepped
    made.take_up(unit.habits)
    return made


def lay_out_for_gradients(unit: ShardedUnit) -> ShardedUnit:
    """The unit as the ``requires_grad`` of its parameters asks for now. All ranks of the unit must call.

    Raises RuntimeError as :func:`check_movable` does, ValueError where ranks want different gradients,
    :class:`~fsdp_fn.agreement.RankDivergence` where some ranks do not come. Nothing is changed then.
    """
    unit.agree("the new layout for a changed requires_grad")
    every = range(len(unit.parameters))

    def plan() -> Layout:
        check_movable(unit)
        return plan_unit([tensor_spec(unit, index) for index in every], unit.setting)

    what = f"{unit.label}: a changed requires_grad"
    make_together(plan, unit.setting.axes, unit.setting.device, what, describe_layout)
    made = successor(unit, every)
    made.adopt()
    return made
