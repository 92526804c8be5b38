"""The bracket gives plain PyTorch's numbers, to the bit, and leaves nothing gathered.

Two ranks get the same input, so that the mean over ranks is exact. Each case takes two gradient steps on both
paths: many faults show one step later.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from comparison import PATHS, Units, check_equal, check_named, plain_gradients, same_weights
from models import HIDDEN, WIDTH, Block, Chain, Stack, build, maybe_checkpoint, tokens, vectors
from torch import nn

from fsdp_fn import Release, SchedulePolicy
from harness import run_distributed

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """A model, its units besides the root, what it is called with, and how the loss comes of that."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    units: Units = (Block,)
    loss: Callable[..., torch.Tensor] = lambda call, *inputs: call(*inputs).square().mean()


class PartlyFrozen(Chain):
    """Frozen and trainable weights beside each other in a unit, and a unit that is all frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first.up.requires_grad_(False)
        self.second.requires_grad_(False)


class AllFrozen(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class UnusedWeight(Chain):
    """One weight that forward never uses, and one whose result the loss never reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first.spare = nn.Parameter(torch.ones(3, WIDTH))
        self.spare = nn.Linear(WIDTH, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.spare(x)
        return super().forward(x)


class UsedTwice(nn.Module):
    """One unit at two places in a forward (NVIDIA/Megatron-LM#8485)."""

    def __init__(self, checkpointing: str | None = None) -> None:
        super().__init__()
        self.a = Block()
        self.h = Block(checkpointing)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        return (self.h(y + 0.1) + self.h(y)).relu()


class FrozenFirst(nn.Module):
    """A frozen unit of which one input needs a gradient and is not used (pytorch/pytorch#117510)."""

    class Inner(nn.Linear):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return super().forward(a)

    class Last(nn.Linear):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.l1 = self.Inner(WIDTH, WIDTH).requires_grad_(False)
        self.l2 = self.Last(WIDTH, WIDTH)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.l2(self.l1(a, b) * b)


class CheckpointedLinears(nn.Module):
    """Recomputation of a layer when the later ones are finished (NVIDIA/Megatron-LM#6153)."""

    class Layer(nn.Linear):
        pass

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer(WIDTH, WIDTH) for _ in range(3))
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = maybe_checkpoint(layer, x, self.checkpointing).tanh()
        return x


class RootCheckpointsItsOwn(nn.Module):
    """A submodule of the unit is checkpointed: its recomputation enters no unit (NVIDIA/Megatron-LM#8432)."""

    def __init__(self, checkpointing: str | None) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return maybe_checkpoint(self.proj, x, self.checkpointing).tanh() + x


def one_vector() -> Inputs:
    return (vectors(requires_grad=True),)


def one_plain_vector() -> Inputs:
    return (vectors(),)


def two_forwards(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    first, second = call(x), call(2 * x + 1)
    return first.square().mean() + second.sum()


def forward_without_backward(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    call(x)
    return call(x).square().mean()


def in_place(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    output = call(x)
    output.add_(1.0).mul_(2.0)
    output[0].sub_(1.0)
    output.relu_()
    return output.square().mean()


def eval_between(call: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        call(x)
    output = call(x)
    with torch.inference_mode():
        call(x)
    return output.square().mean()


KINDS = (None, "reentrant", "non-reentrant")
CASES: dict[str, Case] = {
    f"{inside}_checkpoint_inside_and_{around}_around": Case(
        lambda inside=inside, around=around: Stack(inside, around), lambda: (tokens(),)
    )
    for inside in KINDS
    for around in KINDS
}
CASES |= {
    "one_unit_only": Case(Chain, one_vector, ()),
    "partly_frozen": Case(PartlyFrozen, one_vector),
    "partly_frozen_and_input_without_gradient": Case(PartlyFrozen, one_plain_vector),
    "all_frozen_and_input_with_gradient": Case(AllFrozen, one_vector),
    "unused_weight": Case(UnusedWeight, one_vector),
    "frozen_unit_with_unused_input": Case(
        FrozenFirst,
        lambda: (vectors(0), vectors(1, requires_grad=True)),
        (FrozenFirst.Inner, FrozenFirst.Last),
    ),
    "two_forwards_before_backward": Case(Chain, one_vector, loss=two_forwards),
    "two_forwards_of_a_checkpointed_model": Case(
        lambda: Stack("reentrant", "non-reentrant"),
        lambda: (tokens(),),
        loss=lambda call, x: call(x).square().mean() + call(x.flip(0)).sum(),
    ),
    "a_forward_that_no_backward_follows": Case(Chain, one_vector, loss=forward_without_backward),
    "output_changed_in_place": Case(Chain, one_vector, loss=in_place),
    "evaluation_between_forward_and_backward": Case(Chain, one_vector, loss=eval_between),
}
CASES |= {f"a_unit_used_twice_{kind}": Case(lambda kind=kind: UsedTwice(kind), one_vector) for kind in KINDS}
CASES |= {
    f"{kind}_checkpoint_of_layers_already_finished": Case(
        lambda kind=kind: CheckpointedLinears(kind), one_vector, (CheckpointedLinears.Layer,)
    )
    for kind in KINDS[1:]
}
CASES |= {
    f"{kind}_checkpoint_of_the_roots_own_layer": Case(lambda kind=kind: RootCheckpointsItsOwn(kind), one_vector, ())
    for kind in KINDS[1:]
}


def run_case(name: str, path: str) -> None:
    """Two steps on the path and in plain PyTorch."""
    case = CASES[name]
    plain = build(case.make)
    model = PATHS[path](copy.deepcopy(plain), case.units)
    for step in range(2):
        inputs, plain_inputs = case.inputs(), case.inputs()
        loss, plain_loss = case.loss(model, *inputs), case.loss(plain, *plain_inputs)
        check_equal(loss, plain_loss, f"loss of step {step}")
        if plain_loss.requires_grad:
            loss.backward()
            plain_loss.backward()
        model.check_at_rest()
        for ours, theirs in zip(inputs, plain_inputs, strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                check_equal(ours.grad, theirs.grad, f"input gradient of step {step}")
        grads = plain_gradients(plain)
        check_named(model.gradients(), grads, f"gradient of step {step}", zeros_for_none=True)
        model.step(0.1)
        with torch.no_grad():
            for parameter in plain.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)
                parameter.grad = None
        check_named(model.weights(), same_weights(plain), f"weight after step {step}")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CASES)
def test_a_step_equals_plain_pytorch_to_the_bit(name: str, path: str) -> None:
    run_distributed(2, run_case, name, path)


def run_all_cases_poisoned(path: str) -> None:
    for name, case in CASES.items():
        plain = build(case.make)
        model = PATHS[path](copy.deepcopy(plain), case.units, policy=SchedulePolicy(release=Release.POISON))
        inputs, plain_inputs = case.inputs(), case.inputs()
        loss, plain_loss = case.loss(model, *inputs), case.loss(plain, *plain_inputs)
        loss.backward()
        plain_loss.backward()
        grads = plain_gradients(plain)
        check_named(model.gradients(), grads, f"{name}: gradient", zeros_for_none=True)


@pytest.mark.parametrize("path", PATHS)
def test_no_released_weight_is_read_where_a_stale_read_would_show_as_nan(path: str) -> None:
    run_distributed(2, run_all_cases_poisoned, path)
