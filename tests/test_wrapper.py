"""A wrapped module trains as the plain one does, at any number of ranks, and looks like it.

Each rank has inputs of its own. The reference is a copy taken before wrapping, run in plain PyTorch on every rank,
its gradients averaged over ranks. At one rank the results have the same bits.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from comparison import (
    Named,
    Wrapper,
    check_equal,
    check_named,
    reference_gradients,
    same_weights,
)
from models import Block, Stack, build, tokens
from torch import nn
from torch.func import functional_call

import fsdp_fn
from fsdp_fn.module import FsdpModule
from fsdp_fn.runtime import ResizedBuffer
from harness import run_distributed

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

SGD: MakeOptimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd_with_momentum": SGD,
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.1),
    "adamw_foreach": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.1, foreach=True),
    "adamw_fused": functools.partial(torch.optim.AdamW, lr=0.01, eps=1e-3, weight_decay=0.1, fused=True),
}


def tolerance() -> dict[str, float]:
    """None at one rank: the same bits."""
    return {} if dist.get_world_size() == 1 else {"rtol": 1e-5, "atol": 1e-6}


def loss_of(call: Callable[[torch.Tensor], torch.Tensor], seed: int) -> torch.Tensor:
    """Cross-entropy over tokens that each rank draws for itself."""
    own = 1000 * dist.get_rank() + seed
    return nn.functional.cross_entropy(call(tokens(own)).float().flatten(0, 1), tokens(own + 500).flatten())


def train_five_steps(name: str) -> None:
    plain = build(Stack)
    model = Wrapper(copy.deepcopy(plain), (Block,))
    before = {key: weight.clone() for key, weight in same_weights(plain).items()}
    ours, theirs = OPTIMIZERS[name](model.module.parameters()), OPTIMIZERS[name](plain.parameters())
    for step in range(5):
        ours.zero_grad()
        theirs.zero_grad()
        loss, plain_loss = loss_of(model, step), loss_of(plain, step)
        check_equal(loss, plain_loss, f"loss of step {step}", **tolerance())
        loss.backward()
        plain_loss.backward()
        model.check_at_rest()
        mean = reference_gradients(plain)
        check_named(model.gradients(), mean, f"gradient of step {step}", **tolerance())
        for key, parameter in plain.named_parameters():
            parameter.grad = mean[key]
        ours.step()
        theirs.step()
        check_named(model.weights(), same_weights(plain), f"weight after step {step}", **tolerance())
    still = [key for key, weight in model.weights().items() if torch.equal(weight, before[key])]
    assert not still, f"these weights did not move: {still}"


@pytest.mark.parametrize("name", ["sgd_with_momentum", "adamw"])
def test_five_steps_of_an_optimizer_equal_plain_pytorch(world_size: int, name: str) -> None:
    run_distributed(world_size, train_five_steps, name)


@pytest.mark.parametrize("name", ["adamw_foreach", "adamw_fused"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_so_do_those_of_its_foreach_and_fused_forms(world_size: int, name: str) -> None:
    run_distributed(world_size, train_five_steps, name)


def skip_a_unit_in_some_steps() -> None:
    """In a step in which a unit does not run it has no gradient, so that the optimizer leaves it alone."""

    def forward(model: nn.Module, x: torch.Tensor, keep: tuple[int, ...]) -> torch.Tensor:
        hidden = model.embedding(x)
        for block, kept in zip(model.blocks, keep, strict=True):
            hidden = block(hidden) if kept else hidden
        return hidden.square().mean()

    plain = build(Stack)
    model = Wrapper(copy.deepcopy(plain), (Block, nn.Embedding))
    ours, theirs = OPTIMIZERS["adamw"](model.module.parameters()), OPTIMIZERS["adamw"](plain.parameters())
    for step, keep in enumerate([(1, 1, 1), (1, 0, 1), (0, 1, 1), (1, 0, 0), (1, 1, 1)]):
        ours.zero_grad()
        theirs.zero_grad()
        inputs = tokens(1000 * dist.get_rank() + step)
        loss, plain_loss = forward(model.module, inputs, keep), forward(plain, inputs, keep)
        check_equal(loss, plain_loss, f"loss of step {step}", **tolerance())
        loss.backward()
        plain_loss.backward()
        mean = reference_gradients(plain)
        check_named(model.gradients(), mean, f"gradient of step {step}", **tolerance())
        for key, parameter in plain.named_parameters():
            parameter.grad = mean[key]
        ours.step()
        theirs.step()
        model.check_at_rest()
        check_named(model.weights(), same_weights(plain), f"weight after step {step}", **tolerance())


def test_a_unit_that_a_step_skips_is_left_alone_by_that_step(world_size: int) -> None:
    run_distributed(world_size, skip_a_unit_in_some_steps)


@dataclass(frozen=True)
class Precision:
    """``model``: dtype of the model; the rest is what the policy must come to for it."""

    policy: fsdp_fn.PrecisionPolicy | None
    model: torch.dtype
    main: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


FP32, BF16 = torch.float32, torch.bfloat16
PRECISIONS = {
    "bf16_compute": Precision(fsdp_fn.PrecisionPolicy(compute_dtype=BF16), FP32, FP32, BF16, FP32),
    "bf16_compute_and_reduction": Precision(
        fsdp_fn.PrecisionPolicy(compute_dtype=BF16, reduce_dtype=BF16), FP32, FP32, BF16, BF16
    ),
    "fp32_main_weights_of_a_bf16_model": Precision(fsdp_fn.PrecisionPolicy(main_dtype=FP32), BF16, FP32, BF16, FP32),
    "bf16_model": Precision(None, BF16, BF16, BF16, BF16),
    "fp32_reduction_of_a_bf16_model": Precision(fsdp_fn.PrecisionPolicy(reduce_dtype=FP32), BF16, BF16, BF16, FP32),
}


class Casting:
    """The plain model, with main weights that it casts for every forward, and gradients reduced as told."""

    def __init__(self, model: nn.Module, precision: Precision) -> None:
        self.model, self.precision = model, precision
        self.main = {name: p.detach().to(precision.main).requires_grad_() for name, p in model.named_parameters()}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional_call(self.model, {n: p.to(self.precision.compute) for n, p in self.main.items()}, (x,))

    def mean_gradients(self) -> Named:
        """Summed in the dtype of the reduction, divided in the wider of that and the main weights'."""
        everywhere: list[Named] = [{}] * dist.get_world_size()
        dist.all_gather_object(everywhere, {name: p.grad for name, p in self.main.items()})
        wide = torch.promote_types(self.precision.reduce, self.precision.main)
        mean: Named = {}
        for name in self.main:
            total = functools.reduce(torch.add, [one[name].to(self.precision.reduce) for one in everywhere])
            mean[name] = (total.to(wide) / len(everywhere)).to(self.precision.main)
        return mean


def train_with_casts(name: str) -> None:
    """The order in which more than two numbers are added is the backend's, and a sum in bf16 shows it."""
    precision = PRECISIONS[name]
    world_size = dist.get_world_size()
    limits = {} if world_size <= 2 else {"rtol": 1e-5, "atol": 1e-6}
    if world_size > 2 and BF16 in (precision.reduce, precision.main):
        limits = {"rtol": 2e-2, "atol": 2e-3}
    plain = build(Stack).to(precision.model)
    model = Wrapper(copy.deepcopy(plain), (Block,), precision=precision.policy)
    reference = Casting(plain, precision)
    ours, theirs = SGD(model.module.parameters()), SGD(reference.main.values())
    for step in range(5):
        ours.zero_grad()
        theirs.zero_grad()
        output = model(tokens(step))
        assert output.dtype is precision.compute
        loss, plain_loss = loss_of(model, step), loss_of(reference, step)
        # Both begin the step with the same weights, so that a rounding of one step does not add to the next's.
        check_equal(loss, plain_loss, f"loss of step {step}")
        loss.backward()
        plain_loss.backward()
        mean = reference.mean_gradients()
        check_named(model.gradients(), mean, f"gradient of step {step}", **limits)
        for key, parameter in reference.main.items():
            parameter.grad = mean[key]
        ours.step()
        theirs.step()
        after = model.weights()
        check_named(after, dict(reference.main), f"weight after step {step}", **limits)
        with torch.no_grad():
            for key, parameter in reference.main.items():
                parameter.copy_(after[key])
    model.check_at_rest()


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_precision_policy_equals_a_plain_model_with_the_same_casts(world_size: int, name: str) -> None:
    run_distributed(world_size, train_with_casts, name)


def count_bytes() -> None:
    """In bf16, so that a group of one rank has gathered weights apart from its main weights too."""
    freed = fsdp_fn.SchedulePolicy(release=fsdp_fn.Release.FREE)
    model = Wrapper(build(Stack), (Block,), precision=fsdp_fn.PrecisionPolicy(compute_dtype=BF16), policy=freed)
    modules = {name: m for name, m in model.module.named_modules() if isinstance(m, FsdpModule)}
    storages = {name: module._fsdp_unit.weights.buffer for name, module in modules.items()}
    needed = {name: sum(p.numel() for p in m.parameters()) * 2 for name, m in modules.items() if name}
    inside: dict[str, dict[str, int]] = {}

    def held() -> dict[str, int]:
        return {name: storage.allocated for name, storage in storages.items() if storage.allocated}

    for name, module in modules.items():
        if name:
            module.up.register_forward_hook(lambda *_, name=name: inside.update({name: held()}))
    for when in ("first", "second"):
        loss = loss_of(model, 0)
        assert not held(), f"between forward and backward of the {when} step: {held()}"
        for name, found in inside.items():
            assert set(found) == {"", name}, f"in forward of {name}: {found}"
            assert found[name] >= needed[name]
        buffers = [module._fsdp_unit.flow._packed for module in modules.values()]
        loss.backward()
        assert all(isinstance(buffer, ResizedBuffer) and not buffer.allocated for buffer in buffers)
        assert not held(), f"after backward of the {when} step: {held()}"
        model.module.zero_grad()


def test_full_weights_hold_no_bytes_between_forward_and_backward(world_size: int) -> None:
    run_distributed(world_size, count_bytes)
