"""One model and its optimizer, as a training loop of random set-ups meets them; here the plain one.

Promises: the plain side and the sharded ones are driven alike, by one loop.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from random_specs import Draw
from torch import nn

Tensor = torch.Tensor
Tensors = dict[str, Tensor]
EVALUATION: dict[str, Callable[[], Any]] = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


class Batch(NamedTuple):
    """A leaf, and what the model is told of time."""

    x: Tensor
    turn: int


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
            if training.backwards == "after each":
                self.backward(losses[-1], last=number == len(batches) - 1)
        later = {"in order": losses, "reversed": losses[::-1], "together": [torch.stack(losses).sum()]}
        waiting = later.get(training.backwards, [])
        for number, loss in enumerate(waiting):
            self.backward(loss, last=number == len(waiting) - 1)
        self.finish()
        return [*seen, *losses]


def torch_optimizer(draw: Draw, parameters: list[Any], *, foreach: bool | None) -> torch.optim.Optimizer | None:
    """None for no parameters."""
    if not parameters:
        return None
    if draw.training.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=foreach)
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, foreach=foreach)


def refreezes(draw: Draw) -> bool:
    """Whether parameters are frozen and unfrozen between steps: of a wrapped model whose optimizer holds them."""
    return draw.training.refrozen and draw.sharding.path == "wrapper" and draw.training.held == "parameters"


def toggle(parameter: nn.Parameter) -> None:
    parameter.requires_grad_(not parameter.requires_grad)


def trained_in(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


class PlainSide(Side):
    """The reference. ``model`` holds the main weights; ``computing`` is the same, or a copy in the compute dtype."""

    def __init__(self, draw: Draw, model: nn.Module) -> None:
        super().__init__(draw)
        self.model = self.computing = model
        self.casts = draw.sharding.precision == "bfloat16"
        if self.casts:
            self.computing = copy.deepcopy(model)
        self.trained = trained_in(model)
        self.ever_trained = dict(self.trained)
        held = list(model.parameters()) if refreezes(draw) else list(self.trained.values())
        self.optimizer = torch_optimizer(draw, held, foreach=None)

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
            for name, parameter in self.ever_trained.items():
                parameter.copy_(weights[name])

    def refreeze(self, names: Collection[str]) -> None:
        for name in names:
            for model in {id(model): model for model in (self.model, self.computing)}.values():
                toggle(model.get_parameter(name))
        self.trained = trained_in(self.model)
        self.ever_trained |= self.trained
