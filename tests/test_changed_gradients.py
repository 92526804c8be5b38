"""``requires_grad`` changed on a wrapped model: served from the next forward on, by a new layout of the unit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import Wrapper, check_equal, check_nothing_gathered, local
from models import VOCABULARY, Block, Chain, build, vectors
from strategies import Small, Wrapped, mesh_for, strategies_for
from torch import nn
from traffic import counted

import fsdp_fn
from fsdp_fn.events import Action
from fsdp_fn.module import FsdpModule
from harness import run_distributed, run_expecting_error

NOTHING, ALL = "^$", ""
FROZEN_PER_STEP = (r"head|block\.down", r"head", r"embedding|block", ALL, NOTHING, r"block\.up\.bias", NOTHING)
"""What is frozen in each step: frozen to trained, trained to frozen, both at once, everything."""


def freeze(model: nn.Module, pattern: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(pattern, name) is None)


def losses_of(model: nn.Module, rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = [torch.randint(VOCABULARY, (4,), generator=generator) for _ in range(2)]
    return [model(batch).square().mean() for batch in tokens]


def train_while_it_changes(name: str, microbatches: int, frozen_first: bool) -> None:
    strategy = strategies_for(dist.get_world_size())[name]
    plain, made = build(Small), build(Small)
    if frozen_first:
        freeze(made, ALL)
    model = Wrapped.of(made, [Block], mesh=mesh_for(strategy), placements=strategy)
    objects = dict(model.module.named_parameters())
    ours = torch.optim.AdamW(model.module.parameters(), lr=0.05)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for step, frozen in enumerate((ALL, *FROZEN_PER_STEP) if frozen_first else FROZEN_PER_STEP):
        what = f"{name}, step {step}, frozen {frozen!r}"
        freeze(plain, frozen)
        freeze(model.module, frozen)
        if frozen == ALL:
            check_equal(model.module(torch.arange(4)), plain(torch.arange(4)), what, rtol=1e-4, atol=1e-5)
            assert not model.module(torch.arange(4)).requires_grad, what
        else:
            if microbatches == 2:
                with fsdp_fn.accumulating(model.module):
                    losses_of(model.module, dist.get_rank(), step)[0].backward()
            losses_of(model.module, dist.get_rank(), step)[-1].backward()
            for rank in range(dist.get_world_size()):
                for loss in losses_of(plain, rank, step)[-microbatches:]:
                    (loss / dist.get_world_size()).backward()
        for key, parameter in model.module.named_parameters():
            assert parameter is objects[key], f"{what}: {key} is another object"
            assert (parameter.grad is None) == (plain.get_parameter(key).grad is None), f"{what}: {key}"
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        for key, value in model.weights().items():
            check_equal(value, plain.get_parameter(key).detach(), f"{what}: {key}", rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_training_goes_on_as_in_plain_pytorch_while_requires_grad_changes(world_size: int) -> None:
    for name in strategies_for(world_size):
        run_distributed(world_size, train_while_it_changes, name, 1, False)


@pytest.mark.parametrize("frozen_first", [False, True])
def test_it_does_so_over_microbatches_and_from_an_all_frozen_start(frozen_first: bool) -> None:
    for name in strategies_for(2):
        run_distributed(2, train_while_it_changes, name, 2, frozen_first)


def wrapped_small(frozen: str) -> nn.Module:
    model = build(Small)
    freeze(model, frozen)
    fsdp_fn.fully_shard(model.block)
    return fsdp_fn.fully_shard(model)


def reduced_bytes(model: nn.Module) -> int:
    with fsdp_fn.record_events(model) as log, counted() as traffic:
        losses_of(model, 0, 0)[0].backward()
    sent = sum(size for (kind, _), size in traffic.items() if kind == "reduce_scatter")
    assert sent == log.transferred(Action.REDUCE), f"{sent} bytes, logged {log.events}"
    return sent


def traffic_follows() -> None:
    model, sent = wrapped_small(NOTHING), {}
    for frozen in (NOTHING, "block", "head", NOTHING):
        freeze(model, frozen)
        sent[frozen] = reduced_bytes(model)
        fresh = reduced_bytes(wrapped_small(frozen))
        assert sent[frozen] == fresh, f"frozen {frozen}: {sent[frozen]} bytes, {fresh} where it was so from the start"
    assert sent["block"] < sent[NOTHING] > sent["head"], sent


def test_what_is_frozen_is_reduced_no_more() -> None:
    run_distributed(2, traffic_follows)


def keep_gradients_and_attributes() -> None:
    model = fsdp_fn.fully_shard(build(Chain))
    model(vectors()).sum().backward()
    model.head.weight.tag = "kept"  # type: ignore[assignment]
    before = {name: local(p.grad).clone() for name, p in model.named_parameters()}
    freeze(model, r"first\.up")
    model.eval()
    with torch.no_grad():
        model(vectors())
    assert model.head.weight.tag == "kept"  # type: ignore[comparison-overlap]
    together = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    plain = build(Chain)
    plain(vectors()).sum().backward()
    assert set(together) == set(before)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(together[name], parameter.grad, rtol=1e-5, atol=1e-6)


def test_gradients_and_attributes_of_parameters_stay() -> None:
    run_distributed(3, keep_gradients_and_attributes)


def optimizer_state_follows() -> None:
    models = (build(Chain), fsdp_fn.fully_shard(build(Chain)))
    plain, sharded = (train_and_take_state(model) for model in models)
    for name, state in plain.items():
        for key, value in state.items():
            other = sharded[name][key]
            other = other if key == "step" else other.full_tensor()
            check_equal(other, value, f"{name} {key}", rtol=1e-4, atol=1e-5)


def train_and_take_state(model: nn.Module) -> dict[str, Any]:
    freeze(model, "head")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for frozen in ("head", NOTHING, r"first\.up|head\.bias"):
        freeze(model, frozen)
        model(vectors()).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}


def test_the_optimizers_state_follows_its_parameters() -> None:
    run_distributed(2, optimizer_state_follows)
    run_distributed(3, optimizer_state_follows)


# --- refusals -----------------------------------------------------------------------------------------------


def between_microbatches() -> None:
    case = Wrapper(build(Chain), placements=fsdp_fn.zero1())
    with fsdp_fn.accumulating(case.module):
        case(vectors()).sum().backward()
        freeze(case.module, "head")
        with pytest.raises(RuntimeError, match=r"changed between microbatches.*after the backward of the last one"):
            case(vectors())
        freeze(case.module, NOTHING)
    case(vectors()).sum().backward()
    plain = build(Chain)
    (plain(vectors()).sum() * 2).backward()
    for name, grad in case.gradients().items():
        torch.testing.assert_close(grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


def before_an_earlier_backward() -> None:
    model = fsdp_fn.fully_shard(build(Chain))
    early = model(vectors())
    freeze(model, "head")
    late = model(vectors())
    with pytest.raises(RuntimeError, match="requires_grad of its parameters was changed between this forward and its"):
        early.sum().backward()
    late.sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.startswith("head"), name


def with_flat_shards() -> None:
    model = fsdp_fn.fully_shard(build(Chain))
    fsdp_fn.flat_shards(model)
    freeze(model, "head")
    with pytest.raises(RuntimeError, match=r"its flat_shards or local_shards were taken"):
        model(vectors())
    freeze(model, NOTHING)
    model(vectors()).sum().backward()


@pytest.mark.parametrize("case", [between_microbatches, before_an_earlier_backward, with_flat_shards])
def test_a_change_that_cannot_be_followed_is_refused_and_taking_it_back_goes_on(case: object) -> None:
    run_distributed(2, case)  # type: ignore[arg-type]


def ranks_differ(all_change: bool) -> None:
    model = fsdp_fn.fully_shard(build(Chain), policy=fsdp_fn.SchedulePolicy(divergence_timeout=3.0))
    model(vectors()).sum().backward()
    if dist.get_rank() == 0 or all_change:
        freeze(model, "head" if dist.get_rank() == 0 else "first")
    model(vectors())


def test_ranks_that_freeze_different_parameters_are_told_on_every_rank() -> None:
    for error in run_expecting_error(2, ranks_differ, True):
        assert isinstance(error, ValueError), error
        assert "Rank 0 has" in str(error), error
        assert "frozen" in str(error), error


def test_a_rank_that_freezes_alone_is_told_which_ranks_did_not_come() -> None:
    errors = run_expecting_error(2, ranks_differ, False, timeout=60.0)
    assert any(isinstance(error, fsdp_fn.RankDivergence) for error in errors), errors


def many_times() -> None:
    model = wrapped_small(NOTHING)
    units = {module for module in model.modules() if isinstance(module, FsdpModule)}
    for step in range(12):
        freeze(model, "block" if step % 2 else "head")
        losses_of(model, 0, 0)[0].backward()
        model.zero_grad()
    assert {module for module in model.modules() if isinstance(module, FsdpModule)} == units
    check_nothing_gathered()


def test_changing_it_often_leaves_nothing_behind() -> None:
    run_distributed(2, many_times)
