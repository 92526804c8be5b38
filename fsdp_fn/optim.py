"""Optimizers as functions over sharded state: init, then update, nothing hidden.

Promises: ``update`` is pure, it gives a new state and leaves its arguments as they were; ``update_`` does the same in
place, for those who hold no other copy. The arithmetic is torch's own functional AdamW and SGD, over the flat shards:
one multi-tensor call for the whole model, padding included (its gradient is zero and it stays zero).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd
from torch.utils import _pytree as pytree

from fsdp_fn.state import Buffer, ModelState, UnitState, register_state, zeros_like_main


@dataclass(frozen=True)
class OptimizerState:
    """Sharded optimizer state: ``slots[slot][unit]`` is a buffer of the unit's trainable segments.

    ``step``: how many updates were made, a float32 scalar on CPU.
    """

    slots: dict[str, dict[str, Buffer]]
    step: torch.Tensor


register_state(OptimizerState, ("slots", "step"))
Gradients = Mapping[str, Buffer]


class Optimizer(ABC):
    """What every optimizer here does: ``init`` once, then ``update`` or ``update_`` each step."""

    @abstractmethod
    def init(self, state: ModelState) -> OptimizerState:
        """Optimizer state for every trainable segment of ``state``, before the first update."""

    def update(
        self, gradients: Gradients, optimizer_state: OptimizerState, state: ModelState, *, lr: float | None = None
    ) -> tuple[ModelState, OptimizerState]:
        """The state after one step. ``lr`` stands in for the configured one, for a schedule."""
        return self.update_(gradients, _clone(optimizer_state), clone_weights(state), lr=lr)

    @abstractmethod
    def update_(
        self, gradients: Gradients, optimizer_state: OptimizerState, state: ModelState, *, lr: float | None = None
    ) -> tuple[ModelState, OptimizerState]:
        """The same in place: the tensors of ``state`` and ``optimizer_state`` are changed, and returned in new ones."""


@dataclass(frozen=True)
class AdamW(Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) over sharded state, by ``torch.optim.adamw.adamw``."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        _check_not_negative(self, "lr", "eps", "weight_decay")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"AdamW.betas: expected two numbers in [0, 1), got {self.betas}")

    def init(self, state: ModelState) -> OptimizerState:
        """Zero moments for every trainable segment of ``state``."""
        return OptimizerState(
            {slot: _zeros(state) for slot in ("exp_avg", "exp_avg_sq")}, torch.zeros((), dtype=torch.float32)
        )

    def update_(
        self, gradients: Gradients, optimizer_state: OptimizerState, state: ModelState, *, lr: float | None = None
    ) -> tuple[ModelState, OptimizerState]:
        """The same in place: the tensors of ``state`` and ``optimizer_state`` are changed, and returned in new ones."""
        _check(gradients, optimizer_state, state, ("exp_avg", "exp_avg_sq"))
        weights, grads = _flat(_trainable(state)), _flat(gradients)
        with torch.no_grad():
            steps = [optimizer_state.step.clone() for _ in weights]
            torch_adamw(
                weights,
                grads,
                _flat(optimizer_state.slots["exp_avg"]),
                _flat(optimizer_state.slots["exp_avg_sq"]),
                [],
                steps,
                foreach=True,
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=self.lr if lr is None else lr,
                weight_decay=self.weight_decay,
                eps=self.eps,
                maximize=False,
            )
        return next_version(state), dataclasses.replace(optimizer_state, step=optimizer_state.step + 1)


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum over sharded state, by ``torch.optim.sgd.sgd``."""

    lr: float = 1e-3
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_not_negative(self, "lr", "momentum", "weight_decay")
        if self.nesterov and not self.momentum:
            raise ValueError("SGD.nesterov needs momentum > 0")

    def init(self, state: ModelState) -> OptimizerState:
        """Zero momentum for every trainable segment; no buffers without momentum."""
        slots = {"momentum_buffer": _zeros(state)} if self.momentum else {}
        return OptimizerState(slots, torch.zeros((), dtype=torch.float32))

    def update_(
        self, gradients: Gradients, optimizer_state: OptimizerState, state: ModelState, *, lr: float | None = None
    ) -> tuple[ModelState, OptimizerState]:
        """The same in place: the tensors of ``state`` and ``optimizer_state`` are changed, and returned in new ones."""
        slots = ("momentum_buffer",) if self.momentum else ()
        _check(gradients, optimizer_state, state, slots)
        weights, grads = _flat(_trainable(state)), _flat(gradients)
        if self.nesterov:
            grads = [grad.clone() for grad in grads]  # torch's multi-tensor SGD adds the momentum into them
        # Zero momentum is the same as none yet: momentum * 0 + gradient is the gradient, to the bit.
        momenta = _flat(optimizer_state.slots["momentum_buffer"]) if self.momentum else [None] * len(weights)
        with torch.no_grad():
            torch_sgd(
                weights,
                grads,
                cast("list[torch.Tensor | None]", momenta),
                foreach=True,
                weight_decay=self.weight_decay,
                momentum=self.momentum,
                lr=self.lr if lr is None else lr,
                dampening=0.0,
                nesterov=self.nesterov,
                maximize=False,
            )
        return next_version(state), dataclasses.replace(optimizer_state, step=optimizer_state.step + 1)


def next_version(state: ModelState) -> ModelState:
    """The same tensors, as the next version of every unit: what was gathered before, planes at rest too, is gone."""
    units = {
        name: dataclasses.replace(unit, planes=None, carrier=None, version=unit.version + 1)
        for name, unit in state.units.items()
    }
    return dataclasses.replace(state, units=units)


def clone_weights(state: ModelState) -> ModelState:
    """A copy whose trainable main weights are tensors of their own; frozen ones and buffers are shared."""
    return dataclasses.replace(state, units={name: _clone_main(unit) for name, unit in state.units.items()})


def _clone_main(unit: UnitState) -> UnitState:
    segments = unit.layout.segments
    main = tuple(
        flat.detach().clone() if segments[index].requires_grad else flat
        for index, flat in zip(unit.main.held, unit.main.segments, strict=True)
    )
    return dataclasses.replace(unit, main=dataclasses.replace(unit.main, segments=main))


def _trainable(state: ModelState) -> dict[str, Buffer]:
    """Main weights of the trainable segments, by unit, detached from any graph."""
    trainable = {}
    for name, unit in state.units.items():
        held = tuple(index for index in unit.main.held if unit.layout.segments[index].requires_grad)
        flats = tuple(unit.main.segment(index).detach() for index in held)
        trainable[name] = dataclasses.replace(unit.main, segments=flats, held=held)
    return trainable


def _zeros(state: ModelState) -> dict[str, Buffer]:
    return {name: zeros_like_main(unit) for name, unit in state.units.items()}


def _flat(buffers: Mapping[str, Buffer]) -> list[torch.Tensor]:
    return [flat for buffer in buffers.values() for flat in buffer.segments]


def _clone(optimizer_state: OptimizerState) -> OptimizerState:
    return cast(OptimizerState, pytree.tree_map(torch.clone, optimizer_state))


def _check(gradients: Gradients, optimizer_state: OptimizerState, state: ModelState, slots: tuple[str, ...]) -> None:
    if set(optimizer_state.slots) != set(slots):
        raise ValueError(f"optimizer state has slots {sorted(optimizer_state.slots)}, expected {sorted(slots)}")
    trainable = _trainable(state)
    for what, buffers in [("gradients", gradients), *optimizer_state.slots.items()]:
        if list(buffers) != list(trainable):
            raise ValueError(f"{what}: expected units {list(trainable)}, got {list(buffers)}")
        for name, buffer in buffers.items():
            expected = trainable[name]
            if buffer.placements != expected.placements:
                raise ValueError(
                    f"{what} of unit {name!r}: placed {buffer.placements}, expected {expected.placements}, as the main "
                    "weights are; sums over microbatches are completed by finish_gradients(state, gradients)"
                )
            same = buffer.layout == expected.layout and buffer.axes == expected.axes and buffer.held == expected.held
            if not same or any(
                a.shape != b.shape or a.dtype != b.dtype
                for a, b in zip(buffer.segments, expected.segments, strict=True)
            ):
                raise ValueError(
                    f"{what} of unit {name!r}: laid out or typed otherwise than its main weights; they must come from "
                    "the same shard() call or checkpoint"
                )


def _check_not_negative(optimizer: AdamW | SGD, *names: str) -> None:
    for name in names:
        if not getattr(optimizer, name) >= 0.0:
            raise ValueError(
                f"{type(optimizer).__name__}.{name}: expected a number >= 0, got {getattr(optimizer, name)}"
            )
