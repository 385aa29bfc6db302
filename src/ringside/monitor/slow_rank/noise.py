"""How noisy a job is, learnt while it runs: what each rank usually exceeds the others by, and how widely it varies.

The scale is pooled over ranks, so that one culprit teaches it little and few steps suffice; a rank noisier than the
others is given its own in time.
"""

from __future__ import annotations

import math

import numpy as np

from ringside.monitor.slow_rank.window_variance import (
    MEMORY_STEPS,
    AllanVariance,
    AR1Variance,
    WindowStep,
    WindowVariance,
    shares,
)
from ringside.monitor.stats import Floats

PRIOR_VARIANCE = 0.03**2
PRIOR_STEPS = 4.0
RANK_PRIOR_STEPS = 60.0
SMALLEST_CLIP, WIDEST_CLIP = 0.16, 4.0
"""No step counts for more than this beyond what is usual: so much, or so many standard deviations of the core."""

CORE, CORE_SHARE = 1.5, 0.7786
"""The core of the noise is what is left when residuals are cut at 1.5 of its own standard deviations; of the square of
a normal variable that leaves so much."""

WIDEST_TAILS = 0.3
"""The excess kurtosis of window means that is reckoned with at most; the series holds for little more."""

MANY = 32
"""From so many ranks on windows enough are seen to measure how their means wander."""

FEWEST_TO_POOL = 8
"""From so many ranks on, how far healthy ranks lie apart is read across the ranks."""

RANKS_SPREAD, SMALLEST_SPREAD = 0.02, 0.01
"""Standard deviation of healthy ranks' usual excess: assumed for few ranks (±3%), and at least, where measured."""


class Noise:
    """Running estimates over `[jobs, ranks]` of log excess; memory does not grow with steps.

    Args:
        shape: `(jobs, ranks)`. Jobs are independent; one is the normal case, benchmarks run many side by side.
        windows: Lengths in steps of the windows whose means are judged.
        scales: Lengths of the windows whose differences are learnt; the last of them are the first of `windows`.

    Attributes:
        level: Mean excess of each rank so far, [jobs, ranks].
        clip: How far from the usual a single step may count, [jobs, 1].
        wander: How far means of windows wander.
    """

    def __init__(self, shape: tuple[int, int], windows: tuple[int, ...], scales: tuple[int, ...]) -> None:
        jobs, self.ranks = shape
        self.level = np.zeros(shape)
        self._windows = np.array(windows, dtype=float).reshape(-1, 1, 1)
        self.wander: WindowVariance = (
            AllanVariance(shape, scales, scales.index(windows[0]))
            if self.ranks >= MANY
            else AR1Variance(shape, windows)
        )
        self._seen = np.zeros(shape)
        self._squares = np.full(shape, PRIOR_VARIANCE)  # running mean of residual² per rank
        self._steps = np.zeros((jobs, 1))
        self._pooled = np.full((jobs, 1), PRIOR_VARIANCE)
        self._moments = np.zeros((3, jobs, 1))  # running means of residual², residual³ and residual⁴
        self._fit_clip(self._pooled)

    def begin(self, rows: Floats) -> None:
        """Take a first level and scale from a few steps, [steps, jobs, ranks]: medians, which no late step spoils."""
        middle = _middle(rows)
        scale = 1.6 * np.nan_to_num(_middle(np.moveaxis(np.abs(rows - middle), 2, 0).reshape(-1, len(self.level))))
        self.level = np.nan_to_num(middle)
        self._pooled = np.maximum(scale[:, None] ** 2, PRIOR_VARIANCE)
        self._squares = np.broadcast_to(self._pooled, self._squares.shape).copy()
        self._fit_clip(self._pooled)

    def learn(self, excess: Floats, weight: Floats, wandered: Floats) -> None:
        """Take in one step.

        Args:
            excess: Log excess, [jobs, ranks]; NaN where missing.
            weight: How much to learn from each, 0 or 1, [jobs, ranks].
            wandered: For few ranks the mean excess of the windows that end with this step, [windows, jobs, ranks]; for
                many those of the scales minus the ones of the windows right before, [scales, jobs, ranks]; NaN where
                there are none.
        """
        weight = np.where(np.isnan(excess), 0.0, weight)
        away = np.where(weight > 0.0, excess - self.level, 0.0)
        away = np.minimum(np.maximum(away, -self.clip), self.clip)
        residual = away * np.sqrt(self._seen / (self._seen + 1.0))  # as wide as the noise, however young the level
        self._learn_spread(residual, weight)
        cut = CORE * np.sqrt(self._core)
        core = np.minimum(np.maximum(residual, -cut), cut)
        level = 0.0 if self.ranks >= MANY else self.level
        self.wander.learn(WindowStep(residual, core, weight, wandered - level))
        self._seen = np.minimum(self._seen + weight, MEMORY_STEPS)
        self.level = self.level + weight / np.maximum(self._seen, 1.0) * away
        self._squares = self._squares + weight * (residual**2 - self._squares) / (self._seen + PRIOR_STEPS)

    def _learn_spread(self, residual: Floats, weight: Floats) -> None:
        share, step = shares(weight)
        self._steps = np.minimum(self._steps + step, MEMORY_STEPS)
        gain = step / (self._steps + PRIOR_STEPS)
        self._pooled = self._pooled + gain * ((share * residual**2).sum(1, keepdims=True) - self._pooled)
        powers = (share * residual ** np.array([2, 3, 4]).reshape(-1, 1, 1)).sum(2, keepdims=True)
        self._moments = self._moments + step / np.maximum(self._steps, 1.0) * (powers - self._moments)
        core = (share * np.minimum(residual**2, CORE**2 * self._core)).sum(1, keepdims=True) / CORE_SHARE
        self._fit_clip(self._core + gain * (core - self._core))

    def _fit_clip(self, core: Floats) -> None:
        self._core = np.maximum(core, 1e-8)
        self.clip = np.maximum(WIDEST_CLIP * np.sqrt(self._core), SMALLEST_CLIP)

    @property
    def steps(self) -> Floats:
        """How many steps it rests on, [jobs, 1]."""
        return self._steps

    def variances(self) -> Floats:
        """Return the variance of the mean of each window, [windows, jobs, ranks]."""
        variances: Floats = self.wander.variances() * self._loudness()
        return variances

    def stretch(self, z: float) -> Floats:
        """Return how many standard deviations to add to `z` where noise is not normal, [windows, jobs, 1].

        The terms of Cornish and Fisher (1938) for noise that leans to the late side or has wide tails, whichever is
        greater; both fade as in a sum of independent steps, which late ones are by and large.
        """
        squares, cubes, fourths = np.maximum(self._moments, [[[1e-8]], [[0.0]], [[0.0]]])
        known = np.maximum(
            self._steps * max(1.0, self.ranks - 1.0), 1.0
        )  # the errors of both are those of normal noise
        lean = np.maximum(cubes / squares**1.5 - np.sqrt(6.0 / known), 0.0) / np.sqrt(self._windows)
        tails = np.clip((fourths / squares**2 - 3.0 - np.sqrt(24.0 / known)) / self._windows, 0.0, WIDEST_TAILS)
        stretched: Floats = np.maximum(lean * (z**2 - 1.0) / 6.0, tails * (z**3 - 3.0 * z) / 24.0)
        return stretched

    def baseline(self) -> tuple[Floats, Floats]:
        """Return what each rank usually exceeds the others by and the standard error of that, [jobs, ranks] each.

        The mean so far is drawn towards zero as far as it is uncertain compared with how far ranks lie apart at all.
        """
        shortest = self.wander.variances()[0]
        error2 = self._loudness() * np.minimum(self.wander.long_run() / np.maximum(self._seen, 1.0), shortest)
        spread2 = self._spread() ** 2
        if self.ranks >= FEWEST_TO_POOL:
            spread2 = np.maximum(spread2 - np.median(error2, axis=1, keepdims=True), SMALLEST_SPREAD**2)
        with np.errstate(invalid="ignore"):
            trust = spread2 / (spread2 + error2)
            return trust * self.level, np.sqrt(np.where(trust > 0.0, trust * error2, spread2))

    def tolerated(self, least: float, most: float) -> Floats:
        """Return how far a healthy rank of this job may lie above the others for good, [jobs, 1]."""
        if self.ranks < FEWEST_TO_POOL:
            return np.full_like(self._pooled, most)
        return np.minimum(np.maximum(3.0 * self._spread() + 0.01, least), most)

    def _spread(self) -> Floats:
        """How far the ranks' levels lie apart (a robust standard deviation), [jobs, 1]."""
        if self.ranks < FEWEST_TO_POOL:
            return np.full_like(self._pooled, RANKS_SPREAD * (math.sqrt(2.0) if self.ranks == 2 else 1.0))
        spread: Floats = 1.4826 * np.median(np.abs(self.level), axis=1, keepdims=True)
        return spread

    def _loudness(self) -> Floats:
        """Each rank's variance over the pooled one, never below 1, [jobs, ranks]."""
        pooled = np.maximum(self._pooled, 1e-8)
        own = (RANK_PRIOR_STEPS * pooled + self._seen * self._squares) / (RANK_PRIOR_STEPS + self._seen)
        loudness: Floats = np.maximum(own / pooled, 1.0)
        return loudness


def _middle(rows: Floats) -> Floats:
    """The median over the first axis of what is known, NaN where nothing is; that axis is left out."""
    ordered = np.sort(rows, axis=0)  # NaN last
    known = np.sum(~np.isnan(rows), axis=0, keepdims=True)
    middle: Floats = np.take_along_axis(ordered, np.maximum(known - 1, 0) // 2, axis=0)[0]
    return middle
