"""Crossing: units whose forward computes on the host as well as on the mesh's device.

Promises: their weights are there for as long as any of their backward may run, and no gradient of theirs is lost.

[Note: order of backward] Autograd has a thread for each device, and orders what is ready in one of them alone. On one
device Open's backward (see ``boundary``), made before all else of its unit, runs after all else; where some of that
waits for the host, Open's may come first. So a unit whose graph is seen to cross keeps its weights until the whole
backward pass ends. What a reentrant checkpoint hides is not seen: a gradient that comes after Open's backward is then
refused, by the unit's name.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fsdp_fn.bracket import Unit


def crosses_devices(outputs: Iterable[torch.Tensor], token: torch.Tensor, device: torch.device) -> bool:
    """Whether a node between ``outputs`` and ``token`` is on another type of device than ``device``."""
    assert token.grad_fn is not None
    first: int = token.grad_fn._sequence_nr()
    waiting: list[Any] = [output.grad_fn for output in outputs]
    seen = set()
    while waiting:
        node = waiting.pop()
        # Nodes from before are not of the unit, and leaves, numbered last, lead no further.
        if node is None or node in seen or node._sequence_nr() <= first:
            continue
        seen.add(node)
        if any(metadata.device.type != device.type for metadata in node._input_metadata):
            return True
        waiting += [following for following, _ in node.next_functions]
    return False


def refuse_late_gradients(unit: Unit) -> None:
    """Have a gradient that reaches one of the unit's leaves after its reduction raise RuntimeError."""
    reference = weakref.ref(unit)

    def arrived(leaf: torch.Tensor) -> None:
        late = reference()
        if late is not None and not late.awaits_gradients:
            leaf.grad = None
            raise RuntimeError(
                f"{late.label}: a gradient of shape {tuple(leaf.shape)} came after the unit's gradients were reduced: "
                "its forward computes on another device inside a reentrant checkpoint, and backward does not wait for "
                "that; use use_reentrant=False"
            )

    for index in unit.differentiable:
        unit.leaves[index].register_post_accumulate_grad_hook(arrived)
