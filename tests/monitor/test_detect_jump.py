"""Jumps of few ranks in rough noise: what is found at once, and what is no jump."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ringside.monitor import detect
from ringside.monitor.slow_rank.window_test import WindowTest
from ringside.monitor.stats import divergence, log_excess


def rough(seed: int, ranks: int, steps: int, share: float = 0.15) -> np.ndarray:
    """Own times of a busy machine: 2% jitter, and a share of each rank's steps late by 1.2 to 3.3 times."""
    rng = np.random.default_rng(seed)
    late = (rng.random((steps, ranks)) < share) * rng.uniform(0.2, 1.2, (steps, ranks))
    return 0.03 * np.exp(rng.normal(0, 0.02, (steps, ranks)) + late)


@pytest.mark.parametrize(("ranks", "steps"), [(2, 25), (3, 25), (8, 20)])
@pytest.mark.parametrize("seeds", [3, pytest.param(7, marks=pytest.mark.thorough)])
def test_a_slow_rank_is_named_within_two_dozen_steps_on_a_busy_machine(ranks: int, steps: int, seeds: int) -> None:
    delays, onsets = [], []
    for seed in range(seeds):
        own = rough(seed, ranks, 180)
        own[120:, 1] *= 1.3
        verdicts = detect(own)
        assert [(verdict.kind, verdict.ranks) for verdict in verdicts] == [("slow_rank", [1])]
        onsets.append(verdicts[0].since_step)
        delays.append(verdicts[0].detected_step + 1 - 120)
    assert np.median(delays) <= steps
    assert 118 <= np.median(onsets) <= 122


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 5), marks=pytest.mark.thorough)])
def test_late_steps_alone_name_nobody(seeds: range) -> None:
    for seed in seeds:
        for share in (0.05, 0.3):
            assert detect(rough(seed, 2, 400, share)) == []


def test_a_rank_that_returns_to_the_usual_is_not_slow_by_comparison() -> None:
    own = rough(1, 2, 300)
    own[:150, 0] *= 1.3
    assert [verdict.ranks for verdict in detect(own)] in ([], [[0]])


@pytest.mark.parametrize(("late", "steps", "share"), [(6, 6, 0.1), (10, 12, 0.2), (20, 48, 0.1)])
def test_the_bound_is_never_below_the_chance_itself(late: int, steps: int, share: float) -> None:
    tail = sum(
        math.comb(steps, count) * share**count * (1 - share) ** (steps - count) for count in range(late, steps + 1)
    )
    bound = math.exp(-steps * divergence(late / steps, share))
    assert tail * (1 - 1e-9) <= bound <= 60 * tail


def test_fewer_late_steps_than_usual_are_no_news() -> None:
    assert divergence(0.1, 0.2) == 0.0


def test_two_ranks_that_take_turns_to_lag_by_little_are_rarely_called_slow():
    """One lags by 5.5% for forty steps, then the other by 7.5%: half of that jump is the first one's recovery.

    Recorded of two ranks on two cores that share a physical one. In the second dozen of its steps 7.5% is a true
    excess; not many more than four in ten are named for it. The watcher asks besides whether it lasts and matters.
    """
    rng, jobs, steps = np.random.default_rng(0), 40, 200
    own = np.exp(rng.normal(0, 0.03, (steps, jobs, 2)))
    own[116:158, :, 1] *= 1.055
    own[158:184, :, 0] *= 1.075
    own = np.where(rng.random(own.shape) < 0.06, own * rng.uniform(1.1, 1.5, own.shape), own)
    named = 0
    for excess in log_excess(own).swapaxes(0, 1):
        screen = WindowTest(1, 2)
        named += any(screen.update(row[None])[0].any() for row in excess)
    assert named <= 0.45 * jobs
