"""Arithmetic of intervals: unions, what two unions share, how much of them lies in windows. Seconds, NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def union(intervals: Floats) -> Floats:
    """Return the union of intervals as ascending intervals that do not touch.

    Args:
        intervals: float64 [n, 2], start and end, in any order.

    Returns:
        float64 [m, 2].
    """
    if not len(intervals):
        return np.empty((0, 2))
    ordered = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    first = np.concatenate([[True], ordered[1:, 0] > reach[:-1]])
    starts = ordered[first, 0]
    ends = reach[np.concatenate([np.flatnonzero(first)[1:] - 1, [len(ordered) - 1]])]
    return np.stack([starts, ends], axis=1)


def intersect(a: Floats, b: Floats) -> Floats:
    """Return what two unions share, as a union; float64 [n, 2] each."""
    return complement(union(np.concatenate([complement(a), complement(b)])))


def complement(a: Floats) -> Floats:
    """Return everything outside a union; its first interval begins at -inf, its last ends at inf."""
    starts = np.concatenate([[-np.inf], a[:, 1]])
    ends = np.concatenate([a[:, 0], [np.inf]])
    outside = np.stack([starts, ends], axis=1)
    return outside[outside[:, 1] > outside[:, 0]]


def subtract(a: Floats, b: Floats) -> Floats:
    """Return what of union `a` is not in union `b`."""
    return intersect(a, complement(b)) if len(b) else a


def within(intervals: Floats, windows: Floats) -> Floats:
    """Return how many seconds of a union lie in each window.

    Args:
        intervals: A union, float64 [n, 2].
        windows: float64 [w, 2]; they may overlap.

    Returns:
        float64 [w].
    """
    if not len(intervals):
        return np.zeros(len(windows))
    lengths = np.concatenate([[0.0], np.cumsum(intervals[:, 1] - intervals[:, 0])])

    def before(when: Floats) -> Floats:
        """Seconds of the union before a time."""
        place = np.searchsorted(intervals[:, 0], when, side="right")
        last = np.maximum(place - 1, 0)
        inside = np.clip(when - intervals[last, 0], 0.0, intervals[last, 1] - intervals[last, 0])
        return np.where(place > 0, lengths[last] + inside, 0.0)

    return before(windows[:, 1]) - before(windows[:, 0])


def clip(intervals: Floats, start: float, end: float) -> Floats:
    """Return the parts of intervals inside one window."""
    cut = np.clip(intervals, start, end)
    return cut[cut[:, 1] > cut[:, 0]]
