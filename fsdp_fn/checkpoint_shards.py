"""Checkpoint shards: optimizer state of plain shards under the names of the parameters whose parts they hold.

Promises: a checkpoint says nothing of shards. State is stored by parameter, as that of an optimizer of DTensor
parameters is, so each reads the other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp_fn.checkpoint_match import CheckpointError
from fsdp_fn.delivery import PlainDelivery, PlainShard
from fsdp_fn.face import ShardedUnit
from fsdp_fn.module import FsdpModule
from fsdp_fn.ragged import RaggedTensor, from_spec


class PlainShards:
    """The plain shards of a wrapped module, by parameter."""

    def __init__(self, model: nn.Module) -> None:
        self._found: dict[int, tuple[ShardedUnit, PlainShard, str]] = {}
        for path, child in model.named_modules():
            if isinstance(child, FsdpModule) and isinstance(child._fsdp_unit.delivery, PlainDelivery):
                prefix = f"{path.replace('_orig_mod.', '')}." if path else ""
                for shard in child._fsdp_unit.delivery.shards:
                    self._found[id(shard.parameter)] = (child._fsdp_unit, shard, prefix)

    def names(self, parameter: torch.Tensor) -> list[str] | None:
        """Full names of the parameters whose parts ``parameter`` holds; None where it is no plain shard."""
        if id(parameter) not in self._found:
            return None
        unit, shard, prefix = self._found[id(parameter)]
        return [prefix + unit.state.layout.tensors[index].name for index, _ in shard.pieces]

    def split(self, parameter: torch.Tensor, key: str, value: Any) -> Iterator[tuple[str, Any]]:
        """State ``value`` of a plain shard, as each parameter's own: its rows of a tensor, or a scalar as it is."""
        unit, shard, prefix = self._found[id(parameter)]
        main = unit.state.main
        whole = isinstance(value, torch.Tensor) and value.shape == parameter.shape
        if isinstance(value, torch.Tensor) and value.ndim and not whole:
            raise TypeError(
                f"optimizer state {key!r} of a plain shard of shape {tuple(parameter.shape)} has shape "
                f"{tuple(value.shape)}; only state of the shard's own shape can be stored by parameter"
            )
        for index, start in shard.pieces:
            name = prefix + unit.state.layout.tensors[index].name
            if not whole:
                yield name, value
                continue
            rows = value.detach().reshape(-1)[start : start + len(main.owned_elements(index))]
            spec = unit.spec(index, main.placements, value.dtype)
            yield name, from_spec(rows.view(main.owned(index).shape), spec, False)

    def join(self, parameter: torch.Tensor, states: Sequence[Mapping[str, Any] | None]) -> dict[str, Any] | None:
        """State of a plain shard from that of each of its parameters, in order; None where none has any."""
        _, shard, _ = self._found[id(parameter)]
        names = self.names(parameter) or []
        present = [state for state in states if state is not None]
        if not present:
            return None
        if len(present) < len(states):
            lacking = names[[state is None for state in states].index(True)]
            raise CheckpointError(
                f"the checkpoint has no optimizer state of {lacking!r}, and some of others in the same flat shard, "
                "which are stepped together"
            )
        joined: dict[str, Any] = {}
        for key, first in present[0].items():
            values = [state[key] for state in present]
            if isinstance(first, RaggedTensor):
                flat = torch.zeros(parameter.numel(), dtype=first.dtype)
                for (_, start), value in zip(shard.pieces, values, strict=True):
                    local = value._local_tensor.reshape(-1)
                    flat[start : start + local.numel()] = local
                joined[key] = flat.view(parameter.shape)
            elif any(float(value) != float(first) for value in values):
                raise CheckpointError(
                    f"the checkpoint has different {key!r} for the parameters {names}, which are in one flat shard"
                )
            else:
                joined[key] = first
        return joined
