"""Operations, autograd and optimizers on ragged tensors: the unsharded result, or a refusal by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ragged_tensors import CUTS, ELEMENTWISE, OTHER, make_mesh, shard, values
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_fn.ragged import RaggedTensor, from_spec, restore_optimizer_state
from fsdp_fn.ragged_intercept import DISPATCHES_SUBCLASSES
from harness import run_distributed


def check_operations(cuts: list[tuple[int, ...]]) -> None:
    mesh = make_mesh()
    for bounds in cuts:
        a, b = values((bounds[-1], 3), 1), values((bounds[-1], 3), 2)
        ragged = shard(a, bounds, mesh), shard(b, bounds, mesh)
        for operation in ELEMENTWISE:
            result = operation(*ragged)
            assert type(result) is RaggedTensor
            assert result.placements == ragged[0].placements
            assert torch.equal(result.full_tensor(), operation(a, b))
        for operation in OTHER:
            torch.testing.assert_close(operation(*ragged).full_tensor(), operation(a, b))
        assert torch.equal(*ragged) is torch.equal(a, b)
        assert ragged[0].sum().item() == pytest.approx(a.sum().item(), rel=1e-5)


def test_every_operation_gives_the_unsharded_result(world_size: int) -> None:
    run_distributed(world_size, check_operations, CUTS[world_size])


def check_gradients(bounds: tuple[int, ...]) -> None:
    mesh = make_mesh()
    whole = values((bounds[-1], 3)).requires_grad_()
    parameter = nn.Parameter(shard(whole.detach(), bounds, mesh))
    for function in (
        lambda p: p.pow(2).sum(),
        lambda p: (p.full_tensor() if isinstance(p, DTensor) else p).pow(3).sum(),
        lambda p: p.sum() * 2,
    ):
        (expected,) = torch.autograd.grad(function(whole), whole)
        parameter.grad = None
        if not DISPATCHES_SUBCLASSES:
            with pytest.raises(NotImplementedError, match="cannot bring autograd's gradients"):
                function(parameter).backward()
            continue
        loss = function(parameter)
        (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
        grad: Any = parameter.grad
        torch.testing.assert_close(grad.full_tensor(), expected)
    if not DISPATCHES_SUBCLASSES:
        return
    parameter.grad = None
    local = parameter.to_local()
    (local.sum() + local.mul(2).sum()).backward()
    grad = parameter.grad
    assert type(grad) is RaggedTensor
    assert torch.equal(grad.full_tensor(), torch.full_like(whole, 3.0))


def test_autograd_through_a_ragged_parameter_gives_the_unsharded_gradient_or_is_refused(
    world_size: int,
) -> None:
    run_distributed(world_size, check_gradients, CUTS[world_size][0])


def check_random(bounds: tuple[int, ...]) -> None:
    mesh = make_mesh()
    parameter = nn.Parameter(shard(torch.zeros(bounds[-1], 4), bounds, mesh))
    for fill in (nn.init.normal_, nn.init.xavier_uniform_, lambda p: nn.init.trunc_normal_(p, std=0.02)):
        torch.manual_seed(3)
        expected = fill(torch.empty(bounds[-1], 4))
        torch.manual_seed(3)
        fill(parameter)
        assert torch.equal(parameter.full_tensor(), expected)
    torch.manual_seed(5)
    expected = torch.randn_like(expected)
    torch.manual_seed(5)
    assert torch.equal(torch.randn_like(parameter).full_tensor(), expected)


def test_random_fills_give_what_the_unsharded_tensor_would_get(world_size: int) -> None:
    run_distributed(world_size, check_random, CUTS[world_size][0])


def check_refusals() -> None:
    mesh = make_mesh()
    ragged = shard(values((5, 5)), (0, 4, 5), mesh)
    for refused in (
        lambda: ragged[0],
        lambda: ragged.view(-1),
        lambda: ragged.t(),
        lambda: ragged.tril_(),
        lambda: ragged.redistribute(placements=[Replicate()], forward_dtype=torch.float64),
    ):
        with pytest.raises(NotImplementedError):
            refused()
    with pytest.raises(NotImplementedError, match="plain tensor"):
        ragged.copy_(torch.zeros(5, 5))
    mislabelled = DTensor.from_local(ragged.to_local(), mesh, [Shard(0)], shape=ragged.shape, stride=ragged.stride())
    with pytest.raises(ValueError, match="labelled"):
        ragged + mislabelled


def test_what_could_not_reach_the_shards_is_refused_by_name() -> None:
    run_distributed(2, check_refusals)


# --- optimizers ---------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adam amsgrad foreach": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, foreach=True),
    "adam amsgrad fused": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adagrad foreach": lambda p: torch.optim.Adagrad(p, lr=0.1, foreach=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adamax foreach": lambda p: torch.optim.Adamax(p, lr=0.1, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def check_optimizer(name: str, cuts: list[tuple[int, ...]]) -> None:
    mesh = make_mesh()
    shapes = [(bounds[-1], 3) for bounds in cuts] + [(bounds[-1],) for bounds in cuts]
    wholes = [nn.Parameter(values(shape, seed)) for seed, shape in enumerate(shapes)]
    faces = [
        nn.Parameter(shard(whole.detach(), bounds, mesh)) for whole, bounds in zip(wholes, cuts + cuts, strict=True)
    ]
    plain, sharded = OPTIMIZERS[name](wholes), OPTIMIZERS[name](faces)
    for step in range(3):
        for index, (whole, face) in enumerate(zip(wholes, faces, strict=True)):
            gradient = values(whole.shape, 100 * step + index)
            whole.grad = gradient
            own = gradient[face.placement.row_range(mesh.get_local_rank())].clone()
            face.grad = from_spec(own, face._spec, False)
        expected = nn.utils.clip_grad_norm_(wholes, 0.5)
        norm: Any = nn.utils.clip_grad_norm_(faces, 0.5)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
        plain.step()
        sharded.step()
    for whole, face in zip(wholes, faces, strict=True):
        torch.testing.assert_close(face.full_tensor(), whole.detach(), rtol=1e-5, atol=1e-6)
        for key, value in plain.state[whole].items():
            kept = sharded.state[face][key]
            if isinstance(value, torch.Tensor) and value.shape == whole.shape and name != "adafactor":
                assert type(kept) is RaggedTensor
                assert kept.placements == face.placements
            torch.testing.assert_close(kept.full_tensor() if isinstance(kept, DTensor) else kept, value)
    before = {key: dict(state) for key, state in sharded.state.items()}
    restore_optimizer_state(sharded)
    for key, state in sharded.state.items():
        assert all(state[name] is value for name, value in before[key].items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers_and_clipping_act_as_on_unsharded_parameters(name: str) -> None:
    for ranks in (2, 4):
        run_distributed(ranks, check_optimizer, name, CUTS[ranks])


def check_norms(order: float) -> None:
    mesh = make_mesh()
    wholes = [values((5, 3), 1), values((4,), 2)]
    grads = [shard(wholes[0], (0, 0, 5), mesh), shard(wholes[1], (0, 3, 4), mesh)]
    norm: Any = nn.utils.get_total_norm(grads, order)
    torch.testing.assert_close(norm.full_tensor(), nn.utils.get_total_norm(wholes, order))


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, float("inf")])
def test_the_total_norm_counts_every_row_once_also_where_a_rank_holds_none(order: float) -> None:
    run_distributed(2, check_norms, order)


def check_state_on_plain_shards(foreach: bool) -> None:
    mesh = make_mesh()
    whole = nn.Parameter(values((5, 3)))
    face = nn.Parameter(shard(whole.detach(), (0, 4, 5), mesh))
    plain = torch.optim.AdamW([whole], lr=0.1, weight_decay=0.0)
    sharded = torch.optim.AdamW([face], lr=0.1, weight_decay=0.0, foreach=foreach)
    whole.grad = values((5, 3), 7)
    plain.step()
    sharded.state[face] = {
        key: distribute_tensor(value, mesh, [Shard(0)]) if value.ndim else value.clone()
        for key, value in plain.state[whole].items()
    }
    with torch.no_grad():
        face.copy_(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
    face.grad = shard(whole.grad, (0, 4, 5), mesh)
    with pytest.raises(TypeError, match="restore_optimizer_state"):
        torch._foreach_add_([sharded.state[face]["exp_avg"]], [face.grad])
    # The wrapper's hook on every optimizer's step brings the state back.
    plain.step()
    sharded.step()
    assert type(sharded.state[face]["exp_avg"]) is RaggedTensor
    torch.testing.assert_close(face.full_tensor(), whole.detach())


@pytest.mark.parametrize("foreach", [False, True])
def test_state_loaded_on_plain_shards_is_brought_back_and_never_mixed_up(foreach: bool) -> None:
    run_distributed(2, check_state_on_plain_shards, foreach)
