"""Gradient state: sharded state as the leaves of a graph, and the gradients that a backward left on it.

Promises: pure, but for ``.grad`` of the leaves that :func:`with_gradients` made; weights are never copied.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from fsdp_fn.collectives import finish_gradient
from fsdp_fn.state import Buffer, ModelState, UnitState, accumulates_apart, accumulation_buffer, trainable_segments


def with_gradients(state: ModelState, *, last_microbatch: bool = True) -> ModelState:
    """The same weights as leaves that require gradients, trainable segments only; apart from any earlier graph.

    Without ``last_microbatch`` the leaves take gradients as the strategy sums them over microbatches: where those are
    placed or typed otherwise than the weights, on carriers, leaves that hold no memory of their own. Sums of them are
    completed by :func:`finish_gradients`.
    """

    def leaves(unit: UnitState) -> UnitState:
        if last_microbatch or not accumulates_apart(unit):
            return _map_main(unit, lambda flat, trainable: flat.detach().requires_grad_(trainable))
        device = unit.home_device
        carrier = accumulation_buffer(
            unit, lambda size, dtype: torch.zeros((), dtype=dtype, device=device).expand(size).requires_grad_()
        )
        return dataclasses.replace(_detached(unit), carrier=carrier)

    return _map_units(state, lambda unit: leaves(dataclasses.replace(unit, carrier=None)))


def without_gradients(state: ModelState) -> ModelState:
    """The same weights, apart from any graph."""
    return _map_units(state, lambda unit: dataclasses.replace(_detached(unit), carrier=None))


def gradients_of(state: ModelState) -> dict[str, Buffer]:
    """Gradients that ``loss.backward()`` left on the leaves of a state from :func:`with_gradients`; zeros for none."""
    gradients = {}
    for name, unit in state.units.items():
        leaves, held = unit.main if unit.carrier is None else unit.carrier, trainable_segments(unit.layout)
        flats = []
        for index in held:
            leaf = leaves.segment(index)
            flats.append(
                torch.zeros_like(leaf, memory_format=torch.contiguous_format) if leaf.grad is None else leaf.grad
            )
        gradients[name] = dataclasses.replace(leaves, segments=tuple(flats), held=held)
    return gradients


def finish_gradients(state: ModelState, gradients: Mapping[str, Buffer]) -> dict[str, Buffer]:
    """Sums over microbatches, completed as the optimizer needs them. All ranks must call.

    ``gradients``: from backward passes without ``last_microbatch``, or their sum. Where a strategy leaves nothing to
    complete, they are given back as they are.
    """
    if list(gradients) != list(state.units):
        raise ValueError(f"finish_gradients: expected the units {list(state.units)}, got {list(gradients)}")
    return {name: finish_gradient(gradients[name], unit) for name, unit in state.units.items()}


def add_gradients(first: dict[str, Buffer], second: dict[str, Buffer]) -> dict[str, Buffer]:
    """Sum of two microbatches' gradients, in new buffers."""
    if list(first) != list(second):
        raise ValueError(f"add_gradients: expected the same units, got {list(first)} and {list(second)}")
    for name, buffer in first.items():
        other = second[name]
        if (buffer.layout, buffer.axes, buffer.held) != (other.layout, other.axes, other.held):
            raise ValueError(
                f"add_gradients: unit {name!r} is laid out differently in the two; they must come from one shard()"
            )
        if buffer.placements != other.placements:
            raise ValueError(
                f"add_gradients: unit {name!r} has one gradient placed {buffer.placements} and one {other.placements}: "
                "add what came without last_microbatch, then finish_gradients"
            )
    return {
        name: dataclasses.replace(
            buffer, segments=tuple(a + b for a, b in zip(buffer.segments, second[name].segments, strict=True))
        )
        for name, buffer in first.items()
    }


def _map_units(state: ModelState, function: Callable[[UnitState], UnitState]) -> ModelState:
    return dataclasses.replace(state, units={name: function(unit) for name, unit in state.units.items()})


def _map_main(unit: UnitState, function: Callable[[torch.Tensor, bool], torch.Tensor]) -> UnitState:
    segments = unit.layout.segments
    pairs = zip(unit.main.held, unit.main.segments, strict=True)
    flats = tuple(function(flat, segments[index].requires_grad) for index, flat in pairs)
    return dataclasses.replace(unit, main=dataclasses.replace(unit.main, segments=flats))


def _detached(unit: UnitState) -> UnitState:
    return _map_main(unit, lambda flat, trainable: flat.detach())
