"""Weights tied across units are stored, gathered and reduced once, by the lowest unit around both.

After pytorch/pytorch#176076: an embedding and an output layer of one weight, sharded each for itself.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import PATHS, Wrapper
from models import build
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp_fn
from fsdp_fn.events import Action
from harness import run_distributed, run_expecting_error


class Embedding(nn.Embedding):
    pass


class Output(nn.Linear):
    pass


class Tied(nn.Module):
    """``rows`` that no world size here divides."""

    def __init__(self, rows: int = 5, width: int = 3, bias: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.emb = Embedding(rows, width)
        self.mid = nn.Linear(width, width)
        self.out = Output(width, rows, bias=bias)
        self.out.weight = self.emb.weight
        self.recompute = recompute

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.mid(self.emb(index))
        return checkpoint(self.out, x, use_reentrant=False) if self.recompute else self.out(x)


class Holder(nn.Module):
    """The tied pair below another unit, beside one that has nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = Tied(bias=True)
        self.head = nn.Linear(5, 2)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.tied(index))


class Thrice(nn.Module):
    """One weight in three units, one of them nested in another."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Tied(), Tied(bias=True)
        self.two.emb.weight = self.two.out.weight = self.one.emb.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.one(index) + self.two(index)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[type[nn.Module], ...]]] = {
    "both": (Tied, (Embedding, Output)),
    "embedding": (Tied, (Embedding,)),
    "output with a bias": (lambda: Tied(bias=True), (Output,)),
    "recomputed": (lambda: Tied(bias=True, recompute=True), (Embedding, Output)),
    "below": (Holder, (Embedding, Output, Tied)),
    "far below": (Holder, (Embedding, Output)),
    "three": (Thrice, (Embedding, Output, Tied)),
    "three, two levels": (Thrice, (Embedding, Output)),
}


def train_beside_plain(path: str, name: str, strategy: fsdp_fn.Placements) -> None:
    make, units = MODELS[name]
    plain = build(make)
    model = PATHS[path](build(make), units, placements=strategy)
    for step in range(3):
        loss = (model(torch.arange(5)) * (dist.get_rank() + 1)).pow(2).sum()
        loss.backward()
        for rank in range(dist.get_world_size()):
            ((plain(torch.arange(5)) * (rank + 1)).pow(2).sum() / dist.get_world_size()).backward()
        own = (plain(torch.arange(5)) * (dist.get_rank() + 1)).pow(2).sum()
        torch.testing.assert_close(loss.detach(), own.detach(), rtol=1e-4, atol=1e-5)
        gradients = model.gradients()
        assert set(gradients) == {key for key, _ in plain.named_parameters()}
        before = {key: value.detach().clone() for key, value in plain.named_parameters()}
        for key, parameter in plain.named_parameters():
            torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-4, atol=1e-5)
        model.step(1e-3)
        with torch.no_grad():
            for parameter in plain.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=1e-3)
                parameter.grad = None
        for key, value in model.weights().items():
            torch.testing.assert_close(value, plain.get_parameter(key).detach(), rtol=1e-4, atol=1e-5)
            assert not torch.equal(value, before[key]), f"{key} does not move, step {step}"
        model.check_at_rest()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_tied_weights_train_as_in_plain_pytorch(world_size: int, path: str, name: str) -> None:
    for strategy in (fsdp_fn.zero3(), fsdp_fn.zero1()):
        run_distributed(world_size, train_beside_plain, path, name, strategy)


def look_at_ties() -> tuple[int, dict[str, list[int]]]:
    net = build(lambda: Tied(bias=True))
    fsdp_fn.fully_shard(net.emb)
    kept = net.emb.weight
    fsdp_fn.fully_shard(net.out)
    assert net.out.weight is kept
    fsdp_fn.fully_shard(net)
    assert net.emb.weight is kept
    assert net.out.weight is kept
    assert [name for name, _ in net.named_parameters()] == ["emb.weight", "mid.weight", "mid.bias", "out.bias"]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with fsdp_fn.record_events(net) as log:
        net(torch.arange(5)).sum().backward()
    gathered: dict[str, list[int]] = {}
    for event in log:
        if event.action is Action.GATHER:
            gathered.setdefault(event.unit, []).append(event.transferred)
    optimizer.step()
    assert net.emb.weight is net.out.weight is kept
    return sum(parameter._local_tensor.numel() for parameter in net.parameters()), gathered


def test_a_tied_weight_is_one_object_stored_and_gathered_once() -> None:
    results = run_distributed(2, look_at_ties)
    assert sum(count for count, _ in results) == 5 * 3 + 3 * 3 + 3 + 5
    for _, gathered in results:
        assert len(gathered[""]) == 2
        assert all(not any(sizes) for unit, sizes in gathered.items() if unit == "emb"), gathered


def use_without_a_unit_around(which: str) -> None:
    net = build(Tied)
    fsdp_fn.fully_shard(net.emb)
    fsdp_fn.fully_shard(net.out)
    if which == "alone":
        fsdp_fn.fully_shard(net)
        net.emb(torch.arange(5))
    else:
        net(torch.arange(5))


@pytest.mark.parametrize("which", ["alone", "nothing around"])
def test_a_tie_that_no_unit_around_holds_is_refused_by_name(which: str) -> None:
    for error in run_expecting_error(2, use_without_a_unit_around, which):
        assert isinstance(error, RuntimeError)
        assert "parameter 'weight' is tied" in str(error)


def tie_what_cannot_be(which: str) -> None:
    net = build(Tied)
    inner = TIED_OTHERWISE.get(which, {})
    fsdp_fn.fully_shard(net.emb, **inner)
    fsdp_fn.fully_shard(net.out, **inner)
    if which == "shards":
        fsdp_fn.flat_shards(net.emb)
    fsdp_fn.fully_shard(net)


TIED_OTHERWISE: dict[str, dict[str, Any]] = {
    "main dtype": {"precision": fsdp_fn.PrecisionPolicy(main_dtype=torch.float64)},
    "grad_divisor": {"grad_divisor": 2.0},
}
"""How tied units differ from the one around them."""


def share_what_cannot_be(which: str) -> None:
    units = [fsdp_fn.UnitSpec(cls, **TIED_OTHERWISE[which]) for cls in (Embedding, Output)]
    fsdp_fn.shard(build(Tied), units=units)


@pytest.mark.parametrize("which", TIED_OTHERWISE)
def test_the_functional_path_refuses_a_tie_of_units_that_differ(which: str) -> None:
    for error in run_expecting_error(2, share_what_cannot_be, which):
        assert isinstance(error, ValueError), error
        assert "is tied, and belongs to unit ''" in str(error), error
        assert which in str(error), error


@pytest.mark.parametrize("which", [*TIED_OTHERWISE, "shards"])
def test_a_tie_that_cannot_move_is_refused_at_set_up(which: str) -> None:
    for error in run_expecting_error(2, tie_what_cannot_be, which):
        assert isinstance(error, ValueError | RuntimeError), error


def wrap_and_drop() -> None:
    for _ in range(8):
        layer = nn.Linear(5, 3)
        fsdp_fn.fully_shard(layer)
        del layer
        gc.collect()
    Wrapper(build(Tied), (Embedding, Output))


def test_models_that_are_gone_leave_no_ties() -> None:
    run_distributed(2, wrap_and_drop)
