"""Broadcast: the first rank's full values of a unit, to all ranks that share it, a tensor at a time.

Promises: besides what a rank holds already, one full tensor is in its memory. Bytes are sent, so any dtype is served.
Tensor-parallel parameters are sent within the axes of the unit: each tensor-parallel rank has the first's of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from fsdp_fn.groups import process_group
from fsdp_fn.initialization import BufferValue, UnitValues, is_first
from fsdp_fn.ragged_placement import is_ragged
from fsdp_fn.state import Axis, UnitState
from fsdp_fn.tensor_parallel import local_part
from fsdp_fn.units import fill_shard


def broadcast_values(values: UnitValues, state: UnitState, device: torch.device) -> tuple[BufferValue, ...]:
    """Fill this rank's shards with the first rank's values; its buffers, as new tensors, are returned.

    All ranks of the unit's axes must call, with the same parameters and buffers. Parameters that are ragged DTensors
    already stay as they are.
    """
    with torch.inference_mode(False), torch.no_grad():
        for index, parameter in enumerate(values.parameters):
            if not is_ragged(parameter):
                fill_shard(state.main, index, _received(local_part(parameter.detach()), state.axes, device))
        return tuple(replace(b, value=_received(b.value, state.axes, device)) for b in values.buffers)


def _received(tensor: torch.Tensor, axes: Sequence[Axis], device: torch.device) -> torch.Tensor:
    if is_first(axes):
        full = tensor.to(device).contiguous()
    else:
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    for axis in axes:
        # Along the outermost axis first: then the first rank of each inner axis has what it sends on.
        if axis.size > 1 and full.numel():
            dist.broadcast(full.view(-1).view(torch.uint8), group=process_group(axis), group_src=0)
    return full
