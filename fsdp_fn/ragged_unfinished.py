"""Ragged unfinished: what may be done with a gradient whose sum over a mesh dimension is still to come.

Promises: an operation runs on the ranks' summands only where the sum of its results is its result of the sum: scaling,
adding and copying what is placed alike, new tensors. Everything else raises UnfinishedGradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from fsdp_fn.ragged_placement import RaggedSpec, is_ragged

_ALONE = {"clone", "_to_copy", "zero", "zeros_like", "empty_like", "neg", "detach"}
_WITH_NUMBER = {"mul", "div"}
_WITH_ALIKE = {"add", "sub", "copy"}
_CONSTANT = {"ones_like", "full_like"}


def unfinished_result(
    func: torch._ops.OpOverload, operands: tuple[Any, ...], kwargs: dict[str, Any], spec: RaggedSpec
) -> RaggedSpec:
    """Where the result of an operation lies of which some operand lies as the unfinished ``spec``.

    ``func``: elementwise, or multi-tensor, then for one position of its lists. Raises UnfinishedGradient.
    """
    name = func._schema.name.removeprefix("aten::").removeprefix("_foreach_").removesuffix("_")
    if name in _CONSTANT:
        return spec.finished
    if not _keeps_sums(name, operands, kwargs, spec):
        spec.require_finished(func)
    return spec


def _keeps_sums(name: str, operands: tuple[Any, ...], kwargs: dict[str, Any], spec: RaggedSpec) -> bool:
    dtype = kwargs.get("dtype")
    if any(isinstance(value, torch.Tensor) for value in pytree.tree_leaves(kwargs)):
        return False
    if name in _ALONE:
        return dtype is None or dtype.is_floating_point
    if name in _WITH_NUMBER:
        first, second = operands[:2]
        if name == "mul" and _is_number(first):
            first, second = second, first
        return is_ragged(first) and _is_number(second) and not kwargs.get("rounding_mode")
    return name in _WITH_ALIKE and all(
        is_ragged(value) and value.placements == spec.placements for value in operands[:2]
    )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and not isinstance(value, DTensor)
    return isinstance(value, int | float | complex)
