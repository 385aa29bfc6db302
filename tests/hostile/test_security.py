"""SECURITY.md: each of its lines is enforced by tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ")][1:]


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_is_named_exists(file: str, name: str) -> None:
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_what_others_may_not_do_is_held_by_a_test() -> None:
    """A row without one says what is not prevented, and only that."""
    for row in ROWS:
        _, _, may, may_not, held, _ = (cell.strip() for cell in row.split("|"))
        assert bool(may_not) == bool(re.search(r"`tests/[\w/]+\.py::\w+`", held)), row
        assert may_not or may.startswith("**"), row
    assert len(NAMED) == TEXT.count("::test_") > 20
