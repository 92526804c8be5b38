"""Units: which parameters a wrapped module owns, how they are laid out, and this rank's first shards of them.

Promises: a unit owns the parameters of its module less those of nested units; a parameter that it holds under two
names is stored once. Nothing here changes a module. What cannot be sharded is refused, naming unit and parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_fn.agreement import AgreedUnit, agreed_unit
from fsdp_fn.bracket import Slot
from fsdp_fn.escapes import Top, held_parameters
from fsdp_fn.groups import axes_of, make_together, mesh_device, strategy_on
from fsdp_fn.layout import Layout, TensorSpec, plan_layout
from fsdp_fn.placement import (
    Placements,
    Sharded,
    Strategy,
    checked_strategy,
    granularity_of,
    optimizer_placements,
)
from fsdp_fn.policy import PrecisionPolicy, SchedulePolicy
from fsdp_fn.ragged_placement import is_ragged
from fsdp_fn.state import Axis, Buffer, UnitState, piece_of
from fsdp_fn.tensor_parallel import local_part, tensor_parallel_of


@dataclass(frozen=True)
class OwnedParameters:
    """Parameters of one unit: each once, with the first of its names, and every slot that it stands in.

    ``tops``: attributes of modules whose containers are among the slots, and must stay those.
    """

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    slots: tuple[Slot, ...]
    tops: tuple[Top, ...] = ()


def owned_parameters(
    module: nn.Module,
    is_boundary: Callable[[nn.Module], bool],
    prefix: str = "",
    whole: nn.Module | None = None,
    ignored: Collection[nn.Parameter] = (),
) -> OwnedParameters:
    """Parameters of ``module`` and its submodules, not descending into those for which ``is_boundary`` holds.

    ``whole``: the model, any module of which may hold them past their names; default ``module``. ``ignored``: what is
    not owned all the same.
    """
    left_out = {id(parameter) for parameter in ignored}
    names: list[str] = []
    parameters: list[nn.Parameter] = []
    slots: list[Slot] = []
    index_of: dict[int, int] = {}
    modules = list(_walk(module, is_boundary, prefix, {}))
    for path, owner in modules:
        for name, parameter in owner._parameters.items():
            if parameter is None or id(parameter) in left_out:
                continue
            full = f"{path}.{name}" if path else name
            index = index_of.setdefault(id(parameter), len(parameters))
            if index == len(parameters):
                names.append(full)
                parameters.append(parameter)
            slots.append((owner._parameters, name, index))
    tops: dict[int, Top] = {}
    for held in held_parameters((whole or module).modules()):
        if id(held.parameter) in index_of and held.container is not None:
            slots.append((held.container, held.key, index_of[id(held.parameter)]))
            if held.top is not None:
                tops[id(held.top.container)] = held.top
    return OwnedParameters(
        tuple(owner for _, owner in modules),
        tuple(names),
        tuple(parameters),
        tuple(slots),
        tuple(tops.values()),
    )


def ties_moved_up(owned_by_unit: Mapping[str, OwnedParameters], model: nn.Module) -> dict[str, OwnedParameters]:
    """Units of ``model`` by path: a parameter of several goes to the lowest that is around all of them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    holders: dict[int, list[str]] = {}
    for path, owned in owned_by_unit.items():
        for parameter in owned.parameters:
            holders.setdefault(id(parameter), []).append(path)
    target = {key: _lowest_around(paths, list(owned_by_unit)) for key, paths in holders.items()}
    entries: dict[str, list[tuple[str, nn.Parameter, list[tuple[Any, Any]]]]] = {path: [] for path in owned_by_unit}
    placed: dict[int, list[tuple[Any, Any]]] = {}
    for owned in owned_by_unit.values():
        for index, parameter in enumerate(owned.parameters):
            if id(parameter) not in placed:
                placed[id(parameter)] = []
                entries[target[id(parameter)]].append((names[id(parameter)], parameter, placed[id(parameter)]))
            placed[id(parameter)] += [(c, key) for c, key, at in owned.slots if at == index]
    tops = tuple({id(top.container): top for owned in owned_by_unit.values() for top in owned.tops}.values())
    moved = {key for key, paths in holders.items() if len(paths) > 1}
    return {
        path: OwnedParameters(
            owned.modules,
            tuple(name for name, _, _ in entries[path]),
            tuple(parameter for _, parameter, _ in entries[path]),
            _each_once([(c, key, at) for at, (_, _, slots) in enumerate(entries[path]) for c, key in slots]),
            tops if any(id(parameter) in moved for _, parameter, _ in entries[path]) else owned.tops,
        )
        for path, owned in owned_by_unit.items()
    }


def _lowest_around(paths: list[str], units: list[str]) -> str:
    return max((unit for unit in units if all(is_under(path, unit) for path in paths)), key=len)


def is_under(path: str, top: str) -> bool:
    """Whether ``path`` is that of module ``top`` or of something in it."""
    return not top or path == top or path.startswith(f"{top}.")


def _each_once(slots: Sequence[Slot]) -> tuple[Slot, ...]:
    return tuple({(id(container), key): (container, key, index) for container, key, index in slots}.values())


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


def device_type_of(module: object) -> str | None:
    """Device type of the first parameter that tells one, None without one; TypeError for what is no module.

    A DTensor's is its mesh's: its own part may be offloaded, or on meta.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected an nn.Module, got {type(module).__name__}")
    for parameter in module.parameters():
        if isinstance(parameter, DTensor):
            return str(parameter.device_mesh.device_type)
        if not parameter.is_meta:
            return parameter.device.type
    return None


def check_parameters(
    owned: OwnedParameters,
    unit: str,
    device_type: str,
    data_parallel: Sequence[str | None] | None = None,
    *,
    may_be_meta: bool = False,
) -> None:
    """Raise ValueError or TypeError, naming the parameter, for one that cannot be sharded.

    ``data_parallel``: the axes to shard over, where DTensors of other axes are served; None where they are not.
    ``may_be_meta``: values are made later.
    """
    for name, parameter in zip(owned.names, owned.parameters, strict=True):
        label = f"parameter {name!r} of unit {unit!r}"
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"{label} is not initialised: run a lazy module once before sharding it")
        if isinstance(parameter, DTensor):
            if data_parallel is None or type(parameter.data) is not DTensor:
                raise ValueError(f"{label} is a DTensor already; expected a plain parameter that no other unit shards")
            tensor_parallel_of(parameter, label, data_parallel)
        elif type(parameter.data) is not torch.Tensor or parameter.layout is not torch.strided:
            raise TypeError(f"{label}: expected a dense torch.Tensor, got {type(parameter.data).__name__}")
        elif type(parameter) is not nn.Parameter:
            raise TypeError(
                f"{label}: expected a torch.nn.Parameter, got its subclass {type(parameter).__name__}, whose class "
                "sharding would drop"
            )
        if parameter.device.type != device_type and not (may_be_meta and parameter.is_meta):
            raise ValueError(
                f"{label} is on {parameter.device}, the mesh on {device_type!r}: move the model there before sharding"
            )
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise ValueError(f"{label} has gradient hooks, which sharding would drop: register them afterwards")
        if parameter.grad is not None:
            raise ValueError(f"{label} has a gradient, which sharding would drop: call zero_grad() first")


@dataclass(frozen=True)
class Setting:
    """How one unit is sharded: a strategy on the axes of a mesh, policies, and where it computes.

    ``mesh``: the part of the mesh that the strategy's axes span.
    """

    strategy: Strategy
    axes: tuple[Axis, ...]
    mesh: DeviceMesh
    precision: PrecisionPolicy
    policy: SchedulePolicy
    grad_divisor: float
    device: torch.device

    def agreed_unit(self) -> AgreedUnit | None:
        """A unit of this setting, known to all of its ranks: they all must call, in the same order of units."""
        ranks = self.mesh.mesh.flatten().tolist()
        return agreed_unit(self.axes, ranks, self.device, self.policy.divergence_timeout)

    def describe(self) -> str:
        """What ranks must have in common."""
        sizes = {axis.name: axis.size for axis in self.axes}
        return f"{sizes}; {self.strategy}; {self.precision}; {self.policy}; grad_divisor {self.grad_divisor}"


def setting_of(
    mesh: DeviceMesh,
    placements: Placements | Sequence[Placements] | None,
    precision: PrecisionPolicy | None,
    policy: SchedulePolicy | None,
    grad_divisor: float,
) -> Setting:
    """Defaults filled in and everything checked; TypeError or ValueError, naming what does not fit."""
    precision = PrecisionPolicy() if precision is None else precision
    policy = SchedulePolicy() if policy is None else policy
    if not isinstance(precision, PrecisionPolicy):
        raise TypeError(f"precision: expected a PrecisionPolicy, got {precision!r}")
    if not isinstance(policy, SchedulePolicy):
        raise TypeError(f"policy: expected a SchedulePolicy, got {policy!r}")
    if isinstance(grad_divisor, bool) or not isinstance(grad_divisor, int | float):
        raise TypeError(f"grad_divisor: expected a number, got {grad_divisor!r}")
    if not (grad_divisor > 0 and math.isfinite(grad_divisor)):
        raise ValueError(f"grad_divisor: gradients are divided by it; expected a number above 0, got {grad_divisor}")
    strategy, axes, part = strategy_on(mesh, checked_strategy(placements))
    _check_group_kept(policy.reshard_after_forward, strategy, axes)
    device = mesh_device(mesh)
    if policy.offload and device.type == "cpu":
        raise ValueError("SchedulePolicy.offload: the mesh is on the host already, so there is nowhere to offload to")
    return Setting(strategy, axes, part, precision, policy, float(grad_divisor), device)


def _check_group_kept(size: bool | int, strategy: Strategy, axes: tuple[Axis, ...]) -> None:
    if isinstance(size, bool):
        return
    cut = [axis for placements, axis in zip(strategy, axes, strict=True) if isinstance(placements.parameter, Sharded)]
    if not cut:
        raise ValueError(
            f"SchedulePolicy.reshard_after_forward={size}: the strategy shards parameters over no axis of several "
            "ranks, so there is no smaller group to keep them in"
        )
    if cut[-1].size % size:
        raise ValueError(
            f"SchedulePolicy.reshard_after_forward={size}: expected a divisor of the {cut[-1].size} ranks of axis "
            f"{cut[-1].name!r}"
        )


def check_references(owned: OwnedParameters, module: nn.Module, unit: str) -> None:
    """Raise ValueError where ``module`` also reaches an owned parameter by a way that cannot be led to the weights."""
    names = {id(parameter): name for name, parameter in zip(owned.names, owned.parameters, strict=True)}
    for held in held_parameters(module.modules()):
        if id(held.parameter) in names and held.container is None:
            raise ValueError(
                f"parameter {names[id(held.parameter)]!r} of unit {unit!r} is also held by {held.where}, which would "
                "go on with the unsharded parameter; hold it in a list or a dict, or reach it by its name alone"
            )


def unit_layout(
    owned: OwnedParameters,
    setting: Setting,
    group_of: Callable[[str, nn.Parameter], str] | None = None,
    known: Mapping[int, TensorSpec] | None = None,
) -> Layout:
    """Layout of a unit's parameters over the ranks that its optimizer state is sharded over.

    ``group_of(name, parameter)``: tensors of different groups share no segment. ``known``: by identity, of parameters
    that are sharded already.
    """
    specs = []
    for name, parameter in zip(owned.names, owned.parameters, strict=True):
        spec = (known or {}).get(id(parameter))
        group = "" if group_of is None else group_of(name, parameter)
        if not isinstance(group, str):
            raise TypeError(f"group_of({name!r}, …): expected a name, got {group!r}")
        if spec is None:
            spec = TensorSpec(name, tuple(local_part(parameter).shape), parameter.dtype, parameter.requires_grad)
        specs.append(replace(spec, name=name, group=group))
    return plan_unit(specs, setting)


def plan_unit(specs: Sequence[TensorSpec], setting: Setting) -> Layout:
    """Layout of a unit of these tensors."""
    precision = setting.precision
    sizes = [dtype.itemsize for s in specs for dtype in (precision.main(s.dtype), precision.compute(s.dtype))]
    _, count = piece_of(optimizer_placements(setting.strategy), setting.axes)
    granularity = granularity_of(setting.strategy)
    return plan_layout(tuple(specs), count, granularity=granularity, itemsize=min(sizes, default=1))


def shard_unit(name: str, parameters: Sequence[torch.Tensor], layout: Layout, setting: Setting) -> UnitState:
    """This rank's main weights, copied out of the full ``parameters`` and cast to their main dtype.

    Of those that are ragged DTensors already, or on meta, there are zeros.
    """
    precision, offload = setting.precision, setting.policy.offload
    place = torch.device("cpu") if offload else setting.device
    with torch.inference_mode(False), torch.no_grad():
        flats = tuple(
            torch.zeros(segment.shard_size, dtype=precision.main(segment.dtype), device=place, pin_memory=offload)
            for segment in layout.segments
        )
        held = tuple(range(len(layout.segments)))
        main = Buffer(flats, layout, optimizer_placements(setting.strategy), setting.axes, held)
        for index, parameter in enumerate(parameters):
            if not is_ragged(parameter) and not parameter.is_meta:
                fill_shard(main, index, local_part(parameter.detach()))
    return UnitState(name, main, precision, setting.strategy, setting.grad_divisor, device=setting.device)


def fill_shard(main: Buffer, index: int, full: torch.Tensor) -> None:
    """Copy this rank's part of tensor ``index`` out of the full one, cast to the main dtype."""
    elements = main.owned_elements(index)
    if elements:
        main.owned(index).view(-1).copy_(full.reshape(-1)[elements.start : elements.stop])


def shard_tensors(
    name: str,
    tensors: Mapping[str, torch.Tensor],
    mesh: DeviceMesh,
    *,
    frozen: Sequence[str] = (),
    placements: Placements | Sequence[Placements] | None = None,
    precision: PrecisionPolicy | None = None,
    grad_divisor: float = 1.0,
) -> UnitState:
    """A unit made from plain full tensors by name, for those who write schedules from the primitives.

    Each rank keeps its part of its own values; all ranks of ``mesh`` must call, with the same names, shapes and
    dtypes. ``frozen``: names that get no gradient. ``placements``: default ``zero3()``, for a mesh of one dimension.
    ``grad_divisor``: what the mean of gradients over ranks is divided by besides. Raises ValueError or TypeError on
    the rank at fault, :class:`~fsdp_fn.groups.RankFault` on the others.
    """
    axes, device = axes_of(mesh), mesh_device(mesh)

    def make() -> tuple[UnitState, Setting]:
        unknown = [key for key in frozen if key not in tensors]
        if unknown or not tensors:
            raise ValueError(f"unit {name!r}: expected tensors, and frozen names among {list(tensors)}; got {unknown}")
        parameters = tuple(nn.Parameter(t.detach(), requires_grad=k not in frozen) for k, t in tensors.items())
        owned = OwnedParameters((), tuple(tensors), parameters, ())
        check_parameters(owned, name, mesh.device_type)
        setting = setting_of(mesh, placements, precision, None, grad_divisor)
        return shard_unit(name, parameters, unit_layout(owned, setting), setting), setting

    def describe(made: tuple[UnitState, Setting]) -> str:
        return f"{name}: {describe_layout(made[0].layout)}; {made[1].describe()}"

    return make_together(make, axes, device, f"shard_tensors({name!r})", describe)[0]


def describe_layout(layout: Layout) -> str:
    """What ranks must have in common before they shard: names, shapes, dtypes, gradients."""
    parts = [
        f"{spec.name} {list(spec.shape)} {spec.dtype}{'' if spec.requires_grad else ' frozen'}{_of_group(spec.group)}"
        for spec in layout.tensors
    ]
    return "; ".join(parts)


def _of_group(group: str) -> str:
    return f" of group {group!r}" if group else ""


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
