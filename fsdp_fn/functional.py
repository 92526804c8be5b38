"""The functional path: a bare template, explicit state, and pure functions between them.

Promises: ``apply`` and ``value_and_grad`` give the same outputs for the same template, state and arguments, on every
call; weights, buffers and optimizer state go in as arguments and come out as results. Full weights exist only around
the forward and backward of their unit. Random numbers are drawn from torch's generators, as in plain PyTorch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_fn.binding import BOUND, BoundRoot, BoundUnit, BufferSlot, UnitTemplate
from fsdp_fn.events import EventLog
from fsdp_fn.gradient_state import gradients_of, with_gradients, without_gradients
from fsdp_fn.groups import axis_of, default_mesh, mesh_device, raise_together
from fsdp_fn.passes import Bracket
from fsdp_fn.placement import Placements, Sharded, sharded_granularity, zero3
from fsdp_fn.policy import PrecisionPolicy, SchedulePolicy
from fsdp_fn.state import Axis, Buffer, ModelState, UnitState
from fsdp_fn.traced import TracedUnit, apply_traced, gather_function
from fsdp_fn.units import (
    check_parameters,
    check_references,
    checked_policies,
    copy_buffers,
    describe_layout,
    device_type_of,
    owned_parameters,
    registered_buffers,
    shard_unit,
    unit_layout,
)

LossFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True, eq=False)
class Template:
    """A model without its weights: bare modules (on the meta device), their units, and how they are to be used.

    ``units[-1]`` is the root. A template may serve any number of states, one application at a time.
    """

    module: nn.Module
    units: tuple[UnitTemplate, ...]
    buffer_slots: tuple[BufferSlot, ...]
    axis: Axis
    device: torch.device
    precision: PrecisionPolicy
    policy: SchedulePolicy
    log: EventLog | None = None


class _TemplateModule:
    """Mixed into the class of a unit's module in a template."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with the weights of the state that is being applied."""
        bound: BoundUnit | TracedUnit | None = self.__dict__.get(BOUND)
        if bound is None:
            raise RuntimeError(
                f"{type(self).__name__} is part of a template, which holds no weights: call fsdp_fn.apply(template, "
                "state, …)"
            )
        return bound.run(super().forward, args, kwargs)  # type: ignore[misc]


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    units: Sequence[str | type[nn.Module]] = (),
    placements: Placements | None = None,
    precision: PrecisionPolicy | None = None,
    policy: SchedulePolicy | None = None,
) -> tuple[Template, ModelState]:
    """Split ``model`` into a template and this rank's sharded state. ``model`` itself is not changed.

    ``units``: fully-qualified names or module classes; each module named, or of such a class, is a unit, and the rest
    of the model is the root unit. All ranks of the mesh must call, with equal models: each keeps its part of its own
    values. ``mesh``: one dimension; default, all ranks. ``placements``: default ``zero3()``.

    Raises ValueError or TypeError on the rank where something does not fit, naming unit and parameter, and
    :class:`~fsdp_fn.groups.RankFault` on the others.
    """
    mesh = default_mesh(device_type_of(model)) if mesh is None else mesh
    axis, device = axis_of(mesh), mesh_device(mesh)
    made: tuple[Template, ModelState] | None = None
    fault: Exception | None = None
    agreed = ""
    try:
        granularity = sharded_granularity(zero3() if placements is None else placements)
        precision, policy = checked_policies(precision, policy)
        made = _shard(model, axis, device, units, Sharded(granularity), precision, policy)
        layouts = "; ".join(f"{unit.name}: {describe_layout(unit.layout)}" for unit in made[0].units)
        agreed = f"{layouts}; {precision}; {policy}; {granularity}"
    except Exception as error:
        fault = error
    raise_together(fault, axis, device, agreed, f"shard({type(model).__name__})")
    assert made is not None
    return made


def _shard(
    model: nn.Module,
    axis: Axis,
    device: torch.device,
    units: Sequence[str | type[nn.Module]],
    placement: Sharded,
    precision: PrecisionPolicy,
    policy: SchedulePolicy,
) -> tuple[Template, ModelState]:
    paths = _unit_paths(model, units)
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to shard")
    boundaries = {id(model.get_submodule(path)) for path in paths if path}
    all_owned, owners = {}, dict[int, str]()
    for path in paths:
        owned = owned_parameters(model.get_submodule(path), lambda child: id(child) in boundaries, path)
        if path and not owned.parameters:
            raise ValueError(f"unit {path!r} has no parameters of its own")
        check_parameters(owned, path, device.type)
        check_references(owned, model, path)
        all_owned[path] = owned
        for name, parameter in zip(owned.names, owned.parameters, strict=True):
            if owners.setdefault(id(parameter), path) != path:
                raise ValueError(
                    f"parameter {name!r} of unit {path!r} is tied to one of unit {owners[id(parameter)]!r}; put both "
                    "under one unit"
                )
    bare = _bare_copy(model)
    bare_boundaries = {id(bare.get_submodule(path)) for path in paths if path}
    templates, states = [], {}
    for path, owned in all_owned.items():
        layout = unit_layout(owned, axis.size, placement.granularity, precision)
        module = bare.get_submodule(path)
        bare_owned = owned_parameters(module, lambda child: id(child) in bare_boundaries, path)
        states[path] = shard_unit(path, owned.parameters, layout, axis, precision, device)
        templates.append(UnitTemplate(path, module, bare_owned, layout, gather_function(states[path])))
    for unit in templates:
        unit.module.__class__ = _template_class(cast(Any, type(unit.module)))
    slots = tuple(BufferSlot(name, holder, key, empty) for name, holder, key, empty in registered_buffers(bare))
    buffers = copy_buffers({name: tensor for name, _, _, tensor in registered_buffers(model)})
    template = Template(bare, tuple(templates), slots, axis, device, precision, policy)
    return template, ModelState(states, buffers)


def _unit_paths(model: nn.Module, units: Sequence[object]) -> list[str]:
    """Paths of the units, nested ones and the root last, in the order of the module tree."""
    if isinstance(units, str):
        raise TypeError(f"units: expected a sequence of names or nn.Module classes, got the string {units!r}")
    named = dict(model.named_modules())
    chosen: set[str] = set()
    for unit in units:
        if isinstance(unit, str):
            if unit not in named:
                raise ValueError(f"units: {type(model).__name__} has no module {unit!r}")
            chosen.add(unit)
        elif isinstance(unit, type) and issubclass(unit, nn.Module):
            found = {path for path, module in named.items() if isinstance(module, unit)}
            if not found:
                raise ValueError(f"units: {type(model).__name__} has no module of class {unit.__name__}")
            chosen |= found
        else:
            raise TypeError(f"units: expected names or nn.Module classes, got {unit!r}")
    for path in chosen:
        if type(named[path]).forward is nn.Module.forward:
            raise ValueError(f"unit {path!r} has no forward of its own, so its weights would never be gathered")
    return [path for path in named if path in chosen and path] + [""]


def _bare_copy(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters and buffers are meta tensors, ties kept."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for _, _, _, buffer in registered_buffers(model):
        memo.setdefault(id(buffer), torch.empty_like(buffer, device="meta"))
    return copy.deepcopy(model, memo)


@functools.cache
def _template_class(cls: type[Any]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_TemplateModule, cls), names)


def apply(template: Template, state: ModelState, *args: Any, **kwargs: Any) -> tuple[Any, ModelState]:
    """Run the model's forward on ``args`` with the weights of ``state``; the output and the state after it.

    Module buffers that the forward changes come back changed in the new state; those of ``state`` stay as they are.
    Differentiable with respect to the arguments and to main-weight shards that require a gradient (see
    :func:`with_gradients`). All ranks must call. Eager, or inside ``torch.compile(fullgraph=True)``.
    """
    _check_state(template, state)
    if torch.compiler.is_compiling():
        output, buffers = apply_traced(template.module, template.units, state, template.buffer_slots, args, kwargs)
        return output, dataclasses.replace(state, buffers=buffers)
    buffers = copy_buffers(state.buffers)
    bracket = Bracket(template.policy.release, template.log)
    *nested, top = template.units
    others = [BoundUnit(unit, state.units[unit.name], bracket, template.device) for unit in nested]
    root = BoundRoot(
        top, state.units[top.name], bracket, template.device, others, template.buffer_slots, buffers
    )  # fmt: skip
    with _bound(root):
        output = template.module(*args, **kwargs)
        _refuse_new_buffers(template)
    # Copies: a checkpointed module runs again in backward, and changes its buffers then.
    return output, dataclasses.replace(state, buffers=copy_buffers(root.buffers))


def _refuse_new_buffers(template: Template) -> None:
    """A buffer that the forward registered has no place in the state: take it off the template, and say so."""
    known = {(id(slot.buffers), slot.key) for slot in template.buffer_slots}
    new = []
    for path, module in template.module.named_modules():
        for key in [key for key, value in module._buffers.items() if value is not None]:
            if (id(module._buffers), key) not in known:
                del module._buffers[key]
                new.append(f"{path}.{key}" if path else key)
    if new:
        raise RuntimeError(
            f"apply: the forward registered the buffers {new}, which the state of the units has no place "
            "for; register them where the model is built"
        )


@contextmanager
def _bound(root: BoundRoot) -> Iterator[None]:
    if root.module.__dict__.get(BOUND) is not None:
        raise RuntimeError("the template is in use: apply(template, …) was called from inside its own forward")
    root.bind()
    try:
        yield
    finally:
        root.unbind()


def value_and_grad(
    template: Template, loss_function: LossFunction
) -> Callable[..., tuple[torch.Tensor, dict[str, Buffer], ModelState]]:
    """A function ``(state, *args) -> (loss, gradients, state)``.

    ``loss_function(model, *args)`` returns a scalar; ``model`` is a callable that applies the template to the state,
    and may be called any number of times. ``loss`` is this rank's; ``gradients`` are averaged over ranks: one sharded
    buffer per unit, in the main weights' dtype, zeros where the loss does not reach. Microbatches add up with
    :func:`add_gradients`. Other leaves that the loss depends on and that require a gradient get it in their ``.grad``,
    as from any ``loss.backward()``.
    """

    def step(state: ModelState, *args: Any) -> tuple[torch.Tensor, dict[str, Buffer], ModelState]:
        current = with_gradients(state)

        def model(*inputs: Any, **keywords: Any) -> Any:
            nonlocal current
            output, current = apply(template, current, *inputs, **keywords)
            return output

        with torch.enable_grad():
            loss = loss_function(model, *args)
            _check_loss(loss)
        if loss.requires_grad:
            loss.backward()
        return loss.detach(), gradients_of(current), without_gradients(current)

    return step


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"value_and_grad: expected loss_function to return a tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(f"value_and_grad: expected loss_function to return a scalar, got shape {tuple(loss.shape)}")


def recording(template: Template, log: EventLog) -> Template:
    """The same template, whose eager applications report to ``log``."""
    return dataclasses.replace(template, log=log)


def _check_state(template: Any, state: Any) -> None:
    if not isinstance(template, Template) or not isinstance(state, ModelState):
        got = f"({type(template).__name__}, {type(state).__name__}, …)"
        raise TypeError(f"apply: expected (Template, ModelState, …), got {got}")
    units: dict[str, UnitState] = state.units
    names = [unit.name for unit in template.units]
    if list(units) != names:
        raise ValueError(f"state has units {list(state.units)}, the template {names}: they must come from one shard()")
    for unit in template.units:
        given = units[unit.name]
        if given.axis != template.axis:
            raise ValueError(f"unit {unit.name!r}: state is on {given.axis}, the template on {template.axis}")
        if given.precision != template.precision:
            raise ValueError(f"unit {unit.name!r}: state has {given.precision}, the template {template.precision}")
        if given.layout != unit.layout:
            raise ValueError(
                f"unit {unit.name!r}: state holds {describe_layout(given.layout)}, by {given.layout.granularity}; the "
                f"template {describe_layout(unit.layout)}, by {unit.layout.granularity}"
            )
    expected = [slot.name for slot in template.buffer_slots]
    if list(state.buffers) != expected:
        raise ValueError(f"state has module buffers {list(state.buffers)}, the template {expected}")
