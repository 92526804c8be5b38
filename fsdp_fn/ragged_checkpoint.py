"""Ragged checkpoint: a ragged tensor as torch's distributed checkpoints see it.

Promises: the chunk that a rank saves or loads is the part of the whole tensor that it holds, at any placement, so a
checkpoint can be read on another mesh, of other sizes, by other placements. Ranks that hold copies name the same
chunk, which torch then writes once. No collective.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from fsdp_fn.ragged_placement import RaggedSpec


def local_chunk(spec: RaggedSpec) -> ChunkStorageMetadata:
    """This rank's part. Raises UnfinishedGradient where a sum is still to come."""
    spec.require_finished("a checkpoint")
    offsets, sizes = list(spec.offsets()), spec.local_shape()
    if sizes and not sizes[0]:
        # Chunks are told apart by their offsets: one of no rows must not have those of a neighbour's.
        offsets[0] = spec.shape[0]
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=sizes)


def write_item(name: str, value: DTensor) -> WriteItem:
    """The request to save this rank's part of a ragged ``value``. Raises as :func:`local_chunk` does."""
    chunk = local_chunk(cast(RaggedSpec, value._spec))
    properties = TensorProperties.create_from_tensor(value.to_local())
    return WriteItem(
        index=MetadataIndex(name, chunk.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=value.shape),
    )
