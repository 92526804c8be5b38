"""The training job as every process runs it: text, model, loop, checkpoints, and what is left at the end.

Promises: rank 0 alone writes to the folder of the run, checkpoints apart, in which every rank has its share.
A killed run leaves its last checkpoint, and ``--resume`` makes from there the very steps that an
uninterrupted run would have.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

import fsdp_fn
from fsdp_fn import Action, LoggedEvent
from fsdp_fn.checkpoint import CheckpointError
from lm.ending import Farewell
from lm.errors import JobError, on_every_rank
from lm.functional import FunctionalTraining
from lm.inference import generate, held_out_loss, printable
from lm.progress import ProgressReport
from lm.run_folder import Record, RunFolder, keep_metrics_until, write_json, written_whole
from lm.schedule import learning_rate
from lm.settings import Mode, Settings
from lm.text import load_corpus, training_batch
from lm.training import Training, make_place
from lm.wrapper import WrapperTraining

CHECKPOINTS_KEPT = 2
PROMPT_BYTES = 48
MODES: dict[Mode, type[WrapperTraining] | type[FunctionalTraining]] = {
    Mode.WRAPPER: WrapperTraining,
    Mode.FUNCTIONAL: FunctionalTraining,
}


class Job:
    """One run, from its text to its summary.

    Every rank makes one and calls ``run``; JobError comes on every rank.
    """

    def __init__(self, settings: Settings, device: torch.device, farewell: Farewell) -> None:
        self.settings, self.device, self.farewell = settings, device, farewell
        self.folder = RunFolder(settings.out)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.corpus = on_every_rank(lambda: load_corpus(settings.text, settings.context))
        self.training: Training = MODES[settings.mode](settings, make_place(device))
        self.last_events: tuple[LoggedEvent, ...] = ()

    def run(self) -> None:
        """Train to the last step and leave pictures, sample and summary."""
        done = self._resume() if self.settings.resume else 0
        notice = on_every_rank(lambda: self._prepare_folder(done))
        earlier = keep_metrics_until(self.folder.metrics, done) if self.rank == 0 else []
        with ProgressReport(self.settings.steps, earlier, visible=self.rank == 0) as report:
            report.say(f"{self.settings.mode} mode, {self.world_size} x {self.device.type}, text {self.corpus.name}")
            report.say(notice)
            records = self._train(done, earlier, report)
            self._finish(records, report)

    def _resume(self) -> int:
        """Load the last checkpoint; the step that it was made after."""
        checkpoint = on_every_rank(self._checkpoint_to_resume)
        try:
            restored = self.training.load(checkpoint)
        except CheckpointError as error:
            raise JobError(f"--resume: {checkpoint} does not fit this run. {error}") from error
        for name, now in self._stream().items():
            then = restored.extra.get(name)
            if then != now:
                raise JobError(
                    f"--resume: {checkpoint} was made with {name} {then!r}, this run has {now!r}: it would "
                    "not go on with the same bytes. Give the earlier value, or begin anew without --resume"
                )
        if restored.step > self.settings.steps:
            raise JobError(f"--resume: {checkpoint} is already past --steps {self.settings.steps}")
        self._keep(checkpoint)
        return restored.step

    def _checkpoint_to_resume(self) -> Path:
        checkpoint = fsdp_fn.latest_checkpoint(self.folder.checkpoints)
        if checkpoint is None:
            raise JobError(f"--resume: no checkpoint in {self.folder.checkpoints}; begin without --resume")
        return checkpoint

    def _stream(self) -> dict[str, Any]:
        """What decides the bytes that each step trains on.

        The number of ranks apart, which a resume may change.
        """
        return {
            "seed": self.settings.seed,
            "batch": self.settings.batch,
            "context": self.settings.context,
            "text": f"{self.corpus.name} (sha256 {self.corpus.digest[:16]})",
        }

    def _prepare_folder(self, done: int) -> str:
        """Make the folder ready for the steps after ``done``; what to tell the user."""
        if self.rank != 0:
            return ""
        try:
            if self.settings.resume:
                self.folder.summary.unlink(missing_ok=True)  # it says that a run is whole
                return f"resumed after step {done} in {self.folder.root}"
            self.folder.root.mkdir(parents=True, exist_ok=True)
            moved = self.folder.set_aside()
        except OSError as error:
            raise JobError(f"--out {self.folder.root}: cannot be used ({error.strerror})") from error
        return f"writing to {self.folder.root}" + (f"; the earlier run there is now in {moved}" if moved else "")

    def _train(self, done: int, earlier: list[Record], report: ProgressReport) -> list[Record]:
        """Steps ``done + 1`` to the last; the records of all steps (on rank 0)."""
        records = list(earlier)
        with self.folder.metrics.open("a") if self.rank == 0 else open(os.devnull, "w") as metrics:
            for step in range(done + 1, self.settings.steps + 1):
                record = self._step(step)
                at_checkpoint = step % self.settings.checkpoint_every == 0 or step == self.settings.steps
                if at_checkpoint:
                    record["held_out_loss"] = self._held_out_loss()
                records.append(record)
                report.show(record)
                _write_line(metrics, record)
                if at_checkpoint:
                    self._save(step)
                    report.say(f"step {step}: held-out loss {record['held_out_loss']:.3f}, checkpoint saved")
        return records

    def _step(self, step: int) -> Record:
        """One training step; its record, the same on every rank but for the time."""
        settings = self.settings
        rate = learning_rate(step, settings.steps, settings.lr)
        start = time.perf_counter()
        tokens, targets = training_batch(
            self.corpus,
            seed=settings.seed,
            step=step,
            rank=self.rank,
            batch=settings.batch,
            context=settings.context,
        )
        loss = self.training.step(tokens.to(self.device), targets.to(self.device), rate)
        dist.all_reduce(loss)
        mean = loss.item() / self.world_size
        seconds = time.perf_counter() - start
        self.last_events = tuple(self.training.log)
        return {
            "step": step,
            "loss": mean,
            "learning_rate": rate,
            "tokens_per_second": self._tokens_per_step() / seconds,
            "gathered_bytes": self.training.log.transferred(Action.GATHER),
            "seconds": seconds,
        }

    def _tokens_per_step(self) -> int:
        return self.settings.batch * self.settings.context * self.world_size

    def _held_out_loss(self) -> float:
        return held_out_loss(
            self.training.logits,
            self.corpus,
            batch=self.settings.batch,
            context=self.settings.context,
            device=self.device,
        )

    def _save(self, step: int) -> None:
        checkpoint = self.training.save(self.folder.checkpoints, step, self._stream())
        fsdp_fn.remove_old_checkpoints(self.folder.checkpoints, keep=CHECKPOINTS_KEPT)
        self._keep(checkpoint)

    def _keep(self, checkpoint: Path) -> None:
        """What to say if the run is ended from now on."""
        if self.rank == 0:
            self.farewell.text = f"Interrupted. Kept: {checkpoint}. The same command with --resume goes on from there."

    def _finish(self, records: list[Record], report: ProgressReport) -> None:
        """Sample, pictures, and last of all the summary, which says that the run is whole."""
        sample = self._sample()
        if self.rank != 0:
            return
        from lm.pictures import draw_loss, draw_timeline  # matplotlib: only here, only on one rank

        folder = self.folder
        with written_whole(folder.sample) as partial:
            partial.write_text(sample)
        draw_loss(records, folder.loss_picture)
        if self.last_events:
            draw_timeline(
                self.last_events,
                folder.timeline_picture,
                title=f"Step {self.settings.steps} on rank 0 of {self.world_size}, {self.settings.mode} mode",
            )
        last = records[-1]
        seconds = sum(record["seconds"] for record in records)
        summary = {
            "held_out_loss": last["held_out_loss"],
            "tokens_per_second": self._tokens_per_step() * len(records) / seconds,
            "steps": self.settings.steps,
            "world_size": self.world_size,
            "mode": self.settings.mode.value,
            "gathered_bytes": sum(record["gathered_bytes"] for record in records),
        }
        write_json(folder.summary, summary)
        report.say(
            f"\n{sample}\n\nheld-out loss {summary['held_out_loss']:.3f} nats per byte; results in {folder.root}"
        )

    def _sample(self) -> str:
        """A piece of held-out text and what the model writes after it, apart by a mark."""
        prompt = bytes(self.corpus.held_out[:PROMPT_BYTES].tolist())
        written = generate(
            self.training.logits,
            prompt,
            count=self.settings.sample_bytes,
            context=self.settings.context,
            seed=self.settings.seed,
            device=self.device,
        )
        return f"{printable(prompt)}▌{printable(written)}"


def _write_line(metrics: TextIO, record: Record) -> None:
    metrics.write(json.dumps(record) + "\n")
    metrics.flush()
