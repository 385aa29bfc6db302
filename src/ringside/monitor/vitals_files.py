"""Small files of the kernel that are read again and again: kept open, and simply absent where they cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

_LARGEST_BYTES = 1 << 18


class KeptFile:
    """A file of `/proc` or a cgroup; every `read` gives what the kernel says now.

    Args:
        path: Which one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1

    def read(self) -> str | None:
        """Return its text; None where it is missing, gone or not for us to read."""
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._fd, _LARGEST_BYTES, 0).decode(errors="replace")
        except OSError:
            self.close()
            return None

    def close(self) -> None:
        """Give the descriptor back; the next `read` opens the file anew."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def figures(text: str | None) -> dict[str, float]:
    """Return lines of `name number` as a dict; whatever is not of that form is left out."""
    found: dict[str, float] = {}
    for line in (text or "").splitlines():
        words = line.split()
        if len(words) == 2:
            number = as_number(words[1])
            if number is not None:
                found[words[0]] = number
    return found


def as_number(text: str) -> float | None:
    """Return a whole number in text; None where it is none."""
    try:
        return float(int(text))
    except ValueError:
        return None
