"""How much longer one rank works than the others (log of own time over the median of the *other* ranks), robustly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
SMALLEST, LARGEST = 1e-9, 1e15


def usable(values: ArrayLike) -> Floats:
    """Return `values` as float64 with NaN for whatever cannot be a time or a count: not within 1e-9 to 1e15."""
    array = np.asarray(values, dtype=np.float64)
    return np.where((array >= SMALLEST) & (array <= LARGEST), array, np.nan)


def log_excess(own: ArrayLike) -> Floats:
    """Return log(own time of a rank / median own time of the other ranks), per step.

    Leaving the rank itself out matters for few ranks: with two of them the reference is simply the other one, and
    the excess of one is minus that of the other. Own times that are missing or not positive give NaN and count for
    nobody; so does a step at which only one rank has a value.

    Args:
        own: Own times in seconds, float [..., ranks].

    Returns:
        float64 [..., ranks]; 0.12 means about 12% longer.
    """
    with np.errstate(invalid="ignore"):
        logs = np.log(usable(own))
        return logs - others_median(logs)


def excess_ratios(own: Floats, peers: Sequence[Sequence[int]] = ()) -> Floats:
    """Return how much longer each rank takes than the median of the others that are known; NaN where none are.

    Args:
        own: Seconds, float64 [ranks]; what is not finite is not known.
        peers: Ranks that do the same work, a partition of all: only these are compared. Empty: all do.
    """
    if len(peers) > 1:
        excess = np.full(len(own), np.nan)
        for ranks in peers:
            excess[list(ranks)] = excess_ratios(own[list(ranks)])
        return excess
    known = np.where(np.isfinite(own), own, np.nan)
    others = others_median(known)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(others > 0, known / others - 1.0, np.nan)


def others_median(values: Floats) -> Floats:
    """Return for each rank the median of the others, float64 [..., ranks]; NaN where fewer than two are known."""
    if values.shape[-1] == 2:  # each one's reference is the other: a job of two is judged at every step
        return np.where(np.isnan(values), np.nan, values[..., ::-1])
    ordered = np.sort(values, axis=-1)  # NaN last
    known = np.sum(ordered == ordered, axis=-1, keepdims=True)
    low, high = np.maximum(known - 2, 0) // 2, np.maximum(known - 1, 0) // 2
    others = 0.5 * (_without_itself(values, ordered, low) + _without_itself(values, ordered, high))
    return np.where(known >= 2, others, np.nan)


def row_medians(values: Floats) -> Floats:
    """Return the median over ranks of each step, float64 [steps], from [steps, ranks]; NaN where nothing is known."""
    known = ~np.isnan(values).all(axis=1)
    medians = np.full(len(values), np.nan)
    medians[known] = np.nanmedian(values[known], axis=1)
    return medians


def rank_medians(values: Floats, otherwise: float = 0.0) -> Floats:
    """Return the median of each rank over what is finite, float64 [ranks]; `otherwise` where nothing is.

    Args:
        values: float64 [steps, ranks].
        otherwise: Where nothing is known.
    """
    return np.array([known_median(column, otherwise) for column in values.T])


def share_of(part: NDArray[Any], whole: NDArray[Any], otherwise: float = math.nan) -> Floats:
    """Return part over whole, elementwise; `otherwise` where the whole is not positive."""
    return np.where(whole > 0, part / np.where(whole > 0, whole, 1.0), otherwise)


def known_median(values: Floats, otherwise: float = 0.0) -> float:
    """Return the median of what is finite; `otherwise` where nothing is."""
    known = values[np.isfinite(values)]
    return float(np.median(known)) if known.size else otherwise


def _without_itself(values: Floats, ordered: Floats, index: NDArray[np.intp]) -> Floats:
    """Return, for every value, the entry number `index` of `ordered` after that value was taken out of it."""
    here = np.take_along_axis(ordered, index, axis=-1)
    following = np.take_along_axis(ordered, np.minimum(index + 1, ordered.shape[-1] - 1), axis=-1)
    return np.where(values <= here, following, here)


# -------------------------------------------------------------------------------------------------
# How many estimated standard deviations are as rare as so many known ones.


def student(z: float, freedom: Floats) -> Floats:
    """Return how many estimated standard deviations are as rare as `z` known ones, by freedom of the estimate.

    The quantile of Student's t in Wallace's approximation (1959).
    """
    raised = z * (8.0 * freedom + 3.0) / (8.0 * freedom + 1.0)
    return np.sqrt(freedom * np.expm1(np.minimum(raised**2 / freedom, 60.0)))


# -------------------------------------------------------------------------------------------------
# Statistics that few late steps do not spoil.


def median(window: Floats) -> Floats:
    """Return the median over the first axis, NaN where less than half is known; that axis is left out."""
    lines = np.array(np.moveaxis(window, 0, -1), order="C").reshape(-1, len(window))
    known = np.sum(~np.isnan(lines), axis=1)
    medians = np.full(len(lines), np.nan)
    for count in set(known[2 * known >= len(window)].tolist()):
        alike = known == count
        ordered = lines[alike]
        half = count // 2
        ordered.partition(half)  # NaN last
        below = ordered[:, half if count % 2 else slice(half)].reshape(len(ordered), -1).max(axis=1)
        medians[alike] = 0.5 * (below + ordered[:, half])
    return medians.reshape(window.shape[1:])


def deviation(away: Floats) -> Floats:
    """Return the standard deviation that the median of distances from the middle stands for, over the first axis."""
    return 1.4826 * median(np.abs(away))


def known_or_0(values: Floats) -> Floats:
    """Return values with 0 for NaN (in a tenth of the time of NumPy's `nan_to_num`, which minds infinities)."""
    return np.where(np.isnan(values), 0.0, values)


def divergence(share: float, usual: float) -> float:
    """Return Kullback and Leibler's divergence of a share of late steps from the usual; 0 where it is no greater."""
    if share <= usual:
        return 0.0
    rest = 0.0 if share >= 1.0 else (1.0 - share) * math.log((1.0 - share) / (1.0 - usual))
    return share * math.log(share / usual) + rest
