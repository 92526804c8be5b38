"""Traced units: the functional path inside ``torch.compile(fullgraph=True)``.

Promises: one all-gather per unit in the forward graph, one all-gather and one reduce-scatter in the backward graph, the
same numbers as eager. No storage is resized here: the full weights are values of the graph, and the gather is marked to
be recomputed, so that the compiler saves the shards and not the weights (selective checkpointing:
``torch.utils.checkpoint.create_selective_checkpoint_contexts``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_fn.binding import BOUND, BufferSlot, UnitTemplate
from fsdp_fn.collectives import gather_planes, reduce_scatter
from fsdp_fn.containers import cast_floating
from fsdp_fn.placement import parameter_placements
from fsdp_fn.planes import Phase, PlaneKind
from fsdp_fn.state import (
    Buffer,
    Gathered,
    ModelState,
    UnitState,
    accumulates_apart,
    needs_planes,
    trainable_segments,
    trainable_tensors,
)
from fsdp_fn.units import copy_buffers


def _recompute_gathers(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The region holds a gather and views of it, none of which may be saved."""
    return CheckpointPolicy.MUST_RECOMPUTE


_context = functools.partial(create_selective_checkpoint_contexts, _recompute_gathers)


GatherFunctions = dict[tuple[bool, bool], type[torch.autograd.Function]]


def gather_functions(unit: UnitState) -> GatherFunctions:
    """A function of the unit's tensors that gives its full weights, for each form that its state may have.

    By (whether the state has carriers, whether it has planes). Made once per unit, so that a trace sees the static
    parts as constants.
    """
    carried = (False, True) if accumulates_apart(unit) else (False,)
    planed = (True,) if needs_planes(unit) else (False,)
    return {(c, p): _gather_function(unit, c, p) for c in carried for p in planed}


def _gather_function(unit: UnitState, carried: bool, planed: bool) -> type[torch.autograd.Function]:
    """A function of main weights, carriers and planes; its backward reduces gradients and gives them to the leaves.

    ``unit`` gives everything but the tensors.
    """
    frozen = [index for index, spec in enumerate(unit.layout.tensors) if not spec.requires_grad]
    trainable, held = trainable_tensors(unit.layout), trainable_segments(unit.layout)
    mains, carriers = len(unit.main.segments), len(held) if carried else 0
    placements = parameter_placements(unit.strategy)
    tensors = unit.layout.tensors
    smallest = min(range(len(trainable)), key=lambda at: tensors[trainable[at]].numel, default=0)
    dtype = unit.precision.compute(tensors[trainable[smallest]].dtype) if trainable else torch.float32
    blank = dataclasses.replace(unit, main=dataclasses.replace(unit.main, segments=()))

    def state_of(given: Sequence[torch.Tensor]) -> UnitState:
        main = dataclasses.replace(blank.main, segments=tuple(given[:mains]))
        planes = None
        if planed:
            plane = tuple(given[mains + carriers : 2 * mains + carriers])
            planes = {PlaneKind.DENSE: Buffer(plane, unit.layout, placements, unit.axes, unit.main.held)}
        return dataclasses.replace(blank, main=main, planes=planes)

    class GatherWeights(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            state = state_of(given)
            gathered = gather_planes(state, Phase.FORWARD)
            weights = tuple(gathered.weight(index) for index in range(len(state.layout.tensors)))
            ctx.mark_non_differentiable(*(weights[index] for index in frozen))
            ctx.save_for_backward(*given, *_firsts(gathered, dtype))
            return weights

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            count = mains + carriers + (mains if planed else 0)
            given, firsts = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
            wanted = [grads[index] for index in trainable]
            if wanted:
                wanted[smallest] = _after(wanted[smallest], firsts)
            reduced = reduce_scatter(wanted, state_of(given), last_microbatch=not carried)
            none = (None,) * mains
            for_planes = none if planed else ()
            if carried:
                return (*none, *reduced.segments, *for_planes)
            return (*(reduced.segment(i) if i in reduced.held else None for i in unit.main.held), *for_planes)

    return GatherWeights


def _firsts(gathered: Gathered, dtype: torch.dtype) -> list[torch.Tensor]:
    """The first element of each gathered buffer, for :func:`_after`.

    Made here, where all is recomputed in backward: what backward made of them alone, the compiler would make in forward
    and save. The clone comes last, for a saved view would keep the whole buffer.
    """
    return [flat[:1].to(dtype).clone() for flat in gathered.planes[PlaneKind.DENSE].segments]


def _after(grad: torch.Tensor, firsts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``grad``, made to depend on the gathered buffers whose first elements are given, which it does not take.

    Backward gathers all of a unit's buffers in one launch, and may read only some. A buffer that nothing depends on
    would lose its wait in the graph, and then the collective would never be let go of.
    """
    return torch.cat([grad.reshape(-1), *firsts])[: grad.numel()].reshape(grad.shape)


class TracedUnit:
    """One unit of one traced application."""

    def __init__(self, template: UnitTemplate, state: UnitState) -> None:
        self.template = template
        self.state = state

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module's forward with the full weights in place."""
        state, precision = self.state, self.state.precision
        args, kwargs = cast_floating((args, kwargs), precision.input_dtype)
        if not state.main.segments:
            return cast_floating(forward(*args, **kwargs), precision.output_dtype)
        gather = self.template.gather_functions[state.carrier is not None, state.planes is not None].apply
        carriers = () if state.carrier is None else state.carrier.segments
        planes = () if state.planes is None else state.planes[PlaneKind.DENSE].segments
        given = (*state.main.segments, *carriers, *planes)
        weights = checkpoint(gather, *given, use_reentrant=False, context_fn=_context)
        owned = self.template.owned
        for parameters, name, index in owned.slots:
            parameters[name] = weights[index]
        output = forward(*args, **kwargs)
        for parameters, name, index in owned.slots:
            parameters[name] = owned.parameters[index]
        for top in owned.tops:
            top.put_back()
        return cast_floating(output, precision.output_dtype)


def apply_traced(
    module: nn.Module,
    templates: tuple[UnitTemplate, ...],
    state: ModelState,
    slots: tuple[BufferSlot, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Output of ``module`` with the weights and buffers of ``state``, and the buffers after it."""
    copies = copy_buffers(state.buffers)
    for slot in slots:
        slot.buffers[slot.key] = copies[slot.name]
    for template in templates:
        template.module.__dict__[BOUND] = TracedUnit(template, state.units[template.name])
    output = module(*args, **kwargs)
    for template in templates:
        template.module.__dict__[BOUND] = None
    buffers = {slot.name: slot.buffers[slot.key] for slot in slots}
    for slot in slots:
        slot.buffers[slot.key] = slot.bare
    return output, buffers
