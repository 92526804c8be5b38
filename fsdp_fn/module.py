"""The wrapper: ``fully_shard`` turns a module, in place, into a sharded one with DTensor parameters.

Promises: thin. Layout, ranges, planes, packing and reduction are decided by the rooms above; here their results are
kept on a live module. Names, ``isinstance`` and the optimizer's habits stay; the parameters are DTensors over views of
the flat main weights, owned by whole rows. Nothing points back at the module tree, so that deleting the model frees its
memory at once. On an error at set-up no rank's module is changed.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_fn.broadcast import broadcast_values
from fsdp_fn.escapes import held_parameters
from fsdp_fn.events import EventLog
from fsdp_fn.face import Borrowed, ShardedUnit
from fsdp_fn.groups import axes_of, default_mesh, make_together, mesh_device
from fsdp_fn.holders import hold, holder, name_of_original, note_original
from fsdp_fn.initialization import BufferValue, Init, Initialization, UnitValues, fill_shards, put_buffers, unit_values
from fsdp_fn.passes import Bracket, in_backward
from fsdp_fn.placement import Placements
from fsdp_fn.policy import PrecisionPolicy, SchedulePolicy
from fsdp_fn.ragged import RaggedTensor, UnfinishedGradient, restore_optimizer_state
from fsdp_fn.relayout import check_movable, lay_out_for_gradients, successor
from fsdp_fn.state import UnitState
from fsdp_fn.ties import Tie, as_sharded, check_ties, find_ties, with_ties
from fsdp_fn.units import (
    OwnedParameters,
    Setting,
    check_parameters,
    check_references,
    describe_layout,
    device_type_of,
    owned_parameters,
    setting_of,
    shard_unit,
    unit_layout,
)

ModuleType = TypeVar("ModuleType", bound=nn.Module)

_materialised_buffers = WeakTensorKeyDictionary()
"""Module buffers on meta that a unit gave values: those values, for other units whose modules share them."""


@torch.compiler.disable(reason="a wrapped module gathers and releases storage, which does not trace")  # type: ignore[untyped-decorator]
def run_eagerly(module: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``forward``, a method of the wrapped ``module``, with its unit's full weights in place.

    ``torch.compile`` of a model compiles around it; whole graphs are for the functional path.
    """
    unit: ShardedUnit = module._fsdp_unit
    if unit.outdated() and unit.idle and not in_backward():
        _replace(module, unit, lay_out_for_gradients(unit))
    return module._fsdp_unit.run(forward, args, kwargs)


_live_units: weakref.WeakSet[ShardedUnit] = weakref.WeakSet()
"""Every wrapped unit: an optimizer's step changes the weights of those whose parameters it holds."""


class FsdpModule:
    """Mixed into the class of a module that :func:`fully_shard` wrapped."""

    _fsdp_unit: ShardedUnit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with its unit's full weights in place."""
        return run_eagerly(self, super().forward, args, kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``; ``assign=True`` is refused, for it would part parameters from weights."""
        if assign:
            _refuse_assign()
        return super().load_state_dict(state_dict, strict=strict)  # type: ignore[misc]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        """As ``nn.Module``'s; here an ``assign=True`` that came from a module above is refused before it acts."""
        if local_metadata.get("assign_to_params_buffers"):
            _refuse_assign()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)  # type: ignore[misc]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """``.to()``, ``.half()``, ``.cuda()`` and the like: what would move or cast sharded weights is refused."""
        for module in self.modules():  # type: ignore[attr-defined]
            if isinstance(module, FsdpModule):
                module._fsdp_unit.check_unchanged_by(fn)
        for module in self.modules():  # type: ignore[attr-defined]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = fn(buffer)
            for parameter in module._parameters.values():
                if parameter is not None and not isinstance(parameter, RaggedTensor):
                    parameter.data = fn(parameter.data)  # one that was ignored
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce_ex__(4)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """``copy``, ``pickle`` and ``torch.save`` of the module: what they made would share shards, or lose them."""
        raise TypeError(
            f"{type(self).__name__} is sharded and cannot be copied or pickled: copy the module before fully_shard; to "
            "save it, save its state_dict() or call save_checkpoint"
        )


def _refuse_assign() -> NoReturn:
    raise ValueError(
        "load_state_dict(assign=True) would replace sharded parameters by others that the gathers do not read; "
        "load with assign=False, which copies"
    )


def fully_shard(
    module: ModuleType,
    mesh: DeviceMesh | None = None,
    *,
    placements: Placements | Sequence[Placements] | None = None,
    precision: PrecisionPolicy | None = None,
    policy: SchedulePolicy | None = None,
    grad_divisor: float = 1.0,
    group_of: Callable[[str, nn.Parameter], str] | None = None,
    init: Init | None = None,
    broadcast: bool = False,
    ignored: Collection[nn.Parameter] = (),
) -> ModuleType:
    """Shard ``module``'s parameters over ``mesh``, in place, as one unit, and return it.

    Call it bottom-up: on each block, then on the root, which takes the parameters that are left. Build the optimizer
    afterwards. All ranks of the mesh must call, with equal models: each rank keeps its part of its own values.

    ``mesh``: default, all ranks. ``placements``: a strategy, of ``fsdp_fn.placement``, whose axes are found in the mesh
    by name; default ``zero3()`` on a mesh of one dimension. ``precision``, ``policy``: see their classes; the outermost
    unit's release policy is used by all. ``grad_divisor``: what the mean of gradients over the unit's ranks is divided
    by besides: the size of the expert group, where gradients are sums over it already. ``group_of(name, parameter)``:
    parameters of different groups get flat tensors of their own (see ``flat_shards``).

    ``init``: what gives values to parameters and buffers on the meta device, after the unit's got memory on the mesh's
    device; for each module that itself owns one, children before parents. ``"reset_parameters"`` calls the module's
    method of this name (or ``_reset_parameters``), a function is called with the module. It has to write all of them,
    in place (a buffer may be assigned anew); what holds values already keeps them. Random numbers are drawn for full
    tensors, so equally seeded ranks agree. ``broadcast``: all ranks shard the values of the unit's first rank (buffers
    as well) in place of their own; only there are values, or ``init`` for what is on meta, needed. ``ignored``:
    parameters that stay as they are, whole on each rank; to keep them alike is the caller's.

    Raises ValueError or TypeError on the rank where something does not fit, naming unit and parameter, RuntimeError
    where ``init`` raised, and :class:`~fsdp_fn.groups.RankFault` on the others; no module is changed then.
    """
    name = type(module).__name__
    mesh = default_mesh(device_type_of(module)) if mesh is None else mesh
    axes, device = axes_of(mesh), mesh_device(mesh)

    def prepare() -> _Prepared:
        first = Initialization(init, broadcast)
        setting = setting_of(mesh, placements, precision, policy, grad_divisor)
        owned, ties, borrowed = _owned(module, name, mesh.device_type, setting, ignored)
        layout = unit_layout(owned, setting, group_of, {id(tie.parameter): tie.spec() for tie in ties})
        state = shard_unit(name, owned.parameters, layout, setting)
        unit = ShardedUnit(owned, state, setting, Bracket(setting.policy.release), borrowed)
        # Last, for making a unit takes memory for full weights as well, and gives it back.
        values = unit_values(owned, module, name, setting, first, _materialised_buffers)
        fill_shards(state, values, owned.parameters)
        agreed = f"{name}: {describe_layout(layout)}; {setting.describe()}; {first.describe(values)}"
        return _Prepared(owned, unit, _without_ties(module, ties), values, agreed)

    prepared = make_together(prepare, axes, device, f"fully_shard({name})", lambda made: made.agreed)
    values = prepared.values
    buffers = broadcast_values(values, prepared.unit.state, device) if broadcast else values.buffers
    _commit(module, prepared.owned, prepared.unit, prepared.successors, buffers)
    return module


class _Prepared(NamedTuple):
    """All that :func:`fully_shard` makes before it changes anything; ``agreed``: what ranks must have in common."""

    owned: OwnedParameters
    unit: ShardedUnit
    successors: list[tuple[nn.Module, ShardedUnit, ShardedUnit]]
    values: UnitValues
    agreed: str


def _nested(module: nn.Module) -> dict[str, Any]:
    return {path: child for path, child in module.named_modules() if isinstance(child, FsdpModule)}


def _without_ties(module: nn.Module, ties: Sequence[Tie]) -> list[tuple[nn.Module, ShardedUnit, ShardedUnit]]:
    """Nested modules whose units give up tied parameters, those units, and what takes their places."""
    made = []
    for child in _nested(module).values():
        unit = child._fsdp_unit
        given = {tie.index for tie in ties if tie.unit is unit}
        if given:
            kept = [index for index in range(len(unit.parameters)) if index not in given]
            made.append((child, unit, successor(unit, kept)))
    return made


def _owned(
    module: nn.Module, name: str, device_type: str, setting: Setting, ignored: Collection[nn.Parameter]
) -> tuple[OwnedParameters, list[Tie], tuple[Borrowed, ...]]:
    if isinstance(module, FsdpModule):
        raise ValueError(f"{name} is wrapped already")
    above = next((unit for unit in _live_units if unit.modules.has(module)), None)
    if above is not None:
        raise ValueError(
            f"{name} is part of {above.label} ({type(above.modules.alive()[0]).__name__}), which was wrapped before it "
            "and gathers its weights: call fully_shard on nested modules first"
        )
    if type(module).forward is nn.Module.forward and "forward" not in vars(module):
        raise ValueError(f"{name} has no forward of its own, so its weights would never be gathered: wrap its children")
    if "forward" in vars(module):
        raise ValueError(f"{name} has its forward set on the instance, which would run without its weights: unset it")
    every = owned_parameters(module, lambda child: isinstance(child, FsdpModule), ignored=ignored)
    nested = {path: child._fsdp_unit for path, child in _nested(module).items()}
    if not every.parameters and not nested:
        raise ValueError(f"{name} has no parameters: there is nothing to shard")
    owned, ties, borrowed = find_ties(every, module, nested, holder)
    check_parameters(owned, name, device_type, [axis.name for axis in setting.axes], may_be_meta=True)
    check_references(owned, module, name)
    for held in held_parameters(module.modules()):
        sharded_as = name_of_original(held.parameter)
        if sharded_as is not None and held.container is None:
            raise ValueError(
                f"{held.where} holds {sharded_as}, which a unit of its own has sharded "
                "since; hold it in a list or a dict, or reach it by its name alone"
            )
    for path, parameter in zip(owned.names, owned.parameters, strict=True):
        if not parameter.shape:
            raise ValueError(
                f"parameter {path!r} of {name} has no dimension, so no rows to share out: give it shape (1,)"
            )
    check_ties(ties, setting, name)
    held_now = [(c, key, every.parameters[index]) for c, key, index in every.slots]
    held_now += [(slot.container, slot.key, slot.container[slot.key]) for u in nested.values() for slot in u.borrowed]
    return with_ties(owned, [(c, key, as_sharded(held, holder)) for c, key, held in held_now], ties), ties, borrowed


def _commit(
    module: nn.Module,
    owned: OwnedParameters,
    sharded: ShardedUnit,
    successors: Sequence[tuple[nn.Module, ShardedUnit, ShardedUnit]],
    buffers: Sequence[BufferValue],
) -> None:
    """Change the module; nothing here can fail half-way."""
    put_buffers(owned.modules, buffers)
    _materialised_buffers.update({buffer.held: buffer.value for buffer in buffers if buffer.held.is_meta})
    sharded.adopt()
    for child, unit, made in successors:
        made.adopt()
        _replace(child, unit, made)
    hold(sharded)
    _live_units.add(sharded)
    for path, parameter, face in zip(owned.names, owned.parameters, sharded.parameters, strict=True):
        if parameter is not face:
            note_original(parameter, face, f"{path!r} of {type(module).__name__}")
    for parameters, name, index in owned.slots:
        parameters[name] = sharded.parameters[index]
    for slot in sharded.borrowed:
        slot.container[slot.key] = as_sharded(slot.container[slot.key], holder)
    module.__dict__["_fsdp_unit"] = sharded
    module.__class__ = _wrapped_class(cast(Any, type(module)))
    sharded.agreed = sharded.setting.agreed_unit()
    _lead_to_units(module)
    for path, child in _nested(module).items():
        unit = child._fsdp_unit
        unit.rename(path)
        unit.bracket = sharded.bracket


def _replace(module: Any, unit: ShardedUnit, made: ShardedUnit) -> None:
    """Put a unit in the place of one that is laid out anew."""
    unit.retire()
    _live_units.discard(unit)
    hold(made)
    _live_units.add(made)
    module.__dict__["_fsdp_unit"] = made


def resettle(module: nn.Module, setting: Setting) -> None:
    """Lay a wrapped module's unit out as another setting of the same mesh says. All its ranks must call, between steps.

    Raises RuntimeError as :func:`~fsdp_fn.relayout.check_movable` does, ValueError where ranks give other settings,
    :class:`~fsdp_fn.agreement.RankDivergence` where some do not come.
    """
    unit: ShardedUnit = module._fsdp_unit  # type: ignore[assignment]
    unit.agree("the layout for another setting")

    def make() -> ShardedUnit:
        check_movable(unit)
        return successor(unit, range(len(unit.parameters)), setting)

    made = make_together(
        make, setting.axes, setting.device, f"{unit.label}: another setting", lambda _: setting.describe()
    )
    made.adopt()
    _replace(module, unit, made)


def _lead_to_units(module: nn.Module) -> None:
    """Have lists and dicts in ``module`` that hold parameters which nested units replaced hold the new ones."""
    for held in list(held_parameters(module.modules())):
        if name_of_original(held.parameter) is not None:
            found = holder(held.parameter)
            if found is not None:
                unit, index = found
                held.container[held.key] = unit.parameters[index]
                unit.also_in(held.container, held.key, index, held.top)


@functools.cache
def _wrapped_class(cls: type[Any]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (FsdpModule, cls), names)


def unit_states(module: nn.Module) -> dict[str, UnitState]:
    """Sharded state of every wrapped module in ``module``, by its path; the tensors are the live ones."""
    return {path: child._fsdp_unit.state for path, child in module.named_modules() if isinstance(child, FsdpModule)}


@contextlib.contextmanager
def record_events(module: nn.Module) -> Iterator[EventLog]:
    """Record what the units under ``module`` (the outermost wrapped one) gather, compute, reduce and release."""
    units = [child._fsdp_unit for child in module.modules() if isinstance(child, FsdpModule)]
    brackets = {id(unit.bracket): unit.bracket for unit in units}
    if not brackets:
        raise ValueError(f"record_events: {type(module).__name__} has no wrapped module")
    log = EventLog()
    before = {key: bracket.log for key, bracket in brackets.items()}
    for bracket in brackets.values():
        bracket.log = log
    try:
        yield log
    finally:
        for key, bracket in brackets.items():
            bracket.log = before[key]


@contextlib.contextmanager
def accumulating(module: nn.Module) -> Iterator[None]:
    """Backward passes inside are of microbatches that are not a step's last: gradients are left as the strategy sums
    them (``Placements.gradient``). The first backward outside completes them; an optimizer's step before is refused.

    ``module``: the outermost wrapped one, or one above. Where the body raises, sums that are not complete are dropped;
    what a strategy completes with each microbatch is in ``.grad`` already, and stays there, as in plain PyTorch.
    """
    units = [child._fsdp_unit for child in module.modules() if isinstance(child, FsdpModule)]
    brackets = {id(unit.bracket): unit.bracket for unit in units}
    if not brackets:
        raise ValueError(f"accumulating: {type(module).__name__} has no wrapped module")
    before = {key: bracket.last_microbatch for key, bracket in brackets.items()}
    for bracket in brackets.values():
        bracket.last_microbatch = False
    try:
        yield
    except BaseException:
        # Of the whole model, also where ``module`` is a part of it: what is left would be of other microbatches.
        for unit in _live_units:
            if id(unit.bracket) in brackets:
                unit.delivery.drop_sum()
        raise
    finally:
        for key, bracket in brackets.items():
            bracket.last_microbatch = before[key]


def mark_weights_changed(module: nn.Module) -> None:
    """Say that something other than a ``torch.optim`` optimizer wrote the sharded parameters under ``module``.

    For writes that no tensor counts (numpy, a kernel that gets an address). Where a strategy keeps weights at rest,
    they are gathered again before the next forward, so all ranks must call; elsewhere each gather reads the parameters
    in any case. A backward of an earlier forward is refused, as plain PyTorch would refuse it.
    """
    for child in module.modules():
        if isinstance(child, FsdpModule):
            child._fsdp_unit.changes.marked += 1


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            sharded_as = None if isinstance(parameter, RaggedTensor) else name_of_original(parameter)
            if sharded_as is not None:
                raise RuntimeError(
                    f"this optimizer ({type(optimizer).__name__}) was made before fully_shard and holds the plain "
                    f"parameter {sharded_as}, which the model no longer reads: make it afterwards"
                )
    for unit in _units_of(optimizer):
        if unit.delivery.unfinished():
            raise UnfinishedGradient(
                f"{unit.label}: its gradients are sums over microbatches that are not complete: run the backward of "
                "the last microbatch outside accumulating()"
            )
    restore_optimizer_state(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for unit in _units_of(optimizer):
        unit.changes.marked += 1
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        unit.changes.stepped |= all(id(parameter) in held for parameter in unit.delivery.parameters)


def _units_of(optimizer: Optimizer) -> list[ShardedUnit]:
    """Wrapped units of which the optimizer holds a parameter."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [unit for unit in _live_units if any(id(parameter) in held for parameter in unit.delivery.parameters)]


register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
