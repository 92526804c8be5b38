"""Binding: one application of a template to a state, eager.

Promises: full weights, their storage and every count live in the bound units, which ``apply`` makes and which the graph
of its output alone keeps alive; two applications share nothing. The template's modules know their bound units while its
forward or its backward runs, and are bare (meta tensors) in between.
"""

from __future__ import annotations

import re
import traceback
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_fn.agreement import AgreedUnit
from fsdp_fn.bracket import Unit
from fsdp_fn.collectives import reduce_scatter
from fsdp_fn.layout import Layout
from fsdp_fn.passes import Bracket
from fsdp_fn.state import UnitState, reduced_bytes, trainable_tensors
from fsdp_fn.units import OwnedParameters, Setting, is_under
from fsdp_fn.weights import weights_of

BOUND = "_fsdp_bound"
"""Attribute under which a template's module finds its bound unit while there is one."""


@dataclass(frozen=True, eq=False)
class UnitTemplate:
    """One unit of a template: its module, its weights' slots on the bare modules, how it is laid out and sharded."""

    name: str
    module: nn.Module
    owned: OwnedParameters
    layout: Layout
    setting: Setting
    gather_functions: dict[tuple[bool, bool], type[torch.autograd.Function]]
    agreed: AgreedUnit | None = None


@dataclass(frozen=True, eq=False)
class BufferSlot:
    """Where a module buffer stands: its full name, the dict that holds it, its name there, what it holds when bare."""

    name: str
    buffers: dict[str, Any]
    key: str
    bare: torch.Tensor


class BoundUnit(Unit):
    """One unit of one application."""

    def __init__(self, template: UnitTemplate, state: UnitState, bracket: Bracket) -> None:
        self.state = state
        self._module = weakref.ref(template.module)  # see ``escapes.Top``
        self._leaves = state.main if state.carrier is None else state.carrier
        # Only a leaf that wants a gradient makes its weights part of the graph.
        pairs = zip(self._leaves.held, self._leaves.segments, strict=True)
        self._wanted = tuple(index for index, flat in pairs if flat.requires_grad)
        location = state.layout.location
        differentiable = [i for i in trainable_tensors(state.layout) if location(i)[0] in self._wanted]
        owned = template.owned
        super().__init__(
            state.name,
            owned.slots,
            owned.parameters,
            owned.modules,
            weights_of(state, template.setting.policy),
            differentiable,
            bracket,
            state.compute_device,
            state.precision,
            template.setting.policy,
            self._leaves.segments,
            owned.tops,
            reduced_bytes(state),
            template.agreed,
        )

    def bound_here(self) -> bool:
        """Whether the module is this application's now."""
        module = self._module()
        return module is not None and module.__dict__.get(BOUND) is self

    def put_on(self) -> None:
        """Make the module this application's."""
        module = self._module()
        if module is not None:
            module.__dict__[BOUND] = self

    def take_off(self) -> None:
        """Make the module nobody's."""
        module = self._module()
        if module is not None:
            module.__dict__.pop(BOUND, None)

    def deliver(self, grads: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Reduce, and give each leaf its gradient through autograd: finished, or as the carrier takes it."""
        if not self._wanted:
            return (None,) * len(self.shards)
        by_tensor = dict(zip(self.differentiable, grads, strict=True))
        wanted = [by_tensor.get(i) for i in trainable_tensors(self.state.layout)]
        reduced = reduce_scatter(wanted, self.state, last_microbatch=self.state.carrier is None)
        return tuple(reduced.segment(i) if i in self._wanted else None for i in self._leaves.held)


class BoundRoot(BoundUnit):
    """The root's unit. It holds the others, and puts all of them on the modules for forward and for backward."""

    def __init__(
        self,
        template: UnitTemplate,
        state: UnitState,
        bracket: Bracket,
        others: Iterable[BoundUnit],
        slots: tuple[BufferSlot, ...],
        buffers: dict[str, torch.Tensor],
    ) -> None:
        super().__init__(template, state, bracket)
        self.others = tuple(others)
        self.buffer_slots = slots
        self.buffers = buffers

    def bind(self) -> None:
        """Put the units and the buffers on the template's modules, in the place of any that are there."""
        for slot in self.buffer_slots:
            slot.buffers[slot.key] = self.buffers[slot.name]
        for unit in (self, *self.others):
            unit.put_on()

    def unbind(self) -> None:
        """Take them off again, and keep the buffers as the modules left them.

        Not where another application has taken their place since, as in a backward through two of them.
        """
        if not self.bound_here():
            return
        # Without graphs, for those lead back here.
        graphless = {id(held): held.detach() for s in self.buffer_slots if (held := s.buffers[s.key]).requires_grad}
        self.buffers = {s.name: graphless.get(id(held := s.buffers[s.key]), held) for s in self.buffer_slots}
        for slot in self.buffer_slots:
            slot.buffers[slot.key] = slot.bare
        for unit in (self, *self.others):
            unit.take_off()

    def before_backward(self) -> None:
        """A checkpointed unit runs its forward again in backward, and finds its weights then too."""
        self.bind()

    def after_backward(self) -> None:
        """The template is bare between uses."""
        self.unbind()


@contextmanager
def naming_bare_weights(root: nn.Module, units: Sequence[UnitTemplate]) -> Iterator[None]:
    """An operation that meets a bare weight is refused by torch, for its device: say whose weight it is."""
    try:
        yield
    except RuntimeError as error:
        names = {id(module): name for name, module in root.named_modules()}
        frames = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
        readers = [names[id(module)] for module in frames if isinstance(module, nn.Module) and id(module) in names]
        if not re.search(r"\bmeta\b", str(error)) or not readers:
            raise
        reader = readers[-1]
        # Its own unit's weights are there, unless one of the unit's parts is called from outside.
        below = [unit for unit in units if unit.name and unit.name != reader and is_under(unit.name, reader)]
        unit = below[0] if below else max((u for u in units if is_under(reader, u.name)), key=lambda u: len(u.name))
        read = [spec.name for spec in unit.layout.tensors if is_under(spec.name, reader)]
        raise RuntimeError(
            f"apply: module {reader!r} was to compute with parameters of unit {unit.name!r}, {read}, while that unit "
            "is not running: compute with them in the unit's forward, or make a unit of a module around both"
        ) from error
