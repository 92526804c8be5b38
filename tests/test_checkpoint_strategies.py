"""A checkpoint of any strategy is read under any other, at another world size, on either path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import check_equal
from models import Block, build, tokens
from strategies import ONE_AXIS, TWO_AXES, Small, Wrapped, assembled_model, mesh_for, strategies_for
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import fsdp_fn
from harness import run_distributed, run_expecting_error

Tensors = dict[str, torch.Tensor]
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def backward(module: nn.Module, step: int) -> None:
    """The same inputs on all ranks: so the mean is the same at any world size."""
    logits = module(tokens(step))
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens(step + 500).flatten()).backward()


def begin(name: str, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    strategy = {**ONE_AXIS, **TWO_AXES}[name]
    model = Wrapped.of(build(Small), (Block,), mesh=mesh_for(strategy), placements=strategy).module
    parameters: Any = model.parameters() if kind == "parameters" else fsdp_fn.flat_shards(model)[""]
    return model, torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def go_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def save_each(folder: Path, names: list[str]) -> Tensors:
    """The same training under each strategy; what it comes to two steps after the checkpoints."""
    found: Tensors = {}
    for index, name in enumerate(names):
        model, optimizer = begin(name, ("parameters", "flat")[index % 2])
        go_on(model, optimizer, range(2))
        fsdp_fn.save_checkpoint(folder / name, 2, model, optimizer)
        go_on(model, optimizer, range(2, 4))
        found = Wrapped(model).weights()
    return found


def resume_each(folder: Path, saved: str, names: list[str], expected: Tensors) -> None:
    path = fsdp_fn.latest_checkpoint(folder / saved)
    assert path is not None
    for index, name in enumerate(names):
        model, optimizer = begin(name, ("flat", "parameters")[index % 2])
        backward(model, 9)  # what is loaded over is not what was there at first
        optimizer.step()
        optimizer.zero_grad()
        fsdp_fn.load_checkpoint(path, model, optimizer)
        go_on(model, optimizer, range(2, 4))
        for key, value in Wrapped(model).weights().items():
            check_equal(value, expected[key], f"{saved} resumed as {name}: {key}", **CLOSE)
        resume_functionally(path, name, expected)


def resume_functionally(path: Path, name: str, expected: Tensors) -> None:
    strategy = {**ONE_AXIS, **TWO_AXES}[name]
    template, state = fsdp_fn.shard(build(Small), mesh_for(strategy), units=[Block], placements=strategy)
    optimizer = fsdp_fn.AdamW(lr=0.01, eps=1e-3)
    state = fsdp_fn.refresh(state)  # planes of other weights than those that are loaded
    loaded = fsdp_fn.load_checkpoint(path, state, optimizer.init(state))
    state, optimizer_state = loaded.model, loaded.optimizer

    def loss_function(model: Any, step: int) -> torch.Tensor:
        logits = model(tokens(step))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens(step + 500).flatten())

    step_function = fsdp_fn.value_and_grad(template, loss_function)
    for step in range(2, 4):
        _, gradients, state = step_function(state, step)
        state, optimizer_state = optimizer.update(gradients, optimizer_state, state)
    for key, value in assembled_model(state).items():
        check_equal(value, expected[key], f"resumed functionally as {name}: {key}", **CLOSE)


def test_what_one_strategy_saved_another_resumes(tmp_path: Path) -> None:
    names = ["zero3", "ddp", "hfsdp", "zero1", "hsdp", "zero3 of whole tensors"]
    expected = run_distributed(4, save_each, tmp_path, names)[0]
    for saved in ("zero3", "hfsdp", "ddp"):
        run_distributed(4, resume_each, tmp_path, saved, ["hfsdp", "zero2", "ddp", "zero3 over both"], expected)
    for saved, world_size in (("hsdp", 3), ("zero1", 2), ("zero3 of whole tensors", 1)):
        run_distributed(world_size, resume_each, tmp_path, saved, ["zero1", "zero3"], expected)


def through_torchs_state_dicts(full: bool) -> None:
    for name in strategies_for(dist.get_world_size()):
        options = StateDictOptions(full_state_dict=full)
        model, optimizer = begin(name, "parameters")
        go_on(model, optimizer, range(2))
        saved = (
            get_model_state_dict(model, options=options),
            get_optimizer_state_dict(model, optimizer, options=options),
        )
        saved = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, saved)
        go_on(model, optimizer, range(2, 4))
        expected = Wrapped(model).weights()
        again, other = begin(name, "parameters")
        backward(again, 9)
        other.step()
        other.zero_grad()
        set_model_state_dict(again, saved[0], options=options)
        set_optimizer_state_dict(again, other, saved[1], options=options)
        go_on(again, other, range(2, 4))
        for key, value in Wrapped(again).weights().items():
            check_equal(value, expected[key], f"{name}: {key}")


@pytest.mark.parametrize("full", [True, False], ids=["full", "sharded"])
def test_torchs_state_dict_functions_serve_every_strategy(full: bool) -> None:
    run_distributed(4, through_torchs_state_dicts, full)


def save_experts(folder: Path, functional: bool) -> None:
    whole = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))
    everywhere = torch.distributed.init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    model: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    if functional:
        experts = fsdp_fn.UnitSpec("1", whole["data"], grad_divisor=2.0)
        _, model = fsdp_fn.shard(model, everywhere, units=[experts])
    else:
        fsdp_fn.fully_shard(model[1], whole["data"], grad_divisor=2.0)
        fsdp_fn.fully_shard(model, everywhere)
    fsdp_fn.save_checkpoint(folder, 1, model)


@pytest.mark.parametrize("functional", [False, True])
def test_experts_that_differ_under_one_name_are_not_saved_as_one(tmp_path: Path, functional: bool) -> None:
    for error in run_expecting_error(4, save_experts, tmp_path, functional):
        assert isinstance(error, ValueError)
        assert "'1' is sharded over 2 ranks and others over 4" in str(error)
