"""Checkpoint: save and load training on torch's distributed checkpoints, atomically, at any world size.

Promises: both worlds, the wrapped module with its ``torch.optim`` optimizer and the functional states, write
and read the same files, under plain parameter names. A checkpoint is there whole or not at all. An error on
any rank is raised on every rank, as :class:`CheckpointError`, and leaves model and optimizer as they were:
what is stored is held against what is there before anything is read, and installed after every rank has read
its part.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from fsdp_fn import checkpoint_files as files
from fsdp_fn.checkpoint_match import CheckpointError, Stored
from fsdp_fn.checkpoint_module import ModuleContents
from fsdp_fn.checkpoint_state import StateContents
from fsdp_fn.optim import OptimizerState
from fsdp_fn.state import ModelState

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "latest_checkpoint",
    "load_checkpoint",
    "remove_old_checkpoints",
    "save_checkpoint",
]

_FORMAT = 1
_HOST = "host.pickle"
Result = TypeVar("Result")


@dataclass(frozen=True)
class Checkpoint:
    """What was loaded: step, model and optimizer (those given, or new states), and the caller's extra."""

    step: int
    model: Any
    optimizer: Any
    extra: dict[str, Any] = field(default_factory=dict)


def save_checkpoint(
    root: str | Path,
    step: int,
    model: nn.Module | ModelState,
    optimizer: torch.optim.Optimizer | OptimizerState | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``root/step-XXXXXXXX`` and return its path. All ranks of the model's mesh must call.

    ``root``: a folder that every rank sees; made where there is none. ``extra``: small picklable host data,
    such as random state; rank 0's is stored, as are its module buffers. Raises CheckpointError on every rank
    where any cannot write (the message names rank and cause) or the step has a checkpoint already; earlier
    checkpoints stay.
    """
    if step < 0:
        raise ValueError(f"save_checkpoint: expected a step of at least 0, got {step}")
    root, contents = Path(root), _contents_of(model, optimizer)
    what = f"saving step {step} to {root}"
    tensors = contents.tensors()
    leads = contents.group.rank() == 0

    def begin() -> None:
        if leads:
            folder = files.begin(root, step)
            files.write_synced(folder / _HOST, pickle.dumps({**contents.host(), "extra": dict(extra or {})}))
            manifest = {
                "format": _FORMAT,
                "step": step,
                "world_size": contents.group.size(),
                "parameters": contents.parameters(),
                "optimizer": optimizer is not None,
            }
            files.write_synced(folder / files.MANIFEST, json.dumps(manifest, indent=1).encode())

    def see_folder() -> None:
        folder = files.partial_path(root, step)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}, which rank 0 made, is not there: ranks must share the folder")

    try:
        _together(begin, contents.group, what)
        _together(see_folder, contents.group, what)
        _together(
            lambda: _write_tensors(tensors, files.partial_path(root, step), contents.group),
            contents.group,
            what,
        )
        _together(lambda: leads and files.publish(root, step), contents.group, what)
    except BaseException:
        if leads:
            files.abandon(root, step)
        raise
    return files.published_path(root, step)


def load_checkpoint(
    path: str | Path,
    model: nn.Module | ModelState,
    optimizer: torch.optim.Optimizer | OptimizerState | None = None,
) -> Checkpoint:
    """Load the checkpoint in ``path``, saved at any world size. All ranks of the model's mesh must call.

    A module and a ``torch.optim`` optimizer are loaded in place, hyperparameters included; of a
    ``ModelState`` and an ``OptimizerState`` the result holds new ones. Without ``optimizer`` only the model
    is read. Raises CheckpointError on every rank where ``path`` is no checkpoint, is damaged, or does not
    fit: a tensor missing, of another shape or dtype, or of another model; nothing is changed then.
    """
    path, contents = Path(path), _contents_of(model, optimizer)
    what = f"loading {path}"
    stored = _together(lambda: _stored(path, optimizer is not None), contents.group, what)
    _together(lambda: _check_files(path, contents.group), contents.group, what)
    targets, install = _together(lambda: contents.reading(stored), contents.group, what)
    _together(lambda: _read_tensors(targets, path, contents.group), contents.group, what)
    loaded = _together(install, contents.group, what)
    return Checkpoint(stored.step, *loaded, extra=stored.host["extra"])


def latest_checkpoint(root: str | Path) -> Path | None:
    """The checkpoint of the highest step in ``root``; None where there is none. Any rank may call, alone."""
    found = files.published(Path(root))
    return found[-1] if found else None


def remove_old_checkpoints(root: str | Path, keep: int) -> None:
    """Remove all but the ``keep`` newest checkpoints. All ranks call; rank 0 of the default group removes."""
    if keep < 1:
        raise ValueError(f"remove_old_checkpoints: expected to keep at least 1, got {keep}")
    if not dist.is_initialized() or dist.get_rank() == 0:
        for path in files.published(Path(root))[:-keep]:
            files.remove(path)


# --- between ranks ------------------------------------------------------------------------------------------


def _contents_of(model: Any, optimizer: Any) -> ModuleContents | StateContents:
    if isinstance(model, ModelState):
        return StateContents(model, optimizer)
    if isinstance(model, nn.Module):
        return ModuleContents(model, optimizer)
    raise TypeError(f"expected a sharded nn.Module or a ModelState, got {type(model).__name__}")


def _together(act: Callable[[], Result], group: dist.ProcessGroup, what: str) -> Result:
    """Run ``act`` and go on only if it did well on every rank; else raise CheckpointError on all of them."""
    own: str | None = None
    failed: BaseException | None = None
    try:
        result = act()
    except CheckpointException as error:
        if not all(isinstance(cause, Exception) for cause, _ in error.failures.values()):
            raise KeyboardInterrupt from error
        # torch has exchanged the ranks' failures already, and raises them on every rank.
        failed = error
        reports = [f"rank {rank}: {_said(cause)}" for rank, (cause, _) in sorted(error.failures.items())]
        own = "; ".join(reports)
    except Exception as error:
        failed, own = error, f"rank {group.rank()}: {_said(error)}"
    said: list[str | None] = [None] * group.size()
    dist.all_gather_object(said, own, group=group)
    causes = list(dict.fromkeys(cause for cause in said if cause is not None))
    if causes:
        raise CheckpointError(f"{what} failed; " + "; ".join(causes)) from failed
    return result


def _said(error: BaseException) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


# --- torch's distributed checkpoints ------------------------------------------------------------------------


def _write_tensors(tensors: dict[str, torch.Tensor], folder: Path, group: dist.ProcessGroup) -> None:
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, dedup_save_to_lowest_rank=True)
    dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group)


def _read_tensors(targets: dict[str, torch.Tensor], path: Path, group: dist.ProcessGroup) -> None:
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    dcp.load(dict(targets), storage_reader=dcp.FileSystemReader(path), planner=planner, process_group=group)


def _stored(path: Path, with_optimizer: bool) -> Stored:
    if not (path / files.MANIFEST).is_file():
        found = "there is no such folder" if not path.exists() else f"it has no {files.MANIFEST}"
        hint = "; latest_checkpoint() finds the one to load in it" if latest_checkpoint(path) is not None else ""
        raise CheckpointError(f"{path} is not a checkpoint: {found}{hint}")
    manifest = json.loads((path / files.MANIFEST).read_text())
    if manifest["format"] != _FORMAT:
        raise CheckpointError(f"{path} has format {manifest['format']}, this version reads {_FORMAT}")
    if with_optimizer and not manifest["optimizer"]:
        raise CheckpointError(f"{path} was saved without an optimizer: load it without one")
    host = pickle.loads((path / _HOST).read_bytes())
    tensors = {
        name: tensor
        for name, tensor in _metadata(path).state_dict_metadata.items()
        if isinstance(tensor, TensorStorageMetadata)
    }
    return Stored(manifest["step"], tensors, frozenset(manifest["parameters"]), host)


def _check_files(path: Path, group: dist.ProcessGroup) -> None:
    """Raise CheckpointError, on rank 0, where a data file is gone or cut short."""
    # One rank looks at all files, for there are as many as there were ranks.
    if group.rank():
        return
    needed: dict[str, int] = {}
    for info in _metadata(path).storage_data.values():
        needed[info.relative_path] = max(needed.get(info.relative_path, 0), info.offset + info.length)
    for name, size in needed.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing")
        if file.stat().st_size < size:
            raise CheckpointError(f"{path} is damaged: {name} has {file.stat().st_size} bytes, expected {size}")


def _metadata(path: Path) -> Metadata:
    return dcp.FileSystemReader(path).read_metadata()
