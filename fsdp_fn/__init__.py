"""Fully sharded data parallel for PyTorch as pure functions over explicit state.

Three ways in: the wrapper (``fully_shard`` and a normal optimizer), the functional path (``shard``, ``apply``,
``value_and_grad`` and functional optimizers), and the primitives that both are made of.
"""

from fsdp_fn.agreement import RankDivergence
from fsdp_fn.checkpoint import (
    Checkpoint,
    CheckpointError,
    latest_checkpoint,
    load_checkpoint,
    remove_old_checkpoints,
    save_checkpoint,
)
from fsdp_fn.clipping import clip_grad_norm, clip_grad_norm_, grad_norm
from fsdp_fn.collectives import Pending, finish_gradient, gather_planes, reduce_scatter, refresh_planes
from fsdp_fn.entrances import register_forward_method, unsharded
from fsdp_fn.events import Action, EventLog, LoggedEvent
from fsdp_fn.functional import Template, UnitSpec, apply, recording, refresh, shard, value_and_grad
from fsdp_fn.gradient_state import (
    add_gradients,
    finish_gradients,
    gradients_of,
    with_gradients,
    without_gradients,
)
from fsdp_fn.groups import RankFault, axis_of
from fsdp_fn.layout import (
    BlockAtomic,
    Flat,
    Layout,
    Segment,
    TensorAtomic,
    TensorSpec,
    owned_range,
    owner,
    plan_layout,
    row_bounds,
    shard_range,
)
from fsdp_fn.module import (
    FsdpModule,
    accumulating,
    fully_shard,
    mark_weights_changed,
    record_events,
    unit_states,
)
from fsdp_fn.optim import SGD, AdamW, OptimizerState, next_version
from fsdp_fn.placement import (
    Partial,
    Placements,
    Replicate,
    Sharded,
    Strategy,
    ddp,
    hfsdp,
    hsdp,
    zero1,
    zero2,
    zero3,
)
from fsdp_fn.planes import Phase, PlaneKind, planes_for_phase
from fsdp_fn.policy import PrecisionPolicy, Release, SchedulePolicy
from fsdp_fn.shards import flat_shards, local_shards
from fsdp_fn.state import Axis, Buffer, Gathered, ModelState, UnitState
from fsdp_fn.units import shard_tensors

__all__ = [
    "SGD",
    "Action",
    "AdamW",
    "Axis",
    "BlockAtomic",
    "Buffer",
    "Checkpoint",
    "CheckpointError",
    "EventLog",
    "Flat",
    "FsdpModule",
    "Gathered",
    "Layout",
    "LoggedEvent",
    "ModelState",
    "OptimizerState",
    "Partial",
    "Pending",
    "Phase",
    "Placements",
    "PlaneKind",
    "PrecisionPolicy",
    "RankDivergence",
    "RankFault",
    "Release",
    "Replicate",
    "SchedulePolicy",
    "Segment",
    "Sharded",
    "Strategy",
    "Template",
    "TensorAtomic",
    "TensorSpec",
    "UnitSpec",
    "UnitState",
    "accumulating",
    "add_gradients",
    "apply",
    "axis_of",
    "clip_grad_norm",
    "clip_grad_norm_",
    "ddp",
    "finish_gradient",
    "finish_gradients",
    "flat_shards",
    "fully_shard",
    "gather_planes",
    "grad_norm",
    "gradients_of",
    "hfsdp",
    "hsdp",
    "latest_checkpoint",
    "load_checkpoint",
    "local_shards",
    "mark_weights_changed",
    "next_version",
    "owned_range",
    "owner",
    "plan_layout",
    "planes_for_phase",
    "record_events",
    "recording",
    "reduce_scatter",
    "refresh",
    "refresh_planes",
    "register_forward_method",
    "remove_old_checkpoints",
    "row_bounds",
    "save_checkpoint",
    "shard",
    "shard_range",
    "shard_tensors",
    "unit_states",
    "unsharded",
    "value_and_grad",
    "with_gradients",
    "without_gradients",
    "zero1",
    "zero2",
    "zero3",
]
