"""Hooks on sharded parameters: called once per backward, with the mean over ranks, as plain PyTorch calls them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from comparison import Wrapper, check_equal, check_named, plain_gradients, reference_gradients
from linear_gradients import backward, check_filled, mean, wrap_linear
from models import WIDTH, Block, Chain, build, vectors
from torch import nn

from harness import run_distributed


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.block(x)))


def call_hooks() -> None:
    """Once per parameter and backward, however often the parameter was used."""
    limits = {"rtol": 1e-5, "atol": 1e-6}
    plain = build(Twice)
    model = Wrapper(copy.deepcopy(plain), (Block,))
    got: dict[str, list[torch.Tensor]] = {}
    after: dict[str, list[torch.Tensor]] = {}
    handles = []
    for name, parameter in model.module.named_parameters():
        got[name], after[name] = [], []
        handles.append(parameter.register_hook(lambda grad, to=got[name]: to.append(grad.clone())))
        handles.append(
            parameter.register_post_accumulate_grad_hook(lambda p, to=after[name]: to.append(p.grad.clone()))
        )
    gradients, sums = [], []
    for step in range(2):
        plain.zero_grad()
        x = vectors(10 * dist.get_rank() + step)
        model(x).square().mean().backward()
        plain(x).square().mean().backward()
        gradients.append(reference_gradients(plain))
        sums.append({name: sum(one[name] for one in gradients) for name in got})
    for name in got:
        assert [len(got[name]), len(after[name])] == [2, 2], f"calls of the hooks of {name}"
        for step in range(2):
            check_equal(got[name][step].full_tensor(), gradients[step][name], f"{name}: hook {step}", **limits)
            check_equal(after[name][step].full_tensor(), sums[step][name], f"{name}: after-hook {step}", **limits)
    for handle in handles:
        handle.remove()
    model(vectors()).sum().backward()
    assert all(len(calls) == 2 for calls in [*got.values(), *after.values()]), "a hook that was removed was called"


def replace_in_a_hook() -> None:
    """What hooks return, in their order, is what is accumulated; it is not written afterwards."""
    module = wrap_linear()
    doubled = []

    def double(grad: torch.Tensor) -> torch.Tensor:
        doubled.append(grad * 2)
        return doubled[-1]

    module.weight.register_hook(double)
    module.weight.register_hook(lambda grad: grad + 1)
    backward(module)
    check_filled(module.weight.grad, 2 * mean() + 1, "after one backward")
    backward(module, 10.0)
    check_filled(module.weight.grad, 22 * mean() + 2, "after two")
    check_filled(doubled[0], 2 * mean(), "what the first hook returned")


def step_in_a_hook() -> None:
    """An optimizer for each parameter that steps as soon as the gradient is there, and drops it."""
    plain = build(Chain)
    model = Wrapper(copy.deepcopy(plain), (Block,))
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.module.parameters()}

    def step_and_drop(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step_and_drop)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        x = vectors(10 * dist.get_rank() + step)
        model(x).square().mean().backward()
        plain.zero_grad()
        plain(x).square().mean().backward()
        for name, grad in reference_gradients(plain).items():
            plain.get_parameter(name).grad = grad
        theirs.step()
        assert all(parameter.grad is None for parameter in optimizers)
        check_named(
            model.weights(), {n: p.detach() for n, p in plain.named_parameters()}, f"{step}", rtol=1e-5, atol=1e-6
        )


def raise_in_a_hook() -> None:
    """The error comes out of backward, and nothing of that backward is left over for the next."""
    for hooked in ("first.up.weight", "second.up.weight", "head.weight"):
        for register in ("register_hook", "register_post_accumulate_grad_hook"):
            plain = build(Chain)
            model = Wrapper(copy.deepcopy(plain), (Block,))

            def fail(argument: torch.Tensor) -> None:
                raise ArithmeticError("in a hook")

            handle = getattr(model.module.get_parameter(hooked), register)(fail)
            with pytest.raises(ArithmeticError, match="in a hook"):
                model(vectors()).square().mean().backward()
            handle.remove()
            model.check_at_rest()
            model.forget_gradients()
            model(vectors(1)).square().mean().backward()
            plain(vectors(1)).square().mean().backward()
            what = f"gradient after an error in {register} of {hooked}"
            check_named(model.gradients(), plain_gradients(plain), what, rtol=1e-5, atol=1e-6)


HOOKS = [call_hooks, replace_in_a_hook, step_in_a_hook, raise_in_a_hook]


@pytest.mark.parametrize("rule", HOOKS, ids=lambda rule: rule.__name__)
def test_hooks_on_parameters_get_the_mean_gradient(world_size: int, rule: Callable[[], None]) -> None:
    run_distributed(world_size, rule)
