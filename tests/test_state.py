"""State is a pytree of tensors with everything else static, and buffers say what a rank holds."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sharded_units import NEVER_TRAINED, Described, described_tensors, local_axis, make_unit, raw, values_of
from torch.utils import _pytree as pytree

from fsdp_fn.layout import BlockAtomic, Flat, Granularity, TensorAtomic, row_bounds
from fsdp_fn.placement import Partial, Replicate
from fsdp_fn.planes import PlaneKind
from fsdp_fn.policy import PrecisionPolicy
from fsdp_fn.state import (
    Buffer,
    Gathered,
    ModelState,
    UnitState,
    trainable_segments,
    trainable_tensors,
    zeros_like_main,
)

TENSORS = {
    "weight": torch.arange(15.0).view(5, 3),
    "bias": torch.arange(5.0) + 100,
    "scale": torch.tensor(7.0),
    "index": torch.arange(4),
}
granularities = st.sampled_from([Flat(), BlockAtomic(2), BlockAtomic(3), TensorAtomic()])


def unit_of(rank: int = 0, size: int = 2, version: int = 0, gradient: bool = False) -> UnitState:
    """Equal by value at every call, and made anew."""
    unit = make_unit(TENSORS, local_axis(size, rank), frozen={"scale"}, precision=PrecisionPolicy(torch.float32))
    return dataclasses.replace(unit, version=version, gradient=zeros_like_main(unit) if gradient else None)


def gathered_of(unit: UnitState) -> Gathered:
    """What a gather on one rank gives."""
    buffer = dataclasses.replace(unit.main, placements=(Replicate(),))
    return Gathered(unit.name, {PlaneKind.DENSE: buffer}, unit.version)


def model_of(**changes: Any) -> ModelState:
    return ModelState({"block": unit_of(**changes), "": unit_of()}, {"running_mean": torch.ones(3)})


STATES: list[Callable[[], Any]] = [
    lambda: unit_of().main,
    unit_of,
    lambda: unit_of(gradient=True),
    model_of,
    lambda: gathered_of(unit_of(size=1)),
]


def static_parts(value: Any) -> Any:
    """Everything of a state but its tensors."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, Buffer | UnitState | ModelState | Gathered):
        fields = {item.name: static_parts(getattr(value, item.name)) for item in dataclasses.fields(value)}
        return type(value), fields
    if isinstance(value, dict):
        return {key: static_parts(item) for key, item in value.items()}
    if isinstance(value, tuple) and not dataclasses.is_dataclass(value):
        return tuple(static_parts(item) for item in value)
    return value


# --- pytrees ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", STATES)
def test_tree_map_touches_tensors_only(make: Callable[[], Any]) -> None:
    state = make()
    seen: list[Any] = []

    def see(leaf: Any) -> Any:
        seen.append(leaf)
        return leaf

    mapped = pytree.tree_map(see, state)
    assert seen
    assert all(isinstance(leaf, torch.Tensor) for leaf in seen if leaf is not None)
    assert static_parts(mapped) == static_parts(state)


def test_tree_map_maps_the_shards_and_leaves_the_old_state_as_it_was() -> None:
    unit = unit_of()
    doubled = pytree.tree_map(lambda flat: flat * 2, unit)
    for new, old in zip(doubled.main.segments, unit.main.segments, strict=True):
        assert torch.equal(new, old * 2)
    assert torch.equal(unit.main.owned(1), TENSORS["bias"][: len(unit.main.owned(1))])


@pytest.mark.parametrize("make", STATES)
def test_the_static_context_is_hashable_and_equal_by_value(make: Callable[[], Any]) -> None:
    first, second = pytree.tree_structure(make()), pytree.tree_structure(make())
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize(
    "change",
    [{"version": 1}, {"rank": 1}, {"size": 3}, {"gradient": True}],
    ids=lambda change: next(iter(change)),
)
def test_states_that_differ_in_a_static_part_have_different_structures(change: dict[str, Any]) -> None:
    assert pytree.tree_structure(unit_of(**change)) != pytree.tree_structure(unit_of())
    assert pytree.tree_structure(model_of(**change)) != pytree.tree_structure(model_of())


def test_leaves_are_known_by_the_names_of_fields_and_units() -> None:
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(model_of(gradient=True))[0]]
    assert ".units['block'].main.segments[0]" in paths
    assert ".units['block'].gradient.segments[0]" in paths
    assert ".buffers['running_mean']" in paths


@pytest.mark.parametrize("make", STATES)
def test_a_state_survives_pickling(make: Callable[[], Any]) -> None:
    state = make()
    restored = pickle.loads(pickle.dumps(state))
    assert pytree.tree_structure(restored) == pytree.tree_structure(state)
    for new, old in zip(pytree.tree_leaves(restored), pytree.tree_leaves(state), strict=True):
        assert new is old is None or torch.equal(new, old)


@pytest.mark.parametrize("make", STATES)
def test_a_state_cannot_be_changed_in_place(make: Callable[[], Any]) -> None:
    state = make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(state, dataclasses.fields(state)[0].name, None)


# --- torch.compile ------------------------------------------------------------------------------------------


def halved(unit: UnitState) -> UnitState:
    flats = tuple(flat / 2 for flat in unit.main.segments)
    main = dataclasses.replace(unit.main, segments=flats)
    return dataclasses.replace(unit, main=main, version=unit.version + 1)


def halved_model(state: ModelState) -> ModelState:
    return dataclasses.replace(state, units={name: halved(unit) for name, unit in state.units.items()})


def weights_summed(gathered: Gathered) -> torch.Tensor:
    return sum((weight.double().sum() for weight in gathered.weights().values()), torch.zeros(()))


@pytest.mark.parametrize(
    ("function", "make"),
    [(halved, unit_of), (halved_model, model_of), (weights_summed, lambda: gathered_of(unit_of(size=1)))],
    ids=["unit", "model", "gathered"],
)
def test_states_pass_through_a_full_graph_as_input_and_output(
    function: Callable[[Any], Any], make: Callable[[], Any]
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="eager")(make())
    expected = function(make())
    assert static_parts(compiled) == static_parts(expected)
    for new, old in zip(pytree.tree_leaves(compiled), pytree.tree_leaves(expected), strict=True):
        assert new is old is None or torch.equal(new, old)


def test_a_growing_version_does_not_compile_anew_every_time() -> None:
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(halved, fullgraph=True, backend=backend)
    unit = unit_of()
    for step in range(6):
        unit = compiled(unit)
        assert unit.version == step + 1
    assert len(graphs) <= 2


# --- buffers ------------------------------------------------------------------------------------------------


def units_of_all_ranks(described: Described, size: int, granularity: Granularity) -> list[UnitState]:
    tensors = values_of(described)
    return [make_unit(tensors, local_axis(size, rank), granularity=granularity) for rank in range(size)]


@given(described_tensors(), st.integers(1, 5), granularities)
def test_the_parts_that_the_ranks_own_make_up_each_tensor(
    described: Described, size: int, granularity: Granularity
) -> None:
    units = units_of_all_ranks(described, size, granularity)
    for index, whole in enumerate(values_of(described).values()):
        parts = [unit.main.owned(index) for unit in units]
        assert torch.equal(torch.cat([raw(part) for part in parts]), raw(whole))
        if whole.ndim:
            bounds = row_bounds(units[0].layout, index)
            rows = [bounds[rank + 1] - bounds[rank] for rank in range(size)]
            assert [part.shape for part in parts] == [(count, *whole.shape[1:]) for count in rows]
        else:
            assert sorted(part.ndim for part in parts) == [0] + [1] * (size - 1)


@given(described_tensors(), st.integers(1, 5), granularities)
def test_a_buffer_that_is_not_cut_owns_whole_tensors_on_every_rank(
    described: Described, size: int, granularity: Granularity
) -> None:
    units = units_of_all_ranks(described, size, granularity)
    layout = units[0].layout
    whole = tuple(
        torch.cat([raw(unit.main.segment(index)) for unit in units]).view(segment.dtype)
        for index, segment in enumerate(layout.segments)
    )
    for unit, placement in itertools.product(units, (Replicate(), Partial())):
        uncut = Buffer(whole, layout, (placement,), unit.axes, unit.main.held)
        assert uncut.piece == (0, 1)
        for index, value in enumerate(values_of(described).values()):
            assert uncut.owned_elements(index) == range(value.numel())
            for found in (uncut.tensor(index), uncut.owned(index)):
                assert found.shape == value.shape
                assert torch.equal(raw(found), raw(value))


def test_tensors_and_owned_parts_are_views_of_the_buffer() -> None:
    unit = unit_of(size=1)
    unit.main.tensor(0).fill_(3.0)
    assert unit.main.owned(0).tolist() == [[3.0] * 3] * 5
    segment, _ = unit.layout.location(0)
    storage = unit.main.segment(segment).untyped_storage().data_ptr()
    assert {
        unit.main.tensor(0).untyped_storage().data_ptr(),
        unit.main.owned(0).untyped_storage().data_ptr(),
    } == {storage}


def test_the_whole_of_a_tensor_that_is_in_pieces_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'bias' is in 2 pieces, placed Sharded.*owned"):
        unit_of().main.tensor(1)


def test_a_segment_that_a_buffer_does_not_hold_is_refused() -> None:
    gradient = zeros_like_main(unit_of())
    (absent,) = (index for index, spec in enumerate(unit_of().layout.tensors) if spec.name == "index")
    segment, _ = gradient.layout.location(absent)
    with pytest.raises(KeyError, match=f"segment {segment} is not held"):
        gradient.segment(segment)
    with pytest.raises(KeyError, match=f"segment {segment} is not held"):
        gradient.owned(absent)


@given(described_tensors(), st.integers(1, 4))
def test_trainable_segments_hold_exactly_the_trainable_tensors(described: Described, size: int) -> None:
    unit = make_unit(values_of(described), local_axis(size, 0))
    expected = [index for index, (_, dtype) in enumerate(described) if dtype not in NEVER_TRAINED]
    assert list(trainable_tensors(unit.layout)) == expected
    held = [index for segment in trainable_segments(unit.layout) for index in unit.layout.segments[segment].tensors]
    assert sorted(held) == expected


def test_fresh_gradients_are_zeros_of_the_trainable_shards_in_the_main_dtype() -> None:
    unit = make_unit(
        {name: value.bfloat16() if value.is_floating_point() else value for name, value in TENSORS.items()},
        local_axis(2, 1),
        precision=PrecisionPolicy(main_dtype=torch.float32),
    )
    gradient = zeros_like_main(unit)
    assert gradient.held == trainable_segments(unit.layout)
    for flat, index in zip(gradient.segments, gradient.held, strict=True):
        segment = unit.layout.segments[index]
        assert (flat.shape, flat.dtype) == ((segment.shard_size,), torch.float32)
        assert not flat.any()


def test_gathered_weights_are_known_by_name() -> None:
    gathered = gathered_of(unit_of(size=1, version=4))
    weights = gathered.weights()
    assert list(weights) == list(TENSORS)
    assert all(torch.equal(weights[name], value) for name, value in TENSORS.items())
    assert gathered.version == 4


def test_a_dense_unit_stores_one_plane_and_knows_its_layout_and_axis() -> None:
    unit = unit_of(rank=1)
    assert unit.kinds == (PlaneKind.DENSE,)
    assert unit.layout is unit.main.layout
    assert unit.axes == (local_axis(2, 1),)
