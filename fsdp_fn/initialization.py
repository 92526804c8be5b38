"""Initialization: a unit's first values, where its module was built on the meta device.

Promises: the full values of one unit are made at a time, and nothing here sends anything. Every tensor on meta gets
memory on the mesh's device and is written by the ``init`` that was given, or an error names it. A tensor that holds
values keeps them, whatever ``init`` writes; one that stands under several names is made once. Modules hold afterwards
what they held before: what was made is returned, and put in its place by the caller once all ranks are sound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fsdp_fn.escapes import held_at
from fsdp_fn.ragged_placement import is_ragged
from fsdp_fn.state import Axis, UnitState
from fsdp_fn.tensor_parallel import local_part
from fsdp_fn.units import OwnedParameters, Setting, fill_shard

Init = Literal["reset_parameters"] | Callable[[nn.Module], object]
"""What writes the tensors that one module owns itself: its own method, or a function of the module."""

_OWN_METHODS = ("reset_parameters", "_reset_parameters")


@dataclass(frozen=True, eq=False)
class BufferValue:
    """A module buffer of a unit, each once: its first name, the tensor that modules hold, and its full value."""

    name: str
    held: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, eq=False)
class UnitValues:
    """A unit's full values on this rank: of its parameters, in its order, and of its modules' buffers.

    On meta still where another rank's are to be received.
    """

    parameters: tuple[torch.Tensor, ...]
    buffers: tuple[BufferValue, ...]


@dataclass(frozen=True)
class Initialization:
    """Where first values come from; ``init`` and ``broadcast`` as :func:`~fsdp_fn.module.fully_shard` takes them."""

    init: Init | None = None
    broadcast: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.init, str) and self.init != "reset_parameters":
            raise ValueError(f"init: expected 'reset_parameters' or a function of a module, got {self.init!r}")
        if self.init is not None and not isinstance(self.init, str) and not callable(self.init):
            raise TypeError(f"init: expected 'reset_parameters' or a function of a module, got {self.init!r}")
        if not isinstance(self.broadcast, bool):
            raise TypeError(f"broadcast: expected True or False, got {self.broadcast!r}")

    def describe(self, *units: UnitValues) -> str:
        """What ranks must have in common: before a broadcast, buffers as well."""
        sent = [b for unit in units for b in unit.buffers] if self.broadcast else []
        parts = [f"buffer {b.name} {list(b.value.shape)} {b.value.dtype}" for b in sent]
        return "; ".join([f"broadcast={self.broadcast}", *parts])


def is_first(axes: Sequence[Axis]) -> bool:
    """Whether this is the rank whose values a broadcast over ``axes`` sends."""
    return all(axis.rank == 0 for axis in axes)


def unit_values(
    owned: OwnedParameters,
    whole: nn.Module,
    unit: str,
    setting: Setting,
    first: Initialization,
    known: Mapping[torch.Tensor, torch.Tensor],
) -> UnitValues:
    """Full values of the parameters and buffers that ``owned`` names; those on meta are made by ``first.init``.

    It runs for each module in ``whole`` that itself owns one of them on meta, children before parents, when the whole
    unit has memory; without gradients, and with the mesh's device as the default. Where another rank's values will be
    broadcast, what is on meta stays there; an ``init`` that is given runs all the same. ``known``: values of meta
    buffers that an earlier unit made.

    Raises ValueError, naming unit and tensor, where one on meta has no ``init``, is not written by it, or replaced by
    what does not fit; where a module has no method of its own; RuntimeError where ``init`` raises.
    """
    buffers = _buffers(owned.modules, whole, known)
    missing = [f"parameter {name!r}" for name, p in _plain(owned) if p.is_meta]
    missing += [f"buffer {buffer.name!r}" for buffer in buffers if buffer.value.is_meta]
    device, init, receives = setting.device, first.init, first.broadcast and not is_first(setting.axes)
    if missing and init is None and not receives:
        raise ValueError(
            f"{missing[0]} of unit {unit!r} is on meta, the mesh on {device.type!r}: give init='reset_parameters' or "
            "init=a function that initialises one module, or broadcast=True where the first rank has values, or move "
            "the model there before sharding"
        )
    if not missing or init is None:
        return UnitValues(owned.parameters, buffers)
    with torch.inference_mode(False), torch.no_grad():
        stand_ins = {id(p): _stand_in(p, p, device) for _, p in _plain(owned)}
        stand_ins |= {id(buffer.held): _stand_in(buffer.held, buffer.value, device) for buffer in buffers}
        made = _initialised(owned, buffers, stand_ins, whole, unit, device, init)
    return UnitValues(owned.parameters, buffers) if receives else made


def bottom_up(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Paths and modules, each once, children before parents: the order of ``nn.Module.apply``."""
    seen: set[int] = set()

    def visit(path: str, current: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        seen.add(id(current))
        for name, child in current._modules.items():
            if child is not None and id(child) not in seen:
                yield from visit(f"{path}.{name}" if path else name, child)
        yield path, current

    return visit("", module)


def fill_shards(state: UnitState, values: UnitValues, parameters: Sequence[torch.Tensor]) -> None:
    """Write this rank's shards of what ``values`` has besides ``parameters``, which they hold already."""
    with torch.inference_mode(False), torch.no_grad():
        for index, (value, parameter) in enumerate(zip(values.parameters, parameters, strict=True)):
            if value is not parameter:
                fill_shard(state.main, index, local_part(value))


def put_buffers(modules: Sequence[nn.Module], buffers: Sequence[BufferValue]) -> None:
    """Have the modules hold the values: a tensor that can be written is, one on meta or expanded is replaced."""
    new = {id(buffer.held): buffer.value for buffer in buffers if buffer.value is not buffer.held}
    written: set[int] = set()
    with torch.no_grad():
        for module in modules:
            for key, held in module._buffers.items():
                if held is None or id(held) not in new or id(held) in written:
                    continue
                if held.is_meta or _is_expanded(held):
                    module._buffers[key] = new[id(held)]
                else:
                    held.copy_(new[id(held)])
                    written.add(id(held))


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements are one in memory."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _plain(owned: OwnedParameters) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters less those that a unit has sharded already."""
    pairs = zip(owned.names, owned.parameters, strict=True)
    return ((name, parameter) for name, parameter in pairs if not is_ragged(parameter))


def _buffers(
    modules: Sequence[nn.Module], whole: nn.Module, known: Mapping[torch.Tensor, torch.Tensor]
) -> tuple[BufferValue, ...]:
    paths = {id(module): path for path, module in whole.named_modules()}
    found: dict[int, BufferValue] = {}
    for module in modules:
        for key, held in module._buffers.items():
            if held is not None:
                name = f"{paths[id(module)]}.{key}".lstrip(".")
                value = known.get(held, held) if held.is_meta else held
                found.setdefault(id(held), BufferValue(name, held, value))
    return tuple(found.values())


def _stand_in(held: torch.Tensor, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """What modules hold instead while ``init`` runs: memory for a tensor on meta, a copy of any other.

    Floating-point memory is filled with NaN, so that what is not written can be told.
    """
    if value.is_meta:
        made = torch.empty_like(value.detach(), device=device)
        if _can_be_nan(made):
            local_part(made).fill_(float("nan"))
    else:
        made = value.detach().clone()
    if isinstance(held, nn.Parameter):
        made = nn.Parameter(made, requires_grad=held.requires_grad)
        made.__dict__.update(held.__dict__)
    return made


def _initialised(
    owned: OwnedParameters,
    buffers: tuple[BufferValue, ...],
    stand_ins: Mapping[int, torch.Tensor],
    whole: nn.Module,
    unit: str,
    device: torch.device,
    init: Init,
) -> UnitValues:
    slots: list[tuple[Any, Any, torch.Tensor]] = [(c, key, owned.parameters[i]) for c, key, i in owned.slots]
    slots += [(m._buffers, key, held) for m in owned.modules for key, held in m._buffers.items() if held is not None]
    slots = [slot for slot in slots if id(slot[2]) in stand_ins]
    on_meta = {id(p) for _, p in _plain(owned) if p.is_meta} | {id(b.held) for b in buffers if b.value.is_meta}
    places = {(id(container), key) for container, key, held in slots if id(held) in on_meta}
    modules = [(path, module) for path, module in bottom_up(whole) if not places.isdisjoint(_places(module))]
    calls = [(path, _call_of(module, path, unit, init, places)) for path, module in modules]
    elsewhere = _meta_elsewhere(whole, {*stand_ins, *(id(t) for _, m in modules for _, t in _tensors(m))})
    versions = {key: tensor._version for key, tensor in stand_ins.items()}
    with _standing_in(slots, stand_ins):
        for path, call in calls:
            with torch.device(device):
                _run(call, f"init of module {path!r} of unit {unit!r}")
            for name, tensor, version in elsewhere:
                if tensor._version != version:
                    raise ValueError(
                        f"init of module {path!r} of unit {unit!r} wrote {name!r}, which another unit holds, where it "
                        "would be lost: write it from the module that owns it, or put both in one unit"
                    )
        replaced = _replaced(slots, stand_ins, on_meta, unit)
    for name, parameter in _plain(owned):
        if parameter.is_meta:
            label, made = f"parameter {name!r} of unit {unit!r}", stand_ins[id(parameter)]
            _check_written(label, made, versions[id(parameter)])
    made_buffers = []
    for buffer in buffers:
        value = buffer.value
        if value.is_meta:
            label, value = f"buffer {buffer.name!r} of unit {unit!r}", stand_ins[id(buffer.held)]
            if id(buffer.held) in replaced:
                value = _fitting(label, replaced[id(buffer.held)], value)
            else:
                _check_written(label, value, versions[id(buffer.held)])
        made_buffers.append(BufferValue(buffer.name, buffer.held, value))
    parameters = tuple(stand_ins[id(p)].detach() if id(p) in on_meta else p for p in owned.parameters)
    return UnitValues(parameters, tuple(made_buffers))


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers that the module itself owns."""
    for tensors in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


def _places(module: nn.Module) -> Iterator[tuple[int, str]]:
    return ((id(tensors), key) for tensors in (module._parameters, module._buffers) for key in tensors)


def _call_of(module: nn.Module, path: str, unit: str, init: Init, places: set[tuple[int, str]]) -> Callable[[], object]:
    if not isinstance(init, str):
        return lambda: init(module)
    for name in _OWN_METHODS:
        method: Any = getattr(module, name, None)
        if callable(method):
            return lambda: method()
    keys = [key for tensors, key in _places(module) if (tensors, key) in places]
    raise ValueError(
        f"module {path!r} of unit {unit!r}, a {type(module).__name__}, has {', '.join(keys)} on meta and no method "
        "reset_parameters: give it one that writes them all, or give init=a function that initialises one module"
    )


def _run(call: Callable[[], object], what: str) -> None:
    try:
        call()
    except Exception as error:
        raise RuntimeError(f"{what} failed: {type(error).__name__}: {error}") from error


def _meta_elsewhere(whole: nn.Module, known: set[int]) -> list[tuple[str, torch.Tensor, int]]:
    """Tensors on meta that stay so while ``init`` runs, with their versions: a write of one would be lost."""
    found = []
    for path, module in whole.named_modules():
        for name, tensor in _tensors(module):
            if id(tensor) not in known and not is_ragged(tensor) and tensor.is_meta:
                found.append((f"{path}.{name}".lstrip("."), tensor, tensor._version))
    return found


@contextlib.contextmanager
def _standing_in(
    slots: Sequence[tuple[Any, Any, torch.Tensor]], stand_ins: Mapping[int, torch.Tensor]
) -> Iterator[None]:
    try:
        for container, key, held in slots:
            container[key] = stand_ins[id(held)]
        yield
    finally:
        for container, key, held in slots:
            container[key] = held


def _replaced(
    slots: Sequence[tuple[Any, Any, torch.Tensor]], stand_ins: Mapping[int, torch.Tensor], on_meta: set[int], unit: str
) -> dict[int, Any]:
    """What ``init`` put in place of buffers. A parameter has to stay the one that it was, as it was."""
    replaced: dict[int, Any] = {}
    for container, key, held in slots:
        found, made = held_at(container, key), stand_ins[id(held)]
        if not isinstance(held, nn.Parameter):
            if found is not made and id(held) in on_meta:
                replaced.setdefault(id(held), found)
        elif found is not made or made.requires_grad != held.requires_grad:
            raise ValueError(
                f"init of unit {unit!r} replaced parameter {key!r}, or changed its requires_grad: write its values in "
                "place, and decide about gradients before sharding"
            )
    return replaced


def _fitting(label: str, found: Any, made: torch.Tensor) -> torch.Tensor:
    """A tensor that ``init`` put in a buffer's place, on the mesh's device."""
    wanted = f"{list(made.shape)} of {made.dtype}"
    if not isinstance(found, torch.Tensor) or found.is_meta or (found.shape, found.dtype) != (made.shape, made.dtype):
        where = f"{list(found.shape)} of {found.dtype} on {found.device}" if isinstance(found, torch.Tensor) else found
        raise ValueError(f"{label}: init replaced it by {where}; expected {wanted}, with values")
    return found.detach().to(made.device)


def _check_written(label: str, made: torch.Tensor, version: int) -> None:
    """Integers are told by their counter of writes, which a write through ``.data`` does not move."""
    local = local_part(made)
    if bool(local.isnan().any()) if _can_be_nan(local) else made.numel() and made._version == version:
        raise ValueError(
            f"{label} was on meta, and init did not write all of it: let the init of the module that owns it do so"
        )


def _can_be_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
