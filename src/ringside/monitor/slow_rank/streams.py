"""What is tested of a job: whole own times, the phases they are made of, and waits for a CPU."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ringside.monitor.stats import Floats, log_excess, others_median

PARTS = ("data", "forward", "backward", "optimizer")
"""Phases that are judged beside the whole: 12 ms more of a loader are certain long before a noisy own time is."""

STREAMS = 1 + len(PARTS) + 3
"""The whole, its parts, what it was delayed for want of a CPU, the rest without that, and the rest per sample."""
WHOLE, DELAY, REST, PER_SAMPLE = 0, STREAMS - 3, STREAMS - 2, STREAMS - 1

MOST_WITH_PARTS = 128
"""More ranks are judged by whole own times alone: streams of 1,024 would take 8 ms a step and 0.3 GB of rank 0, and
among so many the noise of one is known well."""

LEAST_SHARE = 0.1
"""No rank is taken to need less than this share of what the others need."""


def excess_of_streams(own: Floats, samples: Floats, parts: ArrayLike | None, run_delay: ArrayLike | None) -> Floats:
    """Return the log excess of what is tested, [streams, ranks]; NaN where it is missing.

    All but the last is how much more seconds a rank spends than the others do, in shares of their own time.

    Args:
        own: Own times in seconds, [ranks].
        samples: Samples per rank, likewise.
        parts: Seconds of the own time in each of `PARTS`, [parts, ranks].
        run_delay: Seconds of it in which the training thread was ready to run and had no CPU, [ranks].
    """
    seconds = np.full((STREAMS - 1, len(own)), np.nan)
    seconds[WHOLE] = own
    if parts is not None:
        seconds[1:DELAY] = parts
    if run_delay is not None:
        seconds[DELAY] = np.minimum(np.asarray(run_delay, dtype=np.float64), (1.0 - LEAST_SHARE) * own)
        seconds[REST] = own - seconds[DELAY]
    streams = np.empty((STREAMS, len(own)))
    with np.errstate(invalid="ignore", divide="ignore"):
        more = (seconds - others_median(seconds)) / others_median(own)
        streams[:PER_SAMPLE] = np.log(np.maximum(1.0 + more, LEAST_SHARE))
        streams[PER_SAMPLE] = log_excess(np.where(np.isnan(seconds[REST]), own, seconds[REST]) / samples)
    return streams
