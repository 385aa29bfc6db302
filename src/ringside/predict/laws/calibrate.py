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
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringside.errors import UsageError
from ringside.predict.laws.fabric import BASE, RATE, Floats, Law, PipelineLaw
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


REACH, STEP_REACH = 4.0, 0.7  # of a bump and of a step, in doublings of the size
BUMP, STEP = 0.18, 0.04  # their standard deviations before a table has spoken, of log time
NOISE = 0.015
FREEDOM = 4.0  # of Student's t: how surprising an outlier is
SMOOTH = 0.5  # least variance of bumps, in units of the usual
FAR = 16.0  # squares of standardised residuals beyond this count as this
PATIENCE = 5.0  # rows' worth of belief in BUMP and NOISE
NEAR, ALIKE = 1.0, 20.0  # doublings over which rows show how restless sizes are; rows' worth of belief in all alike
QUANTILE = 2.9  # of the standardised error for a band of 95%; see docs/design/0020-calibration.md
NOISY = 7.0  # times the variance, where ranks are processes on CPUs
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
    """

    theta: Floats
    law: Law
    x: Floats
    pull: Floats
    inverse: Floats
    slopes: Floats
    scale: float = 1.0
    unrest: Floats | None = None

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
        curve, slopes = self.law.backbone.log_slopes(self.theta, sizes)
        prior = np.diag(self.law.spread**2)
        near = bumps(x, self.x, self.scale) + slopes @ prior @ self.slopes.T
        mean = curve + slopes @ (self.law.mean - self.theta) + near @ self.pull
        total = (
            max(self.scale, SMOOTH) * BUMP**2
            + self.scale * (STEP**2 + NOISE**2)
            + np.einsum("ij,ij->i", slopes @ prior, slopes)
        )
        known = np.einsum("ij,ij->i", near @ self.inverse, near)
        # Jitter is a matter of microseconds: a larger share of a small message's time than of a large one's. So the
        # variance of a size is as many times the table's as the rows around it, left out, are off by.
        restless = np.ones(len(x))
        if self.unrest is not None:
            weights = np.exp(-0.5 * ((x[:, None] - self.x[None, :]) / NEAR) ** 2)
            restless = np.maximum((ALIKE + weights @ self.unrest) / (ALIKE + weights.sum(axis=1)), 1.0)
        spread = QUANTILE * np.sqrt(np.maximum(total - known, 1e-8) * restless)
        low, high = self.x.min(initial=np.inf), self.x.max(initial=-np.inf)
        far = (x < low - 1e-9) | (x > high + 1e-9)
        return Prediction(sizes, np.exp(mean), np.exp(mean - spread), np.exp(mean + spread), far)


def bumps(a: Floats, b: Floats, scale: float) -> Floats:
    """Return the covariance of bumps and steps at sizes, float64 [len(a), len(b)], from their log2.

    Bumps are smooth (Matérn-3/2); steps, where a protocol or a count of channels changes, are not (Matérn-1/2). Rows a
    doubling apart cannot tell a step from noise; dense rows can. However well dense rows agree with their neighbours,
    that implies little about bumps beyond them: their variance does not fall below `SMOOTH` of the usual.
    """
    far = np.abs(a[:, None] - b[None, :])
    smooth = np.sqrt(3.0) * far / REACH
    wide, narrow = max(scale, SMOOTH) * BUMP**2, scale * STEP**2
    found: Floats = wide * (1.0 + smooth) * np.exp(-smooth) + narrow * np.exp(-far / STEP_REACH)
    return found


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
    fitted = [_fit_from(start, size, np.log(times), law) for start in starts]
    return min(fitted, key=lambda found: found[1])[0]


def _fit_from(start: Floats, sizes: Floats, logs: Floats, law: Law) -> tuple[Calibration, float]:
    """Return the calibration that the search from some figures ends at, and how surprising the rows are under it."""
    x = np.log2(sizes)
    weights, scale, theta = np.ones(len(x)), law.noise, start
    for turn in range(5):  # weights and scale are learnt in four turns; the last one takes them as they are
        # Of the rows about the curve; a row of weight below 1 is that much less sure.
        rows = bumps(x, x, scale) + scale * np.diag(NOISE**2 + STEP**2 * (1.0 / weights - 1.0))
        theta, surprise = _most_probable(sizes, logs, law, rows, theta)
        curve, slopes = law.backbone.log_slopes(theta, sizes)
        inverse = np.linalg.inv(rows + slopes @ np.diag(law.spread**2) @ slopes.T)
        pull = inverse @ (logs - curve - slopes @ (law.mean - theta))
        left = 1.0 / np.diag(inverse)  # leave-one-out variances and residuals, Rasmussen and Williams 5.12
        if turn == 4:
            break
        squares = (pull * left) ** 2 / left
        weights = np.clip((FREEDOM + 1.0) / (FREEDOM + squares), 0.02, 1.0)
        ratio = (PATIENCE * law.noise / scale + np.minimum(squares, FAR).sum()) / (PATIENCE + len(x))
        scale = float(np.clip(scale * ratio, 0.1, 30.0))
    plain = np.maximum(left - scale * STEP**2 * (1.0 / weights - 1.0), 1e-8)  # were no row weighed down
    unrest: Floats = np.minimum((pull * left) ** 2 / plain, FAR)
    fitted = Calibration(theta, law, x, pull, inverse, slopes, scale, unrest)
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
    """Return what is expected at another scale of a cluster that was measured at one or more.

    What the measured scales had beside their laws, the new one has beside its own, as far as they show it.

    Args:
        fitted: Calibrations of tables of the same cluster, each fitted with the law of its own scale.
        law: The law of the scale to predict.
    """
    drift = np.diag(law.backbone.drift**2)
    beside, precision = np.zeros(len(law.mean)), np.zeros((len(law.mean), len(law.mean)))
    for scale in fitted:
        known = np.linalg.inv(scale.posterior + drift)
        # What the rows moved the law's figures by, in the linear model.
        beside += known @ (np.diag(scale.law.spread**2) @ scale.slopes.T @ scale.pull)
        precision += known
    spread = np.linalg.inv(precision)
    return replace(
        law,
        mean=law.mean + spread @ beside,
        spread=np.minimum(np.sqrt(np.diag(spread + drift)), law.spread),
        noise=float(np.exp(np.mean([np.log(scale.scale) for scale in fitted]))),
        words=f"{law.words}; beside it what {len(fitted)} other scale{'s' * (len(fitted) > 1)} had",
    )
