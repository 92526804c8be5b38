"""With ``broadcast`` the first rank's values, of parameters and buffers, are what all ranks shard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import (
    PATHS,
    check_equal,
    check_named,
    local,
    same_weights,
)
from meta_models import (
    Language,
    Mixing,
    buffers_of,
    check_training,
    initialised,
    on_meta,
    reset,
    sharded,
)
from models import WIDTH, build, tokens, vectors
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_fn
from harness import run_distributed


def first_seed(path: str) -> None:
    plain = initialised(Language, reset, seed=40)
    torch.manual_seed(40 + dist.get_rank())
    model = sharded(path, on_meta(Language), [Mixing], init="reset_parameters", broadcast=True)
    check_named(model.weights(), same_weights(plain), "first weight")
    check_named(buffers_of(model), dict(plain.named_buffers()), "first buffer")
    check_training(model, plain, tokens())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("path", PATHS)
def test_with_broadcast_the_first_ranks_seed_is_everyones(world_size: int, path: str) -> None:
    run_distributed(world_size, first_seed, path)


def make_by_seed(seed: int) -> Language:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Language()
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.fill_(seed + 1)
    return model


def first_model(path: str, others: str, **options: Any) -> None:
    rank, plain = dist.get_rank(), make_by_seed(40)
    given = on_meta(Language) if rank and others == "meta" else make_by_seed(40 + rank)
    held = [*given.parameters(), *given.buffers()]
    before = [tensor.detach().clone() for tensor in held]
    model = sharded(path, given, [Mixing], broadcast=True, **options)
    if not options:
        check_named(model.weights(), same_weights(plain), "first weight")
    check_equal(model(tokens()), plain(tokens()), "output")
    check_named(buffers_of(model), dict(plain.named_buffers()), "first buffer")
    if path == "wrapper" and others == "real":
        assert [id(b) for b in given.buffers()] == [id(b) for b in held if not isinstance(b, nn.Parameter)]
    if path == "functional":
        for one, other, value in zip([*given.parameters(), *given.buffers()], held, before, strict=True):
            assert one is other, "the model was changed"
            assert one.is_meta or torch.equal(one, value), "the model was written"
    if not options:
        check_training(model, plain, tokens())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("others", ["meta", "real"])
@pytest.mark.parametrize("path", PATHS)
def test_with_broadcast_the_first_ranks_model_is_everyones(world_size: int, others: str, path: str) -> None:
    run_distributed(world_size, first_model, path, others)


def first_model_at_rest(path: str, strategy: str) -> None:
    first_model(path, "meta", placements=getattr(fsdp_fn, strategy)())


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("path", PATHS)
def test_broadcast_weights_are_what_a_strategy_keeps_at_rest(path: str, strategy: str) -> None:
    run_distributed(2, first_model_at_rest, path, strategy)


def first_of_two_axes(path: str, strategy: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    placements = getattr(fsdp_fn, strategy)("outer", "inner")
    plain = make_by_seed(40)
    given = on_meta(Language) if dist.get_rank() else make_by_seed(40)
    options = {"mesh": mesh, "placements": placements, "broadcast": True}
    model = sharded(path, given, [Mixing], **options)
    indices = tokens()
    check_equal(model(indices), plain(indices), "output")
    plain = initialised(Language, reset, seed=40)
    torch.manual_seed(40 + dist.get_rank())
    model = sharded(path, on_meta(Language), [Mixing], init="reset_parameters", **options)
    check_equal(model(indices), plain(indices), "output after init")


@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp"])
@pytest.mark.parametrize("path", PATHS)
def test_with_broadcast_over_two_axes_the_first_rank_of_both_is_everyones(path: str, strategy: str) -> None:
    run_distributed(4, first_of_two_axes, path, strategy)


class Offset(nn.Module):
    """A buffer of which all elements are one in memory."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.tensor([value]).expand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.offset


def expanded(path: str) -> None:
    model = sharded(path, build(lambda: Offset(7.0 + dist.get_rank())), broadcast=True)
    check_equal(buffers_of(model)["offset"], torch.full((WIDTH,), 7.0), "the buffer")
    check_equal(model(vectors()), build(lambda: Offset(7.0))(vectors()), "output")


@pytest.mark.parametrize("path", PATHS)
def test_with_broadcast_an_expanded_buffer_is_the_first_ranks_too(path: str) -> None:
    run_distributed(2, expanded, path)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def tensor_parallel(broadcast: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = on_meta(Pair)
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            data, tensor = mesh.get_coordinate() or ()
            local(parameter).fill_(1.0 + tensor + 10 * data)

    fsdp_fn.fully_shard(model, mesh["data"], init=init, broadcast=broadcast)
    up = model.up.weight.full_tensor()
    rows = torch.tensor([[1.0], [2.0]]).repeat_interleave(6, 0).expand(12, 8).clone()
    if not broadcast:
        for piece in (slice(3, 6), slice(9, 12)):
            rows[piece] += 10
    check_equal(up, rows, "the whole")
    model(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("broadcast", [False, True])
def test_tensor_parallel_parameters_are_made_and_sent_within_the_units_axes(broadcast: bool) -> None:
    run_distributed(4, tensor_parallel, broadcast)
