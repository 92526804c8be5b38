"""How a test says that something must be refused, so that a failure names the case among many."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def refused(error: type[Exception], match: str, what: str) -> Iterator[None]:
    """The block must raise ``error`` with a message in which ``match`` is found; ``what`` names the case."""
    try:
        yield
    except Exception as raised:
        if not isinstance(raised, error) or not re.search(match, str(raised)):
            raise AssertionError(f"{what}: expected {error.__name__} with {match!r}, got {raised!r}") from raised
    else:
        raise AssertionError(f"{what}: expected {error.__name__} with {match!r}, and nothing was raised")
