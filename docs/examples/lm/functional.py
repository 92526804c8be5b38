"""Training through the functional path: state goes in, new state comes out, and nothing else is changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fsdp_fn
from lm.settings import Settings
from lm.training import BETAS, EPSILON, WEIGHT_DECAY, Place, Restored, build_model
from lm.transformer import Block, next_byte_loss


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The function that is differentiated: nats per byte, a scalar."""
    return next_byte_loss(model(tokens), targets)


class FunctionalTraining:
    """``shard``, ``value_and_grad`` and the library's ``AdamW``; see ``Training`` for the methods.

    The two states are the only things that change here from step to step.
    """

    def __init__(self, settings: Settings, place: Place) -> None:
        self.log = fsdp_fn.EventLog()
        self.template, self.state = fsdp_fn.shard(
            build_model(settings, place), place.mesh, units=[Block], precision=place.precision
        )
        self.value_and_grad = fsdp_fn.value_and_grad(fsdp_fn.recording(self.template, self.log), loss_of)
        self.optimizer = fsdp_fn.AdamW(lr=settings.lr, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY)
        self.optimizer_state = self.optimizer.init(self.state)

    def step(self, tokens: torch.Tensor, targets: torch.Tensor, learning_rate: float) -> torch.Tensor:
        self.log.clear()
        loss, gradients, state = self.value_and_grad(self.state, tokens, targets)
        self.state, self.optimizer_state = self.optimizer.update(
            gradients, self.optimizer_state, state, lr=learning_rate
        )
        return loss.detach()

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        output, _ = fsdp_fn.apply(self.template, self.state, tokens)
        logits: torch.Tensor = output
        return logits

    def save(self, root: Path, step: int, extra: dict[str, Any]) -> Path:
        return fsdp_fn.save_checkpoint(root, step, self.state, self.optimizer_state, extra=extra)

    def load(self, checkpoint: Path) -> Restored:
        found = fsdp_fn.load_checkpoint(checkpoint, self.state, self.optimizer_state)
        self.state, self.optimizer_state = found.model, found.optimizer
        return Restored(found.step, found.extra)
