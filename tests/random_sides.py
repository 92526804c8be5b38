"""One model and its optimizer, as a training loop of random set-ups meets them: plain, wrapped, and functional.

Promises: sides are driven alike. What a sharded side reports of a gradient or a weight is the part that this rank
holds, read from the unit's layout and not by DTensor.
"""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from random_specs import Draw
from strategies import assembled, mesh_for, strategies_for
from torch import nn

import fsdp_fn
from fsdp_fn.delivery import PlainDelivery
from fsdp_fn.module import FsdpModule

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
EVALUATION: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Batch(NamedTuple):
    """A leaf, and what the model is told of time."""

    x: Tensor
    turn: int


class Part(NamedTuple):
    """The elements of a flattened tensor that are held here, and their values, None where there are none to be had."""

    elements: range
    value: Tensor | None


def loss_of(output: Mapping[str, Any]) -> Tensor:
    loss = output["y"].float().square().mean() if output["y"].dtype is torch.bfloat16 else output["y"].square().mean()
    return loss if output["kept"] is None else loss + 0.1 * output["kept"]


class Side(ABC):
    """``begin`` a step, ``forward`` and ``backward`` of each batch, ``finish``, ``clip`` and ``step``."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    @abstractmethod
    def call(self, batch: Batch) -> Mapping[str, Any]:
        """The model's output."""

    @abstractmethod
    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Run it; ``last``: of the step."""

    @abstractmethod
    def clip(self, limit: float) -> Tensor:
        """Clip gradients; their norm before."""

    @abstractmethod
    def step(self) -> None:
        """Step the optimizer, and drop or zero the gradients."""

    def begin(self) -> None:  # noqa: B027 (optional)
        """A step begins."""

    def finish(self) -> None:  # noqa: B027 (optional)
        """All of its backward passes are through."""

    def evaluate(self, batch: Batch) -> Tensor:
        """What it gives without gradients."""
        assert self.draw.training.evaluation is not None
        with EVALUATION[self.draw.training.evaluation]():
            return self.call(batch)["y"].clone()

    def train(self, batches: list[Batch], evaluated: Batch | None) -> list[Tensor]:
        """Forward and backward of all ``batches``, evaluation before a backward; the losses, and what that gave."""
        training = self.draw.training
        self.begin()
        seen, losses = [], []
        for number, batch in enumerate(batches):
            losses.append(loss_of(self.call(batch)))
            if evaluated is not None and number == 0:
                seen.append(self.evaluate(evaluated))
            if not training.forwards_first:
                self.backward(losses[-1], last=number == len(batches) - 1)
        if training.forwards_first:
            order = losses[::-1] if training.backwards_reversed else losses
            for number, loss in enumerate(order):
                self.backward(loss, last=number == len(batches) - 1)
        self.finish()
        return [*seen, *losses]


def torch_optimizer(draw: Draw, parameters: list[Any], *, foreach: bool | None) -> torch.optim.Optimizer | None:
    """None for no parameters."""
    if not parameters:
        return None
    if draw.training.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=foreach)
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, foreach=foreach)


class PlainSide(Side):
    """The reference. ``model`` holds the main weights; ``computing`` is the same, or a copy in the compute dtype."""

    def __init__(self, draw: Draw, model: nn.Module) -> None:
        super().__init__(draw)
        self.model = self.computing = model
        self.casts = draw.sharding.precision == "bfloat16"
        if self.casts:
            self.computing = copy.deepcopy(model)
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = torch_optimizer(draw, list(self.trained.values()), foreach=None)

    def begin(self) -> None:
        if self.casts:
            for main, compute in zip(self.model.parameters(), self.computing.parameters(), strict=True):
                compute.data = main.detach().to(torch.bfloat16) if main.dtype is torch.float32 else main.detach()

    def call(self, batch: Batch) -> Mapping[str, Any]:
        x = batch.x.to(torch.bfloat16) if self.casts and batch.x.is_floating_point() else batch.x
        return self.computing(x, turn=batch.turn)

    def evaluate(self, batch: Batch) -> Tensor:
        self.begin()
        return super().evaluate(batch)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        if not loss.requires_grad:
            return
        loss.backward()
        if self.casts:
            for main, compute in zip(self.model.parameters(), self.computing.parameters(), strict=True):
                if compute.grad is not None:
                    grad = compute.grad.float()
                    main.grad = grad if main.grad is None else main.grad + grad
                    compute.grad = None

    def average(self, present: Mapping[str, bool]) -> dict[str, int]:
        """Average gradients over ranks, those that a rank lacks as zeros; the others stay None.

        Returns on how many ranks each name of ``present`` is true.
        """
        own = [torch.tensor([float(there) for there in present.values()], dtype=torch.float64)]
        for parameter in self.trained.values():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            own += [grad.reshape(-1).double(), torch.tensor([float(parameter.grad is not None)], dtype=torch.float64)]
        total = torch.cat(own)
        dist.all_reduce(total)
        counts, *rest = total.split([len(part) for part in own])
        for parameter, grad, there in zip(self.trained.values(), rest[::2], rest[1::2], strict=True):
            mean = grad / dist.get_world_size() / self.draw.sharding.grad_divisor
            parameter.grad = mean.to(parameter.dtype).view(parameter.shape) if there.item() else None
        return {name: int(count) for name, count in zip(present, counts.tolist(), strict=True)}

    def clip(self, limit: float) -> Tensor:
        return torch.nn.utils.clip_grad_norm_(list(self.trained.values()), limit)

    def step(self) -> None:
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=self.draw.training.set_to_none)

    def load(self, weights: Tensors) -> None:
        """Take over trained weights."""
        with torch.no_grad():
            for name, parameter in self.trained.items():
                parameter.copy_(weights[name])


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
            "policy": fsdp_fn.SchedulePolicy(reshard_after_forward=sharding.reshard, release=sharding.release),
            "precision": fsdp_fn.PrecisionPolicy(compute_dtype=compute),
            "grad_divisor": sharding.grad_divisor,
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
        return self.draw.training.held != "parameters" and not self.draw.training.forwards_first

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


def _owns_any(model: nn.Module, name: str, units: list[str]) -> bool:
    """Whether a unit would have parameters of its own."""
    others = {id(model.get_submodule(unit)) for unit in units if unit != name}

    def own(module: nn.Module) -> bool:
        if any(True for _ in module.parameters(recurse=False)):
            return True
        return any(own(child) for child in module.children() if id(child) not in others)

    return own(model.get_submodule(name))
