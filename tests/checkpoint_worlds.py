"""The same training in both worlds, wrapped and functional, for tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fsdp_fn
from fsdp_fn.checkpoint import Checkpoint, load_checkpoint


class Net(nn.Module):
    """Tied, frozen and empty parameters; one buffer that forward changes, and one that is not persistent."""

    calls: torch.Tensor
    scale: torch.Tensor

    def __init__(self, seed: int, width: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, width)
        self.block = nn.Sequential(nn.Linear(width, 11), nn.Tanh(), nn.Linear(11, width, bias=False))
        self.frozen = nn.Parameter(torch.randn(3, width), requires_grad=False)
        self.empty = nn.Parameter(torch.randn(4, 0))
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.tensor(1.0 + seed), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        x = self.embedding(tokens) + self.frozen.sum(0)
        return self.head(self.block(x)) + self.empty.sum()


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))


def loss_of(model: Any, step: int) -> torch.Tensor:
    tokens = torch.randint(5, (2, 6), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


# Each world: begin(seed) -> (model or state, optimizer or state, what training needs besides).


class Wrapped:
    def __init__(self, seed: int, kind: str = "adamw", width: int = 7) -> None:
        model, mesh = Net(seed, width), mesh_of_all()
        fsdp_fn.fully_shard(model.block, mesh=mesh)
        self.model: Any = fsdp_fn.fully_shard(model, mesh=mesh)
        make = torch.optim.AdamW if kind == "adamw" else torch.optim.SGD
        options = {} if kind == "adamw" else {"momentum": 0.9}
        self.optimizer: Any = make(self.model.parameters(), lr=0.05, **options)

    def train(self, first: int, count: int) -> list[float]:
        losses = []
        for step in range(first, first + count):
            loss = loss_of(self.model, step)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def load(self, path: Path) -> Checkpoint:
        found = load_checkpoint(path, self.model, self.optimizer)
        assert found.model is self.model
        assert found.optimizer is self.optimizer
        return found

    def whole(self) -> dict[str, torch.Tensor]:
        return {name: full(value) for name, value in self.model.state_dict().items()}


class Functional:
    def __init__(self, seed: int, kind: str = "adamw", width: int = 7) -> None:
        self.template, self.model = fsdp_fn.shard(Net(seed, width), mesh_of_all(), units=["block"])
        self.update: Any = fsdp_fn.AdamW(lr=0.05) if kind == "adamw" else fsdp_fn.SGD(lr=0.05, momentum=0.9)
        self.optimizer = self.update.init(self.model)
        self.step = fsdp_fn.value_and_grad(self.template, loss_of)

    def train(self, first: int, count: int) -> list[float]:
        losses = []
        for step in range(first, first + count):
            loss, gradients, self.model = self.step(self.model, step)
            self.model, self.optimizer = self.update.update(gradients, self.optimizer, self.model)
            losses.append(loss.item())
        return losses

    def load(self, path: Path) -> Checkpoint:
        before = [flat.clone() for unit in self.model.units.values() for flat in unit.main.segments]
        found = load_checkpoint(path, self.model, self.optimizer)
        after = [flat for unit in self.model.units.values() for flat in unit.main.segments]
        assert all(map(torch.equal, before, after))
        for name, unit in found.model.units.items():
            assert unit.version > self.model.units[name].version
        self.model, self.optimizer = found.model, found.optimizer
        return found

    def whole(self) -> dict[str, torch.Tensor]:
        found = {
            name: weight.clone()
            for unit in self.model.units.values()
            for name, weight in fsdp_fn.gather_planes(unit, fsdp_fn.Phase.FORWARD).weights().items()
        }
        return found | self.model.buffers


WORLDS: dict[str, Any] = {"wrapper": Wrapped, "functional": Functional}


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value.detach().clone()
