"""How far the mean of a window wanders by chance, learnt from the job itself: one way for few ranks, one for many.

It is what decides whether a mean is news. The mean of 24 independent steps varies by a fifth of what a single step
does; with an autocorrelation of 0.9 it varies almost as much.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.stats import Floats

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


class WindowVariance(Protocol):
    """Variances of window means of pooled noise, for `[jobs]` side by side."""

    def learn(self, step: WindowStep) -> None:
        """Take in one step."""

    def variances(self) -> Floats:
        """Return the variance of the mean of each window, [windows, jobs, 1]."""

    def freedom(self) -> Floats:
        """Return how many independent observations each of them rests on, [windows, jobs, 1]."""

    def long_run(self) -> Floats:
        """Return the variance of a mean of many steps, times their number, [jobs, 1]."""


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
        self._square, self._core, self._lagged, self._lagged_twice = np.zeros((4, jobs, 1))
        self._previous, self._before_that = np.zeros((2, *shape))
        self._means = np.zeros((len(windows), jobs, 1))
        self._means_seen = np.zeros((len(windows), jobs, 1))

    def learn(self, step: WindowStep) -> None:
        """Take in one step."""
        share, whole = shares(step.weight)
        self._steps = np.minimum(self._steps + whole, MEMORY_STEPS)
        gain = whole / np.maximum(self._steps, 1.0)
        self._square += gain * ((share * step.residual**2).sum(1, keepdims=True) - self._square)
        self._core += gain * ((share * step.core**2).sum(1, keepdims=True) - self._core)
        self._lagged += gain * ((share * step.core * self._previous).sum(1, keepdims=True) - self._lagged)
        self._lagged_twice += gain * (
            (share * step.core * self._before_that).sum(1, keepdims=True) - self._lagged_twice
        )
        self._previous, self._before_that = step.core, self._previous
        average(self._means, self._means_seen, step.wandered, step.weight)

    def variances(self) -> Floats:
        """Return the variance of the mean of each window, [windows, jobs, 1]; infinite before anything is known."""
        measured: Floats = np.maximum(self._assumed(), self._means)
        return measured

    def freedom(self) -> Floats:
        """Return how many independent observations each of them rests on, [windows, jobs, 1]."""
        r2 = self._coefficients(1.0)[1] ** 2
        known = self._steps * self._independent * (1.0 - r2) / (1.0 + r2)
        measured = self._means_seen * self._independent / self._windows
        return np.maximum(np.where(self._means > BEYOND * self._assumed(), np.minimum(measured, known), known), 1.0)

    def long_run(self) -> Floats:
        """Return the variance of a mean of many steps, times their number, [jobs, 1]."""
        variance = self._square * long_run(*self._coefficients(SURE))
        known: Floats = np.where(self._steps >= FEWEST_STEPS, variance, np.inf)
        return known

    def _assumed(self) -> Floats:
        # The level was found from the same steps and follows them: what correlated steps have in common is missing.
        missing = np.minimum(long_run(*self._coefficients(1.0)) / np.maximum(self._steps, 1.0), 0.75)
        first, later = self._coefficients(SURE)
        share = mixed_variance(self._windows, first[None], later[None])
        known: Floats = np.where(self._steps >= FEWEST_STEPS, self._square / (1.0 - missing) * share, np.inf)
        return known

    def _coefficients(self, sure: float) -> tuple[Floats, Floats]:
        """The autocorrelation of successive steps, `sure` standard errors above the estimate, and its decay, [jobs, 1].

        An estimate from N steps around their own mean is too low by about (1 + 3r)/N (Kendall 1954).
        """
        first, second = (self._raised(lagged, sure) for lagged in (self._lagged, self._lagged_twice))
        return first, decay(first, second, self._steps * self._independent)

    def _raised(self, lagged: Floats, sure: float) -> Floats:
        steps = np.maximum(self._steps, 1.0)
        r = np.clip(lagged / np.maximum(self._core, 1e-8), 0.0, MOST_CORRELATED)
        r = r + (1.0 + 3.0 * r) / steps
        error = np.sqrt(np.maximum(1.0 - r * r, 0.05) / (steps * self._independent))
        raised: Floats = np.minimum(r + sure * error, MOST_CORRELATED)
        return raised


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
        self._squares = np.zeros((len(scales), jobs, 1))
        self._seen = np.zeros((len(scales), jobs, 1))

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
        known: NDArray[np.bool_] = self._seen >= 0.5 * self._scales
        return known


def mean_variance(windows: Floats, r: Floats) -> Floats:
    """Return the variance of the mean of a window over that of one step, for a first-order autoregression.

    Args:
        windows: Lengths in steps, [windows, 1, 1].
        r: Its coefficient, 0 to below 1, [1, jobs, 1].
    """
    share: Floats = (long_run(r, r) - 2.0 * r * (1.0 - r**windows) / (windows * (1.0 - r) ** 2)) / windows
    return share


def average(squares: Floats, seen: Floats, values: Floats, weight: Floats) -> None:
    """Bring running means of squares, and how many steps they hold, up to date in place; NaN counts for nothing."""
    there = np.isfinite(values)
    share, whole = shares(there * weight)
    np.minimum(seen + whole, MEMORY_WINDOWS, out=seen)
    squares += (
        whole / np.maximum(seen, 1.0) * ((share * np.where(there, values, 0.0) ** 2).sum(2, keepdims=True) - squares)
    )


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
    share: Floats = (1.0 + first / shrinks * (windows * mean_variance(windows, shrinks) - 1.0)) / windows
    return share


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
    slowest: Floats = np.maximum(np.clip(ratio, 0.0, MOST_CORRELATED), first)
    return slowest


def independent_share(first: Floats, later: Floats) -> Floats:
    """Return how many independent steps one correlated step is worth where a variance is estimated (Bartlett 1946).

    That is 1 / (1 + 2 Σ r²) over all autocorrelations r: `first`, and then shrinking by `later` from lag to lag.
    """
    share: Floats = 1.0 / (1.0 + 2.0 * first**2 / (1.0 - later**2))
    return share


def long_run(first: Floats, later: Floats) -> Floats:
    """The variance of a mean of many steps, times their number, over that of one step."""
    ratio: Floats = 1.0 + 2.0 * first / (1.0 - later)
    return ratio


def _tail(scale: int) -> tuple[Floats, Floats]:
    """Return, by coefficient of an autoregression, Q(w) over Q(w/2), ascending, and V(2w) over Q(w)/2; w = scale."""
    r = 1.0 - np.geomspace(1.0, 0.004, 60)
    half, one, two = (mean_variance(np.float64(length), r) for length in (scale / 2, scale, 2 * scale))
    return 2.0 * (one - two) / (2.0 * (half - one)), two / (one - two)
