"""What the demo trains on: the source of the Python standard library found on this machine, real files all of them."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ringside.errors import UsageError

LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
ENOUGH_BYTES = 8_000_000


def sources(root: Path | None = None) -> list[Path]:
    """Return the *.py files below a directory, sorted, without tests and installed packages.

    Args:
        root: The directory; that of the standard library by default.

    Raises:
        UsageError: There are none.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    found = sorted(path for path in root.rglob("*.py") if not LEFT_OUT.intersection(path.relative_to(root).parts))
    if not found:
        raise UsageError(
            f"no Python sources (*.py) below {root} to train on: give a directory that has some, "
            "such as --corpus path/to/your/project"
        )
    return found


class Corpus:
    """One rank's share of the text.

    Args:
        root: Directory of the sources; None takes the standard library's.
        rank: Whose share: files are dealt out like cards.
        ranks: How many shares there are.
        context: Bytes per sequence; one more is given, for the last prediction.

    Raises:
        UsageError: There is too little text for so many ranks.
    """

    def __init__(self, root: Path | None, rank: int, ranks: int, context: int) -> None:
        self.files = sources(root)[rank::ranks]
        self.text: NDArray[np.uint8] = _read(self.files)
        self._length = context + 1
        if len(self.text) <= self._length:
            raise UsageError(
                f"rank {rank} of {ranks} has {len(self.text)} bytes of Python source to train on, and one sequence "
                f"takes {self._length}: give a --corpus with more files, or fewer ranks"
            )

    def batch(self, generator: np.random.Generator, size: int) -> NDArray[np.int64]:
        """Return sequences from random places, int64 [size, context + 1]."""
        starts = generator.integers(0, len(self.text) - self._length, size)
        sequences: NDArray[np.int64] = self.text[starts[:, None] + np.arange(self._length)].astype(np.int64)
        return sequences


def _read(files: list[Path]) -> NDArray[np.uint8]:
    pieces: list[bytes] = []
    total = 0
    for path in files:
        try:
            pieces.append(path.read_bytes())
        except OSError:
            continue  # a file one may list and not read
        total += len(pieces[-1])
        if total >= ENOUGH_BYTES:
            break
    return np.frombuffer(b"".join(pieces), dtype=np.uint8)
