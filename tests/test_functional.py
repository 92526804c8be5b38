"""The functional path trains as plain PyTorch does.

Ranks get different inputs; the reference is the unsharded model with gradients averaged over ranks. With one rank
every number is equal to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import check_same_bits, snapshot, tensors_of
from comparison import (
    Wrapper,
    check_equal,
    check_named,
    check_nothing_gathered,
    gather_by_name,
    owned_by_name,
    plain_gradients,
    reference_gradients,
    same_weights,
)
from models import VOCABULARY, Block, Normalised, Stack, build, tokens, vectors
from torch import nn
from torch.nn.functional import cross_entropy

import fsdp_fn
from harness import run_distributed

STEPS = 5
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def loss_of(model: Callable[..., torch.Tensor], inputs: torch.Tensor) -> torch.Tensor:
    """Next-token loss: the targets are the inputs, shifted."""
    return cross_entropy(model(inputs).view(-1, VOCABULARY), inputs.roll(-1, 1).view(-1))


def inputs_of(step: int) -> torch.Tensor:
    """This rank's batch of a step."""
    return tokens(100 * step + dist.get_rank())


def partly_frozen() -> Stack:
    """Frozen weights beside trained ones in the second block."""
    model = Stack()
    model.blocks[1].up.requires_grad_(False)
    return model


def tolerance() -> dict[str, float]:
    return {} if dist.get_world_size() == 1 else CLOSE


def full_weights(state: fsdp_fn.ModelState) -> dict[str, torch.Tensor | None]:
    return gather_by_name(owned_by_name({name: unit.main for name, unit in state.units.items()}))


def full_gradients(gradients: dict[str, fsdp_fn.Buffer]) -> dict[str, torch.Tensor | None]:
    return gather_by_name(owned_by_name(gradients))


def trained(named: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """What of ``named`` belongs to trainable parameters of a plain model."""
    return {name: named[name] for name, parameter in model.named_parameters() if parameter.requires_grad}


# --- training -----------------------------------------------------------------------------------------------

SCHEDULE = [1.0, 0.5, 2.0, 0.25, 1.0]
OPTIMIZERS: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": (fsdp_fn.SGD(lr=0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "SGD with Nesterov momentum and weight decay": (
        fsdp_fn.SGD(lr=0.1, momentum=0.9, weight_decay=0.02, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.02, nesterov=True),
    ),
    "AdamW": (
        fsdp_fn.AdamW(lr=0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1),
    ),
}


def train(name: str) -> None:
    optimizer, make_plain = OPTIMIZERS[name]
    plain = build(partly_frozen)
    plain_optimizer = make_plain(plain.parameters())
    template, state = fsdp_fn.shard(copy.deepcopy(plain), units=[Block])
    step = fsdp_fn.value_and_grad(template, loss_of)
    optimizer_state = optimizer.init(state)
    for number, factor in enumerate(SCHEDULE):
        what = f"{name}, step {number}"
        loss, gradients, state = step(state, inputs_of(number))
        expected = loss_of(plain, inputs_of(number))
        expected.backward()
        mean = reference_gradients(plain)
        check_equal(loss, expected, f"{what}: loss", **tolerance())
        check_named(full_gradients(gradients), trained(mean, plain), f"{what}: gradient", **tolerance())
        for parameter, grad in zip(plain.parameters(), mean.values(), strict=True):
            parameter.grad = grad
        plain_optimizer.param_groups[0]["lr"] = optimizer.lr * factor
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        state, optimizer_state = optimizer.update(gradients, optimizer_state, state, lr=optimizer.lr * factor)
    check_named(full_weights(state), same_weights(plain), f"{name}: weights", **tolerance())
    assert optimizer_state.step == STEPS
    check_nothing_gathered()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps_under_a_schedule_equal_plain_pytorch(name: str, world_size: int) -> None:
    run_distributed(world_size, train, name)


def both_paths() -> None:
    plain = build(partly_frozen)
    options: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    wrapped = Wrapper(copy.deepcopy(plain), (Block,))
    torch_optimizer = torch.optim.AdamW(wrapped.module.parameters(), **options)
    optimizer = fsdp_fn.AdamW(**options)
    template, state = fsdp_fn.shard(plain, units=[Block])
    step = fsdp_fn.value_and_grad(template, loss_of)
    optimizer_state = optimizer.init(state)
    for number in range(STEPS):
        loss, gradients, state = step(state, inputs_of(number))
        state, optimizer_state = optimizer.update(gradients, optimizer_state, state)
        expected = loss_of(wrapped, inputs_of(number))
        expected.backward()
        torch_optimizer.step()
        torch_optimizer.zero_grad()
        check_equal(loss, expected, f"loss of step {number}")
    check_named(full_weights(state), wrapped.weights(), "weights")


def test_the_wrapper_and_the_functional_path_give_the_same_bits_over_five_steps(world_size: int) -> None:
    run_distributed(world_size, both_paths)


def low_precision_compute() -> None:
    """Two ranks get one input, so that the mean over ranks is exact."""
    plain = build(Stack)
    precision = fsdp_fn.PrecisionPolicy(compute_dtype=torch.bfloat16)
    template, state = fsdp_fn.shard(copy.deepcopy(plain), units=[Block], precision=precision)
    step = fsdp_fn.value_and_grad(template, loss_of)
    optimizer = fsdp_fn.SGD(lr=0.1)
    optimizer_state = optimizer.init(state)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(2):
        cast = {name: parameter.bfloat16() for name, parameter in plain.named_parameters()}
        expected = loss_of(lambda x, weights=cast: torch.func.functional_call(plain, weights, x), tokens(number))
        expected.backward()
        loss, gradients, state = step(state, tokens(number))
        check_equal(loss, expected, f"loss of step {number}")
        check_named(full_gradients(gradients), plain_gradients(plain), f"step {number}: gradient")
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        state, optimizer_state = optimizer.update(gradients, optimizer_state, state)
    check_named(full_weights(state), same_weights(plain), "weights")


@pytest.mark.parametrize("world_size", [1, 2])
def test_low_precision_compute_from_full_precision_weights_equals_the_same_casts_by_hand(world_size: int) -> None:
    run_distributed(world_size, low_precision_compute)


CHECKPOINTING = [(None, None), *((kind, None) for kind in ("reentrant", "non-reentrant"))]
CHECKPOINTING += [(around, inside) for inside, around in CHECKPOINTING[1:]]


def dropout() -> None:
    for inside, around in CHECKPOINTING:
        what = f"checkpoint inside {inside}, around {around}"
        plain = build(lambda inside=inside, around=around: Stack(inside, around, dropout=0.5))
        template, state = fsdp_fn.shard(copy.deepcopy(plain), units=[Block])
        step = fsdp_fn.value_and_grad(template, loss_of)
        torch.manual_seed(7)
        expected = loss_of(plain, tokens())
        expected.backward()
        after = torch.rand(1)
        torch.manual_seed(7)
        loss, gradients, _ = step(state, tokens())
        check_equal(loss, expected, f"{what}: loss")
        check_named(full_gradients(gradients), plain_gradients(plain), f"{what}: gradient")
        check_equal(torch.rand(1), after, f"{what}: the next random number")
        other, _, _ = step(state, tokens())
        assert not torch.equal(other, loss), f"{what}: dropout does nothing, so nothing was compared"


def test_dropout_is_that_of_plain_pytorch_under_the_same_seed_recomputed_or_not() -> None:
    run_distributed(2, dropout)


# --- microbatches and gradients -----------------------------------------------------------------------------


def powers_of_ten() -> list[torch.Tensor]:
    """Inputs of three microbatches: their powers of ten show which one was scaled wrongly."""
    return [torch.full((1, 2), (dist.get_rank() + 1) * 10.0**power) for power in range(3)]


def microbatches() -> None:
    template, state = fsdp_fn.shard(nn.Linear(2, 2, bias=False))
    expected = 111 * (dist.get_world_size() + 1) / 2

    def check(gradients: dict[str, fsdp_fn.Buffer], what: str) -> None:
        weight = full_gradients(gradients)["weight"]
        assert weight is not None
        assert (weight == expected).all(), f"{what}: {weight.unique().tolist()}, expected {expected}"

    step = fsdp_fn.value_and_grad(template, lambda model, x: model(x).sum())
    parts = [step(state, x)[1] for x in powers_of_ten()]
    given = snapshot(parts)
    check(fsdp_fn.add_gradients(fsdp_fn.add_gradients(parts[0], parts[1]), parts[2]), "add_gradients")
    check_same_bits(parts, given, "what add_gradients was given")

    together = fsdp_fn.value_and_grad(template, lambda model, *xs: sum(model(x).sum() for x in xs))
    check(together(state, *powers_of_ten())[1], "three calls in one loss")

    current = fsdp_fn.with_gradients(state)
    for x in powers_of_ten():
        fsdp_fn.apply(template, current, x)[0].sum().backward()
    check(fsdp_fn.gradients_of(current), "three backwards on one state")


def test_microbatches_add_up_the_mean_over_ranks_of_each(world_size: int) -> None:
    """After NVIDIA/Megatron-LM#3023."""
    run_distributed(world_size, microbatches)


def gradients_by_hand() -> None:
    template, state = fsdp_fn.shard(build(partly_frozen), units=[Block])
    loss, gradients, after = fsdp_fn.value_and_grad(template, loss_of)(state, inputs_of(0))
    current = fsdp_fn.with_gradients(state)
    for name, buffer in full_gradients(fsdp_fn.gradients_of(current)).items():
        assert buffer is not None
        assert not buffer.any(), f"{name}: expected zeros before any backward"
    output, current = fsdp_fn.apply(template, current, inputs_of(0))
    by_hand = loss_of(lambda _: output, inputs_of(0))
    by_hand.backward()
    check_equal(by_hand, loss, "loss")
    check_same_bits(fsdp_fn.gradients_of(current), snapshot(gradients), "gradients")
    for what, one in {"value_and_grad": after, "without_gradients": fsdp_fn.without_gradients(current)}.items():
        assert not any(flat.requires_grad for flat in tensors_of(one)), f"{what}: the state has a graph"
    assert not fsdp_fn.apply(template, after, inputs_of(0))[0].requires_grad
    frozen = {name for name, tensor in owned_by_name(gradients).items() if ".1.up." in name}
    assert not frozen, f"frozen parameters have gradients: {frozen}"


def test_gradients_by_an_ordinary_backward_are_those_of_value_and_grad() -> None:
    run_distributed(2, gradients_by_hand)


def other_leaves() -> None:
    plain = build(Normalised)
    scale, x = torch.tensor(1.5, requires_grad=True), vectors(dist.get_rank(), requires_grad=True)
    (plain(x) * scale).square().mean().backward()
    expected = snapshot([scale.grad, x.grad])
    scale.grad = x.grad = None
    template, state = fsdp_fn.shard(build(Normalised), units=[Block])
    step = fsdp_fn.value_and_grad(template, lambda model, x, scale: (model(x) * scale).square().mean())
    with torch.no_grad():  # a caller's own mode does not turn gradients off
        step(state, x, scale)
    for what, leaf, wanted in zip(("scale", "input"), (scale, x), expected, strict=True):
        assert leaf.grad is not None, f"the {what} has no gradient"
        check_equal(leaf.grad, wanted, f"gradient of the {what}")


def test_other_leaves_get_their_own_ranks_gradient() -> None:
    run_distributed(2, other_leaves)
