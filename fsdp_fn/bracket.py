"""Bracket: one unit's forward between two autograd functions, so that its full weights exist only while needed.

Promises: the weights are gathered before the unit's forward and released after it, gathered again before any of its
backward runs, and released when its last gradient is out, whatever happens in between: recomputation inside or
around the unit, repeated use, unused weights, frozen weights, an exception. No weight is ever read while its storage
is released: a read that would be is gathered for, or refused by name.

[Note: leaves] Between Close's backward and Open's (see ``boundary``), the modules hold *leaves*: tensors over the same
storage with no history. What is recomputed inside the unit reads them; a reentrant checkpoint accumulates into their
``.grad``, which Open adds.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_fn.agreement import AgreedUnit
from fsdp_fn.boundary import Close, open_of
from fsdp_fn.containers import cast_floating, map_tensors
from fsdp_fn.crossing import crosses_devices, refuse_late_gradients
from fsdp_fn.escapes import (
    Top,
    WatchedModules,
    aliases,
    is_later,
    kept_values,
    map_kept,
    saving_is_watched,
    shared_storages,
    watch_saved,
)
from fsdp_fn.events import Action
from fsdp_fn.passes import BackwardPass, Bracket, UnitCall, in_backward
from fsdp_fn.planes import Phase
from fsdp_fn.policy import PrecisionPolicy, SchedulePolicy
from fsdp_fn.weights import Sent, Weights

Slot = tuple[Any, Any, int]
"""Where a weight stands: a module's ``_parameters`` (or a list or dict that it keeps), its name in it, its index in the
unit's layout."""


REDUCTION, PARTIAL_REDUCTION = "the reduction", "the reduction before the last microbatch"

_GATHERS = {
    (phase, sent): f"the gather {'' if sent is Sent.WEIGHTS else 'of changed weights '}for {phase.value}"
    for phase in Phase
    for sent in Sent
}


class Unit(ABC):
    """A unit of a live model: its weights' storage, the modules' slots for them, and who is using them.

    ``resting``: what the slots hold outside the unit's forward and backward. ``differentiable``: indices of the
    tensors whose gradients are wanted. ``shards``: inputs of Open that get a gradient, in the functional path.
    A path says, as a subclass, how gradients are delivered.
    """

    def __init__(
        self,
        name: str,
        slots: Sequence[Slot],
        resting: Sequence[Any],
        modules: Sequence[nn.Module],
        weights: Weights,
        differentiable: Sequence[int],
        bracket: Bracket,
        device: torch.device,
        precision: PrecisionPolicy,
        policy: SchedulePolicy,
        shards: tuple[torch.Tensor, ...] = (),
        tops: Sequence[Top] = (),
        reduced_nbytes: int = 0,
        agreed: AgreedUnit | None = None,
    ) -> None:
        self.rename(name)
        self.agreed, self.reduced_nbytes = agreed, reduced_nbytes
        self.tops = tuple(tops)
        self.slots = tuple(slots)
        self._places = {(id(container), key) for container, key, _ in slots}
        self.resting = tuple(resting)
        self.bracket = bracket
        self.weights = weights
        self._input_dtype, self._output_dtype = precision.input_dtype, precision.output_dtype
        self._reshards = policy.reshard_after_forward
        self.differentiable = tuple(differentiable)
        self.shards = shards
        self.anchor = torch.zeros((), requires_grad=True, device=device)
        self.zero = torch.zeros((), device=device)
        wanted = set(self.differentiable)
        with torch.inference_mode(False):
            self.leaves = tuple(v.detach().requires_grad_(i in wanted) for i, v in enumerate(weights.views))
        self.modules = WatchedModules(modules)
        self.version = 0
        self.retired = False
        self._uses = 0
        self._kept = False
        self._kept_of: object = None
        self._shown = False
        self._backward_calls = 0
        self._unreduced: set[UnitCall] = set()
        self._device = device
        self._crosses: bool | None = False if device.type == "cpu" else None
        refuse_late_gradients(self)
        self._installed: Sequence[Any] = self.resting

    @abstractmethod
    def deliver(self, grads: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Take the gradients of the differentiable tensors; returns those of the shard inputs, if any."""

    def weights_version(self) -> int:
        """A number that changes when the weights do."""
        return self.version

    @property
    def last_microbatch(self) -> bool:
        """Whether a backward that comes completes the gradients."""
        return self.bracket.last_microbatch

    @property
    def reshards_after_forward(self) -> bool | int:
        """As :class:`~fsdp_fn.policy.SchedulePolicy` has it."""
        return self._reshards

    @property
    def keeps_after_backward(self) -> bool:
        """Whether full weights stay after backward, for a forward before they change."""
        return False

    def source(self) -> object:
        """What full weights gathered now are a copy of; None where that cannot be told. Alike on all ranks."""
        return None

    def present(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Full weights as the modules are to read them."""
        return tensors

    def finish_backward(self) -> None:  # noqa: B027 (optional)
        """The backward pass in which gradients were delivered is over."""

    def complete_sum(self) -> None:  # noqa: B027 (optional)
        """The last microbatch is through: what was summed up and is not complete is to be."""

    def drop_backward(self) -> None:  # noqa: B027 (optional)
        """It failed: forget what was delivered in it."""

    def before_backward(self) -> None:  # noqa: B027 (optional)
        """The unit's modules are about to be used by backward."""

    def after_backward(self) -> None:  # noqa: B027 (optional)
        """They are no longer."""

    def also_in(self, container: Any, key: Any, index: int, top: Top | None) -> None:
        """One more slot: where a module outside the unit's own holds a parameter."""
        self.slots = (*self.slots, (container, key, index))
        self._places.add((id(container), key))
        self.tops = self.tops if top is None else (*self.tops, top)

    def rename(self, name: str) -> None:
        """Set the name that errors and the event log use: the module's path in the outermost wrapped module."""
        self.name = name
        self.label = f"unit {name!r}" if name else "the root unit"

    def retire(self) -> None:
        """Another unit has taken its place: let go what it keeps, and refuse what would still come back to it."""
        self.drop_kept()
        self.retired = True

    @property
    def awaits_gradients(self) -> bool:
        """Whether a call's backward runs whose gradients were not reduced yet."""
        return bool(self._unreduced)

    @property
    def gathered(self) -> bool:
        """Whether the full weights are there now."""
        return self._uses > 0 or self._kept

    @property
    def resting_now(self) -> bool:
        """Whether the slots hold what they hold at rest."""
        return self._installed is self.resting

    def gather_early(self, phase: Phase) -> None:
        """Gather the full weights, if they are not there, for a forward or a backward to come."""
        if not self.gathered:
            self._acquire(phase)
            self._uses -= 1
            self._keep_for_later()
            if phase is not Phase.FORWARD:
                self.bracket.current_pass().kept[self] = None

    def show(self) -> None:
        """Gather the full weights and put them in their slots, to be read, until :meth:`hide` or a forward."""
        self.gather_early(Phase.FORWARD)
        if self.resting_now:
            self._install(self.present(self.weights.views))
            self._shown = True

    def hide(self) -> None:
        """Put back what the slots hold at rest."""
        if self._shown:
            self._shown = False
            self._install(self.resting)

    @property
    def idle(self) -> bool:
        """Whether neither the unit's forward nor its backward is running."""
        return self.resting_now or self._shown

    @contextlib.contextmanager
    def weights_in_place(self) -> Iterator[None]:
        """Have the full weights in their slots, apart from any graph, to be read."""
        previous = self._installed
        self._acquire(Phase.FORWARD)
        try:
            self._install(self.present(self.weights.views))
            before = self.weights.writes()
            yield
            if self.weights.writes() != before:
                raise RuntimeError(
                    f"{self.label}: a full weight was changed in place, which is lost with the gathered copy; change "
                    "the sharded parameter instead"
                )
        finally:
            self._install(previous)
            self._release(Phase.FORWARD)

    # --- forward ------------------------------------------------------------------------------------------------

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``forward`` with the full weights in place."""
        args, kwargs = cast_floating((args, kwargs), self._input_dtype)
        recomputing = in_backward()
        phase = Phase.RECOMPUTE if recomputing else Phase.FORWARD
        previous = self._installed
        self._acquire(phase)
        started = time.perf_counter()
        call, token = None, None
        try:
            weights: Sequence[torch.Tensor] = self.weights.views
            if torch.is_grad_enabled():
                call = UnitCall(self, self.bracket.open[-1] if self.bracket.open else None)
                token, weights = self._open(call)
                self.bracket.open.append(call)
            self._install(self.present(weights))
            before = self.weights.writes()
            try:
                if call is not None and self.modules.observed() and not saving_is_watched():
                    with watch_saved(self.weights.storages, weakref.WeakMethod(call.enter_backward)):
                        output = forward(*args, **kwargs)
                else:
                    output = forward(*args, **kwargs)
            finally:
                self._install(previous)
                if call is not None:
                    self.bracket.open.remove(call)
            if self.weights.writes() != before:
                raise RuntimeError(
                    f"{self.label}: its forward changed a weight in place (as nn.Embedding's max_norm does), which "
                    "would be lost with the gathered copy; change the sharded parameter outside forward"
                )
            output = self._close(call, token, output, args, kwargs)
        except BaseException:
            self._log(phase, Action.COMPUTE, started)
            self._release(phase, keep=recomputing)
            raise
        self._log(phase, Action.COMPUTE, started)
        self._release(phase, keep=recomputing, for_backward=call is not None)
        return cast_floating(output, self._output_dtype)

    def _open(self, call: UnitCall) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        token, *opened = open_of(self.label).apply(self.anchor, call, *self.shards)
        if len(opened) == len(self.weights.views):
            return token, opened
        weights = list(self.weights.views)
        for index, weight in zip(self.differentiable, opened, strict=True):
            weights[index] = weight
        return token, weights

    def _close(
        self,
        call: UnitCall | None,
        token: torch.Tensor | None,
        output: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        needing: dict[int, torch.Tensor] = {}

        def visit(tensor: torch.Tensor) -> torch.Tensor:
            if aliases(tensor, self.weights.storages):
                raise RuntimeError(
                    f"{self.label}: its output aliases a gathered weight, whose storage is released after forward; "
                    "return a clone, or use the weight inside the unit"
                )
            # An input handed through is no output of this call: its history, and views of it, stay as they are.
            if tensor.requires_grad and token is not None and is_later(tensor, token):
                needing[id(tensor)] = tensor
            return tensor

        map_tensors(visit, output, self.label)
        kept = [entry for entry in kept_values(self.modules) if (id(entry[0]), entry[1]) not in self._places]
        for _, key, value in kept:
            map_kept(functools.partial(self._visit_kept, needing, key, token), value)
        if call is None or token is None:
            return output
        if not needing:
            return output
        if self._crosses is None:
            self._crosses = crosses_devices(needing.values(), token, self._device)
        shared = shared_storages(needing.values(), (*args, *kwargs.values()))
        closed = dict(zip(needing, Close.apply(token, call, shared, *needing.values()), strict=True))

        def replace(tensor: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = closed.get(id(tensor), tensor)
            return found

        for holder, key, value in kept:
            replaced = map_kept(replace, value)
            if replaced is not value:
                holder[key] = replaced
        return map_tensors(replace, output, self.label)

    def _visit_kept(
        self, needing: dict[int, torch.Tensor], key: Any, token: torch.Tensor | None, tensor: torch.Tensor
    ) -> torch.Tensor:
        if aliases(tensor, self.weights.storages):
            raise RuntimeError(
                f"{self.label}: a module keeps a gathered weight as {key!r}, whose storage is released after forward; "
                "keep a clone"
            )
        if token is not None and is_later(tensor, token):
            needing[id(tensor)] = tensor
        return tensor

    # --- backward -----------------------------------------------------------------------------------------------

    def enter_backward(self, call: UnitCall) -> None:
        """Close's backward: nothing of the unit's own backward has run yet. Or an escaped tensor's, for Close."""
        current = self.bracket.current_pass()
        if torch.is_grad_enabled():
            # The graph of this backward reads the weights: they stay for the backward through it.
            current.makes_graph = True
            self.bracket.hold(self)
        if call in current.calls:
            return
        if self.retired:
            raise RuntimeError(
                f"{self.label}: requires_grad of its parameters was changed between this forward and its backward, and "
                "another forward has laid it out anew since; run backward before that forward"
            )
        if call.version != self.weights_version():
            raise RuntimeError(
                f"{self.label}: its weights were changed between this forward and its backward, which would compute "
                "with the new ones; run backward before the optimizer's step"
            )
        if call.parent is not None and call.parent not in current.calls:
            # What escaped from this unit leads on into the one around it, whose Close it went past.
            call.parent.enter_backward()
        self._acquire(Phase.BACKWARD)
        call.opened_at = time.perf_counter()
        current.calls[call] = None
        self._unreduced.add(call)
        self._backward_calls += 1
        if self._backward_calls == 1:
            self.hide()
            with torch.enable_grad():
                self._install(self.present(self.leaves))
            self.before_backward()

    def end_backward(self, call: UnitCall, grads: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Open's backward: the gradients of all differentiable weights are in."""
        if torch.is_grad_enabled() and self.differentiable:
            raise RuntimeError(
                f"{self.label}: backward with create_graph=True reached its parameters, whose gradients are reduced "
                "and have no graph; take the gradient with respect to inputs alone, autograd.grad(loss, inputs, "
                "create_graph=True)"
            )
        for position, index in enumerate(self.differentiable):
            leaf = self.leaves[index]
            if leaf.grad is not None:
                grad = grads[position]
                grads[position] = leaf.grad if grad is None else leaf.grad + grad
                leaf.grad = None
        current = self.bracket.current_pass()
        self._log(Phase.BACKWARD, Action.COMPUTE, call.opened_at)
        started = time.perf_counter()
        try:
            if self.differentiable:
                self.agree(REDUCTION if self.last_microbatch else PARTIAL_REDUCTION)
            with torch.no_grad():
                shard_grads = self.deliver(grads)
        finally:
            self._unreduced.discard(call)
            if not self._crosses:  # see [Note: order of backward]
                self.leave_backward(call, current)
        current.delivered[self] = None
        if self.differentiable:
            self._log(Phase.BACKWARD, Action.REDUCE, started, self.reduced_nbytes)
        return shard_grads

    def leave_backward(self, call: UnitCall, current: BackwardPass) -> None:
        """This call's backward is over, or will not go on."""
        if call not in current.calls:
            return
        del current.calls[call]
        self._unreduced.discard(call)
        self._backward_calls -= 1
        if self._backward_calls == 0:
            self._install(self.resting)
            for index in self.differentiable:
                self.leaves[index].grad = None
            self.after_backward()
        self._release(Phase.BACKWARD)

    # --- storage ------------------------------------------------------------------------------------------------

    def _acquire(self, phase: Phase) -> None:
        if self._uses == 0:
            kept, self._kept = self._kept, False
            made_of, self._kept_of = self._kept_of, None
            # What forward left for backward may be older than the main weights: another forward gathers again, unless
            # it is known what was gathered.
            if not kept or (phase is Phase.FORWARD and (made_of is None or made_of != self.source())):
                started = time.perf_counter()
                if self.agreed is not None and (sent := self.weights.sends(phase)) is not None:
                    self.agree(_GATHERS[phase, sent])
                with torch.no_grad():
                    transferred = self.weights.acquire(phase)
                self._log(phase, Action.GATHER, started, transferred)
        self._uses += 1

    def _release(self, phase: Phase, keep: bool = False, for_backward: bool = False) -> None:
        self._uses -= 1
        if self._uses == 0:
            if self.bracket.holds(self):
                self._kept = True
            elif keep:
                # A recomputation is followed by the backward that asked for it: what it gathered stays for that.
                self._kept = True
                self.bracket.current_pass().kept[self] = None
            elif for_backward and self.reshards_after_forward is False:
                self._kept = True
            elif phase is Phase.BACKWARD and self.keeps_after_backward:
                self._keep_for_later()
            else:
                if for_backward and self.reshards_after_forward is not True:
                    with torch.no_grad():
                        self.weights.keep_part()
                self._free(phase)

    def _keep_for_later(self) -> None:
        self._kept, self._kept_of = True, self.source()

    def drop_kept(self) -> None:
        """Release what a recomputation left gathered and no backward took up."""
        if self._kept:
            self._kept, self._kept_of = False, None
            self._free(Phase.RECOMPUTE)

    def _free(self, phase: Phase) -> None:
        started = time.perf_counter()
        self.weights.release(self.bracket.release, phase)
        self._log(phase, Action.RELEASE, started)

    def _install(self, tensors: Sequence[Any]) -> None:
        for parameters, name, index in self.slots:
            parameters[name] = tensors[index]
        for top in self.tops:
            top.put_back()
        self._installed = tensors

    def agree(self, what: str) -> None:
        """Before something is sent: RankDivergence where other ranks are at something else."""
        if self.agreed is not None:
            self.agreed.check(what, self.label)

    def _log(self, phase: Phase, action: Action, started: float, transferred: int = 0) -> None:
        if self.bracket.log is not None:
            self.bracket.log.add(self.name, phase, action, started, transferred)
