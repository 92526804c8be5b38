"""torch's own state-dict functions on a wrapped model: full, sharded, and through torch's distributed checkpoint."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from comparison import Wrapper, check_equal
from models import Block, Chain, build, vectors
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from harness import run_distributed


def trained() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, torch.optim.Optimizer]:
    """A plain model and the same one wrapped, each after one step of its optimizer on the same batch."""
    plain = build(Chain)
    wrapped = Wrapper(copy.deepcopy(plain), (Block,)).module
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3) for model in (plain, wrapped)]
    for model, optimizer in zip((plain, wrapped), optimizers, strict=True):
        model(vectors()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return plain, wrapped, *optimizers


def untrained() -> tuple[nn.Module, torch.optim.Optimizer]:
    wrapped = Wrapper(build(Chain), (Block,)).module
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=0.1, eps=1e-3)


def check_same_next_step(trained_model: nn.Module, trained_optimizer: Any, model: nn.Module, optimizer: Any) -> None:
    """Both go on alike: weights and optimizer state are the same."""
    for each, its in ((trained_model, trained_optimizer), (model, optimizer)):
        each(vectors(1)).square().mean().backward()
        its.step()
    for name, parameter in model.named_parameters():
        check_equal(parameter.full_tensor(), trained_model.get_parameter(name).full_tensor(), name)


def full_state_dicts() -> None:
    plain, wrapped, _, optimizer = trained()
    full = StateDictOptions(full_state_dict=True)
    weights: Any = get_model_state_dict(wrapped, options=full)
    moments: Any = get_optimizer_state_dict(wrapped, optimizer, options=full)
    assert list(weights) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(weights[name], value, msg=name)
        assert moments["state"][name]["exp_avg"].shape == value.shape, name
    other, other_optimizer = untrained()
    set_model_state_dict(other, weights, options=full)
    # A copy, for torch loads the step counters themselves.
    set_optimizer_state_dict(other, other_optimizer, copy.deepcopy(moments), options=full)
    check_same_next_step(wrapped, optimizer, other, other_optimizer)


def through_a_distributed_checkpoint() -> None:
    _, wrapped, _, optimizer = trained()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    state = {"model": get_model_state_dict(wrapped), "optimizer": get_optimizer_state_dict(wrapped, optimizer)}
    dcp.save(state, checkpoint_id=folder[0])
    other, other_optimizer = untrained()
    target = {
        "model": get_model_state_dict(other),
        "optimizer": get_optimizer_state_dict(other, other_optimizer),
    }
    dcp.load(target, checkpoint_id=folder[0])
    set_model_state_dict(other, target["model"])
    set_optimizer_state_dict(other, other_optimizer, target["optimizer"])
    check_same_next_step(wrapped, optimizer, other, other_optimizer)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_full_state_dicts_carry_weights_and_moments_over(ranks: int) -> None:
    run_distributed(ranks, full_state_dicts)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_distributed_checkpoint_carries_weights_and_moments_over(ranks: int) -> None:
    run_distributed(ranks, through_a_distributed_checkpoint)
