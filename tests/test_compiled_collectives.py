"""Inside ``torch.compile`` the same calls become one collective each in the graph, with the same numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launches import capturing_backend
from sharded_units import Described, make_unit, same_bits, unit_on_ranks, values_of
from strategy_cases import cases
from torch._inductor.utils import run_and_get_code

from fsdp_fn.collectives import Pending, gather_planes, reduce_scatter, refresh_planes
from fsdp_fn.groups import axis_of, default_mesh
from fsdp_fn.planes import Phase, PlaneKind
from fsdp_fn.policy import PrecisionPolicy
from fsdp_fn.state import Buffer, Gathered, UnitState, zeros_like_main
from harness import run_distributed

GATHER = "_c10d_functional::all_gather_into_tensor_coalesced"
REDUCE = "_c10d_functional::reduce_scatter_tensor_coalesced"
ONE_DTYPE: Described = (((7, 3), torch.float32), ((5,), torch.float32), ((1, 4), torch.float32))
MIXED: Described = (
    ((7, 3), torch.float32),
    ((5,), torch.bfloat16),
    ((3,), torch.int64),
    ((2, 3), torch.float8_e4m3fn),
)


def waited(result: Any) -> Any:
    return result.wait() if isinstance(result, Pending) else result


def forward_and_reduce(
    unit: UnitState, scale: torch.Tensor, accumulate: Buffer | None, asynchronous: bool
) -> tuple[Gathered, Buffer]:
    """A step in small: gather, compute gradients from the weights, reduce."""
    gathered = waited(gather_planes(unit, Phase.FORWARD, async_op=asynchronous))
    specs = enumerate(unit.layout.tensors)
    grads = [gathered.weight(index) * scale for index, spec in specs if spec.requires_grad]
    reduced = waited(reduce_scatter(grads, unit, accumulate=accumulate, async_op=asynchronous))
    return gathered, reduced


def tensors_of(*states: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(states) if isinstance(leaf, torch.Tensor)]


def compile_and_compare(
    described: Described, precision: PrecisionPolicy, accumulating: bool, asynchronous: bool
) -> tuple[bool, list[list[str]]]:
    torch._dynamo.reset()
    unit = unit_on_ranks(described, precision=precision)
    scale = torch.tensor(dist.get_rank() + 1.0)
    start = [zeros_like_main(unit) if accumulating else None for _ in range(2)]
    eager = forward_and_reduce(unit, scale, start[0], asynchronous)
    graphs: list[list[str]] = []
    compiled = torch.compile(forward_and_reduce, fullgraph=True, backend=capturing_backend(graphs))
    found = compiled(unit, scale, start[1], asynchronous)
    pairs = list(zip(tensors_of(found, start[1]), tensors_of(eager, start[0]), strict=True))
    equal = all(same_bits(new, old) for new, old in pairs)
    collectives = [[name for name in graph if name in (GATHER, REDUCE)] for graph in graphs]
    return equal and len(pairs) > 0, collectives


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("accumulating", [False, True], ids=["fresh", "accumulating"])
@pytest.mark.parametrize(
    ("described", "precision"),
    [
        (ONE_DTYPE, PrecisionPolicy()),
        (ONE_DTYPE, PrecisionPolicy(compute_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
        (MIXED, PrecisionPolicy()),
    ],
    ids=["one-dtype", "cast", "mixed"],
)
def test_a_full_graph_holds_one_collective_each_and_gives_the_same_bits(
    described: Described, precision: PrecisionPolicy, accumulating: bool, asynchronous: bool
) -> None:
    results = run_distributed(2, compile_and_compare, described, precision, accumulating, asynchronous)
    assert results == [(True, [[GATHER, REDUCE]])] * 2


@pytest.mark.parametrize("world_size", [1, 3])
def test_other_world_sizes_compile_too_and_alone_there_is_no_collective(world_size: int) -> None:
    results = run_distributed(world_size, compile_and_compare, MIXED, PrecisionPolicy(), True, True)
    assert results == [(True, [[GATHER, REDUCE] if world_size > 1 else []])] * world_size


def gather_into(unit: UnitState, out: Gathered) -> Gathered:
    gathered: Gathered = waited(gather_planes(unit, Phase.FORWARD, out=out))
    return gathered


def compile_a_gather_into_given() -> tuple[bool, bool]:
    torch._dynamo.reset()
    unit = unit_on_ranks(ONE_DTYPE)
    out = gather_planes(unit, Phase.FORWARD)
    assert isinstance(out, Gathered)
    flats = out.planes[PlaneKind.DENSE].segments
    for flat in flats:
        flat.zero_()
    newer = dataclasses.replace(unit, version=3)
    compiled = torch.compile(gather_into, fullgraph=True, backend="aot_eager")
    found = compiled(newer, out)
    written = all(torch.equal(out.weights()[name], value) for name, value in values_of(ONE_DTYPE).items())
    return written, found.version == 3


def test_a_compiled_gather_writes_into_the_buffer_that_it_is_given() -> None:
    assert run_distributed(2, compile_a_gather_into_given) == [(True, True)] * 2


def two_started_then_waited(first: UnitState, second: UnitState, inputs: torch.Tensor) -> torch.Tensor:
    one = gather_planes(first, Phase.FORWARD, async_op=True)
    other = gather_planes(second, Phase.FORWARD, async_op=True)
    assert isinstance(one, Pending)
    assert isinstance(other, Pending)
    hidden = torch.relu(inputs @ one.wait().weight(0).t())
    return hidden @ other.wait().weight(0).t()


def order_of_two_gathers() -> list[str]:
    torch._dynamo.reset()
    axis = axis_of(default_mesh("cpu"))
    one, other = (make_unit({"weight": torch.randn(4, 4)}, axis, name=name) for name in ("one", "other"))
    inputs = torch.randn(2, 4)
    graphs: list[list[str]] = []
    compiled = torch.compile(two_started_then_waited, fullgraph=True, backend=capturing_backend(graphs))
    assert torch.equal(compiled(one, other, inputs), two_started_then_waited(one, other, inputs))
    (graph,) = graphs
    kept = {GATHER: "gather", "_c10d_functional::wait_tensor": "wait", "aten::mm": "compute"}
    return [kept[name] for name in graph if name in kept]


def test_a_gather_that_is_started_early_stays_early_in_the_graph() -> None:
    assert run_distributed(2, order_of_two_gathers) == [["gather", "gather", "wait", "compute", "wait", "compute"]] * 2


def gather_and_accumulate(unit: UnitState, scale: torch.Tensor) -> tuple[Gathered, Buffer]:
    """Two microbatches."""
    gathered = waited(gather_planes(unit, Phase.FORWARD))
    grads = [gathered.weight(index) * scale for index in range(len(unit.layout.tensors))]
    total = reduce_scatter(grads, unit, last_microbatch=False)
    return gathered, waited(reduce_scatter(grads, unit, accumulate=total))


STRATEGIES = ("sharded optimizer alone", "hfsdp")  # every kind of step, on one axis and on two


def compile_strategies() -> None:
    scale = torch.tensor(dist.get_rank() + 1.0)
    for name, strategy, axes in cases():
        if name not in STRATEGIES:
            continue
        torch._dynamo.reset()
        unit = make_unit(values_of(ONE_DTYPE), axes, strategy=strategy)
        compiled = torch.compile(gather_and_accumulate, fullgraph=True, backend="aot_eager")
        for given in (unit, refresh_planes(unit)):
            found, expected = (tensors_of(run(given, scale)) for run in (compiled, gather_and_accumulate))
            for new, old in zip(found, expected, strict=True):
                assert same_bits(new, old), f"{name}: {new}, expected {old}"


@pytest.mark.slow
def test_strategies_compile_to_a_full_graph_with_the_same_bits() -> None:
    run_distributed(4, compile_strategies, timeout=240.0)


def compile_with_inductor(described: Described, precision: PrecisionPolicy) -> tuple[bool, int, int]:
    torch._dynamo.reset()
    unit = unit_on_ranks(described, precision=precision)
    scale = torch.tensor(dist.get_rank() + 1.0)
    eager = forward_and_reduce(unit, scale, None, True)
    compiled = torch.compile(forward_and_reduce, fullgraph=True, backend="inductor")
    found, sources = run_and_get_code(compiled, unit, scale, None, True)
    text = "\n".join(sources)
    pairs = zip(tensors_of(found), tensors_of(eager), strict=True)
    close = all(
        torch.allclose(new.float(), old.float(), rtol=1e-5, atol=1e-6) and new.dtype == old.dtype for new, old in pairs
    )
    gathers, reductions = (text.count(f"torch.ops.{name.replace('::', '.')}.default([") for name in (GATHER, REDUCE))
    return close, gathers, reductions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("described", "precision"),
    [(ONE_DTYPE, PrecisionPolicy(compute_dtype=torch.bfloat16)), (MIXED, PrecisionPolicy())],
    ids=["cast", "mixed"],
)
def test_inductor_keeps_one_collective_each_and_the_numbers(described: Described, precision: PrecisionPolicy) -> None:
    results = run_distributed(2, compile_with_inductor, described, precision, timeout=240.0)
    assert results == [(True, 1, 1)] * 2
