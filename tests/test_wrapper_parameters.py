"""Parameters of a wrapped module: names and attributes stay; they are the shards at any time; any shape and dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from comparison import Wrapper, check_equal, check_named, local, reference_gradients, same_weights
from models import Block, Stack, build, tokens
from torch import nn

import fsdp_fn
from harness import run_distributed


def compare_faces() -> None:
    plain = build(Stack)
    module = copy.deepcopy(plain)
    plain_weight, weight = plain.head.weight, module.head.weight
    for parameter in (plain_weight, weight):
        parameter.lr_scale, parameter.group = 0.5, {"decay": False}
    model = Wrapper(module, (Block,))
    assert model.module is module
    for ours, theirs in ((module, plain), (module.blocks[1], plain.blocks[1])):
        assert isinstance(ours, type(theirs))
        for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(type(ours), attribute) == getattr(type(theirs), attribute), attribute
    assert repr(module) == repr(plain)

    def face(of: nn.Module) -> dict[str, object]:
        return {
            "modules": [name for name, _ in of.named_modules()],
            "parameters": [(n, p.shape, p.dtype, p.requires_grad, p.is_leaf) for n, p in of.named_parameters()],
            "state": [(name, value.shape, value.dtype) for name, value in of.state_dict().items()],
            "all are parameters": all(isinstance(p, nn.Parameter) for p in of.parameters()),
            "attributes": (of.head.weight.lr_scale, of.head.weight.group),
        }

    assert face(module) == face(plain)
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        check_equal(ours.full_tensor(), theirs, "full parameter")
    model(tokens(dist.get_rank())).square().mean().backward()
    assert face(module) == face(plain), "after a step"
    assert module.eval() is module
    assert not any(child.training for child in module.modules())


def test_names_classes_state_dict_keys_and_attributes_of_parameters_stay(world_size: int) -> None:
    run_distributed(world_size, compare_faces)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        y = self.w * x
        if fail:
            raise ArithmeticError("in forward")
        return y


def forward_in(context: Callable[[], object]) -> Callable[[nn.Module], None]:
    def forward(module: nn.Module) -> None:
        with context():  # type: ignore[attr-defined]
            module(torch.ones(8))

    return forward


def failing_forward(module: nn.Module) -> None:
    with pytest.raises(ArithmeticError):
        module(torch.ones(8), fail=True)


FIRST_FORWARDS: dict[str, Callable[[nn.Module], None]] = {
    "with_gradients": forward_in(torch.enable_grad),
    "no_grad": forward_in(torch.no_grad),
    "inference_mode": forward_in(torch.inference_mode),
    "failing": failing_forward,
}


def make_optimizer_late() -> None:
    for name, first in FIRST_FORWARDS.items():
        for between in (False, True):
            module = fsdp_fn.fully_shard(Scale())
            shards = list(module.parameters())
            first(module)
            assert [id(p) for p in module.parameters()] == [id(p) for p in shards], f"parameters after {name}"
            optimizer = None if between else torch.optim.SGD(module.parameters(), lr=0.1)
            loss = module(torch.ones(8)).sum()
            assert [id(p) for p in module.parameters()] == [id(p) for p in shards], "parameters between"
            optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1)
            loss.backward()
            optimizer.step()
            check_equal(module.w.full_tensor().detach(), torch.ones(8) - 0.1, f"w after {name}, {between=}")
            check_equal(module(torch.ones(8)), torch.ones(8) - 0.1, f"next forward after {name}, {between=}")


def test_parameters_are_the_shards_whenever_the_optimizer_is_made(world_size: int) -> None:
    """After pytorch/pytorch#149205: after a forward alone, it got temporary full weights."""
    run_distributed(world_size, make_optimizer_late)


def adagrad_made_before() -> None:
    module = Scale()
    optimizer = torch.optim.Adagrad(module.parameters(), lr=0.1)
    fsdp_fn.fully_shard(module)
    module(torch.ones(8)).sum().backward()
    with pytest.raises(RuntimeError, match=r"Adagrad.*before fully_shard.*'w'"):
        optimizer.step()
    assert (local(module.w) == 1.0).all()


def test_an_optimizer_made_before_wrapping_is_refused(world_size: int) -> None:
    run_distributed(world_size, adagrad_made_before)


class Coded(nn.Module):
    """Frozen ``codes`` beside a layer that trains; forward notes in which dtype it got them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        numbers = torch.arange(20.0).view(5, 4)
        values = (numbers - 8) / 4 if dtype.is_floating_point else numbers.remainder(3)
        self.codes = nn.Parameter(values.to(dtype), requires_grad=False)
        self.l = nn.Linear(4, 4)
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {"codes": self.codes.dtype, "l": self.l.weight.dtype}
        return self.l(x) @ self.codes.to(x.dtype).t()


CODES = [torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]
POLICIES = {
    "no_policy": None,
    "bf16_compute": fsdp_fn.PrecisionPolicy(compute_dtype=torch.bfloat16),
    "fp32_main_weights": fsdp_fn.PrecisionPolicy(main_dtype=torch.float32, compute_dtype=torch.float32),
}


def rows(dtype: torch.dtype, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
    return torch.randn(3, 4, generator=generator).to(dtype)


def train_beside_codes(policy: str) -> None:
    precision = POLICIES[policy]
    compute = (precision.compute_dtype if precision else None) or torch.float32
    for dtype in CODES:
        case = f"{dtype} under {policy}"
        plain = build(lambda dtype=dtype: Coded(dtype))
        original = plain.codes.detach().clone()
        model = Wrapper(copy.deepcopy(plain), precision=precision)
        for step in range(2):
            cast = {"l.weight": plain.l.weight.to(compute), "l.bias": plain.l.bias.to(compute)}
            output = model(rows(compute, step))
            wanted = torch.func.functional_call(plain, cast, (rows(compute, step),))
            assert model.module.seen == {"codes": dtype, "l": compute}, f"{case}: forward saw {model.module.seen}"
            limits = {} if dist.get_world_size() <= 2 or compute is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
            check_equal(output, wanted, f"{case}: output of step {step}", **limits)
            output.float().square().mean().backward()
            wanted.float().square().mean().backward()
            assert model.module.codes.grad is None, case
            limits = {} if dist.get_world_size() <= 2 else {"rtol": 1e-5, "atol": 1e-6}
            mean = reference_gradients(plain)
            check_named(model.gradients(), mean, f"{case}: gradient of step {step}", **limits)
            model.step(0.1)
            with torch.no_grad():
                for name, parameter in plain.l.named_parameters():
                    parameter.sub_(mean[f"l.{name}"], alpha=0.1)
            plain.zero_grad()
            # Both begin the next step with the same weights.
            weights = model.weights()
            check_equal(weights["codes"], original, f"{case}: codes after step {step}")
            for name, parameter in plain.l.named_parameters():
                check_equal(weights[f"l.{name}"], parameter, f"{case}: {name} after step {step}", **limits)
                parameter.data.copy_(weights[f"l.{name}"])
        before = model.weights()
        saved = {name: value.clone() for name, value in model.module.state_dict().items()}
        for parameter in model.module.parameters():
            local(parameter).view(torch.uint8).zero_()
        model.module.load_state_dict(saved)
        check_named(model.weights(), before, f"{case}: weight after a round trip by state_dict")
        check_equal(saved["codes"].full_tensor(), original, f"{case}: full codes of state_dict")


@pytest.mark.parametrize("policy", POLICIES)
def test_frozen_parameters_of_any_dtype_keep_their_bits_and_are_never_cast(world_size: int, policy: str) -> None:
    """After pytorch/pytorch#185239."""
    run_distributed(world_size, train_beside_codes, policy)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.no_columns = nn.Parameter(torch.empty(3, 0))
        self.l = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(torch.cat([x, self.none.to(x.dtype)])) + self.one + self.no_columns.sum()


def train_small_parameters() -> None:
    limits = {} if dist.get_world_size() <= 2 else {"rtol": 1e-5, "atol": 1e-6}
    plain = build(Small)
    model = Wrapper(copy.deepcopy(plain))
    ours = torch.optim.AdamW(model.module.parameters(), lr=0.01, eps=1e-3)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.01, eps=1e-3)
    for step in range(3):
        ours.zero_grad()
        theirs.zero_grad()
        loss, plain_loss = (m(rows(torch.float32, step)).square().mean() for m in (model, plain))
        check_equal(loss, plain_loss, f"loss of step {step}", **limits)
        loss.backward()
        plain_loss.backward()
        mean = reference_gradients(plain)
        check_named(model.gradients(), mean, f"gradient of step {step}", **limits)
        for name, parameter in plain.named_parameters():
            parameter.grad = mean[name]
        ours.step()
        theirs.step()
        check_named(model.weights(), same_weights(plain), f"weight after step {step}", **limits)
    state = model.module.state_dict()
    for name, value in plain.state_dict().items():
        assert state[name].shape == value.shape, name
    assert all(p.grad.shape == p.shape for p in model.module.parameters())
    model.module.load_state_dict({name: value.clone() for name, value in state.items()})
    check_named(model.weights(), same_weights(plain), "weight after a round trip by state_dict", **limits)
    for name, value in state.items():
        check_equal(value.full_tensor(), plain.state_dict()[name], f"full {name}", **limits)


def test_parameters_of_one_element_or_none_train_as_in_plain_pytorch(world_size: int) -> None:
    """After pytorch/pytorch#132934; at four ranks three of them hold nothing of ``one``."""
    run_distributed(world_size, train_small_parameters)
