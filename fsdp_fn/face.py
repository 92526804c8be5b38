"""Face: the DTensor parameters and gradients that an optimizer sees, over the flat tensors that are the truth.

Promises: a parameter's local tensor is a view of the unit's main weights for as long as the unit lives, so whatever
writes the parameter writes the main weight, and the next gather reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_fn.bracket import Unit
from fsdp_fn.buffer_specs import spec_of
from fsdp_fn.delivery import Delivery, FaceDelivery
from fsdp_fn.escapes import held_at
from fsdp_fn.gathering import all_gather
from fsdp_fn.gradient_flow import GradientFlow
from fsdp_fn.habits import Habits
from fsdp_fn.passes import Bracket
from fsdp_fn.placement import Placement, gradient_placements
from fsdp_fn.planes import Phase
from fsdp_fn.ragged import RaggedSpec, from_spec, placed_as
from fsdp_fn.ragged_placement import is_ragged
from fsdp_fn.state import UnitState, reduced_bytes, trainable_tensors
from fsdp_fn.tensor_parallel import TensorParallel, tensor_parallel_of
from fsdp_fn.units import OwnedParameters, Setting
from fsdp_fn.weights import Changes, weights_of


@dataclass(frozen=True, eq=False)
class Borrowed:
    """A slot in one unit's modules of a parameter that another unit holds, as tied weights make it."""

    name: str
    container: Any
    key: Any


class ShardedUnit(Unit):
    """One wrapped unit: its state, its weights, its gradients on their way, and its DTensor parameters.

    ``owned``: plain parameters; and DTensor parameters of other units, which become this one's by :meth:`adopt`.
    ``borrowed``: slots in its modules that other units fill.
    """

    def __init__(
        self,
        owned: OwnedParameters,
        state: UnitState,
        setting: Setting,
        bracket: Bracket,
        borrowed: tuple[Borrowed, ...] = (),
        parallel: Sequence[TensorParallel | None] | None = None,
    ) -> None:
        self.state, self.mesh, self.setting, self.borrowed = state, setting.mesh, setting, borrowed
        self.habits = Habits()
        layout, precision = state.layout, state.precision
        self._trainable = trainable_tensors(layout)
        self._dtypes = [precision.main(spec.dtype) for spec in layout.tensors]
        sum_dtypes = [precision.accumulate(spec.dtype) for spec in layout.tensors]
        names = [axis.name for axis in state.axes]
        if parallel is None:
            parallel = [
                None if is_ragged(parameter) else tensor_parallel_of(parameter, f"parameter {name!r}", names)
                for name, parameter in zip(owned.names, owned.parameters, strict=True)
            ]
        self.parallel = tuple(parallel)
        self._any_parallel = any(parallel is not None for parallel in self.parallel)
        specs = [self.spec(index, state.main.placements, dtype) for index, dtype in enumerate(self._dtypes)]
        summed = gradient_placements(state.strategy)
        sum_specs = [self.spec(index, summed, dtype) for index, dtype in enumerate(sum_dtypes)]
        self.parameters = tuple(
            original if is_ragged(original) else _face(state.main.owned(index), specs[index], original)
            for index, original in enumerate(owned.parameters)
        )
        self._to_adopt = [(i, specs[i]) for i, original in enumerate(owned.parameters) if is_ragged(original)]
        for index in self._trainable:
            if sum_dtypes[index] != self._dtypes[index]:
                self.parameters[index].grad_dtype = None  # see [Note: sums in .grad]
        self._wanted = tuple(spec.requires_grad for spec in layout.tensors)
        self.flow = GradientFlow(state, specs, sum_specs)
        faces = [(i, layout.tensors[i].name, self.parameters[i], specs[i]) for i in self._trainable]
        self._locals = self._held_locals()
        self.delivery: Delivery = FaceDelivery(self.flow, faces)
        self.changes = Changes(state.main.segments)
        super().__init__(
            state.name,
            owned.slots,
            self.parameters,
            owned.modules,
            weights_of(state, setting.policy, self.changes),
            self._trainable,
            bracket,
            setting.device,
            precision,
            setting.policy,
            tops=owned.tops,
            reduced_nbytes=reduced_bytes(state),
        )

    def adopt(self) -> None:
        """Take over the values, gradients included, of parameters that were sharded otherwise. All ranks must call.

        The parameters stay the same objects, so that an optimizer and the modules go on with them.
        """
        with torch.inference_mode(False), torch.no_grad():
            for index, spec in self._to_adopt:
                face: Any = self.parameters[index]
                local, grad = self.state.main.owned(index), face.grad
                local.copy_(placed_as(face, spec)._local_tensor)
                face.grad = None
                with torch._C.DisableTorchFunctionSubclass():
                    face._local_tensor, face._spec = local, spec
                if grad is not None:
                    face.grad = placed_as(grad, spec.like(grad.dtype))
        self._to_adopt = []
        self._locals = self._held_locals()

    def _held_locals(self) -> list[torch.Tensor]:
        faces: Sequence[Any] = self.parameters
        with torch._C.DisableTorchFunctionSubclass():
            return [face._local_tensor for face in faces]

    def run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module's forward with the full weights in place."""
        self.hide()
        if self.resting_now:
            # On torch before 2.13 every attribute of a ragged tensor is a call otherwise.
            with torch._C.DisableTorchFunctionSubclass():
                self._check_resting()
            self.flow.free_unused()
        for slot in self.borrowed:
            if is_ragged(slot.container[slot.key]):
                raise RuntimeError(
                    f"{self.label}: parameter {slot.name!r} is tied to one that another unit holds and has not "
                    "gathered now; call fully_shard on a module that contains both, and call both through its forward"
                )
        return super().run(forward, args, kwargs)

    def outdated(self) -> bool:
        """Whether ``requires_grad`` of a parameter is no longer what the layout was made for."""
        with torch._C.DisableTorchFunctionSubclass():
            return any(p.requires_grad is not w for p, w in zip(self.parameters, self._wanted, strict=True))

    def spec(self, index: int, placements: Sequence[Placement], dtype: torch.dtype) -> RaggedSpec:
        """How tensor ``index`` lies on the mesh where its flat tensor is placed as ``placements``."""
        layout, axes = self.state.layout, self.state.axes
        return spec_of(layout, index, self.mesh, placements, axes, dtype, self.parallel[index])

    def present(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Full weights as the model reads them: tensor-parallel ones as DTensors of their own mesh."""
        if not self._any_parallel:
            return tensors
        pairs = zip(tensors, self.parallel, strict=True)
        return [tensor if parallel is None else parallel.present(tensor) for tensor, parallel in pairs]

    def rename(self, name: str) -> None:
        """Set the name that errors and the event log use."""
        super().rename(name)
        self.delivery.label = self.label

    def take_up(self, habits: Habits) -> None:
        """Go on with these."""
        self.habits = habits
        self.weights.launch_with(habits.gather or all_gather)
        self.flow.axes, self.flow.scatter = habits.reduced_over or self.state.axes, habits.scatter

    @property
    def last_microbatch(self) -> bool:
        """Whether a backward that comes completes the gradients."""
        return self.bracket.last_microbatch and not self.habits.holds_back

    @property
    def reshards_after_forward(self) -> bool | int:
        """As the policy or, later, the user said."""
        told = self.habits.reshards_after_forward
        return super().reshards_after_forward if told is None else told

    @property
    def keeps_after_backward(self) -> bool:
        """Whether full weights stay after backward, for a forward before they change."""
        return self.habits.keeps_after_backward

    def source(self) -> object:
        """The main weights as they are known to be."""
        return self.changes.copied()

    def before_backward(self) -> None:
        """Have others gather ahead."""
        for reference in self.habits.ahead:
            module: Any = reference()
            if module is not None:
                module._fsdp_unit.gather_early(Phase.BACKWARD)

    def weights_version(self) -> int:
        """Changes by optimizers are counted by their hook, all others by the flat tensors that they write."""
        return self.changes.count()

    def _check_resting(self) -> None:
        """Somebody may have put another parameter in a slot."""
        resting, dtypes = self.parameters, self._dtypes
        for parameters, name, index in self.slots:
            held = held_at(parameters, name)
            if held is not resting[index] or held.dtype is not dtypes[index]:
                raise RuntimeError(
                    f"{self.label}: parameter {name!r} was replaced or cast after sharding, so the gathers would "
                    "not read it; copy new values into the sharded parameter instead"
                )
            local: Any = held
            # By identity: an address would not tell on a rank that owns no rows, which would then gather alone.
            if local._local_tensor is not self._locals[index]:
                raise RuntimeError(
                    f"{self.label}: the memory of parameter {name!r} was replaced after sharding (to_empty of a module "
                    "in it, or .data), so the gathers would not read it; call to_empty on the wrapped module, or copy "
                    "new values into the sharded parameter"
                )
        grown = self.modules.grown()
        if grown is not None:
            raise RuntimeError(
                f"{self.label}: a {grown} in it has gained or lost a module or parameter since sharding, which would "
                "train unsharded on each rank; build the whole module before fully_shard"
            )

    def check_unchanged_by(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Raise TypeError where ``fn``, as ``nn.Module._apply`` gets it, would move, cast or replace main weights."""
        for flat in self.state.main.segments:
            probe = flat.new_zeros(1)
            result = fn(probe)
            if result.dtype != probe.dtype or result.device != probe.device:
                raise TypeError(
                    f"{self.label}: cannot change sharded weights from {probe.dtype} on {probe.device} to "
                    f"{result.dtype} on {result.device}: do so before fully_shard, or choose dtypes by PrecisionPolicy"
                )
            if result.data_ptr() != probe.data_ptr():
                raise TypeError(
                    f"{self.label}: cannot replace sharded weights by other tensors (to_empty and the like): they have "
                    "memory already; for a model on meta, give init or broadcast=True to fully_shard"
                )

    # --- what the bracket asks for ------------------------------------------------------------------------------

    def deliver(self, grads: list[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """Reduce this call's gradients; calls of one backward add up. Nothing returns through autograd."""
        if not self._trainable:
            return ()
        self._check_dense(grads)
        self.delivery.before_arrival()
        self.flow.arrive(grads, last_microbatch=self.last_microbatch)
        if self.flow.summed is not None:
            self.bracket.expect_more(self)
        return ()

    def complete_sum(self) -> None:
        """Complete the sum of a unit that the last microbatch did not use, or only before others completed it."""
        if self.flow.summed is not None:
            self.agree("the completed reduction")
            self.delivery.before_arrival()
            with torch.no_grad():
                self.flow.finish_sum()

    def _check_dense(self, grads: list[torch.Tensor | None]) -> None:
        for index, grad in zip(self._trainable, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                name = self.state.layout.tensors[index].name
                raise ValueError(
                    f"{self.label}: the gradient of {name!r} is {grad.layout}; only dense ones are reduced"
                )

    def finish_backward(self) -> None:
        """Hand this backward's gradients to the parameters."""
        finished = self.flow.take_finished()
        if finished is not None:
            self.changes.laps += 1
            self.flow.settle()
            if self.habits.on_reduced is not None:
                self.habits.on_reduced(finished.flats)
        self.delivery.after_backward(finished)

    def drop_backward(self) -> None:
        """The backward failed: its finished gradients are not delivered."""
        self.flow.drop_finished()


def _face(local: torch.Tensor, spec: Any, original: nn.Parameter) -> nn.Parameter:
    parameter = nn.Parameter(from_spec(local, spec, False), requires_grad=original.requires_grad)
    kept = {key: value for key, value in original.__dict__.items() if key not in parameter.__dict__}
    parameter.__dict__.update(kept)
    return parameter
