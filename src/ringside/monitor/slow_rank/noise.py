"""How noisy a job is, learnt while it runs: what each rank usually exceeds the others by, and how widely it varies.

The scale is pooled over ranks, so that one culprit teaches it little and few steps suffice; a rank noisier than the
others is given its own in time. How far the mean of a window wanders by chance is learnt as well, one way for few ranks
and one for many: it decides whether a mean is news. The mean of 24 independent steps varies by a fifth of what a single
step does; with an autocorrelation of 0.9 it varies almost as much.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.stats import Floats, known_or_0

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
        steps: How many steps it rests on, [jobs, 1].
        clip: How far from the usual a single step may count, [jobs, 1].
        wander: How far means of windows wander.
    """

    def __init__(self, shape: tuple[int, int], windows: tuple[int, ...], scales: tuple[int, ...]) -> None:
        jobs, self.ranks = shape
        self.level = np.zeros(shape)
        self._windows = np.array(windows, dtype=float).reshape(-1, 1, 1)
        self.wander: AllanVariance | AR1Variance = (
            AllanVariance(shape, scales, scales.index(windows[0]))
            if self.ranks >= MANY
            else AR1Variance(shape, windows)
        )
        self._seen = np.zeros(shape)
        self._squares = np.full(shape, PRIOR_VARIANCE)  # running mean of residual² per rank
        self.steps = np.zeros((jobs, 1))
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
        self.steps = np.minimum(self.steps + step, MEMORY_STEPS)
        gain = step / (self.steps + PRIOR_STEPS)
        self._pooled = self._pooled + gain * ((share * residual**2).sum(1, keepdims=True) - self._pooled)
        powers = (share * residual ** np.array([2, 3, 4]).reshape(-1, 1, 1)).sum(2, keepdims=True)
        self._moments = self._moments + step / np.maximum(self.steps, 1.0) * (powers - self._moments)
        core = (share * np.minimum(residual**2, CORE**2 * self._core)).sum(1, keepdims=True) / CORE_SHARE
        self._fit_clip(self._core + gain * (core - self._core))

    def _fit_clip(self, core: Floats) -> None:
        self._core = np.maximum(core, 1e-8)
        self.clip = np.maximum(WIDEST_CLIP * np.sqrt(self._core), SMALLEST_CLIP)

    def variances(self) -> Floats:
        """Return the variance of the mean of each window, [windows, jobs, ranks]."""
        return self.wander.variances() * self._loudness()

    def stretch(self, z: float) -> Floats:
        """Return how many standard deviations to add to `z` where noise is not normal, [windows, jobs, 1].

        The terms of Cornish and Fisher (1938) for noise that leans to the late side or has wide tails, whichever is
        greater; both fade as in a sum of independent steps, which late ones are by and large.
        """
        squares, cubes, fourths = np.maximum(self._moments, [[[1e-8]], [[0.0]], [[0.0]]])
        # The errors of both are those of normal noise.
        known = np.maximum(self.steps * max(1.0, self.ranks - 1.0), 1.0)
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
        return 1.4826 * np.median(np.abs(self.level), axis=1, keepdims=True)

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


# -------------------------------------------------------------------------------------------------
# How far the mean of a window wanders by chance.

MEMORY_STEPS = 4_000.0
MEMORY_WINDOWS = 16_000.0
MOST_CORRELATED = 0.98
SURE = 2.5
"""Standard errors between the estimated autocorrelation and the one that is reckoned with."""

DOUBT = 10.0
"""What `decay` doubts; with less the first steps of a slow rank pass for slow noise, with more that is overlooked."""

FEWEST_STEPS = 4
"""Before so many steps nothing is known of how few ranks wander."""

BEYOND = 1.3
"""Window means that vary so much more than an autoregression's are believed, and weigh as few windows do."""


class WindowStep(NamedTuple):
    """What there is to learn from one step.

    Args:
        residual: Clipped excess minus the usual of each rank, [jobs, ranks].
        core: The same, cut so short that single late steps hardly count.
        weight: How much to learn from each rank, 0 or 1, [jobs, ranks].
        wandered: For few ranks the mean excess of the windows that end with this step minus the usual, [windows, jobs,
            ranks]; for many that of the scales minus that of the window right before, [scales, jobs, ranks]; NaN
            where they reach into the warm-up or an episode.
    """

    residual: Floats
    core: Floats
    weight: Floats
    wandered: Floats


class AR1Variance:
    """A first-order autoregression with a cautious coefficient, and whatever window means showed beyond it.

    With few ranks there are few windows to measure; a coefficient can be told from far fewer steps.

    Args:
        shape: `(jobs, ranks)`.
        windows: Lengths of the windows in steps.
    """

    def __init__(self, shape: tuple[int, int], windows: tuple[int, ...]) -> None:
        jobs, ranks = shape
        self._windows = np.array(windows, dtype=float).reshape(-1, 1, 1)
        self._independent = max(1.0, ranks - 1.0)
        self._steps = np.zeros((jobs, 1))
        self._square, self._core = np.zeros((2, jobs, 1))
        self._lagged = np.zeros((2, jobs, 1))  # mean products of steps one and two apart
        self._previous = np.zeros((2, *shape))  # cores of the last two steps, the newest first
        self._means, self._means_seen = np.zeros((2, len(windows), jobs, 1))

    def learn(self, step: WindowStep) -> None:
        """Take in one step."""
        share, whole = shares(step.weight)
        self._steps = np.minimum(self._steps + whole, MEMORY_STEPS)
        gain = whole / np.maximum(self._steps, 1.0)
        self._square += gain * ((share * step.residual**2).sum(1, keepdims=True) - self._square)
        self._core += gain * ((share * step.core**2).sum(1, keepdims=True) - self._core)
        self._lagged += gain * ((share * step.core * self._previous).sum(2, keepdims=True) - self._lagged)
        self._previous = np.array([step.core, self._previous[0]])
        average(self._means, self._means_seen, step.wandered, step.weight)

    def variances(self) -> Floats:
        """Return the variance of the mean of each window, [windows, jobs, 1]; infinite before anything is known."""
        return np.maximum(self._assumed(), self._means)

    def freedom(self) -> Floats:
        """Return how many independent observations each of them rests on, [windows, jobs, 1]."""
        r2 = self._coefficients(1.0)[1] ** 2
        known = self._steps * self._independent * (1.0 - r2) / (1.0 + r2)
        measured = self._means_seen * self._independent / self._windows
        return np.maximum(np.where(self._means > BEYOND * self._assumed(), np.minimum(measured, known), known), 1.0)

    def long_run(self) -> Floats:
        """Return the variance of a mean of many steps, times their number, [jobs, 1]."""
        variance = self._square * long_run(*self._coefficients(SURE))
        return np.where(self._steps >= FEWEST_STEPS, variance, np.inf)

    def _assumed(self) -> Floats:
        # The level was found from the same steps and follows them: what correlated steps have in common is missing.
        missing = np.minimum(long_run(*self._coefficients(1.0)) / np.maximum(self._steps, 1.0), 0.75)
        first, later = self._coefficients(SURE)
        share = mixed_variance(self._windows, first[None], later[None])
        return np.where(self._steps >= FEWEST_STEPS, self._square / (1.0 - missing) * share, np.inf)

    def _coefficients(self, sure: float) -> tuple[Floats, Floats]:
        """The autocorrelation of successive steps, `sure` standard errors above the estimate, and its decay, [jobs, 1].

        An estimate from N steps around their own mean is too low by about (1 + 3r)/N (Kendall 1954).
        """
        steps = np.maximum(self._steps, 1.0)
        r = np.clip(self._lagged / np.maximum(self._core, 1e-8), 0.0, MOST_CORRELATED)
        r = r + (1.0 + 3.0 * r) / steps
        error = np.sqrt(np.maximum(1.0 - r * r, 0.05) / (steps * self._independent))
        first, second = np.minimum(r + sure * error, MOST_CORRELATED)
        return first, decay(first, second, self._steps * self._independent)


class AllanVariance:
    """Variances of the differences of neighbouring windows, scale by scale, added up (Allan 1966; Haar wavelets).

    With V(w) the variance of the mean of w steps and Q(w) half the mean square of the difference of two such means side
    by side, V(w) = V(2w) + Q(w)/2 for any stationary noise, and V vanishes for long windows. Differences do not
    know the ranks' levels, so nothing is biased however young the job is; ranks enough make up for steps.

    Args:
        shape: `(jobs, ranks)`.
        scales: Lengths of the windows whose differences are learnt, in steps, each twice the one before.
        skip: How many of the first scales are no windows to be judged.
    """

    def __init__(self, shape: tuple[int, int], scales: tuple[int, ...], skip: int) -> None:
        jobs, ranks = shape
        self._scales = np.array(scales, dtype=float).reshape(-1, 1, 1)
        self._skip = skip
        self._tails = [_tail(scale) for scale in scales[1:]]
        self._independent = min(ranks - 1.0, 200.0)
        self._squares, self._seen = np.zeros((2, len(scales), jobs, 1))

    def learn(self, step: WindowStep) -> None:
        """Take in one step."""
        average(self._squares, self._seen, step.wandered, step.weight)

    def variances(self) -> Floats:
        """Return the variance of the mean of each window, [windows, jobs, 1]; infinite before anything is known."""
        return np.cumsum(self._pieces()[::-1], axis=0)[::-1][self._skip :]

    def freedom(self) -> Floats:
        """Return how many independent observations each of them rests on, [windows, jobs, 1] (Satterthwaite 1946)."""
        pieces = self._pieces()
        known = np.maximum(self._seen * self._independent / self._scales, 1.0)
        longest = np.where(self._known(), known, np.inf).min(axis=0, keepdims=True)
        known = np.concatenate([known, longest / 2.0])
        with np.errstate(invalid="ignore"):
            total, parts = (np.cumsum(values[::-1], axis=0)[::-1] for values in (pieces, pieces**2 / known))
            freedom = np.where(np.isfinite(total), total**2 / np.maximum(parts, 1e-30), 1.0)
        return np.maximum(freedom, 1.0)[self._skip :]

    def long_run(self) -> Floats:
        """Return the variance of a mean of many steps, times their number, [jobs, 1]."""
        counts = np.where(self._known(), 2.0 * self._scales, 1.0).max(axis=0)
        variance: Floats = self._pieces()[-1] * counts
        return variance

    def _pieces(self) -> Floats:
        """Return Q(w)/2 by scale, 0 where not known, and last V of twice the longest known, [scales + 1, jobs, 1].

        Beyond it the noise is taken for a first-order autoregression: how Q changed from one scale to the next tells
        its coefficient.
        """
        known = self._known()
        pieces = np.where(known, 0.25 * self._squares, 0.0)
        margin = 1.0 + np.sqrt(2.0 * self._scales / np.maximum(self._seen * self._independent, 1.0))
        tail = np.full_like(pieces[:1], np.inf)
        for index in range(1, len(pieces)):
            ratio = margin[index] * pieces[index] / np.maximum(pieces[index - 1], 1e-12)
            beyond = pieces[index] * np.interp(ratio, *self._tails[index - 1])
            tail = np.where(known[index], beyond, tail)
        return np.concatenate([pieces, tail])

    def _known(self) -> NDArray[np.bool_]:
        return self._seen >= 0.5 * self._scales


def mean_variance(windows: Floats, r: Floats) -> Floats:
    """Return the variance of the mean of a window over that of one step, for a first-order autoregression.

    Args:
        windows: Lengths in steps, [windows, 1, 1].
        r: Its coefficient, 0 to below 1, [1, jobs, 1].
    """
    return (long_run(r, r) - 2.0 * r * (1.0 - r**windows) / (windows * (1.0 - r) ** 2)) / windows


def average(squares: Floats, seen: Floats, values: Floats, weight: Floats) -> None:
    """Bring running means of squares, and how many steps they hold, up to date in place; NaN counts for nothing."""
    there = np.isfinite(values)
    share, whole = shares(there * weight)
    np.minimum(seen + whole, MEMORY_WINDOWS, out=seen)
    newest = (share * np.where(there, values, 0.0) ** 2).sum(2, keepdims=True)
    squares += whole / np.maximum(seen, 1.0) * (newest - squares)


def shares(weight: Floats) -> tuple[Floats, Floats]:
    """Return each rank's share of the weight, and how much of a whole step it is, over the last axis."""
    total = weight.sum(axis=-1, keepdims=True)
    return weight / np.maximum(total, 1e-9), total / weight.shape[-1]


def mixed_variance(windows: Floats, first: Floats, later: Floats) -> Floats:
    """Return the variance of the mean of a window over that of one step, autocorrelations being first · later^(k-1).

    That is slow noise under fast noise (an ARMA(1, 1) process; Box and Jenkins 1970).

    Args:
        windows: Lengths in steps.
        first: Autocorrelation of successive steps.
        later: By how much it shrinks from each lag to the next, at least `first`.
    """
    shrinks = np.maximum(later, 1e-3)
    return (1.0 + first / shrinks * (windows * mean_variance(windows, shrinks) - 1.0)) / windows


def decay(first: Floats, second: Floats, steps: Floats, doubt: float = DOUBT) -> Floats:
    """Return by how much autocorrelations shrink from lag to lag, never less than a plain autoregression's.

    Their ratio, drawn towards the first where that is too small to tell.

    Args:
        first, second: Autocorrelations of steps one and two apart.
        steps: How many steps they rest on.
        doubt: Steps' worth of evidence against a second that is greater than the first one squared.
    """
    against = doubt / np.maximum(steps, 1.0)
    ratio = (first * second + against * first) / (first * first + against)
    return np.maximum(np.clip(ratio, 0.0, MOST_CORRELATED), first)


def independent_share(first: Floats, later: Floats) -> Floats:
    """Return how many independent steps one correlated step is worth where a variance is estimated (Bartlett 1946).

    That is 1 / (1 + 2 Σ r²) over all autocorrelations r: `first`, and then shrinking by `later` from lag to lag.
    """
    return 1.0 / (1.0 + 2.0 * first**2 / (1.0 - later**2))


def long_run(first: Floats, later: Floats) -> Floats:
    """The variance of a mean of many steps, times their number, over that of one step."""
    return 1.0 + 2.0 * first / (1.0 - later)


def _tail(scale: int) -> tuple[Floats, Floats]:
    """Return, by coefficient of an autoregression, Q(w) over Q(w/2), ascending, and V(2w) over Q(w)/2; w = scale."""
    r = 1.0 - np.geomspace(1.0, 0.004, 60)
    half, one, two = (mean_variance(np.float64(length), r) for length in (scale / 2, scale, 2 * scale))
    return 2.0 * (one - two) / (2.0 * (half - one)), two / (one - two)


# -------------------------------------------------------------------------------------------------
# Autocorrelation of the core of the noise, which few late steps do not spoil.

CORE_SURE = 1.0
"""Standard errors between the estimated autocorrelation of the core and the one that is reckoned with."""

CORE_MOST_CORRELATED = 0.97
CUT = 2.5
"""Standard deviations of the core beyond which a step counts for no more when autocorrelation is estimated."""


def autocorrelation(residuals: Floats, scale: Floats) -> Floats:
    """Return the coefficient of the autoregression whose means of many steps vary as these do, a standard error high.

    For noise that forgets at one pace this is the autocorrelation of successive steps. Where fast noise hides slow
    noise it would say too little, and that of steps two apart tells (`decay`). Late steps are cut short.

    Args:
        residuals: Steps minus their median, [steps, ...]; NaN where missing.
        scale: Standard deviations of their core, [...].
    """
    limit = CUT * np.maximum(scale, 1e-6)
    core = known_or_0(np.minimum(np.maximum(residuals, -limit), limit))
    known = np.maximum(np.sum(~np.isnan(residuals), axis=0), 1)
    first, second = (raised_autocorrelation(core, lag, known, CORE_SURE) for lag in (1, 2))
    variance = long_run(first, decay(first, second, known))
    return np.minimum((variance - 1.0) / (variance + 1.0), CORE_MOST_CORRELATED)


def raised_autocorrelation(core: Floats, lag: int, known: NDArray[np.intp], sure: float) -> Floats:
    """Return the autocorrelation of steps `lag` apart, so many standard errors high.

    Args:
        core: What is left of each step without its level, [steps, ...]; 0 where missing.
        lag: Steps apart.
        known: How many steps are there, [...].
        sure: Standard errors that are added.
    """
    r = (core[lag:] * core[:-lag]).sum(axis=0) / np.maximum((core * core).sum(axis=0), 1e-12)
    raised = r + (1.0 + 3.0 * np.maximum(r, 0.0)) / known + sure / np.sqrt(known)
    high: Floats = np.clip(raised, 0.0, CORE_MOST_CORRELATED)
    return high
