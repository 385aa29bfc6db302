"""Where one rank's level changed, for few ranks in rough noise: a jump, seen at once; an excess that lasts; a shift.

`window_test.py` asks whether a rank's mean excess is more than chance and habit explain, so it must know how means
wander, and with few ranks and many late steps it learns that slowly. Here the question is a smaller one: did the level
change between these steps and those right before? What a rank drifted to earlier does not matter, single late steps do
not move a median, and an episode that was missed spoils nothing but the steps around its beginning.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.slow_rank.noise import (
    CUT,
    autocorrelation,
    decay,
    independent_share,
    mean_variance,
    mixed_variance,
    raised_autocorrelation,
)
from ringside.monitor.stats import (
    EFFICIENCY,
    MEDIAN,
    Floats,
    core_scale,
    divergence,
    how_often_again,
    known_or_0,
    median,
    no_less_than_usual,
    student,
)

# -------------------------------------------------------------------------------------------------
# An excess that lasts, judged by what late steps cannot spoil: medians of windows against the median of all before.
#
# `window_test.py` does this with means, whose noise a few late steps blow up. Here scale and autocorrelation are those
# of the core of the noise, and late steps have to be explained by how often they came before (`change_point.py`). For
# few ranks.

WINDOWS = (9, 12, 18, 24, 36, 48)
LASTING_FEWEST = 24
YOUNG, YOUNG_REFRESH, LASTING_REFRESH = 256, 2, 16
CAUTION = 1.2
"""For several windows at once, and for noise whose core is no normal one."""

PLAIN = 0.4
"""Noise of no more autocorrelation may be judged by how often steps are late; more of it is not known well enough."""

SMALLEST = 0.004
"""No noise is taken for smaller than this."""


class SustainedShift:
    """Levels of windows over `[jobs, ranks]` of log excess, and what chance makes of them.

    Args:
        shape: `(jobs, ranks)`.
        z: How rarely a healthy rank may seem late, as standard deviations of a normal variable.
    """

    def __init__(self, shape: tuple[int, int], z: float) -> None:
        self._z = z
        self._usual = np.zeros((len(WINDOWS), *shape))
        self._bars, self._least = np.full((2, len(WINDOWS), *shape), np.inf)

    def is_sure(self, index: int, job: int, rank: int, jump: float) -> bool:
        """Whether a jump is beyond all doubt about scale and autocorrelation, as far as the noise has a core."""
        return bool(jump >= self._bars[index, job, rank])

    def update(self, excess: Floats, medians: Floats, steps: int, relief: NDArray[np.int64], warm_up: int) -> Floats:
        """Return how far the windows that end now lie above all before, where that may be news, [windows, jobs, ranks].

        NaN where it is none.

        Args:
            excess: The last steps, a ring indexed by number of the step, [kept, jobs, ranks].
            medians: Medians of the windows that end now, [windows, jobs, ranks].
            steps: Number of the newest step, from 1.
            relief: The step at which each rank's last episode ended, [jobs, ranks].
            warm_up: Steps at the start that count for nothing.
        """
        if steps % (YOUNG_REFRESH if steps < YOUNG else LASTING_REFRESH) == 0:
            self._weigh(excess, steps, relief, warm_up)
        jumps = medians - self._usual
        with np.errstate(invalid="ignore"):
            return np.where(jumps >= self._least, jumps, np.nan)

    def _weigh(self, excess: Floats, steps: int, relief: NDArray[np.int64], warm_up: int) -> None:
        """Learn the level and the noise of all before the windows, and set the bars.

        In a young job every window has a past of its own; later it hardly matters where that ends.
        """
        ends = [(steps - WINDOWS[-1], list(range(len(WINDOWS))))]
        if steps < YOUNG:
            ends = [(steps - length, [index]) for index, length in enumerate(WINDOWS)]
        for end, indices in ends:
            past = np.arange(max(end - PAST_STEPS, warm_up) + 1, end + 1)
            if len(past) < LASTING_FEWEST:
                continue
            rows = np.where(past.reshape(-1, 1, 1) > relief, excess[past % len(excess)], np.nan)
            usual = median(rows)
            scale = np.maximum(1.4826 * median(np.abs(rows - usual)), SMALLEST)
            known = np.sum(~np.isnan(rows), axis=0)
            r = no_less_than_usual(autocorrelation(rows - usual, scale), known >= LASTING_FEWEST)
            count = np.maximum(known, 1.0)
            freedom = np.maximum(EFFICIENCY * count * (1.0 - r * r) / (1.0 + r * r), 2.0)
            for index in indices:
                variance = mean_variance(np.float64(WINDOWS[index]), r) + mean_variance(count, r)
                error = np.where(known >= LASTING_FEWEST, scale * np.sqrt(MEDIAN * variance), np.inf)
                self._usual[index] = usual
                self._bars[index] = CAUTION * student(self._z, freedom) * error
                self._least[index] = np.where(r <= PLAIN, CAUTION * self._z * error, self._bars[index])


PAIRS = ((6, 12), (9, 12), (9, 24), (12, 12), (12, 24), (18, 18), (24, 24), (36, 36), (48, 48))
"""Steps after and before the place where the level may have changed."""

RAREST = 2.0
"""A jump must be so many times the greatest difference of the same windows that was seen before."""

AROUND = 48
"""Steps whose median single steps are held against."""

GROSS, GROSS_STEPS, GROSS_SHARE = 9.0, 24, 0.85
"""So many standard deviations above everything before, for so many steps, of which so many are late by half of it, are
no noise, however it wanders."""

PAST_STEPS = 192
FADING = 0.999
DOUBT = 1.5
"""So many late steps are reckoned with beyond those that were seen, among twice as many."""

STRONG = 8.0
"""A jump of so many standard deviations of the core is beyond its wandering: only late steps could feign it."""

REFRESH = 4
FEWEST = 20
"""Before so many steps nothing is known of single late ones."""


class ChangePoint:
    """Differences of window medians over `[jobs, ranks]` of log excess, and what chance makes of them.

    Args:
        shape: `(jobs, ranks)`.
        kept: Steps that are remembered.
        chance: How rarely a healthy rank may seem to jump, per step.
        z: The same as standard deviations of a normal variable.

    Attributes:
        span: Steps that a pair of windows covers, [pairs].
    """

    def __init__(self, shape: tuple[int, int], kept: int, chance: float, z: float) -> None:
        self._lasting = SustainedShift(shape, z)
        self._after, before = (np.array(side) for side in zip(*PAIRS, strict=True))
        self.span = self._after + before
        self._lengths = sorted({AROUND, *WINDOWS, *self._after.tolist(), *before.tolist()})
        # By pair, where the medians of its two windows lie, and by window of `WINDOWS`.
        self._late, self._early = (
            np.array([self._lengths.index(w) for w in side]) for side in zip(*PAIRS, strict=True)
        )
        self._windows = np.array([self._lengths.index(length) for length in WINDOWS])
        self._pairs = np.arange(len(PAIRS))
        self._kept, self._rare = kept, math.log(len(PAIRS) / chance)
        self._medians = np.full((kept, len(self._lengths), *shape), np.nan)
        self._around = np.full((kept, *shape), np.nan)
        self._past = np.zeros((kept, len(PAIRS), shape[0], 1))
        self._seen, self._looks = np.zeros((2, len(PAIRS), shape[0], 1))

    def update(
        self,
        excess: Floats,
        steps: int,
        warm_up: int,
        clean: NDArray[np.bool_],
        least: Floats,
        relief: NDArray[np.int64],
    ) -> Floats:
        """Take in the newest step and return the level that each rank has just jumped to.

        Args:
            excess: The last `kept` steps, a ring indexed by number of the step, [kept, jobs, ranks].
            steps: Number of the newest step, from 1.
            warm_up: Steps at the start that count for nothing.
            clean: Whether both windows of a pair hold nothing of an episode, [pairs, jobs, ranks].
            least: The level and the jump that are worth reporting, [jobs, ranks] each.
            relief: The step at which each rank's last episode ended, [jobs, ranks].

        Returns:
            [jobs, ranks]; NaN where a rank did not jump.
        """
        self._append_medians(excess, steps, warm_up)
        row, kept = steps % self._kept, self._kept
        after = self._medians[row, self._late]
        before = self._medians[(steps - self._after) % kept, self._early]
        self._remember(np.where(clean, np.abs(after - before), np.nan), steps)
        jumps = after - np.maximum(before, least[0] - least[1])  # who was below the usual may come back to it
        with np.errstate(invalid="ignore"):
            bar = np.maximum(RAREST * self._seen, least[1])
            found = (jumps >= bar) & (after >= least[0]) & (self._looks >= 1.5 * self._after.reshape(-1, 1, 1))
        found &= is_new(steps, self._after, relief)
        for pair, job, rank in np.argwhere(found) if found.any() else ():
            window = excess[np.arange(steps - int(self._after[pair]) + 1, steps + 1) % kept, job, rank]
            known = self._known(len(window), steps, job, rank)
            place = pair, job, rank
            found[place] = self._is_news(window, float(after[place]), float(jumps[place]), known)
        gross = self._gross(excess, steps, warm_up, least, relief) if steps % REFRESH == 0 else -np.inf
        lasting = self._lasts(excess, steps, warm_up, least, relief)
        level: Floats = np.maximum(np.maximum(np.where(found, after, -np.inf).max(axis=0), gross), lasting)
        return np.where(np.isfinite(level), level, np.nan)

    def _lasts(self, excess: Floats, steps: int, warm_up: int, least: Floats, relief: NDArray[np.int64]) -> Floats:
        """Return the level of ranks whose excess has lasted, [jobs, ranks]; else -inf."""
        medians = self._medians[steps % self._kept, self._windows]
        jumps = self._lasting.update(excess, medians, steps, relief, warm_up)
        with np.errstate(invalid="ignore"):
            found = (jumps >= least[1]) & (medians >= least[0])
        found &= is_new(steps, np.array(WINDOWS), relief)
        for index, job, rank in np.argwhere(found) if found.any() else ():
            window = excess[np.arange(steps - WINDOWS[index] + 1, steps + 1) % self._kept, job, rank]
            known, jump = self._known(len(window), steps, job, rank), float(jumps[index, job, rank])
            sure = self._lasting.is_sure(index, job, rank, jump)
            found[index, job, rank] = self._is_news(window, float(medians[index, job, rank]), jump, known, sure=sure)
        level: Floats = np.where(found, medians, -np.inf).max(axis=0)
        return level

    def _gross(self, excess: Floats, steps: int, warm_up: int, least: Floats, relief: NDArray[np.int64]) -> Floats:
        """Return the level of ranks that have long been far above all they ever were, [jobs, ranks]; else -inf."""
        past = np.arange(max(steps - GROSS_STEPS - PAST_STEPS, warm_up) + 1, steps - GROSS_STEPS + 1)
        if len(past) < FEWEST:
            return np.full(excess.shape[1:], -np.inf)
        before, now = excess[past % self._kept], excess[np.arange(steps - GROSS_STEPS + 1, steps + 1) % self._kept]
        usual, level = median(before), self._medians[steps % self._kept, self._lengths.index(GROSS_STEPS)]
        jump = level - usual
        late = (now > level - jump / 2).sum(axis=0) >= GROSS_SHARE * GROSS_STEPS
        with np.errstate(invalid="ignore"):
            far = (jump >= GROSS * 1.4826 * median(np.abs(before - usual))) & (jump >= 2.0 * least[1])
            far &= late & (level >= least[0]) & is_new(steps, np.array([GROSS_STEPS]), relief)[0]
        return np.where(far, level, -np.inf)

    def _append_medians(self, excess: Floats, steps: int, warm_up: int) -> None:
        row = steps % self._kept
        newest = excess[np.arange(max(steps - self._lengths[-1], warm_up) + 1, steps + 1) % self._kept]
        for index, length in enumerate(self._lengths):
            is_there = length <= len(newest) or length == AROUND
            self._medians[row, index] = median(newest[-length:]) if is_there else np.nan
        self._around[row] = excess[row] - self._medians[row, self._lengths.index(AROUND)]

    def _remember(self, sizes: Floats, steps: int) -> None:
        """Let the greatest of what was seen a while ago count; what may be an episode's beginning not yet."""
        known = np.isfinite(sizes)
        self._past[steps % self._kept] = np.where(known, sizes, 0.0).max(axis=2, keepdims=True)
        began = steps > self._after
        pairs, then = self._pairs[began], (steps - self._after[began]) % self._kept
        past = self._past[then, pairs]
        self._looks[pairs] += past > 0.0
        self._seen[pairs] = np.maximum(FADING * self._seen[pairs], past)

    def _is_news(self, window: Floats, level: float, jump: float, known: Floats, *, sure: bool = False) -> bool:
        """Whether so many late steps of a window are more than the late steps seen before explain.

        The bound of Chernoff (1952) on a binomial tail, for as many independent steps as the window holds.

        Args:
            window: Log excess, [steps].
            level: Its median.
            jump: How far that lies above what was before.
            known: The steps before the window, each minus the median around it.
            sure: Whether the jump is beyond the noise's wandering.
        """
        if len(known) < FEWEST:
            return False
        half, scale = jump / 2, core_scale(known)
        late = np.count_nonzero(window > level - half) / len(window)
        share = (np.count_nonzero(known > half) + DOUBT) / (len(known) + 2.0 * DOUBT)
        if sure or jump >= STRONG * scale:
            # Only single late steps could feign it, and how often one follows another.
            independent = float(len(window))
            share = max(share, how_often_again(np.abs(known) > half, share))
        else:
            r = float(autocorrelation(known, np.asarray(scale)))
            independent = len(window) * (1.0 - r) / (1.0 + r)
        return independent * divergence(late, share) >= self._rare

    def _known(self, length: int, steps: int, job: int, rank: int) -> Floats:
        """The steps before the window, each minus the median around it."""
        past = np.arange(max(steps - self._kept + 1, 1), max(steps - length, 0) + 1) % self._kept
        around = self._around[past, job, rank]
        known: Floats = around[np.isfinite(around)]
        return known


def is_new(steps: int, lengths: NDArray[np.int64], relief: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether windows of such lengths that end now hold nothing of an episode that is over, [windows, jobs, ranks]."""
    new: NDArray[np.bool_] = (steps - lengths.reshape(-1, 1, 1) >= relief) | (relief == 0)
    return new


# -------------------------------------------------------------------------------------------------
# A level that shifted and stayed: the steps since then against all before, with the noise learnt from both sides.
#
# `ChangePoint` knows the noise from what was before; where that was short, or healthier than what follows, its bars
# stay too high for good. Here a place is assumed at which the level changed, both sides' residuals tell how noisy the
# job is, and the difference of the two levels is held against that. It takes longer windows than any other way, so it
# is the last to speak: it finds what is plain to see in a whole run although no ten steps of it are. For few ranks.

SHIFT_LENGTHS = tuple(range(48, 193, 12))
"""Steps since the place at which the level may have shifted: one that is off by many makes the shift pass for noise."""

SHIFT_FEWEST = 24
"""Fewer steps before that place tell nothing."""

EVERY = 12
"""A look every so many steps; every one of `SHIFT_LENGTHS` is a multiple."""

LOOKS = 24.0
"""Looks at windows of L steps are as rare as one in L/24 of single ones: neighbouring windows are nearly the same."""

SHIFT_SURE = 1.5
"""Standard errors between the estimated autocorrelation and the one that is reckoned with."""

SHIFT_DOUBT = 4.0
"""It looks at dozens of steps: slow noise under fast noise is believed sooner than by others (`noise.decay`)."""

BLOCK, BEYOND = 12, 1.3
"""Means of so many steps whose variance is so much more than the autocorrelations say are believed instead."""

SHIFT_EFFICIENCY = 0.6
SHIFT_RAREST, SHIFT_FADING = 2.0, 0.9999
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
        self._heights = [NormalDist().inv_cdf(1.0 - min(chance * length / LOOKS, 0.01)) for length in SHIFT_LENGTHS]
        self._shape = shape
        self._seen = np.zeros((len(SHIFT_LENGTHS), shape[0], 1))
        self._recent = np.zeros((max(SHIFT_LENGTHS) // EVERY + 1, len(SHIFT_LENGTHS), shape[0], 1))

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
        numbers = np.arange(max(steps - max(SHIFT_LENGTHS) - PAST_STEPS, warm_up) + 1, steps + 1)
        rows = np.where(numbers.reshape(-1, 1, 1) > relief, excess[numbers % len(excess)], np.nan)
        for index, length in enumerate(SHIFT_LENGTHS):
            if len(rows) - length < SHIFT_FEWEST:
                break
            found = np.maximum(found, self._judge(index, rows[-length - PAST_STEPS :], steps, least))
        return found

    def _judge(self, index: int, rows: Floats, steps: int, least: Floats) -> Floats:
        length = SHIFT_LENGTHS[index]
        found = compare(rows, length, least[1])
        self._remember(index, found.height, steps)
        if not np.any(found.height >= least[1]):
            return np.full(self._shape, -np.inf)
        since = rows[-length:]
        level = median(since)
        with np.errstate(invalid="ignore"):
            bar = student(self._heights[index], found.freedom) * found.error
            bar = np.maximum(bar, SHIFT_RAREST * self._seen[index])
            news = (found.height >= np.maximum(bar, least[1])) & (level >= least[0])
        if not news.any():
            return np.full(self._shape, -np.inf)
        return np.where(news & _is_carried(since, found.middle), level, -np.inf)

    def _remember(self, index: int, height: Floats, steps: int) -> None:
        """Let the greatest of what was seen at least a window ago count; keep what is seen now."""
        slots, now = len(self._recent), steps // EVERY
        self._recent[now % slots, index] = known_or_0(np.abs(height)).max(axis=1, keepdims=True)
        then = self._recent[(now - SHIFT_LENGTHS[index] // EVERY) % slots, index]
        self._seen[index] = np.maximum(SHIFT_FADING**EVERY * self._seen[index], then)


def compare(rows: Floats, length: int, least: Floats | float = -np.inf) -> Difference:
    """Hold the level of the last `length` rows against that of the rows before.

    Levels are means of what is left when single steps are cut at 2.5 standard deviations of the core. The error of a
    mean comes from two autocorrelations, which tell slow noise under fast noise apart (an ARMA(1, 1) process; Box and
    Jenkins 1970), or from means of 12 steps where those vary by more.

    Args:
        rows: Log excess, [steps, jobs, ranks]; NaN where missing.
        length: How many of the rows are after the supposed change.
        least: Where no height is as much, the error, which takes longest, is not worked out and NaN.

    Returns:
        Height, its standard error, the degrees of freedom of that, and the middle between both levels; heights are NaN
        where too little is known.
    """
    sides = rows[:-length], rows[-length:]
    medians = [median(side) for side in sides]
    away = [side - middle for side, middle in zip(sides, medians, strict=True)]
    limit = CUT * np.maximum(1.4826 * median(np.abs(np.concatenate(away))), SMALLEST)
    counts = [np.sum(~np.isnan(side), axis=0) for side in sides]
    enough = (counts[0] >= SHIFT_FEWEST) & (2 * counts[1] >= length)
    cores = [np.clip(residuals, -limit, limit) for residuals in away]
    means = [np.nansum(core, axis=0) / np.maximum(count, 1) for core, count in zip(cores, counts, strict=True)]
    cores = [known_or_0(core - mean) for core, mean in zip(cores, means, strict=True)]
    levels = [middle + mean for middle, mean in zip(medians, means, strict=True)]
    height = np.where(enough, levels[1] - levels[0], np.nan)
    unknown = np.full_like(height, np.nan)
    error, freedom = _error(cores, counts) if np.any(height >= least) else (unknown, unknown)
    return Difference(height, error, freedom, levels[0] + (levels[1] - levels[0]) / 2.0)


def _error(cores: list[Floats], counts: list[NDArray[np.intp]]) -> tuple[Floats, Floats]:
    """Return the standard error of the difference of two means, and its degrees of freedom, [jobs, ranks] each."""
    known = np.maximum(counts[0] + counts[1], 2)
    core = np.concatenate(cores)
    square = no_less_than_usual(np.maximum((core * core).sum(axis=0) / (known - 1), SMALLEST**2))
    first, later = _autocorrelations(core, known, SHIFT_SURE)
    variance = square * sum(mixed_variance(np.maximum(count, 1.0), first, later) for count in counts)
    freedom = SHIFT_EFFICIENCY * known * independent_share(*_autocorrelations(core, known, 0.0))
    blocks = [side[len(side) % BLOCK :].reshape(-1, BLOCK, *side.shape[1:]).mean(axis=1) for side in cores]
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
    return first, decay(first, second, known.astype(float), SHIFT_DOUBT)


def _is_carried(since: Floats, middle: Floats) -> NDArray[np.bool_]:
    """Whether most steps, and the median of each part of them, lie beyond the middle, [jobs, ranks]."""
    with np.errstate(invalid="ignore"):
        most = (since > middle).sum(axis=0) >= MOST * np.maximum(np.sum(~np.isnan(since), axis=0), 1)
        parts = np.all([median(part) > middle for part in np.array_split(since, PARTS)], axis=0)
    carried: NDArray[np.bool_] = most & parts
    return carried
