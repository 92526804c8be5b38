"""Plain shards: fused optimizers without DTensor cost, matrix optimizers on whole matrices, the same checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import check_equal, check_named, reference_gradients, same_weights
from models import Block, Stack, build, tokens
from strategies import Wrapped, mesh_for, strategies_for
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import fsdp_fn
from harness import run_distributed, run_expecting_error

STEPS = 3
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


def decayed(name: str, parameter: nn.Parameter) -> str:
    return "decay" if parameter.ndim > 1 else "plain"


def wrapped(strategy: Any = None, **options: Any) -> Wrapped:
    strategy = fsdp_fn.zero3() if strategy is None else strategy
    return Wrapped.of(build(Stack), (Block,), mesh=mesh_for(strategy), placements=strategy, group_of=decayed, **options)


def backward(module: nn.Module, step: int) -> None:
    own = 1000 * dist.get_rank() + step
    logits = module(tokens(own))
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens(own + 500).flatten()).backward()


def adamw(groups: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=0.01, eps=1e-3, weight_decay=0.1, **options)


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    named = list(module.named_parameters())
    return [
        {"params": [p for name, p in named if p.ndim > 1]},
        {"params": [p for name, p in named if p.ndim == 1], "weight_decay": 0.0},
    ]


def flat_groups_of(module: nn.Module) -> list[dict[str, Any]]:
    shards = fsdp_fn.flat_shards(module)
    assert set(shards) == {"decay", "plain"}
    return [{"params": shards["decay"]}, {"params": shards["plain"], "weight_decay": 0.0}]


def compare_flat(form: str) -> None:
    options = {form: True} if form else {}
    for name, strategy in strategies_for(dist.get_world_size()).items():
        ours, theirs = wrapped(strategy), wrapped(strategy)
        flat, by_parameter = adamw(flat_groups_of(ours.module), **options), adamw(groups_of(theirs.module), **options)
        units = sum(1 for module in ours.module.modules() if isinstance(module, fsdp_fn.FsdpModule))
        held = [parameter for group in flat.param_groups for parameter in group["params"]]
        assert all(type(parameter) is nn.Parameter for parameter in held)
        assert len(held) <= 5 * units
        for step in range(STEPS):
            for model, optimizer in ((ours, flat), (theirs, by_parameter)):
                with fsdp_fn.accumulating(model.module):
                    backward(model.module, 10 * step)
                backward(model.module, 10 * step + 1)
                fsdp_fn.clip_grad_norm_(model.module, 1e9)
                optimizer.step()
                optimizer.zero_grad(set_to_none=bool(step % 2))
            found, expected = ours.weights(), theirs.weights()
            for key, value in found.items():
                # torch's fused CPU kernel rounds the last few elements of a tensor otherwise than those before them.
                tolerance = {"rtol": 1e-6, "atol": 1e-8} if form == "fused" else {}
                check_equal(value, expected[key], f"{name}: {key} after step {step}", **tolerance)


@pytest.mark.parametrize("form", ["", "foreach", "fused"])
@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_flat_shards_train_to_the_same_bits_as_parameters(world_size: int, form: str) -> None:
    run_distributed(world_size, compare_flat, form, timeout=240)


def clip_flat() -> None:
    plain = build(Stack)
    ours = wrapped()
    fsdp_fn.flat_shards(ours.module)
    backward(plain, 0)
    backward(ours.module, 0)
    grads = [grad for grad in reference_gradients(plain).values() if grad is not None]
    expected = torch.nn.utils.get_total_norm(grads)
    check_equal(fsdp_fn.clip_grad_norm_(ours.module, 0.1), expected, "norm", rtol=1e-5, atol=1e-6)
    after = fsdp_fn.clip_grad_norm_(ours.module, 1.0)
    check_equal(after, torch.tensor(0.1), "norm after clipping", rtol=1e-4, atol=1e-6)


def test_padding_in_flat_shards_is_not_in_the_norm(world_size: int) -> None:
    run_distributed(world_size, clip_flat)


def train_with_muon() -> None:
    """Muon for the matrices of the blocks, AdamW for the rest, against the same optimizers unsharded."""

    def matrices(name: str) -> bool:
        return name.startswith("blocks") and name.endswith(("up.weight", "down.weight"))

    plain = build(Stack)
    strategy = fsdp_fn.zero3(fsdp_fn.TensorAtomic())
    model = Wrapped.of(copy.deepcopy(plain), (Block,), mesh=mesh_for(strategy), placements=strategy)
    shards = fsdp_fn.local_shards(model.module)
    assert list(shards) == [name for name, _ in model.module.named_parameters()]
    whole = {name: parameter.shape for name, parameter in plain.named_parameters()}
    for name, shard in shards.items():
        assert shard.shape == whole[name] or not shard.numel(), f"{name} is cut: {tuple(shard.shape)}"

    def optimizers(named: dict[str, nn.Parameter]) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Muon([p for name, p in named.items() if matrices(name)], lr=0.02, weight_decay=0.1),
            adamw([p for name, p in named.items() if not matrices(name)]),
        ]

    ours, theirs = optimizers(shards), optimizers(dict(plain.named_parameters()))
    for step in range(STEPS):
        backward(model.module, step)
        backward(plain, step)
        for (_, parameter), grad in zip(plain.named_parameters(), reference_gradients(plain).values(), strict=True):
            parameter.grad = grad
        for optimizer in (*ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
        # Muon's steps are taken in bf16: one that rounds otherwise moves a weight by that much.
        tolerance = {} if dist.get_world_size() == 1 else {"rtol": 1e-2, "atol": 1e-3}
        check_named(dict(model.weights()), same_weights(plain), f"weight after step {step}", **tolerance)


def test_muon_on_whole_matrices_equals_unsharded_training(world_size: int) -> None:
    run_distributed(world_size, train_with_muon)


# --- checkpoints --------------------------------------------------------------------------------------------


def trained(kind: str, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrapped().module
    optimizer = adamw(flat_groups_of(model) if kind == "flat" else groups_of(model))
    for step in range(steps):
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def save_as(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    model, optimizer = trained(kind)
    fsdp_fn.save_checkpoint(folder, 2, model, optimizer, extra={"kind": kind})
    backward(model, 7)
    optimizer.step()
    return Wrapped(model).weights()


def go_on_as(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    model, optimizer = trained(kind, steps=0)
    path = fsdp_fn.latest_checkpoint(folder)
    assert path is not None
    fsdp_fn.load_checkpoint(path, model, optimizer)
    backward(model, 7)
    optimizer.step()
    return Wrapped(model).weights()


@pytest.mark.parametrize(("saved", "loaded"), [("flat", "flat"), ("flat", "parameters"), ("parameters", "flat")])
def test_checkpoints_of_flat_shards_and_of_parameters_are_one_kind(tmp_path: Path, saved: str, loaded: str) -> None:
    expected = run_distributed(3, save_as, saved, tmp_path)[0]
    found = run_distributed(3, go_on_as, loaded, tmp_path)[0]
    for name, value in found.items():
        check_equal(value, expected[name], name)


def test_they_are_read_at_another_world_size(tmp_path: Path) -> None:
    run_distributed(2, save_as, "flat", tmp_path)
    three = run_distributed(3, go_on_as, "flat", tmp_path)[0]
    again = run_distributed(3, go_on_as, "parameters", tmp_path)[0]
    for name, value in three.items():
        check_equal(value, again[name], name)


# --- refusals, and who gets gradients -----------------------------------------------------------------------


def ask_with_gradients() -> None:
    model = wrapped().module
    backward(model, 0)
    fsdp_fn.flat_shards(model)


def step_unfinished() -> None:
    model = wrapped(fsdp_fn.zero1()).module
    optimizer = adamw(flat_groups_of(model))
    with fsdp_fn.accumulating(model):
        backward(model, 0)
    optimizer.step()


@pytest.mark.parametrize(
    ("act", "said"), [(ask_with_gradients, "zero_grad"), (step_unfinished, "not complete")], ids=["asked", "stepped"]
)
def test_shards_at_a_wrong_moment_are_refused(act: Callable[[], None], said: str) -> None:
    for error in run_expecting_error(2, act):
        assert error is not None
        assert said in str(error)


def test_a_module_without_wrapped_units_has_no_shards() -> None:
    for ask in (fsdp_fn.flat_shards, fsdp_fn.local_shards):
        with pytest.raises(ValueError, match="has no wrapped module"):
            ask(nn.Linear(2, 2))


def only_shards_get_gradients() -> None:
    model = wrapped().module
    shards = fsdp_fn.flat_shards(model)
    assert fsdp_fn.flat_shards(model)["decay"][0] is shards["decay"][0], "asked again, others came"
    backward(model, 0)
    assert all(parameter.grad is None for parameter in model.parameters())
    held = [shard for group in shards.values() for shard in group]
    assert all(shard.grad is not None and shard.grad.shape == shard.shape for shard in held)
    kept = [shard.grad for shard in held]
    copies = [grad.clone() for grad in kept if grad is not None]
    for shard in held:
        shard.grad = None
    backward(model, 1)
    assert all(torch.equal(grad, copied) for grad, copied in zip(kept, copies, strict=True)), "a held gradient moved"


def test_gradients_go_to_shards_alone_and_those_that_are_held_stay(world_size: int) -> None:
    run_distributed(world_size, only_shards_get_gradients)


def skip_an_overflowing_step() -> None:
    model = wrapped().module
    optimizer = torch.optim.SGD([shard for group in fsdp_fn.flat_shards(model).values() for shard in group], lr=0.1)
    scaler = ShardedGradScaler(device="cpu", init_scale=4.0, process_group=dist.group.WORLD)
    before = Wrapped(model).weights()
    for overflow in (True, False):
        loss = nn.functional.cross_entropy(model(tokens(dist.get_rank())).flatten(0, 1), tokens(5).flatten())
        if overflow and dist.get_rank() == dist.get_world_size() - 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        same = all(torch.equal(value, before[name]) for name, value in Wrapped(model).weights().items())
        assert same is overflow


def test_torchs_sharded_gradient_scaler_serves_plain_shards(world_size: int) -> None:
    run_distributed(world_size, skip_an_overflowing_step)
