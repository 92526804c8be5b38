"""Checkpoint match: what a reader wants, held against what is stored, before anything is read.

Promises: pure functions of names, shapes and dtypes. Every difference that would leave a model half loaded,
or loaded with another model's weights, is found here and said with both sides.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

MODEL, OPTIMIZER = "model.", "optimizer.state."
_SHOWN = 5


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded. Raised on every rank; the message names rank and cause."""


@dataclass(frozen=True)
class Stored:
    """What is in a checkpoint: the step, its tensors by name, and small data of the host."""

    step: int
    tensors: Mapping[str, TensorStorageMetadata]
    parameters: frozenset[str]
    host: Mapping[str, Any] = field(default_factory=dict)

    def shape(self, name: str) -> torch.Size:
        """Shape of the whole tensor."""
        return self.tensors[name].size

    def dtype(self, name: str) -> torch.dtype:
        """Dtype as stored."""
        return self.tensors[name].properties.dtype

    def optimizer_names(self) -> list[str]:
        """Names of the optimizer's tensors."""
        return [name for name in self.tensors if name.startswith(OPTIMIZER)]


def differences(wanted: Mapping[str, tuple[torch.Size, torch.dtype]], stored: Stored) -> list[str]:
    """Wanted tensors that are not stored, or are stored in another shape or dtype."""
    found = []
    for name, (shape, dtype) in wanted.items():
        if name not in stored.tensors:
            found.append(f"{_plain(name)} is not in the checkpoint")
        elif stored.shape(name) != shape or stored.dtype(name) != dtype:
            found.append(
                f"{_plain(name)} is {tuple(stored.shape(name))} of {stored.dtype(name)} in the checkpoint, "
                f"expected {tuple(shape)} of {dtype}"
            )
    return found


def strangers(names: Iterable[str], expected: Iterable[str], owner: str) -> list[str]:
    """Stored names that the reader does not know."""
    known = set(expected)
    return [
        f"{_plain(name)} is in the checkpoint, but {owner} has none of that name" for name in names if name not in known
    ]


def check_ranks(ranks: Mapping[str, int]) -> None:
    """Raise ValueError where a unit lies on fewer ranks than others: those outside may hold other values by its names.

    ``ranks``: of each unit that has parameters, how many ranks its mesh has.
    """
    widest = max(ranks.values(), default=0)
    for unit, count in ranks.items():
        if count < widest:
            raise ValueError(
                f"unit {unit!r} is sharded over {count} ranks and others over {widest}: what ranks outside hold under "
                "the same names may differ (experts do), and only one could be stored. Make its parameters DTensors of "
                "the expert axis, or save it by itself"
            )


def raise_for(problems: list[str]) -> None:
    """Raise CheckpointError naming the first few problems, if there are any."""
    if problems:
        more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError("the checkpoint does not fit: " + "; ".join(problems[:_SHOWN]) + more)


def _plain(name: str) -> str:
    if name.startswith(MODEL):
        return f"tensor {name.removeprefix(MODEL)!r}"
    return f"optimizer state {name.removeprefix(OPTIMIZER)!r}"
