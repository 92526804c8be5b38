"""The example job end to end, on two CPU processes.

Promises: every launched run is tiny; what it must hold (equal modes, bit-equal resume, named errors on every
rank, a clean end after Ctrl-C) does not depend on its size.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

CHECKOUT = Path(__file__).resolve().parent.parent
EXAMPLES = CHECKOUT / "docs" / "examples"
sys.path.insert(0, str(EXAMPLES))

from lm.run_folder import RunFolder, read_metrics  # noqa: E402
from lm.settings import Mode  # noqa: E402

TINY = (
    "--steps=6", "--checkpoint-every=3", "--batch=2", "--context=16",
    "--dim=16", "--layers=2", "--heads=2", "--sample-bytes=8",
)  # fmt: skip
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
LAUNCH_SECONDS = 120


def start(*options: str | Path) -> subprocess.Popen[str]:
    """The job on two CPU processes, as a user starts it from a terminal of their own."""
    script = str(EXAMPLES / "train_lm.py")
    # The library of this checkout, whether it is installed or not.
    environment = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(EXAMPLES.parent.parent),
    }
    return subprocess.Popen(
        [sys.executable, script, "--launch", "--processes=2", *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
        start_new_session=True,
    )


def ended(job: subprocess.Popen[str], seconds: float = LAUNCH_SECONDS) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, once every process that could still write to them has ended."""
    try:
        output, errors = job.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGINT)
        output, errors = job.communicate(timeout=40)
        pytest.fail(f"not over after {seconds} s\n{output}\n{errors}")
    return job.returncode, output, errors


def run(*options: str | Path) -> str:
    """Output of a run that must go well."""
    code, output, errors = ended(start(*options))
    assert code == 0, f"exit code {code}\n{output}\n{errors}"
    return output


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4 KB of bytes that are not UTF-8."""
    file = tmp_path_factory.mktemp("text") / "latin.txt"
    file.write_bytes("Über Straßen gehen Bären, süß und öde. ".encode("latin-1") * 100)
    return file


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> dict[Mode, Path]:
    """Folder of a finished tiny run in each mode."""
    folders = {mode: tmp_path_factory.mktemp("run") / mode.value for mode in Mode}
    for mode, folder in folders.items():
        run("--mode", mode.value, "--out", folder, "--text", text_file, *TINY)
    return folders


def test_both_modes_give_the_same_loss_curve(runs: dict[Mode, Path]) -> None:
    wrapper, functional = losses(runs[Mode.WRAPPER]), losses(runs[Mode.FUNCTIONAL])
    assert len(wrapper) == 6
    assert wrapper[-1] < wrapper[0]
    torch.testing.assert_close(functional, wrapper, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_finished_run_leaves_all_its_results(runs: dict[Mode, Path], mode: Mode) -> None:
    folder = RunFolder(runs[mode])
    summary = json.loads(folder.summary.read_text())
    records = read_metrics(folder.metrics)
    assert set(summary) == {
        "held_out_loss", "tokens_per_second", "steps", "world_size", "mode", "gathered_bytes"
    }  # fmt: skip
    assert (summary["mode"], summary["steps"], summary["world_size"]) == (mode.value, 6, 2)
    assert summary["held_out_loss"] == records[-1]["held_out_loss"]
    assert summary["gathered_bytes"] == sum(record["gathered_bytes"] for record in records) > 0
    assert summary["tokens_per_second"] > 0
    assert folder.loss_picture.read_bytes().startswith(PNG_SIGNATURE)
    assert folder.timeline_picture.read_bytes().startswith(PNG_SIGNATURE)
    assert len(folder.sample.read_text().split("▌")[1]) > 0
    assert len(list(folder.checkpoints.iterdir())) == 2


@pytest.mark.parametrize("mode", list(Mode))
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(
    runs: dict[Mode, Path], mode: Mode, text_file: Path, tmp_path: Path
) -> None:
    cut = RunFolder(tmp_path / "cut")
    shutil.copytree(runs[mode], cut.root)
    latest = max(cut.checkpoints.iterdir(), key=lambda path: path.name)
    shutil.rmtree(latest)
    cut.summary.unlink()
    run("--resume", "--mode", mode.value, "--out", cut.root, "--text", text_file, *TINY)
    whole = read_metrics(runs[mode] / "metrics.jsonl")
    resumed = read_metrics(cut.metrics)
    same = ("step", "loss", "learning_rate", "gathered_bytes", "held_out_loss")
    assert [[record.get(name) for name in same] for record in resumed] == [
        [record.get(name) for name in same] for record in whole
    ]
    assert cut.sample.read_text() == (runs[mode] / "sample.txt").read_text()
    assert cut.summary.exists()


def test_a_missing_text_is_named_by_every_rank(tmp_path: Path) -> None:
    code, _, errors = ended(start("--text", tmp_path / "nowhere.txt", "--out", tmp_path / "run", *TINY))
    assert code == 2
    for rank in range(2):
        assert f"[rank {rank}] error: --text {tmp_path / 'nowhere.txt'}: there is no such file" in errors
    assert "Traceback" not in errors


def test_ctrl_c_ends_every_process_and_keeps_the_last_checkpoint(text_file: Path, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    endless = ("--steps=100000", "--checkpoint-every=1")
    job = start(*TINY, *endless, "--out", folder.root, "--text", text_file)
    deadline = time.monotonic() + LAUNCH_SECONDS
    while len(read_metrics(folder.metrics)) < 3 and job.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGINT)
    interrupted = time.monotonic()
    code, output, errors = ended(job, seconds=15)
    assert code == 130, f"{output}\n{errors}"
    assert time.monotonic() - interrupted < 15
    kept = [path for path in folder.checkpoints.iterdir() if f"Kept: {path}." in errors]
    assert len(kept) == 1
    assert "--resume" in errors
    assert not folder.summary.exists()
