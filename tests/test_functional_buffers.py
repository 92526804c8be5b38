"""Module buffers in the functional path: they go in with a state and come back in a new one.

Running statistics come back equal to plain PyTorch's; a returned state is never changed afterwards.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from comparison import check_equal
from models import WIDTH, Normalised, build, maybe_checkpoint, vectors
from torch import nn

import fsdp_fn
from harness import run_distributed


def snapshot(state: fsdp_fn.ModelState) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in state.buffers.items()}


def check_unchanged(state: fsdp_fn.ModelState, before: dict[str, torch.Tensor], what: str) -> None:
    for name, buffer in state.buffers.items():
        check_equal(buffer, before[name], f"{what}: buffer {name}")


def thread_buffers(checkpointing: str | None) -> None:
    plain = build(lambda: Normalised(checkpointing))
    template, first = fsdp_fn.shard(copy.deepcopy(plain))
    untouched = snapshot(first)
    step = fsdp_fn.value_and_grad(template, lambda model, x: model(x).square().mean())
    state = first
    for seed in range(3):
        _, _, following = step(state, vectors(seed))
        plain(vectors(seed)).square().mean().backward()
        check_unchanged(first, untouched, "first state")
        state = following
        for name, buffer in plain.named_buffers():
            check_equal(state.buffers[name], buffer, f"after step {seed}: buffer {name}")
    assert state.buffers["calls"] == 3
    with torch.no_grad():
        plain.eval()
        template.module.eval()
        output, after = fsdp_fn.apply(template, state, vectors(9))
        check_equal(output, plain(vectors(9)), "evaluation")
        check_equal(
            after.buffers["norm.running_mean"],
            state.buffers["norm.running_mean"],
            "running mean in evaluation",
        )


@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_buffers_come_back_in_the_new_state_equal_to_plain_pytorch(world_size: int, checkpointing: str | None) -> None:
    run_distributed(world_size, thread_buffers, checkpointing)


class CheckpointedNorm(nn.Module):
    """The recomputation changes the running statistics again, in backward."""

    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.checkpointing = checkpointing

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return maybe_checkpoint(self.inside, x, self.checkpointing)


def backward_after_apply(checkpointing: str) -> None:
    template, state = fsdp_fn.shard(build(lambda: CheckpointedNorm(checkpointing)))
    before = snapshot(state)
    output, after = fsdp_fn.apply(template, fsdp_fn.with_gradients(state), vectors(requires_grad=True))
    returned = snapshot(after)
    output.square().mean().backward()
    check_unchanged(state, before, "the state that went in")
    check_unchanged(after, returned, "the state that came out, after backward")


@pytest.mark.parametrize("checkpointing", ["reentrant", "non-reentrant"])
def test_a_state_that_apply_returned_is_not_changed_by_the_backward_that_follows(checkpointing: str) -> None:
    run_distributed(2, backward_after_apply, checkpointing)


class SharedBuffer(nn.Module):
    """One buffer under two names: what is written through one is read through the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.a, self.b = nn.Module(), nn.Module()
        shared = torch.zeros(1)
        self.a.register_buffer("count", shared)
        self.b.register_buffer("count", shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count: Any = self.a.count
        count.add_(1)
        return self.linear(x) * self.b.count


def shared_buffer() -> None:
    plain = build(SharedBuffer)
    template, state = fsdp_fn.shard(copy.deepcopy(plain))
    for seed in range(2):
        output, state = fsdp_fn.apply(template, state, vectors(seed))
        check_equal(output, plain(vectors(seed)), f"output of step {seed}")
        for name, buffer in plain.named_buffers(remove_duplicate=False):
            check_equal(state.buffers[name], buffer, f"after step {seed}: buffer {name}")


def test_a_buffer_under_two_names_stays_one() -> None:
    run_distributed(2, shared_buffer)


def backward_through_two_applications() -> None:
    """The input's gradient alone reaches neither Open, so both applications end together; the template is bare."""
    template, state = fsdp_fn.shard(build(lambda: nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))))
    x = vectors(requires_grad=True)
    y, state = fsdp_fn.apply(template, fsdp_fn.with_gradients(state), x)
    z, state = fsdp_fn.apply(template, state, y)
    torch.autograd.grad(z.square().sum(), x)
    assert all(buffer.is_meta for buffer in template.module.buffers())
    fsdp_fn.apply(template, state, vectors())


def test_a_backward_through_two_applications_leaves_the_template_bare() -> None:
    run_distributed(2, backward_through_two_applications)
