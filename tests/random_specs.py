"""Random training set-ups as data: what a seed stands for.

Promises: ``draw(seed)`` is a pure function; its ``repr`` says all there is to know of the set-up, and a smaller one
made with ``dataclasses.replace`` is one as well. Nearly all train in plain PyTorch.
"""

from __future__ import annotations

import random
from dataclasses import MISSING, dataclass, fields

from strategies import ONE_AXIS, strategies_for

BODIES = (
    "linear",
    "linear without bias",
    "frozen linear",
    "low rank",
    "norm",
    "hidden layer",
    "transposed",
    "expanded",
    "frozen expanded",
    "tied",
    "gate",
    "one element",
    "one row",
    "no element",
    "listed",
    "integers",
    "booleans",
    "complex numbers",
    "8-bit floats",
    "spare",
    "batch norm",
    "counter",
    "convolution",
    "recurrent",
    "attention",
    "stacked",
)
NOT_ALL_TRAINED = {"frozen linear", "frozen expanded", "integers", "booleans", "complex numbers", "8-bit floats"}
# torch's CPU kernels want one dtype in all of their arguments
NOT_IN_BFLOAT16 = {"batch norm", "convolution", "recurrent"}
OUTPUTS = (
    "tensor",
    "tuple",
    "dict",
    "dataclass",
    "named tuple",
    "two tensors",
    "one tensor twice",
    "view",
    "beside the input",
    "beside a detached one",
)
CHECKPOINTS = (None, "reentrant", "non-reentrant")
BACKWARDS = ("in order", "reversed", "together")
MOST_CALLS = 16
KEPT_AS = ("attribute", "list", "dict", "tuple")


class _Brief:
    """Told without the fields that are as usual."""

    def __repr__(self) -> str:
        told = [(field, getattr(self, field.name)) for field in fields(self)]  # type: ignore[arg-type]
        parts = [
            f"{field.name}={value!r}" for field, value in told if field.default is MISSING or value != field.default
        ]
        return f"{type(self).__name__}({', '.join(parts)})"


@dataclass(frozen=True, repr=False)
class LeafSpec(_Brief):
    """A module around a body of kind ``body``.

    ``units``: which of the leaf itself ("leaf"), its body ("body") and the layers in that ("layers") are units.
    ``keeps``: how an auxiliary loss is kept on the module, if any. ``inside``: checkpoint around the body.
    """

    body: str
    size: int
    output: str = "tensor"
    inside: str | None = None
    keeps: str | None = None
    units: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class SameSpec(_Brief):
    """The module that was built as number ``of``, at one more place."""

    of: int


@dataclass(frozen=True, repr=False)
class CallSpec(_Brief):
    """How a branch calls one of its children: ``times[turn % len(times)]`` times.

    ``take``: which of the tensors it returns are used. ``result``: what becomes of them: the next value, added to the
    value, or nothing.
    """

    child: int
    times: tuple[int, ...] = (1,)
    around: str | None = None
    keyword: bool = False
    detached: bool = False
    in_place: bool = False
    take: str = "all"
    result: str = "next"


@dataclass(frozen=True, repr=False)
class BranchSpec(_Brief):
    """A module that calls its children. ``scaled``: it has a weight of its own."""

    children: tuple[LeafSpec | BranchSpec | SameSpec, ...]
    calls: tuple[CallSpec, ...]
    output: str = "tensor"
    inside: str | None = None
    scaled: bool = False
    unit: bool = False


NodeSpec = LeafSpec | BranchSpec | SameSpec


@dataclass(frozen=True, repr=False)
class ModelSpec(_Brief):
    """``inputs``: "tokens", "vectors", or "vectors with gradients"."""

    width: int
    trunk: BranchSpec
    inputs: str = "vectors"
    head: bool = True
    scaled: bool = True
    units: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Sharding(_Brief):
    """``other``: another strategy for the first nested unit. ``grouped``: matrices are apart from the rest.

    ``precision``: "float32", "float64", or "bfloat16" for computing in it over float32 main weights.
    """

    path: str
    strategy: str
    other: str | None = None
    reshard: bool | int = True
    release: str = "free"
    grouped: bool = False
    precision: str = "float32"
    grad_divisor: float = 1.0


@dataclass(frozen=True, repr=False)
class Training(_Brief):
    """``backwards``: "after each" forward, "in order" or "reversed" after all of them, or "together", as one.

    ``held``: what the optimizer holds. ``in_place``: of a functional optimizer's update. ``evaluation``: under which
    mode; ``evaluated``: "between steps", or "before backward" too. ``refrozen``: of a wrapped model's parameters some
    are frozen and others unfrozen between steps.
    """

    microbatches: int = 1
    accumulating: bool = True
    backwards: str = "after each"
    optimizer: str = "sgd"
    held: str = "parameters"
    foreach: bool = False
    in_place: bool = False
    set_to_none: bool = True
    clip: float | None = None
    evaluation: str | None = None
    evaluated: str = "between steps"
    refrozen: bool = False


@dataclass(frozen=True, repr=False)
class Draw(_Brief):
    """One set-up."""

    seed: int
    world_size: int
    model: ModelSpec
    sharding: Sharding
    training: Training


def world_size_of(seed: int) -> int:
    """1 to 4, in turn."""
    return 1 + seed % 4


def most_calls(node: NodeSpec) -> int:
    """How often leaves in ``node`` are called at most, for one call of it; a repeated module counts as a leaf."""
    if not isinstance(node, BranchSpec):
        return 1
    return sum(max(call.times) * most_calls(node.children[call.child]) for call in node.calls)


def draw(seed: int) -> Draw:
    """The set-up that ``seed`` stands for."""
    rng = random.Random(seed)
    world_size = world_size_of(seed)
    sharding = _draw_sharding(rng, world_size)
    model = _ModelDrawing(rng, sharding.precision).model()
    return Draw(seed, world_size, model, sharding, _draw_training(rng, sharding))


class _ModelDrawing:
    """Draws a tree; counts what was built, for modules that stand at two places."""

    def __init__(self, rng: random.Random, precision: str) -> None:
        self.rng = rng
        self.width = rng.choice((3, 5, 7))
        self.bodies = [body for body in BODIES if precision != "bfloat16" or body not in NOT_IN_BFLOAT16]
        self.unit_share = rng.choice((0.0, 0.2, 0.4, 0.7))
        self.checkpoint_share = rng.choice((0.0, 0.0, 0.3, 0.6))
        self.odd_share = rng.choice((0.1, 0.3, 0.5))
        self.finished: list[int] = []
        self.started = 0

    def model(self) -> ModelSpec:
        rng = self.rng
        trunk = self.trunk(rng.choice((1, 2, 2, 3)))
        units = tuple(name for name in ("front", "head") if rng.random() < self.unit_share)
        return ModelSpec(
            self.width,
            trunk,
            inputs=rng.choice(("tokens", "vectors", "vectors with gradients")),
            head=rng.random() < 0.7,
            scaled=rng.random() < 0.7,
            units=units,
        )

    def trunk(self, depth: int) -> BranchSpec:
        """Drawn again where its leaves are called more than ``MOST_CALLS`` times."""
        while True:
            self.finished, self.started = [], 0
            trunk = self.branch(depth)
            if most_calls(trunk) <= MOST_CALLS:
                return trunk

    def branch(self, depth: int) -> BranchSpec:
        rng = self.rng
        number = self._start()
        children = tuple(self.child(depth - 1) for _ in range(rng.choice((1, 2, 2, 3))))
        calls = [self.call(index, child) for index, child in enumerate(children)]
        if rng.random() < 0.3:
            again = rng.randrange(len(children))
            calls.append(self.call(again, children[again]))
        self.finished.append(number)
        return BranchSpec(
            children,
            tuple(calls),
            output=self.output(),
            inside=self.checkpoint(),
            scaled=rng.random() < 0.3,
            unit=rng.random() < self.unit_share,
        )

    def child(self, depth: int) -> NodeSpec:
        if self.finished and self.rng.random() < 0.12:
            return SameSpec(self.rng.choice(self.finished))
        if depth and self.rng.random() < 0.6:
            return self.branch(depth)
        return self.leaf()

    def leaf(self) -> LeafSpec:
        rng = self.rng
        self.finished.append(self._start())
        return LeafSpec(
            rng.choice(self.bodies),
            rng.choice((1, 2, 5, 11)),
            output=self.output(),
            inside=self.checkpoint(),
            keeps=rng.choice(KEPT_AS) if rng.random() < 0.15 else None,
            units=tuple(part for part in ("leaf", "body", "layers") if rng.random() < self.unit_share),
        )

    def call(self, index: int, child: NodeSpec) -> CallSpec:
        rng, odd = self.rng, self.odd_share
        take = rng.choice(("first", "last", "all"))
        around = self.checkpoint()
        # Plain PyTorch forbids it where a reentrant checkpoint gives a view.
        in_place = rng.random() < odd / 2 and around != "reentrant"
        return CallSpec(
            index,
            times=tuple(rng.choice((0, 1, 1, 2, 3)) for _ in range(rng.choice((2, 3)))) if rng.random() < odd else (1,),
            around=around,
            keyword=rng.random() < odd,
            detached=rng.random() < odd / 5,
            in_place=in_place,
            # The input handed through is not the child's to give away for a change in place.
            take="last" if in_place else take,
            result=rng.choice(("next", "next", "next", "added", "added", "dropped"))
            if rng.random() < odd
            else rng.choice(("next", "added")),
        )

    def output(self) -> str:
        return self.rng.choice(OUTPUTS) if self.rng.random() < self.odd_share else "tensor"

    def checkpoint(self) -> str | None:
        return self.rng.choice(CHECKPOINTS[1:]) if self.rng.random() < self.checkpoint_share else None

    def _start(self) -> int:
        self.started += 1
        return self.started - 1


def _draw_sharding(rng: random.Random, world_size: int) -> Sharding:
    strategy = rng.choice(list(strategies_for(world_size)))
    inner = 2 if strategy not in ONE_AXIS else world_size
    reshard: bool | int = rng.choice((True, True, False))
    gathers = strategy.startswith(("zero3", "hsdp", "hfsdp")) and world_size > 1
    if gathers and rng.random() < 0.25:
        reshard = rng.choice([size for size in range(1, inner + 1) if inner % size == 0])
    other = rng.choice(list(ONE_AXIS)) if strategy in ONE_AXIS and isinstance(reshard, bool) else None
    return Sharding(
        rng.choice(("wrapper", "wrapper", "functional")),
        strategy,
        other=other if rng.random() < 0.25 else None,
        reshard=reshard,
        release=rng.choice(("free", "free", "poison")),
        grouped=rng.random() < 0.2,
        precision=rng.choice(("float32",) * 4 + ("float64",) * 2 + ("bfloat16",)),
        grad_divisor=rng.choice((1.0, 1.0, 1.0, 2.0, 3.0)),
    )


def _draw_training(rng: random.Random, sharding: Sharding) -> Training:
    microbatches = rng.choice((1, 1, 2, 3))
    return Training(
        microbatches,
        accumulating=rng.random() < 0.6,
        backwards=rng.choice(("after each", "after each", "after each", *BACKWARDS))
        if microbatches > 1
        else "after each",
        # AdamW divides by a gradient's size, and makes much of what rounding makes of a small one.
        optimizer="sgd" if sharding.precision == "bfloat16" else rng.choice(("sgd", "adamw")),
        held=rng.choice(("parameters", "parameters", "flat", "local")),
        foreach=rng.random() < 0.3,
        in_place=rng.random() < 0.5,
        set_to_none=rng.random() < 0.6,
        clip=rng.choice((None, None, 0.05, 100.0)),
        evaluation=rng.choice((None, "no_grad", "inference_mode")),
        evaluated=rng.choice(("between steps", "before backward")),
        refrozen=rng.random() < 0.4,
    )
