"""The arithmetic of the detector: clipped CUSUMs of log excess, for many ranks at once, one step at a time.

See docs/design/0002-detector.md for why it is built like this and what it reaches.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.excess import Floats
from ringside.monitor.noise import Noise

EFFECT = math.log(1.05)
"""The effect gate: nothing below 5 % is ever reported."""

TOLERATED = 0.06
"""A constant excess up to here is a difference between healthy ranks (±3 %, seen from the slowest)."""

SLACKS = (0.025, 0.06, 0.15)
"""What each CUSUM subtracts per step: the small one finds small effects in quiet jobs, the large one works in noise."""

PERSISTENCE = 6
"""No alarm rests on fewer steps than this: each step may fill at most 1/6 of a CUSUM's threshold."""

WARM_UP = 3
"""Steps at the start that count for nothing: allocations, DDP's bucket rebuild, cold caches."""

FALSE_ALARM_STEPS = 86_400 * 10

DELAY = 24
"""Once `SETTLED` steps are known, noise is learnt from steps this old: what turns out to be an episode is left out."""

EARLY_DELAY = 6
"""Until then levels are learnt from steps this old, and the noise is judged by differences of successive steps."""

SETTLED = 32
FIRST_LOOK = 5
"""Steps after the warm-up whose median is each rank's first level."""


class Screen:
    """Watches `[jobs, ranks]` of log excess; an episode opens when a CUSUM crosses its threshold and closes after it.

    Args:
        jobs: Independent jobs side by side (1 but in benchmarks).
        ranks: Ranks per job.

    Attributes:
        open: Which ranks are in an episode, bool [jobs, ranks].
        onset: Number of steps before the leading CUSUM last left zero, int [jobs, ranks]; 0 where that was in warm-up.
        relief: Number of steps before the excess began to be missing, int [jobs, ranks]: where an episode ended.
    """

    def __init__(self, jobs: int, ranks: int) -> None:
        shape = (jobs, ranks)
        self.noise = Noise(shape)
        self.steps = 0
        self.open = np.zeros(shape, dtype=bool)
        self.onset = np.zeros(shape, dtype=np.int64)
        self._slack = np.array(SLACKS).reshape(-1, 1, 1)
        self._sums = np.zeros((len(SLACKS), *shape))
        self._starts = np.zeros((len(SLACKS), *shape), dtype=np.int64)
        self._excess_sums = np.zeros((len(SLACKS), *shape))
        self.relief = np.zeros(shape, dtype=np.int64)
        self._relief_sums = np.zeros(shape)
        self._delayed = np.full((DELAY, *shape), np.nan)
        self._log_odds = math.log(FALSE_ALARM_STEPS * ranks * len(SLACKS))

    def update(self, excess: Floats) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Take in one step of log excess [jobs, ranks]; return who just opened and who just closed an episode."""
        self.steps += 1
        if self.steps <= WARM_UP:
            nobody = np.zeros_like(self.open)
            return nobody, nobody
        known = ~np.isnan(excess)
        reference = self._reference()
        limit = reference + self.noise.clip
        clipped = np.where(known, np.minimum(np.maximum(excess, -limit), limit), 0.0)
        thresholds = self._thresholds()
        self._accumulate(clipped, reference, thresholds, known)
        opened = self._open(thresholds)
        closed = self._close(clipped, known & ~opened)
        self._learn(excess, thresholds)
        return opened, closed

    def _reference(self) -> Floats:
        """What a rank may exceed the others by: its usual excess, as surely as that is known, up to `TOLERATED`."""
        usual = self.noise.level + self.noise.level_error
        allowed: Floats = np.minimum(np.maximum(usual, 0.0), self._tolerated())
        return allowed

    def _tolerated(self) -> Floats | float:
        """How far healthy ranks of this job may lie apart for good: measured where there are ranks enough."""
        if self.open.shape[1] < 8:
            return TOLERATED
        spread = 1.4826 * np.median(np.abs(self.noise.level), axis=1, keepdims=True)
        return np.minimum(3.0 * spread + 0.01, TOLERATED)

    def _thresholds(self) -> Floats:
        """Heights [slacks, jobs, ranks] that chance reaches once per `FALSE_ALARM_STEPS`.

        A random walk of variance v per step and drift −k climbs to h with probability exp(−2 k h / v). Steps that
        lean to the late side (third moment m) make that exponent smaller by the factor 1 − 2 k m / (3 v²) or so,
        less where persistence already cuts them short.
        """
        heights = self.noise.variance * (self._log_odds / 2.0) / self._slack
        uncut = np.minimum(heights / (PERSISTENCE * self.noise.clip), 1.0)
        lean = (2.0 / 3.0) * self._slack * self.noise.lean * uncut**2
        heights = heights * (1.0 + lean + lean * lean)
        floors: Floats = np.maximum(heights, PERSISTENCE * self._slack)
        return floors

    def _accumulate(self, clipped: Floats, reference: Floats, thresholds: Floats, known: NDArray[np.bool_]) -> None:
        rise = np.minimum(clipped - reference - self._slack, thresholds / PERSISTENCE)
        sums = np.maximum(self._sums + np.where(known, rise, 0.0), 0.0)
        began = (self._sums <= 0.0) & (sums > 0.0)
        self._starts = np.where(began, self.steps - 1, self._starts)
        self._excess_sums = np.where(sums > 0.0, np.where(began, 0.0, self._excess_sums) + clipped, 0.0)
        self._sums = sums

    def _open(self, thresholds: Floats) -> NDArray[np.bool_]:
        lengths = np.maximum(self.steps - self._starts, 1)
        alarms = (self._sums >= thresholds) & (self._excess_sums >= EFFECT * lengths)
        opened: NDArray[np.bool_] = alarms.any(axis=0) & ~self.open
        if opened.any():
            leading = alarms.argmax(axis=0)
            starts = np.take_along_axis(self._starts, leading[None], axis=0)[0]
            self.onset = np.where(opened, np.where(starts <= WARM_UP, 0, starts), self.onset)
            self.open = self.open | opened
            self._relief_sums = np.where(opened, 0.0, self._relief_sums)
        return opened

    def _close(self, clipped: Floats, known: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """An episode ends when a CUSUM of *missing* excess crosses its threshold: at half the gate, not at zero."""
        closed: NDArray[np.bool_] = np.zeros_like(self.open)
        if not self.open.any():
            return closed
        height = np.maximum(self.noise.variance * (self._log_odds / 2.0) / (2 * EFFECT), PERSISTENCE * EFFECT / 2)
        fall = np.minimum(EFFECT / 2 + self._reference() / 2 - clipped, height / PERSISTENCE)
        sums = np.where(known & self.open, np.maximum(self._relief_sums + fall, 0.0), self._relief_sums)
        self.relief = np.where((self._relief_sums <= 0.0) & (sums > 0.0), self.steps - 1, self.relief)
        self._relief_sums = sums
        closed = np.logical_and(self.open, sums >= height)
        self.open = self.open & ~closed
        self._sums = np.where(closed, 0.0, self._sums)
        return closed

    def _learn(self, excess: Floats, thresholds: Floats) -> None:
        slot = self.steps % DELAY
        delayed, self._delayed[slot] = self._delayed[slot].copy(), excess
        if self.steps <= WARM_UP + FIRST_LOOK:
            if self.steps == WARM_UP + FIRST_LOOK:
                self.noise.begin(self._delayed[WARM_UP + 1 : self.steps + 1])
        elif self.steps <= SETTLED:
            if self.steps - EARLY_DELAY > WARM_UP + FIRST_LOOK:
                self.noise.learn(self._ago(EARLY_DELAY), self._trust(thresholds, EARLY_DELAY))
            self.noise.guess(self._latest(min(self.steps - WARM_UP, DELAY)))
        elif self.steps - DELAY > SETTLED - EARLY_DELAY:
            self.noise.learn(delayed, self._trust(thresholds, DELAY))

    def _ago(self, age: int) -> Floats:
        """The excess `age` steps ago, fewer than `DELAY`."""
        row: Floats = self._delayed[(self.steps - age) % DELAY]
        return row

    def _latest(self, count: int) -> Floats:
        """The last `count` steps in order, at most `DELAY`."""
        rows: Floats = self._delayed[np.arange(self.steps - count + 1, self.steps + 1) % DELAY]
        return rows

    def _trust(self, thresholds: Floats, age: int) -> Floats:
        """Weights for learning from the step `age` steps ago: none where it may belong to an episode."""
        inside = self._starts <= self.steps - age
        suspicious = (inside & (self._sums > 0.25 * thresholds)).any(axis=0)
        doubtful = suspicious | self.open | (self.steps - age < self.relief)
        if self.open.shape[1] <= 3:  # the others' excess mirrors the culprit's
            doubtful = np.broadcast_to(doubtful.any(axis=1, keepdims=True), doubtful.shape)
        return np.where(doubtful, 0.0, 1.0)
