"""Ragged: the DTensor face of a flat main-weight shard, whose rows lie on ranks in ragged ranges.

Promises: the local tensor of a face is the given view itself, so a write through either is seen through both, and is
counted on it. It lies on a mesh of any number of dimensions, as ``mesh_spec`` describes. Its placement never decays:
every operation either keeps it, or gathers, or is refused (``ragged_ops``). ``full_tensor``, ``redistribute``,
``to_local``, copying, pickling and torch's distributed checkpoints give the unsharded values at any bounds. What torch
makes itself and places otherwise (a full optimizer state dict that it distributed) is brought back by
:func:`restore_optimizer_state`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _foreach_supported_types as _optimizer_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as _clipping_foreach_types

from fsdp_fn.ragged_checkpoint import local_chunk, write_item
from fsdp_fn.ragged_intercept import DISPATCHES_SUBCLASSES, intercept, refuse_gradient
from fsdp_fn.ragged_ops import run
from fsdp_fn.ragged_placement import RaggedShard, RaggedSpec, UnfinishedGradient
from fsdp_fn.ragged_spec import mesh_spec, ragged_spec
from fsdp_fn.ragged_whole import part_of, replicated, whole

__all__ = [
    "RaggedShard",
    "RaggedSpec",
    "RaggedTensor",
    "UnfinishedGradient",
    "as_ragged",
    "check_gradients_finished",
    "from_spec",
    "mesh_spec",
    "placed_as",
    "ragged_spec",
    "restore_optimizer_state",
    "restore_placement",
]


class RaggedTensor(DTensor):
    """A DTensor placed as a :class:`RaggedSpec` says. Made by :func:`as_ragged` and :func:`from_spec`."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return intercept(func, args, kwargs or {}, _make)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(func, args, kwargs or {}, _make)

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"RaggedTensor(shape={tuple(self.shape)}, local_tensor={self._local_tensor}, "
            f"placements={self._spec.placements})"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The rows alone: the storage that they are a view of holds the whole unit's.
        return _rebuild, (self._local_tensor.detach().clone(), self._spec, self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> RaggedTensor:
        """A copy of these rows, gradient and attributes; torch's own would look for a storage behind the face."""
        with torch._C.DisableTorchFunctionSubclass():
            if not self.is_leaf:
                raise RuntimeError("deepcopy of a ragged DTensor that has a gradient history: detach() it before")
            copied = memo.get(id(self))
            if copied is None:
                copied = from_spec(
                    self._local_tensor.detach().clone(), cast(RaggedSpec, self._spec), self.requires_grad
                )
                memo[id(self)] = copied
                kept = {key: value for key, value in self.__dict__.items() if key not in copied.__dict__}
                copied.__dict__.update(copy.deepcopy(kept, memo))
                copied.grad = copy.deepcopy(self.grad, memo)
            return copied

    @property
    def data(self) -> RaggedTensor:
        """The same rows, apart from any graph, as ``torch.Tensor.data``."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Copied into the rows held here, which the unit's gathers read; of the same placement, shape and dtype."""
        if (
            not isinstance(value, RaggedTensor)
            or value.placements != self.placements
            or value.shape != self.shape
            or value.dtype != self.dtype
        ):
            raise TypeError(
                f"data of a ragged DTensor {tuple(self.shape)} of {self.dtype}: expected one placed alike, got "
                f"{type(value).__name__} {tuple(value.shape)} of {value.dtype}; write rows with copy_"
            )
        self._local_tensor.copy_(value._local_tensor)

    @staticmethod
    def __tensor_unflatten__(inner_tensors: Any, flatten_spec: Any, outer_size: Any, outer_stride: Any) -> DTensor:
        placements, meta, _, requires_grad = flatten_spec
        meta = TensorMeta(outer_size, outer_stride, meta.dtype)
        spec = RaggedSpec(inner_tensors["device_mesh"], placements, tensor_meta=meta)
        return from_spec(inner_tensors["_local_tensor"], spec, requires_grad)

    @property
    def placement(self) -> RaggedShard:
        """The ragged placement; one part of all the rows where no mesh dimension carries one."""
        return cast(RaggedSpec, self._spec).placement

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's rows, ``(rows, *shape[1:])``: a view. Differentiable, for these rows only."""
        if grad_placements is not None and tuple(grad_placements) != self.placements:
            raise NotImplementedError(
                f"to_local of a ragged DTensor: the gradient of {self.placements} cannot be taken on {grad_placements}"
            )
        if torch.is_grad_enabled() and self.requires_grad:
            local: torch.Tensor = _ToLocal.apply(self)
            return local
        return self._local_tensor

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        **dtypes: torch.dtype | None,
    ) -> DTensor:
        """To ``Replicate`` on every mesh dimension, or from there to plain shards. Differentiable.

        All ranks of the mesh must call. ``async_op`` is met by a result that is complete. Raises NotImplementedError
        for another mesh, a ``Partial`` or another ragged target, or a dtype for either direction, UnfinishedGradient
        where a sum is still to come.
        """
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise NotImplementedError(f"redistribute from mesh {self.device_mesh} to another mesh, {device_mesh}")
        if any(value is not None for value in dtypes.values()):
            raise NotImplementedError(f"redistribute of a ragged DTensor takes no {', '.join(dtypes)}: cast it before")
        target = tuple(placements or ())
        if target == self.placements and not all(each.is_replicate() for each in target):
            return self
        if len(target) != self.device_mesh.ndim or any(isinstance(each, Partial | RaggedShard) for each in target):
            raise NotImplementedError(
                f"redistribute from {self.placements} to {placements}: expected Replicate() or a plain shard for each "
                "mesh dimension; to another ragged placement, copy_ into a tensor that has it"
            )
        gathered: DTensor = _Gather.apply(self)
        if all(each.is_replicate() for each in target):
            return gathered
        return gathered.redistribute(self.device_mesh, target)

    # --- torch.distributed.checkpoint -----------------------------------------------------------------------

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [write_item(fqn, self)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [local_chunk(cast(RaggedSpec, self._spec))]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        cast(RaggedSpec, self._spec).require_finished("a checkpoint")
        return self.to_local()


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: RaggedTensor) -> torch.Tensor:
        ctx.spec = value._spec
        return value._local_tensor.view_as(value._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> RaggedTensor:
        refuse_gradient("backward of to_local")
        return from_spec(grad, ctx.spec, False)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: RaggedTensor) -> DTensor:
        ctx.spec = value._spec
        full = whole(value)
        # A copy at every placement, also where nothing is split.
        return replicated(full.clone() if full is value._local_tensor else full, value)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> RaggedTensor:
        refuse_gradient("backward of redistribute")
        return from_spec(_own_part(grad, ctx.spec), ctx.spec, False)


def from_spec(local: torch.Tensor, spec: RaggedSpec, requires_grad: bool) -> RaggedTensor:
    """The face of ``local``, this rank's rows as ``spec`` places them: no copy, no check, no collective."""
    value: Any = RaggedTensor(local, spec, requires_grad=requires_grad)
    return value  # type: ignore[no-any-return]


def _rebuild(local: torch.Tensor, spec: RaggedSpec, requires_grad: bool) -> RaggedTensor:
    return from_spec(local, spec, requires_grad)


def as_ragged(
    local: torch.Tensor,
    mesh: DeviceMesh,
    bounds: Sequence[int],
    shape: Sequence[int],
    requires_grad: bool = False,
) -> RaggedTensor:
    """The face of ``local``, ``(bounds[r + 1] - bounds[r], *shape[1:])`` on rank ``r`` of a ``shape``.

    Raises ValueError where ``local`` is not of that shape, and as :func:`ragged_spec` does.
    """
    spec = ragged_spec(mesh, bounds, shape, local.dtype)
    rank = mesh.get_local_rank()
    expected = (bounds[rank + 1] - bounds[rank], *shape[1:])
    if tuple(local.shape) != expected:
        raise ValueError(
            f"as_ragged: rank {rank} of bounds {tuple(bounds)} holds {expected} of shape {tuple(shape)}, but got "
            f"a local tensor of shape {tuple(local.shape)}"
        )
    return from_spec(local.detach(), spec, requires_grad)


def restore_placement(value: DTensor, like: RaggedTensor) -> RaggedTensor:
    """``value`` placed as ``like``: itself where it is, else redistributed; then all ranks must call.

    Raises ValueError where the two are not of one shape and mesh, or where ``value`` is labelled with a
    placement that it does not have, and UnfinishedGradient where a sum of either is still to come.
    """
    if isinstance(value, RaggedTensor) and value.placements == like.placements:
        return value
    if value.shape != like.shape or value.device_mesh != like.device_mesh:
        raise ValueError(
            f"restore_placement: expected a DTensor of shape {tuple(like.shape)} on {like.device_mesh}, got one of "
            f"shape {tuple(value.shape)} on {value.device_mesh}"
        )
    spec = cast(RaggedSpec, like._spec)
    spec.require_finished("restore_placement")
    return placed_as(value, spec)


def placed_as(value: DTensor, spec: RaggedSpec) -> RaggedTensor:
    """A copy of ``value``, of the same shape and mesh, placed as ``spec``. All ranks of the mesh must call."""
    own = _own_part(value, spec)
    return from_spec(own.clone() if own is value._local_tensor else own, spec.like(value.dtype), False)


def restore_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Place the state of each ragged parameter as the parameter is.

    The state that an optimizer makes itself is so already, and then this only looks. State that
    ``set_optimizer_state_dict`` made from a full state dict is on plain shards, and that of a parameter whose unit was
    laid out anew lies as it did before: both are redistributed, and all ranks must call. Until then a multi-tensor or
    fused step refuses the first by name.
    """
    for parameter, state in optimizer.state.items():
        if type(parameter) is not RaggedTensor:
            continue
        for key, value in state.items():
            if isinstance(value, DTensor) and value.shape == parameter.shape:
                state[key] = restore_placement(value, parameter)


def check_gradients_finished(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnfinishedGradient where a sum of the ``.grad`` of a ragged parameter is still to come.

    A step refuses it too, but an optimizer may have decayed weights and counted the step before it reads a gradient.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if type(parameter) is RaggedTensor and type(parameter.grad) is RaggedTensor:
                cast(RaggedSpec, parameter.grad._spec).require_finished(f"the step of {type(optimizer).__name__}")


def _own_part(value: DTensor, spec: RaggedSpec) -> torch.Tensor:
    """This rank's part, as ``spec`` places it, of a DTensor of any placement."""
    if value.placements == spec.placements:
        return value._local_tensor
    return part_of(whole(value), spec).clone()


def _make(local: torch.Tensor, spec: RaggedSpec) -> RaggedTensor:
    return from_spec(local, spec, False)


if DISPATCHES_SUBCLASSES:
    # There the dispatched operation is all that need be overridden; torch's default would retype results.
    RaggedTensor.__torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

# torch keeps lists of exact types whose steps and clipping are multi-tensor by default; DTensor is on them.
for _types in (_optimizer_foreach_types, _clipping_foreach_types):
    if RaggedTensor not in _types:
        _types.append(RaggedTensor)
