"""Using the model without training it: held-out loss, and text of its own.

Promises: every rank makes the same number of forward passes (each gathers weights from all), draws no random
numbers but its own generator's, and leaves the training state as it was.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from lm.text import Corpus, held_out_windows
from lm.transformer import next_byte_loss

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Tokens ``(batch, position)`` to logits ``(batch, position, 256)``, without gradients."""


def held_out_loss(logits: Logits, corpus: Corpus, *, batch: int, context: int, device: torch.device) -> float:
    """Mean loss in nats per byte over all held-out windows, each on one rank.

    The same number on every rank.
    """
    tokens, targets = held_out_windows(corpus, context)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total = torch.zeros((), dtype=torch.float64)
    for first in range(0, len(tokens), batch * world_size):
        start = min(first + rank * batch, len(tokens))
        count = len(tokens[start : start + batch])
        # A rank with no window left still takes part in the gathers: it runs one that does not count.
        own = slice(start, start + count) if count else slice(0, 1)
        loss = next_byte_loss(logits(tokens[own].to(device)), targets[own].to(device))
        total += loss.double().cpu() * count
    summed = total.to(device)
    dist.all_reduce(summed)
    return summed.item() / len(tokens)


def generate(
    logits: Logits,
    prompt: bytes,
    *,
    count: int,
    context: int,
    seed: int,
    device: torch.device,
    temperature: float = 0.8,
) -> bytes:
    """``count`` bytes that the model writes after ``prompt`` (not empty), the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    written = list(prompt)
    for _ in range(count):
        tokens = torch.tensor([written[-context:]], device=device)
        scores = logits(tokens)[0, -1].double().cpu()
        chosen = torch.multinomial(torch.softmax(scores / temperature, dim=0), 1, generator=generator)
        written.append(int(chosen))
    return bytes(written[len(prompt) :])


def printable(text: bytes) -> str:
    """Text for a terminal: what is not UTF-8, or would steer the terminal, is replaced."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(mark if mark.isprintable() or mark in "\n\t" else "\N{REPLACEMENT CHARACTER}" for mark in decoded)
