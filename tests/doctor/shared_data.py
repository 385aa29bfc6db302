"""Where the data lies that is not part of the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2].parent / "shared" / "data"


def shared(name: str) -> Path:
    """Return a folder or file of the shared data; skip the test where it is absent."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return path
