"""The primitives under every strategy: whole weights to the bit, exact means, each microbatch scaled once.

Ranks give gradients that differ by rank, element and microbatch; a power of ten per microbatch shows which of them was
scaled how. All of it fits the dtypes exactly, so that what is expected is expected to the bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from bits import check_same_bits, same_bits, snapshot
from launches import Launches
from sharded_units import EVERY_DTYPE, FEW_ROWS, Described, gathered_now, make_unit, reduced_now, values_of
from strategy_cases import ONE_AXIS, cases, each_case

from fsdp_fn.collectives import Pending, finish_gradient, gather_planes, reduce_scatter, refresh_planes
from fsdp_fn.placement import Strategy, gradient_placements, optimizer_placements, parameter_placements
from fsdp_fn.planes import Phase, PlaneKind
from fsdp_fn.policy import PrecisionPolicy
from fsdp_fn.state import Axis, Buffer, UnitState, accumulates_apart, needs_planes, trainable_tensors
from harness import run_distributed

# Uneven rows, empty shards, no elements, no dimension, three dtypes that train and one that does not.
TRAINED: Described = (
    *FEW_ROWS,
    ((7, 3), torch.float32),
    ((5,), torch.float64),
    ((), torch.float32),
    ((3, 2), torch.complex64),
    ((9,), torch.bool),
    ((0, 4), torch.float32),
)


# --- gathers ------------------------------------------------------------------------------------------------


def check_weights(unit: UnitState, expected: dict[str, torch.Tensor]) -> None:
    out = gathered_now(unit)
    for flat in out.planes[PlaneKind.DENSE].segments:
        assert flat.is_contiguous()
    pending = gather_planes(unit, Phase.BACKWARD, async_op=True)
    given = dataclasses.replace(out, planes={PlaneKind.DENSE: filled_anew(out.planes[PlaneKind.DENSE])})
    for gathered in (out, pending.wait(), gathered_now(unit, out=given)):
        found = gathered.weights()
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert same_bits(found[name], value), f"{name}: got {found[name]}, expected {value}"


def filled_anew(buffer: Buffer) -> Buffer:
    return dataclasses.replace(buffer, segments=tuple(torch.full_like(flat, 1) for flat in buffer.segments))


def gather_each() -> None:
    each_case(check_gathers)


def check_gathers(strategy: Strategy, axes: tuple[Axis, ...]) -> None:
    values = values_of(EVERY_DTYPE)
    castable = {name: v for name, v in values.items() if v.is_floating_point() and v.dtype.itemsize > 1}
    cast = {name: value.float().bfloat16() for name, value in castable.items()}
    for tensors, precision, expected in (
        (values, PrecisionPolicy(), values),
        (castable, PrecisionPolicy(torch.float32, torch.bfloat16), cast),
    ):
        unit = make_unit(tensors, axes, strategy=strategy, precision=precision)
        before = snapshot(unit.main)
        check_weights(unit, expected)
        rested = refresh_planes(unit)
        check_same_bits(unit.main, before, "the main weights")
        assert (rested.planes is not None) == needs_planes(unit)
        assert refresh_planes(rested) is rested
        if rested.planes is None:
            assert rested is unit
            continue
        plane = rested.planes[PlaneKind.DENSE]
        assert plane.placements == parameter_placements(unit.strategy)
        for flat in unit.main.segments:
            flat.fill_(1)  # from now on the weights come from the planes
        check_weights(rested, expected)


def test_the_whole_weights_arrive_to_the_bit_from_main_weights_and_from_planes_at_rest(world_size: int) -> None:
    run_distributed(world_size, gather_each)


# --- reductions ---------------------------------------------------------------------------------------------


def pattern(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """1 to 7 over and over: exact after any scaling here, and different in neighbouring elements."""
    numel = torch.Size(shape).numel()
    return (torch.arange(numel) % 7 + 1).to(dtype).view(shape)


def rank_gradients(unit: UnitState, microbatch: int) -> list[torch.Tensor | None]:
    scale = (dist.get_rank() + 1) * 10.0**microbatch
    specs = [unit.layout.tensors[index] for index in trainable_tensors(unit.layout)]
    return [pattern(spec.shape, spec.dtype) * scale for spec in specs]


def check_gradient(gradient: Buffer, unit: UnitState, factor: float) -> None:
    """It is placed and typed as the main weights, ``factor`` times the pattern, and zero in padding."""
    assert gradient.placements == unit.main.placements == optimizer_placements(unit.strategy)
    assert gradient.axes == unit.axes
    for index, flat in zip(gradient.held, gradient.segments, strict=True):
        assert flat.shape == unit.main.segment(index).shape
        assert flat.dtype == unit.main.segment(index).dtype
        assert flat.untyped_storage().nbytes() == flat.nbytes, "more is kept alive than the shard"
    for index in trainable_tensors(unit.layout):
        spec, own = unit.layout.tensors[index], gradient.owned_elements(index)
        expected = pattern(spec.shape, spec.dtype).reshape(-1)[own.start : own.stop] * factor
        found = gradient.owned(index).reshape(-1)
        assert torch.equal(found, expected), f"{spec.name}: got {found}, expected {expected}"
    nonzero = sum(int(flat.count_nonzero()) for flat in gradient.segments)
    assert nonzero == sum(len(gradient.owned_elements(index)) for index in trainable_tensors(unit.layout))


def reduce_each(asynchronous: bool) -> None:
    def check(strategy: Strategy, axes: tuple[Axis, ...]) -> None:
        for grad_divisor in (1.0, 0.5):
            unit = make_unit(values_of(TRAINED), axes, strategy=strategy, grad_divisor=grad_divisor)
            check_reductions(unit, asynchronous)

    each_case(check)


def check_reductions(unit: UnitState, asynchronous: bool) -> None:
    mean = (dist.get_world_size() + 1) / 2 / unit.grad_divisor

    def reduced(microbatch: int, accumulate: Buffer | None, last: bool) -> Buffer:
        grads = rank_gradients(unit, microbatch)
        given = snapshot((grads, unit.main))
        if not asynchronous:
            result = reduced_now(grads, unit, accumulate=accumulate, last_microbatch=last)
        else:
            pending = reduce_scatter(grads, unit, accumulate=accumulate, last_microbatch=last, async_op=True)
            assert isinstance(pending, Pending)
            result = pending.wait()
            assert pending.wait() is result
        check_same_bits((grads, unit.main), given, "what reduce_scatter was given")
        return result

    def summed(count: int) -> Buffer:
        total: Buffer | None = None
        for microbatch in range(count):
            result = reduced(microbatch, total, last=False)
            assert total is None or result is total
            total = result
        assert total is not None
        assert total.placements == gradient_placements(unit.strategy)
        return total

    check_gradient(reduced(1, None, last=True), unit, 10 * mean)
    total = summed(2)
    last = reduced(2, total, last=True)
    assert accumulates_apart(unit) or last is total
    check_gradient(last, unit, 111 * mean)
    # Finished apart from a reduction, and all the same.
    total = summed(3)
    before = snapshot(total)
    finished = finish_gradient(total, unit)
    check_same_bits(total, before, "the sum that finish_gradient was given")
    assert accumulates_apart(unit) or finished is total
    check_gradient(finished, unit, 111 * mean)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_microbatches_add_up_the_mean_over_ranks_of_each_where_the_optimizer_needs_it(
    world_size: int, asynchronous: bool
) -> None:
    run_distributed(world_size, reduce_each, asynchronous)


def nothing_to_train() -> None:
    def check(strategy: Strategy, axes: tuple[Axis, ...]) -> None:
        frozen = make_unit(values_of(FEW_ROWS), axes, strategy=strategy, frozen={"weight0", "weight1"})
        one_missing = make_unit(values_of(FEW_ROWS), axes, strategy=strategy)
        with Launches() as launches:
            for last in (False, True):
                assert reduced_now([], frozen, last_microbatch=last).segments == ()
        assert launches.collectives == []
        total = reduced_now([None, None], one_missing, last_microbatch=False)
        gradient = reduced_now([None, torch.ones(1, 8)], one_missing, accumulate=total)
        assert not gradient.owned(0).any()
        assert bool((gradient.owned(1) == 1).all())

    each_case(check)


def test_what_has_no_gradient_counts_as_zeros_and_a_frozen_unit_sends_nothing() -> None:
    run_distributed(4, nothing_to_train)


# --- launches -----------------------------------------------------------------------------------------------

GATHER, REDUCE, SUM = "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "allreduce_coalesced_"
# Of a gather from the main weights, one from what is kept at rest, a microbatch between, and a last one.
LAUNCHES: dict[str, tuple[list[str], list[str], list[str], list[str]]] = {
    "ddp": ([], [], [], [SUM]),
    "zero1": ([GATHER], [], [], [REDUCE]),
    "zero2": ([GATHER], [], [REDUCE], [REDUCE]),
    "zero3": ([GATHER], [GATHER], [REDUCE], [REDUCE]),
    "sharded weights, local sums": ([GATHER], [GATHER], [], [REDUCE]),
    "sharded weights, whole gradients": ([GATHER], [GATHER], [SUM], [SUM]),
    "sharded optimizer alone": ([GATHER], [], [SUM], [SUM]),
    "all replicated": ([], [], [SUM], [SUM]),
    "hsdp": ([GATHER], [GATHER], [REDUCE], [REDUCE, SUM]),
    "hfsdp": ([GATHER] * 2, [GATHER], [REDUCE], [REDUCE] * 2),
    "zero3 over both": ([GATHER] * 2, [GATHER] * 2, [REDUCE] * 2, [REDUCE] * 2),
    "zero2 over both": ([GATHER] * 2, [], [REDUCE] * 2, [REDUCE] * 2),
    "zero1 over both": ([GATHER] * 2, [], [], [REDUCE] * 2),
    "ddp over both": ([], [], [], [SUM] * 2),
    "zero2 outside, zero3 inside": ([GATHER] * 2, [GATHER], [REDUCE] * 2, [REDUCE] * 2),
    "zero3 outside, ddp inside": ([GATHER], [GATHER], [REDUCE], [REDUCE, SUM]),
    "zero1 outside, all replicated inside": ([GATHER], [], [SUM], [SUM, REDUCE]),
    "local sums outside, whole gradients inside": ([GATHER] * 2, [GATHER] * 2, [SUM], [SUM, REDUCE]),
}


def launches_each() -> dict[str, tuple[list[str], ...]]:
    found = {}
    for name, strategy, axes in cases():
        unit = make_unit(values_of(FEW_ROWS), axes, strategy=strategy)
        rested, grads = refresh_planes(unit), rank_gradients(unit, 0)
        calls: tuple[Callable[[], object], ...] = (
            lambda unit=unit: gather_planes(unit, Phase.FORWARD),
            lambda unit=rested: gather_planes(unit, Phase.FORWARD),
            lambda unit=unit, grads=grads: reduce_scatter(grads, unit, last_microbatch=False),
            lambda unit=unit, grads=grads: reduce_scatter(grads, unit),
        )
        seen = []
        for call in calls:
            with Launches() as launches:
                call()
            seen.append([operator.removeprefix("c10d::") for operator in launches.collectives])
        found[name] = tuple(seen)
    return found


def test_a_strategy_launches_what_it_promises_once_for_all_tensors_and_each_axis() -> None:
    assert run_distributed(4, launches_each) == [LAUNCHES] * 4
    silent: tuple[list[str], ...] = ([], [], [], [])
    assert run_distributed(1, launches_each) == [dict.fromkeys(ONE_AXIS, silent)]
