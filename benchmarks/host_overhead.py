"""Host overhead: time that sharding adds per unit and step to a plain model, ours beside FSDP2, in one process.

A fake process group of 8 ranks does all host work of sharding and moves no bytes, so what is left is overhead. The
model is a stack of blocks of nine small parameters each; variants take turns, and the medians are compared, so that
only ratios are to be read.

    python benchmarks/host_overhead.py [--blocks 24] [--rounds 30] [--bf16]
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_fn
from fsdp_fn import compat

RANKS = 8


class Block(nn.Module):
    """A Llama-style block: nine parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value, self.out, self.gate, self.up, self.down = (
            nn.Linear(width, width, bias=False) for _ in range(7)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.first_norm(x)
        mixed = functional.scaled_dot_product_attention(
            self.query(normed)[:, None],
            self.key(normed)[:, None],
            self.value(normed)[:, None],
            is_causal=True,
        )
        x = x + self.out(mixed[:, 0])
        normed = self.second_norm(x)
        return x + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def wrap_ours(model: Stack, mesh: DeviceMesh, bf16: bool) -> Stack:
    """Each block a unit of fsdp_fn, then the root."""
    precision = fsdp_fn.PrecisionPolicy(compute_dtype=torch.bfloat16) if bf16 else None
    for block in model.blocks:
        fsdp_fn.fully_shard(block, mesh, precision=precision)
    return fsdp_fn.fully_shard(model, mesh, precision=precision)


def wrap_by(fully_shard: Callable[..., object], model: Stack, mesh: DeviceMesh, bf16: bool) -> Stack:
    """Each block a group of FSDP2, or a unit of what stands in for it, then the root."""
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def measure(variants: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each variant's step, taking turns, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(rounds + 5):
        for name, step in variants.items():
            started = time.perf_counter()
            step()
            if round_number >= 5:
                times[name].append(time.perf_counter() - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--bf16", action="store_true", help="bf16 compute weights, fp32 main weights and reduction")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    plain = Stack(arguments.blocks, arguments.width)
    models = {
        "plain": copy.deepcopy(plain).to(torch.bfloat16 if arguments.bf16 else torch.float32),
        "fsdp_fn": wrap_ours(copy.deepcopy(plain), mesh, arguments.bf16),
        "fsdp_fn.compat": wrap_by(compat.fully_shard, copy.deepcopy(plain), mesh, arguments.bf16),
        "FSDP2": wrap_by(torch_fully_shard, copy.deepcopy(plain), mesh, arguments.bf16),
    }
    x = torch.randn(1, 8, arguments.width, dtype=torch.bfloat16 if arguments.bf16 else torch.float32)

    def step_of(model: nn.Module) -> Callable[[], None]:
        def step() -> None:
            model(x).sum().backward()
            model.zero_grad()

        return step

    times = measure({name: step_of(model) for name, model in models.items()}, arguments.rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    added = {name: (medians[name] - medians["plain"]) / arguments.blocks * 1e3 for name in models if name != "plain"}
    print(f"torch {torch.__version__}, Python {platform.python_version()}, fake group of {RANKS} ranks, 1 thread, "
          f"{arguments.blocks} blocks of 9 parameters{', bf16 compute' if arguments.bf16 else ''}")  # fmt: skip
    print("| | step ms | added per unit ms | share of FSDP2's |\n| --- | --- | --- | --- |")
    for name, median in medians.items():
        extra = f"{added[name]:.3f} | {added[name] / added['FSDP2']:.2f}" if name in added else "– | –"
        print(f"| {name} | {median * 1e3:.2f} | {extra} |")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
