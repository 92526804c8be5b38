"""What each strategy sends, over which axis, how many bytes; and what it holds: both against their formulas.

Traffic is taken from the calls that reach the process groups, memory from the tensors that live.
"""

from __future__ import annotations

import gc
from collections import Counter

import torch
import torch.distributed as dist
from models import Block, build, tokens
from strategies import Small, Wrapped, mesh_for, strategies_for
from traffic import Traffic, counted

import fsdp_fn
from fsdp_fn.module import FsdpModule
from fsdp_fn.placement import Placements, Strategy
from fsdp_fn.runtime import ResizedBuffer
from fsdp_fn.state import UnitState, trainable_segments
from harness import run_distributed


def parts_of(strategy: Placements | Strategy) -> Strategy:
    return (strategy,) if isinstance(strategy, Placements) else strategy


def expected_traffic(unit: UnitState, strategy: Strategy, microbatches: int) -> Traffic:
    """Of one step in which weights at rest have to be made anew: what the strategy must cost, by hand."""
    compute = sum(unit.layout.segments[i].size * unit.layout.segments[i].dtype.itemsize for i in unit.main.held)
    reduced = sum(
        unit.layout.segments[i].size * unit.precision.reduce(unit.layout.segments[i].dtype).itemsize
        for i in trainable_segments(unit.layout)
    )
    found: Traffic = Counter()
    # Outer axes hold pieces of inner ones' pieces: what a gather or a reduction over them moves is smaller.
    weight_piece = gradient_piece = 1
    for axis, p in reversed(list(zip(unit.axes, strategy, strict=True))):
        if isinstance(p.parameter, fsdp_fn.Sharded):
            found["gather", axis.group] += 2 * microbatches * compute // weight_piece
            weight_piece *= axis.size
        elif isinstance(p.optimizer, fsdp_fn.Sharded):
            found["gather", axis.group] += compute // weight_piece
            weight_piece *= axis.size
    for axis, p in reversed(list(zip(unit.axes, strategy, strict=True))):
        times = 1 if isinstance(p.gradient, fsdp_fn.Partial) else microbatches
        scatter = isinstance(p.optimizer, fsdp_fn.Sharded) and not isinstance(p.gradient, fsdp_fn.Replicate)
        found["reduce_scatter" if scatter else "all_reduce", axis.group] += times * reduced // gradient_piece
        if scatter:
            gradient_piece *= axis.size
    return found


def check_traffic(precision: fsdp_fn.PrecisionPolicy) -> None:
    for name, strategy in strategies_for(dist.get_world_size()).items():
        model = Wrapped.of(build(Small), (Block,), mesh=mesh_for(strategy), placements=strategy, precision=precision)
        optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
        units = [child._fsdp_unit.state for child in model.module.modules() if isinstance(child, FsdpModule)]
        model.module(tokens()).float().sum().backward()
        for microbatches in (1, 3):
            optimizer.step()
            optimizer.zero_grad()
            with counted() as found:
                with fsdp_fn.accumulating(model.module):
                    for _ in range(microbatches - 1):
                        model.module(tokens()).float().sum().backward()
                model.module(tokens()).float().sum().backward()
            wanted: Traffic = Counter()
            for unit in units:
                unit_precision = unit.precision
                scale = 2 if unit_precision.compute_dtype is torch.bfloat16 else 1
                for (kind, group), size in expected_traffic(unit, parts_of(strategy), microbatches).items():
                    wanted[kind, group] += size // scale if kind == "gather" else size
            assert found == wanted, f"{name}, {microbatches} microbatches: {dict(found)}, expected {dict(wanted)}"


def test_each_strategy_sends_what_it_must_and_no_more() -> None:
    for world_size in (2, 4):
        run_distributed(world_size, check_traffic, fsdp_fn.PrecisionPolicy())
    bf16 = fsdp_fn.PrecisionPolicy(compute_dtype=torch.bfloat16)
    run_distributed(2, check_traffic, bf16)


def resident_bytes(model: torch.nn.Module) -> dict[str, int]:
    """Bytes at rest: main weights and gradients, and weights that are kept whole or in part beside them."""
    found = {"main": 0, "gradient": 0, "at rest": 0}
    for child in model.modules():
        if not isinstance(child, FsdpModule):
            continue
        unit = child._fsdp_unit
        found["main"] += sum(flat.untyped_storage().nbytes() for flat in unit.state.main.segments)
        grads = {
            g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for _, g in unit.delivery.local_gradients()
        }
        found["gradient"] += sum(grads.values())
        kept = getattr(unit.weights, "_at_rest", None)
        found["at rest"] += 0 if kept is None else kept.buffer.allocated
    return found


def check_memory() -> None:
    for name, strategy in strategies_for(dist.get_world_size()).items():
        model = Wrapped.of(build(Small), (Block,), mesh=mesh_for(strategy), placements=strategy).module
        units = [child._fsdp_unit.state for child in model.modules() if isinstance(child, FsdpModule)]
        model(tokens()).sum().backward()
        wanted = {"main": 0, "gradient": 0, "at rest": 0}
        for unit in units:
            sizes = [unit.layout.segments[i].size * 4 for i in unit.main.held]
            pieces = {"optimizer": 1, "parameter": 1}
            for axis, p in zip(unit.axes, parts_of(strategy), strict=True):
                for kind in pieces:
                    pieces[kind] *= axis.size if isinstance(getattr(p, kind), fsdp_fn.Sharded) else 1
            wanted["main"] += sum(sizes) // pieces["optimizer"]
            wanted["gradient"] += sum(sizes) // pieces["optimizer"]
            if pieces["parameter"] != pieces["optimizer"]:
                # Each flat tensor begins at a multiple of 256 bytes.
                wanted["at rest"] += sum(-(-size // pieces["parameter"] // 256) * 256 for size in sizes)
        assert resident_bytes(model) == wanted, f"{name}: {resident_bytes(model)}, expected {wanted}"
        gc.collect()
        other = [b.allocated for b in gc.get_objects() if type(b) is ResizedBuffer and b.allocated]
        assert not other, f"{name}: {other} bytes of buffers besides"


def test_each_strategy_holds_what_its_formula_says() -> None:
    for world_size in (1, 2, 4):
        run_distributed(world_size, check_memory)
