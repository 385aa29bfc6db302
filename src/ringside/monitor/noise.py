"""How noisy a job is, learnt while it runs: each rank's usual excess and the long-run variance around it.

The long-run variance (variance times the sum of all autocorrelations) is what decides how far a sum of excesses
wanders by chance: noise with an autocorrelation of 0.9 carries a sum as far as white noise of 19 times its variance.
"""

from __future__ import annotations

import numpy as np

from ringside.monitor.excess import Floats

PRIOR_VARIANCE = 0.03**2
PRIOR_STEPS = 4.0
MEMORY_STEPS = 4_000.0
RANK_PRIOR_STEPS = 60.0
SMALLEST_CLIP = 0.25
FADE = 0.9
SUSPECTED = 0.9
"""The autocorrelation that noise is taken to have before there are steps enough to tell."""

LAG = 4
"""Differences over this many steps beside those over one tell how correlated the steps are."""


class Noise:
    """Running estimates over `[jobs, ranks]` of log excess; memory does not grow with steps.

    Args:
        shape: `(jobs, ranks)`. Jobs are independent; one is the normal case, benchmarks run many side by side.

    Attributes:
        level: Usual excess of each rank, [jobs, ranks].
        clip: How far from the level a single step may count, [jobs, 1].
        lean: Third moment over variance², [jobs, 1]: positive where late steps stand out more than early ones.
        variance: Long-run variance of each rank, with a margin for what is not known yet, [jobs, ranks].
        level_error: Standard error of `level`, [jobs, ranks].
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        jobs, ranks = shape
        self.level = np.zeros(shape)
        self._seen = np.zeros(shape)
        self._squares = np.zeros(shape)  # running mean of residual² per rank
        self._recent = np.zeros(shape)  # Σ FADE^lag · residual
        self._steps = np.full((jobs, 1), PRIOR_STEPS)
        self._pooled = np.full((jobs, 1), PRIOR_VARIANCE)
        self._cubes = np.zeros((jobs, 1))  # running mean of residual³
        self._lagged = np.zeros((jobs, 1))  # running mean of residual · recent residuals
        self._independent = max(1.0, ranks / 2)
        self._estimate()

    def begin(self, rows: Floats) -> None:
        """Start from the median of the first few steps, [steps, jobs, ranks]; they count as seen.

        A rank that is slow from the first step on must not look like noise while its level is being found.
        """
        ordered = np.sort(rows, axis=0)  # NaN last
        known = np.sum(~np.isnan(rows), axis=0, keepdims=True)
        middle = np.take_along_axis(ordered, np.maximum(known - 1, 0) // 2, axis=0)[0]
        self.level = np.where(np.isnan(middle), 0.0, middle)
        self._seen = np.minimum(known[0], len(rows)).astype(float)
        self.guess(rows)

    def guess(self, rows: Floats) -> None:
        """Judge the noise by the differences of a job's first steps, [steps, jobs, ranks].

        A rank that becomes slow among them adds one great difference, and LAG great ones over LAG steps. Those are
        left out, so that it is found as soon as one that becomes slow later.
        """
        self._steps = np.full_like(self._steps, PRIOR_STEPS + len(rows))
        near = _half_square(rows, 1, self.clip)
        r = np.full_like(near, SUSPECTED)
        if len(rows) > 3 * LAG:
            # For a first-order autoregression with coefficient r the two stand as 1 : 1 + r + … + r^(LAG−1).
            ratio = _half_square(rows, LAG, self.clip) / np.maximum(near, 1e-12)
            margin = 0.5 / np.sqrt((len(rows) - LAG) * self._independent)
            r = np.interp(ratio * (1.0 + margin), _RATIOS, _COEFFICIENTS)
        variance = (PRIOR_STEPS * PRIOR_VARIANCE + len(rows) * near / (1.0 - r)) / self._steps
        self._lagged = variance * r * FADE / (1.0 - r * FADE)
        self._pooled = variance
        self._squares = np.broadcast_to(variance, self._squares.shape).copy()
        self._estimate()

    def learn(self, excess: Floats, weight: Floats) -> None:
        """Take in one step.

        Args:
            excess: Log excess, [jobs, ranks]; NaN where missing.
            weight: How much to learn from each, 0 to 1, [jobs, ranks].
        """
        weight = np.where(np.isnan(excess), 0.0, weight)
        residual = np.where(np.isnan(excess), 0.0, excess - self.level)
        residual = np.minimum(np.maximum(residual, -self.clip), self.clip)
        self._learn_spread(residual, weight)
        self._seen = np.minimum(self._seen + weight, MEMORY_STEPS)
        gain = weight / np.maximum(self._seen, 1.0)
        self.level = self.level + gain * residual
        self._squares = self._squares + gain * (residual * residual - self._squares)
        self._recent = FADE * (self._recent + residual)
        self._estimate()

    def _learn_spread(self, residual: Floats, weight: Floats) -> None:
        total = weight.sum(axis=1, keepdims=True)
        share = weight / np.maximum(total, 1e-9)
        step = total / residual.shape[1]
        self._steps = np.minimum(self._steps + step, MEMORY_STEPS)
        gain = step / self._steps
        self._pooled = self._pooled + gain * ((share * residual**2).sum(1, keepdims=True) - self._pooled)
        self._cubes = self._cubes + gain * ((share * residual**3).sum(1, keepdims=True) - self._cubes)
        product = (share * residual * self._recent).sum(1, keepdims=True)
        self._lagged = self._lagged + gain * (product - self._lagged)

    def _estimate(self) -> None:
        pooled = np.maximum(self._pooled, 1e-8)
        self.lean = np.maximum(self._cubes, 0.0) / pooled**2
        self.clip = np.maximum(2.5 * np.sqrt(pooled), SMALLEST_CLIP)
        error = 1.0 / np.sqrt(self._steps * self._independent)
        likely = _inflation(self._lagged / pooled + 3.0 * error)
        error = error * np.sqrt(likely)  # correlated steps tell less
        inflation = _inflation(self._lagged / pooled + (3.0 + 6.0 * error) * error) * (1.0 + 2.0 * error)
        own = (RANK_PRIOR_STEPS * pooled + self._seen * self._squares) / (RANK_PRIOR_STEPS + self._seen)
        self.variance = np.maximum(own, pooled) * inflation
        self.level_error = np.sqrt(self.variance / np.maximum(self._seen, 1.0))


_COEFFICIENTS = np.linspace(0.0, SUSPECTED, 91)
_RATIOS = sum(_COEFFICIENTS**power for power in range(LAG))


def _half_square(rows: Floats, lag: int, clip: Floats) -> Floats:
    """Return half the mean squared difference over `lag` steps without the `lag` greatest, [jobs, 1].

    That is the variance of independent steps.
    """
    jumps = np.minimum(np.abs(rows[lag:] - rows[:-lag]), clip)
    known = ~np.isnan(jumps)
    squares = np.where(known, jumps * jumps, 0.0).sum(axis=2) / np.maximum(known.sum(axis=2), 1)
    kept = np.sort(squares, axis=0)[:-lag]
    half: Floats = 0.5 * kept.mean(axis=0)[:, None]
    return half


def _inflation(lagged: Floats) -> Floats:
    """Return long-run variance over variance, as for a first-order autoregression.

    For such noise with coefficient r, the mean of residual · Σ FADE^lag · earlier residual, over the variance,
    is a / (1 − a) with a = r · FADE; solving for r gives (1 + r) / (1 − r).
    """
    ratio = np.maximum(lagged, 0.0)
    r = np.minimum(ratio / (1.0 + ratio) / FADE, 0.97)
    return (1.0 + r) / (1.0 - r)
