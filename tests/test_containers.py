"""Tensors are found and replaced in what modules return, and never missed in silence."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_fn.containers import map_tensors


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Output:
    hidden: Any
    note: Any = "note"


@dataclass(frozen=True)
class FrozenOutput:
    hidden: Any
    note: Any = 3


@dataclass(frozen=True, slots=True)
class SlottedOutput:
    hidden: Any
    note: Any = None


@dataclass
class DerivedOutput:
    """Cannot be made anew from its fields: one is not an argument, and making it has an effect."""

    hidden: Any
    doubled: Any = field(init=False)
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.doubled = self.hidden * 2
        self.made += 1


class Opaque:
    def __init__(self, **held: Any) -> None:
        self.__dict__.update(held)


class SlottedOpaque:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held


class OwnList(list[Any]):
    pass


class OwnDict(dict[str, Any]):
    pass


def wanting(value: float = 1.0) -> torch.Tensor:
    return torch.tensor([value], requires_grad=True) * 1


def plus_one(value: Any) -> Any:
    return map_tensors(lambda tensor: tensor + 1, value, "block")


leaves = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats(-9, 9).map(lambda x: torch.tensor([x]))
)
structures = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(collections.OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Output, inner, inner)
        | st.builds(FrozenOutput, inner, inner)
        | st.builds(SlottedOutput, inner, inner)
    ),
    max_leaves=12,
)


def walk(value: Any) -> Iterator[Any]:
    """Types of containers and leaves in order, opened without the code under test."""
    yield type(value)
    if dataclasses.is_dataclass(value):
        for item in dataclasses.fields(value):
            yield from walk(getattr(value, item.name))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from walk(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from walk(item)
    else:
        yield value


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [item for item in walk(value) if isinstance(item, torch.Tensor)]


@given(structures)
def test_every_tensor_is_mapped_once_and_everything_else_is_kept(value: Any) -> None:
    before = [tensor.clone() for tensor in tensors_in(value)]
    mapped = plus_one(value)
    assert [tensor.item() for tensor in tensors_in(mapped)] == [(tensor + 1).item() for tensor in before]
    assert [tensor.item() for tensor in tensors_in(value)] == [tensor.item() for tensor in before]
    keep = [item for item in walk(value) if not isinstance(item, torch.Tensor)]
    assert [item for item in walk(mapped) if not isinstance(item, torch.Tensor)] == keep


@given(structures)
def test_a_value_in_which_nothing_changes_is_returned_as_it_is(value: Any) -> None:
    assert map_tensors(lambda tensor: tensor, value, "block") is value


def test_a_dataclass_is_not_made_anew_but_copied() -> None:
    output = DerivedOutput(torch.tensor([2.0]))
    mapped = plus_one(output)
    assert (mapped.hidden.item(), mapped.doubled.item(), mapped.made) == (3.0, 5.0, 1)
    assert output.hidden.item() == 2.0


def test_what_is_set_on_a_dataclass_besides_its_fields_is_kept() -> None:
    output = Output(torch.zeros(1))
    output.extra = "kept"  # type: ignore[attr-defined]
    assert plus_one(output).extra == "kept"


def test_torchs_own_named_results_are_opened() -> None:
    mapped = plus_one(torch.tensor([[1.0, 5.0]]).max(dim=1))
    assert (mapped.values.item(), mapped.indices.item()) == (6.0, 2)


def test_a_class_is_passed_over_even_where_it_is_a_dataclass() -> None:
    assert plus_one(Output) is Output


@pytest.mark.parametrize(
    ("make", "held_as"),
    [
        (lambda tensor: Opaque(state=tensor), "'state'"),
        (lambda tensor: Opaque(layers=[0, {"last": tensor}]), "'layers'"),
        (SlottedOpaque, "'held'"),
        (lambda tensor: {tensor}, "'0'"),
        (lambda tensor: OwnList([0, tensor]), "'1'"),
        (lambda tensor: OwnDict(hidden=tensor), "'hidden'"),
        (lambda tensor: [Output(note=Opaque(state=tensor), hidden=0)], "'state'"),
    ],
)
def test_an_object_that_hides_a_tensor_of_the_graph_is_refused_by_module_and_name(make: Any, held_as: str) -> None:
    with pytest.raises(TypeError, match=r"layers\.3") as refusal:
        map_tensors(lambda tensor: tensor + 1, make(wanting()), "layers.3")
    assert held_as in str(refusal.value)
    assert "register_pytree_node" in str(refusal.value)


@pytest.mark.parametrize(
    "value",
    [
        Opaque(count=3, table=torch.zeros(2)),
        SlottedOpaque(torch.zeros(1)),
        {1, 2},
        range(3),
        OwnDict(a=1),
        object(),
    ],
)
def test_an_object_with_no_tensor_of_the_graph_passes_untouched(value: object) -> None:
    assert plus_one(value) is value
