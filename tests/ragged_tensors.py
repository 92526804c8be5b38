"""Ragged tensors for tests: cuts with empty, single and uneven parts, and whole tensors cut so."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_fn.ragged import RaggedTensor, as_ragged

CUTS = {
    1: [(0, 5), (0, 1)],
    2: [(0, 4, 5), (0, 0, 5), (0, 5, 5), (0, 1, 4)],
    3: [(0, 1, 3, 5), (0, 0, 5, 5), (0, 4, 4, 5)],
    4: [(0, 0, 1, 5, 6), (0, 6, 6, 6, 6), (0, 2, 3, 5, 9)],
}


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))


def shard(whole: torch.Tensor, bounds: Sequence[int], mesh: DeviceMesh, requires_grad: bool = False) -> RaggedTensor:
    rank = mesh.get_local_rank()
    local = whole[bounds[rank] : bounds[rank + 1]].clone()
    return as_ragged(local, mesh, bounds, whole.shape, requires_grad)


def values(shape: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)).to(dtype)
