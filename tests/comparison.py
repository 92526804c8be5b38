"""A model under test on either path, and what it must have in common with the same model in plain PyTorch.

Promises: ``Wrapper`` and ``Functional`` look alike to a test: call them, run backward, take full gradients by
parameter name. The comparisons gather by ``torch.distributed``, not by the code under test. All ranks call.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import fsdp_fn
from fsdp_fn.binding import BOUND
from fsdp_fn.module import FsdpModule
from fsdp_fn.runtime import ResizedBuffer

Units = Sequence[type[nn.Module]]
Named = dict[str, torch.Tensor | None]


class Wrapper:
    """``model``, sharded in place by ``fully_shard``: each module of a class in ``units``, then the model."""

    def __init__(self, model: nn.Module, units: Units = (), **options: Any) -> None:
        for module in reversed(list(model.modules())):
            if isinstance(module, tuple(units)) and module is not model:
                fsdp_fn.fully_shard(module, **options)
        self.module = fsdp_fn.fully_shard(model, **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def gradients(self) -> Named:
        """Full gradients; None where a parameter has none."""
        return gather_by_name({name: local(p.grad) for name, p in self.module.named_parameters()})

    def weights(self) -> Named:
        """Full parameters."""
        return gather_by_name({name: local(p) for name, p in self.module.named_parameters()})

    def step(self, lr: float) -> None:
        """One step of gradient descent by hand on the local shards; gradients are dropped."""
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.grad is not None:
                    local(parameter).sub_(local(parameter.grad), alpha=lr)
                parameter.grad = None

    def forget_gradients(self) -> None:
        """As ``zero_grad()``."""
        self.module.zero_grad()

    def check_at_rest(self) -> None:
        """Nothing is gathered or half-way, and the module holds its sharded parameters."""
        for name, module in self.module.named_modules():
            if isinstance(module, FsdpModule):
                unit = module._fsdp_unit
                assert not unit.gathered, f"unit {name!r} is still gathered"
                assert unit.resting_now, f"unit {name!r} still has its weights on the modules"
                assert all(leaf.grad is None for leaf in unit.leaves), f"unit {name!r}: a leaf keeps a gradient"
        for name, parameter in self.module.named_parameters():
            assert hasattr(parameter, "_local_tensor"), f"{name} is {type(parameter)}, expected a sharded parameter"
        check_nothing_gathered()


class Functional:
    """``model`` under ``shard`` and ``apply``: the state moves on with every call."""

    def __init__(self, model: nn.Module, units: Units = (), **options: Any) -> None:
        found = [unit for unit in units if any(isinstance(module, unit) for module in list(model.modules())[1:])]
        template, state = fsdp_fn.shard(model, units=[u for u in found if not isinstance(model, u)], **options)
        self.template, self.state = template, fsdp_fn.with_gradients(state)
        self.module = self.template.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output, self.state = fsdp_fn.apply(self.template, self.state, *args, **kwargs)
        return output

    def gradients(self) -> Named:
        """Full gradients; zeros where backward did not reach."""
        gradients = fsdp_fn.gradients_of(self.state)
        frozen = {name: None for name, p in self.module.named_parameters() if not p.requires_grad}
        return gather_by_name(owned_by_name(gradients)) | frozen

    def weights(self) -> Named:
        """Full parameters."""
        return gather_by_name(owned_by_name({name: unit.main for name, unit in self.state.units.items()}))

    def step(self, lr: float) -> None:
        """One step of gradient descent; gradients are dropped."""
        gradients, state = fsdp_fn.gradients_of(self.state), fsdp_fn.without_gradients(self.state)
        optimizer = fsdp_fn.SGD(lr=lr)
        state, _ = optimizer.update(gradients, optimizer.init(state), state)
        self.state = fsdp_fn.with_gradients(state)

    def forget_gradients(self) -> None:
        """The same weights, as fresh leaves."""
        self.state = fsdp_fn.with_gradients(self.state)

    def check_at_rest(self) -> None:
        """Nothing is gathered, and the template is bare."""
        check_bare(self.template)
        check_nothing_gathered()


Path = Wrapper | Functional
PATHS: dict[str, Callable[..., Path]] = {"wrapper": Wrapper, "functional": Functional}


def check_bare(template: fsdp_fn.Template) -> None:
    """The template's modules hold meta tensors, and no unit."""
    for name, module in template.module.named_modules():
        assert BOUND not in module.__dict__, f"{name or 'the root'} still knows a bound unit"
    for name, tensor in [*template.module.named_parameters(), *template.module.named_buffers()]:
        assert tensor.is_meta, f"{name} of the template is on {tensor.device}"


def check_nothing_gathered() -> None:
    """No buffer of full weights or packed gradients in this process has bytes, other than poisoned ones."""
    buffers = [value for value in gc.get_objects() if type(value) is ResizedBuffer]
    held = [buffer.allocated for buffer in buffers if buffer.allocated and not buffer.released]
    assert not held, f"buffers of {held} bytes are still allocated"


def local(tensor: torch.Tensor | None) -> Any:
    """This rank's rows of a sharded parameter or gradient: the tensor itself, not a copy."""
    return None if tensor is None else tensor._local_tensor  # type: ignore[attr-defined]


def owned_by_name(buffers: Mapping[str, fsdp_fn.Buffer]) -> dict[str, torch.Tensor]:
    """This rank's rows of every tensor in the held segments of ``buffers``."""
    return {
        spec.name: buffer.owned(index).detach()
        for buffer in buffers.values()
        for index, spec in enumerate(buffer.layout.tensors)
        if buffer.layout.location(index)[0] in buffer.held
    }


def gather_by_name(parts: Mapping[str, torch.Tensor | None]) -> Named:
    """Concatenate every rank's rows; a name is None on all ranks or on none."""
    everywhere: list[dict[str, torch.Tensor | None]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, {name: _as_bytes(part) for name, part in parts.items()})
    full: Named = {}
    for name, part in parts.items():
        rows = [one[name] for one in everywhere if one[name] is not None]
        assert len(rows) in (0, len(everywhere)), f"{name}: None on some ranks only"
        if part is None:
            full[name] = None
        elif whole := [row for row in rows if row.dim() == 0]:
            full[name] = whole[0].view(part.dtype)
        else:
            full[name] = torch.cat(rows).view(part.dtype)
    return full


def _as_bytes(part: torch.Tensor | None) -> torch.Tensor | None:
    """A copy that pickles and concatenates: 8-bit floats do neither."""
    if part is None:
        return None
    return part.detach().clone().view(torch.uint8) if part.dtype.itemsize == 1 else part.detach().clone()


def reference_gradients(model: nn.Module) -> Named:
    """Gradients of a plain model, averaged over ranks; None only where no rank has one."""
    own = {name: parameter.grad for name, parameter in model.named_parameters()}
    everywhere: list[Named] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, own)
    mean: Named = {}
    for name, parameter in model.named_parameters():
        found = [one[name] for one in everywhere if one[name] is not None]
        total = torch.zeros_like(parameter, requires_grad=False)
        for grad in found:
            total += grad
        mean[name] = total / len(everywhere) if found else None
    return mean


def check_named(found: Named, expected: Named, what: str, *, zeros_for_none: bool = False, **tolerance: float) -> None:
    """Both have the same names and values; bit-equal unless a tolerance is given.

    ``zeros_for_none``: zeros found stand for None expected: in the functional path, or what backward does
    not reach in a unit.
    """
    assert set(found) == set(expected), f"{what}: {set(found) ^ set(expected)}"
    for name, value in found.items():
        wanted = expected[name]
        if wanted is None and value is not None and zeros_for_none:
            wanted = torch.zeros_like(value)
        if value is None or wanted is None:
            assert value is wanted, f"{what} of {name}: got {value}, expected {wanted}"
            continue
        check_equal(value, wanted, f"{what} of {name}", **tolerance)


def check_equal(value: torch.Tensor, wanted: torch.Tensor, what: str, **tolerance: float) -> None:
    """Bit-equal, or close where a tolerance is given; 8-bit floats are codes, and bit-equal always."""
    tolerance = tolerance if value.dtype.itemsize > 1 else {}
    assert value.dtype == wanted.dtype, f"{what}: {value.dtype}, expected {wanted.dtype}"
    limits = {"rtol": 0.0, "atol": 0.0} | tolerance
    torch.testing.assert_close(
        value.detach(), wanted.detach(), equal_nan=True, msg=lambda text: f"{what}: {text}", **limits
    )


def same_weights(model: nn.Module) -> Named:
    """Parameters of a plain model by name, detached."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def plain_gradients(model: nn.Module) -> Named:
    """Gradients of a plain model by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}
