"""Frozen weights: no gradient is sent for them, and nothing is gathered for a backward that does not need them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from comparison import PATHS, Path, Wrapper, check_named
from kinds import CLOSE, Kind, beside_plain, train_step
from models import WIDTH, Block, Chain, build, vectors
from torch import nn
from traffic import counted

import fsdp_fn
from fsdp_fn.module import FsdpModule
from fsdp_fn.state import UnitState, trainable_segments
from harness import run_distributed

WIDE, RANK = 40, 2


class LowRank(nn.Module):
    """A frozen layer, and a trained change of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDE).requires_grad_(False)
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDE, bias=False)
        self.back = nn.Linear(WIDE, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(torch.tanh(self.base(x) + self.up(self.down(x))))


class Frozen(Block):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Adapted(nn.Module):
    """Frozen units before, between and after those that are adapted, in a root that is frozen but for its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.layers = nn.Sequential(Frozen(), LowRank(), Frozen(), LowRank(), Frozen())
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(x)))


UNITS = (Frozen, LowRank)


def states_of(model: Path) -> dict[str, UnitState]:
    if not isinstance(model, Wrapper):
        return model.state.units
    return {n: m._fsdp_unit.state for n, m in model.module.named_modules() if isinstance(m, FsdpModule)}


def plain_vectors(step: int) -> tuple[torch.Tensor, ...]:
    return (vectors(100 * dist.get_rank() + step),)


def adapt(path: str, strategy: fsdp_fn.Placements) -> None:
    """Equal to plain PyTorch, and no more is reduced than the trained weights, nor gathered than backward reads."""
    kind = Kind(Adapted, UNITS, plain_vectors)
    model, plain = beside_plain(kind, path, steps=1, placements=strategy)
    with counted() as found:
        train_step(kind, model, plain, 1)
    frozen = {name for name, p in plain.named_parameters() if not p.requires_grad}
    model(*plain_vectors(2)).sum().backward()
    assert all((grad is None) == (name in frozen) for name, grad in model.gradients().items())
    wanted = 0
    for state in states_of(model).values():
        segments = [state.layout.segments[index] for index in trainable_segments(state.layout)]
        wanted += sum(segment.size * segment.dtype.itemsize for segment in segments)
    sent = Counter({kind: 0 for kind, _ in found})
    for (of, _), size in found.items():
        sent[of] += size
    if dist.get_world_size() > 1:
        assert sent["reduce_scatter"] == wanted, f"{sent}, expected to reduce {wanted}"
        assert sent["all_reduce"] == 0
    trained = sum(p.numel() * 4 for p in plain.parameters() if p.requires_grad)
    every = sum(p.numel() * 4 for p in plain.parameters())
    assert trained <= wanted < every / 4, "reduced about what is trained"


@pytest.mark.parametrize("strategy", [fsdp_fn.zero3(), fsdp_fn.zero2(), fsdp_fn.zero1()], ids=["3", "2", "1"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_adapters_train_as_in_plain_pytorch_and_nothing_is_reduced_for_frozen_weights(
    world_size: int, path: str, strategy: fsdp_fn.Placements
) -> None:
    run_distributed(world_size, adapt, path, strategy)


def backward_events(model: nn.Module, x: torch.Tensor) -> Counter[tuple[str, str]]:
    """What each unit does in backward, by unit and action."""
    with fsdp_fn.record_events(model) as log:
        loss = model(x).square().mean()
        forward = len(list(log))
        loss.backward()
    return Counter((event.unit, event.action.value) for event in list(log)[forward:])


def skip_what_backward_does_not_need() -> None:
    """No gradient is wanted before the first adapter: its frozen unit has no backward."""
    model = Wrapper(build(Adapted), UNITS).module
    found = backward_events(model, vectors())
    assert not [key for key in found if key[0] == "layers.0"], found
    for between in ("layers.2", "layers.4"):
        assert found[between, "gather"] == found[between, "release"] == 1, found
    assert found["layers.1", "gather"] == found["layers.1", "release"] == 1
    found = backward_events(model, vectors(requires_grad=True))
    assert found["layers.0", "gather"] == found["layers.0", "release"] == 1, found


def test_a_frozen_unit_is_gathered_in_backward_only_where_a_gradient_goes_through_it() -> None:
    run_distributed(2, skip_what_backward_does_not_need)


class Unused(nn.Module):
    """A frozen unit of which one input is not used, and alone needs a gradient."""

    class First(nn.Linear):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return super().forward(a)

    class Last(nn.Linear):
        pass

    def __init__(self) -> None:
        super().__init__()
        self.l1 = self.First(WIDTH, WIDTH).requires_grad_(False)
        self.l2 = self.Last(WIDTH, WIDTH)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.l2(self.l1(a, b) * b)


def inputs_of_two(step: int) -> tuple[torch.Tensor, ...]:
    own = 100 * dist.get_rank() + step
    return vectors(own), vectors(own + 1, requires_grad=True)


def unused_input(path: str) -> None:
    kind = Kind(Unused, (Unused.First, Unused.Last), inputs_of_two)
    model, _ = beside_plain(kind, path, steps=3)
    if isinstance(model, Wrapper):
        a, b = inputs_of_two(0)
        with fsdp_fn.record_events(model.module) as log:
            loss = model(a, b).square().mean()
            forward = len(list(log))
            loss.backward()
        found = Counter(event.action.value for event in list(log)[forward:] if event.unit == "l1")
        assert found["gather"] == found["release"], found


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_frozen_unit_with_an_unused_input_that_needs_a_gradient_gathers_as_often_as_it_releases(
    world_size: int, path: str
) -> None:
    """After pytorch/pytorch#117510."""
    run_distributed(world_size, unused_input, path)


def freeze_all(path: str) -> None:
    """A model all of which is frozen gives gradients of inputs, and sends none."""
    plain = build(Chain).requires_grad_(False)
    model = PATHS[path](build(Chain).requires_grad_(False), (Block,))
    with counted() as found:
        inputs = []
        for one in (model, plain):
            x = vectors(dist.get_rank(), requires_grad=True)
            one(x).square().mean().backward()
            inputs.append(x.grad)
    check_named({"x": inputs[0]}, {"x": inputs[1]}, "gradient", **CLOSE)
    assert not [key for key in found if key[0] != "gather"], found
    assert all(grad is None for grad in model.gradients().values())
    model.check_at_rest()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_frozen_model_gives_gradients_of_its_inputs_and_reduces_nothing(world_size: int, path: str) -> None:
    run_distributed(world_size, freeze_all, path)
