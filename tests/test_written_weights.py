"""Whoever writes the weights, the next forward computes with what was written, under every strategy.

Strategies that keep whole weights at rest have to notice. After pytorch/pytorch#149205: a step of something else than
the shards was a silent no-op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, build, tokens
from strategies import Small, Wrapped, mesh_for, strategies_for
from torch import nn

import fsdp_fn
from harness import run_distributed, run_expecting_error

Write = Callable[[nn.Module], None]


@torch.no_grad()
def in_place(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.mul_(0.5)


def through_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data.mul_(0.5)


@torch.no_grad()
def by_copy(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.copy_(parameter * 0.5)


@torch.no_grad()
def by_foreach(module: nn.Module) -> None:
    torch._foreach_mul_(list(module.parameters()), 0.5)


@torch.no_grad()
def through_local(module: nn.Module) -> None:
    for parameter in module.parameters():
        local: Any = parameter
        local.to_local().mul_(0.5)


@torch.no_grad()
def by_state_dict(module: nn.Module) -> None:
    module.load_state_dict({name: value * 0.5 for name, value in module.state_dict().items()})


@torch.no_grad()
def through_unit_states(module: nn.Module) -> None:
    for state in fsdp_fn.unit_states(module).values():
        for flat in state.main.segments:
            flat.mul_(0.5)


def through_flat_shards(module: nn.Module) -> None:
    module.zero_grad()
    shards = [shard for group in fsdp_fn.flat_shards(module).values() for shard in group]
    torch.optim.SGD(shards, lr=0.0).step()  # nothing, but a torch optimizer is known from now on
    for shard in shards:
        shard.data.mul_(0.5)
    with torch.no_grad():
        for shard in shards:
            shard.add_(0.0)


def by_a_torch_optimizer(module: nn.Module) -> None:
    """Weight decay alone: every weight is halved."""
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(module.parameters(), lr=1.0, weight_decay=0.5).step()


WRITES: dict[str, Write] = {
    write.__name__: write
    for write in (
        in_place,
        through_data,
        by_copy,
        by_foreach,
        through_local,
        by_state_dict,
        through_unit_states,
        by_a_torch_optimizer,
        through_flat_shards,
    )
}


def forward(module: nn.Module) -> torch.Tensor:
    output: torch.Tensor = module(tokens(dist.get_rank()))
    return output


def see_writes(name: str) -> None:
    for label, strategy in strategies_for(dist.get_world_size()).items():
        model = Wrapped.of(build(Small), (Block,), mesh=mesh_for(strategy), placements=strategy).module
        for times in (1, 2, 3):
            with torch.no_grad():
                forward(model)  # whoever keeps weights at rest has them now
            WRITES[name](model)
            plain = build(Small)
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.mul_(0.5**times)
                expected = forward(plain)
                torch.testing.assert_close(forward(model), expected, msg=lambda t, at=label: f"{at}: {t}")
            forward(model).sum().backward()


@pytest.mark.parametrize("name", WRITES)
def test_the_next_forward_reads_what_was_written(name: str) -> None:
    run_distributed(4, see_writes, name)


def uncounted(module: nn.Module) -> None:
    """As a kernel that gets an address: no tensor counts this write."""
    for state in fsdp_fn.unit_states(module).values():
        for flat in state.main.segments:
            flat.numpy()[:] *= 0.5


def see_uncounted_writes() -> None:
    for label, strategy in strategies_for(dist.get_world_size()).items():
        model = Wrapped.of(build(Small), (Block,), mesh=mesh_for(strategy), placements=strategy).module
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for times, known in ((1, False), (2, False), (3, True)):
            if known:
                # From here on only the optimizer is looked for: an uncounted write has to be announced.
                optimizer.step()
                forward(model).sum().backward()
            else:
                forward(model).sum().backward()
            uncounted(model)
            if known:
                fsdp_fn.mark_weights_changed(model)
            plain = build(Small)
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.mul_(0.5**times)
                torch.testing.assert_close(forward(model), forward(plain), msg=lambda t, at=label: f"{at}: {t}")


def test_a_hand_written_optimizer_whose_writes_nothing_counts_is_seen_after_each_backward() -> None:
    run_distributed(3, see_uncounted_writes)


def write_between_forward_and_backward(strategy: Any, write: str) -> None:
    model = Wrapped.of(build(Small), (Block,), mesh=mesh_for(strategy), placements=strategy).module
    loss = forward(model).sum()
    WRITES[write](model)
    loss.backward()


@pytest.mark.parametrize("write", ["in_place", "through_data", "by_foreach", "through_local", "by_a_torch_optimizer"])
@pytest.mark.parametrize("strategy", [fsdp_fn.zero2(), fsdp_fn.zero3()], ids=["zero2", "zero3"])
def test_a_write_between_forward_and_backward_is_refused(strategy: Any, write: str) -> None:
    for error in run_expecting_error(2, write_between_forward_and_backward, strategy, write):
        assert isinstance(error, RuntimeError)
        assert "changed between" in str(error)


def write_on_standing_weights() -> None:
    """Where nothing is gathered, autograd itself sees it, as in plain PyTorch."""
    write_between_forward_and_backward(fsdp_fn.ddp(), "in_place")


def test_so_it_is_where_the_weights_stand() -> None:
    for error in run_expecting_error(2, write_on_standing_weights):
        assert isinstance(error, RuntimeError)


def renormalise_in_forward() -> None:
    model = fsdp_fn.fully_shard(nn.Embedding(5, 3, max_norm=0.1), placements=fsdp_fn.ddp())
    with torch.no_grad():
        model(torch.tensor([dist.get_rank()]))


def test_a_weight_of_which_ranks_hold_copies_is_not_changed_in_forward() -> None:
    for error in run_expecting_error(2, renormalise_in_forward):
        assert isinstance(error, RuntimeError)
        assert "changed a weight in place" in str(error)


def gather_once_a_step() -> None:
    """Weights at rest are made once after an update, whatever the number of microbatches."""
    model = Wrapped.of(build(Small), (Block,), mesh=mesh_for(fsdp_fn.zero2()), placements=fsdp_fn.zero2()).module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with fsdp_fn.record_events(model) as log:
            for _ in range(3):
                forward(model).sum().backward()
        gathered = [event.unit for event in log if event.action is fsdp_fn.Action.GATHER and event.transferred]
        # In the first step no optimizer is known yet.
        assert sorted(gathered) == sorted(["", "block"] * (3 if step == 0 else 1)), f"step {step}: {gathered}"
        optimizer.step()
        optimizer.zero_grad()


def test_weights_at_rest_are_gathered_once_after_each_update() -> None:
    run_distributed(2, gather_once_a_step)
