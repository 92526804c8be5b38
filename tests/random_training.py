"""Random set-ups, each trained beside plain PyTorch.

Promises: what differs is collected and not raised, so that ranks stay together. Each rank compares the part of every
tensor that it holds with the reference's; at the end full weights are put together from all parts. All ranks call.
"""

from __future__ import annotations

import copy
import gc
import json
import random
import re
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from comparison import check_nothing_gathered
from models import VOCABULARY
from random_modules import build
from random_sharded import FunctionalSide, ShardedSide, WrapperSide, as_bytes
from random_sides import Batch, PlainSide, refreezes
from random_specs import NOT_ALL_TRAINED, BranchSpec, Draw, LeafSpec, NodeSpec

from fsdp_fn import Release
from fsdp_fn.runtime import ResizedBuffer

STEPS, ROWS = 3, 4
REFROZEN = 0.3
"""Of the parameters, where ``requires_grad`` changes between steps."""
TOLERANCES = {"float32": (5e-4, 1e-5), "float64": (1e-9, 1e-10), "bfloat16": (3e-2, 3e-3)}
SIDES: dict[str, type[WrapperSide] | type[FunctionalSide]] = {"wrapper": WrapperSide, "functional": FunctionalSide}

REFUSALS = (r"\(reached past the unit's outputs\)",)
"""What a set-up may be refused for; on some ranks this comes as a RankFault that quotes it."""


@dataclass(frozen=True)
class Outcome:
    """``kind``: "trained", "refused", "void" (plain PyTorch refuses it) or "failed"; before that "begun", and "failing"
    on a rank. ``text``: why.
    """

    seed: int
    kind: str
    text: str = ""


def train_all(draws: Sequence[Draw], report: Path) -> None:
    """Train each of ``draws``; outcomes are appended to ``report``, one a line, as they come.

    Rank 0 writes what became of each on all ranks; but a rank's error comes first, for it may leave the others waiting.
    """
    for draw in draws:
        if dist.get_rank() == 0:
            _write(report, Outcome(draw.seed, "begun"))
        everywhere: list[Outcome] = [Outcome(draw.seed, "begun")] * dist.get_world_size()
        outcome = attempt(draw)
        left = _free_what_is_left()
        if left and outcome.kind == "trained":
            outcome = Outcome(draw.seed, "failed", f"{left} buffers of weights or gradients outlive their model")
        if outcome.kind == "failed":
            _write(report, Outcome(draw.seed, "failing", f"rank {dist.get_rank()}: {outcome.text}"))
        dist.all_gather_object(everywhere, outcome)
        if dist.get_rank() == 0:
            _write(report, _together(everywhere))


def _free_what_is_left() -> int:
    """How many buffers there still are; their bytes are given back, so that the next draw does not meet them."""
    gc.collect()
    left = [value for value in gc.get_objects() if type(value) is ResizedBuffer]
    new = [buffer for buffer in left if id(buffer) not in _known]
    for buffer in new:
        buffer.free(Release.FREE)
        _known[id(buffer)] = buffer
    return len(new)


_known: dict[int, ResizedBuffer] = {}
"""Buffers that outlived earlier draws, kept so that no other has their ``id``."""


def _write(report: Path, outcome: Outcome) -> None:
    with report.open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def _together(outcomes: list[Outcome]) -> Outcome:
    if len({outcome.kind for outcome in outcomes}) == 1 and outcomes[0].kind != "failed":
        return outcomes[0]
    told = [f"--- rank {rank}: {outcome.kind} ---\n{outcome.text}" for rank, outcome in enumerate(outcomes)]
    return Outcome(outcomes[0].seed, "failed", "\n".join(told))


def attempt(draw: Draw) -> Outcome:
    """Train it on this rank."""
    try:
        with warnings.catch_warnings():
            # A reentrant checkpoint whose input needs no gradient says so each time.
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
            problems = Beside(draw).train()
    except _PlainRefuses as error:
        return Outcome(draw.seed, "void", str(error))
    except Exception as error:
        if any(re.search(pattern, str(error), re.DOTALL) for pattern in REFUSALS):
            return Outcome(draw.seed, "refused", str(error))
        return Outcome(draw.seed, "failed", "".join(traceback.format_exception(error)))
    return Outcome(draw.seed, "failed", "\n".join(problems[:8])) if problems else Outcome(draw.seed, "trained")


class _PlainRefuses(Exception):
    """Plain PyTorch raised an error."""


class Beside:
    """A sharded side and the plain one, driven alike, and ``problems``: where they differ."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.problems: list[str] = []
        self.turn = 0
        precision = draw.sharding.precision
        model, units = build(draw.model, draw.seed, torch.float64 if precision == "float64" else torch.float32)
        self.plain = PlainSide(draw, copy.deepcopy(model))
        self.ours: ShardedSide = SIDES[draw.sharding.path](draw, model, units)
        self.releases = draw.sharding.release == "free" and releases_all(draw)

    def train(self) -> list[str]:
        """All steps, and a forward after each; what differed."""
        for step in range(STEPS):
            if step and refreezes(self.draw):
                self.refreeze(step)
            self.step(step)
            if self.draw.training.evaluation is not None:
                ours, plain = self.inputs()
                self.compare(self.ours.evaluate(ours), self.plain.evaluate(plain), f"forward after step {step}")
        self.compare_all_weights()
        if checkpoints(self.draw):
            # In plain PyTorch too, a checkpoint's graph holds the module, which would hold the graph.
            self.ours.forget_kept()
        return self.problems

    def refreeze(self, number: int) -> None:
        """Freeze and unfreeze what a step of that number draws."""
        assert isinstance(self.ours, WrapperSide)
        rng = random.Random(f"{self.draw.seed} {number}")
        # Without "always" a leaf of spare weights would be reached by the backward of one rank alone.
        names = [
            name
            for name, parameter in self.plain.model.named_parameters()
            if rng.random() < REFROZEN
            and parameter.dtype in (torch.float32, torch.float64)
            and not name.endswith("always")
        ]
        self.plain.refreeze(names)
        self.ours.refreeze(names)

    def step(self, number: int) -> None:
        """One step of both sides."""
        label = f"step {number}"
        training = self.draw.training
        pairs = [self.inputs() for _ in range(training.microbatches)]
        ours, plain = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        between: tuple[Batch | None, Batch | None] = (None, None)
        if training.evaluation is not None and training.evaluated == "before backward":
            between = self.inputs()
        try:
            wanted = self.plain.train(plain, between[1])
        except RuntimeError as error:
            raise _PlainRefuses(str(error)) from error
        found = self.ours.train(ours, between[0])
        for index, (value, other) in enumerate(zip(found, wanted, strict=True)):
            self.compare(value, other, f"{label}: result {index} of forward")
            if value.requires_grad != other.requires_grad and not self.ours.by_steps:
                self.problems.append(f"{label}: result {index} of forward requires a gradient: {value.requires_grad}")
        for index, (own, given) in enumerate(zip(ours, plain, strict=True)):
            self.compare(own.x.grad, given.x.grad, f"{label}: gradient of input {index}")
        if self.releases:
            try:
                check_nothing_gathered()
            except AssertionError as error:
                self.problems.append(f"{label}: {error}")
        self.compare_gradients(label, exact=number == 0 and same_to_the_bit(self.draw))
        if training.clip is not None:
            # In plain PyTorch the norm of no gradients at all is a float32.
            norm = self.ours.clip(training.clip)
            self.compare(norm, self.plain.clip(training.clip).to(norm.dtype), f"{label}: norm")
        self.ours.step()
        self.plain.step()
        for name, part in self.ours.weights().items():
            held = self.plain.model.get_parameter(name)
            if held.requires_grad:
                self.compare(part.value, self.piece(held, part.elements), f"{label}: weight {name}")
        self.compare_buffers(label)
        if self.plain.casts:
            # What bfloat16 rounds differently in one step is not to grow in the next.
            self.plain.load(self.ours.full_weights())

    def inputs(self) -> tuple[Batch, Batch]:
        """This rank's next inputs, for our side and for the plain one."""
        self.turn += 1
        generator = torch.Generator().manual_seed(self.draw.seed * 10_000 + dist.get_rank() * 1000 + self.turn)
        model = self.draw.model
        if model.inputs == "tokens":
            tokens = torch.randperm(VOCABULARY, generator=generator)[:ROWS]
            return Batch(tokens, self.turn), Batch(tokens, self.turn)
        dtype = torch.float64 if self.draw.sharding.precision == "float64" else torch.float32
        x = torch.randn(ROWS, model.width, generator=generator, dtype=dtype)
        wanted = model.inputs == "vectors with gradients"
        return (
            Batch(x.clone().requires_grad_(wanted), self.turn),
            Batch(x.clone().requires_grad_(wanted), self.turn),
        )

    def compare_gradients(self, label: str, *, exact: bool) -> None:
        """Finished gradients. Where ours are zeros and plain PyTorch has none, it gets zeros as well."""
        found = self.ours.gradients()
        reached = self.plain.average({name: part.value is not None for name, part in found.items()})
        if {id(self.plain.model.get_parameter(name)) for name in found} != {id(p) for p in self.plain.trained.values()}:
            self.problems.append(f"{label}: gradients of {sorted(found)}, expected those of {list(self.plain.trained)}")
        for name, part in found.items():
            parameter = self.plain.model.get_parameter(name)
            if reached[name] not in (0, dist.get_world_size()):
                self.problems.append(f"{label}: gradient of {name} on {reached[name]} ranks only")
            elif part.value is None and parameter.grad is not None:
                self.problems.append(f"{label}: no gradient of {name}, expected {parameter.grad}")
            elif part.value is not None:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                wanted = self.piece(parameter.grad, part.elements)
                self.compare(part.value, wanted, f"{label}: gradient of {name}", exact=exact)

    def compare_buffers(self, label: str) -> None:
        """Module buffers; in the functional path a recomputation changes copies, in plain PyTorch the buffers."""
        if self.draw.sharding.path == "functional" and checkpoints(self.draw):
            return
        found, wanted = self.ours.buffers(), dict(self.plain.computing.named_buffers(remove_duplicate=False))
        for name, value in found.items():
            self.compare(value, wanted[name], f"{label}: buffer {name}")

    def compare_all_weights(self) -> None:
        """Full weights, frozen ones too."""
        for name, value in self.ours.full_weights().items():
            wanted = self.plain.model.get_parameter(name)
            exact = not any(wanted is trained for trained in self.plain.ever_trained.values())
            self.compare(value, as_bytes(wanted), f"full weight {name} at the end", exact=exact)

    def piece(self, whole: torch.Tensor, elements: range) -> torch.Tensor:
        """``elements`` of the flattened ``whole``."""
        return whole.detach().reshape(-1)[elements.start : elements.stop]

    def compare(
        self, value: torch.Tensor | None, wanted: torch.Tensor | None, what: str, *, exact: bool = False
    ) -> None:
        """To the bit, or within a tolerance that goes by the largest element expected."""
        if value is None or wanted is None:
            if value is not wanted:
                self.problems.append(f"{what}: {value}, expected {wanted}")
            return
        if value.dtype != wanted.dtype or value.numel() != wanted.numel():
            kinds = [f"{tensor.dtype} of {tensor.numel()} elements" for tensor in (value, wanted)]
            self.problems.append(f"{what}: {kinds[0]}, expected {kinds[1]}")
            return
        value, wanted = value.detach().reshape(-1), wanted.detach().reshape(-1)
        if not wanted.numel():
            return
        if exact or not wanted.is_floating_point():
            right = torch.equal(value, wanted)
        else:
            relative, absolute = TOLERANCES[self.draw.sharding.precision]
            limit = absolute + relative * max(1.0, float(wanted.abs().max()))
            right = bool((value - wanted).abs().max() <= limit)
        if not right:
            self.problems.append(f"{what}: {value.tolist()}, expected {'exactly ' * exact}{wanted.tolist()}")


def nodes(spec: NodeSpec) -> Iterator[NodeSpec]:
    """``spec`` and all below it."""
    yield spec
    if isinstance(spec, BranchSpec):
        for child in spec.children:
            yield from nodes(child)


def checkpoints(draw: Draw) -> set[str]:
    """Kinds of checkpoint in the model."""
    found = [node.inside for node in nodes(draw.model.trunk) if isinstance(node, BranchSpec | LeafSpec)]
    found += [call.around for node in nodes(draw.model.trunk) if isinstance(node, BranchSpec) for call in node.calls]
    return {kind for kind in found if kind is not None}


def same_to_the_bit(draw: Draw) -> bool:
    """Whether first gradients are sums of the same numbers in the same order as plain PyTorch's, divided exactly."""
    branches = [node for node in nodes(draw.model.trunk) if isinstance(node, BranchSpec)]
    once = all(
        max(call.times) <= 1 and [other.child for other in branch.calls].count(call.child) == 1
        for branch in branches
        for call in branch.calls
    )
    # A weight is stored by rows here, which other kernels multiply than those for a transposed one; and a recurrent
    # layer's kernels round by where its weights lie.
    apart = all(
        isinstance(node, BranchSpec) or (isinstance(node, LeafSpec) and node.body not in ("transposed", "recurrent"))
        for node in nodes(draw.model.trunk)
    )
    divided = draw.sharding.grad_divisor in (1.0, 2.0)
    cast = draw.sharding.precision == "bfloat16" or draw.training.backwards == "together"
    return draw.world_size == 1 and once and apart and divided and not cast and "reentrant" not in checkpoints(draw)


def releases_all(draw: Draw) -> bool:
    """Whether every unit's backward surely follows its forward, where the policy keeps weights until then."""
    if draw.sharding.reshard is True:
        return True
    for node in nodes(draw.model.trunk):
        if isinstance(node, BranchSpec) and any(c.result == "dropped" or c.take != "all" for c in node.calls):
            return False
        if isinstance(node, LeafSpec) and node.body in NOT_ALL_TRAINED:
            return False
    return "reentrant" not in checkpoints(draw)
