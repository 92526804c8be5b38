"""``.grad`` of a sharded parameter follows plain PyTorch: the mean over ranks, summed over backward calls.

What a parameter holds after which backward, and what becomes of what a user put there or still holds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import Wrapper, check_named, reference_gradients
from linear_gradients import backward, check_filled, mean, wrap_linear
from models import WIDTH, Block, Stack, build, maybe_checkpoint, tokens, vectors
from torch import nn

import fsdp_fn
from harness import run_distributed


class Unit(nn.Linear):
    """``forward(x)`` reaches ``weight`` alone: not ``unused``."""

    def __init__(self, rows: int = 2) -> None:
        super().__init__(2, rows, bias=False)
        self.unused = nn.Parameter(torch.ones(3))


class Branches(nn.Module):
    """``forward(x, names)`` uses the branches named, each a unit, and a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.left = Unit()
        self.right = Unit()
        self.scale = nn.Parameter(torch.ones(2))
        self.rest = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, names: str = "left right") -> torch.Tensor:
        outputs = [getattr(self, name)(x) for name in names.split()]
        return (torch.stack(outputs) * self.scale).sum()


def mean_over_ranks() -> None:
    """After pytorch/pytorch#162338: the backend took the order for a mean, and gave the sum."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for rows in (2, 1):
            module = wrap_linear(rows, dtype)
            backward(module)
            assert module.weight.grad.dtype is dtype
            check_filled(module.weight.grad, mean(), f"gradient in {dtype} of {rows} rows")


def microbatches() -> None:
    """After NVIDIA/Megatron-LM#3023: the powers of ten show which microbatch was scaled wrongly."""
    module = wrap_linear()

    def run(what: str) -> None:
        for power in range(3):
            backward(module, 10.0**power)
        check_filled(module.weight.grad, 111 * mean(), what)

    run("three microbatches")
    held = module.weight.grad
    module.zero_grad(set_to_none=False)
    assert module.weight.grad is held
    check_filled(held, 0.0, "after zero_grad(set_to_none=False)")
    run("after zero_grad(set_to_none=False)")
    assert module.weight.grad is held, "a gradient that was zeroed is added to, not replaced"
    del held
    for repeat in range(2):
        module.zero_grad()
        assert module.weight.grad is None
        run(f"after zero_grad, {repeat}")
    backward(module)
    check_filled(module.weight.grad, 112 * mean(), "a fourth microbatch")


def microbatches_of_a_stack() -> None:
    plain = build(Stack)
    model = Wrapper(copy.deepcopy(plain), (Block,))
    for together in (False, True):
        model.forget_gradients()
        plain.zero_grad()
        seeds = [100 * dist.get_rank() + microbatch for microbatch in range(3)]
        for call in (model, plain):
            losses = [call(tokens(seed)).square().mean() for seed in seeds]
            if together:
                torch.stack(losses).sum().backward()
            else:
                for loss in losses:
                    loss.backward()
        check_named(model.gradients(), reference_gradients(plain), f"gradient, {together=}", rtol=1e-5, atol=1e-6)
        model.check_at_rest()


def none_and_zeros() -> None:
    """A unit that ran gives zeros for what backward did not reach; one that did not run gives None."""
    model = Wrapper(Branches(), (Unit,))
    module = model.module
    assert all(p.grad is None for p in module.parameters()), "before any backward"
    backward(module, 1.0, "left")
    for name, size in (("left.weight", mean()), ("left.unused", 0.0), ("rest", 0.0)):
        check_filled(module.get_parameter(name).grad, size, name)
    assert module.right.weight.grad is None
    assert module.right.unused.grad is None
    backward(module, 10.0, "right")
    for name, size in (("left.weight", 1.0), ("right.weight", 10.0), ("left.unused", 0.0), ("right.unused", 0.0)):
        check_filled(module.get_parameter(name).grad, size * mean(), f"{name} after the other branch")
    with torch.no_grad():
        module(torch.ones(1, 2))
    module.zero_grad()
    torch.ones((), requires_grad=True).backward()
    assert all(p.grad is None for p in module.parameters()), "after a backward of something else"


def each_for_itself() -> None:
    """A parameter whose ``.grad`` was set to None begins again; the others of its unit go on."""
    module = fsdp_fn.fully_shard(Branches())
    backward(module, 1.0)
    module.left.weight.grad = None
    backward(module, 10.0)
    check_filled(module.left.weight.grad, 10 * mean(), "the one that begins again")
    check_filled(module.right.weight.grad, 11 * mean(), "the one that goes on")


def gradient_of_the_user() -> None:
    """A ``.grad`` that the user put there is added to, and stays the user's object."""
    makers: dict[str, Callable[[Any], Any]] = {
        "full_like": lambda p: torch.full_like(p, 2.0),
        "zeros_like, filled": lambda p: torch.zeros_like(p).fill_(2.0),
        "clone": lambda p: p.detach().clone().fill_(2.0),
    }
    for name, make in makers.items():
        for after_backward in (False, True):
            module = wrap_linear()
            if after_backward:
                backward(module, 100.0)
            mine = make(module.weight)
            module.weight.grad = mine
            backward(module)
            assert module.weight.grad is mine, name
            check_filled(mine, 2.0 + mean(), f"{name}, {after_backward=}")
            backward(module)
            check_filled(mine, 2.0 + 2 * mean(), f"{name}, second backward")


def gradient_that_is_kept() -> None:
    """What the user still holds of an old gradient is not written by the next backward."""
    ways: dict[str, Callable[[Any], Any]] = {
        "the gradient": lambda grad: grad,
        "detached": lambda grad: grad.detach(),
        "to_local": lambda grad: grad.to_local(),
        "a view of to_local": lambda grad: grad.to_local().view(-1),
        "rows of to_local": lambda grad: grad.to_local()[:1],
        "in a list": lambda grad: [grad],
        "its storage": lambda grad: grad.to_local().untyped_storage(),
    }
    for name, way in ways.items():
        module = wrap_linear(rows=7)
        backward(module)
        kept = way(module.weight.grad)
        before = bytes_of(kept)
        module.zero_grad()
        backward(module, 10.0)
        backward(module, 10.0)
        check_filled(module.weight.grad, 20 * mean(), f"new gradient, kept {name}")
        assert torch.equal(bytes_of(kept), before), f"kept {name}: written by the next backward"
        module.zero_grad()
        module(torch.ones(1, 2))
        assert torch.equal(bytes_of(kept), before), f"kept {name}: written by the next forward"


def bytes_of(kept: Any) -> torch.Tensor:
    """A copy."""
    if isinstance(kept, list):
        return bytes_of(kept[0])
    if isinstance(kept, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.uint8).set_(kept).clone()
    return getattr(kept, "_local_tensor", kept).detach().clone().view(torch.uint8)


def gradient_that_is_not_sharded() -> None:
    """Refused by name, whether the user set it or a hook made it; the next backward is right."""
    module = wrap_linear()
    module.weight.grad = torch.ones(2, 2)
    with pytest.raises(TypeError, match=r"root unit.*\.grad.*'weight' is a Tensor"):
        backward(module)
    module.zero_grad()
    handle = module.weight.register_hook(lambda grad: torch.ones(2, 2))
    with pytest.raises(TypeError, match=r"root unit.*hook.*'weight' is a Tensor"):
        backward(module)
    handle.remove()
    backward(module)
    check_filled(module.weight.grad, mean(), "the next backward")


def frozen_later() -> None:
    """A parameter that is frozen after wrapping gets no gradient, and its hooks no call, until it is thawed."""
    module = fsdp_fn.fully_shard(Branches())
    calls: list[str] = []
    module.left.weight.register_post_accumulate_grad_hook(lambda p: calls.append("left"))
    module.left.weight.register_hook(lambda grad: calls.append("left"))
    module.left.weight.requires_grad_(False)
    backward(module)
    assert module.left.weight.grad is None
    assert calls == []
    check_filled(module.right.weight.grad, mean(), "the other weight")
    module.left.weight.requires_grad_(True)
    backward(module)
    check_filled(module.left.weight.grad, mean(), "the thawed weight")
    check_filled(module.right.weight.grad, 2 * mean(), "the other weight")
    assert calls == ["left", "left"]


class Repeated(nn.Module):
    """Its block runs three times in a forward, each time under a checkpoint that recomputes it for the sine's sake."""

    def __init__(self, kind: str | None = None) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(WIDTH, 3)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = maybe_checkpoint(lambda y: self.block(y).sin(), x, self.kind)
        return self.head(x)


def recompute_between_calls() -> None:
    """The unit is at rest, and has reduced one call's gradients, when a recomputation runs it for the call before."""
    for kind in (None, "reentrant", "non-reentrant"):
        plain = build(lambda kind=kind: Repeated(kind))
        model = Wrapper(copy.deepcopy(plain), (Block,))
        for step in range(2):
            model.forget_gradients()
            plain.zero_grad()
            for call in (model, plain):
                call(vectors(10 * dist.get_rank() + step, requires_grad=True)).square().mean().backward()
            what = f"gradient of step {step}, checkpoint {kind}"
            check_named(model.gradients(), reference_gradients(plain), what, rtol=1e-5, atol=1e-6)
            model.check_at_rest()


EXACT: list[Callable[[], None]] = [
    mean_over_ranks,
    microbatches,
    none_and_zeros,
    each_for_itself,
    gradient_of_the_user,
    gradient_that_is_kept,
    gradient_that_is_not_sharded,
    frozen_later,
]


def check_rules() -> None:
    """One call for all, for they are short; a failure's traceback names the rule."""
    for rule in EXACT:
        rule()


def test_what_a_parameter_holds_as_its_gradient_follows_plain_pytorch(world_size: int) -> None:
    run_distributed(world_size, check_rules)


@pytest.mark.parametrize("case", [microbatches_of_a_stack, recompute_between_calls], ids=lambda case: case.__name__)
def test_gradients_of_several_calls_add_up(world_size: int, case: Callable[[], None]) -> None:
    run_distributed(world_size, case)
