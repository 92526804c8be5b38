"""What does not fit is refused by unit and tensor before anything is sent, written or changed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from launches import Launches
from sharded_units import (
    Described,
    gathered_now,
    same_bits,
    unit_on_ranks,
    values_of,
)

from fsdp_fn.collectives import gather_planes, reduce_scatter
from fsdp_fn.placement import Replicate
from fsdp_fn.planes import Phase, PlaneKind
from fsdp_fn.state import Buffer, Gathered, UnitState, zeros_like_main
from harness import run_distributed


def snapshot(*values: Any) -> list[torch.Tensor]:
    return [leaf.clone() for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


# Two dtypes, and so two segments, whatever the planner does.
TWO: Described = (((4, 4), torch.float32), ((8,), torch.bfloat16))
Call = Callable[[UnitState], object]


def fitting() -> list[torch.Tensor | None]:
    return [torch.ones(4, 4), torch.ones(8)]


def gradients_with(second: Any) -> Call:
    return lambda unit: reduce_scatter([torch.ones(4, 4), second], unit)


def gather_out(change: Callable[[Gathered, UnitState], Gathered]) -> Call:
    def call(unit: UnitState) -> object:
        flats = tuple(torch.zeros(segment.size, dtype=segment.dtype) for segment in unit.layout.segments)
        buffer = Buffer(flats, unit.layout, (Replicate(),), unit.axes, unit.main.held)
        out = change(Gathered(unit.name, {PlaneKind.DENSE: buffer}, 0), unit)
        before = snapshot(out)
        try:
            return gather_planes(unit, Phase.FORWARD, out=out)
        finally:
            assert all(torch.equal(new, old) for new, old in zip(snapshot(out), before, strict=True))

    return call


def with_plane(**changes: Any) -> Callable[[Gathered, UnitState], Gathered]:
    def change(out: Gathered, unit: UnitState) -> Gathered:
        return dataclasses.replace(
            out, planes={PlaneKind.DENSE: dataclasses.replace(out.planes[PlaneKind.DENSE], **changes)}
        )

    return change


def accumulate_with(**changes: Any) -> Call:
    def call(unit: UnitState) -> object:
        accumulate = dataclasses.replace(zeros_like_main(unit), **changes)
        before = snapshot(accumulate)
        try:
            return reduce_scatter(fitting(), unit, accumulate=accumulate)
        finally:
            assert all(torch.equal(new, old) for new, old in zip(snapshot(accumulate), before, strict=True))

    return call


def with_main(**changes: Any) -> Call:
    return lambda unit: gather_planes(
        dataclasses.replace(unit, main=dataclasses.replace(unit.main, **changes)), Phase.FORWARD
    )


def elsewhere(unit: UnitState) -> UnitState:
    axes = tuple(dataclasses.replace(axis, group="gone") for axis in unit.axes)
    return dataclasses.replace(unit, main=dataclasses.replace(unit.main, axes=axes))


FAULTS: dict[str, tuple[Call, type[Exception], tuple[str, ...]]] = {
    "too few gradients": (
        lambda unit: reduce_scatter([torch.ones(4, 4)], unit),
        ValueError,
        ("'block'", "expected 2 gradients", "got 1"),
    ),
    "a gradient of another shape": (
        gradients_with(torch.ones(3)),
        ValueError,
        ("'block'", "'weight1'", "(8,)", "(3,)"),
    ),
    "a gradient that is a list": (gradients_with([1.0, 2.0]), TypeError, ("'block'", "'weight1'", "list")),
    "a gradient of integers": (
        gradients_with(torch.ones(8, dtype=torch.int64)),
        ValueError,
        ("'block'", "'weight1'", "floating-point", "int64"),
    ),
    "a complex gradient of a real tensor": (
        gradients_with(torch.ones(8, dtype=torch.complex64)),
        ValueError,
        ("'block'", "'weight1'", "complex64"),
    ),
    "a sparse gradient": (
        gradients_with(torch.ones(8).to_sparse()),
        ValueError,
        ("'block'", "'weight1'", "sparse", "to_dense"),
    ),
    "a gradient on another device": (
        gradients_with(torch.ones(8, device="meta")),
        ValueError,
        ("'block'", "'weight1'", "cpu", "meta"),
    ),
    "accumulate of other segments": (
        accumulate_with(held=(1,)),
        ValueError,
        ("'block'", "accumulate", "(1,)"),
    ),
    "accumulate that is not sharded": (
        accumulate_with(placements=(Replicate(),)),
        ValueError,
        ("'block'", "accumulate", "Replicate"),
    ),
    "accumulate of another shape": (
        accumulate_with(segments=(torch.zeros(2),) * 2),
        ValueError,
        ("'block'", "accumulated gradient, segment 0", "(2,)"),
    ),
    "accumulate of another dtype": (
        lambda unit: accumulate_with(segments=tuple(flat.double() for flat in unit.main.segments))(unit),
        ValueError,
        ("'block'", "accumulated gradient, segment 0", "float32", "float64"),
    ),
    "planes that are not stored": (
        lambda unit: gather_planes(unit, Phase.FORWARD, kinds=(PlaneKind.ROWWISE,)),
        ValueError,
        ("'block'", "dense", "rowwise"),
    ),
    "no planes": (
        lambda unit: gather_planes(unit, Phase.FORWARD, kinds=()),
        ValueError,
        ("'block'", "dense"),
    ),
    "no phase": (
        lambda unit: gather_planes(unit, "forward"),  # type: ignore[arg-type]
        TypeError,
        ("Phase", "'forward'"),
    ),
    "out of another unit": (
        gather_out(lambda out, unit: dataclasses.replace(out, unit="head")),
        ValueError,
        ("'block'", "'head'"),
    ),
    "out without the plane": (
        gather_out(lambda out, unit: dataclasses.replace(out, planes={})),
        ValueError,
        ("'block'", "dense"),
    ),
    "out of other segments": (gather_out(with_plane(held=(1,))), ValueError, ("'block'", "out", "(0, 1)", "(1,)")),
    "out on another axis": (
        gather_out(lambda out, unit: with_plane(axes=elsewhere(unit).axes)(out, unit)),
        ValueError,
        ("'block'", "out", "other axes"),
    ),
    "out that is a shard": (
        gather_out(lambda out, unit: with_plane(placements=unit.main.placements)(out, unit)),
        ValueError,
        ("'block'", "Sharded", "Replicate"),
    ),
    "out of another shape": (
        gather_out(with_plane(segments=(torch.zeros(3),) * 2)),
        ValueError,
        ("'block'", "out, segment 0", "(3,)"),
    ),
    "out of another dtype": (
        gather_out(
            lambda out, unit: with_plane(
                segments=tuple(flat.bfloat16() for flat in out.planes[PlaneKind.DENSE].segments)
            )(out, unit)
        ),
        ValueError,
        ("'block'", "out, segment 0", "bfloat16", "float32"),
    ),
    "main weights of another shape": (
        with_main(segments=(torch.zeros(1),) * 2),
        ValueError,
        ("'block'", "main weights, segment 0", "(1,)"),
    ),
    "main weights with a segment missing": (
        with_main(segments=()),
        ValueError,
        ("'block'", "main weights", "(0, 1)", "got 0"),
    ),
    "main weights of another dtype": (
        lambda unit: with_main(segments=tuple(flat.double() for flat in unit.main.segments))(unit),
        ValueError,
        ("'block'", "main weights, segment 0", "float64", "float32"),
    ),
}


def meet_fault(name: str) -> str:
    """The message; the ranks then still agree, and the inputs are as they were."""
    call, kind, _ = FAULTS[name]
    unit = unit_on_ranks(TWO)
    before = snapshot(unit)
    with pytest.raises(kind) as refusal, Launches() as launches:
        call(unit)
    assert launches.collectives == []
    assert all(torch.equal(new, old) for new, old in zip(snapshot(unit), before, strict=True))
    assert all(same_bits(gathered_now(unit).weights()[key], value) for key, value in values_of(TWO).items())
    return str(refusal.value)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_by_unit_and_tensor_before_anything_is_sent_or_changed(name: str) -> None:
    for message in run_distributed(2, meet_fault, name):
        assert all(part in message for part in FAULTS[name][2]), message


def gather_where_the_group_is_gone() -> list[str]:
    unit = elsewhere(unit_on_ranks(TWO))
    flats = tuple(torch.full((segment.size,), 9.0, dtype=segment.dtype) for segment in unit.layout.segments)
    buffer = Buffer(flats, unit.layout, (Replicate(),), unit.axes, unit.main.held)
    out = Gathered(unit.name, {PlaneKind.DENSE: buffer}, 0)
    messages = []
    for call in (
        lambda: gather_planes(unit, Phase.FORWARD, out=out),
        lambda: reduce_scatter(fitting(), unit),
    ):
        with pytest.raises(RuntimeError) as refusal:
            call()
        messages.append(str(refusal.value))
    assert all(bool((flat == 9.0).all()) for flat in flats)
    return messages


def test_a_group_that_is_gone_is_named_and_nothing_is_written() -> None:
    for messages in run_distributed(2, gather_where_the_group_is_gone):
        assert all("'gone'" in message and "checkpoint" in message for message in messages)
