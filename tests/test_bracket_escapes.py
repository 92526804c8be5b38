"""Tensors that leave a unit beside its output reach backward right, or are refused by name, never a crash.

A released weight that is read all the same is a read of unallocated storage, which ends the process or gives
a silently wrong number. Each case runs in a call of its own, so that a crash shows as a dead rank.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import PATHS, Path, check_equal, check_named, plain_gradients
from models import HIDDEN, WIDTH, Block, build, vectors
from torch import nn

from harness import run_distributed

LossOf = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@dataclasses.dataclass
class Record:
    loss: torch.Tensor


class Auxiliary(nn.Module):
    """A block that keeps a loss of its own; ``keep`` says where."""

    collected: list[torch.Tensor]

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.keep = keep
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x)) * self.gate
        loss = hidden.square().mean()
        match self.keep:
            case "attribute":
                self.kept = loss
            case "list":
                self.kept = [None, loss]
            case "dict":
                self.kept = {"first": {"second": loss}}
            case "tuple":
                self.kept = (loss, 1)
            case "dataclass":
                self.kept = Record(loss)
            case "submodule":
                self.down.kept = loss
            case "buffer":
                self.register_buffer("kept_buffer", loss, persistent=False)
            case "outside":
                COLLECTED.append(loss)
        return x + self.down(hidden)


COLLECTED: list[torch.Tensor] = []


class Host(nn.Module):
    """The unit with the auxiliary loss, between weights of the root's that its loss depends on."""

    def __init__(self, keep: str) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.block = Auxiliary(keep)
        self.after = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.block(torch.relu(self.before(x)) * self.scale))


def kept_loss(module: nn.Module) -> torch.Tensor:
    """The auxiliary loss of the last forward, wherever the block put it."""
    block: Any = module.get_submodule("block")
    match block.keep:
        case "attribute":
            return block.kept
        case "list":
            return block.kept[1]
        case "dict":
            return block.kept["first"]["second"]
        case "tuple":
            return block.kept[0]
        case "dataclass":
            return block.kept.loss
        case "submodule":
            return block.down.kept
        case "buffer":
            return block.kept_buffer
        case _:
            return COLLECTED.pop()


def right_or_refused(model: Path, plain: nn.Module, capture: Callable[[nn.Module], LossOf]) -> None:
    """The escaped loss gives plain PyTorch's gradients or an error naming a unit; then a step is right."""
    loss_of, plain_loss_of = capture(model.module), capture(plain)
    x, plain_x = vectors(requires_grad=True), vectors(requires_grad=True)
    plain_loss = plain_loss_of(plain, plain_x)
    plain_loss.backward()
    refusal = ""
    try:
        loss = loss_of(model, x)
        loss.backward()
    except RuntimeError as error:
        refusal = str(error)
    if refusal:
        assert "unit" in refusal, f"refused without a name: {refusal}"
    else:
        check_equal(loss, plain_loss, "loss")
        check_equal(x.grad, plain_x.grad, "input gradient")
        check_named(model.gradients(), plain_gradients(plain), "gradient", zeros_for_none=True)
        del loss
    model.check_at_rest()
    plain.zero_grad()
    model.forget_gradients()
    model(vectors(1)).square().mean().backward()
    plain(vectors(1)).square().mean().backward()
    check_named(model.gradients(), plain_gradients(plain), "gradient of the clean step", zeros_for_none=True)
    plain.zero_grad()
    model.forget_gradients()
    model.check_at_rest()


def run_kept(path: str, keep: str, unit: bool) -> None:
    """The auxiliary loss alone in backward, together with the output's, or first and then the output's."""
    plain = build(lambda: Host(keep))
    model = PATHS[path](copy.deepcopy(plain), (Auxiliary,) if unit else ())

    def alone(output: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return kept

    def together(output: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return output.square().mean() + kept

    def first(output: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        kept.backward(retain_graph=True)
        return output.square().mean()

    if keep == "buffer" and path == "functional":
        with pytest.raises(RuntimeError, match="registered the buffers"):
            model(vectors())
        model.check_at_rest()
        return
    for use in (together, alone, first):

        def capture(live: nn.Module, use: Callable[..., torch.Tensor] = use) -> LossOf:
            def loss_of(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
                COLLECTED.clear()
                output = call(x)
                return use(output, kept_loss(live))

            return loss_of

        right_or_refused(model, plain, capture)


PLACES = ("attribute", "list", "dict", "tuple", "dataclass", "submodule", "buffer", "outside")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("keep", PLACES)
def test_a_loss_kept_by_a_nested_unit_is_right_or_refused(keep: str, path: str) -> None:
    run_distributed(2, run_kept, path, keep, True)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("keep", PLACES)
def test_a_loss_kept_inside_the_root_unit_is_right_or_refused(keep: str, path: str) -> None:
    run_distributed(2, run_kept, path, keep, False)


def run_captured(path: str, where: str) -> None:
    """A forward hook on submodule ``where`` captures its output, and the loss is of that alone."""
    plain = build(lambda: Host("attribute"))
    model = PATHS[path](copy.deepcopy(plain), (Auxiliary,))

    def capture(live: nn.Module) -> LossOf:
        captured: list[torch.Tensor] = []
        live.get_submodule(where).register_forward_hook(lambda m, args, output: captured.append(output))

        def loss_of(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
            call(x)
            return captured.pop().square().mean()

        return loss_of

    right_or_refused(model, plain, capture)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("where", ["", "block", "block.up", "block.down", "before"])
def test_a_tensor_captured_by_a_forward_hook_is_right_or_refused(where: str, path: str) -> None:
    run_distributed(2, run_captured, path, where)


class KeepsItsWeight(nn.Module):
    """Keeps a weight, or a view of it, for later."""

    def __init__(self, view: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.view = view
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.linear.weight.t() if self.view else self.linear.weight
        return self.linear(x)


def read_kept_weight(path: str, view: bool, grad: bool) -> None:
    model = PATHS[path](build(lambda: KeepsItsWeight(view)))
    with pytest.raises(RuntimeError, match="unit"), torch.set_grad_enabled(grad):
        model(vectors())
    model.check_at_rest()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("grad", [True, False], ids=["training", "no-grad"])
@pytest.mark.parametrize("view", [True, False], ids=["view", "itself"])
def test_a_weight_that_forward_keeps_is_refused_by_name(view: bool, grad: bool, path: str) -> None:
    run_distributed(2, read_kept_weight, path, view, grad)


class ReturnsWeight(nn.Module):
    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.nested = nested

    def forward(self, x: torch.Tensor) -> Any:
        return {"weights": [self.linear(x), self.linear.weight.t()]} if self.nested else self.linear.weight


def return_weight(path: str, nested: bool) -> str:
    model = PATHS[path](build(lambda: ReturnsWeight(nested)))
    messages = []
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"unit.*aliases") as refused:
            model(vectors())
        messages.append(str(refused.value))
        model.check_at_rest()
    return messages[0]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_output_that_is_a_weight_is_refused_by_name(world_size: int, nested: bool, path: str) -> None:
    run_distributed(world_size, return_weight, path, nested)


class Opaque:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class ReturnsOpaque(Block):
    def forward(self, x: torch.Tensor) -> Opaque:
        return Opaque(super().forward(x))


def return_opaque(path: str) -> None:
    model = PATHS[path](build(ReturnsOpaque))
    with pytest.raises(TypeError, match=r"unit.*Opaque.*'value'"):
        model(vectors())
    model.check_at_rest()


@pytest.mark.parametrize("path", PATHS)
def test_an_output_that_cannot_be_opened_is_refused_by_name(path: str) -> None:
    run_distributed(2, return_opaque, path)
