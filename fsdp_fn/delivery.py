"""Delivery: a unit's gradients into the ``.grad`` of what an optimizer holds: DTensor parameters, or plain shards.

Promises: ``.grad`` follows plain PyTorch: what has none gets a fresh one, what has one is added to, hooks are called,
with finished gradients. A gradient that somebody still holds is never overwritten.

[Note: sums in .grad] Between microbatches a strategy may leave gradients that are not complete. ``.grad`` of a DTensor
parameter then shows the sum itself, ``Partial`` where ranks have still to meet: setting it to None or zeroing it drops
what was summed up, as in plain PyTorch, and a norm or a step of it is refused. A finished gradient that is there when
the first such microbatch comes is put into the sum. ``.grad`` of a plain shard, which cannot show the sum, is NaN then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_fn.gradient_flow import GradientFlow
from fsdp_fn.gradients import GradientShards
from fsdp_fn.ragged import RaggedSpec
from fsdp_fn.ragged_placement import is_ragged
from fsdp_fn.state import trainable_tensors


class Delivery(ABC):
    """Where gradients of one unit go. ``flow``: where they come from. ``label``: the unit, in errors."""

    label = "a unit"

    def __init__(self, flow: GradientFlow) -> None:
        self.flow = flow
        self.shown: GradientShards | None = None
        self.folded: dict[int, Any] = {}

    @property
    @abstractmethod
    def parameters(self) -> Sequence[torch.Tensor]:
        """What the optimizer holds."""

    @abstractmethod
    def local_gradients(self) -> list[tuple[int, torch.Tensor]]:
        """This rank's parts of the gradients that there are, each with the index of a tensor of the unit's layout."""

    @abstractmethod
    def before_arrival(self) -> None:
        """More gradients are about to be added to the sum."""

    @abstractmethod
    def after_backward(self, finished: GradientShards | None) -> None:
        """A backward pass is through: hand over what is finished, show what is not."""

    @abstractmethod
    def unfinished(self) -> bool:
        """Whether a step would miss microbatches that are summed up and not complete."""

    @abstractmethod
    def drop_sum(self) -> None:
        """Forget the microbatches that were summed up and not finished."""


class FaceDelivery(Delivery):
    """To the unit's trainable DTensor parameters. See [Note: sums in .grad]."""

    def __init__(self, flow: GradientFlow, faces: Sequence[tuple[int, str, nn.Parameter, RaggedSpec]]) -> None:
        super().__init__(flow)
        self._indices = [index for index, _, _, _ in faces]
        self._names = [name for _, name, _, _ in faces]
        self._faces = tuple(parameter for _, _, parameter, _ in faces)
        self._specs = [spec for _, _, _, spec in faces]

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The DTensor parameters."""
        return self._faces

    def local_gradients(self) -> list[tuple[int, torch.Tensor]]:
        """Local tensors of the ``.grad`` that there are."""
        with torch._C.DisableTorchFunctionSubclass():
            found: list[Any] = [(index, face.grad) for index, face in zip(self._indices, self._faces, strict=True)]
            return [(index, grad._local_tensor) for index, grad in found if grad is not None]

    def before_arrival(self) -> None:
        """What was taken off a parameter, or set there, since the sum was shown."""
        if self.flow.summed is not None and self.flow.summed is self.shown:
            self._show(self.flow.summed)

    def after_backward(self, finished: GradientShards | None) -> None:
        """Hand over, then show what is left."""
        if finished is not None:
            self._hand_over(finished)
        if self.flow.summed is None:
            self.shown, self.folded = None, {}
        elif self.flow.summed is not self.shown:
            self._show(self.flow.summed)

    def _show(self, summed: GradientShards) -> None:
        fresh, self.shown = summed is not self.shown, summed
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for position, face in enumerate(self._faces):
                held: Any = face.grad
                if not face.requires_grad or held is summed.faces[position]:
                    continue
                if not fresh:
                    summed.locals[position].zero_()
                if held is not None:
                    self._check_alike(held, position, "the .grad that was set on")
                    self.flow.fold(position, held._local_tensor)
                if fresh and held is not None:
                    self.folded[position] = held
                face.grad = summed.faces[position]

    def _hand_over(self, finished: GradientShards) -> None:
        targets, addends = [], []
        shown = None if self.shown is None else self.shown.faces
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for position, face in enumerate(self._faces):
                if not face.requires_grad:
                    continue
                grad = finished.faces[position]
                if face._backward_hooks:
                    with torch._C._EnableTorchFunction():
                        grad = _hooked(face, grad)
                    self._check_alike(grad, position, "what a hook made of the gradient of")
                held: Any = face.grad
                if held is None or (shown is not None and held is shown[position]):
                    face.grad = grad
                else:
                    self._check_alike(held, position, "the .grad that was set on")
                    targets.append(held._local_tensor)
                    addends.append(grad._local_tensor)
            if targets:
                torch._foreach_add_(targets, addends)
            hooked = [face for face in self._faces if _has_accumulate_hooks(face)]
        _call_accumulate_hooks(hooked)

    def _check_alike(self, grad: Any, position: int, what: str) -> None:
        if not is_ragged(grad) or grad.placements != self._specs[position].placements:
            placed = f" of placements {grad.placements}" if isinstance(grad, DTensor) else ""
            raise TypeError(
                f"{self.label}: {what} {self._names[position]!r} is a {type(grad).__name__}{placed}; "
                "expected a tensor sharded as the parameter is, such as torch.zeros_like(parameter)"
            )

    def unfinished(self) -> bool:
        """Whether a ``.grad`` is the sum; one that was dropped since is no longer missed."""
        shown = self.shown
        if self.flow.summed is None or shown is None:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            return any(face.grad is summed for face, summed in zip(self._faces, shown.faces, strict=True))

    def drop_sum(self) -> None:
        """Take the sum off the parameters, and give back what was there before."""
        if self.shown is not None:
            with torch._C.DisableTorchFunctionSubclass():
                for position, (face, summed) in enumerate(zip(self._faces, self.shown.faces, strict=True)):
                    if face.grad is summed:
                        face.grad = self.folded.get(position)
        self.flow.summed = self.shown = None
        self.folded = {}


@dataclass(frozen=True, eq=False)
class PlainShard:
    """A plain parameter over this rank's flat main weights, and the tensors whose parts it holds.

    ``pieces``: of each tensor its index in the unit's layout, and where its elements begin in the parameter.
    ``of_segment``: position among the trainable segments, of a flat shard; ``of_tensor``: among the trainable tensors.
    """

    parameter: nn.Parameter
    pieces: tuple[tuple[int, int], ...]
    of_segment: int | None = None
    of_tensor: int | None = None

    def part_of(self, gradients: GradientShards) -> torch.Tensor:
        """The same part of the gradients."""
        if self.of_segment is not None:
            return gradients.flats[self.of_segment]
        assert self.of_tensor is not None
        return gradients.locals[self.of_tensor]


class PlainDelivery(Delivery):
    """To plain shards: tensors of this rank alone, without DTensor cost. See [Note: sums in .grad]."""

    def __init__(self, flow: GradientFlow, shards: Sequence[PlainShard]) -> None:
        super().__init__(flow)
        self.shards = tuple(shards)
        trainable = trainable_tensors(flow.layout)
        self._positions = [[(trainable.index(index), start) for index, start in shard.pieces] for shard in self.shards]
        self._markers: list[torch.Tensor] = []
        self._versions: list[int] = []

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """The plain parameters."""
        return tuple(shard.parameter for shard in self.shards)

    def local_gradients(self) -> list[tuple[int, torch.Tensor]]:
        """The ``.grad`` that there are."""
        found = [(shard.pieces[0][0], shard.parameter.grad) for shard in self.shards if shard.pieces]
        return [(index, grad) for index, grad in found if grad is not None]

    def before_arrival(self) -> None:
        """What was taken off a parameter, or set there, since the sum was shown."""
        if self.flow.summed is not None and self.flow.summed is self.shown:
            self._show(self.flow.summed)

    def after_backward(self, finished: GradientShards | None) -> None:
        """Hand over, then show what is left."""
        if finished is not None:
            self._hand_over(finished)
        if self.flow.summed is None:
            self._forget()
        elif self.flow.summed is not self.shown:
            self._show(self.flow.summed)

    def _show(self, summed: GradientShards) -> None:
        fresh, self.shown = summed is not self.shown, summed
        if fresh:
            parameters = [shard.parameter for shard in self.shards]
            self._markers = [torch.full_like(p, torch.nan, requires_grad=False) for p in parameters]
            self._versions = [marker._version for marker in self._markers]
        with torch.no_grad():
            for at, shard in enumerate(self.shards):
                held, marker = shard.parameter.grad, self._markers[at]
                if not shard.parameter.requires_grad or (held is marker and not self._zeroed(at)):
                    continue
                for position, start in self._positions[at]:
                    rows = summed.locals[position]
                    if not fresh:
                        rows.zero_()
                    if held is not None and held is not marker:
                        count = self.flow.own_numel(position)
                        self.flow.fold(position, held.reshape(-1)[start : start + count])
                if fresh and held is not None:
                    self.folded[at] = held
                if held is not marker:
                    shard.parameter.grad = marker

    def _zeroed(self, at: int) -> bool:
        """Whether a marker was written since, and is zero: ``zero_grad(set_to_none=False)``."""
        marker = self._markers[at]
        if marker._version == self._versions[at]:
            return False
        zeroed = not bool(marker.any())
        marker.fill_(torch.nan)
        self._versions[at] = marker._version
        return zeroed

    def _hand_over(self, finished: GradientShards) -> None:
        targets, addends = [], []
        with torch.no_grad():
            for at, shard in enumerate(self.shards):
                parameter = shard.parameter
                if not parameter.requires_grad:
                    continue
                grad = shard.part_of(finished)
                if parameter._backward_hooks:
                    grad = _hooked(parameter, grad)
                held = parameter.grad
                if held is None or (self._markers and held is self._markers[at]):
                    parameter.grad = grad
                else:
                    targets.append(held)
                    addends.append(grad)
            if targets:
                torch._foreach_add_(targets, addends)
        _call_accumulate_hooks([shard.parameter for shard in self.shards if _has_accumulate_hooks(shard.parameter)])

    def unfinished(self) -> bool:
        """Whether a ``.grad`` stands for a sum; one that was dropped since is no longer missed."""
        if self.flow.summed is None or not self._markers:
            return False
        pairs = zip(self.shards, self._markers, strict=True)
        return any(shard.parameter.grad is marker for shard, marker in pairs)

    def drop_sum(self) -> None:
        """Take what stands for the sum off the parameters, and give back what was there before."""
        for at, marker in enumerate(self._markers):
            if self.shards[at].parameter.grad is marker:
                self.shards[at].parameter.grad = self.folded.get(at)
        self.flow.summed = None
        self._forget()

    def _forget(self) -> None:
        self.shown, self._markers, self._versions, self.folded = None, [], [], {}


def _has_accumulate_hooks(parameter: nn.Parameter) -> bool:
    hooks: Any = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return bool(hooks) and parameter.requires_grad


def _call_accumulate_hooks(parameters: Sequence[nn.Parameter]) -> None:
    for parameter in parameters:
        hooks: Any = parameter._post_accumulate_grad_hooks
        for hook in tuple(hooks.values()):
            hook(parameter)


def _hooked(parameter: nn.Parameter, grad: Any) -> Any:
    """What the parameter's own hooks make of this backward's gradient, called as autograd calls them on a leaf."""
    hooks: Any = parameter._backward_hooks
    for hook in tuple(hooks.values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad
