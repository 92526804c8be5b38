"""Which graphs cross devices, and gradients that come too late; without a second device, by the rules themselves."""

from __future__ import annotations

import pytest
import torch
from models import Chain, build, vectors

import fsdp_fn
from fsdp_fn.crossing import crosses_devices
from harness import run_distributed


def test_a_graph_on_one_device_does_not_cross_and_what_came_before_does_not_count() -> None:
    before = torch.randn(3, requires_grad=True).to("meta") * 2
    token = torch.zeros((), requires_grad=True) * 1
    inside = torch.randn(3, requires_grad=True).exp()
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert not crosses_devices([inside.sum()], token, cpu)
    assert crosses_devices([inside.sum()], token, meta)
    assert not crosses_devices([before], token, cpu)


def test_a_graph_crosses_where_a_part_of_it_does() -> None:
    token = torch.zeros((), requires_grad=True) * 1
    x = torch.randn(3, requires_grad=True)
    there = (x * 2).to("meta").tanh()
    assert crosses_devices([there.sum()], token, torch.device("cpu"))
    assert crosses_devices([x.exp(), there], token, torch.device("meta"))


def gradient_out_of_turn() -> None:
    model = fsdp_fn.fully_shard(build(Chain))
    unit = model._fsdp_unit
    leaf = unit.leaves[0]
    with pytest.raises(RuntimeError, match=r"the root unit: a gradient of shape .* came after .* use_reentrant=False"):
        leaf.backward(torch.ones_like(leaf))
    assert leaf.grad is None
    model(vectors()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_gradient_that_comes_after_the_reduction_is_refused() -> None:
    run_distributed(2, gradient_out_of_turn)
