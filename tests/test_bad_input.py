"""What cannot be done right is refused by name, on every rank, with nothing half-changed."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from comparison import PATHS, Wrapper, check_equal
from models import WIDTH, Chain, build, vectors
from torch import nn

import fsdp_fn
from harness import run_distributed


class ZeroDim(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(2.0))
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.temperature


def zero_dim() -> None:
    plain = build(ZeroDim)
    wrapped = copy.deepcopy(plain)
    with pytest.raises(ValueError, match="temperature"):
        fsdp_fn.fully_shard(wrapped)
    check_equal(wrapped(vectors()), plain(vectors()), "the model that was not wrapped")


def not_a_module() -> None:
    for shard in (fsdp_fn.fully_shard, fsdp_fn.shard):
        with pytest.raises(TypeError, match=r"nn\.Module.*str"):
            shard("a string")  # type: ignore[type-var, arg-type]


def optimizer_made_before() -> None:
    """A step of an optimizer that holds the parameters from before would do nothing, silently."""
    model = build(Chain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = Wrapper(model)
    wrapped(vectors()).sum().backward()
    with pytest.raises(RuntimeError, match=r"optimizer.*before.*fully_shard"):
        optimizer.step()


def cast_a_part() -> None:
    model = Wrapper(build(Chain))
    model.module.head.half()
    with pytest.raises(RuntimeError, match=r"'weight' was replaced or cast"):
        model(vectors())


def delete_a_parameter() -> None:
    model = Wrapper(build(Chain))
    del model.module.head.weight
    with pytest.raises(RuntimeError, match=r"unit.*'weight'"):
        model(vectors())


def parameter_subclass() -> None:
    class Special(nn.Parameter):
        pass

    for path in PATHS.values():
        model = nn.Linear(3, 3)
        model.weight = Special(model.weight.detach())
        with pytest.raises(TypeError, match=r"'weight'.*Special"):
            path(model)


def sparse_gradient() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, WIDTH, sparse=True)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.table(tokens)

    for path in PATHS.values():
        model = path(build(Sparse))
        with pytest.raises((TypeError, ValueError, RuntimeError), match=r"table\.weight"):
            model(torch.tensor([1, 2])).sum().backward()
        model.check_at_rest()


def replaced_forward() -> None:
    """A forward set on the instance would be called in the place of the wrapper's, with sharded weights."""
    model = build(Chain)
    own = model.forward
    model.forward = lambda x: own(x) * 2  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="forward"):
        fsdp_fn.fully_shard(model)


CASES: list[Callable[[], None]] = [
    zero_dim,
    not_a_module,
    optimizer_made_before,
    cast_a_part,
    delete_a_parameter,
    parameter_subclass,
    sparse_gradient,
    replaced_forward,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_is_refused_by_name(case: Callable[[], None]) -> None:
    run_distributed(2, case)
