"""How noisy a job is, learnt from a stretch of healthy steps: what each rank usually exceeds the others by, how widely
single steps scatter, and how far means of windows wander by chance.

Excess is cut at several distances from the usual. The narrow cuts tell little of how late a late step is and so of how
wild the noise may be: their means are close to normal in any noise, and a window of them needs no more than its
variance. A correlated noise shifts all means by much; there the wide cut is used to compare neighbouring windows, which
share most of that.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.stats import Floats, deviation, known_or_0, median, student

CUTS = (1.5, 2.5, 8.0)
"""How far from the usual a single step counts, in standard deviations of the noise's core; the last one only where
neighbouring windows are compared."""

WIDEST_CUT = 0.1
"""The last cut is at least so much: among quiet ranks a late step may well count for what it is."""

SMALLEST_SCALE = 0.002
"""Less scatter than this is not reckoned with."""

SURE = 0.7
"""Standard errors between the estimated autocorrelation and the one that is reckoned with."""

DOUBT = 8.0
"""How many steps' worth of doubt there is that correlation at greater distances is more than the first lag says."""

MOST_CORRELATED = 0.98

SPREAD, SMALLEST_SPREAD = 0.02, 0.01
"""Standard deviation of healthy ranks' usual excess: assumed for few ranks (±3%), and at least, where measured."""

FEWEST_TO_POOL = 8
"""From so many ranks on, how far healthy ranks lie apart is read across the ranks."""

TOLERATED = 3 * SPREAD
"""A constant excess up to here is a difference between healthy ranks (±3%, seen from the slowest, or the middle)."""

LEAST_VARIANCE = 0.2
"""No mean is taken to vary by less than this share of what independent steps would give, however they take turns."""

LOUD_STEPS = 60.0
"""A rank that is noisier than the others is given its own scale as far as it has been seen for more than so long."""


class Noise(NamedTuple):
    """What a stretch of steps says of the next ones; of `[streams, ranks]`.

    Args:
        usual: What each rank usually exceeds the others by, at most what is tolerated, [streams, ranks].
        base: What excess is counted from: the usual, and 0 of ranks that are usually early, [streams, ranks].
        limits: The cuts, the same of all ranks, [cuts, streams, ranks].
        bars: What the sum of each window's excess over the base must reach, by cut but the last, [windows, cuts - 1,
            streams, ranks].
        jumps: What it must exceed that of the window right before by, with the last cut, [windows, streams, ranks].
        inflation: The variance of each window's mean over that of independent steps, [windows, streams, 1].
    """

    usual: Floats
    base: Floats
    limits: Floats
    bars: Floats
    jumps: Floats
    inflation: Floats


def learn(excess: Floats, windows: NDArray[np.int64], z: float) -> Noise:
    """Learn how noisy a job is.

    The variance of a window's mean comes from an autocorrelation and its decay (as in an ARMA(1, 1) process; Box and
    Jenkins 1970), pooled over ranks and taken a little too high. As it is estimated from few steps, Student's t takes
    the place of the normal quantile; late steps that are many on one side add the skewness (Cornish, Fisher 1938).

    Args:
        excess: Log excess of healthy steps, [steps, streams, ranks]; NaN where missing.
        windows: Lengths in steps, ascending.
        z: How many standard deviations as rare as a false alarm may be.
    """
    ranks = excess.shape[2]
    series = np.ascontiguousarray(excess.transpose(1, 2, 0))  # what is summed side by side: in a tenth of the time
    missing = np.isnan(series)
    count = len(excess) - missing.sum(axis=2)  # [streams, ranks]
    steps = np.maximum(count.max(axis=1, keepdims=True), 1.0)  # [streams, 1]
    independent = steps * max(1.0, ranks - 1.0)  # two ranks mirror each other
    total = np.maximum(count.sum(axis=1, keepdims=True), 1.0)
    middle = known_or_0(median(excess))
    away = series - middle[..., None]
    scale = known_or_0(deviation(away.reshape(len(away), -1).T))[:, None]
    scale = np.maximum(scale, SMALLEST_SCALE)
    limits = np.multiply.outer(CUTS, scale)
    limits[-1] = np.maximum(limits[-1], WIDEST_CUT)
    lengths = windows.reshape(-1, 1, 1, 1).astype(float)

    # Sums over the steps, by cut: of residuals, of their squares and cubes, and of products with those that follow.
    residual = np.maximum(away, -limits[..., None])
    np.minimum(residual, limits[..., None], out=residual)
    residual[:, missing] = 0.0
    mean = residual.sum(axis=-1) / np.maximum(count, 1)
    residual -= mean[..., None]
    residual[:, missing] = 0.0
    squares = np.einsum("csrt,csrt->csr", residual, residual)
    cubes = np.einsum("csrt,csrt,csrt->cs", residual, residual, residual)[..., None]
    products = [np.einsum("csrt,csrt->cs", residual[..., lag:], residual[..., :-lag])[..., None] for lag in (1, 2, 3)]
    variance = squares.sum(axis=2, keepdims=True) / np.maximum(total - ranks, 1.0)
    variance = np.maximum(variance, LEAST_VARIANCE * scale**2)

    # How successive steps correlate; an estimate around its own mean is too low by (1 + 3r)/N (Kendall 1954).
    lags = np.array(products) / (total * variance)
    bias = (1.0 + 3.0 * np.maximum(lags[0], 0.0)) / steps
    first = np.minimum(np.maximum(lags[0] + bias, -MOST_CORRELATED), MOST_CORRELATED)
    positive = np.maximum(lags + bias, 0.0)
    error = np.sqrt((1.0 - first**2) / independent)
    # Steps that take turns make means steadier; that is only half believed.
    reckoned = np.minimum(np.where(first > 0, first, first / 2) + SURE * error, MOST_CORRELATED)
    near = positive[0] + positive[1]
    weight = independent * near**2
    further = (positive[1] + positive[2]) / np.where(near > 0, near, 1.0)
    decay = (weight * further + DOUBT * np.maximum(reckoned, 0.0)) / (weight + DOUBT)
    decay = np.minimum(np.maximum(decay, 0.0), MOST_CORRELATED)

    # Variances of the mean of each window, and of all steps, which is how well the usual is known.
    inflation = 1.0 + 2.0 * reckoned * _sum_of_lags(decay, lengths)  # [windows, cuts, streams, 1]
    inflation = np.maximum(inflation, LEAST_VARIANCE)
    loud = np.maximum((squares + LOUD_STEPS * variance) / (count + LOUD_STEPS) / variance, 1.0)
    variances = variance * inflation / lengths * loud
    long_run = variance[0] * np.maximum(1.0 + 2.0 * reckoned[0] / (1.0 - decay[0]), LEAST_VARIANCE)
    usual, tolerated, unknown = _usual_excess(middle + mean[0], np.minimum(long_run / steps, variances[0, 0]))
    base = np.maximum(usual, 0.0)

    r2 = np.maximum(first, 0.0) ** 2
    skewness = cubes / total / variance**1.5
    doubt = np.sqrt(6.0 / independent)
    skewness = np.where(skewness > 0, np.maximum(skewness - doubt, 0.0), np.minimum(skewness + doubt, 0.0))
    lean = skewness * np.sqrt(inflation / lengths)
    freedom = np.maximum(independent * (1.0 - r2) / (1.0 + r2), 1.0)
    heights = student(z, freedom) + lean * (z * z - 1.0) / 6.0
    # A healthy rank stays below both: the usual and what is not known of it, and what is tolerated at most.
    surely = heights * np.sqrt(variances + unknown)
    bars = lengths * np.minimum(surely, tolerated - base + heights * np.sqrt(variances))

    # Of two windows side by side the means share what lasts longer than both; here the last cut counts.
    lengths, decay = lengths[:, 0], decay[-1]
    shared = variance[-1] * positive[0, -1] * ((1.0 - decay**lengths) / ((1.0 - decay) * lengths)) ** 2 * loud[-1]
    apart = np.maximum(2.0 * (variances[:, -1] - shared), LEAST_VARIANCE * variance[-1] / lengths * loud[-1])
    jumps = lengths * student(z, np.maximum(independent / 2.0, 1.0)) * np.sqrt(apart)
    return Noise(usual, base, np.repeat(limits, ranks, axis=2), bars[:, :-1], jumps, inflation[:, -1])


def _sum_of_lags(decay: Floats, windows: Floats) -> Floats:
    """Return the sum of (1 - k/w) decay^(k-1) over the lags k of a window of w steps."""
    rest = 1.0 - decay
    total: Floats = (windows * rest - (1.0 - decay**windows)) / rest**2 / windows
    return total


def _usual_excess(level: Floats, error2: Floats) -> tuple[Floats, Floats, Floats]:
    """Return the usual excess, what is tolerated for good, and the variance of what is not known of the usual.

    The mean so far is drawn towards zero as far as it is uncertain compared with how far ranks lie apart at all
    (empirical Bayes).

    Args:
        level: Mean excess of each rank, [streams, ranks].
        error2: Its variance, [streams, ranks].
    """
    ranks = level.shape[1]
    spread2 = np.full((len(level), 1), SPREAD**2 * (2.0 if ranks == 2 else 1.0))
    tolerated = np.full_like(spread2, TOLERATED)
    if ranks >= FEWEST_TO_POOL:
        measured = deviation(level.T)[:, None] ** 2
        spread2 = np.maximum(measured - np.median(error2, axis=1, keepdims=True), SMALLEST_SPREAD**2)
        tolerated = np.minimum(3.0 * np.sqrt(spread2) + SMALLEST_SPREAD, TOLERATED)
    trust = spread2 / (spread2 + error2)
    return np.minimum(trust * level, tolerated), tolerated, trust * error2
