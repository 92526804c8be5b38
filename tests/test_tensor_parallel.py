"""Modules that are tensor-parallel already train sharded over the data-parallel axis as one plain module does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import check_equal, check_nothing_gathered
from models import build, maybe_checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

import fsdp_fn
from harness import run_distributed, run_expecting_error

WIDTH, HIDDEN = 8, 12


class Layer(nn.Module):
    """A plain norm, a gain that is replicated over the tensor-parallel axis, and up and down that are split."""

    def __init__(self, checkpointing: str | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.checkpointing = checkpointing

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        x, gain = self.norm(x), self.gain
        if isinstance(gain, DTensor):
            x = DTensor.from_local(x, gain.device_mesh, [Replicate()], run_check=False)
        return self.down(torch.relu(self.up(x * gain)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + maybe_checkpoint(self.inside, x, self.checkpointing)


class Network(nn.Module):
    """Two layers and a plain head, with rows that no two ranks share out evenly."""

    def __init__(self, checkpointing: str | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(checkpointing) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


PLAN: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


def distributed(plain: Network, whole: DeviceMesh) -> Network:
    for layer in plain.layers:
        assert isinstance(layer, Layer)
        parallelize_module(layer, whole["tensor"], PLAN)
        layer.gain = nn.Parameter(distribute_tensor(layer.gain.detach(), whole["tensor"], [Replicate()]))
    return plain


def inputs(step: int) -> torch.Tensor:
    """The same for ranks that share a data-parallel coordinate."""
    rank = dist.get_rank() // 2
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def full(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return whole


def train(strategy: Any, given: str, checkpointing: str | None) -> None:
    whole = mesh()
    plain = build(lambda: Network(checkpointing))
    model = distributed(copy.deepcopy(plain), whole)
    options: dict[str, Any] = {"mesh": whole if given == "whole mesh" else whole["data"], "placements": strategy}
    for layer in model.layers:
        fsdp_fn.fully_shard(layer, **options)
    fsdp_fn.fully_shard(model, **options)
    ours = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-3)
    for step in range(3):
        x = inputs(step).requires_grad_()  # a reentrant checkpoint wants it
        loss, plain_loss = model(x).square().sum(), plain(x).square().sum()
        check_equal(full(loss), plain_loss, "loss", rtol=1e-5, atol=1e-6)
        loss.backward()
        plain_loss.backward()
        check_nothing_gathered()
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
            found = full(model.get_parameter(name).grad)
            check_equal(found, parameter.grad, f"gradient of {name}", rtol=1e-4, atol=1e-5)
        norm = fsdp_fn.clip_grad_norm_(model, 0.5)
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        check_equal(norm, expected, "norm", rtol=1e-5, atol=1e-6)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        for name, parameter in plain.named_parameters():
            sharded = model.get_parameter(name)
            assert sharded.shape == parameter.shape, name
            check_equal(full(sharded), parameter, f"weight of {name}", rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("given", ["whole mesh", "data axis"])
def test_two_by_two_equals_plain_pytorch(given: str, checkpointing: str | None) -> None:
    run_distributed(4, train, fsdp_fn.zero3(axis="data"), given, checkpointing)


@pytest.mark.parametrize("strategy", [fsdp_fn.ddp("data"), fsdp_fn.zero1("data"), fsdp_fn.zero2("data")], ids=str)
def test_so_do_the_other_strategies(strategy: fsdp_fn.Placements) -> None:
    run_distributed(4, train, strategy, "whole mesh", None)


def clip_with_a_root_over_both_axes() -> None:
    whole = mesh()
    plain = build(Network)
    model = distributed(copy.deepcopy(plain), whole)
    for layer in model.layers:
        fsdp_fn.fully_shard(layer, whole["data"])
    fsdp_fn.fully_shard(model, whole, placements=(fsdp_fn.zero3(axis="data"), fsdp_fn.zero3(axis="tensor")))
    x = inputs(0)
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    for parameter in plain.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    check_equal(fsdp_fn.clip_grad_norm_(model, 0.5), expected, "norm", rtol=1e-5, atol=1e-6)


def test_a_norm_counts_each_element_once_where_the_root_is_sharded_over_both_axes() -> None:
    run_distributed(4, clip_with_a_root_over_both_axes)


def layer_on(part: DeviceMesh, placement: Shard | Replicate, rows: int = 4) -> nn.Linear:
    layer = nn.Linear(4, rows, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(torch.ones(rows, 4), part, [placement]))
    return layer


def wrap_uneven() -> None:
    whole = mesh()
    layer = layer_on(whole["tensor"], Shard(0), rows=5)
    fsdp_fn.fully_shard(layer, whole["data"], placements=fsdp_fn.zero3(axis="data"))


def wrap_over_its_own_axis() -> None:
    whole = mesh()
    fsdp_fn.fully_shard(layer_on(whole["tensor"], Shard(0)), whole["tensor"])


def wrap_on_meshes_of_two_roots() -> None:
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    fsdp_fn.fully_shard(layer_on(other["columns"], Replicate()), mesh()["data"])


def shard_functionally() -> None:
    whole = mesh()
    fsdp_fn.shard(layer_on(whole["tensor"], Shard(0)), whole["data"])


def ask_for_flat_shards() -> None:
    whole = mesh()
    model = distributed(build(Network), whole)
    fsdp_fn.fully_shard(model, whole["data"])
    fsdp_fn.flat_shards(model)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (wrap_uneven, "'weight'.*dimension 0, of size 5.*'tensor' in uneven parts"),
        (wrap_over_its_own_axis, "'weight'.*DTensor already, on a mesh with the axes .'tensor'"),
        (wrap_on_meshes_of_two_roots, "'weight'.*not part of one mesh"),
        (shard_functionally, "'weight'.*DTensor already"),
        (ask_for_flat_shards, "tensor-parallel parameters"),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(act: Any, said: str) -> None:
    for error in run_expecting_error(4, act):
        assert isinstance(error, ValueError), error
        with pytest.raises(ValueError, match=said):
            raise error
