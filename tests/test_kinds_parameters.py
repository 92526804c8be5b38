"""Parameters of every dtype, shape and layout: bits of frozen ones, gradients of complex ones, rows for few ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from comparison import PATHS, check_equal
from kinds import CLOSE, Kind, beside_plain, each
from models import WIDTH, build, vectors
from torch import nn

import fsdp_fn
from harness import run_distributed

BF16 = fsdp_fn.PrecisionPolicy(compute_dtype=torch.bfloat16)


class Extra(nn.Module):
    """A linear layer and one more parameter, ``extra``, which ``use`` brings in."""

    def __init__(
        self, extra: Callable[[], torch.Tensor], use: Callable[..., torch.Tensor], *, trained: bool = True
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Parameter(extra(), requires_grad=trained)
        self.use = use
        self.seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.extra.dtype
        return self.use(self.linear(x), self.extra)


class Unit(Extra):
    pass


class Host(nn.Module):
    """The module with the parameter as a unit, or within the root."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = make()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(x)))


def filled(*shape: int) -> torch.Tensor:
    return torch.linspace(-1, 1, max(1, torch.Size(shape).numel()))[: torch.Size(shape).numel()].reshape(shape)


def complex_filled(*shape: int) -> torch.Tensor:
    return torch.complex(filled(*shape), filled(*shape).flip(0))


def times(y: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    return y * extra


def through(y: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    """Into the columns of ``extra`` and back."""
    return torch.tanh(y @ extra.flatten(1)) @ extra.flatten(1).t()


def in_the_complex_plane(y: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    z = torch.complex(y.float(), y.float().square()) * extra
    return (z.real + z.imag * 0.5).to(y.dtype)


def convolved(y: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    return nn.functional.conv2d(y.view(1, 1, *y.shape), extra, padding=1).mean((0, 1))


def added_where_there_is_any(y: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
    return torch.cat([y, extra.to(y.dtype)])


TRAINED: dict[str, tuple[Callable[[], torch.Tensor], Callable[..., torch.Tensor]]] = {
    "one element": (lambda: filled(1) + 2, times),
    "one row": (lambda: filled(1, WIDTH), times),
    "two rows": (lambda: filled(2, WIDTH), lambda y, extra: y * extra.sum(0)),
    "no element": (lambda: filled(0, WIDTH), added_where_there_is_any),
    "transposed": (lambda: filled(5, WIDTH).t(), through),
    "expanded": (lambda: filled(1, 5).expand(WIDTH, 5), through),
    "strided": (lambda: filled(WIDTH, 10)[:, ::2], through),
    "permuted": (lambda: filled(2, 3, WIDTH).permute(2, 0, 1), through),
    "channels last": (lambda: filled(5, 1, 3, 3).contiguous(memory_format=torch.channels_last), convolved),
    "complex": (lambda: complex_filled(WIDTH), in_the_complex_plane),
    "complex rows": (lambda: complex_filled(3, WIDTH), lambda y, extra: in_the_complex_plane(y, extra.sum(0))),
}


def train_extra(path: str) -> None:
    def train(name: str) -> None:
        extra, use = TRAINED[name]
        for cls, units in ((Extra, ()), (Unit, (Unit,))):
            model, plain = beside_plain(Kind(lambda cls=cls: Host(lambda: cls(extra, use)), units), path, steps=3)
            found, start = model.weights()["inner.extra"], extra()
            assert found is not None
            assert found.shape == start.shape
            assert plain.inner.extra.shape == start.shape  # type: ignore[union-attr]
            assert not start.numel() or not torch.equal(found, start), "it did not move"

    each(TRAINED, train)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_parameter_of_any_shape_and_layout_trains_as_in_plain_pytorch(world_size: int, path: str) -> None:
    """After pytorch/pytorch#132934. Complex ones too; at three ranks two hold nothing of one row."""
    run_distributed(world_size, train_extra, path)


def train_complex_with_policies(path: str) -> None:
    """A complex parameter beside ones that a policy casts, gathered and reduced as it is, whatever the strategy."""
    extra, use = TRAINED["complex"]
    kind = Kind(lambda: Host(lambda: Unit(extra, use)), (Unit,))
    policies = {
        "reduced in fp64": fsdp_fn.PrecisionPolicy(reduce_dtype=torch.float64),
        "accumulated in fp64": fsdp_fn.PrecisionPolicy(accumulate_dtype=torch.float64),
    }
    for precision in policies.values():
        beside_plain(kind, path, precision=precision)
    for strategy in (fsdp_fn.zero1(), fsdp_fn.zero2()):
        beside_plain(kind, path, placements=strategy)
    model = PATHS[path](build(kind.make), kind.units, precision=BF16)
    output = model(vectors().bfloat16())
    assert output.dtype is torch.bfloat16
    assert model.module.inner.seen is torch.complex64
    output.float().square().mean().backward()
    grad = model.gradients()["inner.extra"]
    assert grad is not None
    assert grad.dtype is torch.complex64
    assert (grad != 0).all()


@pytest.mark.parametrize("path", PATHS)
def test_a_complex_parameter_is_never_cast_and_its_gradient_is_the_mean(path: str) -> None:
    run_distributed(2, train_complex_with_policies, path)


FROZEN: dict[str, tuple[Callable[[], torch.Tensor], Callable[..., torch.Tensor]]] = {
    "uint8": (lambda: torch.arange(WIDTH).to(torch.uint8), times),
    "int64": (lambda: torch.arange(WIDTH).flip(0), lambda y, extra: y[:, extra]),
    "int16": (lambda: torch.arange(WIDTH).to(torch.int16), times),
    "bool": (lambda: torch.arange(WIDTH) % 2 == 0, times),
    "float8_e4m3fn": (lambda: filled(WIDTH).to(torch.float8_e4m3fn), lambda y, extra: y * extra.to(y.dtype)),
    "float8_e5m2": (lambda: filled(WIDTH).to(torch.float8_e5m2), lambda y, extra: y * extra.to(y.dtype)),
    "complex": (lambda: complex_filled(WIDTH), in_the_complex_plane),
    "int64 without elements": (lambda: torch.empty(0, WIDTH, dtype=torch.int64), added_where_there_is_any),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def keep_frozen(path: str) -> None:
    def keep(name: str) -> None:
        extra, use = FROZEN[name]
        for precision in (None, BF16):
            kind = Kind(lambda: Host(lambda: Unit(extra, use, trained=False)), (Unit,))
            if precision is None:
                model, _ = beside_plain(kind, path)
            else:
                model = PATHS[path](build(kind.make), kind.units, precision=precision)
                model(vectors().bfloat16()).float().square().mean().backward()
            assert model.module.inner.seen is extra().dtype
            assert model.gradients()["inner.extra"] is None
            found = model.weights()["inner.extra"]
            assert found is not None
            assert found.dtype is extra().dtype
            assert torch.equal(bits(found), bits(extra()))

    each(FROZEN, keep)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_frozen_parameter_of_any_dtype_keeps_its_bits_and_is_never_cast(world_size: int, path: str) -> None:
    """After pytorch/pytorch#185239."""
    run_distributed(world_size, keep_frozen, path)


def without_dimensions(path: str) -> str:
    kind = Kind(lambda: Host(lambda: Extra(lambda: torch.tensor(2.0), times)))
    if path == "functional":
        model, _ = beside_plain(kind, path, steps=3)
        scale = model.weights()["inner.extra"]
        assert scale is not None
        assert scale.shape == ()
        assert scale != 2.0
        return ""
    module = build(kind.make)
    with pytest.raises(ValueError, match=r"'inner\.extra' of Host has no dimension.*give it shape \(1,\)") as refused:
        PATHS[path](module)
    check_equal(module(vectors()), build(kind.make)(vectors()), "the model that was not wrapped", **CLOSE)
    return str(refused.value)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_parameter_without_dimensions_is_refused_by_the_wrapper_and_served_as_a_function(
    world_size: int, path: str
) -> None:
    """After pytorch/pytorch#132934."""
    run_distributed(world_size, without_dimensions, path)
