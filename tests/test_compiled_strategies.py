"""Every strategy traces whole, with the eager path's bits, and its graphs hold the collectives that it must cost."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import check_equal
from launches import capturing_backend
from models import Block, build, tokens
from strategies import ONE_AXIS, TWO_AXES, Small, mesh_for
from torch import nn

import fsdp_fn
from harness import run_distributed

UNITS = 2


def loss_of(
    template: fsdp_fn.Template, state: fsdp_fn.ModelState, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, fsdp_fn.ModelState]:
    output, state = fsdp_fn.apply(template, state, inputs)
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten()), state


def gathers_and_reductions(strategy: Any, units: int, refreshed: bool, last: bool) -> tuple[Counter[str], Counter[str]]:
    """What the forward and the backward graph must hold, by kind of collective."""
    parts = (strategy,) if isinstance(strategy, fsdp_fn.Placements) else strategy
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    for p in parts:
        if isinstance(p.parameter, fsdp_fn.Sharded):
            forward["gather"] += units
            backward["gather"] += units
        elif isinstance(p.optimizer, fsdp_fn.Sharded) and not refreshed:
            forward["gather"] += units
        sharded = isinstance(p.optimizer, fsdp_fn.Sharded)
        if not isinstance(p.gradient, fsdp_fn.Partial):
            backward["reduce_scatter" if isinstance(p.gradient, fsdp_fn.Sharded) else "all_reduce"] += units
        elif last:
            backward["reduce_scatter" if sharded else "all_reduce"] += units
    return forward, backward


def kinds_in(operators: list[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for name in operators:
        for kind, start in (
            ("gather", "_c10d_functional::all_gather"),
            ("reduce_scatter", "_c10d_functional::reduce_scatter"),
            ("all_reduce", "_c10d_functional::all_reduce"),
        ):
            found[kind] += name.startswith(start)
    return +found


def compile_each(names: list[str], last: bool) -> None:
    for name in names:
        strategy = {**ONE_AXIS, **TWO_AXES}[name]
        torch._dynamo.reset()
        template, state = fsdp_fn.shard(build(Small), mesh_for(strategy), units=[Block], placements=strategy)
        seen: list[list[str]] = []
        compiled = torch.compile(loss_of, fullgraph=True, backend=capturing_backend(seen))
        refreshed = False
        for step in range(2):
            eager, traced = (fsdp_fn.with_gradients(state, last_microbatch=last) for _ in range(2))
            seen.clear()
            own = 1000 * dist.get_rank() + step
            loss, _ = loss_of(template, eager, tokens(own), tokens(own + 500))
            loss.backward()
            traced_loss, moved = compiled(template, traced, tokens(own), tokens(own + 500))
            traced_loss.backward()
            check_equal(traced_loss, loss, f"{name}: loss")
            ours, theirs = fsdp_fn.gradients_of(traced), fsdp_fn.gradients_of(eager)
            for unit, buffer in ours.items():
                assert buffer.placements == theirs[unit].placements
                for flat, other in zip(buffer.segments, theirs[unit].segments, strict=True):
                    check_equal(flat, other, f"{name}: gradient of {unit!r}")
            if seen:
                forward, backward = gathers_and_reductions(strategy, UNITS, refreshed, last)
                found = [kinds_in(operators) for operators in seen]
                assert found == [forward, backward], f"{name}, step {step}: {found}, expected {[forward, backward]}"
            # The state that came back has its planes: the next application gathers no more for them.
            state = fsdp_fn.without_gradients(moved)
            refreshed = all(unit.planes is not None for unit in state.units.values())


@pytest.mark.parametrize("last", [True, False], ids=["last microbatch", "earlier microbatch"])
def test_each_strategy_compiles_to_the_eager_bits_and_its_own_collectives(last: bool) -> None:
    run_distributed(2, compile_each, list(ONE_AXIS), last, timeout=200)


@pytest.mark.parametrize("last", [True, False], ids=["last microbatch", "earlier microbatch"])
def test_so_do_those_of_two_axes(last: bool) -> None:
    run_distributed(4, compile_each, ["hsdp", "hfsdp", "zero2 over both"], last, timeout=200)
