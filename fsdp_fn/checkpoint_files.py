"""Checkpoint files: folders on disk, one a step, that are there whole or not at all.

Promises: a checkpoint is written into a hidden sibling and published by one rename after everything in it is
on disk, so a crash leaves the one before it as it was and nobody finds a part of one. A removal hides the
folder first. What a crash left hidden goes with the next save. One process calls the functions that write;
they raise OSError and no more.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

MANIFEST = "checkpoint.json"
_PUBLISHED = re.compile(r"step-(\d{8,})")
_HIDDEN = re.compile(r"\.step-\d{8,}\.(partial|removed)")


def published_path(root: Path, step: int) -> Path:
    """The folder of a step's checkpoint, whether or not it is there."""
    return root / f"step-{step:08d}"


def partial_path(root: Path, step: int) -> Path:
    """The hidden folder in which a step's checkpoint is written."""
    return root / f".step-{step:08d}.partial"


def begin(root: Path, step: int) -> Path:
    """Make the hidden folder, empty, and remove what earlier crashes left.

    Raises FileExistsError where the step has a checkpoint already.
    """
    root.mkdir(parents=True, exist_ok=True)
    if published_path(root, step).exists():
        raise FileExistsError(f"{published_path(root, step)} is there already: remove it, or save into another folder")
    for left in root.iterdir():
        if _HIDDEN.fullmatch(left.name):
            shutil.rmtree(left)
    folder = partial_path(root, step)
    folder.mkdir()
    return folder


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def publish(root: Path, step: int) -> Path:
    """Give the hidden folder its name, by one rename, once its entries are on disk."""
    _sync_folder(partial_path(root, step))
    published = partial_path(root, step).rename(published_path(root, step))
    _sync_folder(root)
    return published


def abandon(root: Path, step: int) -> None:
    """Remove the hidden folder of a save that failed, as far as that is possible."""
    shutil.rmtree(partial_path(root, step), ignore_errors=True)


def published(root: Path) -> list[Path]:
    """Folders of all checkpoints in ``root``, by step; empty where there is no such folder."""
    if not root.is_dir():
        return []
    found = [(match, path) for path in root.iterdir() if (match := _PUBLISHED.fullmatch(path.name))]
    whole = [(int(match[1]), path) for match, path in found if (path / MANIFEST).is_file()]
    return [path for _, path in sorted(whole)]


def remove(path: Path) -> None:
    """Remove a checkpoint's folder; it is hidden before its files go."""
    hidden = path.with_name(f".{path.name}.removed")
    if hidden.exists():
        shutil.rmtree(hidden)
    path.rename(hidden)
    shutil.rmtree(hidden)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
