"""The table of kinds of models says of each row which tests show it."""

from __future__ import annotations

import re
from pathlib import Path

TABLE = Path(__file__).parent.parent / "docs" / "models.md"


def test_every_row_names_test_files_that_exist() -> None:
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("|")]
    assert rows[0].endswith("| shown by |")
    kinds = [row for row in rows[2:] if not row.startswith("| **")]
    assert len(kinds) > 40
    for row in kinds:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4, row
        named = re.findall(r"`(test_\w+\.py)`", cells[-1])
        assert named, f"no test: {row}"
        for name in named:
            assert (Path(__file__).parent / name).exists(), f"{name} of: {row}"
