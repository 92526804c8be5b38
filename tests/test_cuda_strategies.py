"""On CUDA GPUs: every strategy trains as plain PyTorch, and main weights that are offloaded stay on the host."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, build, tokens
from strategies import ONE_AXIS, TWO_AXES, Small, Wrapped, assembled_gradients, assembled_model, mesh_for
from test_nccl import RANKS, on_two_gpus
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_fn
from fsdp_fn.module import FsdpModule

pytestmark = pytest.mark.gpu

STEPS = 3
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def loss_of(model: Any, seed: int) -> torch.Tensor:
    own = 1000 * dist.get_rank() + seed
    targets = tokens(own + 500).cuda().flatten()
    return nn.functional.cross_entropy(model(tokens(own).cuda()).float().flatten(0, 1), targets)


def mean_gradients(plain: nn.Module, seeds: list[int]) -> None:
    """Sum over microbatches of the mean over ranks, on the plain model."""
    plain.zero_grad()
    for seed in seeds:
        loss_of(plain, seed).backward()
    for parameter in plain.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def compare(found: dict[str, torch.Tensor], plain: nn.Module, what: str, *, grads: bool = False) -> None:
    for name, parameter in plain.named_parameters():
        expected = parameter.grad if grads else parameter
        assert expected is not None
        torch.testing.assert_close(
            found[name].cpu(), expected.detach().cpu(), msg=lambda t, at=f"{what} of {name}": f"{at}: {t}", **CLOSE
        )


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def train_wrapped(label: str, strategy: Any, policy: fsdp_fn.SchedulePolicy, flat: bool) -> None:
    plain = build(Small).cuda()
    mesh = mesh_for(strategy, "cuda")
    model = Wrapped.of(copy.deepcopy(plain), (Block,), mesh=mesh, placements=strategy, policy=policy)
    shards = fsdp_fn.flat_shards(model.module)[""] if flat else model.module.parameters()
    ours, theirs = optimizer_of(shards), optimizer_of(plain.parameters())
    for step in range(STEPS):
        with fsdp_fn.accumulating(model.module):
            loss_of(model.module, 2 * step).backward()
        loss_of(model.module, 2 * step + 1).backward()
        mean_gradients(plain, [2 * step, 2 * step + 1])
        if not flat:
            compare(model.gradients(), plain, f"{label}: gradient in step {step}", grads=True)
        found = fsdp_fn.clip_grad_norm_(model.module, 0.5)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.testing.assert_close(found.cpu(), expected.cpu(), **CLOSE)
        ours.step()
        ours.zero_grad()
        theirs.step()
        compare(model.weights(), plain, f"{label}: weight after step {step}")
    if policy.offload:
        check_offloaded(model.module)


def check_offloaded(module: nn.Module) -> None:
    for child in module.modules():
        if isinstance(child, FsdpModule):
            assert all(flat.is_pinned() for flat in child._fsdp_unit.state.main.segments)


def train_functional(label: str, strategy: Any, policy: fsdp_fn.SchedulePolicy) -> None:
    plain = build(Small).cuda()
    template, state = fsdp_fn.shard(
        plain, mesh_for(strategy, "cuda"), units=[Block], placements=strategy, policy=policy
    )
    ours, theirs = fsdp_fn.AdamW(lr=0.01, eps=1e-3), optimizer_of(plain.parameters())
    optimizer_state = ours.init(state)
    step_function = fsdp_fn.value_and_grad(template, loss_of, last_microbatch=False)
    for step in range(STEPS):
        _, first, state = step_function(state, 2 * step)
        _, second, state = step_function(state, 2 * step + 1)
        gradients = fsdp_fn.finish_gradients(state, fsdp_fn.add_gradients(first, second))
        mean_gradients(plain, [2 * step, 2 * step + 1])
        compare(assembled_gradients(state, gradients), plain, f"{label}: gradient in step {step}", grads=True)
        gradients, _ = fsdp_fn.clip_grad_norm(gradients, 0.5)
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        state, optimizer_state = ours.update(gradients, optimizer_state, state)
        theirs.step()
        compare(assembled_model(state), plain, f"{label}: weight after step {step}")
    if policy.offload:
        assert all(flat.device.type == "cpu" for unit in state.units.values() for flat in unit.main.segments)


def train_all() -> None:
    strategies: dict[str, Any] = dict(ONE_AXIS)
    if dist.get_world_size() > 1:
        # Two by one: the inner axis has nothing to share out.
        strategies |= TWO_AXES
    for name, strategy in strategies.items():
        for offload in (False, True):
            policy = fsdp_fn.SchedulePolicy(offload=offload)
            label = f"{name}, offload={offload}"
            train_wrapped(label, strategy, policy, flat=False)
            train_wrapped(f"{label}, flat", strategy, policy, flat=True)
            train_functional(label, strategy, policy)


def test_every_strategy_trains_as_plain_pytorch_on_one_gpu(tmp_path: Path) -> None:
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.FileStore(str(tmp_path / "store"), 1))
    try:
        train_all()
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two CUDA GPUs")
def test_every_strategy_trains_as_plain_pytorch_on_two_gpus(tmp_path: Path) -> None:
    on_two_gpus(train_all, tmp_path)


def scale_fp16() -> None:
    """The last rank's loss overflows in the second step: no rank steps."""
    for name, strategy in ONE_AXIS.items():
        precision = fsdp_fn.PrecisionPolicy(compute_dtype=torch.float16)
        mesh = mesh_for(strategy, "cuda")
        model = Wrapped.of(build(Small).cuda(), (Block,), mesh=mesh, placements=strategy, precision=precision)
        optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=128.0)
        for step in range(3):
            before = model.weights()
            loss = loss_of(model.module, step)
            overflows = step == 1
            if overflows and dist.get_rank() == dist.get_world_size() - 1:
                loss = loss * 1e6
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            same = all(torch.equal(value, before[key]) for key, value in model.weights().items())
            assert same is overflows, f"{name}, step {step}"


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two CUDA GPUs")
def test_fp16_with_a_gradient_scaler_on_two_gpus(tmp_path: Path) -> None:
    on_two_gpus(scale_fp16, tmp_path)


def test_offloaded_main_weights_take_no_device_memory() -> None:
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        held = {}
        for offload in (False, True):
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            with torch.device("cuda"):
                plain = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
            policy = fsdp_fn.SchedulePolicy(offload=offload)
            model = Wrapped.of(plain, (nn.Linear,), policy=policy).module
            optimizer = optimizer_of(model.parameters())
            model(torch.randn(4, 1024, device="cuda")).sum().backward()
            optimizer.step()
            held[offload] = torch.cuda.memory_allocated() - before
            del model, optimizer, plain
        weights = 8 * 1025 * 1024 * 4
        # Main weight, gradient and two moments, an eighth of each; offloaded, some scalars.
        assert 4 * weights / 8 <= held[False] <= 4 * weights / 8 * 1.1
        assert held[True] <= 100_000
    finally:
        dist.destroy_process_group()
