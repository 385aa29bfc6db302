"""What a culprit costs the whole job, by replaying recorded own times with that culprit repaired.

All ranks wait for the slowest, so a step loses max(own) − max(own with the culprit repaired), and it loses that on
every rank. The culprit's *own* excess is no price: where another rank is nearly as slow, repairing one of them
changes little, and where times vary, the maximum of many ranks was late before.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ringside.monitor.stats import Floats, known_median, log_excess, row_medians, usable

RATE = "RINGSIDE_PRICE"
"""What an hour of one rank costs, in any currency; what `--price` sets."""

PER_RANK_HOUR, MONEY = "price_per_rank_hour", "cost_money"
"""Keys of JSON that exist where it is known: of a whole run, and of each verdict."""

BLOCK = 96
"""Steps that are repaired by one factor; a rank may become slower and slower."""

NEWEST = 32
"""Steps whose median is a culprit's excess now."""


def repair_ranks(own: ArrayLike, culprits: Sequence[int], usual: Sequence[float] | None = None) -> Floats:
    """Return own times with the culprits' scaled down to what the other ranks need.

    Args:
        own: Own times in seconds, float [steps, ranks]; NaN = missing.
        culprits: Ranks to repair, together.
        usual: Log excess each culprit had over the others before it became slow; 0 where not given.

    Returns:
        float64 [steps, ranks]; a culprit keeps the shape of its noise within 96 steps, and is never made slower.
    """
    repaired: Floats = usable(own).copy()
    innocent = [rank for rank in range(repaired.shape[1]) if rank not in set(culprits)]
    if not innocent or not len(repaired):
        return repaired
    others = row_medians(repaired[:, innocent])
    for index, rank in enumerate(culprits):
        ratio = np.log(repaired[:, rank] / others)
        before = usual[index] if usual is not None else 0.0
        for begin in range(0, max(len(ratio) // BLOCK, 1) * BLOCK, BLOCK):
            rows = slice(begin, begin + BLOCK if begin + 2 * BLOCK <= len(ratio) else None)
            excess = known_median(ratio[rows], -np.inf) - before
            repaired[rows, rank] *= np.exp(-max(excess, 0.0))
    return repaired


def cost_rank_seconds(own: ArrayLike, culprits: Sequence[int], usual: Sequence[float] | None = None) -> float:
    """Return ranks × the seconds lost to the culprits, summed over the steps given.

    Args:
        own: Own times in seconds, float [steps, ranks], of the steps since the onset; NaN = missing.
        culprits: Ranks to repair, together.
        usual: Log excess each culprit had over the others before it became slow; 0 where not given.
    """
    times = usable(own)
    return spared_rank_seconds(times, repair_ranks(times, culprits, usual))


def spared_rank_seconds(own: ArrayLike, repaired: ArrayLike) -> float:
    """Return ranks × the seconds that repaired own times would have spared the job.

    Args:
        own: Own times in seconds, float [steps, ranks]; NaN = missing.
        repaired: As they would have been, [steps, ranks].
    """
    times = usable(own)
    slowest, spared = (np.fmax.reduce(rows, axis=1, initial=0.0) for rows in (times, usable(repaired)))
    return float(times.shape[1] * (slowest - spared).sum())


class Meter:
    """The price of one open verdict while the run goes on: a few numbers per culprit, no growth with steps.

    Its excess is the median of the newest steps, as a rank may become slower and slower.

    Args:
        rank: The culprit.
        excess: Its log excess as far as known when the verdict was reached.
        usual: Its log excess before.
        rank_seconds: What it cost until then.

    Attributes:
        rank_seconds: The price so far.
    """

    def __init__(self, rank: int, excess: float, usual: float = 0.0, rank_seconds: float = 0.0) -> None:
        self.rank_seconds = rank_seconds
        self._rank, self._usual = rank, usual
        self._excess = deque([excess] * (NEWEST // 2), maxlen=NEWEST)

    def add(self, own: ArrayLike) -> None:
        """Take in steps, float [steps, ranks] of own seconds."""
        for times in usable(own):
            excess = float(log_excess(times)[self._rank])
            if np.isfinite(excess):
                self._excess.append(excess)
            repaired = times.copy()
            repaired[self._rank] *= np.exp(-max(float(np.median(self._excess)) - self._usual, 0.0))
            self.rank_seconds += spared_rank_seconds(times[None], repaired[None])


# -------------------------------------------------------------------------------------------------
# The same in money, where somebody says what an hour of a rank costs.


def hourly_rate(text: str) -> float:
    """Return a rate as it is written on a command line or in `RATE`.

    Raises:
        ValueError: It is no positive number.
    """
    rate = float(text)
    if not (math.isfinite(rate) and rate > 0):
        raise ValueError(text)
    return rate


def known_rate(content: Mapping[str, Any] | None = None) -> float | None:
    """Return what an hour of one rank costs; None where nobody said so.

    Args:
        content: A run's summary, of which somebody may have said it before.
    """
    for text in (os.environ.get(RATE, ""), str((content or {}).get(PER_RANK_HOUR) or "")):
        try:
            return hourly_rate(text)
        except ValueError:
            continue
    return None


def money(rank_seconds: float, rate: float) -> float:
    """Return what rank-seconds cost at a rate per rank and hour."""
    return rank_seconds / 3600.0 * rate
