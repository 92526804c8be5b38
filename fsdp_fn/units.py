"""Units: which parameters a wrapped module owns, how they are laid out, and this rank's first shards of them.

Promises: a unit owns the parameters of its module less those of nested units; a parameter that it holds under two
names is stored once. Nothing here changes a module. What cannot be sharded is refused, naming unit and parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_fn.bracket import Slot
from fsdp_fn.escapes import references
from fsdp_fn.groups import axis_of, mesh_device, raise_together
from fsdp_fn.layout import Granularity, Layout, TensorSpec, local_offset, owned_range, plan_layout
from fsdp_fn.placement import Placements, Sharded, sharded_granularity, zero3
from fsdp_fn.policy import PrecisionPolicy, SchedulePolicy
from fsdp_fn.state import Axis, Buffer, UnitState


@dataclass(frozen=True)
class OwnedParameters:
    """Parameters of one unit: each once, with the first of its names, and every slot that it stands in."""

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    slots: tuple[Slot, ...]
    aliases: tuple[tuple[str, int], ...]


def owned_parameters(module: nn.Module, is_boundary: Callable[[nn.Module], bool], prefix: str = "") -> OwnedParameters:
    """Parameters of ``module`` and its submodules, not descending into those for which ``is_boundary`` holds."""
    names: list[str] = []
    parameters: list[nn.Parameter] = []
    slots: list[Slot] = []
    aliases: list[tuple[str, int]] = []
    index_of: dict[int, int] = {}
    modules = list(_walk(module, is_boundary, prefix, {}))
    for path, owner in modules:
        for name, parameter in owner._parameters.items():
            if parameter is None:
                continue
            full = f"{path}.{name}" if path else name
            index = index_of.setdefault(id(parameter), len(parameters))
            if index == len(parameters):
                names.append(full)
                parameters.append(parameter)
            else:
                aliases.append((full, index))
            slots.append((owner._parameters, name, index))
    return OwnedParameters(
        tuple(owner for _, owner in modules), tuple(names), tuple(parameters), tuple(slots), tuple(aliases)
    )


def _walk(
    module: nn.Module, is_boundary: Callable[[nn.Module], bool], path: str, seen: dict[int, None]
) -> Iterator[tuple[str, nn.Module]]:
    if id(module) in seen:
        return
    seen[id(module)] = None
    yield path, module
    for name, child in module._modules.items():
        if child is not None and not is_boundary(child):
            yield from _walk(child, is_boundary, f"{path}.{name}" if path else name, seen)


def device_type_of(module: object) -> str:
    """Device type of the first parameter that holds values, "cpu" without one; TypeError for what is no module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(module).__name__}")
    first = next((parameter for parameter in module.parameters() if not parameter.is_meta), None)
    return "cpu" if first is None else first.device.type


def check_parameters(owned: OwnedParameters, unit: str, device_type: str) -> None:
    """Raise ValueError or TypeError, naming the parameter, for one that cannot be sharded."""
    for name, parameter in zip(owned.names, owned.parameters, strict=True):
        label = f"parameter {name!r} of unit {unit!r}"
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"{label} is not initialised: run a lazy module once before sharding it")
        if isinstance(parameter, DTensor):
            raise ValueError(f"{label} is a DTensor already; expected a plain parameter that no other unit shards")
        if type(parameter.data) is not torch.Tensor or parameter.layout is not torch.strided:
            raise TypeError(f"{label}: expected a dense torch.Tensor, got {type(parameter.data).__name__}")
        if type(parameter) is not nn.Parameter:
            raise TypeError(
                f"{label}: expected a torch.nn.Parameter, got its subclass {type(parameter).__name__}, whose class "
                "sharding would drop"
            )
        if parameter.device.type != device_type:
            raise ValueError(
                f"{label} is on {parameter.device}, the mesh on {device_type!r}: move the model there before sharding"
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(f"{label} has gradient hooks, which sharding would drop: register them afterwards")
        if parameter.grad is not None:
            raise ValueError(f"{label} has a gradient, which sharding would drop: call zero_grad() first")


def checked_policies(
    precision: PrecisionPolicy | None, policy: SchedulePolicy | None
) -> tuple[PrecisionPolicy, SchedulePolicy]:
    """Both policies, the default where None is given; TypeError, naming the argument, for anything else."""
    precision = PrecisionPolicy() if precision is None else precision
    policy = SchedulePolicy() if policy is None else policy
    if not isinstance(precision, PrecisionPolicy):
        raise TypeError(f"precision: expected a PrecisionPolicy, got {precision!r}")
    if not isinstance(policy, SchedulePolicy):
        raise TypeError(f"policy: expected a SchedulePolicy, got {policy!r}")
    return precision, policy


def check_references(owned: OwnedParameters, module: nn.Module, unit: str) -> None:
    """Raise ValueError where ``module`` also reaches an owned parameter past its name: that way stays unsharded."""
    names = {id(parameter): name for name, parameter in zip(owned.names, owned.parameters, strict=True)}
    for holder, parameter in references(module.modules()):
        if id(parameter) in names:
            raise ValueError(
                f"parameter {names[id(parameter)]!r} of unit {unit!r} is also held by {holder}, which would go on with "
                "the unsharded parameter; reach it by its name alone"
            )


def unit_layout(
    owned: OwnedParameters, shard_count: int, granularity: Granularity, precision: PrecisionPolicy
) -> Layout:
    """Layout of a unit's parameters over ``shard_count`` ranks."""
    specs = [
        TensorSpec(name, tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for name, parameter in zip(owned.names, owned.parameters, strict=True)
    ]
    sizes = [dtype.itemsize for s in specs for dtype in (precision.main(s.dtype), precision.compute(s.dtype))]
    return plan_layout(tuple(specs), shard_count, granularity=granularity, itemsize=min(sizes, default=1))


def shard_unit(
    name: str,
    parameters: Sequence[torch.Tensor],
    layout: Layout,
    axis: Axis,
    precision: PrecisionPolicy,
    device: torch.device,
) -> UnitState:
    """This rank's main weights, copied out of the full ``parameters`` and cast to their main dtype."""
    held = tuple(range(len(layout.segments)))
    flats = []
    with torch.inference_mode(False), torch.no_grad():
        for segment in layout.segments:
            flat = torch.zeros(segment.shard_size, dtype=precision.main(segment.dtype), device=device)
            for index in segment.tensors:
                elements = owned_range(layout, index, axis.rank)
                if len(elements):
                    start = local_offset(layout, index, axis.rank)
                    whole = parameters[index].detach().reshape(-1)
                    flat[start : start + len(elements)].copy_(whole[elements.start : elements.stop])
            flats.append(flat)
    main = Buffer(tuple(flats), layout, Sharded(layout.granularity), axis, held)
    return UnitState(name, main, precision)


def shard_tensors(
    name: str,
    tensors: Mapping[str, torch.Tensor],
    mesh: DeviceMesh,
    *,
    frozen: Sequence[str] = (),
    placements: Placements | None = None,
    precision: PrecisionPolicy | None = None,
) -> UnitState:
    """A unit made from plain full tensors by name, for those who write schedules from the primitives.

    Each rank keeps its part of its own values; all ranks of ``mesh`` (one dimension) must call, with the same names,
    shapes and dtypes. ``frozen``: names that get no gradient. ``placements``: default ``zero3()``. Raises ValueError
    or TypeError on the rank at fault, :class:`~fsdp_fn.groups.RankFault` on the others.
    """
    axis, device = axis_of(mesh), mesh_device(mesh)
    made: UnitState | None = None
    fault: Exception | None = None
    agreed = ""
    try:
        unknown = [key for key in frozen if key not in tensors]
        if unknown or not tensors:
            raise ValueError(f"unit {name!r}: expected tensors, and frozen names among {list(tensors)}; got {unknown}")
        parameters = tuple(nn.Parameter(t.detach(), requires_grad=k not in frozen) for k, t in tensors.items())
        owned = OwnedParameters((), tuple(tensors), parameters, (), ())
        check_parameters(owned, name, mesh.device_type)
        precision = PrecisionPolicy() if precision is None else precision
        granularity = sharded_granularity(zero3() if placements is None else placements)
        layout = unit_layout(owned, axis.size, granularity, precision)
        agreed = f"{name}: {describe_layout(layout)}; {precision}; {granularity}"
        made = shard_unit(name, parameters, layout, axis, precision, device)
    except Exception as error:
        fault = error
    raise_together(fault, axis, device, agreed, f"shard_tensors({name!r})")
    assert made is not None
    return made


def describe_layout(layout: Layout) -> str:
    """What ranks must have in common before they shard: names, shapes, dtypes, gradients."""
    parts = [
        f"{spec.name} {list(spec.shape)} {spec.dtype}{'' if spec.requires_grad else ' frozen'}"
        for spec in layout.tensors
    ]
    return "; ".join(parts)


def copy_buffers(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of module buffers; one that stands under two names is copied once."""
    copies: dict[int, torch.Tensor] = {}
    return {name: copies.setdefault(id(buffer), buffer.detach().clone()) for name, buffer in buffers.items()}


def registered_buffers(module: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, torch.Tensor]]:
    """Every module buffer: its full name, the dict that holds it, its name there, and the tensor."""
    for path, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield (f"{path}.{name}" if path else name), owner._buffers, name, buffer
