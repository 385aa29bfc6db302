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
        limits: The cuts, [cuts, streams, 1].
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
    independent = max(1.0, ranks - 1.0)  # two ranks mirror each other
    known = ~np.isnan(excess)
    count = known.sum(axis=0)  # [streams, ranks]
    steps = np.maximum(count.max(axis=1, keepdims=True), 1.0)  # [streams, 1]
    total = np.maximum(count.sum(axis=1, keepdims=True), 1.0)
    middle = known_or_0(median(excess))
    away = excess - middle
    scale = known_or_0(deviation(np.moveaxis(away, 2, 1).reshape(-1, excess.shape[1])))[:, None]
    scale = np.maximum(scale, SMALLEST_SCALE)
    limits = np.array([cut * scale for cut in CUTS])
    limits[-1] = np.maximum(limits[-1], WIDEST_CUT)
    lengths = windows.reshape(-1, 1, 1).astype(float)

    bars = np.empty((len(windows), len(CUTS) - 1, *middle.shape))
    for index, limit in enumerate(limits):
        residual = np.minimum(np.maximum(away, -limit), limit)
        mean = known_or_0(residual).sum(axis=0) / np.maximum(count, 1)
        residual = known_or_0(residual - mean)
        squares = (residual**2).sum(axis=0)
        variance = np.maximum(squares.sum(1, keepdims=True) / np.maximum(total - ranks, 1.0), LEAST_VARIANCE * scale**2)

        # How successive steps correlate; an estimate around its own mean is too low by (1 + 3r)/N (Kendall 1954).
        lags = [(residual[lag:] * residual[:-lag]).sum(axis=(0, 2))[:, None] / (total * variance) for lag in (1, 2, 3)]
        bias = (1.0 + 3.0 * np.maximum(lags[0], 0.0)) / steps
        first = np.clip(lags[0] + bias, -MOST_CORRELATED, MOST_CORRELATED)
        positive = [np.maximum(lag + bias, 0.0) for lag in lags]
        error = np.sqrt((1.0 - first**2) / (steps * independent))
        # Steps that take turns make means steadier; that is only half believed.
        reckoned = np.minimum(np.where(first > 0, first, first / 2) + SURE * error, MOST_CORRELATED)
        near = positive[0] + positive[1]
        weight = steps * independent * near**2
        further = (positive[1] + positive[2]) / np.where(near > 0, near, 1.0)
        decay = (weight * further + DOUBT * np.maximum(reckoned, 0.0)) / (weight + DOUBT)
        decay = np.clip(decay, 0.0, MOST_CORRELATED)

        # Variances of the mean of each window, and of all steps, which is how well the usual is known.
        inflation = 1.0 + 2.0 * reckoned * _sum_of_lags(decay, lengths)  # [windows, streams, 1]
        inflation = np.maximum(inflation, LEAST_VARIANCE)
        loud = np.maximum((squares + LOUD_STEPS * variance) / (count + LOUD_STEPS) / variance, 1.0)
        variances = variance * inflation / lengths * loud
        if index == 0:
            long_run = variance * np.maximum(1.0 + 2.0 * reckoned / (1.0 - decay), LEAST_VARIANCE)
            usual, tolerated, unknown = _usual_excess(middle + mean, np.minimum(long_run / steps, variances[0]))
            base = np.maximum(usual, 0.0)
        if index < len(CUTS) - 1:
            r2 = np.maximum(first, 0.0) ** 2
            skewness = (residual**3).sum(axis=(0, 2))[:, None] / total / variance**1.5
            doubt = np.sqrt(6.0 / (steps * independent))
            skewness = np.where(skewness > 0, np.maximum(skewness - doubt, 0.0), np.minimum(skewness + doubt, 0.0))
            lean = skewness * np.sqrt(inflation / lengths)
            freedom = np.maximum(steps * independent * (1.0 - r2) / (1.0 + r2), 1.0)
            heights = student(z, freedom) + lean * (z * z - 1.0) / 6.0
            # A healthy rank stays below both: the usual and what is not known of it, and what is tolerated at most.
            surely = heights * np.sqrt(variances + unknown)
            bars[:, index] = lengths * np.minimum(surely, tolerated - base + heights * np.sqrt(variances))
        else:
            # Of two windows side by side the means share what lasts longer than both.
            powers = 1.0 - decay**lengths
            shared = variance * positive[0] * (powers / ((1.0 - decay) * lengths)) ** 2 * loud
            apart = np.maximum(2.0 * (variances - shared), LEAST_VARIANCE * variance / lengths * loud)
            jumps = lengths * student(z, np.maximum(steps * independent / 2.0, 1.0)) * np.sqrt(apart)
    return Noise(usual, base, limits, bars, jumps, inflation)


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
