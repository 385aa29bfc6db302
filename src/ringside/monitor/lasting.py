"""An excess that lasts, judged by what late steps cannot spoil: medians of windows against the median of all before.

`screen.py` does this with means, whose noise a few late steps blow up. Here scale and autocorrelation are those of the
core of the noise, and late steps have to be explained by how often they came before (`jump.py`). For few ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.excess import Floats
from ringside.monitor.robust import EFFICIENCY, MEDIAN, autocorrelation, median, no_less_than_usual
from ringside.monitor.student import student
from ringside.monitor.wander import mean_variance

WINDOWS = (9, 12, 18, 24, 36, 48)
PAST_STEPS = 192
FEWEST = 24
YOUNG, YOUNG_REFRESH, REFRESH = 256, 2, 16
CAUTION = 1.2
"""For several windows at once, and for noise whose core is no normal one."""

PLAIN = 0.4
"""Noise of no more autocorrelation may be judged by how often steps are late; more of it is not known well enough."""

SMALLEST = 0.004
"""No noise is taken for smaller than this."""


class Lasting:
    """Levels of windows over `[jobs, ranks]` of log excess, and what chance makes of them.

    Args:
        shape: `(jobs, ranks)`.
        z: How rarely a healthy rank may seem late, as standard deviations of a normal variable.
    """

    def __init__(self, shape: tuple[int, int], z: float) -> None:
        self._z = z
        self._usual = np.zeros((len(WINDOWS), *shape))
        self._bars = np.full((len(WINDOWS), *shape), np.inf)
        self._least = np.full((len(WINDOWS), *shape), np.inf)

    def is_sure(self, index: int, job: int, rank: int, jump: float) -> bool:
        """Whether a jump is beyond all doubt about scale and autocorrelation, as far as the noise has a core."""
        return bool(jump >= self._bars[index, job, rank])

    def look(self, excess: Floats, medians: Floats, steps: int, relief: NDArray[np.int64], warm_up: int) -> Floats:
        """Return how far the windows that end now lie above all before, where that may be news, [windows, jobs, ranks].

        NaN where it is none.

        Args:
            excess: The last steps, a ring indexed by number of the step, [kept, jobs, ranks].
            medians: Medians of the windows that end now, [windows, jobs, ranks].
            steps: Number of the newest step, from 1.
            relief: The step at which each rank's last episode ended, [jobs, ranks].
            warm_up: Steps at the start that count for nothing.
        """
        if steps % (YOUNG_REFRESH if steps < YOUNG else REFRESH) == 0:
            self._weigh(excess, steps, relief, warm_up)
        jumps = medians - self._usual
        with np.errstate(invalid="ignore"):
            news: Floats = np.where(jumps >= self._least, jumps, np.nan)
        return news

    def _weigh(self, excess: Floats, steps: int, relief: NDArray[np.int64], warm_up: int) -> None:
        """Learn the level and the noise of all before the windows, and set the bars.

        In a young job every window has a past of its own; later it hardly matters where that ends.
        """
        young = steps < YOUNG
        for end, indices in self._ends(steps, young):
            past = np.arange(max(end - PAST_STEPS, warm_up) + 1, end + 1)
            if len(past) < FEWEST:
                continue
            rows = np.where(past.reshape(-1, 1, 1) > relief, excess[past % len(excess)], np.nan)
            usual = median(rows)
            scale = np.maximum(1.4826 * median(np.abs(rows - usual)), SMALLEST)
            known = np.sum(~np.isnan(rows), axis=0)
            r = no_less_than_usual(autocorrelation(rows - usual, scale), known >= FEWEST)
            for index in indices:
                self._usual[index] = usual
                self._set_bars(index, scale, r, known)

    @staticmethod
    def _ends(steps: int, young: bool) -> list[tuple[int, list[int]]]:
        if young:
            return [(steps - length, [index]) for index, length in enumerate(WINDOWS)]
        return [(steps - WINDOWS[-1], list(range(len(WINDOWS))))]

    def _set_bars(self, index: int, scale: Floats, r: Floats, known: NDArray[np.int64]) -> None:
        steps = np.maximum(known, 1.0)
        variance = mean_variance(np.float64(WINDOWS[index]), r) + mean_variance(steps, r)
        error = np.where(known >= FEWEST, scale * np.sqrt(MEDIAN * variance), np.inf)
        freedom = np.maximum(EFFICIENCY * steps * (1.0 - r * r) / (1.0 + r * r), 2.0)
        self._bars[index] = CAUTION * student(self._z, freedom) * error
        self._least[index] = np.where(r <= PLAIN, CAUTION * self._z * error, self._bars[index])
