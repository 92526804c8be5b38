"""What FSDP2's methods change is when weights are gathered and gradients sent: counted, and in which order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compat_scripts import batch, loss_of, wrapped
from models import Block, Stack, build, vectors
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from traffic import Traffic, counted

import fsdp_fn
from fsdp_fn import compat
from fsdp_fn.events import Action
from harness import run_distributed, run_expecting_error

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def gathers(log: fsdp_fn.EventLog) -> Counter[str]:
    return Counter(event.unit for event in log if event.action is Action.GATHER and event.transferred)


def step(model: Any, number: int = 0) -> None:
    loss_of(model, batch(number)).backward()


def gathers_by_default() -> None:
    model = wrapped(compat, build(Stack))
    for _ in range(2):
        with fsdp_fn.record_events(model) as log:
            step(model)
        assert gathers(log) == {"": 1, **dict.fromkeys(BLOCKS, 2)}, gathers(log)
    model.set_reshard_after_forward(True)
    with fsdp_fn.record_events(model) as log:
        step(model)
    assert gathers(log) == dict.fromkeys(["", *BLOCKS], 2), gathers(log)
    model.set_reshard_after_forward(False)
    with fsdp_fn.record_events(model) as log:
        step(model)
    assert gathers(log) == dict.fromkeys(["", *BLOCKS], 1), gathers(log)


def weights_that_stay() -> None:
    model = wrapped(compat, build(Stack))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model)
    optimizer.step()
    model.set_reshard_after_backward(False)
    for expected in (1, 0, 0):
        with fsdp_fn.record_events(model) as log:
            step(model)
        wanted = {"": expected, **dict.fromkeys(BLOCKS, expected + 1)}
        assert gathers(log) == Counter({unit: count for unit, count in wanted.items() if count}), gathers(log)
    optimizer.step()
    with fsdp_fn.record_events(model) as log:
        step(model)
    assert gathers(log) == {"": 1, **dict.fromkeys(BLOCKS, 2)}, f"after a step: {gathers(log)}"
    model.reshard()
    assert not model._fsdp_unit.gathered


def gather_once_unsharded() -> None:
    model = wrapped(compat, build(Stack))
    with fsdp_fn.record_events(model) as log:
        for module in (model, *model.blocks):
            module.unshard()
        assert type(model.head.weight) is torch.Tensor
        with torch.no_grad():
            model(batch(0))
    assert gathers(log) == dict.fromkeys(["", *BLOCKS], 1), gathers(log)
    assert hasattr(model.head.weight, "_local_tensor")
    for module in (model, *model.blocks):
        assert not module._fsdp_unit.gathered


def order_of_prefetch() -> None:
    model = wrapped(compat, build(Stack))
    first, second, third = model.blocks
    first.set_modules_to_forward_prefetch([second, third])
    third.set_modules_to_backward_prefetch([second])
    with fsdp_fn.record_events(model) as log:
        step(model)
    kinds = (Action.GATHER, Action.COMPUTE)
    seen = [(event.unit, event.action.value) for event in log if event.action in kinds and event.unit in BLOCKS]
    assert seen == [
        *(("blocks.0", "gather"), ("blocks.1", "gather"), ("blocks.2", "gather")),
        *(("blocks.0", "compute"), ("blocks.1", "compute"), ("blocks.2", "compute")),
        *(("blocks.2", "gather"), ("blocks.1", "gather"), ("blocks.2", "compute"), ("blocks.1", "compute")),
        *(("blocks.0", "gather"), ("blocks.0", "compute")),
    ], seen
    for module in (model, *model.blocks):
        assert not module._fsdp_unit.gathered


def reductions_without_sync() -> None:
    model = wrapped(compat, build(Stack))
    step(model)
    with counted() as traffic:
        model.set_requires_gradient_sync(False)
        step(model)
        step(model, 1)
    assert not _reduced(traffic), traffic
    with counted() as traffic:
        model.set_requires_gradient_sync(True)
        step(model, 2)
    assert _reduced(traffic), traffic


def _reduced(traffic: Traffic) -> int:
    return sum(size for (kind, _), size in traffic.items() if kind != "gather")


@pytest.mark.parametrize(
    "check",
    [gathers_by_default, weights_that_stay, gather_once_unsharded, order_of_prefetch, reductions_without_sync],
    ids=lambda check: check.__name__,
)
def test_a_method_changes_what_is_sent_and_when(check: Any) -> None:
    run_distributed(2, check)


def replicas_reduce_last() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = wrapped(compat, build(Stack), mesh=mesh)
    model.set_requires_all_reduce(False)
    with counted() as traffic:
        step(model)
    assert {kind for kind, _ in traffic} == {"gather", "reduce_scatter"}, traffic
    with pytest.raises(RuntimeError, match="changed between microbatches"):
        model.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="changed between microbatches"):
        model.set_gradient_divide_factor(3.0)
    model.set_requires_all_reduce(True)
    with counted() as traffic:
        step(model)
    assert {kind for kind, _ in traffic} == {"gather", "reduce_scatter", "all_reduce"}, traffic


def test_replicas_all_reduce_with_the_last_microbatch_alone() -> None:
    run_distributed(4, replicas_reduce_last)


def divide_by_other_factors() -> None:
    wrapped(compat, build(Stack)).set_gradient_divide_factor(2.0 + dist.get_rank())


def test_ranks_that_divide_by_different_factors_are_told() -> None:
    for error in run_expecting_error(2, divide_by_other_factors):
        assert isinstance(error, ValueError), error
        assert "grad_divisor" in str(error), error


def one_unit_holds_back() -> None:
    """FSDP2 has the flag on each module; others go on reducing."""
    plain = build(Stack)
    model = wrapped(compat, build(Stack))
    model.blocks[1].set_requires_gradient_sync(False, recurse=False)
    step(model, 0)
    own = model.blocks[1].up.weight
    assert "Partial" in str(own.grad.placements) or dist.get_world_size() == 1, own.grad
    assert model.head.weight.grad.full_tensor().isfinite().all()
    model.blocks[1].set_requires_gradient_sync(True, recurse=False)
    step(model, 1)
    for rank in range(dist.get_world_size()):
        for number in range(2):
            (loss_of(plain, batch(number, rank=rank)) / dist.get_world_size()).backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(model.get_parameter(name).grad.full_tensor(), parameter.grad, rtol=1e-4, atol=1e-6)


def test_one_unit_alone_may_hold_its_gradients_back() -> None:
    run_distributed(1, one_unit_holds_back)
    run_distributed(2, one_unit_holds_back)


def parameters_left_alone() -> None:
    block = build(Block)
    kept = block.up.bias
    fsdp_fn.fully_shard(block, ignored=[kept])
    assert block.up.bias is kept
    assert [name for name, p in block.named_parameters() if not hasattr(p, "_local_tensor")] == ["up.bias"]
    plain = build(Block)
    x = vectors(dist.get_rank())
    torch.testing.assert_close(block(x), plain(x))
    block(x).sum().backward()
    plain(x).sum().backward()
    torch.testing.assert_close(kept.grad, plain.up.bias.grad)
    assert block.to(torch.float32) is block
    nn.Sequential(block).to("cpu")
    assert block.up.bias is kept


def test_ignored_parameters_stay_whole_and_their_gradients_this_ranks_own() -> None:
    run_distributed(2, parameters_left_alone)
