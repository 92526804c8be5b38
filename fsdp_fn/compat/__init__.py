"""Compat: PyTorch's ``fully_shard`` (FSDP2) by its own names, so that a script changes one import.

    from fsdp_fn.compat import FSDPModule, MixedPrecisionPolicy, fully_shard

Promises: names, arguments and methods are those of ``torch.distributed.fsdp``, and each is served or raises
NotImplementedError that says what to do instead; none is ignored. Policies are torch's own classes.
"""

from typing import Any

import torch.distributed.fsdp
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fsdp_fn.clipping import clip_grad_norm_
from fsdp_fn.compat.methods import FSDPModule, UnshardHandle, register_fsdp_forward_method, share_comm_ctx
from fsdp_fn.compat.wrapping import fully_shard

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


def __getattr__(name: str) -> Any:
    if name == "DataParallelMeshDims" and hasattr(torch.distributed.fsdp, name):  # from torch 2.13 on
        return torch.distributed.fsdp.DataParallelMeshDims
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
