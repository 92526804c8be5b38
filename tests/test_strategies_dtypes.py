"""Under every strategy, each sum is in the dtype that the precision policy names for it.

What belongs to another strategy is refused by name, and left as it was.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from bits import check_same_bits, same_bits, snapshot
from sharded_units import FEW_ROWS, gathered_now, make_unit, reduced_now, values_of
from strategy_cases import ONE_AXIS, each_case

from fsdp_fn.collectives import finish_gradient, gather_planes, reduce_scatter
from fsdp_fn.groups import axes_of, default_mesh
from fsdp_fn.placement import Replicate, Sharded, Strategy, parameter_placements
from fsdp_fn.planes import Phase, PlaneKind
from fsdp_fn.policy import PrecisionPolicy
from fsdp_fn.state import Axis, Buffer, UnitState, accumulates_apart, needs_planes
from harness import run_distributed

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64

# --- dtypes -------------------------------------------------------------------------------------------------


def constant(unit: UnitState, value: float) -> list[torch.Tensor | None]:
    return [torch.full(spec.shape, value) for spec in unit.layout.tensors]


def value_of(gradient: Buffer) -> set[float]:
    return {value for index in (0, 1) for value in gradient.owned(index).reshape(-1).tolist()}


def dtypes_each() -> None:
    def check(strategy: Strategy, axes: tuple[Axis, ...]) -> None:
        # Sums over microbatches: 256 + 1 + 1 is 256 in bfloat16, and 258 in one go.
        for accumulate_dtype, expected in ((None, 256.0), (F32, 258.0), (BF16, 256.0)):
            precision = PrecisionPolicy(BF16, reduce_dtype=F32, accumulate_dtype=accumulate_dtype)
            unit = make_unit(values_of(FEW_ROWS), axes, strategy=strategy, precision=precision)
            total = reduced_now(constant(unit, 256.0), unit, last_microbatch=False)
            assert {flat.dtype for flat in total.segments} == {accumulate_dtype or BF16}
            reduced_now(constant(unit, 1.0), unit, accumulate=total, last_microbatch=False)
            gradient = reduced_now(constant(unit, 1.0), unit, accumulate=total)
            assert {flat.dtype for flat in gradient.segments} == {BF16}
            assert value_of(gradient) <= {expected}, f"accumulated in {accumulate_dtype}: {value_of(gradient)}"
        # Sums over ranks: 1 + 256 + 0 + 0, at once and after a first microbatch of zeros.
        ranks = dist.get_world_size()
        own = [1.0, 256.0, 0.0, 0.0][dist.get_rank()]
        for reduce_dtype, expected in ((None, 257.0), (BF16, 256.0), (F64, 257.0)):
            precision = PrecisionPolicy(reduce_dtype=reduce_dtype)
            unit = make_unit(values_of(FEW_ROWS), axes, strategy=strategy, precision=precision)
            total = reduced_now(constant(unit, 0.0), unit, last_microbatch=False)
            once = reduced_now(constant(unit, own), unit)
            twice = reduced_now(constant(unit, own), unit, accumulate=total)
            for gradient in (once, twice):
                assert {flat.dtype for flat in gradient.segments} == {F32}
                assert value_of(gradient) <= {expected / ranks}, f"reduced in {reduce_dtype}: {value_of(gradient)}"

    each_case(check)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_over_microbatches_and_over_ranks_are_each_in_the_dtype_that_is_named_for_them(ranks: int) -> None:
    run_distributed(ranks, dtypes_each)


def finish_alone(name: str) -> set[float]:
    precision = PrecisionPolicy(reduce_dtype=BF16, accumulate_dtype=F64)
    axes = axes_of(default_mesh("cpu"))
    unit = make_unit(values_of(FEW_ROWS), axes, strategy=ONE_AXIS[name], precision=precision)
    total = reduced_now(constant(unit, 256.0), unit, last_microbatch=False)
    return value_of(reduced_now(constant(unit, 1.0), unit, accumulate=total))


@pytest.mark.parametrize(
    ("ranks", "name"), [(1, "ddp"), (2, "zero2"), (2, "zero3"), (2, "sharded optimizer alone"), (2, "all replicated")]
)
def test_a_sum_that_no_rank_has_to_add_to_is_not_rounded_to_the_reduce_dtype(ranks: int, name: str) -> None:
    assert set().union(*run_distributed(ranks, finish_alone, name)) == {257.0}


# --- faults -------------------------------------------------------------------------------------------------


def faults_each() -> None:
    def check(strategy: Strategy, axes: tuple[Axis, ...]) -> None:
        unit = make_unit(values_of(FEW_ROWS), axes, strategy=strategy)
        refuse_other_placements(unit)
        refuse_planes_that_are_not_kept(unit)
        refuse_groups_that_are_gone(unit)
        for name, weight in gathered_now(unit).weights().items():  # the ranks still agree
            assert same_bits(weight, values_of(FEW_ROWS)[name])

    each_case(check)


def refuse_other_placements(unit: UnitState) -> None:
    """A sum of one strategy is none of another's, and a finished gradient is no sum where these differ."""
    grads = constant(unit, 1.0)
    total, finished = reduced_now(grads, unit, last_microbatch=False), reduced_now(grads, unit)
    flipped = tuple(Replicate() if isinstance(placed, Sharded) else Sharded() for placed in total.placements)
    others = [dataclasses.replace(total, placements=flipped)]
    if accumulates_apart(unit):
        others.append(finished)
    for other in others:
        before = snapshot((grads, other))
        for call in (
            lambda other=other: reduce_scatter(grads, unit, accumulate=other),
            lambda other=other: finish_gradient(other, unit),
        ):
            with pytest.raises(ValueError, match="unit 'block': accumulated gradient: expected the segments") as error:
                call()
            assert ", ".join(map(str, total.placements)) in str(error.value)
            assert ", ".join(map(str, other.placements)) in str(error.value)
        check_same_bits((grads, other), before, "what was refused")


def refuse_planes_that_are_not_kept(unit: UnitState) -> None:
    whole = gathered_now(unit).planes[PlaneKind.DENSE]
    if needs_planes(unit):
        shorter = tuple(flat[:1].clone() for flat in whole.segments)
        plane = dataclasses.replace(whole, placements=parameter_placements(unit.strategy), segments=shorter)
        message = r"unit 'block': dense plane, segment 0: expected a contiguous torch\.float32"
    else:
        plane, message = whole, "unit 'block': its strategy keeps no planes beside the main weights"
    with pytest.raises(ValueError, match=message):
        gather_planes(dataclasses.replace(unit, planes={PlaneKind.DENSE: plane}), Phase.FORWARD)


def refuse_groups_that_are_gone(unit: UnitState) -> None:
    axes = tuple(dataclasses.replace(axis, group="gone") for axis in unit.axes)
    gone = dataclasses.replace(unit, main=dataclasses.replace(unit.main, axes=axes))
    grads = constant(unit, 1.0)
    total = reduced_now(grads, unit, last_microbatch=False)
    total = dataclasses.replace(total, axes=axes)
    out = gathered_now(unit)
    whole = out.planes[PlaneKind.DENSE]
    nines = tuple(torch.full_like(flat, 9) for flat in whole.segments)
    plane = dataclasses.replace(whole, axes=axes, segments=nines)
    out = dataclasses.replace(out, planes={PlaneKind.DENSE: plane})
    before = snapshot((grads, total, out, unit))
    for call in (
        lambda: gather_planes(gone, Phase.FORWARD, out=out),
        lambda: reduce_scatter(grads, gone, accumulate=total),
    ):
        with pytest.raises(RuntimeError, match=r"axis '\w+': this process has no process group named 'gone'"):
            call()
    check_same_bits((grads, total, out, unit), before, "what was given")


def test_what_belongs_to_another_strategy_is_refused_by_name_and_left_as_it_was() -> None:
    run_distributed(4, faults_each)
