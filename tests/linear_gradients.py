"""A sharded linear layer whose gradient is one number everywhere, known beforehand, and exact.

Promises: rank ``r`` gives inputs of ``r + 1`` times a size, so that the mean over ranks shows the number of ranks, and
sizes that are powers of ten show each backward apart. All ranks call.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from comparison import local
from torch import nn

import fsdp_fn


def wrap_linear(rows: int = 2, dtype: torch.dtype = torch.float32) -> nn.Module:
    return fsdp_fn.fully_shard(nn.Linear(2, rows, bias=False).to(dtype))


def backward(module: nn.Module, size: float = 1.0, *names: str) -> None:
    """Every element of the gradient of a linear layer is then ``size * mean()``."""
    dtype = next(module.parameters()).dtype
    module(torch.full((1, 2), (dist.get_rank() + 1) * size, dtype=dtype), *names).sum().backward()


def mean() -> float:
    """Mean over ranks of 1, 2, …: 1.5 at two ranks, 2.0 at three, 2.5 at four."""
    return (dist.get_world_size() + 1) / 2


def check_filled(tensor: torch.Tensor | None, value: float, what: str) -> None:
    """Every element of every rank's part is exactly ``value``."""
    assert tensor is not None, f"{what}: None, expected {value}"
    found = local(tensor)
    assert (found == value).all(), f"{what}: {found.unique().tolist()}, expected {value}"
