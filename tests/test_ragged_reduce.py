"""What all ranks agree on about ragged tensors: norms, clipping, a scaler's finds; and unfinished gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ragged_tensors import CASES, HYBRID, PARALLEL, Case, collectives, face, mesh_of, part, ragged, values
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard

from fsdp_fn.ragged import (
    RaggedTensor,
    UnfinishedGradient,
    check_gradients_finished,
    from_spec,
    mesh_spec,
    restore_placement,
)
from harness import run_distributed

# --- norms --------------------------------------------------------------------------------------------------

ON_ONE_MESH = {
    "hybrid": [case for case in CASES.values() if case.mesh == HYBRID],
    "parallel": [case for case in CASES.values() if case.mesh == PARALLEL],
}


def check_norms(cases: list[Case]) -> list[str]:
    mesh = mesh_of(cases[0])
    wholes = [values(case.shape, seed) for seed, case in enumerate(cases)]
    tensors = [face(whole, mesh, case.placements) for whole, case in zip(wholes, cases, strict=True)]
    for order in (0.0, 1.0, 2.0, 3.0, float("inf")):
        for whole, tensor in zip(wholes, tensors, strict=True):
            norm: Any = torch.linalg.vector_norm(tensor, order)
            torch.testing.assert_close(norm.full_tensor(), torch.linalg.vector_norm(whole, order))
        total: Any = nn.utils.get_total_norm(tensors, order)
        torch.testing.assert_close(total.full_tensor(), nn.utils.get_total_norm(wholes, order))
    return collectives(lambda: torch._foreach_norm(tensors))


@pytest.mark.parametrize("mesh", ON_ONE_MESH)
def test_a_norm_counts_every_element_once_with_one_reduction_a_mesh_dimension(mesh: str) -> None:
    for launched in run_distributed(4, check_norms, ON_ONE_MESH[mesh]):
        assert launched == ["c10d::allreduce_"] * 2


def check_lost_values(case: Case, value: float) -> None:
    mesh = mesh_of(case)
    for index in range(case.shape[0] * case.shape[1]):
        whole = values(case.shape)
        whole.view(-1)[index] = value
        norms: Any = torch._foreach_norm([face(whole, mesh, case.placements)], float("inf"))
        torch.testing.assert_close(norms[0].to_local(), torch.tensor(abs(value)), equal_nan=True)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_the_largest_element_is_found_wherever_it_lies(value: float) -> None:
    for name in ("fully hybrid", "rows over tensor", "data alone"):
        run_distributed(4, check_lost_values, CASES[name], value)


def check_norms_on_several_meshes() -> None:
    whole_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    meshes: list[tuple[DeviceMesh, Any]] = [
        (whole_mesh, (Replicate(), ragged(0, 1, 5))),
        (init_device_mesh("cpu", (4,)), (ragged(0, 0, 2, 4, 5),)),
        (whole_mesh["inner"], (ragged(0, 4, 5),)),
        (whole_mesh, (ragged(0, 1, 1, 3, 5),) * 2),
    ]
    wholes = [values((5, 2), seed) for seed in range(4)]
    tensors = [face(whole, *placed) for whole, placed in zip(wholes, meshes, strict=True)]
    plain = values((3,), 9)
    norms: Any = torch._foreach_norm([*tensors, plain])
    # The first and the last are on one mesh, both of whose dimensions the last is split over.
    assert collectives(lambda: torch._foreach_norm(tensors)) == ["c10d::allreduce_"] * 4
    for whole, norm, (mesh, _) in zip(wholes, norms, meshes, strict=False):
        assert norm.device_mesh == mesh
        assert norm.placements == (Replicate(),) * mesh.ndim
        torch.testing.assert_close(norm.to_local(), whole.norm())
    torch.testing.assert_close(norms[-1], plain.norm())


def test_a_list_on_several_meshes_has_each_norm_on_its_own() -> None:
    run_distributed(4, check_norms_on_several_meshes)


# --- optimizers, clipping -----------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}


def check_optimizer(name: str, cases: list[Case]) -> None:
    mesh = mesh_of(cases[0])
    wholes = [nn.Parameter(values(case.shape, seed)) for seed, case in enumerate(cases)]
    faces = [
        nn.Parameter(face(whole.detach(), mesh, case.placements)) for whole, case in zip(wholes, cases, strict=True)
    ]
    plain, sharded = OPTIMIZERS[name](wholes), OPTIMIZERS[name](faces)
    for step in range(2):
        for index, (whole, tensor) in enumerate(zip(wholes, faces, strict=True)):
            whole.grad = values(whole.shape, 100 * step + index)
            tensor.grad = from_spec(part(whole.grad, mesh, tensor.placements), tensor._spec, False)
        expected = nn.utils.clip_grad_norm_(wholes, 0.5)
        norm: Any = nn.utils.clip_grad_norm_(faces, 0.5)
        torch.testing.assert_close(norm.full_tensor(), expected)
        plain.step()
        sharded.step()
    for whole, tensor in zip(wholes, faces, strict=True):
        torch.testing.assert_close(tensor.full_tensor(), whole.detach(), rtol=1e-5, atol=1e-6)
        for kept in sharded.state[tensor].values():
            assert not kept.ndim or kept.placements == tensor.placements


@pytest.mark.parametrize("mesh", ON_ONE_MESH)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_optimizers_and_clipping_act_as_on_unsharded_parameters_at_every_placement(name: str, mesh: str) -> None:
    run_distributed(4, check_optimizer, name, ON_ONE_MESH[mesh])


# --- gradient scalers ---------------------------------------------------------------------------------------


def check_scaler(faulty: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    placed: list[tuple[DeviceMesh, Any]] = [
        (mesh, (Replicate(), Replicate())),
        (mesh["inner"], (ragged(0, 4, 5),)),
    ]
    for on in placed, placed[:1], placed[::-1]:
        for wrong in (False, True):
            parameters = [nn.Parameter(face(values((5, 2)), *each)) for each in on]
            for parameter in parameters:
                parameter.grad = torch.full_like(parameter, 4.0)
            gradients = [parameter.grad for parameter in parameters]
            whole_mesh: Any = next(each for each in gradients if each.device_mesh.ndim == 2)  # type: ignore[union-attr]
            if wrong and torch.distributed.get_rank() == faulty:
                whole_mesh.to_local()[3, 1] = float("inf")
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            optimizer = torch.optim.SGD(parameters, lr=1.0)
            scaler.scale(torch.ones(()))
            before = [parameter.to_local().clone() for parameter in parameters]
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (2.0 if wrong else 4.0)
            for parameter, start in zip(parameters, before, strict=True):
                torch.testing.assert_close(parameter.to_local(), start if wrong else start - 1.0)


@pytest.mark.parametrize("faulty", range(4))
def test_a_gradient_scaler_skips_the_step_on_all_ranks_where_one_finds_an_infinity(faulty: int) -> None:
    run_distributed(4, check_scaler, faulty)


# --- unfinished gradients -----------------------------------------------------------------------------------

UNFINISHED = {
    "hybrid": (HYBRID, (Partial(), ragged(0, 1, 5)), (Replicate(), ragged(0, 1, 5))),
    "rows over tensor": (PARALLEL, (Partial(), Shard(0)), (ragged(0, 1, 3), Shard(0))),
    "alone": ({"outer": 4}, (Partial(),), (ragged(0, 1, 2, 3, 6),)),
}
LINEAR: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a.clone().zero_(),
    lambda a, b: a.clone().mul_(0.5),
    lambda a, b: a.clone().mul_(torch.tensor(0.5)),
    lambda a, b: a.clone().add_(b, alpha=2),
    lambda a, b: a.clone().sub_(b).neg_(),
    lambda a, b: a.clone().copy_(b),
    lambda a, b: a.detach() / 4,
    lambda a, b: 2.0 * a.to(torch.float64),
    lambda a, b: torch.zeros_like(a) + torch.empty_like(b).copy_(b),
    lambda a, b: torch._foreach_add([a, b], [b, a], alpha=2)[0],
    lambda a, b: torch._foreach_mul([a, b], 2.0)[1],
    lambda a, b: torch._foreach_mul([a, b], [2.0, 3.0])[1],
]


def foreach_in_place(a: Any, b: Any) -> Any:
    targets = [a.clone(), b.clone()]
    torch._foreach_zero_(targets)
    torch._foreach_add_(targets, [b, a])
    torch._foreach_mul_(targets, torch.tensor(0.5))
    return targets[0]


def check_linear(mesh_sizes: dict[str, int], unfinished: Any, finished: Any) -> None:
    shape = (6, 4) if mesh_sizes != HYBRID else (5, 4)
    mesh = init_device_mesh("cpu", tuple(mesh_sizes.values()), mesh_dim_names=tuple(mesh_sizes))
    place = mesh.get_local_rank(0)
    # What each rank of the summed dimension has to give.
    terms = [(values(shape, 2 * index), values(shape, 2 * index + 1)) for index in range(mesh.size(0))]
    a, b = (face(whole, mesh, unfinished) for whole in terms[place])
    whole_a, whole_b = (sum(each) for each in zip(*terms, strict=True))
    for operation in (*LINEAR, foreach_in_place):
        result = operation(a, b)
        assert type(result) is RaggedTensor
        assert result.placements == unfinished
        total = result.to_local().clone()
        torch.distributed.all_reduce(total, group=mesh.get_group(0))
        torch.testing.assert_close(total, part(operation(whole_a, whole_b), mesh, unfinished))
    for constant in (torch.ones_like(a), torch.full_like(a, 1.0), a.new_ones(shape)):
        assert constant.placements == tuple(Replicate() if each == Partial() else each for each in unfinished)
        assert torch.equal(constant.full_tensor(), torch.ones(shape))
    parameter = nn.Parameter(face(values(shape), mesh, finished))
    before = parameter.detach().clone()
    for refused in (
        lambda: a.full_tensor(),
        lambda: a.redistribute(placements=[Replicate()] * mesh.ndim),
        lambda: a.norm(),
        lambda: torch._foreach_norm([parameter, a]),
        lambda: a.sum(),
        lambda: a.abs(),
        lambda: a * b,
        lambda: a + 1.0,
        lambda: a.clone().fill_(1.0),
        lambda: a.clone().normal_(),
        lambda: a.clone().add_(1.0),
        lambda: a.clone().copy_(parameter),
        lambda: a + parameter,
        lambda: torch.div(a, 3.0, rounding_mode="floor"),
        lambda: a.to(torch.int32),
        lambda: torch._foreach_add_([parameter.detach()], [a]),
        lambda: torch._foreach_mul_([a.clone()], [b]),
        lambda: torch._foreach_add_([a.clone()], 1.0),
        lambda: parameter.detach().add_(a),
        lambda: parameter.data.copy_(a),
        lambda: restore_placement(before, a),
        lambda: torch._amp_foreach_non_finite_check_and_unscale_([a], torch.zeros(1), torch.ones(())),
        lambda: a.__create_chunk_list__(),
    ):
        with (
            torch.no_grad(),
            pytest.raises(UnfinishedGradient, match=f"sum over mesh dimension '{next(iter(mesh_sizes))}'"),
        ):
            refused()
    for kwargs in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.0, **kwargs)
        check_gradients_finished(optimizer)
        parameter.grad = from_spec(a.to_local(), a._spec, False)  # type: ignore[assignment]
        for step in (optimizer.step, lambda: check_gradients_finished(optimizer)):  # noqa: B023 (called at once)
            with pytest.raises(UnfinishedGradient, match="backward of the last microbatch"):
                step()
        parameter.grad = None
        assert torch.equal(parameter.to_local(), before.to_local())  # type: ignore[operator, attr-defined]


@pytest.mark.parametrize("case", UNFINISHED)
def test_an_unfinished_gradient_takes_part_in_sums_and_is_refused_by_name_elsewhere(case: str) -> None:
    run_distributed(4, check_linear, *UNFINISHED[case])


def check_named_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    tensor = from_spec(torch.zeros(3), mesh_spec(mesh, (Partial(), Partial()), (3,)), False)
    with pytest.raises(UnfinishedGradient, match="over mesh dimension 0 and 1"):
        tensor.full_tensor()


def test_dimensions_without_names_are_told_by_number() -> None:
    run_distributed(4, check_named_dimensions)
