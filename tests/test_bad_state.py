"""State that belongs to another model is refused by name, and so is what would part a sharded model from its weights.

On a refusal the state and the model are as they were.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import check_same_bits, snapshot
from comparison import Wrapper, check_equal, check_named, local, same_weights
from models import HIDDEN, WIDTH, Block, Chain, Normalised, build, vectors
from refusals import refused
from torch import nn

import fsdp_fn
from harness import run_distributed

BFLOAT16 = fsdp_fn.PrecisionPolicy(compute_dtype=torch.bfloat16)


class OtherHead(Chain):
    """As many units, parameters, and elements; another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, WIDTH)


# --- state --------------------------------------------------------------------------------------------------


def state_of_another_template() -> None:
    template, state = fsdp_fn.shard(build(Chain), units=[Block])
    without_second = {name: unit for name, unit in state.units.items() if name != "second"}
    swapped = {name: state.units[name] for name in ("second", "first", "")}
    first_alone = fsdp_fn.shard(build(Chain), units=["first"])[1]
    others: dict[str, tuple[fsdp_fn.ModelState, str]] = {
        "another shape": (sharded(OtherHead), r"unit ''.*head\.weight \[7, 3\].*template head\.weight \[3, 7\]"),
        "another granularity": (
            sharded(Chain, placements=fsdp_fn.zero3(fsdp_fn.TensorAtomic())),
            r"unit 'first'.*strategy: expected.*Flat\(\).*the template's; got.*TensorAtomic\(\)",
        ),
        "another strategy": (
            sharded(Chain, placements=fsdp_fn.zero2()),
            r"unit 'first'.*strategy: expected.*parameter=Sharded.*the template's; got.*parameter=Replicate\(\)",
        ),
        "another grad_divisor": (
            sharded(Chain, grad_divisor=2.0),
            r"unit 'first'.*grad_divisor: expected 1\.0, as the template's; got 2\.0",
        ),
        "another precision": (
            sharded(Chain, precision=BFLOAT16),
            r"unit 'first'.*precision: expected.*compute_dtype=None.*template's; got.*compute_dtype=torch\.bfloat16",
        ),
        "frozen": (sharded(lambda: build(Chain).requires_grad_(False)), r"unit 'first'.*float32 frozen.*template"),
        "other units": (first_alone, r"units \['first', ''\]"),
        "a unit missing": (fsdp_fn.ModelState(without_second, {}), r"units \['first', ''\]"),
        "units in another order": (fsdp_fn.ModelState(swapped, {}), r"units \['second', 'first', ''\]"),
        "a buffer too many": (
            dataclasses.replace(state, buffers={"mean": torch.zeros(3)}),
            r"buffers \['mean'\]",
        ),
        "another size": (
            dataclasses.replace(state, units=of_another_size(state)),
            r"unit 'first'.*axes: expected.*size=2.*the template's; got.*size=9",
        ),
    }
    step = fsdp_fn.value_and_grad(template, lambda model, x: model(x).sum())
    for what, (other, match) in others.items():
        before = snapshot(other)
        for way in (functools.partial(fsdp_fn.apply, template, other), functools.partial(step, other)):
            with refused(ValueError, match, what):
                way(vectors())
        check_same_bits(other, before, what)
    with pytest.raises(TypeError, match=r"expected \(Template, ModelState"):
        fsdp_fn.apply(state, template, vectors())  # type: ignore[arg-type]
    normalised, of_normalised = fsdp_fn.shard(build(Normalised))
    with pytest.raises(ValueError, match=r"buffers \[\], the template.*norm\.running_mean"):
        fsdp_fn.apply(normalised, dataclasses.replace(of_normalised, buffers={}), vectors())


def sharded(make: Callable[[], nn.Module], **options: Any) -> fsdp_fn.ModelState:
    return fsdp_fn.shard(build(make), units=[Block], **options)[1]


def of_another_size(state: fsdp_fn.ModelState) -> dict[str, fsdp_fn.UnitState]:
    units = {}
    for name, unit in state.units.items():
        axes = tuple(dataclasses.replace(axis, size=9) for axis in unit.axes)
        units[name] = dataclasses.replace(unit, main=dataclasses.replace(unit.main, axes=axes))
    return units


def optimizer_state_of_another_model() -> None:
    def of(make: Callable[[], nn.Module], **options: Any) -> tuple[Any, Any]:
        template, state = fsdp_fn.shard(build(make), **options)
        width = 3 if make is Narrow else WIDTH
        x = torch.ones(2, width)
        return state, fsdp_fn.value_and_grad(template, lambda model, x: model(x).sum())(state, x)[1]

    state, gradients = of(Chain, units=[Block])
    for optimizer, slot in ((fsdp_fn.AdamW(), "exp_avg"), (fsdp_fn.SGD(momentum=0.9), "momentum_buffer")):
        own = optimizer.init(state)
        others = {
            "another shape": (of(OtherHeadOfThree, units=[Block]), "unit ''"),
            "other units": (of(Chain), r"expected units \['first', 'second', ''\], got \[''\]"),
            "another model": (of(Narrow), r"expected units \['first', 'second', ''\], got \[''\]"),
        }
        for what, ((other, other_gradients), match) in others.items():
            for arguments, named in (
                ((gradients, optimizer.init(other), state), slot),
                ((other_gradients, own, state), "gradients"),
            ):
                before = snapshot(arguments)
                for update in (optimizer.update, optimizer.update_):
                    with refused(ValueError, f"{named}.*{match}", f"{optimizer}, {what}, {named}"):
                        update(*arguments)
                check_same_bits(arguments, before, f"{optimizer}, {what}, {named}")
    for update in (fsdp_fn.AdamW().update, fsdp_fn.AdamW().update_):
        with pytest.raises(ValueError, match=r"slots \['momentum_buffer'\], expected \['exp_avg', 'exp_avg_sq'\]"):
            update(gradients, fsdp_fn.SGD(momentum=0.9).init(state), state)
    with pytest.raises(ValueError, match=r"slots \[\], expected \['momentum_buffer'\]"):
        fsdp_fn.SGD(momentum=0.9).update(gradients, fsdp_fn.SGD().init(state), state)
    cast = {
        name: dataclasses.replace(b, segments=tuple(f.double() for f in b.segments)) for name, b in gradients.items()
    }
    with pytest.raises(ValueError, match=r"gradients of unit 'first'.*typed"):
        fsdp_fn.SGD().update(cast, fsdp_fn.SGD().init(state), state)


class OtherHeadOfThree(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, HIDDEN)


class Narrow(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)


class WithoutBias(nn.Linear):
    """In as many padded elements as ``Narrow``."""

    def __init__(self) -> None:
        super().__init__(3, 3, bias=False)


def gradients_of_another_model() -> None:
    found = []
    for make, units in ((Narrow, ()), (WithoutBias, ()), (Chain, (Block,))):
        template, state = fsdp_fn.shard(build(make), units=units)
        x = vectors() if make is Chain else vectors()[:, :3]
        found.append(fsdp_fn.value_and_grad(template, lambda model, x: model(x).sum())(state, x)[1])
    narrow, without_bias, chain = found
    with pytest.raises(ValueError, match="unit '' is laid out differently"):
        fsdp_fn.add_gradients(narrow, without_bias)
    with pytest.raises(ValueError, match=r"same units, got \[''\] and \['first', 'second', ''\]"):
        fsdp_fn.add_gradients(narrow, chain)


def loss_that_is_no_scalar() -> None:
    template, state = fsdp_fn.shard(build(Chain))
    before = snapshot(state)
    for loss, error, match in (
        (lambda model, x: model(x), ValueError, r"scalar, got shape \(4, 3\)"),
        (lambda model, x: {"loss": model(x).sum()}, TypeError, "a tensor, got dict"),
        (lambda model, x: model(x).sum().item(), TypeError, "a tensor, got float"),
    ):
        with refused(error, match, match):
            fsdp_fn.value_and_grad(template, loss)(state, vectors())
    check_same_bits(state, before, "state")


STATES = [
    state_of_another_template,
    optimizer_state_of_another_model,
    gradients_of_another_model,
    loss_that_is_no_scalar,
]


@pytest.mark.parametrize("case", STATES, ids=lambda case: case.__name__)
def test_state_that_does_not_belong_is_refused_by_name_and_left_alone(case: Callable[[], None]) -> None:
    run_distributed(2, case)


# --- a model that is sharded --------------------------------------------------------------------------------


class Sharded:
    """A sharded model with buffers, and whether a refusal left it as it was."""

    def __init__(self) -> None:
        self.plain = build(Normalised).eval()
        self.path = Wrapper(copy.deepcopy(self.plain), (Block,))
        self.model = self.path.module
        self.note()

    def note(self) -> None:
        self.held = [*map(local, self.model.parameters()), *self.model.buffers()]
        self.before = snapshot(self.held)

    def check_as_it_was(self, what: str) -> None:
        held = [*map(local, self.model.parameters()), *self.model.buffers()]
        for one, other in zip(held, self.held, strict=True):
            assert one is other, f"{what}: a tensor was replaced"
        check_same_bits(held, self.before, what)
        check_equal(self.model(vectors()), self.plain(vectors()), what)
        self.path.check_at_rest()
        self.note()  # forward assigns a buffer anew


def cast_or_move() -> None:
    case = Sharded()
    for what, change in {
        "half": lambda model: model.half(),
        "bfloat16": lambda model: model.bfloat16(),
        "double": lambda model: model.to(torch.float64),
        "meta": lambda model: model.to("meta"),
    }.items():
        for part in (case.model, case.model.block):
            with refused(TypeError, r"cannot change sharded weights from torch\.float32 on cpu to", what):
                change(part)
            case.check_as_it_was(what)
    for same in (case.model.to("cpu"), case.model.float(), case.model.to(torch.float32), case.model.cpu()):
        assert same is case.model
    case.check_as_it_was("what changes nothing")


def assign_a_state_dict() -> None:
    case = Sharded()
    twos = {name: torch.full_like(tensor, 2) for name, tensor in case.model.state_dict().items()}
    for part, state_dict in ((case.model, twos), (case.model.block, case.model.block.state_dict())):
        with pytest.raises(ValueError, match="assign=False"):
            part.load_state_dict(state_dict, assign=True)
        case.check_as_it_was("assign=True")
    case.model.load_state_dict(twos)
    case.plain.load_state_dict({name: torch.full_like(t, 2) for name, t in case.plain.state_dict().items()})
    check_named(case.path.weights(), same_weights(case.plain), "weights after assign=False")
    check_equal(case.model(vectors()), case.plain(vectors()), "forward after assign=False")


def load_what_is_no_shard() -> None:
    """Whole tensors and bare local rows are refused; what is missing is named and left alone; a dtype is cast."""
    case = Sharded()
    before = case.path.weights()
    for what, state_dict in {
        "whole tensors": case.plain.state_dict(),
        "local rows": {name: local(parameter).clone() for name, parameter in case.model.named_parameters()},
    }.items():
        with refused(RuntimeError, r"first\.weight", what):
            case.model.load_state_dict(state_dict, strict=False)
        check_named(case.path.weights(), before, f"weights after {what}")
    threes = {"first.weight": torch.full_like(case.model.first.weight.detach(), 3, dtype=torch.float64)}
    loaded = case.model.load_state_dict(threes, strict=False)
    assert "first.bias" in loaded.missing_keys
    with torch.no_grad():
        case.plain.first.weight.fill_(3)
    check_named(case.path.weights(), same_weights(case.plain), "weights after one was loaded")
    check_equal(case.model(vectors()), case.plain(vectors()), "forward after one was loaded")


def assign_from_above() -> None:
    """A parent that is not sharded does not ask: the sharded module itself does, before it is changed."""
    case = Sharded()
    parent = nn.Sequential(case.model)
    twos = {name: torch.full_like(tensor, 2) for name, tensor in parent.state_dict().items()}
    with pytest.raises(ValueError, match="assign=True"):
        parent.load_state_dict(twos, assign=True)
    case.check_as_it_was("assigned from above")


def replace_a_parameter() -> None:
    for make in (lambda p: nn.Parameter(torch.zeros(p.shape)), lambda p: nn.Parameter(p.detach().clone())):
        case = Sharded()
        own = case.model.last.weight
        case.model.last.weight = make(own)
        with pytest.raises(RuntimeError, match=r"'weight' was replaced"):
            case.model(vectors())
        case.model.last.weight = own
        case.check_as_it_was("the parameter put back")


def copy_the_model() -> None:
    case = Sharded()
    for one in (case.model, case.model.block, nn.Sequential(case.model)):
        with pytest.raises(TypeError, match=r"(Normalised|Block) is sharded and cannot be copied"):
            copy.deepcopy(one)
    case.check_as_it_was("deepcopy")


MISUSES = [
    cast_or_move,
    assign_a_state_dict,
    load_what_is_no_shard,
    assign_from_above,
    replace_a_parameter,
    copy_the_model,
]


@pytest.mark.parametrize("case", MISUSES, ids=lambda case: case.__name__)
def test_what_would_part_a_sharded_model_from_its_weights_is_refused_by_name(case: Callable[[], None]) -> None:
    run_distributed(2, case)
