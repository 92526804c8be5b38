"""Over NCCL, one process for each of two GPUs: both paths equal plain PyTorch, mixed dtypes arrive whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from models import Block, Stack, build
from torch import nn

import fsdp_fn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs"),
]

RANKS = 2
KINDS = (None, "reentrant", "non-reentrant")


def enter(rank: int, store: str, check: Callable[[], None]) -> None:
    """One rank: join the group, check, leave."""
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=RANKS, store=dist.FileStore(store, RANKS))
    try:
        check()
    finally:
        dist.destroy_process_group()


def on_two_gpus(check: Callable[[], None], folder: Path) -> None:
    """Run ``check`` on both ranks; a failure of one fails the test, a hang meets the test's own time limit."""
    torch.multiprocessing.spawn(enter, (str(folder / "store"), check), RANKS)


def whole_gradient(grad: torch.Tensor) -> torch.Tensor:
    """Rows of every rank put together by a collective of torch's own."""
    parts: list[torch.Tensor | None] = [None] * RANKS
    dist.all_gather_object(parts, grad.cpu())
    return torch.cat([part for part in parts if part is not None]).cuda()


def compare_with_plain() -> None:
    tokens = torch.tensor([[0, 3, 1, 4], [2, 2, 0, 1]], device="cuda")
    for inside in KINDS:
        for around in KINDS:
            plain = build(lambda inside=inside, around=around: Stack(inside, around)).cuda()
            template, state = fsdp_fn.shard(plain, units=[Block])
            model = copy.deepcopy(plain)
            for block in model.blocks:
                fsdp_fn.fully_shard(block)
            fsdp_fn.fully_shard(model)
            expected = plain(tokens).square().mean()
            expected.backward()
            loss = model(tokens).square().mean()
            loss.backward()
            step = fsdp_fn.value_and_grad(template, lambda m, t: m(t).square().mean())
            functional_loss, gradients, _ = step(state, tokens)
            assert torch.equal(loss, expected)
            assert torch.equal(functional_loss, expected)
            for name, parameter in model.named_parameters():
                want = plain.get_parameter(name).grad
                assert torch.equal(parameter.grad.full_tensor(), want), (inside, around, name)
            for buffer in gradients.values():
                for index, spec in enumerate(buffer.layout.tensors):
                    want = plain.get_parameter(spec.name).grad
                    assert torch.equal(whole_gradient(buffer.owned(index)), want), (inside, around, spec.name)


class Mixed(nn.Module):
    """fp32, bf16, and frozen integer and float8 parameters in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.scale = nn.Parameter(torch.full((5,), 2.0, dtype=torch.bfloat16))
        self.codes = nn.Parameter(torch.arange(15, dtype=torch.uint8).view(3, 5), requires_grad=False)
        self.counts = nn.Parameter(torch.arange(5, dtype=torch.int64) << 40, requires_grad=False)
        eighths = (torch.arange(5) / 8).to(torch.float8_e4m3fn)
        self.eighths = nn.Parameter(eighths, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.scale.float() + self.eighths.float()
        return y @ self.codes.float().t() + (self.counts >> 40).sum()


def compare_mixed_dtypes() -> None:
    torch.manual_seed(0)
    plain = Mixed().cuda()
    model = fsdp_fn.fully_shard(copy.deepcopy(plain))
    x = torch.randn(4, 7, device="cuda")
    expected, output = plain(x), model(x)
    assert torch.equal(output, expected)
    expected.sum().backward()
    output.sum().backward()
    for name in ("linear.weight", "linear.bias", "scale"):
        assert torch.equal(model.get_parameter(name).grad.full_tensor(), plain.get_parameter(name).grad), name


def compare_compiled() -> None:
    template, state = fsdp_fn.shard(build(Stack).cuda(), units=[Block])
    tokens = torch.tensor([[0, 3, 1, 4]], device="cuda")

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


@pytest.mark.parametrize("check", [compare_with_plain, compare_mixed_dtypes, compare_compiled])
def test_two_gpus_agree_with_one(check: Callable[[], None], tmp_path: Path) -> None:
    on_two_gpus(check, tmp_path)
