"""Every strategy trains as unsharded PyTorch does, at every precision, with one microbatch and with three.

The reference is a plain copy that each rank runs on its own inputs, with the casts of the precision policy by hand; its
gradients are averaged over ranks and summed over microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from comparison import check_equal, check_nothing_gathered
from models import VOCABULARY, Block, build, tokens
from strategies import Small, Wrapped, assembled_gradients, assembled_model, mesh_for, strategies_for
from torch import nn

import fsdp_fn
from harness import run_distributed

Tensors = dict[str, torch.Tensor]

BF16, FP32 = torch.bfloat16, torch.float32
EXACT, ROUNDED = {"rtol": 1e-5, "atol": 1e-6}, {"rtol": 2e-2, "atol": 2e-3}
PRECISIONS: dict[str, tuple[fsdp_fn.PrecisionPolicy, dict[str, float]]] = {
    "fp32": (fsdp_fn.PrecisionPolicy(), EXACT),
    "bf16 compute, fp32 reduce": (fsdp_fn.PrecisionPolicy(compute_dtype=BF16), EXACT),
    "bf16 compute, bf16 reduce": (fsdp_fn.PrecisionPolicy(compute_dtype=BF16, reduce_dtype=BF16), ROUNDED),
    "bf16 main, fp32 accumulate": (
        fsdp_fn.PrecisionPolicy(main_dtype=BF16, reduce_dtype=FP32, accumulate_dtype=FP32),
        ROUNDED,
    ),
}
STEPS, LR, MOMENTUM = 2, 0.1, 0.9


def loss_of(logits: torch.Tensor, seed: int) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens(seed + 500).flatten())


def seeds(step: int, microbatches: int) -> list[int]:
    return [1000 * dist.get_rank() + 10 * step + microbatch for microbatch in range(microbatches)]


class Step(NamedTuple):
    """What one step must give: gradients, and main weights after it."""

    gradients: Tensors
    weights: Tensors


def reference(precision: fsdp_fn.PrecisionPolicy, count: int) -> list[Step]:
    """Training of the plain model, with gradients computed on a copy in the compute dtype."""
    model = build(Small)
    main = {name: p.detach().to(precision.main(p.dtype)) for name, p in model.named_parameters()}
    momentum: Tensors = {}
    steps = []
    for step in range(STEPS):
        total = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in main.items()}
        for seed in seeds(step, count):
            for name, parameter in model.named_parameters():
                parameter.data, parameter.grad = main[name].to(precision.compute(main[name].dtype)), None
            loss_of(model(tokens(seed)), seed).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                own = parameter.grad.to(precision.reduce(main[name].dtype)).double()
                dist.all_reduce(own)
                total[name] += own / dist.get_world_size()
        gradients = {name: value.to(main[name].dtype) for name, value in total.items()}
        momentum = {name: momentum[name] * MOMENTUM + g if name in momentum else g for name, g in gradients.items()}
        main = {name: value - LR * momentum[name] for name, value in main.items()}
        steps.append(Step(gradients, main))
    return steps


def compare(found: Tensors, expected: Tensors, what: str, tolerance: dict[str, float]) -> None:
    assert set(found) == set(expected)
    for name, value in found.items():
        check_equal(value, expected[name], f"{what} of {name}", **tolerance)


def train_wrapped(label: str, strategy: Any, precision_name: str, count: int, wanted: list[Step]) -> None:
    precision, tolerance = PRECISIONS[precision_name]
    model = Wrapped.of(build(Small), (Block,), mesh=mesh_for(strategy), placements=strategy, precision=precision)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=LR, momentum=MOMENTUM)
    for step in range(STEPS):
        *early, last = seeds(step, count)
        with fsdp_fn.accumulating(model.module):
            for seed in early:
                loss_of(model.module(tokens(seed)), seed).backward()
        loss_of(model.module(tokens(last)), last).backward()
        check_nothing_gathered()
        compare(model.gradients(), wanted[step].gradients, f"{label}: gradient in step {step}", tolerance)
        optimizer.step()
        compare(model.weights(), wanted[step].weights, f"{label}: weight after step {step}", tolerance)
        optimizer.zero_grad(set_to_none=bool(step % 2))


def train_functional(label: str, strategy: Any, precision_name: str, count: int, wanted: list[Step]) -> None:
    precision, tolerance = PRECISIONS[precision_name]
    template, state = fsdp_fn.shard(
        build(Small), mesh_for(strategy), units=[Block], placements=strategy, precision=precision
    )
    optimizer = fsdp_fn.SGD(lr=LR, momentum=MOMENTUM)
    optimizer_state = optimizer.init(state)

    def loss_function(model: Callable[..., Any], seed: int) -> torch.Tensor:
        return loss_of(model(tokens(seed)), seed)

    step_function = fsdp_fn.value_and_grad(template, loss_function, last_microbatch=count == 1)
    for step in range(STEPS):
        total: dict[str, fsdp_fn.Buffer] | None = None
        for seed in seeds(step, count):
            _, gradients, state = step_function(state, seed)
            total = gradients if total is None else fsdp_fn.add_gradients(total, gradients)
        assert total is not None
        if count > 1:
            total = fsdp_fn.finish_gradients(state, total)
        check_nothing_gathered()
        compare(assembled_gradients(state, total), wanted[step].gradients, f"{label}: gradient {step}", tolerance)
        state, optimizer_state = optimizer.update(total, optimizer_state, state)
        compare(assembled_model(state), wanted[step].weights, f"{label}: weight after step {step}", tolerance)


def train_all(precision: str) -> None:
    for count in (1, 3):
        wanted = reference(PRECISIONS[precision][0], count)
        for name, strategy in strategies_for(dist.get_world_size()).items():
            for train in (train_wrapped, train_functional):
                label = f"{name}, {precision}, {count} microbatches, {train.__name__}"
                train(label, strategy, precision, count, wanted)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_strategy_trains_as_plain_pytorch(world_size: int, precision: str) -> None:
    assert VOCABULARY % 2, "uneven shards are what this is about"
    run_distributed(world_size, train_all, precision, timeout=240)
