"""Backward in the ways people call it: for inputs only, twice, with an error inside; and forward without it.

Afterwards nothing is gathered, the parameters are the sharded ones, and the next step is right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from comparison import PATHS, Path, Wrapper, check_bare, check_equal, check_named, plain_gradients
from models import WIDTH, Block, Chain, build, maybe_checkpoint, vectors
from torch import nn

import fsdp_fn
from harness import run_distributed


class Trap(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("trap in backward")


class Trapped(nn.Module):
    """Two blocks; ``second.trap`` says whether an error comes in its forward, backward or recomputation."""

    def __init__(self, checkpointing: str | None = None) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.first = Block(checkpointing)
        self.second = self.Second(checkpointing)
        self.checkpointing = checkpointing

    class Second(Block):
        trap: str | None = None

        def inside(self, x: torch.Tensor) -> torch.Tensor:
            # A recomputation may end before its last operation, so the error comes before the first.
            if self.trap == "forward" or (self.trap == "recompute" and torch._C._current_graph_task_id() != -1):
                raise ArithmeticError("trap in forward")
            hidden = super().inside(x)
            return Trap.apply(hidden) if self.trap == "backward" else hidden

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(self.before(x))
        return maybe_checkpoint(self.second, x, self.checkpointing)


def check_clean_step(model: Path, plain: nn.Module) -> None:
    """One step equals plain PyTorch's."""
    plain.zero_grad()
    model.forget_gradients()
    x, plain_x = vectors(7, requires_grad=True), vectors(7, requires_grad=True)
    model(x).square().mean().backward()
    plain(plain_x).square().mean().backward()
    check_equal(x.grad, plain_x.grad, "input gradient")
    check_named(model.gradients(), plain_gradients(plain), "gradient", zeros_for_none=True)
    model.check_at_rest()


def pair(make: Callable[[], nn.Module], path: str, *units: type[nn.Module]) -> tuple[nn.Module, Path]:
    plain = build(make)
    return plain, PATHS[path](copy.deepcopy(plain), units or (Block,))


def raise_in_the_middle(path: str, trap: str, checkpointing: str | None) -> None:
    plain, model = pair(lambda: Trapped(checkpointing), path)
    before = model.weights()
    model.module.second.trap = trap
    with pytest.raises(ArithmeticError, match="trap"):
        model(vectors(requires_grad=True)).square().mean().backward()
    model.check_at_rest()
    if isinstance(model, Wrapper):
        assert list(model.module.state_dict()) == list(plain.state_dict())
        assert all(p.is_leaf and p.requires_grad for p in model.module.parameters())
    check_named(model.weights(), before, "weight after the error")
    model.module.second.trap = None
    check_clean_step(model, plain)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("trap", "checkpointing"),
    [
        ("forward", None),
        ("forward", "reentrant"),
        ("forward", "non-reentrant"),
        ("backward", None),
        ("backward", "reentrant"),
        ("backward", "non-reentrant"),
        ("recompute", "reentrant"),
        ("recompute", "non-reentrant"),
    ],
)
def test_an_error_in_the_middle_leaves_everything_at_rest_and_the_next_step_right(
    trap: str, checkpointing: str | None, path: str
) -> None:
    run_distributed(2, raise_in_the_middle, path, trap, checkpointing)


def gradient_for_input_only(path: str, way: str) -> None:
    plain, model = pair(Chain, path)
    x, plain_x = vectors(requires_grad=True), vectors(requires_grad=True)
    loss, plain_loss = model(x).square().mean(), plain(plain_x).square().mean()
    if way == "grad":
        (ours,) = torch.autograd.grad(loss, x)
        (theirs,) = torch.autograd.grad(plain_loss, plain_x)
        check_equal(ours, theirs, "input gradient")
    else:
        loss.backward(inputs=[x])
        plain_loss.backward(inputs=[plain_x])
        check_equal(x.grad, plain_x.grad, "input gradient")
    check_named(model.gradients(), plain_gradients(plain), "gradient", zeros_for_none=True)
    del loss
    model.check_at_rest()
    check_clean_step(model, plain)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", ["grad", "backward"])
def test_a_gradient_for_an_input_only_is_right_and_releases_everything(way: str, path: str) -> None:
    run_distributed(2, gradient_for_input_only, path, way)


def input_gradient_of_two_applications() -> None:
    plain = build(Chain)
    template, state = fsdp_fn.shard(copy.deepcopy(plain), units=[Block])
    x, plain_x = vectors(requires_grad=True), vectors(requires_grad=True)
    loss = sum(fsdp_fn.apply(template, state, k * x)[0].square().mean() for k in (1, 2))
    (ours,) = torch.autograd.grad(loss, x)
    (theirs,) = torch.autograd.grad(sum(plain(k * plain_x).square().mean() for k in (1, 2)), plain_x)
    check_equal(ours, theirs, "input gradient")
    check_bare(template)


def test_the_template_is_bare_after_an_input_gradient_through_two_applications() -> None:
    run_distributed(2, input_gradient_of_two_applications)


def backward_twice(path: str) -> None:
    plain, model = pair(Chain, path)
    x, plain_x = vectors(requires_grad=True), vectors(requires_grad=True)
    loss, plain_loss = model(x).square().mean(), plain(plain_x).square().mean()
    for _ in range(2):
        loss.backward(retain_graph=True)
        plain_loss.backward(retain_graph=True)
        model.check_at_rest()
    check_equal(x.grad, plain_x.grad, "input gradient")
    check_named(model.gradients(), plain_gradients(plain), "gradient")
    del loss
    check_clean_step(model, plain)


@pytest.mark.parametrize("path", PATHS)
def test_a_second_backward_over_a_retained_graph_adds_up(path: str) -> None:
    run_distributed(2, backward_twice, path)


def backward_after_weights_changed(path: str) -> None:
    """Plain PyTorch refuses a backward that would read weights that an optimizer has changed since."""
    _, model = pair(Chain, path)
    loss = model(vectors(requires_grad=True)).square().mean()
    loss.backward(retain_graph=True)
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(1.0)
    with pytest.raises(RuntimeError, match=r"unit|modified by an inplace operation"):
        loss.backward()
    model.check_at_rest()


def test_a_backward_over_weights_that_changed_since_forward_is_refused() -> None:
    run_distributed(2, backward_after_weights_changed, "wrapper")


def gradient_penalty(path: str, inside: str | None) -> None:
    """The gradient of a gradient with respect to an input reaches inputs and parameters."""
    plain, model = pair(lambda: nn.Sequential(Block(inside), Block(inside), nn.Linear(WIDTH, 3)), path)
    for between in (False, True):
        found = []
        for one in (plain, model):
            x = vectors(requires_grad=True)
            y = one(x)
            (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            penalty = slope.square().sum()
            if between:
                penalty = penalty + one(vectors(3)).sum()
            (y.sum() + penalty).backward()
            found.append((penalty, x.grad))
        # The order in which gradients add up differs, by where autograd's nodes lie.
        close = {"rtol": 1e-5, "atol": 1e-6}
        check_equal(found[1][0], found[0][0], "penalty", **close)
        check_equal(found[1][1], found[0][1], "gradient of the input", **close)
        check_named(model.gradients(), plain_gradients(plain), "gradient", zeros_for_none=True, **close)
        model.check_at_rest()
        check_clean_step(model, plain)


@pytest.mark.parametrize("inside", [None, "non-reentrant"])
@pytest.mark.parametrize("path", PATHS)
def test_a_gradient_penalty_on_inputs_trains_as_in_plain_pytorch(path: str, inside: str | None) -> None:
    run_distributed(2, gradient_penalty, path, inside)


def a_graph_of_gradients_of_parameters(path: str) -> None:
    plain, model = pair(Chain, path)
    x = vectors(requires_grad=True)
    with pytest.raises(RuntimeError, match=r"unit.*create_graph=True reached its parameters"):
        model(x).square().mean().backward(create_graph=True)
    model.forget_gradients()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    del slope  # a graph that nobody goes back through: its weights go with the next backward
    check_clean_step(model, plain)
    model.check_at_rest()


@pytest.mark.parametrize("path", PATHS)
def test_a_graph_of_the_gradients_of_parameters_is_refused_by_name(path: str) -> None:
    run_distributed(2, a_graph_of_gradients_of_parameters, path)


def forward_without_gradients(path: str, way: str) -> None:
    plain, model = pair(Chain, path)
    mode = torch.inference_mode if way == "inference_mode" else torch.no_grad
    if way == "eval":
        plain.eval()
        model.module.eval()
    for _ in range(2):
        with mode():
            output, expected = model(vectors()), plain(vectors())
        check_equal(output, expected, "output")
        assert not output.requires_grad
        model.check_at_rest()
    check_clean_step(model, plain)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("way", ["no_grad", "inference_mode", "eval"])
def test_a_first_forward_without_gradients_is_right_and_training_follows(way: str, path: str) -> None:
    run_distributed(2, forward_without_gradients, path, way)


def backward_inside_a_forward(path: str) -> None:
    """An input gradient taken between forwards, while an earlier graph is alive."""
    plain, model = pair(Chain, path)
    x, plain_x = vectors(requires_grad=True), vectors(requires_grad=True)
    first, plain_first = model(x).square().mean(), plain(plain_x).square().mean()
    (slope,) = torch.autograd.grad(model(x).sum(), x)
    (plain_slope,) = torch.autograd.grad(plain(plain_x).sum(), plain_x)
    (first + model(x + slope).sum()).backward()
    (plain_first + plain(plain_x + plain_slope).sum()).backward()
    check_named(model.gradients(), plain_gradients(plain), "gradient", zeros_for_none=True)
    del first
    model.check_at_rest()


@pytest.mark.parametrize("path", PATHS)
def test_an_input_gradient_between_forwards_disturbs_neither(path: str) -> None:
    run_distributed(2, backward_inside_a_forward, path)
