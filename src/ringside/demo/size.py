"""How much slower a rank is than the others, beside what it was before; the factor that makes it so; how sure that is.

All of it is read from recorded own times. The detector has no part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]

LEAST_EFFECT, MOST_EFFECT = 0.4, 2.0
"""What more work adds to a rank's own time beside the others', as a share: it is between these, whatever noise says."""
DRAWN = 1000
BLOCK = 8
"""Steps that are drawn together, as own times of neighbouring steps are alike."""
SURE = (0.025, 0.975)


class Change(NamedTuple):
    """What became of a rank from a step on.

    Args:
        own_seconds: Of the rank, before and after.
        others_own_seconds: Of the median of the others, before and after.
        relative: The rank's over the others', after over before, less 1.
        relative_interval: Of the latter, 95%.
        since_interval: First steps that the same records fit as well, 95%.
        steps: How many there are before and after.
    """

    own_seconds: tuple[float, float]
    others_own_seconds: tuple[float, float]
    relative: float
    relative_interval: tuple[float, float]
    since_interval: tuple[int, int]
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


def measure_change(steps: NDArray[np.int64], own: Floats, rank: int, since: int) -> Change | None:
    """Return what became of a rank from a step on; None where there is too little before or after it.

    Intervals are those of a block bootstrap over the ratios before and after: 1000 draws of blocks of 8 steps.

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
    generator = np.random.default_rng(0)
    drawn = [_drawn_in_blocks(ratios[side], generator) for side in sides]
    sizes = np.quantile(np.expm1(middle(drawn[1]) - middle(drawn[0])), SURE)
    # Where the two means differ most clearly; a late step counts for no more than the change.
    change = abs(after - before)
    series = np.clip(np.hstack(drawn), min(before, after) - change, max(before, after) + change)
    count = np.arange(1, series.shape[1])
    left = np.cumsum(series, axis=1)[:, :-1]
    right = series.sum(axis=1, keepdims=True) - left
    apart = np.abs(right / (series.shape[1] - count) - left / count) * np.sqrt(count * (series.shape[1] - count))
    sinces = np.quantile(1 + np.argmax(apart, axis=1), SURE)
    mine, others = own[:, rank], _others(own, rank)
    return Change(
        own_seconds=(float(middle(mine[sides[0]])), float(middle(mine[sides[1]]))),
        others_own_seconds=(float(middle(others[sides[0]])), float(middle(others[sides[1]]))),
        relative=float(np.expm1(after - before)),
        relative_interval=(float(sizes[0]), float(sizes[1])),
        since_interval=(int(steps[int(sinces[0])]), int(steps[min(int(np.ceil(sinces[1])), len(steps) - 1)])),
        steps=(begin, len(steps) - begin),
    )


def _others(own: Floats, rank: int) -> Floats:
    others: Floats = np.median(np.delete(own, rank, axis=1), axis=1)
    return others


def _drawn_in_blocks(values: Floats, generator: np.random.Generator) -> Floats:
    """Return series as long as this one, made of blocks of it, [DRAWN, len(values)]."""
    blocks = -(-len(values) // BLOCK)
    starts = generator.integers(0, len(values) - BLOCK + 1, (DRAWN, blocks, 1))
    drawn: Floats = values[(starts + np.arange(BLOCK)).reshape(DRAWN, -1)[:, : len(values)]]
    return drawn
