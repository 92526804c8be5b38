"""The functional path under torch.compile(fullgraph=True): traffic counted in the graphs, numbers equal to eager."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import fsdp_fn
from harness import run_distributed

GATHER = "_c10d_functional.all_gather_into_tensor_coalesced.default"
WAIT = "_c10d_functional.wait_tensor.default"
REDUCE = "_c10d_functional.reduce_scatter_tensor_coalesced.default"


class Block(nn.Module):
    """A residual block with a frozen weight, a buffer and dropout; odd sizes make uneven and empty shards."""

    def __init__(self, width: int, frozen: bool, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)
        self.down.weight.requires_grad_(not frozen)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Embedding, three blocks, head: four units."""

    def __init__(self, fp32: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 7)
        self.blocks = nn.ModuleList(Block(7, frozen=index == 1, dropout=0.25 if fp32 else 0.0) for index in range(3))
        self.normalise = nn.BatchNorm1d(7) if fp32 else nn.LayerNorm(7)
        self.head = nn.Linear(7, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.normalise(x))


UNITS = 4


def counting_backend(counts: dict[str, Counter[str]]) -> Callable[..., Any]:
    """aot_eager that counts the collectives in its forward and backward graphs."""

    def compiler(direction: str) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> torch.fx.GraphModule:
            counts[direction].update(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph

        return compile_graph

    return aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )


def make(
    precision: fsdp_fn.PrecisionPolicy | None = None, exact: bool = True
) -> tuple[fsdp_fn.Template, fsdp_fn.ModelState]:
    torch.manual_seed(0)
    # In bf16 torch's batch norm refuses fp32 running statistics, and its dropout rounds otherwise once traced;
    # inductor draws other random numbers.
    return fsdp_fn.shard(Model(fp32=exact and precision is None), units=[Block], precision=precision)


def loss_and_gradients(
    function: Callable[..., tuple[torch.Tensor, fsdp_fn.ModelState]],
    state: fsdp_fn.ModelState,
    tokens: torch.Tensor,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    leaves = fsdp_fn.with_gradients(state)
    torch.manual_seed(3)
    loss, after = function(leaves, tokens)
    loss.backward()
    gradients = fsdp_fn.gradients_of(leaves)
    flats = [flat for buffer in gradients.values() for flat in buffer.segments]
    return loss.detach(), flats, after.buffers


def compare_compiled_with_eager(backend: str | None, compute_dtype: torch.dtype | None) -> dict[str, Any]:
    """Counts of the graphs (for the counting backend), and how compiled and eager results differ."""
    precision = None if compute_dtype is None else fsdp_fn.PrecisionPolicy(compute_dtype=compute_dtype)
    template, state = make(precision, exact=backend is None)
    tokens = torch.randint(0, 11, (13,))

    def function(state: fsdp_fn.ModelState, tokens: torch.Tensor) -> tuple[torch.Tensor, fsdp_fn.ModelState]:
        output, state = fsdp_fn.apply(template, state, tokens)
        return output.float().square().mean(), state

    counts: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend or counting_backend(counts))
    eager_loss, eager_grads, eager_buffers = loss_and_gradients(function, state, tokens)
    before = {name: buffer.clone() for name, buffer in state.buffers.items()}
    loss, grads, buffers = loss_and_gradients(compiled, state, tokens)
    again, _, _ = loss_and_gradients(compiled, state, tokens)
    assert all(torch.equal(before[name], state.buffers[name]) for name in before), "apply changed its state's buffers"
    assert list(buffers) == list(eager_buffers)
    segments = sum(len(unit.layout.segments) for unit in template.units)
    return {
        "counts": {key: {name: value[name] for name in (GATHER, REDUCE)} for key, value in counts.items()},
        "waits": (counts["forward"][WAIT], counts["backward"][WAIT], segments),
        "unwaited": torch._C._distributed_c10d._get_work_registry_size(),
        "loss": torch.equal(loss, eager_loss),
        "again": torch.equal(loss, again),
        "gradients": all(torch.equal(a, b) for a, b in zip(grads, eager_grads, strict=True)),
        "close": all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(grads, eager_grads, strict=True)),
        "buffers": all(torch.equal(buffers[name], eager_buffers[name]) for name in buffers),
        "reached": sum(flat.abs().sum().item() for flat in grads) > 0,
    }


@pytest.mark.parametrize(("ranks", "compute_dtype"), [(1, None), (2, None), (3, None), (4, None), (2, torch.bfloat16)])
def test_compiled_equals_eager_to_the_bit_with_exactly_one_gather_a_unit_and_pass(
    ranks: int, compute_dtype: torch.dtype | None
) -> None:
    for result in run_distributed(ranks, compare_compiled_with_eager, None, compute_dtype, timeout=120):
        assert all(result[key] for key in ("loss", "gradients", "buffers", "again", "reached")), result
        gathers = UNITS if ranks > 1 else 0
        assert result["counts"]["forward"] == {GATHER: gathers, REDUCE: 0}
        assert result["counts"]["backward"] == {GATHER: gathers, REDUCE: gathers}
        assert result["unwaited"] == 0
        if ranks > 1:
            # Also what backward gathers and does not read is waited for.
            forward, backward, segments = result["waits"]
            assert forward == segments
            assert backward > segments


def test_inductor_gives_the_same_numbers_within_rounding() -> None:
    for result in run_distributed(2, compare_compiled_with_eager, "inductor", None, timeout=240):
        assert result["close"]
        assert result["reached"]
        assert result["unwaited"] == 0


def largest_saved_and_smallest_gathered() -> tuple[int, int]:
    """Bytes of the largest value that the compiled forward saves, and of the smallest unit's gathered weights."""
    template, state = make()
    saved: list[int] = []

    def compile_forward(graph: torch.fx.GraphModule, inputs: list[Any]) -> torch.fx.GraphModule:
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        values = [n for n in output.args[0] if isinstance(n, torch.fx.Node) and n.op != "placeholder"]
        saved.extend(node.meta["val"].untyped_storage().nbytes() for node in values if "val" in node.meta)
        return graph

    backend = aot_autograd(
        fw_compiler=compile_forward,
        bw_compiler=lambda graph, inputs: graph,
        partition_fn=min_cut_rematerialization_partition,
    )

    def function(state: fsdp_fn.ModelState, tokens: torch.Tensor) -> torch.Tensor:
        return fsdp_fn.apply(template, state, tokens)[0].square().mean()

    torch._dynamo.reset()
    leaves = fsdp_fn.with_gradients(state)
    torch.compile(function, fullgraph=True, backend=backend)(leaves, torch.arange(3)).backward()
    gathered = [max(segment.size for segment in unit.layout.segments) * 4 for unit in state.units.values()]
    return max(saved), min(gathered)


def test_the_compiled_forward_saves_no_full_weight() -> None:
    for saved, gathered in run_distributed(2, largest_saved_and_smallest_gathered, timeout=120):
        assert 0 < saved < gathered
