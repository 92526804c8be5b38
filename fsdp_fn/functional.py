"""The functional path: a bare template, explicit state, and pure functions between them.

Promises: ``apply`` and ``value_and_grad`` give the same outputs for the same template, state and arguments, on every
call; weights, buffers and optimizer state go in as arguments and come out as results. Full weights exist only around
the forward and backward of their unit. Random numbers are drawn from torch's generators, as in plain PyTorch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_fn.binding import BOUND, BoundRoot, BoundUnit, BufferSlot, UnitTemplate, naming_bare_weights
from fsdp_fn.collectives import refresh_planes
from fsdp_fn.events import EventLog
from fsdp_fn.gradient_state import gradients_of, with_gradients, without_gradients
from fsdp_fn.groups import axes_of, default_mesh, make_together, mesh_device
from fsdp_fn.initialization import Init, Initialization
from fsdp_fn.passes import Bracket
from fsdp_fn.placement import Placements
from fsdp_fn.policy import PrecisionPolicy, SchedulePolicy
from fsdp_fn.state import Buffer, ModelState, UnitState, needs_planes
from fsdp_fn.traced import TracedUnit, apply_traced, gather_functions
from fsdp_fn.unit_plans import ModelPlan, UnitPlan, first_state
from fsdp_fn.units import (
    OwnedParameters,
    Setting,
    check_parameters,
    check_references,
    copy_buffers,
    describe_layout,
    device_type_of,
    owned_parameters,
    registered_buffers,
    setting_of,
    ties_moved_up,
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
    device: torch.device
    log: EventLog | None = None


@dataclass(frozen=True)
class UnitSpec:
    """A unit that is sharded otherwise than the rest of the model: experts over a smaller mesh, for one.

    ``of``: a module's fully-qualified name, or a class: each module of it is a unit. What is None is as for the model.
    ``grad_divisor``: what the mean of gradients over the unit's ranks is divided by besides.
    """

    of: str | type[nn.Module]
    mesh: DeviceMesh | None = None
    placements: Placements | Sequence[Placements] | None = None
    precision: PrecisionPolicy | None = None
    policy: SchedulePolicy | None = None
    grad_divisor: float | None = None


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
    units: Sequence[str | type[nn.Module] | UnitSpec] = (),
    placements: Placements | Sequence[Placements] | None = None,
    precision: PrecisionPolicy | None = None,
    policy: SchedulePolicy | None = None,
    grad_divisor: float = 1.0,
    group_of: Callable[[str, nn.Parameter], str] | None = None,
    init: Init | None = None,
    broadcast: bool = False,
) -> tuple[Template, ModelState]:
    """Split ``model`` into a template and this rank's sharded state. ``model`` itself is not changed.

    ``units``: fully-qualified names or module classes; each module named, or of such a class, is a unit, and the rest
    of the model is the root unit. A :class:`UnitSpec` says besides how its units differ. All ranks of the mesh must
    call, with equal models: each keeps its part of its own values. ``mesh``: default, all ranks. ``placements``: a
    strategy, of ``fsdp_fn.placement``; default ``zero3()``. ``precision``: its output dtype is the whole model's.
    ``grad_divisor``: what the mean of gradients over ranks is divided by besides. ``group_of(name, parameter)``:
    parameters of different groups get flat tensors of their own. ``init``, ``broadcast``: for models on the meta
    device, and for values of the first rank alone, unit by unit and nested ones first: as for
    :func:`~fsdp_fn.module.fully_shard`.

    Raises ValueError or TypeError on the rank where something does not fit, naming unit and parameter, RuntimeError
    where ``init`` raised, and :class:`~fsdp_fn.groups.RankFault` on the others.
    """
    mesh = default_mesh(device_type_of(model)) if mesh is None else mesh
    axes, device, what = axes_of(mesh), mesh_device(mesh), f"shard({type(model).__name__})"

    def make_plan() -> ModelPlan:
        whole = UnitSpec("", mesh, placements, precision, policy, grad_divisor)
        return ModelPlan(_plan(model, device, units, whole, group_of), Initialization(init, broadcast))

    plan = make_together(make_plan, axes, device, what, ModelPlan.describe)
    state = first_state(model, plan, axes, device, what)
    # A copy of the model as it is after init, which may have set attributes.
    template = make_together(lambda: _template(model, plan, state, device), axes, device, what)
    # Once all ranks have made theirs: a unit's place among those that ranks agree on is the same on all.
    agreed_units = tuple(dataclasses.replace(unit, agreed=unit.setting.agreed_unit()) for unit in template.units)
    return dataclasses.replace(template, units=agreed_units), state


def _plan(
    model: nn.Module,
    device: torch.device,
    units: Sequence[str | type[nn.Module] | UnitSpec],
    whole: UnitSpec,
    group_of: Callable[[str, nn.Parameter], str] | None,
) -> dict[str, UnitPlan]:
    settings = {path: _setting(path, spec, whole) for path, spec in _unit_paths(model, units).items()}
    if not any(True for _ in model.parameters()):
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to shard")
    all_owned = _owned_by_units(model, settings)
    for path, owned in all_owned.items():
        if path and not owned.slots:
            raise ValueError(f"unit {path!r} has no parameters of its own")
        check_parameters(owned, path, device.type, may_be_meta=True)
        check_references(owned, model, path)
    own, all_owned = all_owned, ties_moved_up(all_owned, model)
    _check_ties(own, all_owned, settings)
    return {
        path: UnitPlan(path, owned, unit_layout(owned, settings[path], group_of), settings[path])
        for path, owned in all_owned.items()
    }


def _check_ties(
    before: Mapping[str, OwnedParameters], after: Mapping[str, OwnedParameters], settings: Mapping[str, Setting]
) -> None:
    """Raise ValueError where a parameter would move up to a unit that means something else by its gradient."""
    held = {id(parameter): path for path, owned in after.items() for parameter in owned.parameters}
    for path, owned in before.items():
        for name, parameter in zip(owned.names, owned.parameters, strict=True):
            there, here = settings[held[id(parameter)]], settings[path]
            what = (
                f"parameter {name!r} of unit {path!r} is tied, and belongs to unit {held[id(parameter)]!r} around all"
            )
            if here.mesh != there.mesh:
                raise ValueError(f"{what}, on another mesh, {there.mesh}, not {here.mesh}; put both on one mesh")
            if here.grad_divisor != there.grad_divisor:
                raise ValueError(f"{what}, whose grad_divisor is {there.grad_divisor}, not {here.grad_divisor}")
            if here.precision.main(parameter.dtype) != there.precision.main(parameter.dtype):
                raise ValueError(f"{what}, whose main dtype is another; give both the same")


def _template(model: nn.Module, plan: ModelPlan, state: ModelState, device: torch.device) -> Template:
    bare = _bare_copy(model)
    all_bare = ties_moved_up(_owned_by_units(bare, plan.units), bare)
    templates = []
    for path, unit in plan.units.items():
        functions, module = gather_functions(state.units[path]), bare.get_submodule(path)
        templates.append(UnitTemplate(path, module, all_bare[path], unit.layout, unit.setting, functions))
    for made in templates:
        made.module.__class__ = _template_class(cast(Any, type(made.module)))
    slots = tuple(BufferSlot(name, holder, key, empty) for name, holder, key, empty in registered_buffers(bare))
    return Template(bare, tuple(templates), slots, device)


def _owned_by_units(model: nn.Module, paths: Iterable[str]) -> dict[str, OwnedParameters]:
    boundaries = {id(model.get_submodule(path)) for path in paths if path}
    return {
        path: owned_parameters(model.get_submodule(path), lambda child: id(child) in boundaries, path, model)
        for path in paths
    }


def _setting(path: str, spec: UnitSpec, whole: UnitSpec) -> Setting:
    if path and whole.precision is not None:
        # What the model returns is cast, not what its parts hand to one another.
        whole = dataclasses.replace(whole, precision=dataclasses.replace(whole.precision, output_dtype=None))
    given = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    for name, value in given.items():
        given[name] = getattr(whole, name) if value is None else value
    del given["of"]
    return setting_of(**given)


def _unit_paths(model: nn.Module, units: Sequence[object]) -> dict[str, UnitSpec]:
    """Paths of the units and how they are chosen, nested ones and the root last, in the order of the module tree."""
    if isinstance(units, str):
        raise TypeError(f"units: expected a sequence of names or nn.Module classes, got the string {units!r}")
    named = dict(model.named_modules())
    chosen: dict[str, UnitSpec] = {}
    for given in units:
        spec = given if isinstance(given, UnitSpec) else UnitSpec(cast(Any, given))
        of: object = spec.of
        if isinstance(of, str):
            if of not in named:
                raise ValueError(f"units: {type(model).__name__} has no module {of!r}")
            found = [of]
        elif isinstance(of, type) and issubclass(of, nn.Module):
            found = [path for path, module in named.items() if isinstance(module, of)]
            if not found:
                raise ValueError(f"units: {type(model).__name__} has no module of class {of.__name__}")
        else:
            raise TypeError(f"units: expected names or nn.Module classes, got {given!r}")
        for path in found:
            if chosen.setdefault(path, spec) != spec:
                raise ValueError(f"units: module {path!r} is named twice, as {chosen[path]} and as {spec}")
    for path in chosen:
        if type(named[path]).forward is nn.Module.forward:
            raise ValueError(f"unit {path!r} has no forward of its own, so its weights would never be gathered")
    return {path: chosen[path] for path in named if path in chosen and path} | {"": chosen.get("", UnitSpec(""))}


def _bare_copy(model: nn.Module) -> nn.Module:
    """A copy of the model whose parameters and buffers are meta tensors, ties kept."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        empty = torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for _, _, _, buffer in registered_buffers(model):
        memo.setdefault(id(buffer), torch.empty_like(buffer, device="meta"))
    for module in model.modules():
        for value in vars(module).values():
            # What a hook computes from weights before each forward (weight_norm, pruning) cannot be copied.
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                memo[id(value)] = torch.empty_like(value, device="meta")
    return copy.deepcopy(model, memo)


@functools.cache
def _template_class(cls: type[Any]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (_TemplateModule, cls), names)


def apply(template: Template, state: ModelState, *args: Any, **kwargs: Any) -> tuple[Any, ModelState]:
    """Run the model's forward on ``args`` with the weights of ``state``; the output and the state after it.

    Module buffers that the forward changes come back changed in the new state; those of ``state`` stay as they are.
    Weights that the strategy keeps at rest apart from the main weights (ZeRO-1 and 2, HFSDP) are gathered if ``state``
    has none, and come back in the new state: hand that one on, and they are gathered once per update. Who changes main
    weights by hand goes on with :func:`~fsdp_fn.optim.next_version` of the state.

    Differentiable with respect to the arguments and to leaves from :func:`with_gradients`. All ranks must call. Eager,
    or inside ``torch.compile(fullgraph=True)``.
    """
    _check_state(template, state)
    state = refresh(state)
    if torch.compiler.is_compiling():
        output, buffers = apply_traced(template.module, template.units, state, template.buffer_slots, args, kwargs)
        return output, dataclasses.replace(state, buffers=buffers)
    buffers = copy_buffers(state.buffers)
    *nested, top = template.units
    bracket = Bracket(top.setting.policy.release, template.log)
    others = [BoundUnit(unit, state.units[unit.name], bracket) for unit in nested]
    root = BoundRoot(top, state.units[top.name], bracket, others, template.buffer_slots, buffers)
    with _bound(template, root), naming_bare_weights(template.module, template.units):
        output = template.module(*args, **kwargs)
        _refuse_new_buffers(template)
    # Copies: a checkpointed module runs again in backward, and changes its buffers then.
    return output, dataclasses.replace(state, buffers=copy_buffers(root.buffers))


def refresh(state: ModelState) -> ModelState:
    """The state with all planes that its strategies keep at rest; itself where it has them. All ranks must call."""
    if not any(needs_planes(unit) and unit.planes is None for unit in state.units.values()):
        return state
    return dataclasses.replace(state, units={name: refresh_planes(unit) for name, unit in state.units.items()})


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
def _bound(template: Template, root: BoundRoot) -> Iterator[None]:
    if template.module.__dict__.get(BOUND) is not None:
        raise RuntimeError("the template is in use: apply(template, …) was called from inside its own forward")
    root.bind()
    try:
        yield
    finally:
        root.unbind()


def value_and_grad(
    template: Template, loss_function: LossFunction, *, last_microbatch: bool = True
) -> Callable[..., tuple[torch.Tensor, dict[str, Buffer], ModelState]]:
    """A function ``(state, *args) -> (loss, gradients, state)``.

    ``loss_function(model, *args)`` returns a scalar; ``model`` is a callable that applies the template to the state,
    and may be called any number of times. ``loss`` is this rank's; ``gradients`` are averaged over ranks: one sharded
    buffer per unit, in the main weights' dtype, zeros where the loss does not reach. Other leaves that the loss
    depends on and that require a gradient get it in their ``.grad``, as from any ``loss.backward()``.

    Microbatches: without ``last_microbatch`` gradients are as the strategy sums them between microbatches; add them up
    with :func:`add_gradients` and complete the sum with :func:`finish_gradients`. With it each result is complete, and
    may be added up as well, at the cost of completing each.
    """

    def step(state: ModelState, *args: Any) -> tuple[torch.Tensor, dict[str, Buffer], ModelState]:
        current = with_gradients(state, last_microbatch=last_microbatch)

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
        given, setting = units[unit.name], unit.setting
        wanted = (setting.axes, setting.strategy, setting.precision, setting.grad_divisor)
        found = (given.axes, given.strategy, given.precision, given.grad_divisor)
        for what, has, expects in zip(("axes", "strategy", "precision", "grad_divisor"), found, wanted, strict=True):
            if has != expects:
                raise ValueError(
                    f"unit {unit.name!r}: the state's {what}: expected {expects}, as the template's; got {has}"
                )
        if given.layout != unit.layout:
            raise ValueError(
                f"unit {unit.name!r}: state holds {describe_layout(given.layout)}, by {given.layout.granularity}; the "
                f"template {describe_layout(unit.layout)}, by {unit.layout.granularity}"
            )
    expected = [slot.name for slot in template.buffer_slots]
    if list(state.buffers) != expected:
        raise ValueError(f"state has module buffers {list(state.buffers)}, the template {expected}")
