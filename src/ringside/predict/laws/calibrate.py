"""A curve fitted to measured rows: physics first, then what the rows show beyond it, and how sure that is.

One Gaussian model in the logarithms of size and time: the curve of `fabric.py`, linearised at its most probable figures
(prior: the fabric's law, or a vague one), plus bumps of protocol and channel switches as a Matérn process over log2 of
the size, plus noise. Near rows it interpolates, far from them it is the curve and the band widens by what the figures'
uncertainty means there (C. Rasmussen and C. Williams, "Gaussian Processes for Machine Learning", 2006, section 2.7: a
Gaussian process with explicit basis functions). Outliers are weighed down as under Student's t. The scale of bumps and
noise is learnt per table with leave-one-out residuals of the fitted rows; everything else is one constant for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringside.errors import UsageError
from ringside.predict.laws.bumps import NOISE, STEP, Beside, Floats, bumps
from ringside.predict.laws.fabric import BASE, RATE, Law, PipelineLaw, fill_growth
from ringside.predict.tables.table import bus_factor


@dataclass(frozen=True)
class Band:
    """A figure with its 95% band: a duration in seconds, or a rate.

    Args:
        value: The middle.
        low: Lower end.
        high: Upper end.
    """

    value: float
    low: float
    high: float

    @property
    def ends(self) -> tuple[float, float, float]:
        """All three."""
        return self.value, self.low, self.high

    def map(self, function: Callable[[float], float]) -> Band:
        """Return the band of what grows with this: the function of each end."""
        return Band(*map(function, self.ends))

    def falling(self, function: Callable[[float], float]) -> Band:
        """Return the band of what falls as this grows, such as a rate with a time: the ends change places."""
        return Band(function(self.value), function(self.high), function(self.low))

    def __add__(self, other: Band) -> Band:
        """Return the sum of two that are long or short together."""
        return Band(self.value + other.value, self.low + other.low, self.high + other.high)


FREEDOM = 4.0  # of Student's t: how surprising an outlier is
FAR = 16.0  # squares of standardised residuals beyond this count as this
PATIENCE = 5.0  # rows' worth of belief in BUMP and NOISE
NEAR, ALIKE = 1.0, 20.0  # doublings over which rows show how restless sizes are; rows' worth of belief in all alike
QUANTILE = 2.9  # of the standardised error for a band of 95%; see docs/design/0020-calibration.md
NOISY = 7.0  # times the variance, where ranks are processes on CPUs
# Of scales: a figure drifts by so much of a doubling's share between two tables of one scale. Chosen by hand.
LEAST_APART = 0.1
FALL = 0.25  # of log time: a row so much faster than a smaller one is of another regime; chosen by hand
GRID = np.arange(0.0, 48.0 + 1e-9, 1 / 8)  # log2 of the sizes at which times are held to rise, beside those of the rows
MOST = 400  # rows fitted; more are thinned evenly, the cost is cubic


def vague(ranks: int, *, noisy: bool = False) -> Law:
    """Return the law for ranks of which nothing is known but their number.

    Args:
        ranks: Latency grows with their logarithm, the rate falls as a ring's; 0: not even the number is known.
        noisy: They are processes of an operating system (MPI on CPUs), not GPUs.
    """
    count = max(ranks, 2)
    mean = np.log([10e-6 * (1 + np.log2(count)), 2.5, 6.5, 50e9 / bus_factor("all_reduce", count)])
    spread = np.array([2.0, 0.6, 0.5, 2.5])
    return Law(mean, spread, "nothing is known of the hardware", noise=NOISY if noisy else 1.0)


@dataclass(frozen=True)
class Prediction:
    """Times with their 95% bands.

    Args:
        sizes: Bytes, float64 [n].
        times_s: Median, seconds, float64 [n].
        low_s: Lower end of the band, float64 [n].
        high_s: Upper end, float64 [n].
        extrapolated: Whether no fitted row is within a doubling or lies on both sides, bool [n].
    """

    sizes: Floats
    times_s: Floats
    low_s: Floats
    high_s: Floats
    extrapolated: NDArray[np.bool_]

    @property
    def bands(self) -> list[Band]:
        """Each of the times with its band."""
        return [Band(*map(float, ends)) for ends in zip(self.times_s, self.low_s, self.high_s, strict=True)]

    def covers(self, times_s: ArrayLike) -> NDArray[np.bool_]:
        """Return which of the measured times lie in their band, bool [n]."""
        times = np.asarray(times_s, dtype=np.float64)
        return (times >= self.low_s) & (times <= self.high_s)


@dataclass(frozen=True, eq=False)
class Calibration:
    """A fitted curve; make one with `fit` or `expect`.

    Args:
        theta: Logarithms of the most probable figures of the law's backbone (`fabric.py`), float64 [k].
        law: What was expected before.
        x: log2 of the fitted sizes, float64 [n].
        pull: What the rows show, weighed: inverse covariance times the residuals, float64 [n].
        inverse: Inverse covariance of the rows, float64 [n, n].
        slopes: Derivatives of the curve at the rows, float64 [n, k].
        scale: Variance of bumps and noise in units of the usual.
        unrest: What rows left out are off by, squared, in units of their variance, float64 [n].
        left_out: How surprising rows left out are: twice their negative log probability.
        logs: Logarithms of the rows' times, float64 [n].
        beyond: What holds for sizes beyond the rows, where it is not this: without the named switches, as a jump among
            the rows says little of larger sizes.
        alone: The same without what other tables have beside their curves, where the law has such: either counts for as
            much as it tells of rows left out around a size.
    """

    theta: Floats
    law: Law
    x: Floats
    pull: Floats
    inverse: Floats
    slopes: Floats
    scale: float = 1.0
    unrest: Floats | None = None
    left_out: float = 0.0
    logs: Floats = field(default_factory=lambda: np.zeros(0))
    beyond: Calibration | None = None
    alone: Calibration | None = None

    @property
    def rest(self) -> Floats:
        """Return what the rows have beside the curve, of log time, float64 [n]."""
        covariance = np.linalg.inv(self.inverse) - self.slopes @ np.diag(self.law.spread**2) @ self.slopes.T
        left: Floats = covariance @ self.pull + _beside(self.law, self.x, self.scale)[0]
        return left

    @property
    def posterior(self) -> Floats:
        """Return the covariance of the figures given the rows, float64 [k, k]."""
        prior = np.diag(self.law.spread**2)
        toward = prior @ self.slopes.T
        covariance: Floats = prior - toward @ self.inverse @ toward.T
        return covariance

    def predict(self, sizes: ArrayLike) -> Prediction:
        """Return times and bands for sizes in bytes, more than 0."""
        sizes = np.asarray(sizes, dtype=np.float64)
        if sizes.size == 0 or not np.all(np.isfinite(sizes) & (sizes > 0)):
            raise UsageError("sizes are finite numbers of bytes, more than 0, and at least one")
        x = np.log2(sizes)
        mean, spread = self._expected(x)
        first, last = self.x.min(initial=np.inf), self.x.max(initial=-np.inf)
        far = (x < first - 1e-9) | (x > last + 1e-9)
        low, high = mean - spread, mean + spread
        mean = self._rising(x, mean)
        for a, b in self.falls():  # between two such rows it may still be the one regime or already the other
            between = (x > a) & (x < b)
            before, behind = (float(self.logs[self.x == end].mean()) for end in (a, b))
            mean[between] = np.minimum(mean[between], behind)
            high[between] = np.maximum(high[between], before + (x[between] - a) * np.log(2.0))
        low, high = np.minimum(low, mean - 0.5 * spread), np.maximum(high, mean + 0.5 * spread)
        return Prediction(sizes, np.exp(mean), np.exp(low), np.exp(high), far)

    def _expected(self, x: Floats) -> tuple[Floats, Floats]:
        """Return log times at sizes, from log2, as the model has them, and half the width of their bands: both [n]."""
        curve, slopes = self.law.backbone.log_slopes(self.theta, 2.0**x)
        prior = np.diag(self.law.spread**2)
        places = np.concatenate([x, self.x])
        expected, covariance = _beside(self.law, places, self.scale)
        near = covariance[: len(x), len(x) :] + slopes @ prior @ self.slopes.T
        mean: Floats = curve + expected[: len(x)] + slopes @ (self.law.mean - self.theta) + near @ self.pull
        total = np.diag(covariance)[: len(x)] + self.scale * NOISE**2 + np.einsum("ij,ij->i", slopes @ prior, slopes)
        known = np.einsum("ij,ij->i", near @ self.inverse, near)
        # Jitter is a matter of microseconds: a larger share of a small message's time than of a large one's. So the
        # variance of a size is as many times the table's as the rows around it, left out, are off by.
        restless = np.ones(len(x))
        weights = np.exp(-0.5 * ((x[:, None] - self.x[None, :]) / NEAR) ** 2)
        if self.unrest is not None:
            restless = np.maximum((ALIKE + weights @ self.unrest) / (ALIKE + weights.sum(axis=1)), 1.0)
        spread: Floats = QUANTILE * np.sqrt(np.maximum(total - known, 1e-8) * restless)
        if self.alone is not None:
            off, off_alone = (
                (squares.mean() + weights @ squares) / (1.0 + weights.sum(axis=1))
                for squares in ((one.pull / np.diag(one.inverse)) ** 2 for one in (self, self.alone))
            )
            # Where both are on every row there is nothing to choose. The band stays this one's: with the variance of
            # a time that is the one's or the other's as well, it is a tenth wider on the tuning tables of
            # docs/predict-public.md, and with one standard deviation of that, not a quantile of it, still 2%.
            share = off / np.maximum(off + off_alone, np.finfo(np.float64).tiny)
            mean = mean + share * (self.alone._expected(x)[0] - mean)
        if self.beyond is not None and (larger := x > self.x.max() + 1e-9).any():
            mean[larger], spread[larger] = self.beyond._expected(x[larger])
        return mean, spread

    @cached_property
    def _row_times(self) -> tuple[Floats, Floats]:
        """Return log2 of the rows' sizes, each once, and their mean log times: float64 [n] each."""
        places, row = np.unique(self.x, return_inverse=True)
        return places, np.bincount(row, self.logs) / np.bincount(row)

    def falls(self) -> list[tuple[float, float]]:
        """Return log2 of the sizes of neighbouring rows of which the larger takes less time, beyond noise."""
        places, times = self._row_times
        pairs = zip(places, places[1:], times, times[1:], strict=False)
        return [(float(a), float(b)) for a, b, before, behind in pairs if behind < before - FALL]

    @cached_property
    def _smoothed(self) -> tuple[Floats, Floats, Floats]:
        """Return log2 of sizes of one grid, the rows' among them, the log times there, and those that never fall.

        The grid is the calibration's: what is asked with a size has no part in its answer. Each: float64 [n].
        """
        grid = np.union1d(GRID, self.x)
        expected = self._expected(grid)[0]
        regime, rising = self._regimes(grid), expected.copy()
        for one in np.unique(regime):
            here = expected[regime == one]
            # The lower of what does not rise: how far a slow size reaches is not known, and a time that is too long
            # by mistake is off by more of the true one than any that is too short.
            rising[regime == one] = np.minimum.accumulate(here[::-1])[::-1]
        return grid, expected, rising

    def _regimes(self, x: Floats) -> NDArray[np.int64]:
        """Return which regime sizes are of, from log2, int64 [n]."""
        places, times = self._row_times
        falls = self.falls()
        # What lies between the two rows of a fall is of neither regime, but where only one row is slow: it may be a
        # spike, and what is before it then rises to the row behind. The row before is slow, too, where it takes longer
        # than that by more than noise. As much as `FALL` is too much to ask: peaks that rise over several rows begin at
        # less, and on the tuning tables of docs/predict-public.md the error is 12.6% instead of 11.9%.
        tops = [a for a, b in falls if (times[places < a][-1:] > times[places == b] + QUANTILE * NOISE).any()]
        ends = [b for _, b in falls]
        return np.searchsorted(tops, x, side="left") + np.searchsorted(ends, x, side="right")

    def _rising(self, x: Floats, mean: Floats) -> Floats:
        """Return times that never fall as sizes grow, but from one regime to the next: rows show where one ends."""
        if not len(self.x) and self.law.beside is None:  # a law's own curve rises
            return mean
        grid, expected, rising = self._smoothed
        of_grid, of_x = self._regimes(grid), self._regimes(x)
        found: Floats = mean.copy()
        for one in np.unique(of_x):
            here = of_x == one
            places, smooth = grid[of_grid == one], rising[of_grid == one]
            if not len(places):  # between two rows that a size of the grid does not part
                continue
            moved = np.abs(smooth - expected[of_grid == one]) > 1e-12
            after = np.searchsorted(places, x[here], side="right")
            low, high = np.r_[-np.inf, smooth][after], np.r_[smooth, np.inf][after]
            # Between two sizes of the grid at which nothing was smoothed the curve itself, else a line.
            line = np.r_[False, moved][after] | np.r_[moved, False][after]
            curve = np.clip(mean[here], low, high)
            found[here] = np.where(line & (after > 0), np.interp(x[here], places, smooth), curve)
        return found


def _beside(law: Law, x: Floats, scale: float) -> tuple[Floats, Floats]:
    """Return what is expected beside a law's curve at sizes, from their log2, and its covariance: [n], [n, n]."""
    regimes = np.searchsorted(law.switches, x)
    if law.beside is None:
        return np.zeros(len(x)), bumps(x, x, scale, regimes, regimes)
    return law.beside.given(x, scale, regimes)


def expect(law: Law) -> Calibration:
    """Return the law itself, with nothing measured."""
    none = np.zeros(0)
    return Calibration(law.mean, law, none, none, np.zeros((0, 0)), np.zeros((0, len(law.mean))), law.noise)


def fit(sizes: ArrayLike, times_s: ArrayLike, law: Law) -> Calibration:
    """Return the calibration of measured times; deterministic.

    Args:
        sizes: Bytes, [n], n ≥ 1, more than 0.
        times_s: Seconds, [n], more than 0.
        law: What is expected: `fabric.law`, or `vague`.

    Raises:
        UsageError: There is no row, or figures are not positive.
    """
    size: Floats = np.asarray(sizes, dtype=np.float64)
    times: Floats = np.asarray(times_s, dtype=np.float64)
    if size.shape != times.shape or size.ndim != 1 or not len(size):
        raise UsageError(f"a calibration needs as many times as sizes, at least 1, not {times.shape}")
    if not np.all(np.isfinite(size) & (size > 0) & np.isfinite(times) & (times > 0)):
        raise UsageError("a calibration needs sizes and times more than 0; check() flags rows that are not")
    if len(size) > MOST:
        kept = np.unique(np.linspace(0, len(size) - 1, MOST).round().astype(int))
        size, times = size[kept], times[kept]
    # The search begins at the law, and at what the first and the last row would mean.
    starts = [law.mean]
    if isinstance(law.backbone, PipelineLaw):
        guess = law.mean.copy()
        guess[BASE] = np.log(times.min())
        guess[RATE] = np.log((size / times).max() * 1.2)
        starts.append(guess)
    alone = fit(size, times, replace(law, beside=None)) if law.beside is not None else None
    # With the named switches and without: what rows left out say.
    fitted = []
    for regimes in [law, replace(law, switches=())] if law.switches else [law]:
        found = [_fit_from(start, size, np.log(times), regimes) for start in starts]
        fitted.append(min(found, key=lambda one: one[1])[0])
    best = min(fitted, key=lambda one: one.left_out)
    beyond = replace(fitted[-1], alone=alone) if best is not fitted[-1] else None
    return replace(best, beyond=beyond, alone=alone)


def _fit_from(start: Floats, sizes: Floats, logs: Floats, law: Law) -> tuple[Calibration, float]:
    """Return the calibration that the search from some figures ends at, and how surprising the rows are under it."""
    x = np.log2(sizes)
    weights, scale, theta = np.ones(len(x)), law.noise, start
    for turn in range(5):  # weights and scale are learnt in four turns; the last one takes them as they are
        # Of the rows about the curve; a row of weight below 1 is that much less sure.
        expected, rows = _beside(law, x, scale)
        rows = rows + scale * np.diag(NOISE**2 + STEP**2 * (1.0 / weights - 1.0))
        theta, surprise = _most_probable(sizes, logs - expected, law, rows, theta)
        curve, slopes = law.backbone.log_slopes(theta, sizes)
        inverse = np.linalg.inv(rows + slopes @ np.diag(law.spread**2) @ slopes.T)
        pull = inverse @ (logs - expected - curve - slopes @ (law.mean - theta))
        left = 1.0 / np.diag(inverse)  # leave-one-out variances and residuals, Rasmussen and Williams 5.12
        if turn == 4:
            break
        squares = (pull * left) ** 2 / left
        weights = np.clip((FREEDOM + 1.0) / (FREEDOM + squares), 0.02, 1.0)
        ratio = (PATIENCE * law.noise / scale + np.minimum(squares, FAR).sum()) / (PATIENCE + len(x))
        scale = float(np.clip(scale * ratio, 0.1, 30.0))
    plain = np.maximum(left - scale * STEP**2 * (1.0 / weights - 1.0), 1e-8)  # were no row weighed down
    unrest: Floats = np.minimum((pull * left) ** 2 / plain, FAR)
    left_out = float(np.sum(np.minimum((pull * left) ** 2 / left, FAR) + np.log(left)))
    fitted = Calibration(theta, law, x, pull, inverse, slopes, scale, unrest, left_out, logs)
    return fitted, surprise + len(x) * float(np.log(scale))


def _most_probable(sizes: Floats, logs: Floats, law: Law, rows: Floats, theta: Floats) -> tuple[Floats, float]:
    """Return the figures of greatest posterior probability, and twice its negative logarithm (Levenberg–Marquardt)."""
    inverse, belief = np.linalg.inv(rows), np.diag(1.0 / law.spread**2)

    def cost(figures: Floats) -> float:
        error, shift = law.backbone.log_slopes(figures, sizes)[0] - logs, figures - law.mean
        return float(error @ inverse @ error + shift @ belief @ shift)

    damping, least = 1e-3, cost(theta)
    for _ in range(60):
        curve, slopes = law.backbone.log_slopes(theta, sizes)
        shift = theta - law.mean
        matrix = slopes.T @ inverse @ slopes + belief
        slope = slopes.T @ inverse @ (curve - logs) + belief @ shift
        step: Floats = np.clip(np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), -slope), -1.0, 1.0)
        moved: Floats = theta + step
        after = cost(moved)
        if after < least:
            gain, theta, least, damping = least - after, moved, after, max(damping / 5, 1e-9)
            if gain < 1e-8:
                break
        else:
            damping *= 5
            if damping > 1e8:
                break
    return theta, least


# -------------------------------------------------------------------------------------------------
# A cluster at another scale: what was measured beside the law of one scale is expected beside the law of another.


def transfer(fitted: Sequence[Calibration], law: Law) -> Law:
    """Return what is expected at another scale, or of another version, of a cluster that was measured at some.

    What the measured ones had beside their laws, the new one has beside its own, as far as they show it: in the law's
    figures, and in bumps at the same sizes.

    Args:
        fitted: Calibrations of tables of the same cluster, each fitted with the law of its own scale.
        law: The law of the scale to predict.
    """
    beside, precision = np.zeros(len(law.mean)), np.zeros((len(law.mean), len(law.mean)))
    drifts = [
        law.backbone.drift**2 * (max(scale.law.apart(law), LEAST_APART) if law.place[0] else 1.0) for scale in fitted
    ]
    for scale, drift in zip(fitted, drifts, strict=True):
        known = np.linalg.inv(scale.posterior + np.diag(drift))
        # What the rows moved the law's figures by, in the linear model.
        moved = np.diag(scale.law.spread**2) @ scale.slopes.T @ scale.pull
        beside += known @ (moved + fill_growth(law, scale.law))
        precision += known
    spread = np.linalg.inv(precision)
    laws = [*(scale.law for scale in fitted), law]
    return replace(
        law,
        mean=law.mean + spread @ beside,
        spread=np.minimum(np.sqrt(np.diag(spread) + np.min(drifts, axis=0)), law.spread),
        noise=float(np.exp(np.mean([np.log(scale.scale) for scale in fitted]))),
        beside=Beside(
            [scale.x for scale in fitted],
            [np.searchsorted(scale.law.switches, scale.x) for scale in fitted],
            [scale.rest for scale in fitted],
            np.array([[one.apart(other) for other in laws] for one in laws]),
        )
        if isinstance(law.backbone, PipelineLaw) and law.place[0]  # how far apart vague laws are is not known
        else None,
        words=f"{law.words}; beside it what {len(fitted)} other scale{'s' * (len(fitted) > 1)} had",
    )
