"""Full weights are gone between uses, and a deleted model at once, with no run of the garbage collector."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from comparison import Wrapper
from models import Block, Chain, build, vectors
from torch import nn

import fsdp_fn
from fsdp_fn.module import FsdpModule
from harness import run_distributed


def units_of(model: nn.Module) -> dict[str, Any]:
    wrapped = {name: module for name, module in model.named_modules() if isinstance(module, FsdpModule)}
    return {name: module._fsdp_unit for name, module in wrapped.items()}


def count_bytes() -> None:
    model = Wrapper(build(Chain), (Block,), policy=fsdp_fn.SchedulePolicy(release=fsdp_fn.Release.FREE))
    units = units_of(model.module)
    seen: dict[str, list[set[str]]] = {"forward": [], "backward": []}

    def held() -> set[str]:
        return {name for name, unit in units.items() if unit.weights.buffer.allocated}

    def watch(module: nn.Module, args: object, output: torch.Tensor) -> None:
        seen["forward"].append(held())
        output.register_hook(lambda grad: seen["backward"].append(held()))

    for block in (model.module.first, model.module.second):
        block.up.register_forward_hook(watch)
    assert held() == set()
    loss = model(vectors()).square().mean()
    assert held() == set(), "between forward and backward"
    loss.backward()
    assert held() == set(), "after backward"
    assert seen["forward"] == [{"", "first"}, {"", "second"}]
    assert seen["backward"] == [{"", "second"}, {"", "first"}]


@pytest.mark.parametrize("world_size", [2, 3])
def test_only_the_root_and_the_unit_in_use_hold_full_weights(world_size: int) -> None:
    run_distributed(world_size, count_bytes)


class KeepsLoss(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.kept = [y.mean()]
        return y


class Failing(Chain):
    fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fail:
            raise ArithmeticError("in forward")
        return super().forward(x)


def nothing(model: Wrapper) -> None:
    pass


def train(model: Wrapper) -> None:
    optimizer = torch.optim.AdamW(model.module.parameters())
    for _ in range(2):
        model(vectors()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def forward_only(model: Wrapper) -> None:
    model(vectors())


def input_gradient(model: Wrapper) -> None:
    x = vectors(requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)


def fail_in_forward(model: Wrapper) -> None:
    model.module.fail = True  # type: ignore[assignment]
    with contextlib.suppress(ArithmeticError):
        model(vectors())


def fail_in_backward(model: Wrapper) -> None:
    def raise_in_backward(grad: torch.Tensor) -> None:
        raise ArithmeticError("in backward")

    def watch(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(raise_in_backward)

    model.module.first.register_forward_hook(watch)
    with contextlib.suppress(ArithmeticError):
        model(vectors()).square().mean().backward()
    # What a failed backward left in torch's queue holds its graph until this thread's next backward.
    torch.ones((), requires_grad=True).backward()


USES: dict[str, tuple[Callable[[], nn.Module], Callable[[Wrapper], None]]] = {
    "unused": (Chain, nothing),
    "trained": (Chain, train),
    "forward_only": (Chain, forward_only),
    "input_gradient": (Chain, input_gradient),
    "failed_in_forward": (Failing, fail_in_forward),
    "failed_in_backward": (Failing, fail_in_backward),
    "kept_a_loss": (KeepsLoss, train),
}


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def delete(use: str) -> None:
    make, run = USES[use]
    # The first DTensor parameter of a process meets a lazy import of torch's that keeps its frames.
    Wrapper(build(make))
    with without_collector():
        model = Wrapper(build(make), (Block,) if make is not KeepsLoss else ())
        run(model)
        module = model.module
        alive: dict[str, Any] = {"the model": weakref.ref(module)}
        for name, unit in units_of(module).items():
            alive[f"unit {name!r}"] = weakref.ref(unit)
            alive[f"weights of {name!r}"] = weakref.ref(unit.weights)
            alive[f"gradients of {name!r}"] = weakref.ref(unit.flow)
        for name, parameter in module.named_parameters():
            alive[f"parameter {name!r}"] = weakref.ref(parameter)
        del model, module, unit, parameter
        left = [name for name, reference in alive.items() if reference() is not None]
    assert not left, f"still alive after {use}: {left}"


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_deleted_model_is_gone_at_once(world_size: int, use: str) -> None:
    run_distributed(world_size, delete, use)
