"""Checkpoint state: functional model and optimizer state as named tensors, and new ones from them.

Promises: the same names as the wrapper's checkpoints, so each world reads the other's. Pure: what is read
goes into new tensors, and the states that were given are as they were.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_fn.buffer_specs import spec_of
from fsdp_fn.checkpoint_match import (
    MODEL,
    OPTIMIZER,
    CheckpointError,
    Stored,
    check_ranks,
    differences,
    raise_for,
    strangers,
)
from fsdp_fn.groups import group_over, mesh_over
from fsdp_fn.optim import OptimizerState
from fsdp_fn.ragged import from_spec
from fsdp_fn.state import Axis, Buffer, ModelState, trainable_tensors

# torch's optimizers that keep this moment keep a step of each parameter beside it.
_STEPPED = "exp_avg"


class StateContents:
    """What a checkpoint holds of a ``ModelState`` and an ``OptimizerState``.

    Raises TypeError or ValueError for states of other kinds, or without a unit.
    """

    def __init__(self, model: ModelState, optimizer: OptimizerState | None) -> None:
        if optimizer is not None and not isinstance(optimizer, OptimizerState):
            raise TypeError(f"optimizer of a ModelState: expected OptimizerState, got {type(optimizer).__name__}")
        if not model.units:
            raise ValueError("the model state has no unit: there is nothing to save or load")
        meshes: dict[tuple[Axis, ...], DeviceMesh] = {}
        for unit in model.units.values():
            if unit.axes not in meshes:
                meshes[unit.axes] = mesh_over(unit.axes, unit.compute_device.type)
        self._meshes = meshes
        held = {name: unit for name, unit in model.units.items() if unit.layout.tensors}
        check_ranks({name: math.prod(axis.size for axis in unit.axes) for name, unit in held.items()})
        self.group: dist.ProcessGroup = group_over(max(meshes.values(), key=DeviceMesh.size))
        self._model, self._optimizer = model, optimizer

    # --- saving ---------------------------------------------------------------------------------------------

    def parameters(self) -> list[str]:
        """Names of the parameters; the other tensors are module buffers."""
        return [spec.name for unit in self._model.units.values() for spec in unit.layout.tensors]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything to store, as views of the state."""
        found = dict(self._model_tensors(self._model))
        if self._optimizer is not None:
            found |= dict(self._optimizer_tensors(self._optimizer))
            found |= dict.fromkeys(self._step_names(), self._optimizer.step)
        return found

    def host(self) -> dict[str, Any]:
        """What is no tensor: the number of updates. Hyperparameters belong to the optimizer's own value."""
        steps = None if self._optimizer is None else float(self._optimizer.step)
        return {"param_groups": None, "optimizer_values": {}, "extra_state": {}, "optimizer_step": steps}

    def _model_tensors(self, model: ModelState) -> Iterator[tuple[str, torch.Tensor]]:
        for unit in model.units.values():
            yield from ((MODEL + name, face) for name, face in self._faces(unit.main, range(len(unit.layout.tensors))))
        yield from ((MODEL + name, buffer) for name, buffer in model.buffers.items())

    def _optimizer_tensors(self, optimizer: OptimizerState) -> Iterator[tuple[str, torch.Tensor]]:
        for slot, buffers in optimizer.slots.items():
            for buffer in buffers.values():
                held = [
                    index
                    for index in trainable_tensors(buffer.layout)
                    if buffer.layout.location(index)[0] in buffer.held
                ]
                yield from ((f"{OPTIMIZER}{name}.{slot}", face) for name, face in self._faces(buffer, held))

    def _faces(self, buffer: Buffer, tensors: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for index in tensors:
            described, owned = buffer.layout.tensors[index], buffer.owned(index)
            if described.shape:
                mesh = self._meshes[buffer.axes]
                spec = spec_of(buffer.layout, index, mesh, buffer.placements, buffer.axes, owned.dtype)
                yield described.name, from_spec(owned.detach(), spec, False)
            elif not owned.ndim:
                # A tensor without dimensions has no rows to share out: its one owner stores it.
                yield described.name, owned.detach()

    def _step_names(self) -> list[str]:
        slots = {} if self._optimizer is None else self._optimizer.slots
        return [
            f"{OPTIMIZER}{buffer.layout.tensors[index].name}.step"
            for buffer in slots.get(_STEPPED, {}).values()
            for index in trainable_tensors(buffer.layout)
        ]

    # --- loading --------------------------------------------------------------------------------------------

    def reading(self, stored: Stored) -> tuple[dict[str, torch.Tensor], Callable[[], tuple[Any, Any]]]:
        """Views of new tensors to read into, and what makes the new states of them.

        A module buffer that the checkpoint does not have is one that no state dict has, and stays as it is.
        Raises CheckpointError for what does not fit; so does the second result, where parameters were stepped
        different numbers of times.
        """
        wanted = self._wanted_of_model()
        problems = differences(wanted, stored)
        problems += strangers((MODEL + name for name in stored.parameters), wanted, "the model state")
        if self._optimizer is not None:
            expected = self._wanted_of_optimizer(self._optimizer, stored)
            problems += differences(expected, stored)
            problems += strangers(stored.optimizer_names(), expected, "the optimizer state")
        raise_for(problems)
        units = {
            name: dataclasses.replace(
                unit, main=_blank(unit.main), planes=None, gradient=None, carrier=None, version=unit.version + 1
            )
            for name, unit in self._model.units.items()
        }
        buffers = {
            name: torch.empty_like(value) if MODEL + name in stored.tensors else value.clone()
            for name, value in self._model.buffers.items()
        }
        model = ModelState(units, buffers)
        found = {name: value for name, value in self._model_tensors(model) if name in stored.tensors}
        if self._optimizer is None:
            return found, lambda: (model, None)
        slots = {
            slot: {unit: _blank(buffer) for unit, buffer in by_unit.items()}
            for slot, by_unit in self._optimizer.slots.items()
        }
        optimizer = dataclasses.replace(self._optimizer, slots=slots)
        found |= dict(self._optimizer_tensors(optimizer))
        found |= {name: torch.empty((), dtype=stored.dtype(name)) for name in self._step_names()}
        return found, lambda: (model, self._stepped(optimizer, found, stored))

    def _wanted_of_model(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        return {
            MODEL + spec.name: (
                torch.Size(spec.shape),
                unit.main.segment(unit.layout.location(index)[0]).dtype,
            )
            for unit in self._model.units.values()
            for index, spec in enumerate(unit.layout.tensors)
        }

    def _wanted_of_optimizer(
        self, optimizer: OptimizerState, stored: Stored
    ) -> dict[str, tuple[torch.Size, torch.dtype]]:
        wanted = {
            f"{OPTIMIZER}{buffer.layout.tensors[index].name}.{slot}": (
                torch.Size(buffer.layout.tensors[index].shape),
                buffer.segment(buffer.layout.location(index)[0]).dtype,
            )
            for slot, buffers in optimizer.slots.items()
            for buffer in buffers.values()
            for index in trainable_tensors(buffer.layout)
        }
        scalar = torch.Size(())
        return wanted | {
            name: (scalar, stored.dtype(name) if name in stored.tensors else torch.float32)
            for name in self._step_names()
        }

    def _stepped(self, optimizer: OptimizerState, read: dict[str, torch.Tensor], stored: Stored) -> OptimizerState:
        steps = {float(read[name]) for name in self._step_names()}
        if len(steps) > 1:
            raise CheckpointError(
                f"parameters of the checkpoint were stepped different numbers of times, {sorted(steps)}: a "
                "functional optimizer state has one step for all"
            )
        # SGD stores no step of its parameters, and its arithmetic reads none.
        counted = stored.host.get("optimizer_step")
        step = steps.pop() if steps else float(stored.step) if counted is None else counted
        return dataclasses.replace(optimizer, step=torch.full_like(optimizer.step, step))


def _blank(buffer: Buffer) -> Buffer:
    # Zeros: the padding between tensors is not stored, and must stay zero.
    return dataclasses.replace(buffer, segments=tuple(torch.zeros_like(flat) for flat in buffer.segments))
