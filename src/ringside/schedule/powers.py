"""Algorithms for powers of two on any number of ranks: the extra ranks fold themselves in first.

With p the largest power of two ≤ n and e = n - p extra ranks, each of the first e even ranks hands its tensor to the
odd rank above it and waits; p ranks do the work; at the end the e odd ranks hand the result back (R. Thakur,
R. Rabenseifner, W. Gropp, IJHPCA 19 (2005), on reduce and all-reduce).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringside.schedule.schedule import Round


def largest_power(n: int) -> int:
    """Return the largest power of two ≤ n, 1 for n < 1."""
    return 1 << max(n.bit_length() - 1, 0) if n > 0 else 1


def folded_rounds(n: int, inner: int) -> int:
    """Return how many rounds `inner` rounds of the p working ranks take when the extra ranks are folded in."""
    return inner + (2 if n > largest_power(n) else 0)


def workers(n: int) -> NDArray[np.int32]:
    """Return which rank plays number v of the p working ones, int32 [p], ascending."""
    extra = n - largest_power(n)
    number = np.arange(largest_power(n), dtype=np.int32)
    return np.where(number < extra, 2 * number + 1, number + extra).astype(np.int32)


def fold_in(n: int, chunks: int) -> Round:
    """Return the round in which the extra ranks hand all chunks over."""
    extra = n - largest_power(n)
    src = np.repeat(2 * np.arange(extra, dtype=np.int32), chunks)
    chunk = np.tile(np.arange(chunks, dtype=np.int32), extra)
    return Round(src, src + 1, chunk, np.ones(len(src), dtype=np.bool_))


def fold_out(n: int, chunks: int) -> Round:
    """Return the round in which they get the result."""
    step = fold_in(n, chunks)
    return Round(step.dst, step.src, step.chunk, ~step.reduce)
