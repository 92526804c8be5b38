"""Outputs of any shape keep their type and their graph: tuples, dicts, named tuples, dataclasses, None.

After pytorch/pytorch#173415, #153077 and #77812: a tensor that is not found in an output is one whose
backward reads released weights.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from comparison import PATHS, check_equal, check_named, plain_gradients
from models import WIDTH, build, vectors
from torch import nn

from harness import run_distributed


@dataclasses.dataclass
class Out:
    y: torch.Tensor
    aux: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenOut:
    y: torch.Tensor
    aux: object = None


@dataclasses.dataclass
class ListOut:
    ys: list[torch.Tensor]
    note: str = "kept"


@dataclasses.dataclass
class DerivedOut:
    """Neither its constructor nor ``dataclasses.replace`` can rebuild it."""

    y: torch.Tensor
    doubled: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.doubled = self.y * 2


class Pair(NamedTuple):
    y: torch.Tensor
    name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class In:
    x: torch.Tensor
    scale: float | None = None


AUX: dict[str, object] = {"none": None, "n": 3}
WRAP: dict[str, Callable[[torch.Tensor], Any]] = {
    "dataclass": lambda y: Out(y, AUX),
    "frozen_dataclass": lambda y: FrozenOut(y, AUX),
    "dataclass_of_a_list": lambda y: ListOut([y, y + 1]),
    "dataclass_with_a_derived_field": DerivedOut,
    "nested_dataclass": lambda y: Out(y.detach(), FrozenOut(y, (None, Pair(y * 2, "n")))),
    "named_tuple": lambda y: Pair(y, "n"),
    "tuple_with_none": lambda y: (None, y, 3, "s"),
    "dict_of_lists": lambda y: {"a": [y, None], "b": {"c": (y + 1,)}},
    "ordered_dict": lambda y: OrderedDict(b=y, a=y * 2),
    "the_same_tensor_twice": lambda y: (y, y),
    "no_tensor_at_all": lambda y: {"n": 3},
    "none": lambda y: None,
}


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor in ``value``, in order: a walk of its own, apart from the library's."""
    if isinstance(value, torch.Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        return [t for field in dataclasses.fields(value) for t in tensors_in(getattr(value, field.name))]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_in(item)]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors_in(item)]
    return []


class Inner(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, given: In, *, extra: object = None) -> Any:
        assert given.scale is None
        return WRAP[self.kind](self.linear(given.x).tanh())


class Top(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = Inner(kind)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> Any:
        inside = self.inner(In(x=x), extra=None)
        found = tensors_in(inside)
        return inside, self.head(sum(found, x))


def run_output(kind: str, path: str) -> None:
    plain = build(lambda: Top(kind))
    model = PATHS[path](copy.deepcopy(plain), (Inner,))
    output, plain_output = model(vectors()), plain(vectors())
    (inside, _), (plain_inside, _) = output, plain_output
    assert type(inside) is type(plain_inside)
    if isinstance(plain_inside, (Out, FrozenOut)) and plain_inside.aux is AUX:
        assert inside.aux is AUX
    if isinstance(plain_inside, OrderedDict):
        assert list(inside) == ["b", "a"]
    ours, theirs = tensors_in(output), tensors_in(plain_output)
    for position, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        check_equal(one, other, f"tensor {position} of the output")
        assert one.requires_grad == other.requires_grad
    sum(t.square().sum() for t in ours if t.requires_grad).backward()
    sum(t.square().sum() for t in theirs if t.requires_grad).backward()
    grads = plain_gradients(plain)
    check_named(model.gradients(), grads, "gradient", zeros_for_none=True)
    model.check_at_rest()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", WRAP)
def test_an_output_keeps_its_type_and_its_gradients(kind: str, path: str) -> None:
    run_distributed(2, run_output, kind, path)
