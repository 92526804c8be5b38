"""Models built on the meta device get memory and values a unit at a time: those of plain PyTorch with the same init."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import (
    PATHS,
    Wrapper,
    check_equal,
    check_named,
    local,
    same_weights,
)
from meta_models import (
    Language,
    Mixing,
    Rotary,
    buffers_of,
    check_training,
    initialised,
    on_meta,
    reset,
    sharded,
)
from models import HIDDEN, WIDTH, Block, Chain, Stack, build, tokens, vectors
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp_fn
from harness import run_distributed

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "docs" / "examples"))

import meta_device


def narrow(module: nn.Module) -> None:
    """An init that draws otherwise than torch's modules do, and writes through ``.data`` as models of language do."""
    for parameter in module.parameters(recurse=False):
        parameter.data.normal_(0.0, 0.1)


# --- values -------------------------------------------------------------------------------------------------

INITS: dict[str, tuple[Any, Callable[[nn.Module], None]]] = {
    "reset_parameters": ("reset_parameters", reset),
    "function": (narrow, narrow),
}


def same_numbers(path: str, init: str) -> None:
    given, plain_init = INITS[init]
    plain = initialised(Chain, plain_init)
    torch.manual_seed(11)
    model = sharded(path, on_meta(Chain), [Block], init=given)
    check_named(model.weights(), same_weights(plain), "first weight")
    check_training(model, plain, vectors())
    model.check_at_rest()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("path", PATHS)
def test_a_model_on_meta_gets_the_numbers_of_plain_pytorch_and_trains(world_size: int, init: str, path: str) -> None:
    run_distributed(world_size, same_numbers, path, init)


def all_kinds(path: str) -> None:
    plain = initialised(Language, reset)
    assert plain.head.weight is plain.embedding.weight
    given = on_meta(Language)
    held = [*given.parameters(), *given.buffers()]
    torch.manual_seed(11)
    model = sharded(path, given, [Mixing], init="reset_parameters")
    if path == "functional":
        for one, other in zip([*given.parameters(), *given.buffers()], held, strict=True):
            assert one is other, "the model was changed"
    check_named(model.weights(), same_weights(plain), "first weight")
    check_named(buffers_of(model), dict(plain.named_buffers()), "first buffer")
    assert model.module.head.weight is model.module.embedding.weight, "the two names came apart"
    if path == "wrapper":
        first, second = (block.rotary.inv_freq for block in given.blocks)
        assert first is second, "a shared buffer came apart"
    check_training(model, plain, tokens())
    check_named(buffers_of(model), dict(plain.named_buffers()), "buffer", rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("path", PATHS)
def test_batch_norms_positions_masks_and_tied_weights_are_as_in_plain_pytorch(world_size: int, path: str) -> None:
    run_distributed(world_size, all_kinds, path)


class Sharing(nn.Module):
    """Two units of one module each that share buffers, in modules of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Mixing(Rotary())
        self.second = Mixing(Rotary())
        for name in ("inv_freq", "mask", "positions"):
            setattr(self.second.rotary, name, getattr(self.first.rotary, name))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def buffers_across_units() -> None:
    model = sharded("wrapper", on_meta(Sharing), [Mixing], init="reset_parameters")
    for name, buffer in Rotary().named_buffers():
        first, second = (getattr(block.rotary, name) for block in (model.module.first, model.module.second))
        assert first is second, f"{name} came apart"
        check_equal(first, buffer, name)
    model = sharded("functional", on_meta(Sharing), [Mixing], init="reset_parameters")
    for name, buffer in Rotary().named_buffers():
        check_equal(buffers_of(model)[f"first.rotary.{name}"], buffer, name)
    model(vectors(rows=12).view(2, 6, WIDTH)).sum().backward()


def test_buffers_that_units_share_are_made_once() -> None:
    run_distributed(2, buffers_across_units)


def across_units(path: str) -> None:
    """Embedding and head are units, and their weight moves up to the root: all is written, and trains as one."""
    model = sharded(path, on_meta(Language), [nn.Embedding, nn.Linear], init="reset_parameters")
    assert model.module.head.weight is model.module.embedding.weight, "the two names came apart"
    weights = {name: weight for name, weight in model.weights().items() if weight is not None}
    plain = initialised(Language, reset)
    by_name = dict(plain.named_parameters(remove_duplicate=False))
    assert {id(by_name[name]) for name in weights} == {id(parameter) for parameter in plain.parameters()}
    with torch.no_grad():
        for name, weight in weights.items():
            by_name[name].copy_(weight)
    check_equal(model(tokens()), plain(tokens()), "output")
    assert plain(tokens()).isfinite().all()
    loss = model(tokens()).pow(2).sum()
    loss.backward()
    plain.zero_grad()
    plain(tokens()).pow(2).sum().backward()
    mean = {name: by_name[name].grad for name in weights}
    check_named(model.gradients(), mean, "gradient", rtol=1e-5, atol=1e-6)  # type: ignore[arg-type]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("path", PATHS)
def test_a_weight_that_is_tied_across_units_is_made_once(world_size: int, path: str) -> None:
    run_distributed(world_size, across_units, path)


class Sequence2(nn.Module):
    """Modules that hold weights in lists, and that write those of a child."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lstm(x)[0]
        return self.attention(y, y, y)[0]


def torch_modules(path: str) -> None:
    def init(module: nn.Module) -> None:
        method = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if method is not None:
            method()

    plain = initialised(Sequence2, init)
    torch.manual_seed(11)
    model = sharded(path, on_meta(Sequence2), [], init="reset_parameters")
    check_named(model.weights(), same_weights(plain), "first weight")
    check_training(model, plain, vectors(rows=6).view(3, 2, WIDTH))


@pytest.mark.parametrize("path", PATHS)
def test_modules_of_torch_initialise_themselves_as_when_they_are_built(path: str) -> None:
    run_distributed(2, torch_modules, path)


def partly_real(path: str) -> None:
    """Adapters on a model that was loaded: what holds values keeps them, also beside a tensor on meta."""
    plain = build(Chain)
    model = copy.deepcopy(plain)
    model.head.bias = nn.Parameter(torch.empty(3, device="meta"))
    model.second.up = nn.Linear(WIDTH, HIDDEN, device="meta")
    made = sharded(path, model, [Block], init="reset_parameters")
    weights = made.weights()
    for name, wanted in same_weights(plain).items():
        if name in ("head.bias", "second.up.weight", "second.up.bias"):
            assert weights[name].isfinite().all()  # type: ignore[union-attr]
            assert not torch.equal(weights[name], wanted), f"{name} was not made anew"  # type: ignore[arg-type]
        else:
            check_equal(weights[name], wanted, name)  # type: ignore[arg-type]
    made(vectors()).sum().backward()


@pytest.mark.parametrize("path", PATHS)
def test_what_holds_values_keeps_them(path: str) -> None:
    run_distributed(2, partly_real, path)


def in_low_precision(path: str, main: torch.dtype | None) -> None:
    def make() -> nn.Module:
        return Chain().bfloat16()

    plain = initialised(make, reset)
    torch.manual_seed(11)
    precision = fsdp_fn.PrecisionPolicy(main_dtype=main, compute_dtype=torch.bfloat16)
    model = sharded(path, on_meta(make), [Block], init="reset_parameters", precision=precision)
    wanted = {
        name: weight.to(main or weight.dtype) for name, weight in same_weights(plain).items() if weight is not None
    }
    check_named(model.weights(), wanted, "first weight")  # type: ignore[arg-type]
    inputs = vectors().bfloat16()
    check_equal(model(inputs), plain(inputs), "output")


@pytest.mark.parametrize("main", [None, torch.float32], ids=["bf16-main", "fp32-main"])
@pytest.mark.parametrize("path", PATHS)
def test_bf16_models_are_initialised_in_their_dtype_and_cast(path: str, main: torch.dtype | None) -> None:
    run_distributed(2, in_low_precision, path, main)


# --- checkpoints --------------------------------------------------------------------------------------------


def loaded(path: str, directory: str) -> None:
    """As models of language are started: built on meta, wrapped block by block, and loaded."""

    def zeros(module: nn.Module) -> None:
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.zero_()

    plain = build(Stack)
    first = Wrapper(copy.deepcopy(plain), (Block,))
    fsdp_fn.save_checkpoint(directory, 1, first.module)
    model = sharded(path, on_meta(Stack), [Block], init=zeros)
    assert all(not weight.any() for weight in model.weights().values() if weight is not None)
    latest = fsdp_fn.latest_checkpoint(directory)
    if isinstance(model, Wrapper):
        fsdp_fn.load_checkpoint(latest, model.module)
    else:
        state = fsdp_fn.without_gradients(model.state)
        model.state = fsdp_fn.with_gradients(fsdp_fn.load_checkpoint(latest, state).model)
    check_named(model.weights(), same_weights(plain), "weight")
    check_equal(model(tokens()), plain(tokens()), "output")
    if isinstance(model, Wrapper):
        again = sharded("wrapper", on_meta(Stack), [Block], init=zeros)
        again.module.load_state_dict(first.module.state_dict())
        check_named(again.weights(), same_weights(plain), "weight by load_state_dict")


@pytest.mark.parametrize("path", PATHS)
def test_a_checkpoint_is_loaded_into_a_model_that_was_on_meta(path: str, tmp_path: Path) -> None:
    run_distributed(2, loaded, path, str(tmp_path))


# --- memory -------------------------------------------------------------------------------------------------

WIDE, DEPTH = 128, 8


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(DEPTH))
        self.register_buffer("scale", torch.ones(WIDE))

    def reset_parameters(self) -> None:
        self.scale.fill_(1.0)  # type: ignore[operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


class Live(TorchDispatchMode):
    """The largest number of bytes, among tensors that hold any, that were alive together."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = (local(tensor) if isinstance(tensor, DTensor) else tensor).untyped_storage()
                if storage.device.type != "meta":
                    self.live[storage._cdata] = StorageWeakRef(storage)
        self.live = {key: reference for key, reference in self.live.items() if not reference.expired()}
        self.peak = max(self.peak, sum(map(bytes_now, self.live.values())))
        return result


def bytes_now(reference: StorageWeakRef) -> int:
    """A storage may have been emptied since."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


def peak_of_set_up(path: str, broadcast: bool) -> int:
    model = on_meta(Deep)
    with Live() as live:
        sharded(path, model, [nn.Linear], init="reset_parameters", broadcast=broadcast)
    return live.peak


@pytest.mark.parametrize("broadcast", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_no_rank_holds_more_than_its_shards_and_one_full_unit(path: str, broadcast: bool) -> None:
    unit = 4 * (WIDE * WIDE + WIDE)
    for rank, peak in enumerate(run_distributed(2, peak_of_set_up, path, broadcast)):
        least, most = DEPTH * unit // 2, DEPTH * unit // 2 + 3 * unit // 2
        assert least < peak <= most, f"rank {rank}: {peak / unit:.2f} units at once"


# --- the example --------------------------------------------------------------------------------------------


def losses_of_the_example() -> list[float]:
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    return meta_device.train(meta_device.make_model(mesh), torch.device("cpu"))


def test_the_example_trains_alike_at_one_rank_and_at_two() -> None:
    (alone,), (first, second) = (run_distributed(size, losses_of_the_example) for size in (1, 2))
    assert first == second
    assert first == pytest.approx(alone, rel=1e-4)
    assert alone[-1] < 0.8 * alone[0]
