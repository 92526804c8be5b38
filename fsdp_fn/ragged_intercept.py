"""Intercept: ragged operations on torch before 2.13, which ignores the dispatch of a DTensor subclass.

Promises: every operation that is called on a ragged tensor from Python takes the same way as on later
releases (pytorch/pytorch#177878 is why it does not by itself). Gradients of ragged tensors, which autograd's
engine would add up past any interception, are refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_fn.ragged_ops import run
from fsdp_fn.ragged_placement import is_ragged
from fsdp_fn.ragged_whole import Make

DISPATCHES_SUBCLASSES = torch.__version__ >= "2.13"
"""Whether torch lets a DTensor subclass define its operations, so that no interception is needed."""


class _RaggedMode(TorchDispatchMode):
    def __init__(self, make: Make) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._make = make

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(is_ragged, pytree.tree_leaves((args, kwargs)))):
            return run(func, args, kwargs, self._make)
        return func(*args, **kwargs)


def intercept(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], make: Make) -> Any:
    """Call a function of torch's Python interface so that ragged operations in it are run by ``ragged_ops``.

    Raises NotImplementedError where autograd would record the call.
    """
    if getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__"):
        # An attribute of the tensor itself (grad, requires_grad, dtype…) is no operation on its rows.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass(), _RaggedMode(make):
        result = func(*args, **kwargs)
    if any(isinstance(value, torch.Tensor) and value.grad_fn is not None for value in pytree.tree_leaves(result)):
        refuse_gradient(func)
    return result


def refuse_gradient(what: Any) -> None:
    """Raise NotImplementedError on a torch that cannot bring a gradient to a ragged DTensor."""
    if not DISPATCHES_SUBCLASSES:
        raise NotImplementedError(
            f"{what}: torch {torch.__version__} cannot bring autograd's gradients to ragged DTensors, 2.13 "
            "can; "
            "use torch.no_grad()"
        )
