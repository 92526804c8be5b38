"""Models built on the meta device get memory and values a unit at a time, as plain PyTorch's ``to_empty`` and init do.

And the first rank's values, where they are asked for, are what all ranks shard.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import (
    PATHS,
    Functional,
    Wrapper,
    check_equal,
    check_named,
    local,
    reference_gradients,
    same_weights,
)
from models import HIDDEN, VOCABULARY, WIDTH, Block, Chain, Model, Stack, build, tokens, vectors
from refusals import refused
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fsdp_fn
from harness import run_distributed, run_expecting_error

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "docs" / "examples"))

import meta_device

Made = Wrapper | Functional


def on_meta(make: Callable[[], nn.Module]) -> Any:
    with torch.device("meta"):
        return make()


def children_first(model: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    model.apply(found.append)
    return found


def sharded(path: str, model: nn.Module, units: Sequence[type[nn.Module]] = (), **options: Any) -> Made:
    """``model`` on a path, its units bottom-up in the order of the model."""
    if path == "functional":
        return Functional(model, units, **options)
    for module in children_first(model):
        if isinstance(module, tuple(units)) and module is not model:
            fsdp_fn.fully_shard(module, **options)
    return Wrapper(model, **options)


def reset(module: nn.Module) -> None:
    """What ``init="reset_parameters"`` is to do for one module."""
    if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
        module.reset_parameters()  # type: ignore[operator]


def narrow(module: nn.Module) -> None:
    """An init that draws otherwise than torch's modules do, and writes through ``.data`` as models of language do."""
    for parameter in module.parameters(recurse=False):
        parameter.data.normal_(0.0, 0.1)


def initialised(make: Callable[[], Model], init: Callable[[nn.Module], None], seed: int = 11) -> Model:
    """The model in plain PyTorch, initialised children first.

    Built with memory, for ``to_empty`` parts tied weights; what it was built with is overwritten.
    """
    plain = build(make)
    with torch.no_grad():
        for tensor in (*plain.parameters(), *plain.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 1)
        torch.manual_seed(seed)
        plain.apply(init)
    return plain


def check_training(model: Made, plain: nn.Module, inputs: Any, steps: int = 2) -> None:
    """Both train alike; to the bit at one rank."""
    tolerance = {} if dist.get_world_size() == 1 else {"rtol": 1e-4, "atol": 1e-5}
    for step in range(steps):
        for call in (plain, model):
            (call(inputs) * (dist.get_rank() + 1)).pow(2).mean().backward()
        mean = reference_gradients(plain)
        check_named(model.gradients(), mean, f"step {step}: gradient", zeros_for_none=True, **tolerance)
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.sub_(mean[name], alpha=0.01)
        plain.zero_grad()
        model.step(lr=0.01)
        check_named(model.weights(), same_weights(plain), f"step {step}: weight", **tolerance)


def buffers_of(model: Made) -> dict[str, torch.Tensor]:
    return dict(model.module.named_buffers()) if isinstance(model, Wrapper) else dict(model.state.buffers)


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


class Rotary(nn.Module):
    """Buffers of three kinds and no parameter: frequencies, a mask, positions."""

    inv_freq: torch.Tensor
    mask: torch.Tensor
    positions: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in self.values().items():
            self.register_buffer(name, tensor, persistent=False)

    def values(self) -> dict[str, torch.Tensor]:
        return {
            "inv_freq": 1.0 / 100.0 ** (torch.arange(0, WIDTH) / WIDTH),
            "mask": torch.ones(6, 6, dtype=torch.bool).tril(),
            "positions": torch.arange(6),
        }

    def reset_parameters(self) -> None:
        """One is assigned anew, one registered anew, one written."""
        values = self.values()
        self.inv_freq = values["inv_freq"]
        self.register_buffer("mask", values["mask"], persistent=False)
        self.positions.copy_(values["positions"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angle = self.positions[:, None] * self.inv_freq
        return torch.where(self.mask.any(1, keepdim=True), x * angle.cos(), 0.0)


class Mixing(nn.Module):
    """A block with a batch norm, and positions that all blocks share."""

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.rotary(x)).relu()
        return x + self.down(self.norm(y.flatten(0, 1)).view(y.shape))


class Language(nn.Module):
    """Blocks first, then an embedding that is tied to the head: ``nn.Module.apply`` meets units before the rest."""

    def __init__(self) -> None:
        super().__init__()
        rotary = Rotary()
        self.blocks = nn.ModuleList(Mixing(rotary) for _ in range(2))
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        x = self.embedding(indices)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


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


# --- the first rank's values --------------------------------------------------------------------------------


def first_seed(path: str) -> None:
    plain = initialised(Language, reset, seed=40)
    torch.manual_seed(40 + dist.get_rank())
    model = sharded(path, on_meta(Language), [Mixing], init="reset_parameters", broadcast=True)
    check_named(model.weights(), same_weights(plain), "first weight")
    check_named(buffers_of(model), dict(plain.named_buffers()), "first buffer")
    check_training(model, plain, tokens())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("path", PATHS)
def test_with_broadcast_the_first_ranks_seed_is_everyones(world_size: int, path: str) -> None:
    run_distributed(world_size, first_seed, path)


def make_by_seed(seed: int) -> Language:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Language()
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.fill_(seed + 1)
    return model


def first_model(path: str, others: str, **options: Any) -> None:
    rank, plain = dist.get_rank(), make_by_seed(40)
    given = on_meta(Language) if rank and others == "meta" else make_by_seed(40 + rank)
    held = [*given.parameters(), *given.buffers()]
    before = [tensor.detach().clone() for tensor in held]
    model = sharded(path, given, [Mixing], broadcast=True, **options)
    if not options:
        check_named(model.weights(), same_weights(plain), "first weight")
    check_equal(model(tokens()), plain(tokens()), "output")
    check_named(buffers_of(model), dict(plain.named_buffers()), "first buffer")
    if path == "wrapper" and others == "real":
        assert [id(b) for b in given.buffers()] == [id(b) for b in held if not isinstance(b, nn.Parameter)]
    if path == "functional":
        for one, other, value in zip([*given.parameters(), *given.buffers()], held, before, strict=True):
            assert one is other, "the model was changed"
            assert one.is_meta or torch.equal(one, value), "the model was written"
    if not options:
        check_training(model, plain, tokens())


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("others", ["meta", "real"])
@pytest.mark.parametrize("path", PATHS)
def test_with_broadcast_the_first_ranks_model_is_everyones(world_size: int, others: str, path: str) -> None:
    run_distributed(world_size, first_model, path, others)


def first_model_at_rest(path: str, strategy: str) -> None:
    first_model(path, "meta", placements=getattr(fsdp_fn, strategy)())


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("path", PATHS)
def test_broadcast_weights_are_what_a_strategy_keeps_at_rest(path: str, strategy: str) -> None:
    run_distributed(2, first_model_at_rest, path, strategy)


def first_of_two_axes(path: str, strategy: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    placements = getattr(fsdp_fn, strategy)("outer", "inner")
    plain = make_by_seed(40)
    given = on_meta(Language) if dist.get_rank() else make_by_seed(40)
    options = {"mesh": mesh, "placements": placements, "broadcast": True}
    model = sharded(path, given, [Mixing], **options)
    indices = tokens()
    check_equal(model(indices), plain(indices), "output")
    plain = initialised(Language, reset, seed=40)
    torch.manual_seed(40 + dist.get_rank())
    model = sharded(path, on_meta(Language), [Mixing], init="reset_parameters", **options)
    check_equal(model(indices), plain(indices), "output after init")


@pytest.mark.parametrize("strategy", ["hsdp", "hfsdp"])
@pytest.mark.parametrize("path", PATHS)
def test_with_broadcast_over_two_axes_the_first_rank_of_both_is_everyones(path: str, strategy: str) -> None:
    run_distributed(4, first_of_two_axes, path, strategy)


class Offset(nn.Module):
    """A buffer of which all elements are one in memory."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("offset", torch.tensor([value]).expand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.offset


def expanded(path: str) -> None:
    model = sharded(path, build(lambda: Offset(7.0 + dist.get_rank())), broadcast=True)
    check_equal(buffers_of(model)["offset"], torch.full((WIDTH,), 7.0), "the buffer")
    check_equal(model(vectors()), build(lambda: Offset(7.0))(vectors()), "output")


@pytest.mark.parametrize("path", PATHS)
def test_with_broadcast_an_expanded_buffer_is_the_first_ranks_too(path: str) -> None:
    run_distributed(2, expanded, path)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def tensor_parallel(broadcast: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = on_meta(Pair)
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            data, tensor = mesh.get_coordinate() or ()
            local(parameter).fill_(1.0 + tensor + 10 * data)

    fsdp_fn.fully_shard(model, mesh["data"], init=init, broadcast=broadcast)
    up = model.up.weight.full_tensor()
    rows = torch.tensor([[1.0], [2.0]]).repeat_interleave(6, 0).expand(12, 8).clone()
    if not broadcast:
        for piece in (slice(3, 6), slice(9, 12)):
            rows[piece] += 10
    check_equal(up, rows, "the whole")
    model(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize("broadcast", [False, True])
def test_tensor_parallel_parameters_are_made_and_sent_within_the_units_axes(broadcast: bool) -> None:
    run_distributed(4, tensor_parallel, broadcast)


# --- refusals -----------------------------------------------------------------------------------------------


class Unwritten(nn.Module):
    """Owns tensors, and has no method that writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Module()
        self.inside.scale = nn.Parameter(torch.ones(WIDTH))
        self.inside.register_buffer("steps", torch.zeros(2, dtype=torch.int64))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.inside.scale


def all_but(*left: str) -> Callable[[nn.Module], None]:
    """An init that forgets these."""

    def init(module: nn.Module) -> None:
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if name not in left:
                tensor.fill_(1)

    return init


def replacing(module: nn.Module) -> None:
    for name, _ in list(module.named_parameters(recurse=False)):
        setattr(module, name, nn.Parameter(torch.ones(WIDTH)))


def freezing(module: nn.Module) -> None:
    all_but()(module)
    module.requires_grad_(False)


def misfitting(module: nn.Module) -> None:
    all_but()(module)
    if "steps" in module._buffers:
        module._buffers["steps"] = torch.zeros(3, dtype=torch.int64)


def failing(module: nn.Module) -> None:
    raise KeyError("no such file")


def half(module: nn.Module) -> None:
    all_but()(module)
    for _, parameter in module.named_parameters(recurse=False):
        parameter.flatten()[1:].fill_(torch.nan)


BAD_INITS: dict[str, tuple[Any, type[Exception], str]] = {
    "none": (None, ValueError, "'inside.scale'.*is on meta, the mesh on 'cpu': give init="),
    "no method": ("reset_parameters", ValueError, "module 'inside' of .*, a Module, has scale, steps on meta and no"),
    "parameter": (all_but("scale"), ValueError, "parameter 'inside.scale' of .*init did not write all of it"),
    "half a parameter": (half, ValueError, "parameter 'inside.scale' of .*init did not write all of it"),
    "integer buffer": (all_but("steps"), ValueError, "buffer 'inside.steps' of .*init did not write all of it"),
    "replaced": (replacing, ValueError, "init of unit .* replaced parameter 'scale'"),
    "frozen": (freezing, ValueError, "replaced parameter 'scale', or changed its requires_grad"),
    "buffer of another shape": (misfitting, ValueError, r"'inside.steps' .*\[3\] of torch.int64.*expected \[2\]"),
    "failing": (failing, RuntimeError, "init of module 'inside' of .* failed: KeyError: 'no such file'"),
    "another name": ("init_weights", ValueError, "init: expected 'reset_parameters' or a function.*'init_weights'"),
    "a number": (3, TypeError, "init: expected .* got 3"),
}

SHARDS: dict[str, Callable[..., Any]] = {"fully_shard": fsdp_fn.fully_shard, "shard": fsdp_fn.shard}


def bad_init(sharding: str) -> None:
    for what, (init, error, match) in BAD_INITS.items():
        model = on_meta(Unwritten)
        held = [*model.parameters(), *model.buffers()]
        with refused(error, match, f"{sharding}, {what}"):
            SHARDS[sharding](model, init=init)
        for one, other in zip([*model.parameters(), *model.buffers()], held, strict=True):
            assert one is other, f"{what}: a tensor was replaced"
            assert one.is_meta
            assert one.requires_grad == isinstance(one, nn.Parameter)
        assert type(model) is Unwritten
        SHARDS[sharding](model, init=all_but())
    with refused(TypeError, "broadcast: expected True or False, got 1", sharding):
        SHARDS[sharding](on_meta(Unwritten), init=all_but(), broadcast=1)
    model = nn.BatchNorm1d(WIDTH)
    model.running_mean = torch.zeros(WIDTH, device="meta")
    with refused(ValueError, "buffer 'running_mean' of unit .* is on meta", sharding):
        SHARDS[sharding](model)
    SHARDS[sharding](model, init="reset_parameters")


@pytest.mark.parametrize("sharding", SHARDS)
def test_an_init_that_does_not_do_its_work_is_refused_by_name_and_changes_nothing(sharding: str) -> None:
    run_distributed(2, bad_init, sharding)


class Reaching(nn.Module):
    """Writes a weight of a child, which may be a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.constant_(self.child.bias, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.child(x) * self.scale


def reaching() -> None:
    for units in ([], [nn.Linear]):
        weights = sharded("wrapper", on_meta(Reaching), units, init="reset_parameters").weights()
        check_equal(weights["child.bias"], torch.full((WIDTH,), 0.5), f"{units}")  # type: ignore[arg-type]
    weights = sharded("functional", on_meta(Reaching), [], init="reset_parameters").weights()
    check_equal(weights["child.bias"], torch.full((WIDTH,), 0.5), "functional")  # type: ignore[arg-type]
    with refused(ValueError, "module '' of unit '' wrote 'child.bias', which another unit holds", "functional"):
        sharded("functional", on_meta(Reaching), [nn.Linear], init="reset_parameters")


def test_a_write_that_reaches_into_another_unit_is_kept_or_refused() -> None:
    run_distributed(2, reaching)


ODD_RANKS: dict[str, tuple[dict[str, Any], dict[str, Any], type[Exception], str]] = {
    "failing": ({"init": all_but()}, {"init": failing}, fsdp_fn.RankFault, "no such file"),
    "failing with broadcast": (
        {"init": all_but(), "broadcast": True},
        {"init": failing, "broadcast": True},
        fsdp_fn.RankFault,
        "no such file",
    ),
    "no init": ({"init": all_but()}, {}, fsdp_fn.RankFault, "is on meta, the mesh on 'cpu': give init="),
    "no broadcast": (
        {"init": all_but(), "broadcast": True},
        {"init": all_but()},
        ValueError,
        "ranks disagree.*broadcast=",
    ),
}
"""What the other ranks give, what the odd one does, and what the others are told."""


def one_rank_is_another(sharding: str, odd: str, odd_rank: int) -> None:
    others, own, _, _ = ODD_RANKS[odd]
    model = on_meta(Unwritten)
    held = [*model.parameters(), *model.buffers()]
    try:
        SHARDS[sharding](model, **(own if dist.get_rank() == odd_rank else others))
    finally:
        for one, other in zip([*model.parameters(), *model.buffers()], held, strict=True):
            assert one is other, "a tensor was replaced"


@pytest.mark.parametrize("odd_rank", [0, 2])
@pytest.mark.parametrize("odd", ODD_RANKS)
@pytest.mark.parametrize("sharding", SHARDS)
def test_a_rank_that_fails_or_differs_is_told_on_every_rank(sharding: str, odd: str, odd_rank: int) -> None:
    _, _, told, match = ODD_RANKS[odd]
    errors = run_expecting_error(3, one_rank_is_another, sharding, odd, odd_rank, timeout=30.0)
    for rank, error in enumerate(errors):
        with refused(told if told is ValueError or rank != odd_rank else Exception, match, f"rank {rank}"):
            assert error is not None
            raise error


class Counted(nn.BatchNorm1d):
    """With a buffer more."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.register_buffer("more", torch.zeros(2))


def other_buffers(sharding: str) -> None:
    model = nn.Sequential(Counted() if dist.get_rank() == 1 else nn.BatchNorm1d(WIDTH))
    with refused(ValueError, r"ranks disagree.*buffer 0\.more \[2\]", sharding):
        SHARDS[sharding](model, broadcast=True)


@pytest.mark.parametrize("sharding", SHARDS)
def test_ranks_with_other_buffers_are_told_before_any_is_sent(sharding: str) -> None:
    run_distributed(2, other_buffers, sharding)


def emptied() -> None:
    plain = build(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    model = fsdp_fn.fully_shard(copy.deepcopy(plain))
    outer = nn.Sequential(model)
    for what, change in {
        "to_empty": lambda: model.to_empty(device="cpu"),
        "to_empty from above": lambda: outer.to_empty(device="cpu"),
        "to_empty on meta": lambda: model.to_empty(device="meta"),
    }.items():
        with refused(TypeError, "sharded weights", what):
            change()
        check_equal(model(vectors()), plain(vectors()), what)
    with refused(TypeError, "to_empty and the like.*init", "to_empty"):
        model.to_empty(device="cpu")


def test_to_empty_after_sharding_is_refused_and_leaves_buffers_alone() -> None:
    run_distributed(2, emptied)


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
