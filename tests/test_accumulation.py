"""Gradients over several microbatches: which was scaled how, what zero_grad drops, when a step is refused.

Microbatch k has inputs ten times those of microbatch k - 1, so each digit of a gradient tells of one microbatch
(NVIDIA/Megatron-LM#3023: the scale hit the running sum, not the new gradient).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from strategies import Wrapped, mesh_for, strategies_for
from torch import nn

import fsdp_fn
from fsdp_fn.ragged import UnfinishedGradient
from harness import run_distributed, run_expecting_error


class Expert(nn.Linear):
    pass


def model_of(strategy: Any, **options: Any) -> Wrapped:
    """One weight of two by two, over as many ranks: some hold nothing."""
    linear = nn.Linear(2, 2, bias=False)
    return Wrapped.of(linear, (), mesh=mesh_for(strategy), placements=strategy, **options)


def backward(model: nn.Module, microbatch: int) -> None:
    model(torch.full((1, 2), (dist.get_rank() + 1) * 10.0**microbatch)).sum().backward()


def mean() -> float:
    """Mean over ranks of the first microbatch's gradient."""
    return (dist.get_world_size() + 1) / 2


def check_gradient(model: Wrapped, expected: float, what: str) -> None:
    found = model.gradients()["weight"]
    torch.testing.assert_close(found, torch.full((2, 2), expected), rtol=1e-6, atol=0.0, msg=f"{what}: {found}")


def each_strategy(check: Callable[[str, Any], None]) -> None:
    for name, strategy in strategies_for(dist.get_world_size()).items():
        check(name, strategy)


def every_backward_is_the_last(name: str, strategy: Any) -> None:
    model = model_of(strategy)
    for microbatch in range(3):
        backward(model.module, microbatch)
    check_gradient(model, mean() * 111, name)
    model.module.zero_grad()
    backward(model.module, 1)
    check_gradient(model, mean() * 10, f"{name}: after zero_grad")


def only_the_last_completes(name: str, strategy: Any) -> None:
    model = model_of(strategy)
    for set_to_none in (True, False):
        with fsdp_fn.accumulating(model.module):
            backward(model.module, 0)
            backward(model.module, 1)
        backward(model.module, 2)
        check_gradient(model, mean() * 111, f"{name}, set_to_none={set_to_none}")
        model.module.zero_grad(set_to_none=set_to_none)
    with fsdp_fn.accumulating(model.module):
        backward(model.module, 0)
    backward(model.module, 1)
    check_gradient(model, mean() * 11, f"{name}: zeroed gradients that are there")
    with fsdp_fn.accumulating(model.module):
        backward(model.module, 2)
    backward(model.module, 3)
    check_gradient(model, mean() * 1111, f"{name}: finished gradients are added to")


def what_zero_grad_drops(name: str, strategy: Any) -> None:
    for set_to_none in (True, False):
        model = model_of(strategy)
        with fsdp_fn.accumulating(model.module):
            backward(model.module, 0)
            model.module.zero_grad(set_to_none=set_to_none)
            backward(model.module, 1)
        backward(model.module, 2)
        check_gradient(model, mean() * 110, f"{name}, set_to_none={set_to_none}: dropped in between")
        model.module.zero_grad()
        with fsdp_fn.accumulating(model.module):
            backward(model.module, 0)
        model.module.zero_grad(set_to_none=set_to_none)
        backward(model.module, 2)
        check_gradient(model, mean() * 100, f"{name}, set_to_none={set_to_none}: dropped before the last")


def what_zero_grad_drops_of_plain_shards(name: str, strategy: Any) -> None:
    for ask in (fsdp_fn.flat_shards, fsdp_fn.local_shards):
        for set_to_none in (True, False):
            model = model_of(strategy)
            found: dict[str, Any] = ask(model.module)
            shards = [s for value in found.values() for s in (value if isinstance(value, list) else [value])]
            optimizer = torch.optim.SGD(shards, lr=1.0)
            with fsdp_fn.accumulating(model.module):
                backward(model.module, 0)
                optimizer.zero_grad(set_to_none=set_to_none)
                backward(model.module, 1)
            backward(model.module, 2)
            before = model.weights()["weight"]
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            moved = before - model.weights()["weight"]
            expected = torch.full((2, 2), mean() * 110)
            torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-4, msg=f"{name}, {ask.__name__}: {moved}")
            backward(model.module, 0)
            with fsdp_fn.accumulating(model.module):
                backward(model.module, 1)
            backward(model.module, 2)
            before = model.weights()["weight"]
            optimizer.step()
            moved = before - model.weights()["weight"]
            expected = torch.full((2, 2), mean() * 111)
            torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-4, msg=f"{name}, {ask.__name__}: {moved}")


class Trap(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in backward")


class Failing(nn.Module):
    """Backward goes through the second layer, and may raise before the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Expert(2, 2, bias=False), Expert(2, 2, bias=False)
        for layer in (self.first, self.second):
            nn.init.eye_(layer.weight)

    def forward(self, x: torch.Tensor, fail: bool) -> torch.Tensor:
        y = self.first(x)
        return self.second(Trap.apply(y) if fail else y)


def a_last_backward_that_fails(name: str, strategy: Any) -> None:
    model = Wrapped.of(Failing(), (Expert,), mesh=mesh_for(strategy), placements=strategy)

    def run(microbatch: int, fail: bool = False) -> None:
        model.module(torch.full((1, 2), (dist.get_rank() + 1) * 10.0**microbatch), fail).sum().backward()

    with fsdp_fn.accumulating(model.module):
        run(0)
        run(1)
    with pytest.raises(ArithmeticError):
        run(2, fail=True)
    run(2)
    for key in ("first.weight", "second.weight"):
        found = model.gradients()[key]
        torch.testing.assert_close(found, torch.full((2, 2), mean() * 111), rtol=1e-6, atol=0.0, msg=f"{name}: {key}")


def a_failed_window_gives_back_what_was_there(name: str, strategy: Any) -> None:
    model = model_of(strategy)
    backward(model.module, 0)
    with contextlib.suppress(KeyError), fsdp_fn.accumulating(model.module):
        backward(model.module, 1)
        raise KeyError
    apart = model.module._fsdp_unit.flow.apart
    check_gradient(model, mean() * (1 if apart else 11), name)


def twice_in_each_microbatch(name: str, strategy: Any) -> None:
    model = model_of(strategy)

    def run(microbatch: int) -> None:
        inputs = torch.full((1, 2), (dist.get_rank() + 1) * 10.0**microbatch)
        (model.module(inputs).sum() + model.module(inputs).sum()).backward()

    with fsdp_fn.accumulating(model.module):
        run(0)
        run(1)
    run(2)
    check_gradient(model, mean() * 222, name)


def a_window_that_fails(name: str, strategy: Any) -> None:
    model = model_of(strategy)
    with contextlib.suppress(KeyError), fsdp_fn.accumulating(model.module):
        backward(model.module, 0)
        raise KeyError
    backward(model.module, 1)
    found = model.gradients()["weight"].unique().tolist()
    apart = model.module._fsdp_unit.flow.apart
    # Where each microbatch is complete, its gradient is the parameter's, as in plain PyTorch.
    assert found == [mean() * (10 if apart else 11)], f"{name}: {found}"


def divided(name: str, strategy: Any) -> None:
    model = model_of(strategy, grad_divisor=4.0)
    with fsdp_fn.accumulating(model.module):
        backward(model.module, 0)
    backward(model.module, 1)
    check_gradient(model, mean() * 11 / 4, name)


class Optional(nn.Module):
    """A weight of its own, and a part that some microbatches leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(2, 2, bias=False)
        self.part = Expert(2, 2, bias=False)

    def forward(self, x: torch.Tensor, part: bool) -> torch.Tensor:
        return self.always(x) + (self.part(x) if part else 0.0)


def a_unit_that_the_last_microbatch_leaves_out(name: str, strategy: Any) -> None:
    model = Wrapped.of(Optional(), (Expert,), mesh=mesh_for(strategy), placements=strategy)
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    for _ in range(2):
        for microbatch, part in ((0, True), (1, True), (2, False)):
            inputs = torch.full((1, 2), (dist.get_rank() + 1) * 10.0**microbatch)
            if microbatch < 2:
                with fsdp_fn.accumulating(model.module):
                    model.module(inputs, part).sum().backward()
            else:
                model.module(inputs, part).sum().backward()
        for key, expected in (("always.weight", mean() * 111), ("part.weight", mean() * 11)):
            found = model.gradients()[key]
            torch.testing.assert_close(found, torch.full((2, 2), expected), rtol=1e-6, atol=0.0, msg=f"{name}: {found}")
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "check",
    [
        a_unit_that_the_last_microbatch_leaves_out,
        what_zero_grad_drops_of_plain_shards,
        a_last_backward_that_fails,
        a_failed_window_gives_back_what_was_there,
        every_backward_is_the_last,
        only_the_last_completes,
        what_zero_grad_drops,
        twice_in_each_microbatch,
        a_window_that_fails,
        divided,
    ],
    ids=lambda check: check.__name__,
)
def test_each_microbatch_counts_once_and_as_it_should(world_size: int, check: Callable[[str, Any], None]) -> None:
    run_distributed(world_size, each_strategy, check)


def step_in_a_window(hand_written: bool) -> None:
    model = model_of(fsdp_fn.zero1())
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    with fsdp_fn.accumulating(model.module):
        backward(model.module, 0)
    if hand_written:
        with torch.no_grad():
            for parameter in model.module.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad)
    else:
        optimizer.step()


def clip_in_a_window(ours: bool) -> None:
    model = model_of(fsdp_fn.zero1())
    with fsdp_fn.accumulating(model.module):
        backward(model.module, 0)
    if ours:
        fsdp_fn.clip_grad_norm_(model.module, 1.0)
    else:
        torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)


@pytest.mark.parametrize("act", [step_in_a_window, clip_in_a_window])
@pytest.mark.parametrize("which", [False, True])
def test_a_gradient_that_is_not_complete_is_never_used(act: Callable[[bool], None], which: bool) -> None:
    for error in run_expecting_error(2, act, which):
        assert isinstance(error, UnfinishedGradient), error
        assert "microbatch" in str(error) or "still to come" in str(error)


def weights_after_a_refused_step() -> None:
    model = model_of(fsdp_fn.zero1())
    before = model.weights()["weight"]
    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
    with fsdp_fn.accumulating(model.module):
        backward(model.module, 0)
    with pytest.raises(UnfinishedGradient):
        optimizer.step()
    assert torch.equal(model.weights()["weight"], before)
    backward(model.module, 1)
    check_gradient(model, mean() * 11, "after a refused step")


def test_a_refused_step_changes_nothing_and_the_window_goes_on() -> None:
    run_distributed(2, weights_after_a_refused_step)


class Mixture(nn.Module):
    """A shared layer, and an expert of each pair of ranks: its gradient sums over the expert group by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(2, 2, bias=False)
        self.expert = Expert(2, 2, bias=False)
        with torch.no_grad():
            self.shared.weight.fill_(1.0)
            self.expert.weight.fill_(1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(x) + self.expert(x)


def experts_over_a_mesh_of_their_own() -> None:
    whole = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))
    model = Mixture()
    fsdp_fn.fully_shard(model.expert, whole["data"], grad_divisor=2.0)
    both = torch.distributed.init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    fsdp_fn.fully_shard(model, both)
    rank = dist.get_rank()
    model(torch.full((1, 2), rank + 1.0)).sum().backward()
    shared, expert = model.shared.weight.grad, model.expert.weight.grad
    assert shared is not None
    assert expert is not None
    assert (shared.full_tensor() == 2.5).all()
    # Ranks 0 and 1 share one expert, ranks 2 and 3 the other; the mean over two is halved by the divisor.
    assert (expert.full_tensor() == (1.5 if rank < 2 else 3.5) / 2).all()
    norm = fsdp_fn.clip_grad_norm_(model, 1e9)
    expected = (4 * 2.5**2 + 4 * 0.75**2 + 4 * 1.75**2) ** 0.5
    torch.testing.assert_close(norm, torch.tensor(expected))


def experts_functionally() -> None:
    whole = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))
    everywhere = torch.distributed.init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    experts = fsdp_fn.UnitSpec(Expert, whole["data"], grad_divisor=2.0)
    template, state = fsdp_fn.shard(Mixture(), everywhere, units=[experts])
    rank = dist.get_rank()
    step = fsdp_fn.value_and_grad(template, lambda model, x: model(x).sum())
    _, gradients, _ = step(state, torch.full((1, 2), rank + 1.0))
    assert (gradients[""].owned(0) == 2.5).all()
    assert (gradients["expert"].owned(0) == (1.5 if rank < 2 else 3.5) / 2).all()
    expected = (4 * 2.5**2 + 4 * 0.75**2 + 4 * 1.75**2) ** 0.5
    torch.testing.assert_close(fsdp_fn.grad_norm(gradients), torch.tensor(expected))
    clipped, _ = fsdp_fn.clip_grad_norm(gradients, 1.0)
    torch.testing.assert_close(fsdp_fn.grad_norm(clipped), torch.tensor(1.0), rtol=1e-5, atol=0.0)


def test_so_are_those_of_the_functional_path() -> None:
    run_distributed(4, experts_functionally)


def test_experts_on_a_smaller_mesh_are_averaged_over_it_and_counted_each_in_the_norm() -> None:
    run_distributed(4, experts_over_a_mesh_of_their_own)
