"""Progress of a run on rank 0: a bar on a terminal, a line every so often where there is none.

Promises: what it shows is what ``metrics.jsonl`` holds; other ranks are silent.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lm.run_folder import Record

LINES_PER_RUN = 20
MEBIBYTE = 2**20


class ProgressReport:
    """A context manager; ``show`` each step's record, and ``say`` what else the user should know.

    ``earlier``: records of the steps before a resume.
    """

    def __init__(self, steps: int, earlier: Sequence[Record], *, visible: bool) -> None:
        self.steps = steps
        self.console = Console(quiet=not visible, highlight=False, soft_wrap=True)
        self.gathered = sum(record["gathered_bytes"] for record in earlier)
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn(
                "loss {task.fields[loss]} · {task.fields[rate]} tokens/s · {task.fields[gathered]} MiB gathered"
            ),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (visible and self.console.is_terminal),
        )
        self.task = self.bar.add_task("step", total=steps, completed=len(earlier), loss="-", rate="-", gathered="-")

    def __enter__(self) -> ProgressReport:
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def show(self, record: Record) -> None:
        """Advance to the step of ``record``."""
        step = record["step"]
        self.gathered += record["gathered_bytes"]
        loss, rate = f"{record['loss']:.3f}", f"{record['tokens_per_second']:,.0f}"
        gathered = f"{self.gathered / MEBIBYTE:,.0f}"
        self.bar.update(self.task, completed=step, loss=loss, rate=rate, gathered=gathered)
        every = max(1, self.steps // LINES_PER_RUN)
        if not self.console.is_terminal and (step % every == 0 or step == self.steps):
            self.say(f"step {step}/{self.steps}: loss {loss}, {rate} tokens/s, {gathered} MiB gathered")

    def say(self, text: str) -> None:
        """A line for the user, above the bar."""
        self.console.print(text, markup=False)
