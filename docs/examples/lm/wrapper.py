"""Training through the wrapper: modules are sharded in place, and the rest is the usual PyTorch loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fsdp_fn
from lm.settings import Settings
from lm.training import BETAS, EPSILON, WEIGHT_DECAY, Place, Restored, build_model
from lm.transformer import next_byte_loss


class WrapperTraining:
    """``fully_shard`` on each block and on the root, and ``torch.optim.AdamW``.

    See ``Training`` for the methods.
    """

    def __init__(self, settings: Settings, place: Place) -> None:
        self.model = build_model(settings, place)
        for block in self.model.blocks:
            fsdp_fn.fully_shard(block, mesh=place.mesh, precision=place.precision)
        fsdp_fn.fully_shard(self.model, mesh=place.mesh, precision=place.precision)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=settings.lr, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY
        )
        self.log = fsdp_fn.EventLog()

    def step(self, tokens: torch.Tensor, targets: torch.Tensor, learning_rate: float) -> torch.Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        with fsdp_fn.record_events(self.model) as self.log:
            loss = next_byte_loss(self.model(tokens), targets)
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens)
        return logits

    def save(self, root: Path, step: int, extra: dict[str, Any]) -> Path:
        return fsdp_fn.save_checkpoint(root, step, self.model, self.optimizer, extra=extra)

    def load(self, checkpoint: Path) -> Restored:
        found = fsdp_fn.load_checkpoint(checkpoint, self.model, self.optimizer)
        return Restored(found.step, found.extra)
