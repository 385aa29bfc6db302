from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ringside.monitor.price import (
    PER_RANK_HOUR,
    RATE,
    Meter,
    cost_rank_seconds,
    hourly_rate,
    known_rate,
    money,
    repair_ranks,
)
from ringside.monitor.slow_rank.detector import detect

HOUR = 3_600.0
SECONDS_PER_DAY = 24 * HOUR


def slowdown_rank_seconds(ranks: int, slowdown: float, seconds: float) -> float:
    """What ranks lose in so many seconds while every step takes `1 + slowdown` times as long: the closed form."""
    return ranks * seconds * slowdown / (1.0 + slowdown)


def lost_seconds(own: np.ndarray, culprits: list[int]) -> np.ndarray:
    """What each step lost to some ranks: the slowest as it was, minus as it would have been."""
    slowest, repaired = (np.nan_to_num(times).max(axis=1) for times in (own, repair_ranks(own, culprits)))
    return slowest - repaired


WAITING = 127 / 128
"""The story counts the 127 ranks that waited; all 128 lost the time."""


def story(own: np.ndarray, days: float) -> float:
    """GPU-days that the 127 others lose in so many days of such steps, replayed with rank 77 repaired."""
    recorded = float(np.nanmax(own, axis=1).sum())
    return cost_rank_seconds(own, [77]) * WAITING * days / recorded


def slow_rank(excess: float, steps: int = 100, jitter: float = 0.0) -> np.ndarray:
    own = np.exp(np.random.default_rng(7).normal(0.0, jitter, (steps, 128)))
    own[:, 77] *= 1.0 + excess
    return own


def test_the_story_of_the_slow_gpu() -> None:
    """128 GPUs, one 12% slow: what was said to have been lost, and what is lost by replay."""
    stopped = np.ones((1, 128))  # 127 GPUs idle for 18 hours, as if one had stopped
    stopped[0, 77] += 18 * HOUR
    assert cost_rank_seconds(stopped, [77]) * WAITING / SECONDS_PER_DAY == pytest.approx(95, abs=0.5)
    slow = slow_rank(0.12)
    assert story(slow, 18 / 24) == pytest.approx(10.2, abs=0.05)
    assert story(slow, 11) == pytest.approx(150, abs=0.5)
    assert story(slow, 9.3) == pytest.approx(127, abs=1)
    assert slowdown_rank_seconds(127, 0.12, 9.3 * 24 * HOUR) / SECONDS_PER_DAY == pytest.approx(127, abs=1)


def test_the_story_as_the_monitor_tells_it() -> None:
    """The same GPU in noise, from the records to the verdict's price and to the price that grows with the steps."""
    own = slow_rank(0.0, 400, jitter=0.005)
    own[100:, 77] *= 1.12
    (verdict,) = detect(own)
    meter = Meter(77, float(np.log1p(verdict.excess_ratio)))
    meter.add(own[verdict.since_step :])
    since = float(own[verdict.since_step :].max(axis=1).sum())
    assert (verdict.kind, verdict.ranks) == ("slow_rank", [77])
    for told in (verdict.cost_rank_seconds, meter.rank_seconds):
        # In noise the slowest of the 127 others is 1.3% late as well, and nobody is to blame for that.
        assert told * WAITING * 11 / since == pytest.approx(150 * (1.12 - 1.013) / 0.12, rel=0.03)


def test_the_closed_form_is_the_replay_without_noise() -> None:
    closed = slowdown_rank_seconds(128, 0.12, 18 * HOUR) / SECONDS_PER_DAY
    assert closed * WAITING == pytest.approx(story(slow_rank(0.12), 0.75), rel=1e-9)


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
    np.testing.assert_allclose(repair_ranks(own, [0])[:, 0], 1.0)
    np.testing.assert_allclose(repair_ranks(own, [0], [np.log(1.1)])[:, 0], 1.1)


def test_a_fast_rank_is_not_made_slower() -> None:
    own = np.array([[0.5, 1.0]] * 9)
    np.testing.assert_array_equal(repair_ranks(own, [0]), own)


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


def test_the_running_price_does_not_count_what_the_rank_exceeded_the_others_by_before() -> None:
    own = np.ones((50, 4))
    own[:, 1] = 1.3
    usual = float(np.log(1.1))
    meter = Meter(1, float(np.log(1.3)), usual, rank_seconds=7.0)
    meter.add(own)
    assert meter.rank_seconds == pytest.approx(7.0 + 4 * 50 * 0.2)
    assert meter.rank_seconds - 7.0 == pytest.approx(cost_rank_seconds(own, [1], [usual]))


def test_the_running_price_holds_to_the_excess_that_was_found_until_sixteen_steps_say_otherwise() -> None:
    own = np.ones((40, 4))
    own[:, 1] = 1.5  # it was 1.25 when the verdict was reached
    meter, prices = Meter(1, float(np.log(1.25))), [0.0]
    for row in own:
        meter.add(row[None])
        prices.append(meter.rank_seconds)
    lost = 1.5 - 1.5 / np.array([1.25] * 15 + [np.sqrt(1.25 * 1.5)] + [1.5] * 24)
    np.testing.assert_allclose(np.diff(prices), 4 * lost)


def test_a_rank_that_becomes_slower_and_slower_is_priced_by_what_it_needs_at_the_time() -> None:
    """Half as long again after 300 steps; what was lost is known, as the others' times are."""
    own = 0.1 * np.exp(np.random.default_rng(0).normal(0, 0.02, (500, 4)))
    own[100:, 2] *= 1 + 0.5 * np.clip(np.arange(400) / 300, 0, 1)
    lost = 4 * (own.max(axis=1) - np.delete(own, 2, axis=1).max(axis=1))[100:].sum()
    assert cost_rank_seconds(own[100:], [2]) == pytest.approx(lost, rel=0.05)
    meter = Meter(2, 0.06)
    meter.add(own[100:300])
    for row in own[300:]:
        meter.add(row[None])
    assert meter.rank_seconds == pytest.approx(lost, rel=0.05)


@pytest.mark.parametrize("text", ["", "much", "0", "-1", "nan", "inf"])
def test_what_is_no_rate_is_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=text or "convert"):
        hourly_rate(text)
    monkeypatch.setenv(RATE, text)
    assert known_rate() is None


def test_a_price_in_money_is_that_of_rank_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    assert money(7_200.0, 2.5) == pytest.approx(5.0)
    assert known_rate({PER_RANK_HOUR: 3.0}) == 3.0
    monkeypatch.setenv(RATE, "2.5")
    assert known_rate({PER_RANK_HOUR: 3.0}) == 2.5, "what is said now counts"
