"""Unit plans: the units of a whole model before they have values, and how each comes to its first state.

Promises: units get values one after the other, nested ones first, in the order of ``nn.Module.apply``, and a unit's
full values are gone before the next one's come. All ranks go on from one to the next together, or all raise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_fn.broadcast import broadcast_values
from fsdp_fn.groups import make_together
from fsdp_fn.initialization import Initialization, UnitValues, bottom_up, unit_values
from fsdp_fn.layout import Layout
from fsdp_fn.state import Axis, ModelState, UnitState
from fsdp_fn.units import OwnedParameters, Setting, copy_buffers, describe_layout, registered_buffers, shard_unit


@dataclass(frozen=True, eq=False)
class UnitPlan:
    """What the unit of the module at ``path`` holds, and how."""

    path: str
    owned: OwnedParameters
    layout: Layout
    setting: Setting

    def describe(self) -> str:
        """What ranks must have in common."""
        return f"{self.path}: {describe_layout(self.layout)}; {self.setting.describe()}"


@dataclass(frozen=True, eq=False)
class ModelPlan:
    """All units of a model by path, the root last, and where their first values come from."""

    units: Mapping[str, UnitPlan]
    first: Initialization

    def describe(self) -> str:
        """What ranks must have in common."""
        return "; ".join([*(unit.describe() for unit in self.units.values()), self.first.describe()])


def first_state(model: nn.Module, plan: ModelPlan, axes: Sequence[Axis], device: torch.device, what: str) -> ModelState:
    """This rank's first shards of every unit, and the buffers. ``model`` is not changed. All ranks of ``axes`` call.

    ``what`` is in the errors of other ranks. Raises as :func:`~fsdp_fn.initialization.unit_values` does.
    """
    buffers = WeakTensorKeyDictionary()

    def of_unit(unit: UnitPlan) -> UnitState:
        def make() -> tuple[UnitValues, UnitState]:
            values = unit_values(unit.owned, model, unit.path, unit.setting, plan.first, buffers)
            return values, shard_unit(unit.path, values.parameters, unit.layout, unit.setting)

        values, state = make_together(make, axes, device, what, lambda made: plan.first.describe(made[0]))
        own = broadcast_values(values, state, unit.setting.device) if plan.first.broadcast else values.buffers
        buffers.update({buffer.held: buffer.value for buffer in own})
        return state

    states = {path: of_unit(plan.units[path]) for path, _ in bottom_up(model) if path in plan.units}
    named = copy_buffers({name: buffers[held] for name, _, _, held in registered_buffers(model)})
    return ModelState({path: states[path] for path in plan.units}, named)
