"""Face: the DTensor parameters and gradients that an optimizer sees, over the flat shards that are the truth.

Promises: a parameter's local tensor is a view of the unit's main shard for as long as the unit lives, so whatever
writes the parameter writes the main weight, and the next gather reads it. ``.grad`` follows plain PyTorch: a parameter
without one gets a fresh one, one that has one is added to, hooks on the parameter are called, once per backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp_fn.bracket import Unit
from fsdp_fn.collectives import reduce_packed
from fsdp_fn.gradients import GradientShards
from fsdp_fn.layout import row_bounds
from fsdp_fn.packing import copy_packed
from fsdp_fn.passes import Bracket
from fsdp_fn.policy import Release
from fsdp_fn.ragged import from_spec, ragged_spec
from fsdp_fn.ragged_placement import is_ragged
from fsdp_fn.runtime import MainWeights, ResizedBuffer, fill_weights, weight_storage
from fsdp_fn.state import UnitState, trainable_segments, trainable_tensors
from fsdp_fn.units import OwnedParameters


class ShardedUnit(Unit):
    """One wrapped unit: its state, its storage, and its DTensor parameters."""

    storage: ResizedBuffer | MainWeights

    def __init__(
        self,
        owned: OwnedParameters,
        state: UnitState,
        mesh: DeviceMesh,
        bracket: Bracket,
        device: torch.device,
    ) -> None:
        self.state = state
        layout, axis = state.layout, state.axis
        self._trainable = trainable_tensors(layout)
        self._dtypes = [state.precision.main(spec.dtype) for spec in layout.tensors]
        self._specs = [
            ragged_spec(mesh, row_bounds(layout, index), spec.shape, state.precision.main(spec.dtype))
            for index, spec in enumerate(layout.tensors)
        ]
        self.parameters = tuple(
            _face(state.main.owned(index), self._specs[index], original)
            for index, original in enumerate(owned.parameters)
        )
        self._frozen = tuple(index for index, spec in enumerate(layout.tensors) if not spec.requires_grad)
        self._generation: GradientShards | None = None
        self._reduced: GradientShards | None = None
        held = trainable_segments(layout)
        reduces = [state.precision.reduce(layout.segments[index].dtype) for index in held]
        self._packed = ResizedBuffer(layout, held, reduces, axis, device)
        storage = weight_storage(state, device)
        super().__init__(
            state.name, owned.slots, self.parameters, owned.modules, storage, self._trainable, bracket, device
        )

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module's forward with the full weights in place."""
        if self.resting_now:
            # On torch before 2.13 every attribute of a ragged tensor is a call otherwise.
            with torch._C.DisableTorchFunctionSubclass():
                self._check_resting()
            # What a backward has reduced and not yet handed over is nobody's either, and is still needed: a checkpoint
            # may recompute this unit's next call when its last one is through.
            if self._reduced is None and self._generation is not None and self._generation.unused():
                self._generation.free()
        return super().run(forward, args, kwargs)

    def weights_version(self) -> int:
        """Changes by optimizers are counted by their hook, those by in-place operations by the parameters."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.version + sum(parameter._version for parameter in self.parameters)

    def _check_resting(self) -> None:
        """Somebody may have put another parameter in a slot, or asked for a gradient that is not laid out."""
        resting, dtypes = self.parameters, self._dtypes
        for parameters, name, index in self.slots:
            held = parameters.get(name)
            if held is not resting[index] or held.dtype is not dtypes[index]:
                raise RuntimeError(
                    f"{self.label}: parameter {name!r} was replaced or cast after sharding, so the gathers would "
                    "not read it; copy new values into the sharded parameter instead"
                )
        grown = self._modules.grown()
        if grown is not None:
            raise RuntimeError(
                f"{self.label}: a {grown} in it has gained or lost a module or parameter since sharding, which would "
                "train unsharded on each rank; build the whole module before fully_shard"
            )
        for index in self._frozen:
            if resting[index].requires_grad:
                name = self.state.layout.tensors[index].name
                raise RuntimeError(
                    f"{self.label}: parameter {name!r} was frozen when it was sharded and requires a gradient "
                    "now; set requires_grad before fully_shard"
                )

    def check_unchanged_by(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise TypeError where ``fn``, as ``nn.Module._apply`` gets it, would move or cast the main weights."""
        for flat in self.state.main.segments:
            probe = flat.new_empty(0)
            result = fn(probe)
            if result.dtype != probe.dtype or result.device != probe.device:
                raise TypeError(
                    f"{self.label}: cannot change sharded weights from {probe.dtype} on {probe.device} to "
                    f"{result.dtype} on {result.device}: do so before fully_shard, or choose dtypes by PrecisionPolicy"
                )

    # --- what the bracket asks for ------------------------------------------------------------------------------

    def gather(self) -> int:
        """Fill the storage from the main weights as they are now, whoever wrote them."""
        return fill_weights(self.storage, self.state)

    def deliver(self, grads: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Reduce this call's gradients; calls of one backward add up. Nothing returns through autograd."""
        if not self._trainable:
            return ()
        packed = self._packed
        self._check_dense(grads)
        packed.allocate()
        copy_packed(grads, packed.views, packed.padding)
        if self._reduced is None:
            self._reduced = self._next_generation()
            reduce_packed(packed.flats, self._reduced.flats, self.state.axis)
        else:
            mean = [torch.empty_like(flat) for flat in self._reduced.flats]
            reduce_packed(packed.flats, mean, self.state.axis)
            torch._foreach_add_(self._reduced.flats, mean)
        packed.free(Release.FREE)
        return ()

    def _check_dense(self, grads: list[torch.Tensor | None]) -> None:
        for index, grad in zip(self._trainable, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                name = self.state.layout.tensors[index].name
                raise ValueError(
                    f"{self.label}: the gradient of {name!r} is {grad.layout}; only dense ones are reduced"
                )

    def _next_generation(self) -> GradientShards:
        """Gradient shards that nobody holds: the last ones if so, else new ones."""
        if self._generation is None or not self._generation.unused():
            self._generation = GradientShards(self.state, self._specs)
        self._generation.allocate()
        return self._generation

    def finish_backward(self) -> None:
        """Hand this backward's gradients to the parameters."""
        reduced, self._reduced = self._reduced, None
        if reduced is None:
            return
        targets, addends = [], []
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for position, index in enumerate(self._trainable):
                parameter = self.parameters[index]
                if not parameter.requires_grad:
                    continue
                grad = reduced.faces[position]
                if parameter._backward_hooks:
                    with torch._C._EnableTorchFunction():
                        grad = _hooked(parameter, grad)
                    self._check_alike(grad, index, "what a hook made of the gradient of")
                held: Any = parameter.grad
                if held is None:
                    parameter.grad = grad
                else:
                    self._check_alike(held, index, "the .grad that was set on")
                    targets.append(held._local_tensor)
                    addends.append(grad._local_tensor)
            if targets:
                torch._foreach_add_(targets, addends)
            accumulated = [parameter for parameter in self.parameters if _has_accumulate_hooks(parameter)]
        for parameter in accumulated:
            hooks: Any = parameter._post_accumulate_grad_hooks
            for hook in tuple(hooks.values()):
                hook(parameter)

    def _check_alike(self, grad: Any, index: int, what: str) -> None:
        if not is_ragged(grad) or grad.placements != self._specs[index].placements:
            placed = f" of placements {grad.placements}" if isinstance(grad, DTensor) else ""
            raise TypeError(
                f"{self.label}: {what} {self.state.layout.tensors[index].name!r} is a {type(grad).__name__}{placed}; "
                "expected a tensor sharded as the parameter is, such as torch.zeros_like(parameter)"
            )

    def drop_backward(self) -> None:
        """The backward failed: its gradients are not delivered."""
        self._reduced = None


def _face(local: torch.Tensor, spec: Any, original: nn.Parameter) -> nn.Parameter:
    parameter = nn.Parameter(from_spec(local, spec, False), requires_grad=original.requires_grad)
    parameter.__dict__.update(original.__dict__)
    return parameter


def _has_accumulate_hooks(parameter: nn.Parameter) -> bool:
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(hooks) and parameter.requires_grad


def _hooked(parameter: nn.Parameter, grad: Any) -> Any:
    """What the parameter's own hooks make of this backward's gradient, called as autograd calls them on a leaf."""
    hooks: Any = parameter._backward_hooks
    for hook in tuple(hooks.values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad
