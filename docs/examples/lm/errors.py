"""Mistakes of the person who runs the job: one error type, raised on every rank or on none.

Promises: a mistake seen by one rank only (its file system lacks the text, say) ends every rank with the same
message, before any collective of the training itself, so that none is left waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


class JobError(Exception):
    """Something that the user gave cannot be used; the message says what, and what to do."""


def on_every_rank(attempt: Callable[[], Result]) -> Result:
    """Result of ``attempt()`` on this rank; JobError on every rank where it raised JobError on any.

    A collective: every rank of the default process group calls it.
    """
    result: Result | None = None
    message: str | None = None
    try:
        result = attempt()
    except JobError as error:
        message = str(error)
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    found = [(rank, text) for rank, text in enumerate(messages) if text is not None]
    if found and len(found) < len(messages):
        ranks = ", ".join(str(rank) for rank, _ in found)
        raise JobError(f"{found[0][1]} (seen by rank {ranks} of {len(messages)})")
    if message is not None:
        raise JobError(message)
    return result  # type: ignore[return-value]
