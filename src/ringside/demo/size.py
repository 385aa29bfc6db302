"""How much slower a rank is than the others, beside what it was before; the factor that makes it so; how sure that is.

All of it is read from recorded own times. The detector has no part in it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringside.monitor.stats import student

Floats = NDArray[np.float64]

LEAST_EFFECT, MOST_EFFECT = 0.4, 2.0
"""What more work adds to a rank's own time beside the others', as a share: it is between these, whatever noise says."""
BLOCK = 8
"""Steps whose mean counts as one measurement, as own times of neighbouring steps are alike."""
SURE = NormalDist().inv_cdf(0.975)


class Change(NamedTuple):
    """What became of a rank from a step on.

    Args:
        own_seconds: Of the rank, before and after.
        others_own_seconds: Of the median of the others, before and after.
        relative: The rank's over the others', after over before, less 1.
        relative_interval: Of the latter, 95%.
        steps: How many there are before and after.
    """

    own_seconds: tuple[float, float]
    others_own_seconds: tuple[float, float]
    relative: float
    relative_interval: tuple[float, float]
    steps: tuple[int, int]


def log_ratios(own: Floats, rank: int) -> Floats:
    """Return the log of a rank's own time over the median of the others', [steps], of [steps, ranks]."""
    return np.log(own[:, rank] / _others(own, rank))


def middle(values: ArrayLike) -> Any:
    """Return the mean of the middle half along the last axis."""
    ordered = np.sort(np.asarray(values, dtype=np.float64), axis=-1)
    quarter = ordered.shape[-1] // 4
    return ordered[..., quarter : ordered.shape[-1] - quarter].mean(axis=-1)


def calibrated_factor(ratios: Floats, factors: Sequence[float], size: float) -> float:
    """Return the factor at which a rank is slower by `size`.

    Args:
        ratios: Log of its own time over the others', [steps].
        factors: The factor at each of these steps; 1: it was healthy.
        size: How much slower beside the others than when it is healthy, 0.3.
    """
    more = np.asarray(factors) - 1.0
    faulty = more > 0
    effect = middle(np.expm1(ratios[faulty] - middle(ratios[~faulty])) / more[faulty])
    return 1.0 + size / float(np.clip(effect, LEAST_EFFECT, MOST_EFFECT))


def is_at_bound(factor: float, size: float) -> bool:
    """Tell whether a factor is one beyond which `calibrated_factor` does not go, so that the size may be missed."""
    return not 1.0 + size / MOST_EFFECT < factor < 1.0 + size / LEAST_EFFECT


def measure_change(steps: NDArray[np.int64], own: Floats, rank: int, since: int) -> Change | None:
    """Return what became of a rank from a step on; None where there is too little before or after it.

    The interval is Student's t over means of blocks of 8 steps, of each side by itself (Welch).

    Args:
        steps: Their numbers, [steps].
        own: Own times in seconds, [steps, ranks].
        rank: Whose.
        since: The first step after.
    """
    known = np.isfinite(own).all(axis=1) & (own > 0).all(axis=1)
    steps, own = steps[known], own[known]
    begin = int(np.searchsorted(steps, since))
    if min(begin, len(steps) - begin) < BLOCK:
        return None
    ratios, sides = log_ratios(own, rank), (slice(0, begin), slice(begin, None))
    before, after = (float(middle(ratios[side])) for side in sides)
    sure = _half_width([_variance(ratios[side]) for side in sides])
    mine, others = own[:, rank], _others(own, rank)
    return Change(
        own_seconds=(float(middle(mine[sides[0]])), float(middle(mine[sides[1]]))),
        others_own_seconds=(float(middle(others[sides[0]])), float(middle(others[sides[1]]))),
        relative=float(np.expm1(after - before)),
        relative_interval=(float(np.expm1(after - before - sure)), float(np.expm1(after - before + sure))),
        steps=(begin, len(steps) - begin),
    )


def _others(own: Floats, rank: int) -> Floats:
    return np.median(np.delete(own, rank, axis=1), axis=1)


def _variance(values: Floats) -> tuple[float, int]:
    """Return the variance of the mean of the middle half, and the freedom of that estimate.

    By Tukey and McLaughlin (1963): values beyond the middle half move to its edge. Blocks stand for values.
    """
    ordered, quarter = np.sort(values), len(values) // 4
    moved = np.clip(values, ordered[quarter], ordered[len(values) - 1 - quarter])
    block = min(BLOCK, len(values) // 2)
    blocks = len(values) // block
    means = moved[len(values) - blocks * block :].reshape(blocks, block).mean(axis=1)
    kept = 1.0 - 2.0 * quarter / len(values)
    return float(means.var(ddof=1)) / kept**2 * block / len(values), blocks - 1


def _half_width(parts: Sequence[tuple[float, int]]) -> float:
    """Return half the interval of a difference, by the variance of either part and the freedom of its estimate."""
    variance = sum(part for part, _ in parts)
    if not variance:
        return 0.0
    freedom = variance**2 / sum(part**2 / free for part, free in parts)
    return float(student(SURE, np.array(freedom))) * math.sqrt(variance)
