"""Wrapping: PyTorch's ``fully_shard`` signature, led to ours.

Promises: a mesh of one dimension is ZeRO-3, one of two HSDP, as in PyTorch. Gradients of microbatches without sync are
summed unreduced, in the reduce dtype. Modules are moved to the mesh's device first.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

import fsdp_fn
from fsdp_fn.compat.methods import AUTO, GROUP, META, FSDPModule, Memory, with_summed
from fsdp_fn.groups import default_mesh, mesh_device
from fsdp_fn.module import FsdpModule
from fsdp_fn.placement import Strategy
from fsdp_fn.policy import PrecisionPolicy, SchedulePolicy
from fsdp_fn.units import device_type_of


def fully_shard(
    module: nn.Module | list[nn.Module] | tuple[nn.Module, ...],
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (never changed)
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
) -> Any:
    """Shard ``module`` in place, as :func:`torch.distributed.fsdp.fully_shard` does; all ranks of ``mesh`` must call.

    Returns ``module``. Arguments mean what they mean there. The modules of a list become units of their own that take
    the same orders. ``shard_placement_fn`` may return None or ``Shard(0)``: parameters are owned by whole rows.
    ``docs/fsdp2.md`` has a table of what is served.

    Raises NotImplementedError for what is not served; otherwise as :func:`fsdp_fn.fully_shard`.
    """
    modules = list(module) if isinstance(module, list | tuple) else [module]
    mesh = default_mesh(_device_type(modules)) if mesh is None else mesh
    strategy, precision = _strategy(mesh, dp_mesh_dims), _precision(mp_policy)
    policy = SchedulePolicy(
        reshard_after_forward=True if reshard_after_forward is None else reshard_after_forward,
        offload=_offloads(offload_policy, mesh),
    )
    for one in modules:
        if isinstance(one, FsdpModule):
            raise ValueError(f"fully_shard was applied to this {type(one).__name__} already")
        _check_placements(one, shard_placement_fn)
        _move(one, mesh_device(mesh), ignored_params or set())
        on_meta = any(tensor.is_meta for tensor in (*one.parameters(), *one.buffers()))
        fsdp_fn.fully_shard(
            one,
            mesh,
            placements=strategy,
            precision=precision,
            policy=policy,
            init=_fill_with_zeros if on_meta else None,
            ignored=ignored_params or (),
        )
        one.__class__ = _compat_class(cast(Any, type(one)))
        one.__dict__[AUTO] = reshard_after_forward is None
        if on_meta:
            one.__dict__[META] = Memory.AWAITED
    if len(modules) > 1:
        group = tuple(weakref.ref(one) for one in modules)
        for one in modules:
            one.__dict__[GROUP] = group
    return module


def _device_type(modules: list[nn.Module]) -> str:
    """Of the accelerator where there is one, as in PyTorch."""
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        return "cpu" if accelerator is None else accelerator.type
    return device_type_of(modules[0]) or "cpu"


def _strategy(mesh: DeviceMesh, dp_mesh_dims: Any) -> Strategy:
    names = mesh.mesh_dim_names
    if dp_mesh_dims is not None:
        if len(dp_mesh_dims.shard_names) != 1 or len(dp_mesh_dims.replicate_names) > 1:
            raise NotImplementedError(
                f"fully_shard: dp_mesh_dims={dp_mesh_dims}: expected one dimension to shard over and at most one to "
                "replicate over; flatten several into one, as in mesh['a', 'b']._flatten('ab')"
            )
        return with_summed((*dp_mesh_dims.replicate_names, *dp_mesh_dims.shard_names), reduced_inside=False)
    if mesh.ndim == 1:
        return with_summed((names[0] if names else None,), reduced_inside=False)
    if mesh.ndim != 2 or names is None:
        raise ValueError(
            f"fully_shard: expected a mesh of one dimension, or of two with names (replicate, shard); got {mesh}"
        )
    return with_summed(names, reduced_inside=False)


def _precision(policy: MixedPrecisionPolicy) -> PrecisionPolicy:
    reduced = policy.reduce_dtype or policy.param_dtype
    return PrecisionPolicy(
        compute_dtype=policy.param_dtype,
        reduce_dtype=reduced,
        accumulate_dtype=reduced,
        output_dtype=policy.output_dtype,
        cast_inputs=policy.cast_forward_inputs,
    )


def _offloads(policy: OffloadPolicy, mesh: DeviceMesh) -> bool:
    if not isinstance(policy, CPUOffloadPolicy):
        return False
    if mesh.device_type == "cpu":
        return False  # there already
    if not policy.pin_memory:
        raise NotImplementedError("CPUOffloadPolicy(pin_memory=False) is not served: offloaded weights are pinned")
    return True


def _fill_with_zeros(module: nn.Module) -> None:
    """Values until the script's own, after ``to_empty`` or a load; forward is refused before."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if not isinstance(tensor, DTensor):
            tensor.zero_()


def _check_placements(module: nn.Module, shard_placement_fn: Callable[[nn.Parameter], Any] | None) -> None:
    if shard_placement_fn is None:
        return
    for name, parameter in module.named_parameters():
        placement = None if isinstance(parameter, DTensor) else shard_placement_fn(parameter)
        if placement is not None and placement != Shard(0):
            raise NotImplementedError(
                f"fully_shard: shard_placement_fn gives {placement} for {name!r}; only Shard(0) on the unit's own mesh "
                "is served, for each rank owns whole rows. For experts on another mesh, wrap them with that mesh"
            )


def _move(module: nn.Module, device: torch.device, ignored: set[nn.Parameter]) -> None:
    """Parameters and buffers that are elsewhere, to the mesh's device; what is on meta waits for ``to_empty``."""
    for parameter in module.parameters():
        if not isinstance(parameter, DTensor) and not parameter.is_meta and parameter not in ignored:
            parameter.data = parameter.data.to(device)
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                owner._buffers[name] = buffer.to(device)


@functools.cache
def _compat_class(cls: type[Any]) -> type[nn.Module]:
    """PyTorch's name for it, and its methods."""
    original = cls.__mro__[2]  # wrapped, the wrapper's own, the user's
    names = {"__module__": original.__module__, "__qualname__": f"FSDP{original.__qualname__}", "__doc__": cls.__doc__}
    return type(f"FSDP{original.__name__}", (FSDPModule, original), names)
