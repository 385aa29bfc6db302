from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ringside.monitor.price import (
    SECONDS_PER_DAY,
    Meter,
    cost_rank_seconds,
    lost_seconds,
    repair,
    slowdown_rank_seconds,
)

HOUR = 3_600.0


def days_by_replay(days: float) -> float:
    """GPU-days that 128 ranks lose in so many days of one rank 12 % slow, by replaying steps of 1.12 s."""
    own = np.ones((100, 128))
    own[:, 77] = 1.12
    return cost_rank_seconds(own, [77]) / (100 * 1.12) * days


def test_the_story_of_the_slow_gpu() -> None:
    assert pytest.approx(95, abs=0.5) == 127 * 18 * HOUR / SECONDS_PER_DAY
    # The story counts the 127 that waited; all 128 lost the time.
    waited = 127 / 128
    assert days_by_replay(0.75) * waited == pytest.approx(10.2, abs=0.05)
    assert days_by_replay(11) * waited == pytest.approx(150, abs=0.5)
    assert 127 / days_by_replay(1) == pytest.approx(9.3, abs=0.05)


def test_the_closed_form_is_the_replay_without_noise() -> None:
    closed = slowdown_rank_seconds(128, 0.12, 18 * HOUR) / SECONDS_PER_DAY
    assert closed == pytest.approx(days_by_replay(0.75), rel=1e-9)


def test_the_price_is_no_own_excess(make_own: Callable[..., np.ndarray]) -> None:
    """Behind another rank that is as slow, a culprit alone costs next to nothing."""
    own = make_own(300, 4, jitter=0.001)
    own[:, [1, 2]] *= 1.3
    alone, both = cost_rank_seconds(own, [1]), cost_rank_seconds(own, [1, 2])
    assert both == pytest.approx(4 * 300 * 0.03, rel=0.05)
    assert alone < 0.05 * both


def test_the_maximum_of_many_was_late_before(make_own: Callable[..., np.ndarray]) -> None:
    own = make_own(500, 128, jitter=0.05)
    before = own.max(axis=1).sum()
    own[:, 9] *= 1.12
    assert cost_rank_seconds(own, [9]) == pytest.approx(128 * (own.max(axis=1).sum() - before), rel=0.05)
    assert cost_rank_seconds(own, [9]) < 128 * 0.5 * (own[:, 9] * 0.12 / 1.12).sum()


def test_repaired_to_what_it_was_before() -> None:
    own = np.ones((50, 3))
    own[:, 0] = 1.2
    np.testing.assert_allclose(repair(own, [0])[:, 0], 1.0)
    np.testing.assert_allclose(repair(own, [0], [np.log(1.1)])[:, 0], 1.1)


def test_a_fast_rank_is_not_made_slower() -> None:
    own = np.array([[0.5, 1.0]] * 9)
    np.testing.assert_array_equal(repair(own, [0]), own)


def test_missing_values_and_nobody_left() -> None:
    own = np.array([[np.nan, np.nan], [1.0, 2.0], [1.0, np.nan]])
    np.testing.assert_allclose(lost_seconds(own, [1]), [0.0, 1.0, 0.0])
    np.testing.assert_allclose(lost_seconds(own, [0, 1]), 0.0)
    assert cost_rank_seconds(np.empty((0, 2)), [1]) == 0.0


def test_the_running_price_is_near_the_replay(make_own: Callable[..., np.ndarray]) -> None:
    own = make_own(400, 8)
    own[:, 3] *= 1.3
    meter = Meter(3, float(np.log(1.3)))
    for row in own:
        meter.add(row[None])
    assert meter.rank_seconds == pytest.approx(cost_rank_seconds(own, [3]), rel=0.05)
