"""Text as bytes: where it comes from, what is held out, and which windows each rank trains on.

Promises: a batch is a pure function of (seed, step, rank), so a resumed run goes on with the very bytes that
an uninterrupted one would have seen. The held-out tail is never trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lm.errors import JobError

HELD_OUT_FRACTION = 0.1


@dataclass(frozen=True)
class Corpus:
    """Text of one run: ``training`` and ``held_out`` are 1-D uint8 tensors on the CPU.

    ``name`` says where from.
    """

    name: str
    digest: str
    training: torch.Tensor
    held_out: torch.Tensor


def python_documentation() -> bytes:
    """English text that every CPython ships: the language reference of ``help()``, each paragraph once.

    Its topics quote each other; a paragraph that came before would otherwise be both trained on and held out.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise JobError(
            "this Python comes without pydoc_data.topics, the default text: name a text of your own with --text FILE"
        ) from error
    paragraphs: dict[str, str] = {}
    for topic in sorted(topics):
        for paragraph in topics[topic].split("\n\n"):
            paragraphs.setdefault(paragraph.strip(), paragraph.strip("\n"))
    return "\n\n".join(text for key, text in paragraphs.items() if key).encode()


def read_files(files: Sequence[Path]) -> bytes:
    """Contents of ``files`` one after another, as raw bytes of whatever encoding.

    JobError names a file that is not there, cannot be read or is empty.
    """
    parts = []
    for file in files:
        try:
            part = file.read_bytes()
        except FileNotFoundError as error:
            raise JobError(f"--text {file}: there is no such file") from error
        except OSError as error:
            raise JobError(f"--text {file}: cannot be read ({error.strerror})") from error
        if not part:
            raise JobError(f"--text {file}: the file is empty; there is nothing to train on")
        parts.append(part)
    return b"".join(parts)


def load_corpus(files: Sequence[Path], context: int) -> Corpus:
    """The text of ``files``, or of Python's documentation where there are none; its last tenth is held out.

    JobError where either part is shorter than one window of ``context`` bytes and the byte that follows it.
    """
    text = read_files(files) if files else python_documentation()
    name = " + ".join(str(file) for file in files) if files else "pydoc_data.topics"
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(text) - int(len(text) * HELD_OUT_FRACTION)
    training, held_out = whole[:cut], whole[cut:]
    if min(len(training), len(held_out)) < context + 1:
        needed = int((context + 1) / HELD_OUT_FRACTION) + 1
        raise JobError(
            f"text {name}: {len(text)} bytes, of which {len(held_out)} are held out, do not fill one window "
            f"of --context {context}; give at least {needed} bytes, or a smaller --context"
        )
    return Corpus(name, hashlib.sha256(text).hexdigest(), training, held_out)


def training_batch(
    corpus: Corpus, *, seed: int, step: int, rank: int, batch: int, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, both ``(batch, context)`` int64 on the CPU, that ``rank`` trains on at ``step``.

    Windows begin anywhere in the training text; targets are the tokens one byte later.
    """
    key = hashlib.sha256(f"{seed}/{step}/{rank}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big", signed=True))
    starts = torch.randint(len(corpus.training) - context, (batch,), generator=generator)
    windows = corpus.training[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def held_out_windows(corpus: Corpus, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets, both ``(windows, context)`` int64.

    The held-out text cut into windows side by side.
    """
    count = (len(corpus.held_out) - 1) // context
    tokens = corpus.held_out[: count * context].view(count, context)
    targets = corpus.held_out[1 : count * context + 1].view(count, context)
    return tokens.long(), targets.long()
