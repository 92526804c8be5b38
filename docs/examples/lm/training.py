"""What the job asks of a way to train: the same few verbs for the wrapper and for the functional path.

Promises: this is all that differs between the two modes; the job's loop knows neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_fn import EventLog, PrecisionPolicy
from lm.settings import Settings
from lm.transformer import Transformer

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
EPSILON = 1e-8


@dataclass(frozen=True)
class Restored:
    """What a checkpoint said.

    The step it was made after, and what the job had put beside model and optimizer.
    """

    step: int
    extra: Mapping[str, Any]


class Training(Protocol):
    """A sharded model with its optimizer.

    Every method is called by every rank; tokens are ``(batch, position)``.
    """

    log: EventLog
    """Events of the last step."""

    def step(self, tokens: torch.Tensor, targets: torch.Tensor, learning_rate: float) -> torch.Tensor:
        """Train on this rank's batch; its loss before the update, a scalar of this rank's own."""

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Forward without gradients: ``(batch, position, 256)``."""

    def save(self, root: Path, step: int, extra: dict[str, Any]) -> Path:
        """Write a checkpoint of ``step`` under ``root``; its folder."""

    def load(self, checkpoint: Path) -> Restored:
        """Take weights and optimizer state from ``checkpoint``."""


@dataclass(frozen=True)
class Place:
    """Where a process trains: its device, and the mesh of all of them."""

    device: torch.device
    mesh: DeviceMesh

    @property
    def precision(self) -> PrecisionPolicy:
        """float32 main weights; computed with in bfloat16 on a GPU, as they are on a CPU."""
        return PrecisionPolicy(compute_dtype=torch.bfloat16 if self.device.type == "cuda" else None)


def make_place(device: torch.device) -> Place:
    """The place of this process; the default process group must be there."""
    return Place(device, init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",)))


def build_model(settings: Settings, place: Place) -> Transformer:
    """The model, not yet sharded: the same weights on every rank, in either mode."""
    model = Transformer(settings.dim, settings.layers, settings.heads, seed=settings.seed)
    return model.to(place.device)
