"""Methods: what PyTorch's ``FSDPModule`` can be told, on modules that :func:`~fsdp_fn.compat.fully_shard` wrapped.

Promises: each method does here what it does there, or raises NotImplementedError with the remedy. What changes how a
unit is laid out or divided takes effect at once, on all ranks alike, and only between steps.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any, NoReturn, cast

import torch
from torch import nn

from fsdp_fn.compat.collectives import gathering_by, hooked_together, over_other_groups, scattering_by
from fsdp_fn.entrances import register_forward_method
from fsdp_fn.module import FsdpModule, resettle
from fsdp_fn.passes import in_backward
from fsdp_fn.placement import Partial, Placements, Replicate, Sharded, Strategy, without_axes_of_one
from fsdp_fn.planes import Phase

AUTO = "_fsdp_reshards_unless_root"
"""Attribute of a module whose ``reshard_after_forward`` was left open: the root keeps, the others reshard."""
GROUP = "_fsdp_group"
"""Attribute of modules that were wrapped as one list: all of them, weakly."""
META = "_fsdp_wrapped_on_meta"
"""Attribute of a module that was wrapped on meta: its :class:`Memory`."""
_AHEAD = "_fsdp_forward_prefetch"


class Memory(Enum):
    """Whether a script has asked for memory yet, by ``to_empty`` or by a load."""

    AWAITED = "awaited"
    GIVEN = "given"


def _gives_memory(fn: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether ``fn``, as ``nn.Module._apply`` gets it, is ``to_empty``'s: what else moves cannot read from meta."""
    try:
        return not fn(torch.empty(1, device="meta")).is_meta
    except NotImplementedError:
        return False


def with_summed(names: Sequence[str | None], *, reduced_inside: bool) -> Strategy:
    """ZeRO-3 over the last axis, replicas over one before.

    Microbatches without sync sum unreduced gradients; with ``reduced_inside`` they are reduced over the last axis.
    """
    *outer, inner = names
    gradient = Sharded() if reduced_inside else Partial()
    replicas = (Placements(Replicate(), Partial(), Replicate(), name) for name in outer)
    return (*replicas, Placements(Sharded(), gradient, Sharded(), inner))


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns; the current stream may use the weights once :meth:`wait` was called."""

    def wait(self) -> None:
        """Nothing is left to wait for: the gather was launched on the current stream."""


class FSDPModule(FsdpModule):
    """Mixed into the class of a wrapped module; methods as ``torch.distributed.fsdp.FSDPModule`` has them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, gathered; modules that it was told to gather ahead follow."""
        unit = self._fsdp_unit
        if self.__dict__.get(META) is Memory.AWAITED:
            raise RuntimeError(
                f"{unit.label} was wrapped on the meta device and has no values yet: call to_empty(device=…) on the "
                "model and initialise it, or load a state dict"
            )
        if self.__dict__.get(AUTO) and not unit.bracket.open and not in_backward():
            # The outermost module keeps its weights: backward begins with them.
            self._tell(recurse=False, reshards_after_forward=False)
            self.__dict__[AUTO] = False
        if _AHEAD in self.__dict__ and not in_backward():
            unit.gather_early(Phase.FORWARD)
            for reference in self.__dict__[_AHEAD]:
                module = reference()
                if module is not None:
                    module._fsdp_unit.gather_early(Phase.FORWARD)
        return super().forward(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As ``nn.Module.load_state_dict``; ``assign=True`` copies too, and keeps dtypes."""
        result = super().load_state_dict(state_dict, strict=strict)
        self._have_values()
        return result

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        """As for any wrapped module: ``assign=True`` is refused where it comes from a module above."""
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if self.__dict__.get(META) is Memory.AWAITED:
            self.__dict__[META] = Memory.GIVEN

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """``.to()`` and the like, as for any wrapped module; and ``to_empty`` of one that was wrapped on meta.

        Its shards have memory already, and keep what is in it.
        """
        if not all(module.__dict__.get(META) for module in self._wrapped(recurse)) or not _gives_memory(fn):
            return super()._apply(fn, recurse)
        device, wanted = fn(torch.empty(1, device="meta")).device, self._fsdp_unit.setting.device
        if device.type != wanted.type:
            raise TypeError(f"{self._fsdp_unit.label}: to_empty(device={str(device)!r}), but its mesh is on {wanted}")
        self._have_values(recurse)
        return self

    def _have_values(self, recurse: bool = True) -> None:
        for module in self._wrapped(recurse):
            if module.__dict__.get(META):
                module.__dict__[META] = Memory.GIVEN

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's weights and have it hold them, as plain tensors to be read; its next forward uses them.

        Not recursive. All ranks must call.
        """
        for module in self._wrapped(recurse=False):
            module._fsdp_unit.show()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Release this module's full weights, if they are there. Not recursive."""
        for module in self._wrapped(recurse=False):
            module._fsdp_unit.hide()
            module._fsdp_unit.drop_kept()

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: release what is gathered, drop sums of microbatches."""
        for module in self._wrapped(recurse=True):
            module.reshard()
            module._fsdp_unit.delivery.drop_sum()
        self._tell(holds_back=False)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Accepted: gradients are handed over at the end of every backward that reduces them, last or not."""
        _check_bool("is_last_backward", is_last_backward)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether the backward passes that come reduce gradients, or sum them up unreduced."""
        _check_bool("requires_gradient_sync", requires_gradient_sync)
        if not requires_gradient_sync:
            self._sum(recurse, reduced_inside=False)
        self._tell(recurse, holds_back=not requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether they reduce over replicas too; of HSDP, otherwise sums are reduced over shards alone."""
        _check_bool("requires_all_reduce", requires_all_reduce)
        for module in self._wrapped(recurse):
            if len(module._fsdp_unit.setting.strategy) > 1:
                if not requires_all_reduce:
                    module._sum(recurse=False, reduced_inside=True)
                module._tell(recurse=False, holds_back=not requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full weights are released after forward and gathered again in backward."""
        _check_bool("reshard_after_forward", reshard_after_forward)
        for module in self._wrapped(recurse):
            module.__dict__[AUTO] = False
        self._tell(recurse, reshards_after_forward=reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether full weights are released after backward, or stay until they change."""
        _check_bool("reshard_after_backward", reshard_after_backward)
        self._tell(recurse, keeps_after_backward=not reshard_after_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Modules whose weights are gathered when this one's forward begins."""
        ahead = tuple(weakref.ref(module) for module in _checked(modules))
        for module in self._wrapped(recurse=False):
            module.__dict__[_AHEAD] = ahead

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Modules whose weights are gathered when this one's backward begins."""
        ahead = tuple(weakref.ref(cast(nn.Module, module)) for module in _checked(modules))
        self._tell(recurse=False, ahead=ahead)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Call ``hook`` with this unit's reduced gradients, as one flat tensor in the main weights' dtype."""
        if stream is not None and len(self._fsdp_unit.setting.strategy) > 1:
            raise ValueError("stream cannot be set when using native HSDP")
        self._tell(recurse=False, on_reduced=hooked_together(hook, stream))

    def set_gradient_divide_factor(self, factor: float) -> None:
        """What this unit's sum of gradients over ranks is divided by; before it was called, the number of ranks."""
        for module in self._wrapped(recurse=False):
            setting = module._fsdp_unit.setting
            ranks = math.prod(axis.size for axis in setting.axes)
            resettle(cast(nn.Module, module), replace(setting, grad_divisor=factor / ranks))

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The older name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted: gradients are always sent as sums, and divided apart."""
        _check_bool("enable", enable)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accepted: unused parameters of a unit that backward reaches always send zeros."""
        _check_bool("reduce_scatter_unused_params", reduce_scatter_unused_params)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Only True: which weights backward needs is found out as it runs."""
        _check_bool("unshard_in_backward", unshard_in_backward)
        if not unshard_in_backward:
            _refuse("set_unshard_in_backward(False)", "leave it out: it costs one gather, and no number")

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Have the current stream, on which the next gather is launched, wait for the event."""
        event.wait()

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Accepted: a unit's packed gradients are reduced before the next unit's are packed, so one is in flight."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers: expected an int, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers: expected a number above 0, got {max_input_buffers}")

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Whether gradients are reduced over a process group of their own. All ranks must call."""
        _check_bool("enable", enable)
        for module in self._wrapped(recurse):
            axes = over_other_groups(module._fsdp_unit.state.axes) if enable else None
            module._tell(recurse=False, reduced_over=axes)

    def set_custom_all_gather(self, comm: Any) -> None:
        """Have this unit's weights gathered by ``comm``."""
        self._tell(recurse=False, gather=gathering_by(comm))

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Have this unit's gradients reduced over shards by ``comm``, always as sums."""
        self._tell(recurse=False, scatter=scattering_by(comm))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Only False: weights are gathered into buffers that are views of what compute reads."""
        _check_bool("enable", enable)
        if enable:
            _refuse("set_allocate_memory_from_process_group_for_comm(True)", "leave it out")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> NoReturn:
        """Not served."""
        _refuse("set_symm_mem_for_comm", "leave it out")

    def _wrapped(self, recurse: bool) -> Iterator[FSDPModule]:
        if recurse:
            modules: Iterable[Any] = cast(nn.Module, self).modules()
        else:
            modules = [reference() for reference in self.__dict__.get(GROUP, (weakref.ref(self),))]
        return (module for module in modules if isinstance(module, FSDPModule))

    def _tell(self, recurse: bool = True, **habits: Any) -> None:
        for module in self._wrapped(recurse):
            unit = module._fsdp_unit
            unit.take_up(replace(unit.habits, **habits))

    def _sum(self, recurse: bool, *, reduced_inside: bool) -> None:
        """Have sums of microbatches be of this kind."""
        for module in self._wrapped(recurse):
            names = [placements.axis for placements in module._fsdp_unit.setting.strategy]
            setting = module._fsdp_unit.setting
            sizes = [axis.size for axis in setting.axes]
            wanted = without_axes_of_one(with_summed(names, reduced_inside=reduced_inside), sizes)
            if setting.strategy != wanted:
                resettle(cast(nn.Module, module), replace(setting, strategy=wanted))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Have ``method_name`` of a wrapped module gather as ``forward`` does; nothing happens for one that is not."""
    if not isinstance(module, FSDPModule):
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    register_forward_method(module, method_name)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Accepted: all units of a process use the current stream, and share what there is to share."""
    _checked(modules)


def _checked(modules: Sequence[Any]) -> Sequence[FSDPModule]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"expected FSDPModules, got {type(module).__name__}: {module}")
    return modules


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, got {value!r}")


def _refuse(what: str, remedy: str) -> NoReturn:
    raise NotImplementedError(f"fsdp_fn.compat: {what} is not served; {remedy}")
