"""Modules of random models, built from specs. Plain PyTorch, with no knowledge of sharding.

Promises: every module but the root maps a value of shape (rows, width) and a turn, which says how often what is called,
to an output that holds such values. What it returns is fresh: a caller may change it in place.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from models import VOCABULARY, maybe_checkpoint
from random_bodies import MAKE_BODY
from random_specs import BranchSpec, CallSpec, LeafSpec, ModelSpec, NodeSpec, SameSpec
from torch import nn
from torch.nn import functional

Tensor = torch.Tensor


@dataclass
class Out:
    y: Tensor
    nothing: None = None
    note: str = "kept"


class Pair(NamedTuple):
    y: Tensor
    note: str


def pack(y: Tensor, x: Tensor, how: str) -> Any:
    """``y``, a module's result for the input ``x``, as one of ``OUTPUTS``."""
    match how:
        case "tuple":
            return (None, y, 3)
        case "dict":
            return {"note": "kept", "y": [y]}
        case "dataclass":
            return Out(y)
        case "named tuple":
            return Pair(y, "kept")
        case "two tensors":
            return (y, 0.5 * y)
        case "one tensor twice":
            return (y, y)
        case "view":
            return torch.cat([y, y], 1)[:, y.shape[1] :]
        case "beside the input":
            return (x, y)
        case "beside a detached one":
            return (y.detach(), y)
        case _:
            return y


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor in ``value``, in order."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        return [found for field in fields(value) for found in tensors_in(getattr(value, field.name))]
    if isinstance(value, dict):
        return [found for item in value.values() for found in tensors_in(item)]
    if isinstance(value, (tuple, list)):
        return [found for item in value for found in tensors_in(item)]
    return []


def take(value: Any, which: str) -> Tensor:
    """The first or last tensor in ``value``, or the mean of all."""
    found = tensors_in(value)
    return found[0] if which == "first" else found[-1] if which == "last" else sum(found[1:], found[0]) / len(found)


class Leaf(nn.Module):
    """A body, what is kept of it, and how it is returned."""

    def __init__(self, spec: LeafSpec, width: int) -> None:
        super().__init__()
        self.body = MAKE_BODY[spec.body](width, spec.size)
        self.output, self.inside, self.keeps = spec.output, spec.inside, spec.keeps
        self.kept: Any = None

    def forward(self, x: Tensor, turn: int) -> Any:
        hidden = torch.tanh(maybe_checkpoint(partial(self.body, turn=turn), x, self.inside))
        if self.keeps:
            self.keep(hidden.square().mean())
        return pack(0.5 * x + hidden, x, self.output)

    def keep(self, loss: Tensor) -> None:
        match self.keeps:
            case "attribute":
                self.kept = loss
            case "list":
                self.kept = [None, loss]
            case "dict":
                self.kept = {"first": {"second": loss}}
            case "tuple":
                self.kept = (loss, 1)


class Branch(nn.Module):
    """Calls its children, as its calls say."""

    def __init__(self, spec: BranchSpec, width: int, children: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(children)
        self.calls, self.output, self.inside = spec.calls, spec.output, spec.inside
        self.scale = nn.Parameter(torch.rand(width) + 0.25) if spec.scaled else None

    def forward(self, x: Tensor, turn: int) -> Any:
        return pack(maybe_checkpoint(partial(self.run, turn=turn), x, self.inside), x, self.output)

    def run(self, x: Tensor, turn: int) -> Tensor:
        value = x if self.scale is None else x * self.scale
        for call in self.calls:
            for _ in range(call.times[turn % len(call.times)]):
                value = self.call(call, value, turn)
        return 0.9 * value

    def call(self, call: CallSpec, value: Tensor, turn: int) -> Tensor:
        child = self.parts[call.child]

        def run(x: Tensor) -> Tensor:
            return take(child(x=x, turn=turn) if call.keyword else child(x, turn), call.take)

        y = maybe_checkpoint(run, value.detach() if call.detached else value, call.around)
        if call.in_place:
            y.mul_(0.75)
        return {"next": y, "added": 0.5 * (value + y), "dropped": value}[call.result]


class Root(nn.Module):
    """Embedding or vectors, trunk, head; adds up what leaves keep."""

    def __init__(self, spec: ModelSpec, trunk: nn.Module) -> None:
        super().__init__()
        self.front = nn.Embedding(VOCABULARY, spec.width) if spec.inputs == "tokens" else None
        self.trunk = trunk
        self.head = nn.Linear(spec.width, 3) if spec.head else None
        self.scale = nn.Parameter(torch.rand(spec.width)) if spec.scaled else None

    def forward(self, x: Tensor, *, turn: int) -> dict[str, Tensor | None]:
        leaves = [module for module in self.modules() if isinstance(module, Leaf)]
        for leaf in leaves:
            leaf.kept = None
        value = x if self.front is None else self.front(x)
        value = value if self.scale is None else value * self.scale
        value = take(self.trunk(value, turn), "all")
        value = functional.silu(value) if self.head is None else self.head(value)
        kept = [loss for leaf in leaves for loss in tensors_in(leaf.kept)]
        return {"y": value, "kept": sum(kept[1:], kept[0]) if kept else None}


def build(spec: ModelSpec, seed: int, dtype: torch.dtype) -> tuple[Root, list[str]]:
    """The model, with the same weights on every rank, and the names of its units but the root, children first."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            building = _Building(spec.width)
            model = Root(spec, building.node(spec.trunk))
    finally:
        torch.set_default_dtype(before)
    units = [*building.units, *(part for name in spec.units if (part := getattr(model, name)) is not None)]
    wanted = {id(unit) for unit in units if any(True for _ in unit.parameters())}
    return model, [name for name, module in _children_first(model, "", {}) if id(module) in wanted]


class _Building:
    """``built``: modules by number, in the order in which they were begun; ``units``: those that are units."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.built: dict[int, nn.Module] = {}
        self.units: list[nn.Module] = []
        self.begun = 0

    def node(self, spec: NodeSpec) -> nn.Module:
        if isinstance(spec, SameSpec):
            return self.built[spec.of]
        number, self.begun = self.begun, self.begun + 1
        made: nn.Module
        if isinstance(spec, LeafSpec):
            leaf = made = Leaf(spec, self.width)
            apart = leaf.body.children() if leaf.body.layers_apart else ()
            parts = {"leaf": [leaf], "body": [leaf.body], "layers": list(apart)}
            self.units += [module for part in spec.units for module in parts[part]]
        else:
            made = Branch(spec, self.width, [self.node(child) for child in spec.children])
            self.units += [made] * spec.unit
        self.built[number] = made
        return made


def _children_first(module: nn.Module, path: str, seen: dict[int, None]) -> list[tuple[str, nn.Module]]:
    if id(module) in seen:
        return []
    seen[id(module)] = None
    found = []
    for name, child in module.named_children():
        found += _children_first(child, f"{path}.{name}" if path else name, seen)
    return [*found, (path, module)]
