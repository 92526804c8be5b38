"""The parts of the example job on their own: text, model, settings, schedule, run folder, pictures.

Promises: no process is started here and no process group is needed.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp_fn.events import Action, LoggedEvent
from fsdp_fn.planes import Phase

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"
sys.path.insert(0, str(EXAMPLES))

from lm.errors import JobError  # noqa: E402
from lm.inference import generate, printable  # noqa: E402
from lm.pictures import draw_loss, draw_timeline  # noqa: E402
from lm.run_folder import (  # noqa: E402
    RunFolder,
    keep_metrics_until,
    read_metrics,
    write_json,
    written_whole,
)
from lm.schedule import learning_rate  # noqa: E402
from lm.settings import Mode, parse_settings  # noqa: E402
from lm.text import (  # noqa: E402
    Corpus,
    held_out_windows,
    load_corpus,
    python_documentation,
    training_batch,
)
from lm.transformer import Transformer, next_byte_loss  # noqa: E402

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


class TestText:
    def test_the_default_text_is_english_without_a_paragraph_twice(self) -> None:
        paragraphs = python_documentation().decode().split("\n\n")
        assert len(paragraphs) > 1000
        assert len({paragraph.strip() for paragraph in paragraphs}) == len(paragraphs)

    def test_an_empty_file_is_named_even_beside_a_good_one(self, tmp_path: Path) -> None:
        good, empty = tmp_path / "good.txt", tmp_path / "empty.txt"
        good.write_bytes(b"good" * 100)
        empty.touch()
        with pytest.raises(JobError, match=r"--text .*empty\.txt: the file is empty"):
            load_corpus([good, empty], context=16)

    def test_a_folder_in_place_of_a_text_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(JobError, match="cannot be read"):
            load_corpus([tmp_path], context=16)

    @given(context=st.integers(1, 40), length=st.integers(1, 600))
    def test_a_text_is_refused_exactly_when_a_part_holds_no_window(
        self, tmp_path_factory: pytest.TempPathFactory, context: int, length: int
    ) -> None:
        file = tmp_path_factory.getbasetemp() / "sized.txt"
        file.write_bytes(b"x" * length)
        if length // 10 < context + 1:
            with pytest.raises(JobError, match=f"{length} bytes.*--context {context}"):
                load_corpus([file], context)
        else:
            corpus = load_corpus([file], context)
            assert len(corpus.training) + len(corpus.held_out) == length
            assert len(held_out_windows(corpus, context)[0]) > 0

    @given(context=st.integers(1, 12), rank=st.integers(0, 3), step=st.integers(1, 50))
    def test_a_batch_is_a_function_of_seed_step_and_rank(self, context: int, rank: int, step: int) -> None:
        corpus = Corpus("counting", "", torch.arange(200, dtype=torch.uint8), torch.arange(20, dtype=torch.uint8))
        size: dict[str, int] = {"batch": 5, "context": context}
        tokens, targets = training_batch(corpus, seed=1, step=step, rank=rank, **size)
        again, _ = training_batch(corpus, seed=1, step=step, rank=rank, **size)
        assert tokens.shape == targets.shape == (5, context)
        assert torch.equal(tokens, again)
        assert torch.equal(targets, tokens + 1)
        for other in ({"seed": 2}, {"step": step + 1}, {"rank": rank + 1}):
            assert not torch.equal(
                tokens, training_batch(corpus, **({"seed": 1, "step": step, "rank": rank} | other), **size)[0]
            )

    @given(length=st.integers(3, 60), context=st.integers(1, 30))
    def test_held_out_windows_cover_the_text_once_in_order(self, length: int, context: int) -> None:
        held_out = torch.arange(length, dtype=torch.uint8)
        tokens, targets = held_out_windows(Corpus("counting", "", held_out, held_out), context)
        covered = (length - 1) // context * context
        assert tokens.flatten().tolist() == list(range(covered))
        assert targets.flatten().tolist() == list(range(1, covered + 1))


class TestModel:
    def test_the_same_seed_gives_the_same_weights_and_another_seed_does_not(self) -> None:
        first, same, other = (Transformer(16, 2, 2, seed=seed).state_dict() for seed in (3, 3, 4))
        assert all(torch.equal(first[name], same[name]) for name in first)
        assert not torch.equal(first["head.weight"], other["head.weight"])

    def test_a_later_byte_changes_no_earlier_prediction(self) -> None:
        model = Transformer(16, 2, 2, seed=0)
        tokens = torch.arange(12)[None]
        changed = tokens.clone()
        changed[0, 7] = 200
        before, after = model(tokens), model(changed)
        torch.testing.assert_close(before[:, :7], after[:, :7])
        assert not torch.allclose(before[:, 7:], after[:, 7:])

    def test_the_order_of_earlier_bytes_matters(self) -> None:
        model = Transformer(16, 1, 2, seed=0)
        assert not torch.allclose(model(torch.tensor([[1, 2, 9]]))[0, -1], model(torch.tensor([[2, 1, 9]]))[0, -1])

    def test_an_even_guess_costs_the_logarithm_of_the_vocabulary(self) -> None:
        loss = next_byte_loss(torch.zeros(2, 3, 256, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.long))
        assert loss.item() == pytest.approx(math.log(256))

    def test_generation_writes_what_the_model_is_sure_of_within_its_context(self) -> None:
        seen = []

        def successor(tokens: torch.Tensor) -> torch.Tensor:
            seen.append(tokens.shape[1])
            return torch.nn.functional.one_hot((tokens + 1) % 256, 256) * 100.0

        text = generate(successor, b"a", count=5, context=3, seed=0, device=torch.device("cpu"))
        assert text == b"bcdef"
        assert seen == [1, 2, 3, 3, 3]

    def test_a_sample_cannot_steer_the_terminal(self) -> None:
        assert printable(b"a\x1b[2J\xff\n\tb") == "a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}\n\tb"


class TestSettings:
    @pytest.mark.parametrize(
        ("options", "named"),
        [
            (["--steps", "0"], "--steps"),
            (["--steps", "1.5"], "--steps"),
            (["--lr", "0"], "--lr"),
            (["--lr", "nan"], "--lr"),
            (["--lr", "inf"], "--lr"),
            (["--mode", "both"], "--mode"),
            (["--dim", "20", "--heads", "4"], "--dim 20"),
            (["--seed", "-1"], "--seed"),
            (["--text"], "--text"),
            (["--step", "5"], "--step"),
            (["--processes", "2"], "--processes"),
            (["--launch", "--processes", "0"], "--processes"),
            (["--out", __file__], "--out"),
        ],
    )
    def test_a_value_that_cannot_be_honoured_is_refused_by_the_name_of_its_option(
        self, options: Sequence[str], named: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as stop:
            parse_settings(options)
        assert stop.value.code == 2
        assert named in capsys.readouterr().err

    def test_the_launched_processes_get_every_option_but_those_of_the_launch(self) -> None:
        options = ["--text", "a", "b", "--launch", "--steps", "7", "--processes", "3", "--mode=functional"]
        settings, launch = parse_settings(options)
        assert launch is not None
        assert launch.processes == 3
        assert parse_settings(launch.arguments) == (settings, None)
        assert (settings.text, settings.steps, settings.mode) == ((Path("a"), Path("b")), 7, Mode.FUNCTIONAL)


class TestSchedule:
    @given(steps=st.integers(1, 500))
    def test_the_rate_rises_to_its_peak_once_and_falls_to_a_tenth(self, steps: int) -> None:
        rates = [learning_rate(step, steps, 2.0) for step in range(1, steps + 1)]
        peak = rates.index(max(rates))
        assert max(rates) == 2.0
        assert rates[: peak + 1] == sorted(rates[: peak + 1])
        assert rates[peak:] == sorted(rates[peak:], reverse=True)
        assert min(rates) > 0
        if steps > 1:
            assert rates[-1] == pytest.approx(0.2)


class TestRunFolder:
    def test_an_earlier_run_is_set_aside_whole_and_nothing_else_is_touched(self, tmp_path: Path) -> None:
        folder = RunFolder(tmp_path)
        (tmp_path / "notes.txt").write_text("mine")
        moved = []
        for text in ("first", "second"):
            folder.summary.write_text(text)
            folder.checkpoints.mkdir()
            moved.append(folder.set_aside())
        assert moved == [tmp_path / "earlier" / "1", tmp_path / "earlier" / "2"]
        assert [(place / "summary.json").read_text() for place in moved if place] == ["first", "second"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["earlier", "notes.txt"]
        assert folder.set_aside() is None

    def test_a_file_whose_writing_fails_stays_as_it_was(self, tmp_path: Path) -> None:
        path = tmp_path / "summary.json"
        write_json(path, {"steps": 1})

        def fail_midway() -> None:
            with written_whole(path) as partial:
                partial.write_text("half")
                raise KeyError

        with pytest.raises(KeyError):
            fail_midway()
        assert json.loads(path.read_text()) == {"steps": 1}
        assert list(tmp_path.iterdir()) == [path]

    @given(written=st.integers(0, 8), kept=st.integers(0, 8), torn=st.booleans())
    def test_metrics_go_on_after_the_resumed_step_without_a_step_twice(
        self, tmp_path_factory: pytest.TempPathFactory, written: int, kept: int, torn: bool
    ) -> None:
        path = tmp_path_factory.getbasetemp() / "metrics.jsonl"
        lines = [json.dumps({"step": step, "loss": 1 / step}) + "\n" for step in range(1, written + 1)]
        path.write_text("".join(lines) + ('{"step": 9, "lo' if torn else ""))
        records = keep_metrics_until(path, kept)
        assert [record["step"] for record in records] == list(range(1, min(written, kept) + 1))
        assert path.read_text() == "".join(lines[:kept])

    @pytest.mark.parametrize("second", ['{"step": 3}', "not JSON", '{"loss": 1}', "[]"])
    def test_metrics_that_do_not_follow_one_another_are_named_by_line(self, tmp_path: Path, second: str) -> None:
        path = tmp_path / "metrics.jsonl"
        path.write_text(f'{{"step": 1}}\n{second}\n{{"step": 2}}\n')
        with pytest.raises(JobError, match="line 2"):
            read_metrics(path)


class TestPictures:
    def test_both_pictures_are_drawn_from_the_least_there_is(self, tmp_path: Path) -> None:
        draw_loss([{"step": 1, "loss": 5.0}], tmp_path / "loss.png")
        event = LoggedEvent("", Phase.FORWARD, Action.RELEASE, 1.0, 1.0)
        draw_timeline([event], tmp_path / "timeline.png", title="one event")
        for name in ("loss.png", "timeline.png"):
            assert (tmp_path / name).read_bytes().startswith(PNG_SIGNATURE)
