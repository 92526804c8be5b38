"""A training step with a schedule of your own, written from the primitives alone.

    python docs/examples/custom_schedule.py                                # one process
    torchrun --nproc-per-node=2 docs/examples/custom_schedule.py           # two: GPUs where there are, else CPU

A network of two units. Nothing here is hooked into a module: weights are state that this file holds, a gather
begins where it says ``gather_planes`` and ends where it says ``wait``, and a unit's full weights are gone
when the last name for them is. ``gradients`` is the schedule; to try another, move its lines.

Promises: gradients are those of plain PyTorch on the whole batch. The second unit's weights travel while the
first computes, the first's come back for backward while the second computes, and the second's gradients are
reduced while the first runs backward.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import fsdp_fn
from fsdp_fn import Phase

FEATURES, HIDDEN, CLASSES = 16, 33, 5
ROWS_PER_RANK = 32
STEPS, LEARNING_RATE = 20, 0.5

Weights = Mapping[str, torch.Tensor]
Stage = Callable[[Weights, torch.Tensor], torch.Tensor]


def hidden_layer(weights: Weights, inputs: torch.Tensor) -> torch.Tensor:
    """What the first unit computes: ``(rows, FEATURES) -> (rows, HIDDEN)``."""
    return torch.relu(F.linear(inputs, weights["weight"], weights["bias"]))


def output_layer(weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
    """What the second unit computes: ``(rows, HIDDEN) -> (rows, CLASSES)``."""
    return F.linear(hidden, weights["weight"], weights["bias"])


@dataclass(frozen=True)
class Network:
    """This rank's shards of the two units, and what each computes."""

    first: fsdp_fn.UnitState
    second: fsdp_fn.UnitState
    first_stage: Stage = hidden_layer
    second_stage: Stage = output_layer


def make_weights() -> dict[str, dict[str, torch.Tensor]]:
    """Full weights by unit and name, the same in every process."""
    generator = torch.Generator().manual_seed(0)

    def linear(rows: int, columns: int) -> dict[str, torch.Tensor]:
        weight = torch.randn(rows, columns, generator=generator) / columns**0.5
        return {"weight": weight, "bias": torch.zeros(rows)}

    return {"first": linear(HIDDEN, FEATURES), "second": linear(CLASSES, HIDDEN)}


def make_batch(ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs ``(ranks * ROWS_PER_RANK, FEATURES)`` and classes that depend on them."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(ranks * ROWS_PER_RANK, FEATURES, generator=generator)
    return inputs, inputs[:, :CLASSES].argmax(1)


def make_network(mesh: DeviceMesh, device: torch.device) -> Network:
    """Both units, sharded over ``mesh``."""
    weights = {name: {key: value.to(device) for key, value in unit.items()} for name, unit in make_weights().items()}
    first, second = (fsdp_fn.shard_tensors(name, tensors, mesh) for name, tensors in weights.items())
    return Network(first, second)


# --- the schedule -------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """What this process did, in order."""

    lines: list[str] = dataclasses.field(default_factory=list)

    def note(self, what: str, unit: fsdp_fn.UnitState) -> None:
        """Add a line."""
        self.lines.append(f"{what:<21}{unit.name}")


def start_gather(unit: fsdp_fn.UnitState, phase: Phase, trace: Trace) -> fsdp_fn.Pending[fsdp_fn.Gathered]:
    """Full weights under way. All ranks start their gathers and reductions in one order: no ifs here."""
    trace.note("start gather", unit)
    pending = fsdp_fn.gather_planes(unit, phase, async_op=True)
    return pending


def start_reduce(unit: fsdp_fn.UnitState, grads: list[torch.Tensor], trace: Trace) -> fsdp_fn.Pending[fsdp_fn.Buffer]:
    """This rank's shard of the mean gradient under way; ``grads`` in the order of the unit's tensors."""
    trace.note("start reduce", unit)
    pending = fsdp_fn.reduce_scatter(grads, unit, async_op=True)
    return pending


def as_leaves(gathered: fsdp_fn.Gathered) -> dict[str, torch.Tensor]:
    """The gathered weights as inputs to differentiate by: the same memory, at the start of a new graph."""
    return {name: weight.detach().requires_grad_() for name, weight in gathered.weights().items()}


def gradients(
    network: Network, inputs: torch.Tensor, targets: torch.Tensor, trace: Trace
) -> tuple[torch.Tensor, dict[str, fsdp_fn.Buffer]]:
    """This rank's loss, and its shards of the gradients averaged over ranks, by unit. All ranks must call."""
    first, second = network.first, network.second

    # Forward. Nothing can hide the very first gather; the second is under way before the first unit computes.
    gathering_first = start_gather(first, Phase.FORWARD, trace)
    gathered_first = gathering_first.wait()
    trace.note("wait for gather", first)
    gathering_second = start_gather(second, Phase.FORWARD, trace)
    # No graph: autograd would hold the full weights until backward, which computes this unit again instead.
    with torch.no_grad():
        hidden = network.first_stage(gathered_first.weights(), inputs)
    trace.note("compute", first)
    del gathered_first, gathering_first  # a Pending holds its result too
    trace.note("release", first)
    gathered_second = gathering_second.wait()
    trace.note("wait for gather", second)

    # The last unit goes straight from forward to backward, so its weights stay, while the first's are fetched.
    gathering_first = start_gather(first, Phase.BACKWARD, trace)
    weights = as_leaves(gathered_second)
    hidden.requires_grad_()
    loss = F.cross_entropy(network.second_stage(weights, hidden), targets)
    grad_hidden, *grads_second = torch.autograd.grad(loss, [hidden, *weights.values()])
    trace.note("compute and backward", second)
    loss = loss.detach()  # its graph ends at the full weights, and would keep them
    del gathered_second, gathering_second, weights
    trace.note("release", second)

    # The second unit's gradients travel while the first runs backward.
    reducing_second = start_reduce(second, grads_second, trace)
    gathered_first = gathering_first.wait()
    trace.note("wait for gather", first)
    weights = as_leaves(gathered_first)
    again = network.first_stage(weights, inputs)
    grads_first = torch.autograd.grad(again, list(weights.values()), grad_hidden)
    trace.note("recompute, backward", first)
    del gathered_first, gathering_first, weights, again
    trace.note("release", first)

    reducing_first = start_reduce(first, list(grads_first), trace)
    reduced = {second.name: reducing_second.wait(), first.name: reducing_first.wait()}
    trace.note("wait for reduce", second)
    trace.note("wait for reduce", first)
    return loss, reduced


def descended(unit: fsdp_fn.UnitState, gradient: fsdp_fn.Buffer, learning_rate: float) -> fsdp_fn.UnitState:
    """The unit one step of gradient descent later; its version makes what was gathered before stale."""
    # All tensors are trained here, so the gradient has the same segments as the main weights.
    flats = torch._foreach_add(list(unit.main.segments), list(gradient.segments), alpha=-learning_rate)
    main = dataclasses.replace(unit.main, segments=tuple(flats))
    return dataclasses.replace(unit, main=main, version=unit.version + 1)


def train_step(
    network: Network, inputs: torch.Tensor, targets: torch.Tensor, learning_rate: float, trace: Trace
) -> tuple[Network, torch.Tensor]:
    """The network after one step, and this rank's loss before it."""
    loss, reduced = gradients(network, inputs, targets, trace)
    stepped = dataclasses.replace(
        network,
        first=descended(network.first, reduced["first"], learning_rate),
        second=descended(network.second, reduced["second"], learning_rate),
    )
    return stepped, loss


# --- the program --------------------------------------------------------------------------------------------


def main() -> None:
    """Train for a few steps; rank 0 prints the first step's trace and the losses."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))
        axis = fsdp_fn.axis_of(mesh)
        rows = slice(axis.rank * ROWS_PER_RANK, (axis.rank + 1) * ROWS_PER_RANK)
        inputs, targets = (whole[rows].to(device) for whole in make_batch(axis.size))
        network = make_network(mesh, device)
        for step in range(STEPS):
            trace = Trace()
            network, loss = train_step(network, inputs, targets, LEARNING_RATE, trace)
            dist.all_reduce(loss)  # the sum: a mean over ranks is not every backend's own
            if axis.rank == 0 and step == 0:
                print(f"The first step on rank 0 of {axis.size}:", *trace.lines, sep="\n  ")
            if axis.rank == 0 and step in (0, STEPS - 1):
                print(f"step {step + 1:>3}  loss {loss.item() / axis.size:.4f}", flush=True)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
