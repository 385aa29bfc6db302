"""The arithmetic of the detector: means of log excess over windows, for many ranks at once, one step at a time.

See docs/design/0002-detector.md for why it is built like this and what it reaches.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.slow_rank.change_point import SMALLEST, ChangePoint, LevelShift, is_new
from ringside.monitor.slow_rank.noise import CUT, MANY, Noise, decay, mixed_variance, raised_autocorrelation
from ringside.monitor.stats import EFFICIENCY, MEDIAN, Floats, core_scale, student

EFFECT = math.log(1.05)
"""The effect gate: nothing below 5% is ever reported."""

TOLERATED, TOLERATED_LEAST = 0.06, 0.035
"""A constant excess up to here is a difference between healthy ranks (±3%, seen from the slowest, or the middle)."""

PERSISTENCE = 6
"""No alarm rests on fewer steps than this, nor on less than half of its window."""

WINDOWS = (6, 12, 24, 48, 96, 192)
"""Steps whose mean excess is judged: short ones find much at once, long ones find little in noise."""

_LENGTHS = np.array(WINDOWS)
_BY_WINDOW = _LENGTHS.reshape(-1, 1, 1)

SHORT = 12
"""Of windows up to here two in three steps must be late by half of what their mean must reach, of longer ones half."""

SCALES = (3, 6, 12, 24, 48, 96)
"""Steps of the windows whose differences tell how far means wander."""

WARM_UP = 3
"""Steps at the start that count for nothing: allocations, DDP's bucket rebuild, cold caches."""

FALSE_ALARM_STEPS = 86_400 * 10
CERTAIN = 3.7
"""Standard deviations by which an excess must be missing before an episode is over."""

GONE = 0.06
"""An excess this far above the usual is not missing."""

FIRST_LOOK = 8
YOUNG = 64
LATEST_DELAY, LATEST_DELAY_OF_MANY = 192, 48
"""Noise is learnt from steps older than a third of the job, or than this: what turns out an episode teaches nothing. Of
many ranks one spoils little of it."""

AGAIN, SETTLED = 32, 64
"""The noise of few ranks is learnt twice, with and without the first steps; so many settle the second."""

DOUBTFUL = 0.7
REFRESH = 8
KEPT = 400
"""Steps that are remembered: the longest window, ending as long ago as noise is learnt from."""


class WindowTest:
    """Watches `[jobs, ranks]` of log excess; an episode opens when the mean of a window is too great and closes after.

    Args:
        jobs: Independent jobs side by side (1 but in benchmarks).
        ranks: Ranks per job.

    Attributes:
        steps: How many steps were seen.
        open: Which ranks are in an episode, bool [jobs, ranks].
        usual: What each rank usually exceeds the others by, as far as that is known, [jobs, ranks].
        onset: Number of steps before the episode that opened last, int [jobs, ranks]; 0 where that was in warm-up.
        relief: Number of steps before the excess began to be missing, int [jobs, ranks]: where an episode ended.
    """

    def __init__(self, jobs: int, ranks: int) -> None:
        shape = (jobs, ranks)
        self.noise = Noise(shape, WINDOWS, SCALES)
        self.steps = 0
        self.open = np.zeros(shape, dtype=bool)
        self.usual, self._height = np.zeros((2, *shape))
        self.onset, self.relief, self._opened = np.zeros((3, *shape), dtype=np.int64)
        self._learnt = WARM_UP
        self._again = Noise(shape, WINDOWS, SCALES) if ranks < MANY else None
        self._many = ranks >= MANY
        self._delay = LATEST_DELAY_OF_MANY if self._many else LATEST_DELAY
        self._excess = np.full((KEPT, *shape), np.nan)
        self._sums = np.zeros((KEPT, 3, *shape))  # of what counts, of late steps, of known steps, since the start
        self._bars, self._errors = np.full((2, len(WINDOWS), *shape), np.inf)
        chance = 1.0 / (FALSE_ALARM_STEPS * ranks)
        self._z = NormalDist().inv_cdf(1.0 - chance)
        self._jumps = None if self._many else ChangePoint(shape, KEPT, chance, self._z)
        self._shifts = None if self._many else LevelShift(shape, chance)

    def update(self, excess: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Take in one step of log excess [jobs, ranks]; return who just opened and who just closed an episode."""
        self.steps += 1
        self._count(excess)
        nobody = np.zeros_like(self.open)
        if self.steps < WARM_UP + PERSISTENCE:
            return nobody, nobody
        means, late = self._window_means(self.steps)
        self._learn(means)
        opened = self._open(means, late, self._jumped())
        closed = self._close(means, opened) if self.open.any() else nobody
        return opened, closed

    def _count(self, excess: Floats) -> None:
        """Add a step to the sums that every window is a difference of."""
        slot, before = self.steps % KEPT, (self.steps - 1) % KEPT
        known = ~np.isnan(excess) & (self.steps > WARM_UP)
        limit = np.maximum(self.usual, 0.0) + self.noise.clip
        self._excess[slot] = excess
        sums = self._sums[slot]
        sums[0] = np.where(known, np.minimum(np.maximum(excess, -limit), limit), 0.0)
        sums[1] = known & (excess > np.maximum(self.usual, 0.0) + EFFECT / 2)
        sums[2] = known
        sums += self._sums[before]

    def _window_means(self, end: int) -> tuple[Floats, NDArray[np.bool_]]:
        """Return the mean excess of the windows that end after step number `end`, and which are mostly late steps.

        Both are [windows, jobs, ranks]; a mean is NaN where less than half of the window is known.
        """
        begins = np.maximum(end - _LENGTHS, 0)
        inside = self._sums[end % KEPT] - self._sums[begins % KEPT]
        total, late, known = inside[:, 0], inside[:, 1], inside[:, 2]
        enough = (known >= PERSISTENCE) & (2 * known >= _BY_WINDOW)
        means = np.where(enough, total / np.maximum(known, 1.0), np.nan)
        return means, (late >= PERSISTENCE) & (2 * late > known)

    def _weigh(self) -> None:
        """Set the bars: what the mean of each window must reach, [windows, jobs, ranks].

        A healthy rank stays below both: its usual excess plus what chance adds to the mean and to our knowledge of the
        usual, and the greatest excess that is tolerated for good plus what chance adds to the mean.
        """
        tolerated = self.noise.tolerated(TOLERATED_LEAST, TOLERATED)
        self._bars, self._errors, level = self._weighed(self.noise, tolerated)
        self.usual = np.minimum(level, tolerated)
        if self._again is not None:
            settled = self._again.steps >= SETTLED
            bars, errors, _ = self._weighed(self._again, tolerated)
            self._bars = np.where(settled, np.minimum(bars, self._bars), self._bars)
            self._errors = np.where(settled, np.minimum(errors, self._errors), self._errors)

    def _weighed(self, noise: Noise, tolerated: Floats) -> tuple[Floats, Floats, Floats]:
        """Return bars and standard errors of window means, and usual excesses, by one estimate of the noise."""
        errors = np.sqrt(noise.variances())
        level, error = noise.baseline()
        heights = student(self._z, noise.wander.freedom()) + noise.stretch(self._z)
        known = np.clip(level, 0.0, tolerated) + heights * np.hypot(errors, error)
        bars = np.maximum(np.minimum(known, tolerated + heights * errors), EFFECT + errors)
        return bars, errors, level

    def _jumped(self) -> Floats:
        """Return the level that each of few ranks has jumped or shifted to, [jobs, ranks]; NaN where it did not."""
        if self._jumps is None or self._shifts is None:
            return np.full(self.open.shape, np.nan)
        usual = np.maximum(self.usual, 0.0)
        least = np.full((2, *usual.shape), EFFECT)
        least[0] += usual
        clean = self._is_clean(self.steps - self._jumps.span)
        relief = self._mirrored(self.relief)
        jumped = self._jumps.update(self._excess, self.steps, WARM_UP, clean, least, relief)
        shifted = self._shifts.update(self._excess, self.steps, WARM_UP, relief, least)
        return np.where(np.isfinite(shifted), np.fmax(jumped, shifted), jumped)

    def _open(self, means: Floats, late: NDArray[np.bool_], jumped: Floats) -> NDArray[np.bool_]:
        with np.errstate(invalid="ignore"):
            alarms = (means >= self._bars) & late & is_new(self.steps, _LENGTHS, self.relief)
        opened: NDArray[np.bool_] = (alarms.any(axis=0) | np.isfinite(jumped)) & ~self.open
        for job, rank in np.argwhere(opened):
            alarms[:, job, rank] &= self._is_carried_by_most(int(job), int(rank))
            heights = np.append(means[alarms[:, job, rank], job, rank], jumped[job, rank])
            if not np.isfinite(heights).any():
                opened[job, rank] = False
                continue
            height = float(np.nanmax(heights))
            usual = max(float(self.usual[job, rank]), 0.0)
            self._height[job, rank] = min((usual + height) / 2.0, usual + GONE)
            onset = self._change(int(job), int(rank), int(self.relief[job, rank]), (usual + height) / 2.0, 1.0)
            self.onset[job, rank] = 0 if onset <= WARM_UP else onset
            self._opened[job, rank] = self.steps
        self.open |= opened
        return opened

    def _is_carried_by_most(self, job: int, rank: int) -> NDArray[np.bool_]:
        """Whether most steps of each window are late by half of what its mean must reach, not few by much."""
        rows = self._excess[np.arange(self.steps - WINDOWS[-1] + 1, self.steps + 1) % KEPT, job, rank]
        carried = []
        for window, bar in zip(WINDOWS, self._bars[:, job, rank], strict=True):
            known = np.sort(rows[-window:][~np.isnan(rows[-window:])])
            carried.append(len(known) > 0 and known[len(known) // (3 if window <= SHORT else 2)] >= bar / 2)
        return np.array(carried)

    def _close(self, means: Floats, opened: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """An episode ends when the mean of a window inside it is surely nearer to the usual than to the excess."""
        inside = self.steps - self.onset >= _BY_WINDOW
        with np.errstate(invalid="ignore"):
            missing = (means <= self._height - CERTAIN * self._errors) & inside
        closed: NDArray[np.bool_] = (missing.any(axis=0) | self._is_mended()) & self.open & ~opened
        for job, rank in np.argwhere(closed):
            first = int(self._opened[job, rank]) - PERSISTENCE
            self.relief[job, rank] = self._change(int(job), int(rank), first, float(self._height[job, rank]), -1.0)
        self.open &= ~closed
        return closed

    def _is_mended(self) -> NDArray[np.bool_]:
        """Whether so few of the last steps of one of few ranks are late that its episode is over, [jobs, ranks]."""
        mended = np.zeros_like(self.open)
        for job, rank in np.argwhere(self.open) if self._jumps is not None else ():
            before = self._rows(WARM_UP, int(self.onset[job, rank]), job, rank)
            since = self._rows(int(self._opened[job, rank]), self.steps, job, rank)
            mended[job, rank] = has_recovered(before, since, self._height[job, rank])
        return mended

    def _rows(self, first: int, last: int, job: int, rank: int) -> Floats:
        """Log excess of the steps numbered first < step <= last, as far as they are remembered."""
        rows: Floats = self._excess[np.arange(max(first, self.steps - KEPT) + 1, last + 1) % KEPT, job, rank]
        return rows

    def _change(self, job: int, rank: int, first: int, middle: float, sign: float) -> int:
        """Return the number of steps before the excess went beyond `middle`: where the sum of the rest is greatest.

        For a step between two levels that is the likeliest place (Page 1955).
        """
        first = max(first, self.steps - KEPT + 1, WARM_UP)
        rows = self._rows(first, self.steps, job, rank)
        clip = abs(middle) if self._jumps is not None else 2.0 * abs(middle) + float(self.noise.clip[job, 0])
        beyond = np.nan_to_num(np.clip(sign * (rows - middle), -clip, clip))
        return first + int(np.argmax(np.cumsum(beyond[::-1])[::-1]))

    def _learn(self, means: Floats) -> None:
        if self.steps == FIRST_LOOK + WARM_UP:
            self.noise.begin(self._excess[np.arange(WARM_UP + 1, self.steps + 1)])
        if self.steps < FIRST_LOOK + WARM_UP:
            return
        until = self.steps - min(self.steps // 3, self._delay)
        while self._learnt < until:
            self._learnt += 1
            step = self._learnt
            wandered = self._differences(step) if self._many else self._past(step)
            lesson = self._excess[step % KEPT], self._trust(step, means), wandered
            self.noise.learn(*lesson)
            self._learn_again(*lesson)
        if self.steps <= YOUNG or self.steps % REFRESH == 0:
            self._weigh()

    def _learn_again(self, excess: Floats, weight: Floats, means: Floats) -> None:
        """Learn the noise of few ranks again, without the first steps: a change among those looks like noise."""
        if self._again is None or self._learnt <= AGAIN:
            return
        if self._learnt == AGAIN + 1:
            self._again.begin(self._excess[np.arange(AGAIN + 1, AGAIN + FIRST_LOOK + 1)])
        means = np.where((self._learnt - _LENGTHS >= AGAIN).reshape(-1, 1, 1), means, np.nan)
        self._again.learn(excess, weight, means)
        if self._learnt > 10 * AGAIN:  # by now the first steps weigh nothing
            self._again = None

    def _past(self, end: int) -> Floats:
        """The means of windows that ended some time ago; NaN where they reach into the warm-up or an episode."""
        means, _ = self._window_means(end)
        return np.where(self._is_clean(end - _LENGTHS), means, np.nan)

    def _differences(self, end: int) -> Floats:
        """Means of windows, by scale, minus those of the windows right before; NaN likewise."""
        scales = np.array(SCALES)
        now, before, first = (self._sums[np.maximum(end - scales * back, 0) % KEPT] for back in (0, 1, 2))
        late, early = now - before, before - first
        known = np.minimum(late[:, 2], early[:, 2])
        enough = (2 * known >= scales.reshape(-1, 1, 1)) & self._is_clean(end - 2 * scales)
        means = (window[:, 0] / np.maximum(window[:, 2], 1.0) for window in (late, early))
        return np.where(enough, next(means) - next(means), np.nan)

    def _is_clean(self, begins: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether steps after each of `begins` lie after warm-up and the last episode, [begins, jobs, ranks]."""
        clean: NDArray[np.bool_] = begins.reshape(-1, 1, 1) >= np.maximum(self._mirrored(self.relief), WARM_UP)
        return clean

    def _trust(self, step: int, means: Floats) -> Floats:
        """Weights for learning from a step some time ago: none where it may belong to an episode."""
        within = (self.onset < step) & (self.open | (step <= self.relief)) & (self._opened > 0)
        with np.errstate(invalid="ignore"):
            suspicious = (means >= DOUBTFUL * self._bars).any(axis=0)
        return np.where(self._mirrored(within | suspicious), 0.0, 1.0)

    def _mirrored(self, values: NDArray[Any]) -> NDArray[Any]:
        """The greatest of all ranks for each of very few, since the others' excess mirrors a culprit's."""
        if values.shape[1] > 3:
            return values
        mirrored = np.empty_like(values)
        mirrored[:] = values.max(axis=1, keepdims=True)
        return mirrored


# -------------------------------------------------------------------------------------------------
# Whether an episode is over, by what few great steps cannot spoil: medians, and how few of the last steps are late.
#
# An episode ends, too, when the mean of a window is surely too small for it, and the noise of means is what was
# learnt from all that happened, interruptions included. Where those are rough and rare, that takes hundreds of
# steps although everybody sees at once that it is over. For few ranks.

MENDED_LENGTHS = (12, 18, 24, 36, 48, 96)
"""Steps whose median is held against the bar."""

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
