"""Ragged tensors on meshes of several dimensions: placed, gathered, copied and computed with as the whole tensor is."""

from __future__ import annotations

import copy
import io
import math
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ragged_tensors import CASES, ELEMENTWISE, HYBRID, OTHER, Case, collectives, face, mesh_of, part, ragged, values
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from fsdp_fn.ragged import RaggedShard, RaggedTensor, mesh_spec, ragged_spec, restore_placement
from harness import run_distributed

# --- which part a rank holds --------------------------------------------------------------------------------


class Grid:
    """The facts of a mesh that a spec asks for, of any rank, with no process group."""

    def __init__(self, sizes: tuple[int, ...], rank: int) -> None:
        self.sizes, self.ndim, self.mesh_dim_names = sizes, len(sizes), None
        self.coordinate = [int(axis) for axis in torch.unravel_index(torch.tensor(rank), sizes)]

    def size(self, dim: int) -> int:
        return self.sizes[dim]

    def get_coordinate(self) -> list[int]:
        return self.coordinate


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]]:
    """Mesh sizes, placements and a shape that fit together."""
    sizes = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    kinds = [draw(st.sampled_from(["copy", "ragged", "rows", "columns"])) for _ in sizes]
    rows, columns = draw(st.integers(0, 5)), draw(st.integers(1, 3))
    ranks = math.prod(size for size, kind in zip(sizes, kinds, strict=True) if kind == "ragged")
    cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=ranks - 1, max_size=ranks - 1)))
    by_kind: dict[str, Placement] = {
        "copy": Replicate(),
        "ragged": RaggedShard((0, *cuts, rows)),
        "rows": Shard(0),
        "columns": Shard(-1),
    }
    shape = [rows, columns]
    for size, kind in zip(sizes, kinds, strict=True):
        if kind in ("rows", "columns"):
            shape[kind == "columns"] *= size
    return sizes, tuple(by_kind[kind] for kind in kinds), tuple(shape)


@given(layouts())
def test_the_parts_of_all_ranks_tile_the_whole_tensor(
    layout: tuple[tuple[int, ...], tuple[Placement, ...], tuple[int, ...]],
) -> None:
    sizes, placements, shape = layout
    copies = math.prod(size for size, placed in zip(sizes, placements, strict=True) if placed.is_replicate())
    numbers = torch.arange(math.prod(shape)).view(shape)
    held = torch.zeros_like(numbers)
    for rank in range(math.prod(sizes)):
        mesh = cast(DeviceMesh, Grid(sizes, rank))
        spec = mesh_spec(mesh, placements, shape)
        own = tuple(slice(at, at + size) for at, size in zip(spec.offsets(), spec.local_shape(), strict=True))
        assert torch.equal(numbers[own], part(numbers, mesh, placements))
        held[own] += 1
    assert (held == copies).all()


def check_refused_specs() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    said = []
    for placements, shape in (
        ((ragged(0, 1, 5),), (5, 2)),
        ((ragged(0, 1, 5), Shard(1)), (5, 3)),
        ((ragged(0, 1, 5), Shard(2)), (5, 4)),
        ((ragged(0, 1, 5), Shard(0)), (5, 4)),
        ((ragged(0, 1, 5), Shard(0)), (6, 4)),
        ((ragged(0, 1, 2, 3, 5), ragged(0, 0, 2, 3, 5)), (5, 4)),
        ((ragged(0, 1, 5), ragged(0, 1, 5)), (5, 4)),
        ((ragged(0, 1), Replicate()), ()),
        ((ragged(0, 1, 5), Partial("avg")), (5, 4)),
        ((ragged(0, 1, 5), _StridedShard(0, split_factor=2)), (5, 4)),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (each message is checked by the caller)
            mesh_spec(mesh, placements, shape)
        said.append(str(caught.value))
    with pytest.raises(ValueError, match="one dimension, got 2"):
        ragged_spec(mesh, (0, 1, 2, 3, 5), (5, 4))
    return said


def test_specs_that_do_not_fit_their_mesh_are_refused_by_name() -> None:
    for said in run_distributed(4, check_refused_specs):
        assert "2 mesh dimensions, got 1" in said[0]
        assert "dimension 1 of shape (5, 3), of size 3, over 2 ranks" in said[1]
        assert "'tensor'" in said[1]
        assert "has no dimension 2" in said[2]
        assert "dimension 0 of shape (5, 4)" in said[3]
        assert "5 rows" in said[4]
        assert "shape is (3, 4)" in said[4]
        assert "one equal RaggedShard" in said[5]
        assert "on 2 ranks" in said[6]
        assert "4 ranks to share" in said[6]
        assert "0-dim" in said[7]
        assert "Partial" in said[8]
        assert "_StridedShard" in said[9]


# --- values -------------------------------------------------------------------------------------------------


def check_values(case: Case) -> None:
    mesh, placements = mesh_of(case), case.placements
    everywhere = [Replicate()] * mesh.ndim
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        whole = values(case.shape, dtype=dtype)
        tensor = face(whole, mesh, placements)
        assert tensor.shape == whole.shape
        assert tensor.stride() == whole.stride()
        assert torch.equal(tensor.to_local(), part(whole, mesh, placements))
        full = tensor.full_tensor()
        assert torch.equal(full, whole)
        full.zero_()
        assert torch.equal(tensor.to_local(), part(whole, mesh, placements)), "full_tensor is no copy"
        spread = tensor.redistribute(placements=everywhere)
        assert spread.placements == tuple(everywhere)
        back = restore_placement(spread, tensor)
        assert back.placements == placements
        assert torch.equal(back.to_local(), tensor.to_local())
    plain = [Shard(0), *everywhere[1:]]
    assert torch.equal(
        face(whole, mesh, placements).redistribute(placements=plain).to_local(),
        distribute_tensor(whole, mesh, plain).to_local(),
    )


@pytest.mark.parametrize("case", CASES)
def test_every_placement_gives_the_whole_tensor_and_takes_its_part_back(case: str) -> None:
    run_distributed(4, check_values, CASES[case])


def check_copies(case: Case) -> None:
    mesh, placements = mesh_of(case), case.placements
    whole = values(case.shape)
    parameter = nn.Parameter(face(whole, mesh, placements))
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    for copied in (
        copy.deepcopy(parameter),
        parameter.detach().clone(),
        parameter.data,
        torch.load(file, weights_only=False),
    ):
        assert type(copied) is RaggedTensor
        assert copied.placements == placements
        assert torch.equal(copied.full_tensor(), whole)
    parameter.data = face(whole + 1, mesh, placements)
    assert torch.equal(parameter.full_tensor(), whole + 1)
    with pytest.raises(TypeError, match="placed alike"):
        parameter.data = distribute_tensor(whole, mesh, [Replicate()] * mesh.ndim)
    torch.manual_seed(3)
    expected = nn.init.normal_(torch.empty(case.shape))
    torch.manual_seed(3)
    assert torch.equal(nn.init.normal_(parameter).full_tensor(), expected)
    torch.manual_seed(5)
    expected = torch.randn_like(expected)
    torch.manual_seed(5)
    assert torch.equal(torch.randn_like(parameter).full_tensor(), expected)


@pytest.mark.parametrize("case", CASES)
def test_copies_pickles_and_random_fills_keep_the_placement(case: str) -> None:
    run_distributed(4, check_copies, CASES[case])


# --- operations ---------------------------------------------------------------------------------------------


def check_operations(case: Case) -> None:
    mesh, placements = mesh_of(case), case.placements
    a, b = values(case.shape, 1), values(case.shape, 2)
    tensors = face(a, mesh, placements), face(b, mesh, placements)
    for operation in ELEMENTWISE:
        result = operation(*tensors)
        assert type(result) is RaggedTensor
        assert result.placements == placements
        assert torch.equal(result.full_tensor(), operation(a, b))
    for operation in OTHER if len(case.shape) == 2 else ():
        torch.testing.assert_close(operation(*tensors).full_tensor(), operation(a, b))
    replicated = distribute_tensor(b, mesh, [Replicate()] * mesh.ndim)
    for operand, plain in ((replicated, b), (replicated.sum(0, keepdim=True), b.sum(0, keepdim=True))):
        mixed: Any = tensors[0] + operand
        assert mixed.placements == placements
        torch.testing.assert_close(mixed.full_tensor(), a + plain)
    last: Any = tensors[0] * replicated[0] if len(case.shape) == 2 else None
    if last is not None:
        torch.testing.assert_close(last.full_tensor(), a * b[0])


@pytest.mark.parametrize("case", CASES)
def test_operations_give_the_unsharded_result_at_every_placement(case: str) -> None:
    run_distributed(4, check_operations, CASES[case])


def check_mixed_placements() -> None:
    mesh = mesh_of(CASES["hybrid"])
    a, b = values((5, 4), 1), values((5, 4), 2)
    hybrid, fully = (Replicate(), ragged(0, 1, 5)), (ragged(0, 1, 1, 3, 5),) * 2
    mixed: Any = face(a, mesh, hybrid) + face(b, mesh, fully)
    assert mixed.placements == hybrid
    assert torch.equal(mixed.full_tensor(), a + b)
    target = face(a, mesh, fully)
    target.copy_(face(b, mesh, hybrid))
    assert torch.equal(target.full_tensor(), b)
    other = face(a, init_device_mesh("cpu", (4,), mesh_dim_names=("data",)), (ragged(0, 1, 1, 3, 5),))
    with pytest.raises(ValueError, match="different meshes"):
        target.add_(other)


def test_operands_of_other_placements_are_gathered_and_those_of_other_meshes_refused() -> None:
    run_distributed(4, check_mixed_placements)


def check_gradient(case: Case) -> None:
    mesh = mesh_of(case)
    whole = values(case.shape).requires_grad_()
    parameter = nn.Parameter(face(whole.detach(), mesh, case.placements))
    (expected,) = torch.autograd.grad(whole.pow(3).sum(), whole)
    parameter.full_tensor().pow(3).sum().backward()
    grad: Any = parameter.grad
    assert type(grad) is RaggedTensor
    assert grad.placements == case.placements
    torch.testing.assert_close(grad.full_tensor(), expected)
    loss: Any = parameter.pow(3).sum()
    parameter.grad = None
    loss.full_tensor().backward()
    grad = parameter.grad
    torch.testing.assert_close(grad.full_tensor(), expected)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="torch before 2.13 brings no gradients to ragged tensors")
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_a_whole_tensor_comes_back_as_the_parameter_lies(case: str) -> None:
    run_distributed(4, check_gradient, CASES[case])


def check_no_communication() -> list[str]:
    mesh = mesh_of(CASES["hybrid"])
    parameters = [
        nn.Parameter(face(values(case.shape), mesh, case.placements)) for case in CASES.values() if case.mesh == HYBRID
    ]
    optimizer = torch.optim.AdamW(cast(list[torch.Tensor], parameters), foreach=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    assert len(collectives(parameters[0].full_tensor)) == 1  # type: ignore[operator]
    return collectives(optimizer.step)


def test_an_optimizer_step_launches_no_collective() -> None:
    assert run_distributed(4, check_no_communication) == [[]] * 4
