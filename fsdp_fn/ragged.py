"""Ragged: the DTensor face of a flat main-weight shard, whose rows lie on ranks in ragged ranges.

Promises: the local tensor of a face is the given view itself, so a write through either is seen through both.
Its placement never decays: every operation either keeps it, or gathers, or is refused (``ragged_ops``).
``full_tensor``, ``redistribute``, ``to_local``, copying, pickling and torch's distributed checkpoints give
the unsharded values at any bounds. What torch makes itself and places otherwise (a full optimizer state dict
that it distributed) is brought back by :func:`restore_optimizer_state`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.optim.optimizer import _foreach_supported_types as _optimizer_foreach_types
from torch.utils._foreach_utils import _foreach_supported_types as _clipping_foreach_types

from fsdp_fn.ragged_intercept import DISPATCHES_SUBCLASSES, intercept, refuse_gradient
from fsdp_fn.ragged_ops import run
from fsdp_fn.ragged_placement import RaggedShard, RaggedSpec
from fsdp_fn.ragged_whole import whole

__all__ = [
    "RaggedShard",
    "RaggedSpec",
    "RaggedTensor",
    "as_ragged",
    "from_spec",
    "ragged_spec",
    "restore_optimizer_state",
    "restore_placement",
]


class RaggedTensor(DTensor):
    """A DTensor on one mesh axis with a :class:`RaggedShard` placement. Made by :func:`as_ragged`."""

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

    @property
    def data(self) -> RaggedTensor:
        """The same rows, apart from any graph, as ``torch.Tensor.data``."""
        return self.detach()  # type: ignore[return-value]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """Copied into the rows held here, which the unit's gathers read; of the same placement, shape and dtype."""
        if not isinstance(value, RaggedTensor) or value.placements != self.placements or value.dtype != self.dtype:
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
        """The one placement."""
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
        """To ``Replicate``, or from there to a plain shard; all ranks of the mesh must call. Differentiable.

        ``async_op`` is met by a result that is complete. Raises NotImplementedError for another mesh, a
        ``Partial`` target, or a dtype for either direction.
        """
        if device_mesh is not None and device_mesh != self.device_mesh:
            raise NotImplementedError(f"redistribute from mesh {self.device_mesh} to another mesh, {device_mesh}")
        if any(value is not None for value in dtypes.values()):
            raise NotImplementedError(f"redistribute of a ragged DTensor takes no {', '.join(dtypes)}: cast it before")
        target = tuple(placements or ())
        if len(target) != 1 or isinstance(target[0], Partial):
            raise NotImplementedError(
                f"redistribute from {self.placements} to {placements}: expected one shard or Replicate()"
            )
        if target == self.placements:
            return self
        gathered: DTensor = _Gather.apply(self)
        return gathered if target == (Replicate(),) else gathered.redistribute(self.device_mesh, target)


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
        return DTensor.from_local(whole(value), value.device_mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> RaggedTensor:
        refuse_gradient("backward of redistribute")
        return from_spec(_own_rows(grad, ctx.spec), ctx.spec, False)


def ragged_spec(
    mesh: DeviceMesh, bounds: Sequence[int], shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> RaggedSpec:
    """What :func:`from_spec` needs: made once a parameter, shared by its gradient and optimizer state.

    ``mesh``: one-dimensional. ``bounds``: see :class:`RaggedShard`. ``shape``: of the whole tensor, at least
    one dimension. Raises ValueError, naming what does not fit.
    """
    placement, shape = RaggedShard(bounds), torch.Size(shape)
    if mesh.ndim != 1:
        raise ValueError(f"ragged_spec: expected a mesh of one dimension, got {mesh.ndim}; take one axis of it by name")
    if not shape:
        raise ValueError("ragged_spec: a 0-dim tensor has no rows to share out; give the parameter shape (1,)")
    if placement.rows != shape[0] or len(placement.bounds) != mesh.size() + 1:
        raise ValueError(
            f"ragged_spec: bounds {placement.bounds} are for {placement.rows} rows on "
            f"{len(placement.bounds) - 1} ranks, but the tensor's shape is {tuple(shape)} and the mesh has "
            f"{mesh.size()} ranks"
        )
    stride = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        stride[axis - 1] = stride[axis] * max(1, shape[axis])
    return RaggedSpec(mesh, (placement,), tensor_meta=TensorMeta(shape, tuple(stride), dtype))


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
            f"as_ragged: rank {rank} of bounds {tuple(bounds)} holds {expected} of shape {tuple(shape)}, but "
            "got "
            f"a local tensor of shape {tuple(local.shape)}"
        )
    return from_spec(local.detach(), spec, requires_grad)


def restore_placement(value: DTensor, like: RaggedTensor) -> RaggedTensor:
    """``value`` placed as ``like``: itself where it is, else redistributed; then all ranks must call.

    Raises ValueError where the two are not of one shape and mesh, or where ``value`` is labelled with a
    placement that it does not have.
    """
    if isinstance(value, RaggedTensor) and value.placements == like.placements:
        return value
    if value.shape != like.shape or value.device_mesh != like.device_mesh:
        raise ValueError(
            f"restore_placement: expected a DTensor of shape {tuple(like.shape)} on {like.device_mesh}, got "
            "one of "
            f"shape {tuple(value.shape)} on {value.device_mesh}"
        )
    return from_spec(_own_rows(value, cast(RaggedSpec, like._spec)), _spec_of(value, like), False)


def restore_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Place the state of each ragged parameter as the parameter is.

    The state that an optimizer makes itself is so already, and then this only looks. State that
    ``set_optimizer_state_dict`` made from a full state dict is on plain shards: it is redistributed, and all
    ranks must call. Until then a multi-tensor or fused step refuses it by name.
    """
    for parameter, state in optimizer.state.items():
        if type(parameter) is not RaggedTensor:
            continue
        for key, value in state.items():
            if type(value) is not RaggedTensor and isinstance(value, DTensor) and value.shape == parameter.shape:
                state[key] = restore_placement(value, parameter)


def _own_rows(value: DTensor, spec: RaggedSpec) -> torch.Tensor:
    """This rank's rows, as ``spec`` places them, of a DTensor of any placement."""
    if value.placements == spec.placements:
        return value._local_tensor
    return whole(value)[spec.placement.row_range(spec.mesh.get_local_rank())].clone()


def _spec_of(value: DTensor, like: RaggedTensor) -> RaggedSpec:
    if value.dtype == like.dtype:
        return cast(RaggedSpec, like._spec)
    return ragged_spec(like.device_mesh, like.placement.bounds, like.shape, value.dtype)


def _make(local: torch.Tensor, spec: RaggedSpec) -> RaggedTensor:
    return from_spec(local, spec, False)


if DISPATCHES_SUBCLASSES:
    # There the dispatched operation is all that need be overridden; torch's default would retype results.
    RaggedTensor.__torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

# torch keeps lists of exact types whose steps and clipping are multi-tensor by default; DTensor is on them.
for _types in (_optimizer_foreach_types, _clipping_foreach_types):
    if RaggedTensor not in _types:
        _types.append(RaggedTensor)
