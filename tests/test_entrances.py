"""Ways into a wrapped module besides forward: registered methods, and full weights to be read."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from comparison import Wrapper, check_equal, check_named, check_nothing_gathered, reference_gradients, same_weights
from models import WIDTH, Block, build, vectors
from torch import nn

import fsdp_fn
from harness import run_distributed, run_expecting_error

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


class Coder(nn.Module):
    """Two entrances besides forward, which itself goes through them."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 3)
        self.block = Block()
        self.up = nn.Linear(3, WIDTH)

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        """From WIDTH to 3."""
        return torch.tanh(self.down(self.block(x))) * scale

    def decode(self, code: torch.Tensor) -> torch.Tensor:
        return self.up(code)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def enter_by_methods() -> None:
    plain = build(Coder)
    model = Wrapper(copy.deepcopy(plain), (Block,))
    for name in ("encode", "decode"):
        fsdp_fn.register_forward_method(model.module, name)
    assert type(model.module).__name__ == "Coder"
    assert isinstance(model.module, Coder)
    assert model.module.encode.__doc__ == "From WIDTH to 3."
    for one in (model.module, plain):
        x = vectors(dist.get_rank())
        (one.decode(one.encode(x, scale=0.5)).square().sum() + one(x).sum() + one.encode(x).sum()).backward()
    check_named(model.gradients(), reference_gradients(plain), "gradient", **CLOSE)
    model.check_at_rest()
    with torch.no_grad():
        check_equal(model.module.encode(vectors()), plain.encode(vectors()), "code", **CLOSE)
    check_nothing_gathered()
    with fsdp_fn.record_events(model.module) as log:
        model.module(vectors())
    gathers = [event for event in log if event.action is fsdp_fn.Action.GATHER and event.unit == ""]
    assert len(gathers) == 1, "a method within forward gathered again"


def test_a_registered_method_runs_with_the_weights_in_place(world_size: int) -> None:
    run_distributed(world_size, enter_by_methods)


def delete_after_methods() -> None:
    gc.collect()
    gc.disable()
    try:
        model = fsdp_fn.fully_shard(build(Coder))
        fsdp_fn.register_forward_method(model, "encode")
        model.encode(vectors()).sum().backward()
        reference = weakref.ref(model)
        del model
        assert reference() is None
    finally:
        gc.enable()


def test_a_registered_method_does_not_keep_the_model_alive() -> None:
    run_distributed(2, delete_after_methods)


def register_badly(case: str) -> None:
    model = build(Coder)
    if case == "not wrapped":
        fsdp_fn.register_forward_method(model, "encode")
    fsdp_fn.fully_shard(model)
    if case == "on the instance":
        model.__dict__["encode"] = model.encode
    fsdp_fn.register_forward_method(model, "encode" if case == "on the instance" else "recode")


@pytest.mark.parametrize(
    ("case", "kind", "said"),
    [
        ("not wrapped", TypeError, "is not wrapped"),
        ("no such method", AttributeError, "has no method 'recode'"),
        ("on the instance", TypeError, "is no method of its class"),
    ],
)
def test_what_is_no_method_is_refused(case: str, kind: type[Exception], said: str) -> None:
    for error in run_expecting_error(2, register_badly, case):
        assert isinstance(error, kind)
        assert said in str(error)


def read_full_weights() -> None:
    plain = build(Coder)
    for placements in (fsdp_fn.zero3(), fsdp_fn.zero2(), fsdp_fn.ddp()):
        model = Wrapper(copy.deepcopy(plain), (Block,), placements=placements).module
        with fsdp_fn.unsharded(model):
            for name, weight in model.named_parameters():
                assert type(weight) is torch.Tensor or type(weight) is nn.Parameter, name
                check_equal(weight, plain.get_parameter(name), name)
            check_equal(model.down(vectors()), plain.down(vectors()), "a part of it, called by itself", **CLOSE)
        check_nothing_gathered()
        with fsdp_fn.unsharded(model.block):
            check_equal(model.block.up.weight, plain.block.up.weight, "up")
            assert hasattr(model.down.weight, "_local_tensor"), "the root was not asked for"
        model(vectors()).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())


def test_full_weights_can_be_read(world_size: int) -> None:
    run_distributed(world_size, read_full_weights)


def write_full_weights() -> None:
    model = Wrapper(build(Coder), (Block,)).module
    with torch.no_grad(), fsdp_fn.unsharded(model):
        model.block.up.weight.zero_()


def test_a_write_to_them_is_refused() -> None:
    for error in run_expecting_error(2, write_full_weights):
        assert isinstance(error, RuntimeError)
        assert "'block'" in str(error)
        assert "changed in place" in str(error)


def leave_by_an_exception() -> None:
    plain = build(Coder)
    model = Wrapper(copy.deepcopy(plain), (Block,))
    with pytest.raises(KeyError), fsdp_fn.unsharded(model.module):
        raise KeyError
    model.check_at_rest()
    check_named(model.weights(), same_weights(plain), "weight")


def test_after_an_exception_all_is_sharded_again() -> None:
    run_distributed(2, leave_by_an_exception)


def test_a_module_without_wrapped_ones_is_refused() -> None:
    with pytest.raises(ValueError, match="has no wrapped module"), fsdp_fn.unsharded(nn.Linear(2, 2)):
        pass
