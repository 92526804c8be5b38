"""Copies, moves and loads of a sharded model: an independent copy, a clear refusal, or nothing changed."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparison import Wrapper, check_equal, check_named, local, same_weights
from kinds import CLOSE
from models import Block, Chain, build, vectors
from refusals import refused
from torch import nn

import fsdp_fn
from harness import run_distributed


def wrapped() -> tuple[Wrapper, nn.Module]:
    return Wrapper(build(Chain), (Block,)), build(Chain)


def check_as(model: Wrapper, plain: nn.Module, what: str) -> None:
    check_named(model.weights(), same_weights(plain), f"weights after {what}")
    check_equal(model(vectors()), plain(vectors()), f"output after {what}", **CLOSE)
    model.check_at_rest()


def copies() -> None:
    model, plain = wrapped()
    ways: dict[str, Callable[[nn.Module], object]] = {
        "deepcopy": copy.deepcopy,
        "copy": copy.copy,
        "pickle": pickle.dumps,
        "torch.save": lambda module: torch.save(module, io.BytesIO()),
    }
    for what, way in ways.items():
        for part, name in ((model.module, "Chain"), (model.module.first, "Block"), (nn.Sequential(model.module), "")):
            if what == "copy" and not name:
                continue  # of a container: the same module in another
            with refused(TypeError, rf"{name or 'Chain|Block'} is sharded and cannot be copied or pickled", what):
                way(part)
        check_as(model, plain, what)


def copies_of_state() -> None:
    """What goes instead: a state dict, full or sharded, and the functional state, are independent copies."""
    model, plain = wrapped()
    state = copy.deepcopy(model.module.state_dict())
    again = pickle.loads(pickle.dumps(model.module.state_dict()))
    with torch.no_grad():
        for parameter in model.module.parameters():
            local(parameter).zero_()
    for one in (state, again):
        for name, value in plain.state_dict().items():
            check_equal(one[name].full_tensor(), value, name)
    model.module.load_state_dict(again)
    check_as(model, plain, "loading the copy")
    model(vectors()).sum().backward()
    parameters = copy.deepcopy(dict(model.module.named_parameters()))
    for name, parameter in model.module.named_parameters():
        one = parameters[name]
        assert isinstance(one, nn.Parameter), name
        check_equal(local(one), local(parameter), name)
        check_equal(local(one.grad), local(parameter.grad), f"gradient of {name}")
        assert local(one).untyped_storage().nbytes() == local(one).nbytes, f"{name}: its own rows alone"
    model.module.zero_grad()
    _, functional = fsdp_fn.shard(plain)
    for one in (copy.deepcopy(functional), pickle.loads(pickle.dumps(functional))):
        for flat, other in zip(one.units[""].main.segments, functional.units[""].main.segments, strict=True):
            check_equal(flat, other, "flat weights")
            assert flat.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def moves() -> None:
    model, plain = wrapped()
    module = model.module
    moving: dict[str, Callable[[nn.Module], object]] = {
        "half": lambda m: m.half(),
        "type": lambda m: m.type(torch.float64),
        "to both": lambda m: m.to("cpu", torch.bfloat16),
        "to a tensor": lambda m: m.to(torch.ones(1, dtype=torch.float64)),
        "to_empty elsewhere": lambda m: m.to_empty(device="meta"),
    }
    if torch.cuda.is_available():
        moving["cuda"] = lambda m: m.cuda()
    for what, move in moving.items():
        for part in (module, module.first, nn.Sequential(module)):
            with refused(TypeError, "cannot change sharded weights from", what):
                move(part)
            check_as(model, plain, what)
    staying: dict[str, Callable[[nn.Module], object]] = {
        "cpu": lambda m: m.cpu(),
        "float": lambda m: m.float(),
        "to its own": lambda m: m.to("cpu", torch.float32),
        "non_blocking": lambda m: m.to("cpu", non_blocking=True),
        "memory_format": lambda m: m.to(memory_format=torch.channels_last),
        "share_memory": lambda m: m.share_memory(),
    }
    for what, stay in staying.items():
        assert stay(module) is module, what
        stay(nn.Sequential(module))
        check_as(model, plain, what)


def loads() -> None:
    model, plain = wrapped()
    module = model.module
    twos = {name: torch.full_like(value, 2) for name, value in module.state_dict().items()}
    missing = {name: value for name, value in twos.items() if name != "head.bias"}
    extra = {**twos, "head.more": torch.ones(2)}
    with refused(RuntimeError, r"Missing key.*\"head\.bias\"", "strict, a key missing"):
        module.load_state_dict(missing)
    with refused(RuntimeError, r"Unexpected key.*\"head\.more\"", "strict, a key too many"):
        module.load_state_dict(extra)
    plain.load_state_dict({name: torch.full_like(value, 2) for name, value in plain.state_dict().items()})
    check_as(model, plain, "strict loads that fail, which load what fits as plain PyTorch does")

    threes = {name: torch.full_like(value, 3) for name, value in extra.items() if name != "head.bias"}
    result = module.load_state_dict(threes, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["head.bias"], ["head.more"])
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.fill_(2 if name == "head.bias" else 3)
    check_as(model, plain, "a load that is not strict")

    for dtype in (torch.bfloat16, torch.float64, torch.int64):
        values = {name: torch.full_like(value, 4, dtype=dtype) for name, value in module.state_dict().items()}
        module.load_state_dict(values)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.fill_(4)
        check_as(model, plain, f"a load of {dtype}")
        module.load_state_dict(twos)

    whole = {name: torch.full_like(value, 5) for name, value in plain.state_dict().items()}
    plain.load_state_dict({name: torch.full_like(value, 2) for name, value in plain.state_dict().items()})
    for strict in (True, False):
        with refused(RuntimeError, r"first\.norm\.weight", f"whole tensors, {strict=}"):
            module.load_state_dict(whole, strict=strict)
        check_as(model, plain, "whole tensors")
        with refused(ValueError, "assign=False", f"assign, {strict=}"):
            module.load_state_dict(threes, strict=strict, assign=True)
        check_as(model, plain, "assign")


def loads_at_odd_moments() -> None:
    model, plain = wrapped()
    module = model.module
    twos = {name: torch.full_like(value, 0.1) for name, value in module.state_dict().items()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            module.load_state_dict(twos)
        plain.load_state_dict({name: torch.full_like(value, 0.1) for name, value in plain.state_dict().items()})
        check_as(model, plain, f"a load under {mode.__name__}")
        module(vectors()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        plain(vectors()).square().mean().backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        check_equal(
            module(vectors(1)), plain(vectors(1)), f"after a step that followed a load, {mode.__name__}", **CLOSE
        )
    loss = module(vectors()).square().mean()
    module.load_state_dict(twos)
    with refused(RuntimeError, "weights were changed between this forward and its backward", "a load between"):
        loss.backward()
    model.check_at_rest()
    plain.load_state_dict({name: torch.full_like(value, 0.1) for name, value in plain.state_dict().items()})
    module.zero_grad()
    check_as(model, plain, "a load between forward and backward")


CASES: list[Callable[[], Any]] = [copies, copies_of_state, moves, loads, loads_at_odd_moments]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_sharded_model_is_copied_moved_and_loaded_right_or_refused_by_name(
    world_size: int, case: Callable[[], None]
) -> None:
    """After NVIDIA/Megatron-LM#6087: a load that replaced parameters was not read by forward."""
    run_distributed(world_size, case)
