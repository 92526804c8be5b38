"""Boundary: the two autograd functions that a unit's forward runs between.

Promises: nothing of a unit's own backward runs before the backward of Close, nothing after that of Open.

[Note: Open and Close] ``Open`` gives the weights to the module's forward, and a token; ``Close`` takes the token and
the outputs. Autograd runs ready nodes in the reverse order of their creation, so the backward of Close comes before
every backward of the unit's own operations, and that of Open after all of them, with the gradients of all weights at
once. Open also takes an anchor, a scalar that always requires a gradient, so that it runs in every full backward that
entered Close, even where all weights are frozen or none is reached. The token has a gradient (a constant zero), for an
undefined one would send Open to the CPU's queue and out of that order.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from fsdp_fn.escapes import aliases
from fsdp_fn.passes import UnitCall


class Open(torch.autograd.Function):
    """Anchor (and shards) in, token and differentiable weights out; see [Note: Open and Close]."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, call: UnitCall, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        unit = call.unit
        views = unit.weights.views
        return (anchor.detach(), *(views[index].detach() for index in unit.differentiable))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: UnitCall = ctx.call
        return (None, None, *call.unit.end_backward(call, list(grads[1:])))


@functools.lru_cache(maxsize=4096)
def open_of(label: str) -> type[Open]:
    """Open under a name that autograd's own refusal of a released weight will quote; see runtime.py's second note."""
    return type(f"the released weights of {label} (reached past the unit's outputs)", (Open,), {})


class Close(torch.autograd.Function):
    """Token and outputs in, the same outputs out; see [Note: Open and Close].

    ``detach`` and not a view: a caller may change an output in place. But where outputs share their storage with one
    another or with an input, a change of one is a change of the others, which their histories would not know of: those
    are views, of which autograd refuses changes in place.
    """

    @staticmethod
    def forward(
        ctx: Any, token: torch.Tensor, call: UnitCall, shared: frozenset[int], *outputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple(o.view_as(o) if shared and aliases(o, shared) else o.detach() for o in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: UnitCall = ctx.call
        call.unit.enter_backward(call)
        return (call.unit.zero, None, None, *grads)
