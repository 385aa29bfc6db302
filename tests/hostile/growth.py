"""How the time of something grows with the size of what it is given."""

from __future__ import annotations

import time
from collections.abc import Callable

TINY_S = 0.01
"""Below it, whatever it grows like, it is too little to be measured, and too little to matter."""


def growth(work: Callable[[int], object], size: int) -> float:
    """Return how many times longer four times the size takes: about 4 where linear, 16 where quadratic.

    Each is the best of three, in processor time of this thread.
    """
    small, large = (min(_seconds(work, times * size) for _ in range(3)) for times in (1, 4))
    return large / max(small, TINY_S)


def _seconds(work: Callable[[int], object], size: int) -> float:
    begun = time.thread_time()
    work(size)
    return time.thread_time() - begun
