"""Reductions give each rank the exact mean of its own rows, in one launch."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from launches import Launches
from sharded_units import (
    EVERY_DTYPE,
    FEW_ROWS,
    Described,
    described_tensors,
    reduced_now,
    same_bits,
    unit_on_ranks,
)

from fsdp_fn.collectives import Pending, reduce_scatter
from fsdp_fn.layout import BlockAtomic, Flat, Granularity, TensorAtomic, owned_range
from fsdp_fn.packing import allocate_packed, pack
from fsdp_fn.placement import arriving
from fsdp_fn.policy import PrecisionPolicy
from fsdp_fn.reducing import reduce_packed
from fsdp_fn.state import UnitState, trainable_tensors, zeros_like_main
from harness import run_distributed

across_ranks = settings(max_examples=12)


def mean_of_ranks(dtype: torch.dtype, shape: tuple[int, ...]) -> list[float]:
    unit = unit_on_ranks(((shape, dtype),))
    reduced = reduced_now([torch.full(shape, dist.get_rank() + 1.0, dtype=dtype)], unit)
    assert reduced.owned(0).dtype == dtype
    return reduced.owned(0).reshape(-1).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (5, 3), ()])
def test_the_mean_over_ranks_is_exact(world_size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    parts = run_distributed(world_size, mean_of_ranks, dtype, shape)
    mean = {1: 1.0, 2: 1.5, 3: 2.0, 4: 2.5}[world_size]
    assert [value for part in parts for value in part] == [mean] * torch.Size(shape).numel()


def rank_gradients(unit: UnitState, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    specs = [unit.layout.tensors[index] for index in trainable_tensors(unit.layout)]
    return [torch.randint(-64, 64, spec.shape, generator=generator).to(spec.dtype) for spec in specs]


def reduce_and_compare(described: Described, granularity: Granularity) -> bool:
    unit = unit_on_ranks(described, granularity=granularity)
    reduced = reduced_now(rank_gradients(unit, dist.get_rank()), unit)
    every = [rank_gradients(unit, rank) for rank in range(unit.axes[0].size)]
    right = True
    for position, index in enumerate(trainable_tensors(unit.layout)):
        total = torch.stack([grads[position] for grads in every]).sum(0)
        owned = owned_range(unit.layout, index, unit.axes[0].rank)
        expected = (total / unit.axes[0].size).reshape(-1)[owned.start : owned.stop]
        right &= torch.equal(reduced.owned(index).reshape(-1), expected)
    padding = sum(flat.count_nonzero().item() for flat in reduced.segments)
    elements = sum(reduced.owned(index).count_nonzero().item() for index in trainable_tensors(unit.layout))
    return right and padding == elements


@pytest.mark.parametrize("granularity", [Flat(), TensorAtomic()])
def test_each_rank_keeps_the_mean_of_its_own_rows_and_padding_stays_zero(
    world_size: int, granularity: Granularity
) -> None:
    described: Described = (*FEW_ROWS, ((7, 3), torch.bfloat16), ((3,), torch.int64), ((5,), torch.float32))
    assert run_distributed(world_size, reduce_and_compare, described, granularity) == [True] * world_size


@across_ranks
@given(described_tensors(), st.sampled_from([Flat(), BlockAtomic(2)]))
def test_whatever_the_shapes_the_mean_arrives_where_it_belongs(described: Described, granularity: Granularity) -> None:
    assert run_distributed(3, reduce_and_compare, described, granularity) == [True] * 3


def reduce_with_missing() -> tuple[float, float, bool]:
    unit = unit_on_ranks((((4, 3), torch.float32), ((5,), torch.float32), ((6, 2), torch.float32)))
    rank = dist.get_rank()
    grads = [torch.full((4, 3), rank + 1.0), None, torch.full((6, 2), 2.0) if rank == 0 else None]
    reduced = reduced_now(grads, unit)
    sums = [reduced.owned(index).sum() for index in range(3)]
    for total in sums:
        dist.all_reduce(total)
    return sums[0].item(), sums[1].item(), abs(sums[2].item() - 24.0 / unit.axes[0].size) < 1e-5


def test_a_missing_gradient_counts_as_zeros_on_one_rank_or_on_all(world_size: int) -> None:
    mean = (world_size + 1) / 2
    assert run_distributed(world_size, reduce_with_missing) == [(12 * mean, 0.0, True)] * world_size


def accumulate_microbatches(asynchronous: bool) -> tuple[set[float], bool]:
    unit = unit_on_ranks((((4, 3), torch.float32), ((2,), torch.float32), ((3,), torch.int64)))
    total = zeros_like_main(unit)
    addresses = [flat.data_ptr() for flat in total.segments]
    for power in range(3):
        value = (dist.get_rank() + 1) * 10.0**power
        grads = [torch.full((4, 3), value), torch.full((2,), value)]
        result = reduce_scatter(grads, unit, accumulate=total, async_op=asynchronous)
        given = result.wait() if isinstance(result, Pending) else result
        assert given is total
        if isinstance(result, Pending):
            assert result.wait() is total
    values = {value for index in (0, 1) for value in total.owned(index).reshape(-1).tolist()}
    return values, [flat.data_ptr() for flat in total.segments] == addresses


@pytest.mark.parametrize("asynchronous", [False, True])
def test_microbatches_add_up_the_mean_of_each_once(world_size: int, asynchronous: bool) -> None:
    mean = (world_size + 1) / 2
    for values, in_place in run_distributed(world_size, accumulate_microbatches, asynchronous):
        assert values <= {111 * mean}
        assert in_place


def reduce_in(reduce_dtype: torch.dtype | None, main_dtype: torch.dtype | None) -> tuple[torch.dtype, float]:
    precision = PrecisionPolicy(main_dtype=main_dtype, reduce_dtype=reduce_dtype)
    unit = unit_on_ranks((((8, 2), torch.bfloat16),), precision=precision)
    # 1 + 256 is not a bfloat16.
    grad = torch.full((8, 2), 256.0 if dist.get_rank() else 1.0, dtype=torch.bfloat16)
    reduced = reduced_now([grad], unit).owned(0)
    return reduced.dtype, reduced.flatten()[0].item()


@pytest.mark.parametrize(
    ("reduce_dtype", "main_dtype", "dtype", "mean"),
    [
        (None, None, torch.bfloat16, 128.0),
        (None, torch.float32, torch.float32, 128.5),
        (torch.bfloat16, torch.float32, torch.float32, 128.0),
        (torch.float32, None, torch.bfloat16, 128.0),
        (torch.float32, torch.float64, torch.float64, 128.5),
    ],
)
def test_gradients_are_summed_in_the_reduce_dtype_and_kept_in_the_main_dtype(
    reduce_dtype: torch.dtype | None, main_dtype: torch.dtype | None, dtype: torch.dtype, mean: float
) -> None:
    assert run_distributed(2, reduce_in, reduce_dtype, main_dtype) == [(dtype, mean)] * 2


def mean_whose_sum_overflows() -> float:
    unit = unit_on_ranks((((16, 2), torch.float16),), precision=PrecisionPolicy(reduce_dtype=torch.float32))
    return reduced_now([torch.full((16, 2), 60000.0, dtype=torch.float16)], unit).owned(0).max().item()


def test_a_mean_that_fits_the_main_dtype_survives_a_sum_that_does_not() -> None:
    assert run_distributed(2, mean_whose_sum_overflows) == [60000.0] * 2


def launches_of_a_reduction(described: Described) -> tuple[list[str], int, int]:
    unit = unit_on_ranks(described)
    grads: list[torch.Tensor | None] = list(rank_gradients(unit, 0))
    grads[0] = None
    with Launches() as launches:
        reduced_now(grads, unit)
    return (
        launches.collectives,
        launches.count("aten::_foreach_copy_"),
        launches.count("aten::_foreach_zero_"),
    )


def test_a_unit_is_packed_by_one_copy_and_reduced_in_one_launch() -> None:
    launched = run_distributed(2, launches_of_a_reduction, EVERY_DTYPE)
    assert launched == [(["c10d::reduce_scatter_tensor_coalesced_"], 1, 1)] * 2


def test_a_single_rank_reduces_with_no_collective() -> None:
    assert run_distributed(1, launches_of_a_reduction, EVERY_DTYPE) == [([], 1, 1)]


def reduce_strided() -> bool:
    unit = unit_on_ranks((((4, 6), torch.float32), ((3, 4), torch.float32)))
    transposed = torch.arange(24.0).view(6, 4).t()
    expanded = torch.tensor(2.0).expand(3, 4)
    assert not transposed.is_contiguous()
    reduced = reduced_now([transposed, expanded], unit)
    plain = reduced_now([transposed.contiguous(), expanded.contiguous()], unit)
    return all(torch.equal(one, other) for one, other in zip(reduced.segments, plain.segments, strict=True)) and any(
        flat.any() for flat in plain.segments
    )


def test_transposed_and_expanded_gradients_are_reduced_as_their_values_are() -> None:
    assert run_distributed(2, reduce_strided) == [True] * 2


def reduce_frozen() -> tuple[int, list[str], bool]:
    unit = unit_on_ranks((((4, 6), torch.float32), ((3,), torch.int64)), frozen={"weight0"})
    with Launches() as launches:
        reduced = reduced_now([], unit)
        added = reduced_now([], unit, accumulate=zeros_like_main(unit))
    return len(reduced.segments), launches.collectives, added.segments == ()


def test_a_unit_with_nothing_to_train_reduces_nothing(world_size: int) -> None:
    assert run_distributed(world_size, reduce_frozen) == [(0, [], True)] * world_size


def both_ways(reduce_dtype: torch.dtype, main_dtype: torch.dtype) -> bool:
    """The mean made into given shards, as the module wrapper does, and as a result."""
    precision = PrecisionPolicy(main_dtype=main_dtype, reduce_dtype=reduce_dtype)
    unit = unit_on_ranks((((16, 3), torch.float16),), precision=precision)
    grads = [torch.randn(16, 3) * 1000 + dist.get_rank()]
    given = zeros_like_main(unit)
    packed = pack(grads, unit, allocate_packed(unit))
    reduce_packed(packed, list(given.segments), unit.axes, arriving(unit.strategy), unit.divisor)
    returned = reduced_now(grads, unit)
    return all(same_bits(one, other) for one, other in zip(given.segments, returned.segments, strict=True))


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("main_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mean_into_given_shards_is_the_mean_that_is_returned(
    reduce_dtype: torch.dtype, main_dtype: torch.dtype
) -> None:
    assert run_distributed(3, both_ways, reduce_dtype, main_dtype) == [True] * 3
