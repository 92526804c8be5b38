"""Layers of torch's that compute with their weights in ways of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import PATHS, check_equal
from kinds import CLOSE, Kind, beside_plain, each, train_step
from models import WIDTH, build, vectors
from refusals import refused
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

from harness import run_distributed, run_expecting_error


class Between(nn.Module):
    """A layer between two plain ones; the layer is a unit, or all is one."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.layer = Layer(make())
        self.after = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(torch.tanh(self.layer(torch.tanh(self.before(x)))))


class Layer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Attention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 1, batch_first=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(0)
        return self.attention(x, x, x, need_weights=False)[0].squeeze(0)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH + 1, 2, 5, dropout=0.0, batch_first=True)


class Encoder(nn.Module):
    """In and out of the even width that the fast path wants."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        layer = encoder()
        self.up = nn.Linear(WIDTH, WIDTH + 1)
        self.layer = nn.TransformerEncoder(layer, 2) if whole else layer
        self.down = nn.Linear(WIDTH + 1, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.layer(self.up(x).unsqueeze(0)).squeeze(0))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(1, 5, 3, padding=1)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x.view(1, 1, *x.shape)).mean((0, 1))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "new weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "new spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH)),
    "attention": Attention,
    "attention with bias of keys": lambda: Attention(add_bias_kv=True),
    "encoder layer": Encoder,
    "encoder": lambda: Encoder(whole=True),
    "channels last": Convolution,
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "bilinear": lambda: Twice(nn.Bilinear(WIDTH, WIDTH, WIDTH)),
    "prelu": lambda: nn.PReLU(WIDTH),
    "old weight_norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "old spectral_norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(WIDTH, WIDTH), "weight", amount=0.3),
}


class Twice(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x)


def train_layers(path: str) -> None:
    def train(name: str) -> None:
        for units in ((), (Layer,)):
            beside_plain(Kind(lambda: Between(LAYERS[name]), units), path)

    each(LAYERS, train)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_layers_that_compute_with_their_weights_in_their_own_way_train_as_in_plain_pytorch(
    world_size: int, path: str
) -> None:
    run_distributed(world_size, train_layers, path)


# --- weights that one module reads of another ---------------------------------------------------------------


def read_past_a_unit(path: str, grad: bool) -> None:
    """Attention reads the weight of its output layer, and never calls it."""
    model = PATHS[path](build(Attention), (nn.Linear,))
    with torch.set_grad_enabled(grad):
        model(vectors())


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_a_unit_whose_weights_another_module_reads_is_refused_by_name(path: str, grad: bool) -> None:
    for error in run_expecting_error(2, read_past_a_unit, path, grad):
        assert isinstance(error, RuntimeError)
        assert "unit 'attention.out_proj'" in str(error), error
        assert "weight'" in str(error), error


AROUND: dict[str, tuple[type[nn.Module], ...]] = {"all one unit": (), "the layer": (nn.TransformerEncoderLayer,)}
INSIDE: dict[str, tuple[type[nn.Module], ...]] = {"attention": (nn.MultiheadAttention,), "norms": (nn.LayerNorm,)}
MODES = (torch.no_grad, torch.inference_mode, torch.enable_grad)


def evaluate_fast(path: str) -> None:
    """torch's fast path reads the weights of the layer's modules without calling them."""

    def evaluate(name: str) -> None:
        for whole in (False, True):
            compare_modes(path, (AROUND | INSIDE)[name], whole)

    each(AROUND if path == "wrapper" else AROUND | INSIDE, evaluate)


def compare_modes(path: str, units: tuple[type[nn.Module], ...], whole: bool) -> None:
    plain = build(lambda: Encoder(whole)).eval()
    model = PATHS[path](build(lambda: Encoder(whole)).eval(), units)
    for mode in MODES:
        with mode():
            check_equal(model(vectors()), plain(vectors()), f"{mode.__name__}, {whole=}", **CLOSE)
        model.check_at_rest()
    for one in (plain, model.module):
        one.train()
    train_step(Kind(Encoder), model, plain, 0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_fast_path_of_an_encoder_gives_the_numbers_of_plain_pytorch(world_size: int, path: str) -> None:
    run_distributed(world_size, evaluate_fast, path)


def units_inside_a_layer() -> None:
    """Where they are units of their own the fast path is refused, in the wrapper; the other path is right."""

    def evaluate(name: str) -> None:
        model = PATHS["wrapper"](build(Encoder).eval(), INSIDE[name])
        for mode in MODES[:2]:
            with mode(), refused(RuntimeError, r"parameter '\w+' of unit 'layer\.\w+' is sharded here", mode.__name__):
                model(vectors())
            model.check_at_rest()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            compare_modes("wrapper", INSIDE[name], whole=True)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)

    each(INSIDE, evaluate)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_fast_path_past_units_inside_a_layer_is_refused_by_name_and_may_be_turned_off(world_size: int) -> None:
    run_distributed(world_size, units_inside_a_layer)


def synchronised_batch_norm(path: str) -> None:
    kind = Kind(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SyncBatchNorm(WIDTH), nn.Linear(WIDTH, 3)))
    model, plain = PATHS[path](build(kind.make), (nn.SyncBatchNorm,)), build(kind.make)
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):
        model(vectors())
    model.check_at_rest()
    for one in (plain, model.module):
        one.eval()
    train_step(kind, model, plain, 0)


@pytest.mark.parametrize("path", PATHS)
def test_synchronised_batch_norm_is_refused_by_torch_on_a_cpu_and_evaluates(path: str) -> None:
    run_distributed(2, synchronised_batch_norm, path)
