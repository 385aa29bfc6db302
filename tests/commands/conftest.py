from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[object]:
    """`ringside demo` and `ringside run` around ranks that are forked: see `forked_launch.Command`."""
    pytest.importorskip("torch")
    from .forked_launch import Command

    made = Command(tmp_path, capsys)
    yield made
    made.launch.close()
