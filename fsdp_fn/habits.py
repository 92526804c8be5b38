"""Habits: what a live unit was told to do besides its policy, as a frozen value that outlives a new layout.

Promises: habits are data. Each of them is honoured from the moment at which the unit takes them up.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fsdp_fn.gathering import Launch
from fsdp_fn.reducing import Scatter
from fsdp_fn.state import Axis


@dataclass(frozen=True)
class Habits:
    """The defaults are what a unit does that was told nothing.

    ``reshards_after_forward``: in place of the policy's; None for that.
    ``holds_back``: backward passes leave sums of gradients, as between microbatches.
    ``keeps_after_backward``: full weights stay until they change or are resharded.
    ``ahead``: modules whose units gather in backward when this one's begins.
    ``on_reduced``: called with the flat tensors of finished gradients, which it may change.
    ``gather``, ``scatter``: collectives in place of the usual ones.
    ``reduced_over``: the unit's axes over groups of their own; None for those that gathers use.
    """

    reshards_after_forward: bool | None = None
    holds_back: bool = False
    keeps_after_backward: bool = False
    ahead: tuple[weakref.ref[nn.Module], ...] = ()
    on_reduced: Callable[[list[torch.Tensor]], None] | None = None
    gather: Launch | None = None
    scatter: Scatter | None = None
    reduced_over: tuple[Axis, ...] | None = None
