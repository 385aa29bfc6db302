"""Statistics that few late steps do not spoil: medians, scales and autocorrelations of the core of the noise."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.slow_rank.window_variance import decay, long_run
from ringside.monitor.stats import Floats

MEDIAN = math.pi / 2
"""The variance of a median of normal variables over that of their mean."""

EFFICIENCY = 0.37
"""What the median absolute deviation tells of a scale, over what the standard deviation of normal noise does."""

SURE = 1.0
"""Standard errors between the estimated autocorrelation and the one that is reckoned with."""

MOST_CORRELATED = 0.97
CUT = 2.5
"""Standard deviations of the core beyond which a step counts for no more when autocorrelation is estimated."""


def median(window: Floats) -> Floats:
    """Return the median over the first axis, NaN where less than half is known; that axis is left out."""
    ordered = np.sort(window, axis=0)  # NaN last
    if not np.isnan(ordered[-1]).any():
        whole: Floats = 0.5 * (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2])
        return whole
    known = np.sum(~np.isnan(window), axis=0, keepdims=True)
    low, high = np.maximum(known - 1, 0) // 2, known // 2
    pair = [np.take_along_axis(ordered, np.minimum(index, len(ordered) - 1), axis=0)[0] for index in (low, high)]
    middle: Floats = np.where(2 * known[0] >= len(window), 0.5 * (pair[0] + pair[1]), np.nan)
    return middle


def core_scale(residuals: Floats) -> float:
    """Return the noise's standard deviation without the late steps."""
    return 1.4826 * float(np.median(np.abs(residuals)))


def autocorrelation(residuals: Floats, scale: Floats) -> Floats:
    """Return the coefficient of the autoregression whose means of many steps vary as these do, a standard error high.

    For noise that forgets at one pace this is the autocorrelation of successive steps. Where fast noise hides slow
    noise it would say too little, and that of steps two apart tells (`wander.decay`). Late steps are cut short.

    Args:
        residuals: Steps minus their median, [steps, ...]; NaN where missing.
        scale: Standard deviations of their core, [...].
    """
    limit = CUT * np.maximum(scale, 1e-6)
    core = np.nan_to_num(np.minimum(np.maximum(residuals, -limit), limit))
    known = np.maximum(np.sum(~np.isnan(residuals), axis=0), 1)
    first, second = (raised_autocorrelation(core, lag, known, SURE) for lag in (1, 2))
    variance = long_run(first, decay(first, second, known))
    coefficient: Floats = np.minimum((variance - 1.0) / (variance + 1.0), MOST_CORRELATED)
    return coefficient


def raised_autocorrelation(core: Floats, lag: int, known: NDArray[np.intp], sure: float) -> Floats:
    """Return the autocorrelation of steps `lag` apart, so many standard errors high.

    Args:
        core: What is left of each step without its level, [steps, ...]; 0 where missing.
        lag: Steps apart.
        known: How many steps are there, [...].
        sure: Standard errors that are added.
    """
    r = (core[lag:] * core[:-lag]).sum(axis=0) / np.maximum((core * core).sum(axis=0), 1e-12)
    raised: Floats = np.clip(r + (1.0 + 3.0 * np.maximum(r, 0.0)) / known + sure / np.sqrt(known), 0.0, MOST_CORRELATED)
    return raised


def no_less_than_usual(values: Floats, known: NDArray[np.bool_] | bool = True) -> Floats:
    """Return each rank's value, or the mean of all known ones of its job where that is greater.

    One of several ranks always has a small one by chance, and that rank is the one whose steps seem to be news.

    Args:
        values: Estimates, [jobs, ranks].
        known: Whose rest on enough steps, [jobs, ranks].
    """
    counted = np.broadcast_to(known, values.shape)
    mean = np.where(counted, values, 0.0).sum(axis=-1, keepdims=True) / np.maximum(
        counted.sum(axis=-1, keepdims=True), 1
    )
    raised: Floats = np.maximum(values, mean)
    return raised


def how_often_again(late: NDArray[np.bool_], share: float) -> float:
    """Return how often a late step is followed by another, drawn towards the share of late ones where few were seen."""
    return float((np.count_nonzero(late[1:] & late[:-1]) + share) / (np.count_nonzero(late[:-1]) + 1.0))


def divergence(share: float, usual: float) -> float:
    """Return Kullback and Leibler's divergence of a share of late steps from the usual; 0 where it is no greater."""
    if share <= usual:
        return 0.0
    rest = 0.0 if share >= 1.0 else (1.0 - share) * math.log((1.0 - share) / (1.0 - usual))
    return share * math.log(share / usual) + rest
