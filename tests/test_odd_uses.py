"""Uses that a sharded model meets sooner or later: each gives plain PyTorch's numbers, or a refusal by name."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import PATHS, Wrapper, check_equal, check_named, plain_gradients
from models import Block, Chain, build, vectors
from torch import nn

import fsdp_fn
from harness import run_distributed


def gradient_scaler() -> None:
    """Unscaled gradients are the true ones; an infinity on one rank skips the step on all."""
    plain = build(lambda: nn.Linear(7, 3))
    model = fsdp_fn.fully_shard(copy.deepcopy(plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain(vectors()).square().mean().backward()
    scaler.scale(model(vectors()).square().mean()).backward()
    scaler.unscale_(optimizer)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), plain.get_parameter(name).grad)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    before = {name: parameter.full_tensor().clone() for name, parameter in model.named_parameters()}
    scaler.scale(model(vectors()).square().mean()).backward()
    if dist.get_rank() == 1:
        model.weight.grad.to_local().fill_(float("inf"))
    scaler.step(optimizer)
    for name, parameter in model.named_parameters():
        check_equal(parameter.full_tensor(), before[name], name)


def write_in_forward() -> None:
    for path in PATHS.values():
        model = path(nn.Embedding(4, 7, max_norm=0.5))
        with pytest.raises(RuntimeError, match=r"changed a weight in place"):
            model(torch.arange(4))
        model.check_at_rest()


class PassesThrough(nn.Module):
    """Its input and a view of it, beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.linear(x.detach().clone())


def input_handed_through() -> None:
    plain = build(PassesThrough)
    for path in PATHS.values():
        model = path(copy.deepcopy(plain))
        grads = []
        for call in (model, plain):
            x = vectors(requires_grad=True)
            scaled = x * 1.0
            skip, output = call(scaled)
            skip.mul_(3)
            (scaled.sum() + output.sum()).backward()
            grads.append(x.grad)
        check_equal(*grads, "input gradient")
        check_named(model.gradients(), plain_gradients(plain), "gradient")
        plain.zero_grad()


class OverlappingOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.linear(x)
        return h, h[:, :2]


def outputs_that_overlap() -> None:
    """Right as they are; changed in place they would change each other, and that is refused."""
    plain = build(OverlappingOutputs)
    for path in PATHS.values():
        model = path(copy.deepcopy(plain))
        for call in (model, plain):
            whole, part = call(vectors())
            (whole.sum() + 2 * part.sum()).backward()
        check_named(model.gradients(), plain_gradients(plain), "gradient")
        plain.zero_grad()
        model.forget_gradients()
        with pytest.raises(RuntimeError, match="view"):
            model(vectors())[1].mul_(5)


class HoldsWeight(nn.Module):
    """Computes with a parameter by another way than its name: out of a list, a dict of lists, an attribute."""

    def __init__(self, immutable: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7, 7))
        self.other = nn.Parameter(torch.full((7, 7), 0.5))
        self.weights: Any = (self.weight,) if immutable else [self.weight, {"other": [self.other]}]
        self.__dict__["third"] = self.other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weights, tuple):
            return x @ self.weights[0]
        return torch.tanh(x @ self.weights[0] @ self.weights[1]["other"][0]) @ self.third


class Recurrent(nn.Module):
    """An LSTM or a GRU, which read their weights out of a list that they make anew when a weight is replaced."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.recurrent = kind(7, 5, num_layers=2, bidirectional=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(x.unsqueeze(1))[0])


class Penalised(nn.Module):
    """A root that keeps its blocks' weights in a list, and only looks at it outside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.kept = [block.up.weight for block in self.blocks]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


def parameters_held_elsewhere() -> None:
    makes: list[Callable[[], nn.Module]] = [
        HoldsWeight,
        lambda: Recurrent(nn.LSTM),
        lambda: Recurrent(nn.GRU),
        lambda: nn.Sequential(HoldsWeight(), Recurrent(nn.LSTM)),
        Penalised,
    ]
    for make in makes:
        for path in PATHS.values():
            plain = build(make)
            model = path(copy.deepcopy(plain), (HoldsWeight, nn.LSTM, Block))
            for step in range(3):
                check_step(model, plain, step)
            if isinstance(model.module, Penalised):
                held = [getattr(weight, "_spec", None) is not None or weight.is_meta for weight in model.module.kept]
                assert all(held), "a list holds parameters that are no longer the model's"
                names = {id(parameter) for parameter in model.module.parameters()}
                assert all(id(weight) in names for weight in model.module.kept)


def check_step(model: Any, plain: nn.Module, step: int) -> None:
    x = vectors(step)
    output, expected = model(x), plain(x)
    check_equal(output, expected, "output", rtol=1e-5, atol=1e-6)
    output.square().sum().backward()
    expected.square().sum().backward()
    check_named(model.gradients(), plain_gradients(plain), "gradient", rtol=1e-5, atol=1e-6)
    model.check_at_rest()
    model.step(0.01)
    with torch.no_grad():
        for parameter in plain.parameters():
            assert parameter.grad is not None
            parameter -= 0.01 * parameter.grad
            parameter.grad = None


def parameter_in_a_tuple() -> None:
    for path in PATHS.values():
        with pytest.raises(ValueError, match=r"parameter 'weight' of unit .* also held by HoldsWeight.weights"):
            path(HoldsWeight(immutable=True))


def data_assigned() -> None:
    model = fsdp_fn.fully_shard(build(lambda: nn.Linear(7, 3)))
    before = model.weight.full_tensor().clone()
    model.weight.data = model.weight.data * 0.5
    check_equal(model.weight.full_tensor(), before * 0.5, "weight")
    check_equal(model(torch.zeros(1, 7))[0], model.bias.full_tensor(), "output")
    with pytest.raises(TypeError, match="placed alike"):
        model.weight.data = torch.zeros(3, 7)


def layer_added_later() -> None:
    model = fsdp_fn.fully_shard(nn.Sequential(nn.Linear(7, 7)))
    model.append(nn.Linear(7, 1))
    with pytest.raises(RuntimeError, match="gained or lost"):
        model(vectors())


def state_dict_saved() -> None:
    """Each rank's own rows by ``torch.save``, as of any DTensor."""
    model = Wrapper(build(Chain), (Block,)).module
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for name, tensor in model.state_dict().items():
        check_equal(loaded[name].full_tensor(), tensor.full_tensor(), name)


def compiled_around() -> None:
    """``torch.compile`` of a wrapped model runs its units eagerly, with the same numbers."""
    plain = build(Chain)
    model = Wrapper(copy.deepcopy(plain), (Block,))
    torch._dynamo.reset()
    compiled = torch.compile(model.module, backend="aot_eager")
    for call in (compiled, plain):
        call(vectors()).square().mean().backward()
    check_named(model.gradients(), plain_gradients(plain), "gradient")


def nan_on_one_rank() -> None:
    model = fsdp_fn.fully_shard(build(lambda: nn.Linear(7, 4)))
    for poisoned in range(dist.get_world_size()):
        model.zero_grad()
        model(vectors()).sum().backward()
        if dist.get_rank() == poisoned:
            for parameter in model.parameters():
                parameter.grad.to_local().fill_(float("nan"))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=float("inf"))
        assert norm.full_tensor().isnan(), poisoned


USES = [
    gradient_scaler,
    write_in_forward,
    input_handed_through,
    outputs_that_overlap,
    parameters_held_elsewhere,
    parameter_in_a_tuple,
    data_assigned,
    layer_added_later,
    state_dict_saved,
    compiled_around,
    nan_on_one_rank,
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_it_is_right_or_refused_by_name(use: Callable[[], None]) -> None:
    run_distributed(2, use)
