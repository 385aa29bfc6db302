"""How rarely a healthy rank of a young job seems to have lasted late, against what the bars claim."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from ringside.monitor.slow_rank.change_point import WINDOWS, YOUNG_REFRESH, SustainedShift
from ringside.monitor.stats import Floats, log_excess, median

PAST, WARM_UP, Z = 60, 3, 3.0
CHANCE = 1.0 - NormalDist().cdf(Z)


def excess_of(jobs: int, ranks: int, *, later: float, fast: float) -> Floats:
    """Log excess [steps, jobs, ranks]: 10% of noise fading by `later`, a share `fast` of it independent."""
    rng = np.random.default_rng(3)
    steps = WARM_UP + PAST + max(WINDOWS)
    slow = np.zeros((jobs, ranks))
    rows = []
    for step in range(steps + 100):
        slow = later * slow + np.sqrt(1.0 - later**2) * rng.standard_normal((jobs, ranks))
        own = np.sqrt(1.0 - fast) * slow + np.sqrt(fast) * rng.standard_normal((jobs, ranks))
        if step >= 100:
            rows.append(log_excess(np.exp(0.1 * own)))
    return np.stack(rows)


def places(shape: tuple[int, int]) -> list[list[tuple[int, int]]]:
    return [[(job, rank) for rank in range(shape[1])] for job in range(shape[0])]


def sure(excess: Floats, length: int) -> Floats:
    """Tell whose last `length` steps after `PAST` others are beyond all doubt, bool [jobs, ranks]."""
    steps = WARM_UP + PAST + length
    steps += steps % YOUNG_REFRESH  # it learns anew only then
    rows = excess[:steps]
    ring = np.concatenate([rows[:1], rows])  # indexed by number of the step, from 1
    shape = rows.shape[1:]
    lasting = SustainedShift(shape, Z)
    medians = np.stack([median(rows[-window:]) for window in WINDOWS])
    index = WINDOWS.index(length)
    jumps = lasting.update(ring, medians, steps, np.zeros(shape, dtype=np.int64), WARM_UP)[index]
    return np.array([[lasting.is_sure(index, *at, jumps[at]) for at in row] for row in places(shape)])


@pytest.mark.parametrize("length", [9, 18, 36])
def test_a_young_job_s_bars_keep_what_they_claim_where_fast_noise_hides_slow_noise(length: int) -> None:
    excess = excess_of(2500, 4, later=0.9, fast=0.5)
    assert np.mean(sure(excess, length)) <= 2.0 * CHANCE  # by each rank's own estimate alone: 0.3, 1.3 and 3.3


def test_a_lasting_excess_is_still_seen() -> None:
    excess = excess_of(200, 4, later=0.0, fast=1.0)
    excess[WARM_UP + PAST :, :, 0] += 0.3
    assert np.mean(sure(excess, 18)[:, 0]) >= 0.8
