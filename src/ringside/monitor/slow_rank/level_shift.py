"""A level that shifted and stayed: the steps since then against all before, with the noise learnt from both sides.

`change_point.py` knows the noise from what was before; where that was short, or healthier than what follows, its bars
stay too high for good. Here a place is assumed at which the level changed, both sides' residuals tell how noisy the job
is, and the difference of the two levels is held against that. It takes longer windows than any other way, so it is the
last to speak: it finds what is plain to see in a whole run although no ten steps of it are. For few ranks.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.slow_rank.noise import CUT, decay, independent_share, mixed_variance, raised_autocorrelation
from ringside.monitor.stats import EFFICIENCY, MEDIAN, Floats, core_scale, median, no_less_than_usual, student

LENGTHS = tuple(range(48, 193, 12))
"""Steps since the place at which the level may have shifted: one that is off by many makes the shift pass for noise."""

PAST_STEPS = 192
FEWEST = 24
"""Fewer steps before that place tell nothing."""

EVERY = 12
"""A look every so many steps; every one of `LENGTHS` is a multiple."""

LOOKS = 24.0
"""Looks at windows of L steps are as rare as one in L/24 of single ones: neighbouring windows are nearly the same."""

SMALLEST = 0.004
"""No noise is taken for smaller than this."""

SURE = 1.5
"""Standard errors between the estimated autocorrelation and the one that is reckoned with."""

DOUBT = 4.0
"""It looks at dozens of steps: slow noise under fast noise is believed sooner than by others (`noise.decay`)."""

BLOCK, BEYOND = 12, 1.3
"""Means of so many steps whose variance is so much more than the autocorrelations say are believed instead."""

SHIFT_EFFICIENCY = 0.6
RAREST, FADING = 2.0, 0.9999
"""A shift must be so many times the greatest one of the same length before; what was seen fades from step to step."""

MOST, PARTS = 0.6, 3
"""So many of the steps since, and the median of every third of them, must be on the far side of the middle."""


class Difference(NamedTuple):
    """The difference of two levels and how far chance may take it, [jobs, ranks] each."""

    height: Floats
    error: Floats
    freedom: Floats
    middle: Floats


class LevelShift:
    """Levels before and after, over `[jobs, ranks]` of log excess.

    Args:
        shape: `(jobs, ranks)`.
        chance: How rarely a healthy rank may seem to have shifted, per step.
    """

    def __init__(self, shape: tuple[int, int], chance: float) -> None:
        self._heights = [NormalDist().inv_cdf(1.0 - min(chance * length / LOOKS, 0.01)) for length in LENGTHS]
        self._shape = shape
        self._seen = np.zeros((len(LENGTHS), shape[0], 1))
        self._recent = np.zeros((max(LENGTHS) // EVERY + 1, len(LENGTHS), shape[0], 1))

    def update(self, excess: Floats, steps: int, warm_up: int, relief: NDArray[np.int64], least: Floats) -> Floats:
        """Return the level that each rank has shifted to and kept, [jobs, ranks]; -inf where it did not.

        Args:
            excess: The last steps, a ring indexed by number of the step, [kept, jobs, ranks].
            steps: Number of the newest step, from 1.
            warm_up: Steps at the start that count for nothing.
            relief: The step at which each rank's last episode ended, [jobs, ranks]; nothing up to it counts.
            least: The level and the shift that are worth reporting, [jobs, ranks] each.
        """
        found = np.full(self._shape, -np.inf)
        if steps % EVERY:
            return found
        numbers = np.arange(max(steps - max(LENGTHS) - PAST_STEPS, warm_up) + 1, steps + 1)
        rows = np.where(numbers.reshape(-1, 1, 1) > relief, excess[numbers % len(excess)], np.nan)
        for index, length in enumerate(LENGTHS):
            if len(rows) - length < FEWEST:
                break
            found = np.maximum(found, self._judge(index, rows[-length - PAST_STEPS :], steps, least))
        return found

    def _judge(self, index: int, rows: Floats, steps: int, least: Floats) -> Floats:
        length = LENGTHS[index]
        found = compare(rows, length)
        seen = self._remember(index, found.height, steps)
        since = rows[-length:]
        level = median(since)
        with np.errstate(invalid="ignore"):
            bar = np.maximum(student(self._heights[index], found.freedom) * found.error, RAREST * seen)
            news = (found.height >= np.maximum(bar, least[1])) & (level >= least[0])
        if not news.any():
            return np.full(self._shape, -np.inf)
        return np.where(news & _is_carried(since, found.middle), level, -np.inf)

    def _remember(self, index: int, height: Floats, steps: int) -> Floats:
        """Return the greatest of what was seen at least a window ago, [jobs, 1]; keep what is seen now."""
        slots, now = len(self._recent), steps // EVERY
        self._recent[now % slots, index] = np.nan_to_num(np.abs(height)).max(axis=1, keepdims=True)
        then = self._recent[(now - LENGTHS[index] // EVERY) % slots, index]
        self._seen[index] = np.maximum(FADING**EVERY * self._seen[index], then)
        seen: Floats = self._seen[index]
        return seen


def compare(rows: Floats, length: int) -> Difference:
    """Hold the level of the last `length` rows against that of the rows before.

    Levels are means of what is left when single steps are cut at 2.5 standard deviations of the core. The error of a
    mean comes from two autocorrelations, which tell slow noise under fast noise apart (an ARMA(1, 1) process; Box and
    Jenkins 1970), or from means of 12 steps where those vary by more.

    Args:
        rows: Log excess, [steps, jobs, ranks]; NaN where missing.
        length: How many of the rows are after the supposed change.

    Returns:
        Height, its standard error, the degrees of freedom of that, and the middle between both levels; heights are NaN
        where too little is known.
    """
    sides = rows[:-length], rows[-length:]
    medians = [median(side) for side in sides]
    away = np.concatenate([side - middle for side, middle in zip(sides, medians, strict=True)])
    limit = CUT * np.maximum(1.4826 * median(np.abs(away)), SMALLEST)
    counts = [np.sum(~np.isnan(side), axis=0) for side in sides]
    enough = (counts[0] >= FEWEST) & (2 * counts[1] >= length)
    cores = [np.clip(side - middle, -limit, limit) for side, middle in zip(sides, medians, strict=True)]
    means = [np.nansum(core, axis=0) / np.maximum(count, 1) for core, count in zip(cores, counts, strict=True)]
    cores = [np.nan_to_num(core - mean) for core, mean in zip(cores, means, strict=True)]
    levels = [middle + mean for middle, mean in zip(medians, means, strict=True)]
    height = np.where(enough, levels[1] - levels[0], np.nan)
    error, freedom = _error(cores, counts)
    return Difference(height, error, freedom, levels[0] + (levels[1] - levels[0]) / 2.0)


def _error(cores: list[Floats], counts: list[NDArray[np.intp]]) -> tuple[Floats, Floats]:
    """Return the standard error of the difference of two means, and its degrees of freedom, [jobs, ranks] each."""
    known = np.maximum(counts[0] + counts[1], 2)
    core = np.concatenate(cores)
    square = no_less_than_usual(np.maximum((core * core).sum(axis=0) / (known - 1), SMALLEST**2))
    first, later = _autocorrelations(core, known, SURE)
    variance = square * sum(mixed_variance(np.maximum(count, 1.0), first, later) for count in counts)
    freedom = SHIFT_EFFICIENCY * known * independent_share(*_autocorrelations(core, known, 0.0))
    blocks = [_block_means(side) for side in cores]
    spare = max(sum(len(means) for means in blocks) - 2, 1)
    spread = sum((means**2).sum(axis=0) for means in blocks) / spare
    measured = spread * sum(1.0 / max(len(means), 1) for means in blocks)
    rough = measured > BEYOND * variance
    return (
        np.sqrt(np.where(rough, measured, variance)),
        np.maximum(np.where(rough, np.minimum(freedom, spare), freedom), 1.0),
    )


def _autocorrelations(core: Floats, known: NDArray[np.intp], sure: float) -> tuple[Floats, Floats]:
    """Return the autocorrelation of successive steps, `sure` standard errors high, and its decay, [jobs, ranks]."""
    first, second = (no_less_than_usual(raised_autocorrelation(core, lag, known, sure)) for lag in (1, 2))
    return first, decay(first, second, known.astype(float), DOUBT)


def _block_means(core: Floats) -> Floats:
    count = len(core) // BLOCK
    means: Floats = core[len(core) - count * BLOCK :].reshape(count, BLOCK, *core.shape[1:]).mean(axis=1)
    return means


def _is_carried(since: Floats, middle: Floats) -> NDArray[np.bool_]:
    """Whether most steps, and the median of each part of them, lie beyond the middle, [jobs, ranks]."""
    with np.errstate(invalid="ignore"):
        most = (since > middle).sum(axis=0) >= MOST * np.maximum(np.sum(~np.isnan(since), axis=0), 1)
        parts = np.all([median(part) > middle for part in np.array_split(since, PARTS)], axis=0)
    carried: NDArray[np.bool_] = most & parts
    return carried


# -------------------------------------------------------------------------------------------------
# Whether an episode is over, by what few great steps cannot spoil: medians, and how few of the last steps are late.
#
# `window_test.py` ends an episode when the mean of a window is surely too small for it, and the noise of means is what
# it learnt from all that happened, interruptions included. Where those are rough and rare, that takes hundreds of
# steps although everybody sees at once that it is over. For few ranks.

MENDED_LENGTHS = (12, 18, 24, 36, 48, 96)
"""Steps whose median is held against the bar."""

CERTAIN = 3.7
"""Standard deviations by which it must stay below."""

LATE = 1 / 3
"""Of the window no more than this may lie above the bar: who is late in every other step is not mended."""

MENDED_SURE = 0.5
"""Standard errors between the estimated autocorrelation and the one that is reckoned with."""


def has_recovered(before: Floats, since: Floats, bar: float) -> bool:
    """Whether the level of the newest steps is surely below a bar.

    Args:
        before: Log excess of the rank before the episode, which tells of its noise, [steps]; NaN where missing.
        since: Log excess since the alarm, oldest first, [steps].
        bar: What the log excess of a rank in the episode is above in most steps.
    """
    before = before[np.isfinite(before)]
    for length in MENDED_LENGTHS:
        window = since[-length:]
        window = window[np.isfinite(window)]
        if length > len(since) or 2 * len(window) < length:
            continue
        if np.mean(window > bar) <= LATE and float(np.median(window)) + _reach(before, window) <= bar:
            return True
    return False


def _reach(before: Floats, window: Floats) -> float:
    """Return how far chance may take the median of the window from its level."""
    cores = [side - np.median(side) for side in (before, window) if len(side)]
    known = sum(len(core) for core in cores)
    scale = max(core_scale(np.concatenate(cores)), SMALLEST)
    core = np.concatenate([np.clip(core, -CUT * scale, CUT * scale) for core in cores])
    first, second = (raised_autocorrelation(core, lag, np.intp(known), MENDED_SURE) for lag in (1, 2))
    later = decay(first, second, np.intp(known))
    variance = MEDIAN * mixed_variance(np.float64(len(window)), first, later)
    freedom = EFFICIENCY * known * (1.0 - later**2) / (1.0 + later**2)
    return float(student(CERTAIN, np.maximum(freedom, 1.0)) * scale * np.sqrt(variance))
