"""Random models sharded: wrapped, and functional.

Promises: what is reported of a gradient or a weight is the part that this rank holds, read from the unit's layout and
not by DTensor.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from random_modules import Leaf
from random_sides import Batch, Side, Tensors, loss_of, toggle, torch_optimizer
from random_specs import Draw
from strategies import assembled, mesh_for, strategies_for
from torch import nn

import fsdp_fn
from fsdp_fn.delivery import PlainDelivery
from fsdp_fn.module import FsdpModule

Tensor = torch.Tensor


class Part(NamedTuple):
    """The elements of a flattened tensor that are held here, and their values, None where there are none to be had."""

    elements: range
    value: Tensor | None


class ShardedSide(Side):
    """What is sharded, on either path. ``by_steps``: losses come back detached."""

    @property
    def by_steps(self) -> bool:
        """Whether losses come back detached, from ``value_and_grad``."""
        return False

    def options(self) -> dict[str, Any]:
        """Arguments of ``fully_shard`` and ``shard`` alike."""
        sharding = self.draw.sharding
        strategy = strategies_for(self.draw.world_size)[sharding.strategy]
        compute = torch.bfloat16 if sharding.precision == "bfloat16" else None
        return {
            "mesh": mesh_for(strategy),
            "placements": strategy,
            "policy": fsdp_fn.SchedulePolicy(
                reshard_after_forward=sharding.reshard, release=fsdp_fn.Release(sharding.release)
            ),
            "precision": fsdp_fn.PrecisionPolicy(compute_dtype=compute),
            "grad_divisor": sharding.grad_divisor,
            "group_of": _matrices_apart if sharding.grouped else None,
        }

    def other(self) -> dict[str, Any]:
        """What is otherwise for the first nested unit."""
        other = self.draw.sharding.other
        return {} if other is None else {"placements": strategies_for(self.draw.world_size)[other]}

    @abstractmethod
    def gradients(self) -> dict[str, Part]:
        """Finished gradients of trained parameters, by full name."""

    @abstractmethod
    def units(self) -> Iterator[tuple[str, fsdp_fn.UnitState]]:
        """Every unit's state, and what stands before the names of its tensors."""

    @abstractmethod
    def buffers(self) -> Tensors:
        """Module buffers."""

    @abstractmethod
    def root(self) -> nn.Module:
        """The model, or its template's."""

    def forget_kept(self) -> None:
        """Drop the losses that leaves keep."""
        for module in self.root().modules():
            if isinstance(module, Leaf):
                module.kept = None

    def weights(self) -> dict[str, Part]:
        """Main weights, by full name."""
        found = {}
        for prefix, state in self.units():
            for index, spec in enumerate(state.layout.tensors):
                found[prefix + spec.name] = Part(state.main.owned_elements(index), state.main.owned(index).detach())
        return found

    def full_weights(self) -> Tensors:
        """Main weights, put together from all ranks' parts; 8-bit ones as bytes, which can be compared."""
        found = {}
        for prefix, state in self.units():
            parts = [as_bytes(state.main.owned(index)) for index in range(len(state.layout.tensors))]
            found |= {prefix + name: value for name, value in assembled(state, parts).items()}
        return found


def _matrices_apart(name: str, parameter: nn.Parameter) -> str:
    return "matrices" if parameter.ndim > 1 else "others"


def as_bytes(value: Tensor) -> Tensor:
    """The same, where elements are of one byte as integers."""
    return value.detach().view(torch.uint8) if value.dtype.itemsize == 1 else value.detach()


class WrapperSide(ShardedSide):
    """``fully_shard`` and a torch optimizer."""

    def __init__(self, draw: Draw, model: nn.Module, units: list[str]) -> None:
        super().__init__(draw)
        options = self.options()
        for number, name in enumerate(units):
            fsdp_fn.fully_shard(model.get_submodule(name), **(options | (self.other() if number == 0 else {})))
        self.module = fsdp_fn.fully_shard(model, **options)
        training = draw.training
        held: list[Any]
        match training.held:
            case "flat":
                held = [shard for group in fsdp_fn.flat_shards(model).values() for shard in group]
            case "local":
                held = list(fsdp_fn.local_shards(model).values())
            case _:
                held = list(model.parameters())
        self.optimizer = torch_optimizer(draw, held, foreach=training.foreach)

    def call(self, batch: Batch) -> Mapping[str, Any]:
        return self.module(batch.x, turn=batch.turn)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        summing = self.draw.training.accumulating and not last
        with fsdp_fn.accumulating(self.module) if summing else contextlib.nullcontext():
            if loss.requires_grad:
                loss.backward()

    def clip(self, limit: float) -> Tensor:
        return fsdp_fn.clip_grad_norm_(self.module, limit)

    def step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.draw.training.set_to_none)

    def refreeze(self, names: Collection[str]) -> None:
        for name in names:
            toggle(self.module.get_parameter(name))

    def gradients(self) -> dict[str, Part]:
        found = {}
        for prefix, unit in self._wrapped():
            grads: dict[int, Tensor | None] = {}
            main = unit.state.main
            if isinstance(unit.delivery, PlainDelivery):
                for shard in unit.delivery.shards:
                    for index, start in shard.pieces:
                        grad = shard.parameter.grad
                        length = len(main.owned_elements(index))
                        grads[index] = None if grad is None else grad.reshape(-1)[start : start + length]
            else:
                for index, parameter in enumerate(unit.parameters):
                    if parameter.requires_grad:
                        grads[index] = None if parameter.grad is None else parameter.grad._local_tensor
            for index, grad in grads.items():
                found[prefix + unit.state.layout.tensors[index].name] = Part(main.owned_elements(index), grad)
        return found

    def units(self) -> Iterator[tuple[str, fsdp_fn.UnitState]]:
        for prefix, unit in self._wrapped():
            yield prefix, unit.state

    def buffers(self) -> Tensors:
        return dict(self.module.named_buffers())

    def root(self) -> nn.Module:
        return self.module

    def _wrapped(self) -> Iterator[tuple[str, Any]]:
        for path, module in self.module.named_modules():
            if isinstance(module, FsdpModule):
                yield (f"{path}." if path else ""), module._fsdp_unit


class FunctionalSide(ShardedSide):
    """``shard``, ``apply`` and a functional optimizer. ``state`` moves on with every call."""

    def __init__(self, draw: Draw, model: nn.Module, units: list[str]) -> None:
        super().__init__(draw)
        options = self.options()
        mesh = options.pop("mesh")
        named: list[Any] = [name for name in units if _owns_any(model, name, units)]
        if named and self.other():
            named[0] = fsdp_fn.UnitSpec(named[0], **self.other())
        self.template, self.state = fsdp_fn.shard(model, mesh, units=named, **options)
        if draw.training.optimizer == "sgd":
            self.optimizer: Any = fsdp_fn.SGD(lr=0.05, momentum=0.9)
        else:
            self.optimizer = fsdp_fn.AdamW(lr=0.01, eps=1e-3)
        self.optimizer_state = self.optimizer.init(self.state)
        self.grads: dict[str, fsdp_fn.Buffer] = {}

    @property
    def by_steps(self) -> bool:
        """Whether ``value_and_grad`` runs each microbatch."""
        return self.draw.training.held != "parameters" and self.draw.training.backwards == "after each"

    @property
    def summing(self) -> bool:
        """Whether the last microbatch completes what the others sum up."""
        return self.draw.training.accumulating and self.draw.training.microbatches > 1

    def begin(self) -> None:
        self.state = fsdp_fn.with_gradients(self.state, last_microbatch=not self.summing)

    def call(self, batch: Batch) -> Mapping[str, Any]:
        output, self.state = fsdp_fn.apply(self.template, self.state, batch.x, turn=batch.turn)
        return output

    def backward(self, loss: Tensor, *, last: bool) -> None:
        if loss.requires_grad:
            loss.backward()

    def finish(self) -> None:
        self.grads = fsdp_fn.gradients_of(self.state)
        self.state = fsdp_fn.without_gradients(self.state)
        self._complete()

    def _complete(self) -> None:
        if self.summing:
            self.grads = fsdp_fn.finish_gradients(self.state, self.grads)

    def train(self, batches: list[Batch], evaluated: Batch | None) -> list[Tensor]:
        if not self.by_steps:
            return super().train(batches, evaluated)
        seen = []
        step = fsdp_fn.value_and_grad(
            self.template,
            lambda model, batch: loss_of(model(batch.x, turn=batch.turn)),
            last_microbatch=not self.summing,
        )
        for number, batch in enumerate(batches):
            loss, grads, self.state = step(self.state, batch)
            seen.append(loss)
            if evaluated is not None and number == 0:
                seen.insert(0, self.evaluate(evaluated))
            self.grads = grads if number == 0 else fsdp_fn.add_gradients(self.grads, grads)
        self._complete()
        return seen

    def clip(self, limit: float) -> Tensor:
        self.grads, norm = fsdp_fn.clip_grad_norm(self.grads, limit)
        return norm

    def step(self) -> None:
        update = self.optimizer.update_ if self.draw.training.in_place else self.optimizer.update
        self.state, self.optimizer_state = update(self.grads, self.optimizer_state, self.state)

    def gradients(self) -> dict[str, Part]:
        found = {}
        for name, state in self.state.units.items():
            buffer = self.grads[name]
            for index, spec in enumerate(state.layout.tensors):
                if spec.requires_grad:
                    found[spec.name] = Part(buffer.owned_elements(index), buffer.owned(index))
        return found

    def units(self) -> Iterator[tuple[str, fsdp_fn.UnitState]]:
        for state in self.state.units.values():
            yield "", state

    def buffers(self) -> Tensors:
        return self.state.buffers

    def root(self) -> nn.Module:
        return self.template.module


def _owns_any(model: nn.Module, name: str, units: list[str]) -> bool:
    """Whether a unit would have parameters of its own."""
    others = {id(model.get_submodule(unit)) for unit in units if unit != name}

    def own(module: nn.Module) -> bool:
        if any(True for _ in module.parameters(recurse=False)):
            return True
        return any(own(child) for child in module.children() if id(child) not in others)

    return own(model.get_submodule(name))
