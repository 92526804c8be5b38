"""An init that does not do its work, a rank that differs and a late ``to_empty`` are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import (
    check_equal,
)
from meta_models import (
    on_meta,
    sharded,
)
from models import WIDTH, build, vectors
from refusals import refused
from torch import nn

import fsdp_fn
from harness import run_distributed, run_expecting_error


class Unwritten(nn.Module):
    """Owns tensors, and has no method that writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Module()
        self.inside.scale = nn.Parameter(torch.ones(WIDTH))
        self.inside.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.inside.scale


def all_but(*left: str) -> Callable[[nn.Module], None]:
    """An init that forgets these."""

    def init(module: nn.Module) -> None:
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if name not in left:
                tensor.fill_(1)

    return init


def replacing(module: nn.Module) -> None:
    for name, _ in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.ones(WIDTH)))


def freezing(module: nn.Module) -> None:
    all_but()(module)
    module.requires_grad_(False)


def misfitting(module: nn.Module) -> None:
    all_but()(module)
    if "steps" in module._buffers:
        module._buffers["steps"] = torch.zeros(3, dtype=torch.int64)


def failing(module: nn.Module) -> None:
    raise KeyError("no such file")


def half(module: nn.Module) -> None:
    all_but()(module)
    for _, parameter in module.named_parameters(recurse=False):
        parameter.flatten()[1:].fill_(torch.nan)


BAD_INITS: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (None, ValueError, "'inside.scale'.*is on meta, the mesh on 'cpu': give init="),
    "no method": ("reset_parameters", ValueError, "module 'inside' of .*, a Module, has scale, steps on meta and no"),
    "parameter": (all_but("scale"), ValueError, "parameter 'inside.scale' of .*init did not write all of it"),
    "half a parameter": (half, ValueError, "parameter 'inside.scale' of .*init did not write all of it"),
    "integer buffer": (all_but("steps"), ValueError, "buffer 'inside.steps' of .*init did not write all of it"),
    "replaced": (replacing, ValueError, "init of unit .* replaced parameter 'scale'"),
    "frozen": (freezing, ValueError, "replaced parameter 'scale', or changed its requires_grad"),
    "buffer of another shape": (misfitting, ValueError, r"'inside.steps' .*\[3\] of torch.int64.*expected \[2\]"),
    "failing": (failing, RuntimeError, "init of module 'inside' of .* failed: KeyError: 'no such file'"),
    "another name": ("init_weights", ValueError, "init: expected 'reset_parameters' or a function.*'init_weights'"),
    "a number": (3, TypeError, "init: expected .* got 3"),
}

SHARDS: dict[str, Callable[..., Any]] = {"fully_shard": fsdp_fn.fully_shard, "shard": fsdp_fn.shard}


def bad_init(sharding: str) -> None:
    for what, (init, error, match) in BAD_INITS.items():
        model = on_meta(Unwritten)
        held = [*model.parameters(), *model.buffers()]
        with refused(error, match, f"{sharding}, {what}"):
            SHARDS[sharding](model, init=init)
        for one, other in zip([*model.parameters(), *model.buffers()], held, strict=True):
            assert one is other, f"{what}: a tensor was replaced"
            assert one.is_meta
            assert one.requires_grad == isinstance(one, nn.Parameter)
        assert type(model) is Unwritten
        SHARDS[sharding](model, init=all_but())
    with refused(TypeError, "broadcast: expected True or False, got 1", sharding):
        SHARDS[sharding](on_meta(Unwritten), init=all_but(), broadcast=1)
    model = nn.BatchNorm1d(WIDTH)
    model.running_mean = torch.zeros(WIDTH, device="meta")
    with refused(ValueError, "buffer 'running_mean' of unit .* is on meta", sharding):
        SHARDS[sharding](model)
    SHARDS[sharding](model, init="reset_parameters")


@pytest.mark.parametrize("sharding", SHARDS)
def test_an_init_that_does_not_do_its_work_is_refused_by_name_and_changes_nothing(sharding: str) -> None:
    run_distributed(2, bad_init, sharding)


class Reaching(nn.Module):
    """Writes a weight of a child, which may be a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.constant_(self.child.bias, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x) * self.scale


def reaching() -> None:
    for units in ([], [nn.Linear]):
        weights = sharded("wrapper", on_meta(Reaching), units, init="reset_parameters").weights()
        check_equal(weights["child.bias"], torch.full((WIDTH,), 0.5), f"{units}")  # type: ignore[arg-type]
    weights = sharded("functional", on_meta(Reaching), [], init="reset_parameters").weights()
    check_equal(weights["child.bias"], torch.full((WIDTH,), 0.5), "functional")  # type: ignore[arg-type]
    with refused(ValueError, "module '' of unit '' wrote 'child.bias', which another unit holds", "functional"):
        sharded("functional", on_meta(Reaching), [nn.Linear], init="reset_parameters")


def test_a_write_that_reaches_into_another_unit_is_kept_or_refused() -> None:
    run_distributed(2, reaching)


ODD_RANKS: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "failing": ({"init": all_but()}, {"init": failing}, fsdp_fn.RankFault, "no such file"),
    "failing with broadcast": (
        {"init": all_but(), "broadcast": True},
        {"init": failing, "broadcast": True},
        fsdp_fn.RankFault,
        "no such file",
    ),
    "no init": ({"init": all_but()}, {}, fsdp_fn.RankFault, "is on meta, the mesh on 'cpu': give init="),
    "no broadcast": (
        {"init": all_but(), "broadcast": True},
        {"init": all_but()},
        ValueError,
        "ranks disagree.*broadcast=",
    ),
}
"""What the other ranks give, what the odd one does, and what the others are told."""


def one_rank_is_another(sharding: str, odd: str, odd_rank: int) -> None:
    others, own, _, _ = ODD_RANKS[odd]
    model = on_meta(Unwritten)
    held = [*model.parameters(), *model.buffers()]
    try:
        SHARDS[sharding](model, **(own if dist.get_rank() == odd_rank else others))
    finally:
        for one, other in zip([*model.parameters(), *model.buffers()], held, strict=True):
            assert one is other, "a tensor was replaced"


@pytest.mark.parametrize("odd_rank", [0, 2])
@pytest.mark.parametrize("odd", ODD_RANKS)
@pytest.mark.parametrize("sharding", SHARDS)
def test_a_rank_that_fails_or_differs_is_told_on_every_rank(sharding: str, odd: str, odd_rank: int) -> None:
    _, _, told, match = ODD_RANKS[odd]
    errors = run_expecting_error(3, one_rank_is_another, sharding, odd, odd_rank, timeout=30.0)
    for rank, error in enumerate(errors):
        with refused(told if told is ValueError or rank != odd_rank else Exception, match, f"rank {rank}"):
            assert error is not None
            raise error


class Counted(nn.BatchNorm1d):
    """With a buffer more."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.register_buffer("more", torch.zeros(2))


def other_buffers(sharding: str) -> None:
    model = nn.Sequential(Counted() if dist.get_rank() == 1 else nn.BatchNorm1d(WIDTH))
    with refused(ValueError, r"ranks disagree.*buffer 0\.more \[2\]", sharding):
        SHARDS[sharding](model, broadcast=True)


@pytest.mark.parametrize("sharding", SHARDS)
def test_ranks_with_other_buffers_are_told_before_any_is_sent(sharding: str) -> None:
    run_distributed(2, other_buffers, sharding)


def emptied() -> None:
    plain = build(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    model = fsdp_fn.fully_shard(copy.deepcopy(plain))
    outer = nn.Sequential(model)
    for what, change in {
        "to_empty": lambda: model.to_empty(device="cpu"),
        "to_empty from above": lambda: outer.to_empty(device="cpu"),
        "to_empty on meta": lambda: model.to_empty(device="meta"),
    }.items():
        with refused(TypeError, "sharded weights", what):
            change()
        check_equal(model(vectors()), plain(vectors()), what)
    with refused(TypeError, "to_empty and the like.*init", "to_empty"):
        model.to_empty(device="cpu")


def test_to_empty_after_sharding_is_refused_and_leaves_buffers_alone() -> None:
    run_distributed(2, emptied)
