"""On one CUDA GPU: numbers equal to plain PyTorch, storage really freed, compiled and eager alike.

A group of one rank over NCCL shows the numbers, with a cast so that weights live in a resized buffer; a fake group of
eight ranks does all of sharding's work on the device but the wire, and shows memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from models import Block, Stack, build
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_fn

pytestmark = pytest.mark.gpu

TOKENS = [[0, 3, 1, 4], [2, 2, 0, 1]]


@pytest.fixture
def fake_ranks() -> Iterator[int]:
    """A process group of eight ranks of which only this one exists."""
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield 8
    dist.destroy_process_group()


def wrapped(model: nn.Module, precision: fsdp_fn.PrecisionPolicy | None = None) -> nn.Module:
    for block in model.modules():
        if isinstance(block, Block):
            fsdp_fn.fully_shard(block, precision=precision)
    return fsdp_fn.fully_shard(model, precision=precision)


@pytest.mark.parametrize("around", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("inside", [None, "reentrant", "non-reentrant"])
@pytest.mark.usefixtures("one_rank")
def test_both_paths_equal_plain_pytorch_to_the_bit(inside: str | None, around: str | None) -> None:
    plain = build(lambda: Stack(inside, around)).cuda()
    tokens = torch.tensor(TOKENS, device="cuda")
    template, state = fsdp_fn.shard(plain, units=[Block])
    model = wrapped(copy.deepcopy(plain))
    loss = model(tokens).square().mean()
    loss.backward()
    functional_loss, gradients, _ = fsdp_fn.value_and_grad(template, lambda m, t: m(t).square().mean())(state, tokens)
    expected = plain(tokens).square().mean()
    expected.backward()
    assert torch.equal(loss, expected)
    assert torch.equal(functional_loss, expected)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad.full_tensor(), plain.get_parameter(name).grad), name
    for buffer in gradients.values():
        for index, spec in enumerate(buffer.layout.tensors):
            assert torch.equal(buffer.tensor(index), plain.get_parameter(spec.name).grad), spec.name


@pytest.mark.usefixtures("one_rank")
def test_bf16_compute_from_fp32_main_weights_equals_the_same_casts_by_hand() -> None:
    plain = build(Stack).cuda()
    tokens = torch.tensor(TOKENS, device="cuda")
    model = wrapped(copy.deepcopy(plain), fsdp_fn.PrecisionPolicy(compute_dtype=torch.bfloat16))
    half = copy.deepcopy(plain).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    by_hand = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3)
    for _ in range(3):
        loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for half_weight, weight in zip(half.parameters(), plain.parameters(), strict=True):
                half_weight.copy_(weight)
                half_weight.grad = None
        expected = half(tokens).float().square().mean()
        expected.backward()
        for half_weight, weight in zip(half.parameters(), plain.parameters(), strict=True):
            weight.grad = half_weight.grad.float()
        by_hand.step()
        assert torch.equal(loss, expected)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), plain.get_parameter(name)), name


@pytest.mark.usefixtures("one_rank")
def test_compiled_equals_eager() -> None:
    template, state = fsdp_fn.shard(build(Stack).cuda(), units=[Block])
    tokens = torch.tensor(TOKENS, device="cuda")

    def function(state: fsdp_fn.ModelState, tokens: torch.Tensor) -> torch.Tensor:
        return fsdp_fn.apply(template, state, tokens)[0].square().mean()

    results = []
    for run in (function, torch.compile(function, fullgraph=True)):
        leaves = fsdp_fn.with_gradients(state)
        loss = run(leaves, tokens)
        loss.backward()
        flats = [flat for buffer in fsdp_fn.gradients_of(leaves).values() for flat in buffer.segments]
        results.append((loss.detach(), *flats))
    for compiled, eager in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_a_step_holds_one_unit_at_a_time_and_leaves_nothing(fake_ranks: int) -> None:
    width, depth = 1024, 8

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x)

    model = nn.Sequential(*(Layer() for _ in range(depth))).cuda()
    freed = fsdp_fn.SchedulePolicy(release=fsdp_fn.Release.FREE)
    for layer in model:
        fsdp_fn.fully_shard(layer, policy=freed)
    fsdp_fn.fully_shard(model, policy=freed)
    x = torch.randn(8, width, device="cuda")
    full = width * width * 4
    for step in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        at_rest = torch.cuda.memory_allocated()
        model(x).sum().backward()
        peak = torch.cuda.max_memory_allocated() - at_rest
        # One unit's weights, their gradients, and the packed copy of these; and the shards of all gradients.
        assert peak < 3 * full + depth * full / fake_ranks + 0.25 * full, (step, peak / full)
        model.zero_grad()
    torch.cuda.synchronize()
    assert all(layer._fsdp_unit.weights.buffer.allocated == 0 for layer in model)
    assert torch.cuda.memory_allocated() - at_rest < full


@pytest.mark.usefixtures("one_rank")
def test_a_model_on_meta_gets_its_values_on_the_gpu_without_being_told_the_mesh() -> None:
    with torch.device("meta"):
        models = [Stack(), Stack()]
    plain = Stack().cuda()
    torch.manual_seed(11)
    for block in plain.blocks:
        reset_below(block)
    reset_below(plain.embedding)
    reset_below(plain.head)
    torch.manual_seed(11)
    for block in models[0].blocks:
        fsdp_fn.fully_shard(block, init="reset_parameters", broadcast=True)
    fsdp_fn.fully_shard(models[0], init="reset_parameters", broadcast=True)
    torch.manual_seed(11)
    template, state = fsdp_fn.shard(models[1], units=[Block], init="reset_parameters", broadcast=True)
    tokens = torch.tensor(TOKENS, device="cuda")
    assert torch.equal(models[0](tokens), plain(tokens))
    assert torch.equal(fsdp_fn.apply(template, state, tokens)[0], plain(tokens))


def reset_below(module: nn.Module) -> None:
    """Initialise again what a module and those in it own, children first."""
    for child in module.children():
        reset_below(child)
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
