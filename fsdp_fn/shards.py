"""Shards: what a wrapped module's optimizer may hold instead of DTensor parameters, plain tensors of this rank alone.

Promises: a shard is a view of the flat main weights, so a step of it is a step of the weights, and costs no DTensor
dispatch. Elementwise optimizers give the same bits on flat shards as on parameters, for padding has zero gradients and
stays zero. Once shards are asked for, gradients go to them, and to the DTensor parameters no more.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fsdp_fn.delivery import PlainDelivery, PlainShard
from fsdp_fn.face import ShardedUnit
from fsdp_fn.module import FsdpModule
from fsdp_fn.state import trainable_segments, trainable_tensors


def flat_shards(module: nn.Module) -> dict[str, list[nn.Parameter]]:
    """One plain parameter for each wrapped unit and trainable segment, by the group that ``group_of`` gave its tensors.

    Shape ``(shard_size,)``, the main weights' dtype, on their device; padding included. For optimizers that treat
    elements alike::

        shards = flat_shards(model)  # fully_shard(..., group_of=lambda name, p: "decay" if p.ndim > 1 else "plain")
        AdamW([{"params": shards["decay"]}, {"params": shards["plain"], "weight_decay": 0.0}], fused=True)

    Every rank holds shards of the same sizes, so that ranks agree on what an optimizer has. Tensors that differ in
    dtype, row width or ``group_of`` are in different segments. Raises ValueError for a module without wrapped units,
    and where gradients are there that DTensor parameters hold.
    """
    found: dict[str, list[nn.Parameter]] = {}
    for _, unit in _units(module, "flat_shards"):
        for shard in _turn_to(unit, _flat).shards:
            assert shard.of_segment is not None
            segment = unit.state.layout.segments[trainable_segments(unit.state.layout)[shard.of_segment]]
            found.setdefault(segment.group, []).append(shard.parameter)
    return found


def local_shards(module: nn.Module) -> dict[str, nn.Parameter]:
    """This rank's rows of every trainable parameter, by its full name, as plain parameters; some have no rows.

    With ``TensorAtomic`` granularity each is a whole tensor on one rank and empty on the others: what an optimizer of
    whole matrices needs (``torch.optim.Muon``). Raises ValueError as :func:`flat_shards` does.
    """
    found: dict[str, nn.Parameter] = {}
    for path, unit in _units(module, "local_shards"):
        prefix = f"{path}." if path else ""
        for shard in _turn_to(unit, _local).shards:
            found[prefix + unit.state.layout.tensors[shard.pieces[0][0]].name] = shard.parameter
    return {name: found[name] for name, _ in module.named_parameters() if name in found}


def _units(module: nn.Module, caller: str) -> list[tuple[str, ShardedUnit]]:
    units = [(path, child._fsdp_unit) for path, child in module.named_modules() if isinstance(child, FsdpModule)]
    if not units:
        raise ValueError(f"{caller}: {type(module).__name__} has no wrapped module")
    return units


def _turn_to(unit: ShardedUnit, make: Callable[[ShardedUnit], tuple[PlainShard, ...]]) -> PlainDelivery:
    """Have the unit's gradients go to plain shards; the same ones where they do already."""
    wanted = make(unit)
    current = unit.delivery
    if isinstance(current, PlainDelivery) and [s.pieces for s in current.shards] == [s.pieces for s in wanted]:
        return current
    if current.local_gradients() or current.unfinished():
        raise ValueError(
            f"{unit.label}: its gradients went elsewhere already: call zero_grad() before asking for shards"
        )
    delivery = PlainDelivery(unit.flow, wanted)
    delivery.label = unit.label
    unit.delivery = delivery
    return delivery


def _flat(unit: ShardedUnit) -> tuple[PlainShard, ...]:
    layout, main = unit.state.layout, unit.state.main
    parallel = [spec.name for spec, p in zip(layout.tensors, unit.parallel, strict=True) if p is not None]
    if parallel:
        raise ValueError(
            f"flat_shards: {unit.label} holds tensor-parallel parameters, {parallel[0]!r} for one, whose elements "
            "count otherwise in a norm than its others: take local_shards, or the DTensor parameters"
        )
    shards = []
    for position, index in enumerate(trainable_segments(layout)):
        segment = layout.segments[index]
        piece, count = main.piece
        first = piece * (segment.size // count)
        pieces = []
        for tensor, offset in zip(segment.tensors, segment.offsets, strict=True):
            pieces.append((tensor, max(offset + main.owned_elements(tensor).start - first, 0)))
        parameter = nn.Parameter(main.segment(index).detach())
        shards.append(PlainShard(parameter, tuple(pieces), of_segment=position))
    return tuple(shards)


def _local(unit: ShardedUnit) -> tuple[PlainShard, ...]:
    return tuple(
        PlainShard(nn.Parameter(unit.state.main.owned(index).detach()), ((index, 0),), of_tensor=position)
        for position, index in enumerate(trainable_tensors(unit.state.layout))
    )
