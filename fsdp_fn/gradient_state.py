"""Gradient state: sharded state as the leaves of a graph, and the gradients that a backward left on it.

Promises: pure, but for ``.grad`` of the leaves that :func:`with_gradients` made; weights are never copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from fsdp_fn.placement import Sharded
from fsdp_fn.state import Buffer, ModelState, trainable_segments


def with_gradients(state: ModelState) -> ModelState:
    """The same weights as leaves that require gradients, trainable segments only; apart from any earlier graph."""
    return _map_main(state, lambda flat, trainable: flat.detach().requires_grad_(trainable))


def without_gradients(state: ModelState) -> ModelState:
    """The same weights, apart from any graph."""
    return _map_main(state, lambda flat, trainable: flat.detach())


def gradients_of(state: ModelState) -> dict[str, Buffer]:
    """Gradients that ``loss.backward()`` left on the shards of a state from :func:`with_gradients`; zeros for none."""
    return _as_buffers(state, tuple(flat.grad for flat in _gradient_inputs(state)))


def add_gradients(first: dict[str, Buffer], second: dict[str, Buffer]) -> dict[str, Buffer]:
    """Sum of two microbatches' gradients, in new buffers."""
    if list(first) != list(second):
        raise ValueError(f"add_gradients: expected the same units, got {list(first)} and {list(second)}")
    for name, buffer in first.items():
        other = second[name]
        if (buffer.layout, buffer.axis, buffer.held) != (other.layout, other.axis, other.held):
            raise ValueError(
                f"add_gradients: unit {name!r} is laid out differently in the two; they must come from one shard()"
            )
    return {
        name: dataclasses.replace(
            buffer, segments=tuple(torch._foreach_add(list(buffer.segments), list(second[name].segments)))
        )
        for name, buffer in first.items()
    }


def _map_main(state: ModelState, function: Callable[[torch.Tensor, bool], torch.Tensor]) -> ModelState:
    units = {}
    for name, unit in state.units.items():
        segments = unit.layout.segments
        pairs = zip(unit.main.held, unit.main.segments, strict=True)
        flats = tuple(function(flat, segments[index].requires_grad) for index, flat in pairs)
        units[name] = dataclasses.replace(unit, main=dataclasses.replace(unit.main, segments=flats))
    return dataclasses.replace(state, units=units)


def _gradient_inputs(state: ModelState) -> list[torch.Tensor]:
    return [unit.main.segment(index) for unit in state.units.values() for index in trainable_segments(unit.layout)]


def _as_buffers(state: ModelState, found: Sequence[torch.Tensor | None]) -> dict[str, Buffer]:
    remaining = iter(found)
    gradients = {}
    for name, unit in state.units.items():
        held = trainable_segments(unit.layout)
        flats = []
        for index in held:
            grad = next(remaining)
            flats.append(torch.zeros_like(unit.main.segment(index)) if grad is None else grad)
        gradients[name] = Buffer(tuple(flats), unit.layout, Sharded(unit.layout.granularity), unit.axis, held)
    return gradients
