"""Ragged parameters under torch's own checkpoints and state dicts, full and sharded, at any world size."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from fsdp_fn.layout import TensorSpec, plan_layout, row_bounds
from fsdp_fn.ragged import RaggedTensor, as_ragged, from_spec, restore_optimizer_state
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


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))


def sharded(net: Net, mesh: DeviceMesh) -> Net:
    """Puts ragged faces in the place of the parameters, cut as a unit's layout cuts them."""
    names = [name for name, _ in net.named_parameters()]
    parameters = [parameter.detach() for parameter in net.parameters()]
    requires_grad = [parameter.requires_grad for parameter in net.parameters()]
    layout = plan_layout(
        [TensorSpec(n, tuple(p.shape), p.dtype, g) for n, p, g in zip(names, parameters, requires_grad, strict=True)],
        mesh.size(),
    )
    for index, (name, whole) in enumerate(zip(names, parameters, strict=True)):
        path, _, leaf = name.rpartition(".")
        bounds, rank = row_bounds(layout, index), mesh.get_local_rank()
        local = whole[bounds[rank] : bounds[rank + 1]].clone()
        face = nn.Parameter(as_ragged(local, mesh, bounds, whole.shape), requires_grad=requires_grad[index])
        net.get_submodule(path)._parameters[leaf] = face
    return net


def train(net: Net, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        for index, parameter in enumerate(net.parameters()):
            if not parameter.requires_grad:
                continue
            whole = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(31 * step + index))
            if isinstance(parameter, RaggedTensor):
                own = whole[parameter.placement.row_range(parameter.device_mesh.get_local_rank())].clone()
                parameter.grad = from_spec(own, parameter._spec, False)
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


def check_state_dicts(full_state_dict: bool, cpu_offload: bool, broadcast: bool) -> None:
    mesh = make_mesh()
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
            assert value.ndim == 0 or type(value) is RaggedTensor
    assert_same(other, other_optimizer, plain, reference)
    train(other, other_optimizer, 1)
    train(plain, reference, 1)
    assert_same(other, other_optimizer, plain, reference)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    ("full_state_dict", "cpu_offload", "broadcast"),
    [(False, False, False), (False, True, False), (True, False, False), (True, True, True)],
    ids=["sharded", "sharded on CPU", "full", "full on rank 0"],
)
def test_model_and_optimizer_state_dicts_round_trip(
    ranks: int, full_state_dict: bool, cpu_offload: bool, broadcast: bool
) -> None:
    run_distributed(ranks, check_state_dicts, full_state_dict, cpu_offload, broadcast)
