"""Real files of others (tests/data/README.md)."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).parents[1] / "data"


def shared(name: str) -> Path:
    """Return a folder or file of them."""
    path = DATA / name
    assert path.exists(), path
    return path
