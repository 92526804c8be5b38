"""A model, a mesh or an option that cannot be served is refused at set-up, by name, and nothing is half-changed.

So is what is done to a model once it is sharded and would part its parameters from its weights.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import check_same_bits, snapshot
from comparison import PATHS, check_equal, check_named, reference_gradients, same_weights
from models import VOCABULARY, WIDTH, Chain, Tied, build, vectors
from refusals import refused
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_fn
from harness import run_distributed, run_expecting_error

SHARDS: dict[str, Callable[..., Any]] = {"fully_shard": fsdp_fn.fully_shard, "shard": fsdp_fn.shard}


def refuse(
    model: nn.Module,
    error: type[Exception],
    match: str,
    *arguments: Any,
    sharding: tuple[str, ...] = ("fully_shard", "shard"),
    **options: Any,
) -> None:
    """Both ways to shard ``model`` raise, and leave its classes, parameters and gradients as they were."""
    parameters = list(model.parameters())
    values = [getattr(parameter, "_local_tensor", parameter) for parameter in parameters]
    classes, before = [type(module) for module in model.modules()], snapshot(values)
    gradients = [parameter.grad for parameter in parameters]
    for name in sharding:
        with refused(error, match, f"{name} of {type(model).__name__}, {arguments} {options}"):
            SHARDS[name](model, *arguments, **options)
        assert [type(module) for module in model.modules()] == classes, f"{name}: a class was changed"
        for one, other in zip(model.parameters(), parameters, strict=True):
            assert one is other, f"{name}: a parameter was replaced"
        check_same_bits(values, before, name)
        for parameter, grad in zip(parameters, gradients, strict=True):
            assert parameter.grad is grad, f"{name}: a gradient was changed"


# --- set-up -------------------------------------------------------------------------------------------------


class Bare(nn.Module):
    """A unit with no parameters, in a model that has some."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU()
        self.list = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.list[0](self.act(self.linear(x)))


def no_parameters() -> None:
    refuse(nn.ReLU(), ValueError, "ReLU has no parameters")
    refuse(Bare(), ValueError, "unit 'act' has no parameters", sharding=("shard",), units=[nn.ReLU])


def no_forward() -> None:
    model = Bare()
    refuse(model.list, ValueError, "ModuleList has no forward", sharding=("fully_shard",))
    refuse(model, ValueError, "unit 'list' has no forward", sharding=("shard",), units=[nn.ModuleList])


def unknown_units() -> None:
    model = Bare()
    for units, error, match in (
        (["nowhere"], ValueError, "no module 'nowhere'"),
        ([nn.Conv2d], ValueError, "no module of class Conv2d"),
        ([3], TypeError, r"names or nn\.Module classes, got 3"),
        ([int], TypeError, r"names or nn\.Module classes, got <class 'int'>"),
        ("linear", TypeError, "got the string 'linear'"),
    ):
        refuse(model, error, match, sharding=("shard",), units=units)


def unknown_options() -> None:
    model = build(Chain)
    refuse(model, TypeError, "placements.*zero3", placements="zero2")
    refuse(model, ValueError, r"no axis 'rack', only \['data'\]", placements=fsdp_fn.zero1("rack"))
    refuse(model, ValueError, "axis 'data' is used twice", placements=[fsdp_fn.ddp("data"), fsdp_fn.zero3(axis="data")])
    for divisor, error in ((0.0, ValueError), (-1, ValueError), (float("inf"), ValueError), (True, TypeError)):
        refuse(model, error, f"grad_divisor: .*expected a number.*got {divisor}", grad_divisor=divisor)
    refuse(model, TypeError, r"group_of\('first\.norm\.weight', …\): expected a name, got 3", group_of=lambda *_: 3)
    for kept, placements, match in (
        (3, None, "reshard_after_forward=3: expected a divisor of the 2 ranks of axis 'data'"),
        (2, fsdp_fn.zero2(), "reshard_after_forward=2: the strategy shards parameters over no axis"),
    ):
        policy = fsdp_fn.SchedulePolicy(reshard_after_forward=kept)
        refuse(model, ValueError, match, placements=placements, policy=policy)
    refuse(model, ValueError, "offload: the mesh is on the host already", policy=fsdp_fn.SchedulePolicy(offload=True))
    refuse(model, TypeError, "precision: expected a PrecisionPolicy, got 'bf16'", precision="bf16")
    refuse(model, TypeError, "policy: expected a SchedulePolicy, got 'free'", policy="free")


def parameters_that_do_not_fit() -> None:
    hooked = build(Chain)
    hooked.head.weight.register_hook(lambda grad: grad)
    refuse(hooked, ValueError, r"'head\.weight'.*hooks")
    accumulating = build(Chain)
    accumulating.head.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    refuse(accumulating, ValueError, r"'head\.bias'.*hooks")
    with_gradients = build(Chain)
    with_gradients(vectors()).sum().backward()
    refuse(with_gradients, ValueError, r"'first\.norm\.weight'.*zero_grad")
    for shard in SHARDS.values():
        with refused(ValueError, r"'0\.weight'.*not initialised", shard.__name__):
            shard(nn.Sequential(nn.LazyLinear(3)))
    wrapped = fsdp_fn.fully_shard(build(Chain))
    refuse(wrapped, ValueError, "Chain is wrapped already", sharding=("fully_shard",))
    refuse(wrapped, ValueError, r"'first\.norm\.weight'.*DTensor already", sharding=("shard",))
    above = r"Block is part of the root unit \(Chain\), which was wrapped before it.*nested modules first"
    refuse(wrapped.first, ValueError, above, sharding=("fully_shard",))
    elsewhere = fsdp_fn.fully_shard(nn.Sequential(wrapped.head))
    with refused(RuntimeError, "parameter 'weight' is tied to one that another unit holds", "a head of two models"):
        elsewhere(vectors())


def device_that_does_not_fit() -> None:
    on_meta = nn.Linear(3, 3, device="meta")
    for mesh in ((), (init_device_mesh("cpu", (dist.get_world_size(),)),)):
        for shard in SHARDS.values():
            with refused(ValueError, "'weight'.*is on meta, the mesh on 'cpu'", f"{shard.__name__} {mesh}"):
                shard(on_meta, *mesh)


def mesh_of_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("outer", "inner"))
    refuse(build(Chain), ValueError, r"one dimension, got 2 of sizes \(1, 2\); name the axis to shard over", mesh)
    for placements, match in (
        (fsdp_fn.hsdp("rack", "inner"), r"no axis 'rack', only \['outer', 'inner'\]"),
        (fsdp_fn.hsdp("inner", "outer"), r"axes in the mesh's order.*got \['inner', 'outer'\]"),
    ):
        refuse(build(Chain), ValueError, match, mesh, placements=placements)
    refuse(build(Chain), TypeError, "expected a DeviceMesh, got str", "cpu")


CASES: list[Callable[[], None]] = [
    no_parameters,
    no_forward,
    unknown_units,
    unknown_options,
    parameters_that_do_not_fit,
    device_that_does_not_fit,
    mesh_of_two_dimensions,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_set_up_that_does_not_fit_is_refused_by_name_and_changes_nothing(case: Callable[[], None]) -> None:
    run_distributed(2, case)


def mesh_of_some_ranks() -> None:
    """The mesh's ranks are served by it; the other is told that it is none of them."""
    plain = build(Chain)
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("data",))
    if dist.get_rank() == 2:
        refuse(plain, ValueError, "rank 2 is not part of", mesh)
        return
    model = fsdp_fn.fully_shard(copy.deepcopy(plain), mesh)
    template, state = fsdp_fn.shard(plain, mesh)
    check_equal(model(vectors()), plain(vectors()), "wrapper")
    check_equal(fsdp_fn.apply(template, state, vectors())[0], plain(vectors()), "functional")


def test_a_rank_outside_the_mesh_is_refused_and_the_mesh_serves_its_own() -> None:
    run_distributed(3, mesh_of_some_ranks)


# --- ties ---------------------------------------------------------------------------------------------------


def tied_within_a_unit(path: str) -> None:
    plain = build(Tied)
    model = PATHS[path](copy.deepcopy(plain))
    exact = dist.get_world_size() == 1
    tolerance = {} if exact else {"rtol": 1e-5, "atol": 1e-6}
    before = plain.emb.weight.detach().clone()
    for step in range(2):
        for call in (plain, model):
            (call(torch.arange(VOCABULARY)) * (dist.get_rank() + 1)).pow(2).sum().backward()
        mean = reference_gradients(plain)
        check_named(model.gradients(), mean, f"step {step}: gradient", **tolerance)
        with torch.no_grad():
            plain.emb.weight.sub_(mean["emb.weight"], alpha=0.1)
        plain.zero_grad()
        model.step(lr=0.1)
        check_named(model.weights(), same_weights(plain), f"step {step}: weight", **tolerance)
        assert model.module.emb.weight is model.module.out.weight, f"step {step}: the two names came apart"
    changed = (model.weights()["emb.weight"] != before).any(1)
    assert changed.all(), f"rows that did not move: {(~changed).nonzero().flatten().tolist()}"


@pytest.mark.parametrize("path", PATHS)
def test_a_parameter_tied_within_a_unit_is_one_and_gets_the_sum_of_its_gradients(world_size: int, path: str) -> None:
    """After pytorch/pytorch#176076."""
    run_distributed(world_size, tied_within_a_unit, path)


def layers_that_come_and_go() -> None:
    for _ in range(8):
        layer = fsdp_fn.fully_shard(nn.Linear(WIDTH, WIDTH))
        fsdp_fn.shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)), units=[nn.Linear])
        layer(vectors()).sum().backward()
        del layer
        gc.collect()


def test_new_parameters_are_never_taken_for_tied_ones_that_are_gone() -> None:
    """After pytorch/pytorch#176076: identities of objects are used again."""
    run_distributed(2, layers_that_come_and_go)


# --- one rank is another ------------------------------------------------------------------------------------


class Shallow(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 4)


ODD_RANKS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "shape": (Shallow, {}),
    "frozen": (lambda: build(Chain).requires_grad_(False), {}),
    "dtype": (lambda: build(Chain).bfloat16(), {}),
    "precision": (Chain, {"precision": fsdp_fn.PrecisionPolicy(compute_dtype=torch.bfloat16)}),
    "granularity": (Chain, {"placements": fsdp_fn.zero3(fsdp_fn.TensorAtomic())}),
    "strategy": (Chain, {"placements": fsdp_fn.zero2()}),
    "grad_divisor": (Chain, {"grad_divisor": 2.0}),
    "policy": (Chain, {"policy": fsdp_fn.SchedulePolicy(reshard_after_forward=False)}),
    "fault": (Chain, {"placements": "none of ours"}),
}
"""How the last rank differs from the others."""


def one_rank_is_another(sharding: str, odd: str) -> None:
    make, options = ODD_RANKS[odd] if dist.get_rank() == dist.get_world_size() - 1 else (Chain, {})
    model = build(make)
    inputs = vectors().to(next(model.parameters()).dtype)
    expected = model(inputs)
    try:
        refuse(model, Exception, "", sharding=(sharding,), **options)
        check_equal(model(inputs), expected, "the model, which is not sharded")
    except BaseException as error:
        raise AssertionError(f"{sharding}, {odd}: {error}") from error
    SHARDS[sharding](model, **options)


@pytest.mark.parametrize("sharding", SHARDS)
@pytest.mark.parametrize("odd", ODD_RANKS)
def test_a_rank_that_differs_is_refused_on_every_rank_with_nothing_changed(odd: str, sharding: str) -> None:
    for rank, error in enumerate(run_expecting_error(3, one_rank_is_another, sharding, odd, timeout=20.0)):
        if odd == "fault":
            expected: type[Exception] = TypeError if rank == 2 else fsdp_fn.RankFault
            assert isinstance(error, expected), f"rank {rank}: {error!r}"
            assert "none of ours" in str(error), f"rank {rank}: {error}"
        else:
            assert isinstance(error, ValueError), f"rank {rank}: {error!r}"
            assert "Rank 0 has" in str(error), f"rank {rank}: {error}"
            assert "rank 2 has" in str(error), f"rank {rank}: {error}"
