"""Checkpoint module: a wrapped module and its torch optimizer as named tensors, and back in place.

Promises: names are those of the unwrapped module and of torch's flattened optimizer state. Reading goes into
new tensors on the host; the module and the optimizer are changed only by installing them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from fsdp_fn.checkpoint_match import (
    MODEL,
    OPTIMIZER,
    CheckpointError,
    Stored,
    check_ranks,
    differences,
    raise_for,
    strangers,
)
from fsdp_fn.checkpoint_shards import PlainShards
from fsdp_fn.groups import group_over
from fsdp_fn.module import FsdpModule
from fsdp_fn.ragged import RaggedSpec, RaggedTensor, from_spec, restore_optimizer_state


class ModuleContents:
    """What a checkpoint holds of a module whose parameters are ragged, and of its ``torch.optim`` optimizer.

    Raises TypeError or ValueError for a module that is not sharded, an optimizer of other parameters, or
    optimizer state that has no flat name.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        ragged = [parameter for parameter in model.parameters() if isinstance(parameter, RaggedTensor)]
        if not ragged:
            raise TypeError(f"{type(model).__name__} has no sharded parameter: wrap it with fully_shard first")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer of a module: expected torch.optim.Optimizer, got {type(optimizer).__name__}")
        self.group: dist.ProcessGroup = group_over(max((p.device_mesh for p in ragged), key=DeviceMesh.size))
        units = [child._fsdp_unit for child in model.modules() if isinstance(child, FsdpModule)]
        held = [unit for unit in units if unit.parameters]
        check_ranks({unit.name: math.prod(axis.size for axis in unit.state.axes) for unit in held})
        self._model, self._optimizer = model, optimizer
        # A tied tensor stands under several keys; the first is its name on disk.
        self._entries = model.state_dict(keep_vars=True)
        first: dict[int, str] = {}
        self._names = {
            key: first.setdefault(id(value), key.replace("_orig_mod.", ""))
            for key, value in self._entries.items()
            if isinstance(value, torch.Tensor)
        }
        self._tensors = {self._names[key]: self._entries[key] for key in reversed(self._names)}
        self._parameter_names = {id(value): name for name, value in self._tensors.items()}
        self._shards = PlainShards(model)
        for parameter in self._optimized():
            if id(parameter) not in self._parameter_names and self._shards.names(parameter) is None:
                raise ValueError(
                    f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not in the "
                    "model; make the optimizer after fully_shard"
                )

    # --- saving ---------------------------------------------------------------------------------------------

    def parameters(self) -> list[str]:
        """Names of the parameters; the other tensors are module buffers."""
        return [name for name, value in self._tensors.items() if isinstance(value, nn.Parameter)]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything to store, as it is here. All ranks must call."""
        found = {MODEL + name: value.detach() for name, value in self._tensors.items()}
        if self._optimizer is not None:
            restore_optimizer_state(self._optimizer)
            found |= {name: value for name, value in self._state() if isinstance(value, torch.Tensor)}
        return found

    def host(self) -> dict[str, Any]:
        """What is no tensor: hyperparameters of the optimizer, extra state of the modules."""
        groups, values = None, {}
        if self._optimizer is not None:
            groups = [
                {
                    **{key: _on_host(value) for key, value in group.items()},
                    "params": [name for parameter in group["params"] for name in self._names_of(parameter)],
                }
                for group in self._optimizer.param_groups
            ]
            values = {name: value for name, value in self._state() if not isinstance(value, torch.Tensor)}
        return {"param_groups": groups, "optimizer_values": values, "extra_state": self._extra_state()}

    def _extra_state(self) -> dict[str, Any]:
        return {
            key.replace("_orig_mod.", ""): value
            for key, value in self._entries.items()
            if not isinstance(value, torch.Tensor)
        }

    def _optimized(self) -> Iterator[torch.Tensor]:
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            yield from group["params"]

    def _state(self) -> Iterator[tuple[str, Any]]:
        for parameter in self._optimized():
            first = self._names_of(parameter)[0]
            for key, value in self._states().get(parameter, {}).items():
                if isinstance(value, dict | list | tuple) or "." in key:
                    raise TypeError(
                        f"optimizer state {key!r} of parameter {first!r} is a {type(value).__name__}; only "
                        "tensors and numbers under plain names are stored"
                    )
                plain = self._shards.names(parameter) is not None
                for name, part in self._shards.split(parameter, key, value) if plain else [(first, value)]:
                    yield f"{OPTIMIZER}{name}.{key}", part

    def _names_of(self, parameter: torch.Tensor) -> list[str]:
        """Names of the parameters that an optimizer's parameter stands for: itself, or what is in a plain shard."""
        return self._shards.names(parameter) or [self._parameter_names[id(parameter)]]

    def _states(self) -> dict[torch.Tensor, dict[str, Any]]:
        return {} if self._optimizer is None else self._optimizer.state

    # --- loading --------------------------------------------------------------------------------------------

    def reading(self, stored: Stored) -> tuple[dict[str, torch.Tensor], Callable[[], tuple[Any, Any]]]:
        """New host tensors to read into, placed as the module's, and what installs them, in place.

        Raises CheckpointError for what does not fit.
        """
        wanted = {MODEL + name: (value.shape, value.dtype) for name, value in self._tensors.items()}
        problems = differences(wanted, stored)
        owner = type(self._model).__name__
        problems += strangers((MODEL + name for name in stored.parameters), wanted, owner)
        extra, saved = set(self._extra_state()), set(stored.host["extra_state"])
        if extra != saved:
            problems.append(f"the checkpoint has extra state {sorted(saved)}, {owner} has {sorted(extra)}")
        found = {MODEL + name: _like(value, value.dtype) for name, value in self._tensors.items()}
        if self._optimizer is not None:
            problems += self._optimizer_problems(stored)
            raise_for(problems)
            for name in stored.optimizer_names():
                parameter = self._tensors[_parameter_of(name)]
                found[name] = _state_like(parameter, stored.shape(name), stored.dtype(name))
        raise_for(problems)
        return found, lambda: self._install(found, stored)

    def _optimizer_problems(self, stored: Stored) -> list[str]:
        own = {name for parameter in self._optimized() for name in self._names_of(parameter)}
        names = stored.optimizer_names()
        problems = strangers(names, [name for name in names if _parameter_of(name) in own], "the optimizer")
        # A parameter that was in no backward has no state, here or there; where both have some, it must agree.
        known = {_parameter_of(name) for name in names} or own
        here = {
            name: value
            for name, value in self._state()
            if isinstance(value, torch.Tensor) and _parameter_of(name) in known
        }
        if here:
            problems += differences({name: (value.shape, value.dtype) for name, value in here.items()}, stored)
            stepped = {_parameter_of(name) for name in here}
            problems += strangers([name for name in names if _parameter_of(name) in stepped], here, "the optimizer")
        groups = stored.host["param_groups"]
        if groups is None or self._optimizer is None:
            return problems
        ours: Any = self.host()["param_groups"]
        if [sorted(group["params"]) for group in groups] != [sorted(group["params"]) for group in ours]:
            problems.append("the checkpoint's parameter groups hold other parameters than the optimizer's")
        elif [set(group) for group in groups] != [set(group) for group in ours]:
            problems.append(
                f"the checkpoint's optimizer has the hyperparameters {sorted(groups[0])}, this one has "
                f"{sorted(ours[0])}"
            )
        return problems

    def _install(self, read: dict[str, torch.Tensor], stored: Stored) -> tuple[Any, Any]:
        loaded = {
            key: read[MODEL + self._names[key]]
            if key in self._names
            else stored.host["extra_state"][key.replace("_orig_mod.", "")]
            for key in self._entries
        }
        self._model.load_state_dict(loaded)
        if self._optimizer is not None:
            self._install_optimizer(self._optimizer, read, stored)
        return self._model, self._optimizer

    def _install_optimizer(
        self, optimizer: torch.optim.Optimizer, read: dict[str, torch.Tensor], stored: Stored
    ) -> None:
        loaded: dict[str, dict[str, Any]] = {}
        values = {name: value for name, value in read.items() if name.startswith(OPTIMIZER)}
        for name, value in (values | stored.host["optimizer_values"]).items():
            loaded.setdefault(_parameter_of(name), {})[name.rpartition(".")[2]] = value
        saved = stored.host["param_groups"] or [{}] * len(optimizer.param_groups)
        for group, hyperparameters in zip(optimizer.param_groups, saved, strict=True):
            for key, value in hyperparameters.items():
                if key != "params":
                    ours = group[key]
                    group[key] = torch.as_tensor(value).to(ours) if isinstance(ours, torch.Tensor) else value
            for parameter in group["params"]:
                if self._shards.names(parameter) is None:
                    state = loaded.get(self._parameter_names[id(parameter)])
                else:
                    state = self._shards.join(parameter, [loaded.get(name) for name in self._names_of(parameter)])
                if state is None:
                    optimizer.state.pop(parameter, None)
                    continue
                kept = optimizer.state[parameter]
                for key, value in state.items():
                    kept[key] = _moved(value, kept.get(key), key, group, parameter)


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _parameter_of(name: str) -> str:
    return name.removeprefix(OPTIMIZER).rpartition(".")[0]


def _like(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """An empty host tensor placed as ``value``."""
    if isinstance(value, RaggedTensor):
        spec = cast(RaggedSpec, value._spec).like(dtype)
        return from_spec(torch.empty_like(value._local_tensor, dtype=dtype, device="cpu"), spec, False)
    if isinstance(value, DTensor):
        raise CheckpointError(
            f"a tensor of shape {tuple(value.shape)} is placed on {value.placements}: not sharded here"
        )
    return torch.empty_like(value, dtype=dtype, device="cpu")


def _state_like(parameter: torch.Tensor, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    if shape == parameter.shape:
        return _like(parameter, dtype)
    return torch.empty(shape, dtype=dtype)


def _moved(value: Any, kept: Any, key: str, group: dict[str, Any], parameter: torch.Tensor) -> Any:
    """A loaded value on the device where the optimizer keeps it, in its own tensor if it has one."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(kept, torch.Tensor):
        with torch.no_grad():
            return kept.copy_(_placed(value, kept))
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return value
    return _placed(value.to(parameter.device), parameter) if value.ndim else value.to(parameter.device)


def _placed(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A plain tensor, the same on all ranks, as a replicated DTensor where it stands beside one."""
    if isinstance(like, DTensor) and not isinstance(value, DTensor):
        return distribute_tensor(value.to(like.device), like.device_mesh, [Replicate()], src_data_rank=None)
    return value
