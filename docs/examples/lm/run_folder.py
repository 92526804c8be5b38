"""The folder of a run: what lies where, and how it gets there.

Promises: a file that another program may read (``summary.json``, pictures, the sample) is either whole or
absent. ``metrics.jsonl`` has one line a step and no step twice, also after a resume. Nothing of an earlier
run is lost.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.errors import JobError

Record = dict[str, Any]


@dataclass(frozen=True)
class RunFolder:
    """Names of what a run leaves behind in ``root``."""

    root: Path

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    @property
    def loss_picture(self) -> Path:
        return self.root / "loss.png"

    @property
    def timeline_picture(self) -> Path:
        return self.root / "timeline.png"

    @property
    def sample(self) -> Path:
        return self.root / "sample.txt"

    def results(self) -> tuple[Path, ...]:
        """Everything that a run may leave."""
        pictures = (self.loss_picture, self.timeline_picture)
        return (self.checkpoints, self.metrics, self.summary, *pictures, self.sample)

    def set_aside(self) -> Path | None:
        """Move an earlier run's results into ``earlier/N`` and say where; None where there were none."""
        found = [path for path in self.results() if path.exists()]
        if not found:
            return None
        numbers = [int(path.name) for path in (self.root / "earlier").glob("*") if path.name.isdigit()]
        target = self.root / "earlier" / str(max(numbers, default=0) + 1)
        target.mkdir(parents=True)
        for path in found:
            path.rename(target / path.name)
        return target


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write under; renamed to ``path`` when the block ends well."""
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_json(path: Path, record: Record) -> None:
    """Write ``record`` as JSON: whole or not at all."""
    with written_whole(path) as partial:
        partial.write_text(json.dumps(record, indent=2) + "\n")


def read_metrics(path: Path, last_step: int | None = None) -> list[Record]:
    """Records of the steps up to ``last_step``, in order.

    A last line that a killed run left half-written is dropped. JobError where any other line is not a
    record, or the steps do not follow one another.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            step = record["step"]
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise JobError(f"{path}, line {number}: not a record of one step ({error})") from error
        if last_step is not None and step > last_step:
            break
        if records and step != records[-1]["step"] + 1:
            raise JobError(f"{path}, line {number}: step {step} follows step {records[-1]['step']}")
        records.append(record)
    return records


def keep_metrics_until(path: Path, last_step: int) -> list[Record]:
    """Cut ``metrics.jsonl`` after ``last_step``, so that a resumed run appends to it.

    The records that remain.
    """
    records = read_metrics(path, last_step)
    with written_whole(path) as partial:
        partial.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records
