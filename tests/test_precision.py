"""Dtypes: what goes into a unit, what comes out, where gradients meet; autocast and gradient scaling as in PyTorch."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from comparison import PATHS, check_equal, check_named, check_nothing_gathered, plain_gradients, reference_gradients
from models import WIDTH, Block, Chain, build, vectors
from strategies import Wrapped, mesh_for, strategies_for
from torch import nn

import fsdp_fn
from harness import run_distributed

BF16 = fsdp_fn.PrecisionPolicy(compute_dtype=torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Pack:
    """What a unit is given: tensors at several depths, and things that are no floating-point tensors."""

    x: torch.Tensor
    others: list[torch.Tensor]
    index: torch.Tensor
    codes: torch.Tensor
    label: str


class Pair(NamedTuple):
    first: torch.Tensor
    second: Pack | None


class Box:
    """An object that cannot be opened."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Noting(nn.Module):
    """Notes the dtypes that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: dict[str, Any] = {}

    def forward(self, pair: Pair, box: Box, *, scale: torch.Tensor) -> Pair:
        pack = pair.second
        assert pack is not None
        self.seen.update(
            first=pair.first.dtype,
            x=pack.x.dtype,
            other=pack.others[0].dtype,
            index=pack.index.dtype,
            codes=pack.codes.dtype,
            label=pack.label,
            boxed=box.value.dtype,
            scale=scale.dtype,
            weight=self.linear.weight.dtype,
        )
        y = self.linear(pair.first) * scale + pack.x + pack.others[0]
        return Pair(y, dataclasses.replace(pack, others=[y]))


def call(path: str, precision: fsdp_fn.PrecisionPolicy) -> tuple[dict[str, Any], Pair, torch.Tensor]:
    model = PATHS[path](build(Noting), (), precision=precision)
    x = vectors(0, requires_grad=True)
    codes = torch.ones(3).to(torch.float8_e4m3fn)
    pack = Pack(vectors(1), [vectors(2)], torch.arange(3), codes, "kept")
    output = model(Pair(x, pack), Box(vectors(3)), scale=torch.tensor(2.0, dtype=torch.float64))
    assert type(output) is Pair
    assert type(output.second) is Pack
    output.first.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype is torch.float32
    return model.module.seen, output, x.grad


def check_casts(path: str) -> None:
    seen, output, _ = call(path, BF16)
    castable = {key: seen[key] for key in ("first", "x", "other", "scale", "weight")}
    assert set(castable.values()) == {torch.bfloat16}, castable
    assert [seen["index"], seen["codes"], seen["label"]] == [torch.int64, torch.float8_e4m3fn, "kept"]
    assert seen["boxed"] is torch.float32, "what cannot be opened is passed through"
    assert output.first.dtype is torch.bfloat16

    seen, output, _ = call(path, dataclasses.replace(BF16, output_dtype=torch.float32))
    assert output.first.dtype is torch.float32
    assert output.second is not None
    assert output.second.others[0].dtype is torch.float32
    assert output.second.codes.dtype is torch.float8_e4m3fn

    seen, output, _ = call(path, fsdp_fn.PrecisionPolicy())
    assert [seen["first"], seen["scale"], seen["weight"]] == [torch.float32, torch.float64, torch.float32]

    wide = fsdp_fn.PrecisionPolicy(compute_dtype=torch.float64, cast_inputs=False, output_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        call(path, wide)


@pytest.mark.parametrize("path", PATHS)
def test_inputs_and_outputs_are_cast_at_every_depth_and_nothing_else_is(path: str) -> None:
    run_distributed(2, check_casts, path)


def keep_the_models_dtype(path: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model = PATHS[path](build(Chain).to(dtype), (Block,))
        output = model(vectors(0).to(dtype))
        assert output.dtype is dtype
        output.float().sum().backward()
        assert {value.dtype for value in model.gradients().values() if value is not None} == {dtype}
        assert {value.dtype for value in model.weights().values() if value is not None} == {dtype}


@pytest.mark.parametrize("path", PATHS)
def test_by_default_everything_keeps_the_models_dtype(path: str) -> None:
    run_distributed(2, keep_the_models_dtype, path)


class Mixed(nn.Module):
    """A unit whose weights, and so their gradients, have three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(5, 3))
        self.b = nn.Parameter(torch.randn(4, 3, dtype=torch.bfloat16))
        self.c = nn.Parameter(torch.randn(3, dtype=torch.float16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.a @ x).sum() + (self.b.float() @ x).square().sum() + (self.c.float() * x).sum()


def meet_in_one_dtype() -> None:
    precision = fsdp_fn.PrecisionPolicy(reduce_dtype=torch.float32)
    for name, strategy in strategies_for(dist.get_world_size()).items():
        plain = build(Mixed)
        model = Wrapped.of(copy.deepcopy(plain), (), mesh=mesh_for(strategy), placements=strategy, precision=precision)
        reduced: list[torch.dtype] = [flat.dtype for flat in model.module._fsdp_unit.flow._packed.flats]
        assert set(reduced) == {torch.float32}
        x = torch.randn(3, generator=torch.Generator().manual_seed(dist.get_rank()))
        plain(x).backward()
        model.module(x).backward()
        for key, grad in model.gradients().items():
            own = plain.get_parameter(key).grad
            assert own is not None
            mean = own.double()
            dist.all_reduce(mean)
            mean = (mean / dist.get_world_size()).to(own.dtype)
            check_equal(grad, mean, f"{name}: gradient of {key}", rtol=1e-2, atol=1e-3)


def test_gradients_of_several_dtypes_meet_in_one_reduce_dtype(world_size: int) -> None:
    run_distributed(world_size, meet_in_one_dtype)


# --- autocast -----------------------------------------------------------------------------------------------


class Inside(nn.Module):
    """Autocast within a unit's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block("non-reentrant")
        self.again = Block("reentrant")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.block(x)
        return self.again(y.float()).float()


def autocast_everywhere(path: str, around: bool, inside: str | None) -> None:
    def make() -> nn.Module:
        return Inside() if inside == "autocast" else nn.Sequential(Block(inside), Block(inside), nn.Linear(WIDTH, 3))

    plain = build(make)
    model = PATHS[path](copy.deepcopy(plain), (Block,))
    for step in range(2):
        for one in (model, plain):
            x = vectors(step, requires_grad=True)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
                # Once in the region: of leaves autocast casts a second use no more, and sums gradients in bf16.
                loss = one(x).float().square().mean()
            loss.backward()
        check_named(model.gradients(), plain_gradients(plain), f"gradient in step {step}", rtol=1e-5, atol=1e-6)
        check_nothing_gathered()
        model.step(0.1)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


@pytest.mark.parametrize("inside", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("path", PATHS)
def test_autocast_around_units_is_as_in_plain_pytorch(path: str, inside: str | None) -> None:
    run_distributed(2, autocast_everywhere, path, True, inside)


@pytest.mark.parametrize("path", PATHS)
def test_autocast_inside_units_is_as_in_plain_pytorch(path: str) -> None:
    run_distributed(2, autocast_everywhere, path, False, "autocast")


# --- fp16 ---------------------------------------------------------------------------------------------------


def scale_fp16() -> None:
    """The loss of one rank overflows in the second step: no rank steps, and all halve the scale alike."""
    for name, strategy in strategies_for(dist.get_world_size()).items():
        plain = build(Chain)
        options: dict[str, Any] = {"mesh": mesh_for(strategy), "placements": strategy}
        precision = fsdp_fn.PrecisionPolicy(compute_dtype=torch.float16)
        model = Wrapped.of(copy.deepcopy(plain), (Block,), precision=precision, **options)
        optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=1000)
        for step in range(3):
            before = model.weights()
            loss = model.module(vectors(10 * step + dist.get_rank())).float().square().mean()
            overflows = step == 1
            if overflows and dist.get_rank() == dist.get_world_size() - 1:
                loss = loss * 1e6
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            fsdp_fn.clip_grad_norm_(model.module, 1e9)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            same = all(torch.equal(value, before[key]) for key, value in model.weights().items())
            assert same is overflows, f"{name}, step {step}"
            assert scaler.get_scale() == (128.0 if step == 0 else 64.0), f"{name}: {scaler.get_scale()}"


def test_a_gradient_scaler_is_told_by_all_ranks_what_one_found(world_size: int) -> None:
    run_distributed(world_size, scale_fp16)


def scaled_equals_unscaled() -> None:
    plain = build(Chain)
    model = Wrapped.of(copy.deepcopy(plain), (Block,))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    for one, scale in ((plain, 1.0), (model.module, 1024.0)):
        loss = one(vectors(dist.get_rank())).square().mean()
        (loss if scale == 1.0 else scaler.scale(loss)).backward()
    scaler.unscale_(optimizer)
    for key, grad in reference_gradients(plain).items():
        assert grad is not None
        check_equal(model.gradients()[key], grad, key, rtol=1e-5, atol=1e-6)


def test_unscaled_gradients_are_those_of_the_loss(world_size: int) -> None:
    run_distributed(world_size, scaled_equals_unscaled)


# --- the policy itself --------------------------------------------------------------------------------------


FIELDS = ("main_dtype", "compute_dtype", "reduce_dtype", "accumulate_dtype", "output_dtype")


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("value", [torch.int32, torch.float8_e4m3fn, torch.complex64, "bfloat16"])
def test_a_dtype_that_cannot_be_cast_to_is_refused(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=name):
        fsdp_fn.PrecisionPolicy(**{name: value})


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("reshard_after_forward", 0, ValueError),
        ("reshard_after_forward", -2, ValueError),
        ("reshard_after_forward", 1.5, ValueError),
        ("offload", 1, TypeError),
        ("unshard_all_planes_in_backward", "yes", TypeError),
    ],
)
def test_a_schedule_that_means_nothing_is_refused(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=field):
        fsdp_fn.SchedulePolicy(**{field: value})
