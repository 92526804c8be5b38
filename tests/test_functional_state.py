"""The functional path is pure: nothing given is changed, equal calls give equal bits, state is plain pytrees.

A template is bare, and says so to whoever calls it outside ``apply``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import check_same_bits, snapshot
from comparison import check_bare
from models import Block, Chain, Normalised, build, vectors
from torch import nn
from torch.utils import _pytree as pytree

import fsdp_fn
from harness import run_distributed

OPTIMIZERS = (
    fsdp_fn.AdamW(),
    fsdp_fn.SGD(),
    fsdp_fn.SGD(momentum=0.9),
    fsdp_fn.SGD(momentum=0.9, nesterov=True),
    fsdp_fn.SGD(momentum=0.9, weight_decay=0.1, nesterov=True),
)


def loss_of(model: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


# --- purity -------------------------------------------------------------------------------------------------


def sharding_reads_only() -> None:
    model = build(Normalised)
    held = [*model.parameters(), *model.buffers()]
    classes, before = [type(module) for module in model.modules()], snapshot(held)
    _, state = fsdp_fn.shard(model, units=[Block])
    check_same_bits([*model.parameters(), *model.buffers()], before, "the model")
    for one, other in zip(held, [*model.parameters(), *model.buffers()], strict=True):
        assert one is other, "a parameter or buffer of the model was replaced"
    assert [type(module) for module in model.modules()] == classes, "a module's class was changed"
    of_state = snapshot(state)
    loss_of(model, vectors()).backward()  # the running statistics change
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    check_same_bits(state, of_state, "the state, after the model it came from was changed")


def test_sharding_leaves_the_model_as_it_was_and_shares_nothing_with_it(world_size: int) -> None:
    run_distributed(world_size, sharding_reads_only)


def applying_reads_only() -> None:
    template, state = fsdp_fn.shard(build(Normalised), units=[Block])
    step = fsdp_fn.value_and_grad(template, loss_of)
    given = {
        "plain state": (state, vectors(dist.get_rank())),
        "state with gradients": (fsdp_fn.with_gradients(state), vectors(dist.get_rank(), requires_grad=True)),
    }
    for what, arguments in given.items():
        before, structure = snapshot(arguments), pytree.tree_structure(arguments)
        first = fsdp_fn.apply(template, *arguments)
        check_same_bits(arguments, before, f"{what}: what apply was given")
        check_same_bits(fsdp_fn.apply(template, *arguments), snapshot(first), f"{what}: apply a second time")
        results = step(*arguments)
        check_same_bits(arguments, before, f"{what}: what value_and_grad was given")
        arguments[1].grad = None
        check_same_bits(step(*arguments), snapshot(results), f"{what}: value_and_grad a second time")
        assert pytree.tree_structure(arguments) == structure, f"{what}: a static part was changed"


def test_applying_changes_nothing_that_it_is_given_and_gives_the_same_bits_again(world_size: int) -> None:
    run_distributed(world_size, applying_reads_only)


def updating_reads_only() -> None:
    model = build(Chain)
    model.first.up.requires_grad_(False)
    template, state = fsdp_fn.shard(model, units=[Block])
    _, gradients, state = fsdp_fn.value_and_grad(template, loss_of)(state, vectors(dist.get_rank()))
    of_gradients = snapshot(gradients)
    for optimizer in OPTIMIZERS:
        what = repr(optimizer)
        after, optimizer_state = optimizer.update(gradients, optimizer.init(state), state)
        arguments = (gradients, optimizer_state, after)
        before, structure = snapshot(arguments), pytree.tree_structure(arguments)
        once = optimizer.update(*arguments)
        check_same_bits(arguments, before, f"{what}: what update was given")
        assert pytree.tree_structure(arguments) == structure, f"{what}: a static part was changed"
        of_once = snapshot(once)
        check_same_bits(optimizer.update(*arguments), of_once, f"{what}: update a second time")
        versions = [[unit.version for unit in one.units.values()] for one in (after, once[0])]
        assert versions == [[1] * 3, [2] * 3], f"{what}: versions {versions}"
        check_same_bits(optimizer.update_(*arguments), of_once, f"{what}: update in place")
        check_same_bits(arguments[2], snapshot(once[0]), f"{what}: the state that was updated in place")
        check_same_bits(gradients, of_gradients, f"{what}: the gradients, after an update in place")


def test_an_update_changes_nothing_that_it_is_given_and_gives_the_bits_of_the_one_in_place(world_size: int) -> None:
    run_distributed(world_size, updating_reads_only)


# --- pytrees ------------------------------------------------------------------------------------------------


def static_parts(value: Any) -> Any:
    """Everything of a state but its tensors."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, fsdp_fn.Buffer | fsdp_fn.UnitState | fsdp_fn.ModelState | fsdp_fn.OptimizerState):
        return [(field.name, static_parts(getattr(value, field.name))) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return [(key, static_parts(item)) for key, item in value.items()]
    if isinstance(value, tuple) and not dataclasses.is_dataclass(value):
        return [static_parts(item) for item in value]
    return value


def trees() -> None:
    model = build(Normalised)
    model.last.requires_grad_(False)
    template, state = fsdp_fn.shard(model, units=[Block])
    step = fsdp_fn.value_and_grad(template, loss_of)
    _, gradients, state = step(state, vectors(dist.get_rank()))
    optimizer = fsdp_fn.AdamW()
    state, optimizer_state = optimizer.update(gradients, optimizer.init(state), state)
    for what, tree in {"state": state, "optimizer state": optimizer_state, "gradients": gradients}.items():
        mapped = pytree.tree_map(torch.clone, tree)
        assert static_parts(mapped) == static_parts(tree), f"{what}: tree_map changed a static part"
        check_same_bits(mapped, snapshot(tree), f"{what} mapped")
        leaves, structure = pytree.tree_flatten(tree)
        again = pytree.tree_unflatten(leaves, structure)
        assert type(again) is type(tree), what
        assert static_parts(again) == static_parts(tree), f"{what}: not the same after a round trip"
        check_same_bits(again, snapshot(tree), f"{what} after a round trip")
        assert hash(structure) == hash(pytree.tree_structure(mapped)), f"{what}: the contexts hash differently"
        assert structure == pytree.tree_structure(mapped), f"{what}: the contexts differ"
    check_what_mapped_trees_do(template, state, optimizer_state, gradients)


def check_what_mapped_trees_do(
    template: fsdp_fn.Template,
    state: fsdp_fn.ModelState,
    optimizer_state: fsdp_fn.OptimizerState,
    gradients: dict[str, fsdp_fn.Buffer],
) -> None:
    """They are as good as the originals, and independent of them."""
    x, step = vectors(dist.get_rank()), fsdp_fn.value_and_grad(template, loss_of)
    copied = pytree.tree_map(torch.clone, state)
    results = snapshot(step(copied, x))
    fsdp_fn.AdamW(lr=1.0).update_(gradients, pytree.tree_map(torch.clone, optimizer_state), copied)
    check_same_bits(step(state, x), results, "the original, after its copy was updated in place")
    nothing = pytree.tree_map(torch.zeros_like, gradients)
    sgd = fsdp_fn.SGD(lr=1.0)
    check_same_bits(sgd.update(nothing, sgd.init(state), state)[0], snapshot(state), "weights, updated by zeros")
    doubled = pytree.tree_map(lambda gradient: gradient * 2, gradients)
    summed = fsdp_fn.add_gradients(gradients, gradients)
    check_same_bits(doubled, snapshot(summed), "gradients doubled and added to themselves")


@pytest.mark.parametrize("world_size", [1, 3])
def test_states_and_gradients_are_pytrees_of_tensors_that_keep_their_static_parts(world_size: int) -> None:
    run_distributed(world_size, trees)


# --- templates ----------------------------------------------------------------------------------------------


class Recursive(nn.Module):
    """Its forward calls whatever it is given, such as the template that it is part of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return call(self.linear(x))


def bare_template() -> None:
    template, state = fsdp_fn.shard(build(Chain), units=[Block])

    def check_unusable(when: str) -> None:
        for name in ("", "first", "second"):
            with pytest.raises(RuntimeError, match=r"(Chain|Block) is part of a template.*apply\(template"):
                template.module.get_submodule(name)(vectors())
        check_bare(template)

    check_unusable("after shard")
    output, _ = fsdp_fn.apply(template, fsdp_fn.with_gradients(state), vectors())
    check_unusable("between forward and backward")
    output.square().mean().backward()
    check_unusable("after backward")
    with pytest.raises(RuntimeError):
        fsdp_fn.apply(template, state, vectors()[:, :3])
    check_unusable("after an error in forward")


def test_a_template_outside_apply_is_bare_and_says_how_to_use_it() -> None:
    run_distributed(2, bare_template)


def template_inside_itself() -> None:
    template, state = fsdp_fn.shard(build(Recursive))
    with pytest.raises(RuntimeError, match="inside its own forward"):
        fsdp_fn.apply(template, state, vectors(), lambda y: fsdp_fn.apply(template, state, y, torch.relu)[0])
    check_bare(template)
    output, _ = fsdp_fn.apply(template, state, vectors(), torch.relu)
    assert (output >= 0).all()


def test_a_template_applied_inside_its_own_forward_is_refused_and_stays_usable() -> None:
    run_distributed(2, template_inside_itself)


def two_states() -> None:
    """One template, two states: forwards and backwards in any order do not mix."""
    template, state = fsdp_fn.shard(build(Chain), units=[Block])
    other = pytree.tree_map(lambda flat: flat * 0.5, state)
    step = fsdp_fn.value_and_grad(template, loss_of)
    expected = [step(one, vectors())[1] for one in (state, other)]
    states = [fsdp_fn.with_gradients(one) for one in (state, other)]
    losses = [loss_of(lambda x, one=one: fsdp_fn.apply(template, one, x)[0], vectors()) for one in states]
    for loss in losses:
        loss.backward()
    for position, (one, gradients) in enumerate(zip(states, expected, strict=True)):
        check_same_bits(fsdp_fn.gradients_of(one), snapshot(gradients), f"gradients of state {position}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_two_states_of_one_template_do_not_mix(world_size: int) -> None:
    run_distributed(world_size, two_states)
