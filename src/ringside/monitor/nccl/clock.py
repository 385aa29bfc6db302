"""The GPU's clock beside the host's, from what must have come before what; pure.

A kernel starts after the API was called and before the host is told of it, and it ends before the host is told of that.
Each such pair bounds what the GPU's clock is ahead by; between them the clocks drift, at most by `MOST_DRIFT`. The
lower bound is the better one: of many reports the promptest comes within microseconds, but a GPU with much to do starts
nothing when it is called for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.stats import Floats

MOST_DRIFT = 1e-4
"""Quartz clocks stay within a few times 1e-5 of each other."""
RESOLUTION_NS = 2_000
"""`globaltimer` advances in steps of a microsecond on many GPUs."""


def fit_clock(calls: NDArray[np.void]) -> tuple[Floats, Floats]:
    """Return of each call how much the GPU's clock is ahead of the host's at its arrival, at least and at most.

    Args:
        calls: Of one process, of dtype `ringside.monitor.nccl.calls.CALL`, in order.

    Returns:
        Nanoseconds, float64 [calls] each; NaN: not known. That is also said of bounds that contradict each other, as
        when a clock was set. The most is infinite where NCCL has told of no call of the API.
    """
    seen = calls["arrived_gpu_ns"] > 0
    least, most = np.full(len(calls), np.nan), np.full(len(calls), np.nan)
    if seen.any():
        at = calls["arrived_gpu_ns"][seen].astype(np.int64)
        order = np.argsort(at, kind="stable")
        drift = (at - at[order[0]]) * MOST_DRIFT
        lower = (at - calls["reported_ns"][seen].astype(np.int64) - RESOLUTION_NS).astype(np.float64)
        upper = (at - calls["enqueued_ns"][seen].astype(np.int64) + RESOLUTION_NS).astype(np.float64)
        upper[~calls["is_called"][seen]] = np.inf
        low, high = np.empty(len(at)), np.empty(len(at))
        low[order] = _tightest(lower[order], drift[order])
        high[order] = -_tightest(-upper[order], drift[order])
        is_known = low <= high
        least[seen], most[seen] = np.where(is_known, low, np.nan), np.where(is_known, high, np.nan)
    return least, most


def _tightest(lower: Floats, drift: Floats) -> Floats:
    """Return the greatest lower bound at each moment, when those of other moments weaken as clocks drift."""
    from_before = np.maximum.accumulate(lower + drift) - drift
    from_after = np.maximum.accumulate((lower - drift)[::-1])[::-1] + drift
    return np.maximum(from_before, from_after)
