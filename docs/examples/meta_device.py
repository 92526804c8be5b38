"""A model that is never whole: built on the meta device, given values unit by unit, and trained.

    python docs/examples/meta_device.py                                # one process
    torchrun --nproc-per-node=2 docs/examples/meta_device.py           # two: GPUs where there are, else CPU

Promises: no rank holds more of the model than its shards and one full block; every rank shards the values that the
first one drew.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_fn

FEATURES, DEPTH, ROWS, STEPS = 64, 6, 32, 20


class Block(nn.Module):
    """A residual block, with a buffer that its own ``reset_parameters`` writes."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.linear = nn.Linear(FEATURES, FEATURES)
        self.register_buffer("scale", torch.empty(FEATURES))

    def reset_parameters(self) -> None:
        """The tensors that the block owns itself: those of its children are theirs."""
        nn.init.constant_(self.scale, DEPTH**-0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """``(rows, FEATURES)`` to the same."""
        return inputs + self.scale * torch.relu(self.linear(self.norm(inputs)))


def make_model(mesh: DeviceMesh) -> nn.Sequential:
    """A sharded model. All ranks of the mesh must call."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(DEPTH)))
    for block in model:
        fsdp_fn.fully_shard(block, mesh, init="reset_parameters", broadcast=True)
    return fsdp_fn.fully_shard(model, mesh, init="reset_parameters", broadcast=True)


def train(model: nn.Module, device: torch.device) -> list[float]:
    """This rank's losses: the model learns to turn its inputs around."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    inputs = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(0)).to(device)
    losses = []
    for _ in range(STEPS):
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train for a few steps; rank 0 prints the losses."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))
        losses = train(make_model(mesh), device)
        if dist.get_rank() == 0:
            print(f"step 1  loss {losses[0]:.4f}", f"step {STEPS}  loss {losses[-1]:.4f}", sep="\n", flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
