"""Ways to call a model: parts never, once or often, differently in each step and in each mode, by other methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import PATHS, Path, Wrapper, check_equal, check_named, reference_gradients
from kinds import CLOSE, Kind, beside_plain, each, train_step
from models import WIDTH, Block, Chain, build, vectors
from torch import nn

import fsdp_fn
from harness import run_distributed, run_expecting_error


class Often(nn.Module):
    """``times``: how often each block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, times: tuple[int, ...]) -> torch.Tensor:
        x = self.before(x)
        for block, count in zip(self.blocks, times, strict=True):
            for _ in range(count):
                x = torch.tanh(block(x))
        return self.head(x)


STEPS = [(1, 1, 1), (0, 2, 3), (3, 0, 1), (0, 0, 0), (2, 1, 0), (1, 3, 2)]


def call_often(path: str, units: tuple[type[nn.Module], ...]) -> None:
    def inputs(step: int) -> tuple[Any, ...]:
        return vectors(100 * dist.get_rank() + step, requires_grad=True), STEPS[step]

    beside_plain(Kind(Often, units, inputs), path, steps=len(STEPS))


@pytest.mark.parametrize("units", [(), (Block,)], ids=["one unit", "units"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_module_may_run_never_once_or_often_and_otherwise_in_each_step(
    world_size: int, path: str, units: tuple[type[nn.Module], ...]
) -> None:
    run_distributed(world_size, call_often, path, units)


class Spare(nn.Module):
    """Weights that are used always, on the first rank, in odd steps, and never."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("always", "first", "odd", "never"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        y = self.always(x)
        if dist.get_rank() == 0:
            y = y + self.first(x)
        return y + self.odd(x) if step % 2 else y


def use_some(path: str) -> None:
    def inputs(step: int) -> tuple[Any, ...]:
        return vectors(100 * dist.get_rank() + step), step

    model, _ = beside_plain(Kind(Spare, (), inputs), path, steps=3)
    model(vectors(dist.get_rank()), 0).sum().backward()
    for name, grad in model.gradients().items():
        # Zeros, and on all ranks: gathering has compared them.
        assert grad is not None
        assert (grad != 0).any() == name.startswith(("always", "first")), name


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_weight_that_a_step_or_a_rank_does_not_use_counts_as_zeros_on_all(world_size: int, path: str) -> None:
    """After pytorch/pytorch#158719."""
    run_distributed(world_size, use_some, path)


# --- several forwards and backwards -------------------------------------------------------------------------


def first_then_second(losses: list[torch.Tensor]) -> None:
    losses[0].backward()
    losses[1].backward()


def second_then_first(losses: list[torch.Tensor]) -> None:
    losses[1].backward()
    losses[0].backward()


def both_at_once(losses: list[torch.Tensor]) -> None:
    torch.autograd.backward(losses)


def retained(losses: list[torch.Tensor]) -> None:
    losses[1].backward(retain_graph=True)
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    losses[0].backward()


BACKWARDS = {f.__name__: f for f in (first_then_second, second_then_first, both_at_once, retained)}


def two_forwards(path: str) -> None:
    plain = build(Chain)
    model = PATHS[path](build(Chain), (Block,))

    def run(name: str) -> None:
        found = []
        for one in (model, plain):
            inputs = [vectors(10 * dist.get_rank() + seed, requires_grad=True) for seed in range(2)]
            BACKWARDS[name]([one(x).square().mean() for x in inputs])
            found.append({str(seed): x.grad for seed, x in enumerate(inputs)})
        check_named(*found, "gradient of inputs", **CLOSE)
        check_named(model.gradients(), reference_gradients(plain), "gradient", **CLOSE)
        model.check_at_rest()
        model.forget_gradients()
        plain.zero_grad()

    each(BACKWARDS, run)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_two_forwards_may_go_backward_in_either_order_and_again(world_size: int, path: str) -> None:
    run_distributed(world_size, two_forwards, path)


def gradients_of_parameters() -> None:
    """Parameters are no part of the graph: their gradients are reduced, and delivered by ``loss.backward()``."""
    model, plain = Wrapper(build(Chain), (Block,)), build(Chain)
    parameters = list(model.module.parameters())
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(model(vectors()).sum(), parameters)
    model(vectors()).sum().backward(inputs=parameters)
    assert all(grad is None for grad in model.gradients().values())
    model.check_at_rest()
    for step in range(2):
        train_step(Kind(Chain), model, plain, step)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_asked_for_by_parameter_are_refused_or_not_given(world_size: int) -> None:
    run_distributed(world_size, gradients_of_parameters)


class Views(nn.Module):
    """Outputs that are views of what it computed, and of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.linear(x)
        return {"y": y.t()[1:], "x": x[:, :2], "expanded": y.sum(0, keepdim=True).expand(3, WIDTH)}


class Viewing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.views = Views()
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.views(torch.tanh(x))
        return self.head(found["y"]) + found["x"].sum() + found["expanded"].square().sum()


def view_outputs(path: str) -> None:
    for units in ((), (Views,)):
        beside_plain(Kind(Viewing, units), path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_outputs_that_are_views_train_as_in_plain_pytorch(world_size: int, path: str) -> None:
    run_distributed(world_size, view_outputs, path)


# --- modes --------------------------------------------------------------------------------------------------


class Modal(nn.Module):
    """Training differs from evaluation by what is dropped, and by statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(dropout=0.5)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(x)))


MODES: dict[str, Callable[[], Any]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
}
ORDERS = [("inference_mode", "no_grad"), ("no_grad", "enable_grad"), ("enable_grad", "inference_mode")]


def evaluate_between_steps(path: str) -> None:
    for before, after in ORDERS:
        kind = Kind(Modal, (Block,))
        model, plain = PATHS[path](build(Modal), (Block,)), build(Modal)
        for step in range(3):
            for mode in (before, after):
                evaluate(model, plain, mode)
            train_step(kind, model, plain, step)
        evaluate(model, plain, before)


def evaluate(model: Path, plain: nn.Module, mode: str) -> None:
    for one in (model.module, plain):
        one.eval()
    with MODES[mode]():
        check_equal(model(vectors()), plain(vectors()), f"evaluation under {mode}", **CLOSE)
    model.check_at_rest()
    for one in (model.module, plain):
        one.train()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_evaluation_in_any_mode_before_between_and_after_steps_changes_none(world_size: int, path: str) -> None:
    run_distributed(world_size, evaluate_between_steps, path)


# --- other methods ------------------------------------------------------------------------------------------


class Coder(Block):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))


class Encoding(nn.Module):
    """Calls another method of its unit than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.coder = Coder()
        self.head = nn.Linear(11, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.coder.encode(x))


def encode_unregistered(path: str, grad: bool) -> None:
    model = PATHS[path](build(Encoding), (Coder,))
    with torch.set_grad_enabled(grad):
        model(vectors())


@pytest.mark.parametrize("grad", [True, False], ids=["training", "no-grad"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_method_that_is_no_entrance_is_refused_by_unit_and_parameter(world_size: int, path: str, grad: bool) -> None:
    for error in run_expecting_error(world_size, encode_unregistered, path, grad):
        assert isinstance(error, RuntimeError)
        assert "unit 'coder'" in str(error), error
        assert "up.weight" in str(error), error


def encode_registered() -> None:
    kind, plain = Kind(Encoding), build(Encoding)
    model = Wrapper(build(Encoding), (Coder,))
    fsdp_fn.register_forward_method(model.module.coder, "encode")
    for step in range(2):
        train_step(kind, model, plain, step)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_registered_method_of_a_unit_trains_as_in_plain_pytorch(world_size: int) -> None:
    run_distributed(world_size, encode_registered)
