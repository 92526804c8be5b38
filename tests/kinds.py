"""One kind of model on either path beside the same one in plain PyTorch, at any number of ranks.

Promises: ranks get inputs of their own, and the reference is the mean of the plain gradients over ranks, so that loss,
gradients, gradients of inputs and stepped weights are compared in each step; many faults show one step later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from comparison import PATHS, Path, check_equal, check_named, reference_gradients, same_weights
from models import build, vectors
from torch import nn


def each(names: Iterable[str], run: Callable[[str], None]) -> None:
    """``run`` of each name; a failure says which."""
    for name in names:
        try:
            run(name)
        except BaseException as error:
            raise AssertionError(f"{name}: {error}") from error


CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def own_vectors(step: int) -> tuple[torch.Tensor, ...]:
    """This rank's input of a step, which needs a gradient."""
    return (vectors(100 * dist.get_rank() + step, requires_grad=True),)


def mean_square(call: Callable[..., torch.Tensor], *inputs: Any) -> torch.Tensor:
    """The mean square of what the model gives."""
    return call(*inputs).square().mean()


@dataclass(frozen=True)
class Kind:
    """How a model is made, which classes of its modules are units, what it gets in a step, and what the loss is."""

    make: Callable[[], nn.Module]
    units: Sequence[type[nn.Module]] = ()
    inputs: Callable[[int], tuple[Any, ...]] = own_vectors
    loss: Callable[..., torch.Tensor] = mean_square
    options: Mapping[str, Any] = field(default_factory=dict)


def beside_plain(kind: Kind, path: str, steps: int = 2, **options: Any) -> tuple[Path, nn.Module]:
    """Train both for ``steps`` and compare after each; the two models."""
    plain = build(kind.make)
    model = PATHS[path](build(kind.make), kind.units, **kind.options, **options)
    for step in range(steps):
        train_step(kind, model, plain, step)
    return model, plain


def train_step(kind: Kind, model: Path, plain: nn.Module, step: int) -> None:
    """One step of both, compared."""
    inputs, plain_inputs = kind.inputs(step), kind.inputs(step)
    torch.manual_seed(step)
    loss = kind.loss(model, *inputs)
    torch.manual_seed(step)
    plain_loss = kind.loss(plain, *plain_inputs)
    check_equal(loss, plain_loss, f"loss of step {step}", **CLOSE)
    loss.backward()
    plain_loss.backward()
    model.check_at_rest()
    for ours, theirs in zip(inputs, plain_inputs, strict=True):
        if isinstance(theirs, torch.Tensor) and theirs.requires_grad:
            assert (ours.grad is None) == (theirs.grad is None), f"input gradient of step {step}"
            if theirs.grad is not None:
                check_equal(ours.grad, theirs.grad, f"input gradient of step {step}", **CLOSE)
    mean = reference_gradients(plain)
    check_named(model.gradients(), mean, f"gradient of step {step}", zeros_for_none=True, **CLOSE)
    model.step(0.1)
    for name, parameter in plain.named_parameters():
        grad = mean[name]
        if grad is not None:
            parameter.data = parameter.detach().sub(grad, alpha=0.1)  # expanded ones cannot be written in place
        parameter.grad = None
    check_named(model.weights(), same_weights(plain), f"weight after step {step}", **CLOSE)
