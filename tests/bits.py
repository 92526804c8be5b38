"""What a test takes down of a pytree's tensors before a call, to compare it to the bit afterwards.

Promises: bytes are compared, so zeros have signs and NaN equals itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Every tensor of a pytree, in its order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def snapshot(value: Any) -> list[torch.Tensor]:
    """Copies of all tensors of a pytree."""
    return [tensor.detach().clone() for tensor in tensors_of(value)]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both have the same dtype, shape and bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def check_same_bits(value: Any, before: list[torch.Tensor], what: str) -> None:
    """The tensors of ``value`` are, to the bit, those of a snapshot."""
    after = tensors_of(value)
    assert len(after) == len(before), f"{what}: {len(after)} tensors, expected {len(before)}"
    for position, (one, other) in enumerate(zip(after, before, strict=True)):
        assert same_bits(one, other), f"{what}: tensor {position} of {len(after)} differs: {one}, expected {other}"
