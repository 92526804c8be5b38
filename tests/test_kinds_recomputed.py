"""Recomputation in all the ways that torch offers, around units, inside them, and of blocks that run several times.

Nothing is left gathered, whatever was recomputed when: after NVIDIA/Megatron-LM#6153.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from comparison import PATHS, Wrapper
from kinds import Kind, beside_plain, each
from models import WIDTH, Block, maybe_checkpoint
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import fsdp_fn
from harness import run_distributed

Tensor = torch.Tensor


class Again(nn.Module):
    """Its block runs three times; ``how`` says what is around each run, or around all."""

    def __init__(self, how: str, inside: str | None = None) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.block = Block(inside, dropout=0.25)
        self.other = Block(inside)
        self.head = nn.Linear(WIDTH, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.head(WAYS[self.how](self, self.before(x)))


def thrice(model: Again, x: Tensor) -> Tensor:
    for _ in range(3):
        x = model.other(model.block(x).sin())
    return x


def each_apart(model: Again, x: Tensor, kind: str) -> Tensor:
    for _ in range(3):
        x = maybe_checkpoint(lambda y: model.block(y).sin(), x, kind)
        x = maybe_checkpoint(model.other, x, kind)
    return x


def nested(model: Again, x: Tensor, outer: str, inner: str) -> Tensor:
    return maybe_checkpoint(lambda y: each_apart(model, y, inner), x, outer)


def in_sequence(model: Again, x: Tensor, reentrant: bool) -> Tensor:
    parts = [model.block, model.other, model.block, torch.sin, model.other, model.block]
    return checkpoint_sequential(parts, 3, x, use_reentrant=reentrant)


def selected(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    saved = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def selectively(model: Again, x: Tensor) -> Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, selected)
    return checkpoint(functools.partial(thrice, model), x, use_reentrant=False, context_fn=contexts)


def on_the_host(model: Again, x: Tensor) -> Tensor:
    with save_on_cpu():
        return thrice(model, x)


WAYS: dict[str, Callable[[Again, Tensor], Tensor]] = {
    "not at all": thrice,
    "each apart, reentrant": functools.partial(each_apart, kind="reentrant"),
    "each apart": functools.partial(each_apart, kind="non-reentrant"),
    "all at once, reentrant": lambda m, x: maybe_checkpoint(functools.partial(thrice, m), x, "reentrant"),
    "all at once": lambda m, x: maybe_checkpoint(functools.partial(thrice, m), x, "non-reentrant"),
    "nested, reentrant": functools.partial(nested, outer="reentrant", inner="reentrant"),
    "nested": functools.partial(nested, outer="non-reentrant", inner="non-reentrant"),
    "nested, reentrant outside": functools.partial(nested, outer="reentrant", inner="non-reentrant"),
    "in sequence, reentrant": functools.partial(in_sequence, reentrant=True),
    "in sequence": functools.partial(in_sequence, reentrant=False),
    "selectively": selectively,
    "saved on the host": on_the_host,
}


def recompute(path: str, inside: str | None) -> None:
    def run(how: str) -> None:
        def make() -> nn.Module:
            return Again(how, inside)

        beside_plain(Kind(make, (Block,)), path, policy=fsdp_fn.SchedulePolicy(release=fsdp_fn.Release.POISON))
        beside_plain(Kind(make, (Block,)), path, steps=1, policy=fsdp_fn.SchedulePolicy(reshard_after_forward=False))
        beside_plain(Kind(make), path, steps=1)

    each(WAYS, run)


@pytest.mark.parametrize(
    ("world_size", "inside"), [(1, None), (2, None), (2, "reentrant"), (2, "non-reentrant"), (3, None)]
)
@pytest.mark.parametrize("path", PATHS)
def test_blocks_that_are_recomputed_and_run_often_train_as_in_plain_pytorch(
    world_size: int, path: str, inside: str | None
) -> None:
    run_distributed(world_size, recompute, path, inside)


class Inner(nn.Module):
    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        block: nn.Module = Block()
        self.block = checkpoint_wrapper(block) if wrapped else block
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.block(x)))


def wrap_both_ways() -> None:
    """torch's wrapper module inside a unit, as the unit, and around one."""
    for path in PATHS:
        for units in ((), (Block,), (CheckpointWrapper,)):
            beside_plain(Kind(lambda: Inner(True), units), path)
    model = Wrapper(Inner(True), (CheckpointWrapper,)).module
    assert list(model.state_dict()) == list(Inner(True).state_dict()) == list(Inner(False).state_dict())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_torchs_checkpoint_wrapper_may_be_inside_a_unit_or_around_it(world_size: int) -> None:
    run_distributed(world_size, wrap_both_ways)
