"""Settings of a run, from the command line: checked before any process is started.

Promises: no import of torch, so that ``--help`` and a mistake answer at once. A value that cannot be honoured
is refused by the name of its option.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any


class Mode(StrEnum):
    """Which of the library's two faces trains the model."""

    WRAPPER = "wrapper"
    FUNCTIONAL = "functional"


@dataclass(frozen=True)
class Settings:
    """One run. ``batch`` is windows per rank and step, ``context`` bytes per window, ``lr`` the peak."""

    mode: Mode
    text: tuple[Path, ...]
    out: Path
    resume: bool
    steps: int
    batch: int
    context: int
    dim: int
    layers: int
    heads: int
    lr: float
    seed: int
    checkpoint_every: int
    sample_bytes: int


@dataclass(frozen=True)
class Launch:
    """That torchrun is to be started, with how many processes (None.

    As the machine has GPUs), on which arguments.
    """

    processes: int | None
    arguments: tuple[str, ...]


def parse_settings(arguments: Sequence[str]) -> tuple[Settings, Launch | None]:
    """Settings from the command line, and whether to launch the job.

    Prints what is wrong and exits with code 2 where they cannot be honoured.
    """
    parser, launcher = _parser(), _launch_parser()
    values = vars(parser.parse_args(arguments))
    wanted, processes = values.pop("launch"), values.pop("processes")
    values["text"] = tuple(values["text"])
    settings = Settings(**values)
    if settings.dim % (2 * settings.heads):
        parser.error(
            f"--dim {settings.dim}: must be a multiple of twice --heads {settings.heads} "
            "(rotary positions turn pairs of channels within each head)"
        )
    if settings.out.exists() and not settings.out.is_dir():
        parser.error(f"--out {settings.out}: is a file; name a folder")
    if processes is not None and not wanted:
        parser.error("--processes: says how many processes --launch starts; without it the number comes from torchrun")
    _, rest = launcher.parse_known_args(arguments)
    return settings, Launch(processes, tuple(rest)) if wanted else None


def _number(kind: Callable[[str], float], smallest: float, *, above: bool = False) -> Callable[[str], float]:
    """Parser of a finite number that is at least ``smallest``, or ``above`` it."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None
        if not smallest <= value < float("inf") or (above and value == smallest):
            raise argparse.ArgumentTypeError(f"must be {'above' if above else 'at least'} {smallest}, got {text}")
        return value

    return parse


def _mode(text: str) -> Mode:
    try:
        return Mode(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected {' or '.join(Mode)}, got {text!r}") from None


def _launch_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--launch", action="store_true", help="start torchrun: one process per GPU, or two on a CPU")
    parser.add_argument(
        "--processes",
        type=_number(int, 1),
        default=None,
        metavar="N",
        help="with --launch: start this many instead",
    )
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="train_lm.py",
        description="Train a byte-level transformer with fully sharded data parallel. Under torchrun it "
        "joins the other processes; alone it is a world of one; with --launch it starts torchrun itself.",
        parents=[_launch_parser()],
        allow_abbrev=False,
    )
    count, natural = _number(int, 1), _number(int, 0)

    def add(option: str, kind: Callable[[str], Any], default: object, metavar: str, text: str) -> None:
        parser.add_argument(option, type=kind, default=default, metavar=metavar, help=f"{text} (default: {default})")

    modes = ",".join(Mode)
    add("--mode", _mode, Mode.WRAPPER, f"{{{modes}}}", "fully_shard with torch.optim.AdamW, or pure functions")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=(), metavar="FILE",
        help="train on the bytes of these files (default: pydoc_data.topics, which ships with Python)",
    )  # fmt: skip
    add("--out", Path, Path("runs/lm"), "FOLDER", "folder of the run")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in the run's folder")
    add("--steps", count, 300, "N", "training steps in all")
    add("--batch", count, 8, "N", "windows per process and step")
    add("--context", count, 128, "BYTES", "bytes per window")
    add("--dim", count, 128, "N", "width of the model")
    add("--layers", count, 4, "N", "blocks of the model")
    add("--heads", count, 4, "N", "attention heads per block")
    add(
        "--lr",
        _number(float, 0.0, above=True),
        4e-3,
        "RATE",
        "peak learning rate, after a warm-up; then a cosine",
    )
    add("--seed", natural, 0, "N", "seed of weights, batches and sample")
    add("--checkpoint-every", count, 100, "N", "steps between checkpoints, each with a held-out loss")
    add("--sample-bytes", natural, 400, "N", "bytes of text to generate at the end")
    return parser
