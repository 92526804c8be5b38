"""The norm of all gradients: the reference's on every rank, each element once, whatever a rank holds.

pytorch/pytorch#170862: each rank saw only its part, or a shared weight was counted twice.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from comparison import check_equal, reference_gradients
from models import Tied, build
from strategies import Wrapped, assembled_gradients, mesh_for, strategies_for
from torch import nn

import fsdp_fn
from harness import run_distributed, run_expecting_error

ORDERS = (2.0, 1.0, math.inf, 3.5)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def uneven() -> nn.Sequential:
    """Shards are uneven at two ranks, and some are empty at four."""
    return build(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1)))


def inputs() -> torch.Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank())) * 10


def run_reference(model: nn.Module, loss: Callable[[nn.Module], torch.Tensor]) -> None:
    """Gradients averaged over ranks, on the plain model."""
    loss(model).backward()
    for (_, parameter), grad in zip(model.named_parameters(), reference_gradients(model).values(), strict=True):
        parameter.grad = grad


def loss_of(model: Callable[..., torch.Tensor]) -> torch.Tensor:
    return model(inputs()).square().sum()


def clip_like_torch() -> None:
    for name, strategy in strategies_for(dist.get_world_size()).items():
        for order in ORDERS:
            plain = uneven()
            model = Wrapped.of(copy.deepcopy(plain), (nn.Linear,), mesh=mesh_for(strategy), placements=strategy)
            run_reference(plain, loss_of)
            loss_of(model.module).backward()
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, order)
            found = fsdp_fn.clip_grad_norm_(model.module, 0.5, order)
            check_equal(found, expected, f"{name}: norm of order {order}", **CLOSE)
            for key, grad in model.gradients().items():
                check_equal(grad, plain.get_parameter(key).grad, f"{name}: clipped gradient of {key}", **CLOSE)
            agreed = [torch.zeros(()) for _ in range(dist.get_world_size())]
            dist.all_gather(agreed, found)
            assert all(torch.equal(one, found) for one in agreed), f"{name}: ranks disagree: {agreed}"


def clip_functionally() -> None:
    for name, strategy in strategies_for(dist.get_world_size()).items():
        for order in ORDERS:
            plain = uneven()
            template, state = fsdp_fn.shard(plain, mesh_for(strategy), units=["0"], placements=strategy)
            run_reference(plain, loss_of)
            _, gradients, state = fsdp_fn.value_and_grad(template, loss_of)(state)
            before = assembled_gradients(state, gradients)
            clipped, norm = fsdp_fn.clip_grad_norm(gradients, 0.5, order)
            for key, grad in assembled_gradients(state, gradients).items():
                check_equal(grad, before[key], f"{name}: {key}, which was given")
            expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, order)
            check_equal(norm, expected, f"{name}: norm of order {order}", **CLOSE)
            for key, grad in assembled_gradients(state, clipped).items():
                check_equal(grad, plain.get_parameter(key).grad, f"{name}: clipped gradient of {key}", **CLOSE)


@pytest.mark.parametrize("run", [clip_like_torch, clip_functionally])
def test_clipping_equals_torchs_on_the_unsharded_model(world_size: int, run: Callable[[], None]) -> None:
    run_distributed(world_size, run)


def clip_with_torchs_own() -> None:
    plain = uneven()
    model = Wrapped.of(copy.deepcopy(plain), (nn.Linear,))
    run_reference(plain, loss_of)
    loss_of(model.module).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    found: Any = torch.nn.utils.clip_grad_norm_(model.module.parameters(), 0.5)
    check_equal(found.full_tensor(), expected, "norm", **CLOSE)
    for key, grad in model.gradients().items():
        check_equal(grad, plain.get_parameter(key).grad, f"clipped gradient of {key}", **CLOSE)


def test_so_does_torchs_own_clipping_of_the_parameters(world_size: int) -> None:
    run_distributed(world_size, clip_with_torchs_own)


def count_a_tied_weight_once() -> None:
    plain = build(Tied)
    model = Wrapped.of(copy.deepcopy(plain), ())

    def loss(module: nn.Module) -> torch.Tensor:
        return (module(torch.arange(5)) * (dist.get_rank() + 1)).pow(2).sum()

    run_reference(plain, loss)
    loss(model.module).backward()
    expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    check_equal(fsdp_fn.clip_grad_norm_(model.module, 0.5), expected, "norm", **CLOSE)


def test_a_weight_that_stands_twice_is_counted_once(world_size: int) -> None:
    run_distributed(world_size, count_a_tied_weight_once)


def see_what_one_rank_sees(value: float) -> None:
    for order in ORDERS:
        model = Wrapped.of(uneven(), (nn.Linear,))
        loss_of(model.module).backward()
        holder: Any = model.module[0].weight.grad
        if holder._local_tensor.numel() and dist.get_rank() == 0:
            holder._local_tensor.view(-1)[0] = value
        for _ in range(2):
            with pytest.raises(RuntimeError, match="norm of order"):
                fsdp_fn.clip_grad_norm_(model.module, 0.5, order, error_if_nonfinite=True)
        norm = fsdp_fn.clip_grad_norm_(model.module, 0.5, order)
        assert math.isnan(norm) if math.isnan(value) else math.isinf(norm), f"order {order}: {norm}"


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("world_size", [2, 4])
def test_what_is_not_finite_on_one_rank_is_seen_by_all(world_size: int, value: float) -> None:
    run_distributed(world_size, see_what_one_rank_sees, value)


def clip_in_low_precision() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        plain = uneven().to(dtype)
        model = Wrapped.of(copy.deepcopy(plain), (nn.Linear,))

        def loss(module: nn.Module, dtype: torch.dtype = dtype) -> torch.Tensor:
            return module(inputs().to(dtype)).float().sum()

        loss(plain).backward()
        loss(model.module).backward()
        grads = [grad.double() for grad in reference_gradients(plain).values() if grad is not None]
        expected = torch.stack([grad.norm() for grad in grads]).norm()
        found = fsdp_fn.clip_grad_norm_(model.module, 0.5)
        torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=0.0)
        after = fsdp_fn.clip_grad_norm_(model.module, 0.5)
        torch.testing.assert_close(after.double(), torch.tensor(0.5, dtype=torch.float64), rtol=1e-2, atol=0.0)


def test_low_precision_gradients_are_scaled_by_a_norm_taken_in_a_wider_dtype() -> None:
    run_distributed(2, clip_in_low_precision)


def clip_where_a_rank_holds_nothing() -> None:
    for name, strategy in strategies_for(dist.get_world_size()).items():
        plain = build(lambda: nn.Linear(4, 1)).double()
        model = Wrapped.of(copy.deepcopy(plain), (), mesh=mesh_for(strategy), placements=strategy)
        x = inputs().double()
        plain(x).sum().backward()
        model.module(x).sum().backward()
        grads = [grad for grad in reference_gradients(plain).values() if grad is not None]
        found = fsdp_fn.clip_grad_norm_(model.module, 0.5)
        check_equal(found, torch.nn.utils.get_total_norm(grads), name, rtol=1e-12, atol=0.0)


def test_ranks_without_elements_reduce_in_the_others_dtype(world_size: int) -> None:
    run_distributed(world_size, clip_where_a_rank_holds_nothing)


def clip_on_axes_apart() -> None:
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = uneven()
    fsdp_fn.fully_shard(model[0], mesh["a"])
    fsdp_fn.fully_shard(model, mesh["b"])
    loss_of(model).backward()
    fsdp_fn.clip_grad_norm_(model, 1.0)


def test_units_on_axes_of_which_none_has_all_ranks_are_refused() -> None:
    for error in run_expecting_error(4, clip_on_axes_apart):
        assert isinstance(error, ValueError)
        assert "'a'" in str(error)
        assert "'b'" in str(error)


@pytest.mark.parametrize("order", [0.0, -1.0, -math.inf, math.nan])
def test_an_order_that_is_no_norm_is_refused(order: float) -> None:
    with pytest.raises(ValueError, match="norm_type"):
        fsdp_fn.clip_grad_norm_(nn.Linear(2, 2), 1.0, order)
    with pytest.raises(ValueError, match="norm_type"):
        fsdp_fn.clip_grad_norm({}, 1.0, order)


def test_a_module_without_wrapped_units_is_refused() -> None:
    with pytest.raises(ValueError, match="has no wrapped module"):
        fsdp_fn.clip_grad_norm_(nn.Linear(2, 2), 1.0)
