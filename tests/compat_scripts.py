"""Training scripts in FSDP2's style. Each runs with the names of one import, and returns what it came to."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import VOCABULARY, WIDTH, Block, Stack, build
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

Found = dict[str, torch.Tensor]
Script = Callable[[ModuleType, Path], Found]


def batch(step: int, microbatch: int = 0, rank: int | None = None) -> torch.Tensor:
    """A rank's tokens; default, this rank's."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + microbatch)
    return torch.randint(VOCABULARY, (6,), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1))


def full(tensor: Any) -> torch.Tensor:
    value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return value.detach().clone()


def weights(model: nn.Module) -> Found:
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def gradients(model: nn.Module) -> Found:
    return {f"grad {name}": full(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def wrapped(fsdp: ModuleType, model: Stack, **options: Any) -> Any:
    for block in model.blocks:
        fsdp.fully_shard(block, **options)
    return fsdp.fully_shard(model, **options)


class Scaled(Stack):
    """With a parameter of one row: of several ranks, all but one hold nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens) * self.scale


def plain(fsdp: ModuleType, folder: Path) -> Found:
    """Wrap, optimizer, clip, step."""
    model = wrapped(fsdp, build(Scaled))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found: Found = {}
    for step in range(4):
        loss = loss_of(model, batch(step))
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        found |= {f"{name} {step}": value for name, value in gradients(model).items()}
        found[f"norm {step}"] = full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return found | weights(model)


def inf_norm(fsdp: ModuleType, folder: Path) -> Found:
    """The largest element; of parameters that every rank has some of, for FSDP2 takes no such norm of nothing."""
    model = wrapped(fsdp, build(Stack))
    loss_of(model, batch(0)).backward()
    found = {"norm": full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type=float("inf")))}
    return found | gradients(model)


def mixed_precision(fsdp: ModuleType, folder: Path) -> Found:
    """bf16 compute, fp32 reduction, and fp32 output of the root."""
    model: Any = build(Stack)
    for block in model.blocks:
        fsdp.fully_shard(block, mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    fsdp.fully_shard(model, mp_policy=fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found: Found = {}
    for step in range(3):
        output = model(batch(step))
        assert output.dtype is torch.float32
        loss = nn.functional.cross_entropy(output, batch(step).roll(1))
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    return found | weights(model)


def accumulated(model: Any, microbatches: int, tell: Callable[[bool], None]) -> Found:
    """Three steps of AdamW; ``tell`` is called before each microbatch, with whether it is a step's last."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    found: Found = {}
    for step in range(3):
        for microbatch in range(microbatches):
            tell(microbatch == microbatches - 1)
            loss_of(model, batch(step, microbatch)).backward()
        found |= {f"{name} {step}": value for name, value in gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return found | weights(model)


def replicas_of_shards() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))


def hsdp(fsdp: ModuleType, folder: Path) -> Found:
    """Replicas of shards, accumulation that all-reduces on the last microbatch alone."""
    model = wrapped(fsdp, build(Stack), mesh=replicas_of_shards())
    return accumulated(model, 3, model.set_requires_all_reduce)


def hsdp_without_sync(fsdp: ModuleType, folder: Path) -> Found:
    """Replicas of shards, reduced in fp64, without any sync until the last microbatch; weights kept after forward."""
    policy = fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float64)
    mesh = replicas_of_shards()
    model = wrapped(fsdp, build(Stack), mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return accumulated(model, 2, model.set_requires_gradient_sync)


def accumulation(fsdp: ModuleType, folder: Path) -> Found:
    """Without sync until the last microbatch, weights kept in between."""
    model = wrapped(fsdp, build(Stack))

    def tell(last: bool) -> None:
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)

    return accumulated(model, 3, tell)


def checkpointed(fsdp: ModuleType, folder: Path) -> Found:
    """Activation checkpointing around each block, applied before sharding."""
    model = wrapped(fsdp, build(lambda: Stack(around="non-reentrant")))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def explicit_prefetch(fsdp: ModuleType, folder: Path) -> Found:
    """Each block names the next two, and in backward the two before."""
    model = wrapped(fsdp, build(Stack))
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        model.unshard()
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def save_and_resume(fsdp: ModuleType, folder: Path) -> Found:
    """DCP by torch's own state dict functions; a second model goes on where the first stopped."""

    def make() -> tuple[Any, torch.optim.Optimizer]:
        model = wrapped(fsdp, build(Stack))
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)

    def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            loss_of(model, batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = make()
    train(model, optimizer, range(2))
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / fsdp.__name__)
    train(model, optimizer, range(2, 4))
    other, other_optimizer = make()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other_state, other_optimizer_state = get_state_dict(other, other_optimizer)
    state = {"model": other_state, "optimizer": other_optimizer_state}
    dcp.load(state, checkpoint_id=folder / fsdp.__name__)
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(other, other_optimizer, range(2, 4))
    for name, value in weights(other).items():
        torch.testing.assert_close(value, full(model.get_parameter(name)), rtol=0, atol=0, msg=name)
    return weights(other)


class Adapted(nn.Module):
    """A frozen linear layer and its low-rank adapter."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, 2, bias=False)
        self.up = nn.Linear(2, linear.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.up(self.down(x))


def lora(fsdp: ModuleType, folder: Path) -> Found:
    """Frozen weights and adapters in one unit; the optimizer holds what is trained."""

    def make() -> Stack:
        model = Stack()
        model.requires_grad_(False)
        for block in model.blocks:
            block.up, block.down = Adapted(block.up), Adapted(block.down)
        return model

    model = wrapped(fsdp, build(make))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(3):
        loss_of(model, batch(step)).backward()
        assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def meta_init(fsdp: ModuleType, folder: Path) -> Found:
    """Built on meta, sharded, given memory, initialised as it is; then loaded in place of what was drawn."""
    with torch.device("meta"):
        model: Any = Stack()
    wrapped(fsdp, model)
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert all(bool(full(parameter).isfinite().all()) for parameter in model.parameters())
    values = wrapped(fsdp, build(Stack)).state_dict()
    model.load_state_dict(values, assign=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(2):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def more_of_the_methods(fsdp: ModuleType, folder: Path) -> Found:
    """A divide factor, a hook on what was reduced, another forward method, ignored parameters, sums, lists."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(), Block()
            self.shift = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)) + self.shift

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) * 2 + self.shift

    model: Any = build(Two)
    shift = model.shift
    fsdp.fully_shard([model.first, model.second], reshard_after_forward=True)
    fsdp.fully_shard(model, ignored_params={shift}, reshard_after_forward=False)
    assert model.shift is shift
    fsdp.register_fsdp_forward_method(model, "encode")
    fsdp.register_fsdp_forward_method(nn.Linear(2, 2), "encode")
    for module in (model, model.first):
        module.set_gradient_divide_factor(3.0)
        if dist.get_world_size() > 1:  # one rank is divided twice there
            module.set_force_sum_reduction_for_comms(True)
    model.set_reshard_after_forward(False)
    fsdp.share_comm_ctx([model])
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    found: Found = {}
    for name, call in (("forward", model), ("encode", model.encode), ("again", model)):
        output = call(x)
        output.square().mean().backward()
        found[name] = output.detach()
        found |= {f"{name} {key}": value for key, value in gradients(model).items()}
        model.zero_grad()
        model.set_reshard_after_forward(True)
    return found


class Gather:
    """Counts its calls, and gathers as usual."""

    def __init__(self) -> None:
        self.calls = self.bytes = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.calls += 1
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Scatter(Gather):
    """Likewise; ``op`` is what it is asked for."""

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:  # type: ignore[override]
        self.calls += 1
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def own_collectives(fsdp: ModuleType, folder: Path) -> Found:
    """A script's own collectives, sums alone, a hook on what was reduced and hooks on parameters."""
    model: Any = wrapped(fsdp, build(Stack))
    gather, scatter, seen = Gather(), Scatter(), []
    several = dist.get_world_size() > 1
    if several:
        for module in (model, *model.blocks):
            module.set_force_sum_reduction_for_comms(True)
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
    if hasattr(model, "set_separate_reduce_scatter_group"):
        model.set_separate_reduce_scatter_group(True)
    for block in model.blocks:
        block.set_all_reduce_hook(lambda reduced: seen.append(bool(reduced.mul_(0.5).isfinite().all())))
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: order.append(name))
    found: Found = {}
    for step in range(2):
        loss_of(model, batch(step)).backward()
        found |= {f"{name} {step}": value for name, value in gradients(model).items()}
        model.zero_grad()
    assert sorted(order) == sorted(2 * [name for name, _ in model.named_parameters()])
    assert len(seen) == 2 * len(model.blocks), seen
    assert all(seen)
    if several:
        assert gather.calls >= 2 * 2 * len(model.blocks)
        assert scatter.calls == 2 * (1 + len(model.blocks))
    return found


def state_dicts(fsdp: ModuleType, folder: Path) -> Found:
    """Names and full values, and a plain full state dict loaded back by torch's own functions."""
    model = wrapped(fsdp, build(Stack))
    found = {f"state {name}": full(value) for name, value in get_model_state_dict(model).items()}
    found |= {f"own {name}": full(value) for name, value in model.state_dict().items()}
    return found


def evaluation(fsdp: ModuleType, folder: Path) -> Found:
    """no_grad and eval between steps, first of all, and with weights kept."""
    model = wrapped(fsdp, build(Stack))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: Found = {}
    for step in range(3):
        model.eval()
        model.set_reshard_after_forward(step != 1)
        with torch.no_grad():
            found[f"before {step}"] = model(batch(9)).clone()
        model.train()
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found | weights(model)


def failure(fsdp: ModuleType, folder: Path) -> Found:
    """An exception in forward, then clean steps."""
    model = wrapped(fsdp, build(Stack))
    handle = model.blocks[1].register_forward_pre_hook(_fail)
    with contextlib.suppress(ZeroDivisionError):
        model(batch(0))
    handle.remove()
    if hasattr(fsdp.FSDPModule, "reset_iter_state"):
        model.reset_iter_state()
    loss_of(model, batch(1)).backward()
    return gradients(model)


def _fail(*_: Any) -> None:
    raise ZeroDivisionError


SCRIPTS: dict[str, Script] = {
    script.__name__: script
    for script in (
        plain,
        inf_norm,
        mixed_precision,
        accumulation,
        checkpointed,
        explicit_prefetch,
        save_and_resume,
        lora,
        meta_init,
        more_of_the_methods,
        own_collectives,
        state_dicts,
        evaluation,
        failure,
    )
}
TWO_AXES: dict[str, Script] = {script.__name__: script for script in (hsdp, hsdp_without_sync)}


def same(found: Found, expected: Found) -> None:
    """Equal names, and values but for the order of sums over ranks."""
    assert list(found) == list(expected), f"{sorted(found)}, expected {sorted(expected)}"
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")
