"""Ragged parameters under torch's own checkpoints and state dicts, full and sharded, at any world size."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ragged_tensors import CASES, Case, mesh_of, values
from ragged_tensors import face as ragged_face
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp_fn.layout import TensorSpec, plan_layout, row_bounds
from fsdp_fn.ragged import RaggedShard, RaggedTensor, restore_optimizer_state
from harness import run_distributed


class Net(nn.Module):
    """Matrices, vectors, an empty parameter, a frozen one and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 7)
        self.second = nn.Linear(7, 1, bias=False)
        self.frozen = nn.Parameter(torch.randn(5, 2), requires_grad=False)
        self.empty = nn.Parameter(torch.randn(4, 0))
        self.register_buffer("count", torch.tensor([seed]))


def make_mesh(hybrid: bool = False) -> DeviceMesh:
    ranks = dist.get_world_size()
    if hybrid:
        return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("outer", "inner"))
    return init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))


def sharded(net: Net, mesh: DeviceMesh) -> Net:
    """Puts ragged faces in the place of the parameters, cut as a unit's layout cuts them, over the last dimension."""
    names = [name for name, _ in net.named_parameters()]
    parameters = [parameter.detach() for parameter in net.parameters()]
    requires_grad = [parameter.requires_grad for parameter in net.parameters()]
    layout = plan_layout(
        [TensorSpec(n, tuple(p.shape), p.dtype, g) for n, p, g in zip(names, parameters, requires_grad, strict=True)],
        mesh.size(mesh.ndim - 1),
    )
    for index, (name, whole) in enumerate(zip(names, parameters, strict=True)):
        path, _, leaf = name.rpartition(".")
        placements = [Replicate()] * (mesh.ndim - 1) + [RaggedShard(row_bounds(layout, index))]
        face = nn.Parameter(ragged_face(whole, mesh, placements), requires_grad=requires_grad[index])
        net.get_submodule(path)._parameters[leaf] = face
    return net


def train(net: Net, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        for index, parameter in enumerate(net.parameters()):
            if not parameter.requires_grad:
                continue
            whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(31 * step + index))
            if isinstance(parameter, RaggedTensor):
                parameter.grad = ragged_face(whole, parameter.device_mesh, parameter.placements)
            else:
                parameter.grad = whole
        optimizer.step()


def trained(seed: int, mesh: DeviceMesh | None) -> tuple[Net, torch.optim.Optimizer]:
    net = Net(seed) if mesh is None else sharded(Net(seed), mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01 * seed)
    train(net, optimizer, seed)
    return net, optimizer


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same(net: Net, optimizer: torch.optim.Optimizer, plain: Net, reference: torch.optim.Optimizer) -> None:
    expected = plain.state_dict()
    assert list(net.state_dict()) == list(expected)
    for name, value in net.state_dict().items():
        assert torch.equal(full(value), expected[name]), name
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert optimizer.state[ours].keys() == reference.state[theirs].keys()
        for key, value in reference.state[theirs].items():
            assert torch.equal(full(optimizer.state[ours][key]), value), key


# --- torch.distributed.checkpoint ---------------------------------------------------------------------------


def save_with_dcp(path: Path) -> None:
    net, optimizer = trained(2, make_mesh())
    dcp.save(
        {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)},
        checkpoint_id=path,
    )


def load_with_dcp(path: Path) -> None:
    net, optimizer = trained(1, make_mesh())
    state = {"model": get_model_state_dict(net), "optimizer": get_optimizer_state_dict(net, optimizer)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(net, state["model"])
    set_optimizer_state_dict(net, optimizer, state["optimizer"])
    plain, reference = trained(2, None)
    assert_same(net, optimizer, plain, reference)
    train(net, optimizer, 1)
    train(plain, reference, 1)
    assert_same(net, optimizer, plain, reference)


@pytest.mark.parametrize(("saving", "loading"), [(1, 3), (2, 2), (2, 4), (3, 3), (3, 2), (4, 4), (4, 1)])
def test_torch_checkpoints_round_trip_at_any_world_size(saving: int, loading: int, tmp_path: Path) -> None:
    run_distributed(saving, save_with_dcp, tmp_path)
    run_distributed(loading, load_with_dcp, tmp_path)


# --- full and sharded state dicts ---------------------------------------------------------------------------


def check_state_dicts(full_state_dict: bool, cpu_offload: bool, broadcast: bool, hybrid: bool) -> None:
    mesh = make_mesh(hybrid)
    getting = StateDictOptions(full_state_dict=full_state_dict, cpu_offload=cpu_offload)
    setting = StateDictOptions(full_state_dict=full_state_dict, broadcast_from_rank0=broadcast)
    net, optimizer = trained(2, mesh)
    model_state = get_model_state_dict(net, options=getting)
    optimizer_state = get_optimizer_state_dict(net, optimizer, options=getting)
    plain, reference = trained(2, None)
    if full_state_dict and (dist.get_rank() == 0 or not cpu_offload):
        for name, value in plain.state_dict().items():
            assert type(model_state[name]) is torch.Tensor
            assert torch.equal(model_state[name], value)
    elif full_state_dict:
        assert not model_state
    other, other_optimizer = trained(1, mesh)
    set_model_state_dict(other, model_state, options=setting)
    set_optimizer_state_dict(other, other_optimizer, optimizer_state, options=setting)
    restore_optimizer_state(other_optimizer)
    for parameter in other.parameters():
        assert type(parameter) is RaggedTensor
        for value in other_optimizer.state[parameter].values():
            assert value.ndim == 0 or (type(value) is RaggedTensor and value.placements == parameter.placements)
    assert_same(other, other_optimizer, plain, reference)
    train(other, other_optimizer, 1)
    train(plain, reference, 1)
    assert_same(other, other_optimizer, plain, reference)


@pytest.mark.parametrize(
    ("ranks", "hybrid"),
    [(2, False), (3, False), (4, False), (2, True), (4, True)],
    ids=["2", "3", "4", "2 by 1", "2 by 2"],
)
@pytest.mark.parametrize(
    ("full_state_dict", "cpu_offload", "broadcast"),
    [(False, False, False), (False, True, False), (True, False, False), (True, True, True)],
    ids=["sharded", "sharded on CPU", "full", "full on rank 0"],
)
def test_model_and_optimizer_state_dicts_round_trip(
    ranks: int, hybrid: bool, full_state_dict: bool, cpu_offload: bool, broadcast: bool
) -> None:
    run_distributed(ranks, check_state_dicts, full_state_dict, cpu_offload, broadcast, hybrid)


# --- placements that torch's functions cannot broadcast into -----------------------------------------------


class Single(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def stepped(case: Case, seed: int) -> tuple[Single, torch.optim.Optimizer]:
    net = Single(ragged_face(values(case.shape, seed), mesh_of(case), case.placements))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net.weight.grad = ragged_face(values(case.shape, seed + 1), mesh_of(case), case.placements)
    optimizer.step()
    return net, optimizer


def check_full_state_dicts(case: Case) -> None:
    net, optimizer = stepped(case, 1)
    reference = Single(values(case.shape, 1))
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1)
    reference.weight.grad = values(case.shape, 2)
    plain.step()
    whole = StateDictOptions(full_state_dict=True)
    model_state: Any = get_model_state_dict(net, options=whole)
    optimizer_state: Any = get_optimizer_state_dict(net, optimizer, options=whole)
    torch.testing.assert_close(model_state["weight"], reference.weight.detach())
    torch.testing.assert_close(optimizer_state["state"]["weight"]["exp_avg"], plain.state[reference.weight]["exp_avg"])
    other, other_optimizer = stepped(case, 5)
    set_model_state_dict(other, model_state, options=whole)
    set_optimizer_state_dict(other, other_optimizer, optimizer_state, options=whole)
    restore_optimizer_state(other_optimizer)
    for name in ("exp_avg", "exp_avg_sq"):
        loaded = other_optimizer.state[other.weight][name]
        assert loaded.placements == case.placements
        assert torch.equal(loaded.to_local(), optimizer.state[net.weight][name].to_local())
    assert torch.equal(full(other.weight), full(net.weight))


@pytest.mark.parametrize("case", CASES)
def test_full_state_dicts_that_every_rank_has_load_at_every_placement(case: str) -> None:
    run_distributed(4, check_full_state_dicts, CASES[case])


def check_broadcast(case: Case, served: bool) -> None:
    net, _ = stepped(case, 1)
    state = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    other, _ = stepped(case, 5)
    before = full(other.weight)
    from_rank0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    if served:
        set_model_state_dict(other, state, options=from_rank0)
        assert torch.equal(full(other.weight), full(net.weight))
        return
    with pytest.raises(ValueError, match="broadcast_from_rank0=False"):
        set_model_state_dict(other, state, options=from_rank0)
    assert torch.equal(full(other.weight), before)


@pytest.mark.parametrize("case", CASES)
def test_a_broadcast_state_dict_is_loaded_right_or_refused_by_name(case: str) -> None:
    refused = case.startswith(("fully hybrid", "rows over tensor", "three dimensions"))
    run_distributed(4, check_broadcast, CASES[case], not refused)
