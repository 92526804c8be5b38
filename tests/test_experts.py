"""Parameters that only some ranks use count as zeros elsewhere, and are never mixed with one another.

After pytorch/pytorch#158719: where the shapes agree, gradients of different experts were added together.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from comparison import Wrapper, check_nothing_gathered
from torch import nn

import fsdp_fn
from harness import run_distributed


class Expert(nn.Linear):
    pass


class Experts(nn.Module):
    """``forward(x, k)`` uses expert ``k`` and the shared head."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.ModuleList(Expert(4, 4, bias=False) for _ in range(3))
        for expert in self.e:
            nn.init.ones_(expert.weight)
        self.head = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, k: int) -> torch.Tensor:
        return self.e[k](x) * self.head


def check_gradients(found: dict[str, torch.Tensor | None]) -> None:
    """Rank 0 gave expert 0 the input 1, rank 1 gave expert 1 the input 2; nobody used expert 2."""
    for name, value in (("e.0.weight", 0.5), ("e.1.weight", 1.0), ("head", 6.0), ("e.2.weight", 0.0)):
        grad = found[name]
        if name == "e.2.weight" and grad is None:
            continue
        assert grad is not None
        assert (grad == value).all(), f"{name}: {grad.unique().tolist()}, expected {value}"


def one_unit() -> None:
    rank = dist.get_rank()
    model = Wrapper(Experts())
    model(torch.full((1, 4), rank + 1.0), rank).sum().backward()
    check_gradients(model.gradients())
    check_nothing_gathered()


def one_unit_functional() -> None:
    rank = dist.get_rank()
    template, state = fsdp_fn.shard(Experts())
    step = fsdp_fn.value_and_grad(template, lambda model, x, k: model(x, k).sum())
    _, gradients, _ = step(state, torch.full((1, 4), rank + 1.0), rank)
    owned = gradients[""]
    names = [spec.name for spec in owned.layout.tensors]
    for name, value in (("e.0.weight", 0.5), ("e.1.weight", 1.0), ("e.2.weight", 0.0), ("head", 6.0)):
        assert (owned.owned(names.index(name)) == value).all(), name


@pytest.mark.parametrize("run", [one_unit, one_unit_functional])
def test_an_expert_used_by_one_rank_counts_as_zeros_on_the_other(run: object) -> None:
    run_distributed(2, run)  # type: ignore[arg-type]
