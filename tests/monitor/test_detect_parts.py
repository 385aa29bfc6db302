"""Phases and the time per sample are judged beside whole own times."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from ringside.monitor.slow_rank.detector import MOST_WITH_PARTS, Detector
from ringside.monitor.slow_rank.window_test import FALSE_ALARM_STEPS, PARTS, STREAMS, WindowTest
from ringside.monitor.verdict import VerdictEvent

SHARES = np.array([0.005, 0.25, 0.5, 0.245])
JITTER = np.array([0.02, 0.15, 0.25, 0.1])


def phases(steps: int, ranks: int, seed: int) -> NDArray[np.float64]:
    """Seconds in each of `PARTS`, [steps, parts, ranks], of steps of 60 ms; backward passes vary by a quarter."""
    rng = np.random.default_rng(seed)
    steady = 0.06 * SHARES[:, None] * np.ones(ranks)
    return steady * np.exp(JITTER[:, None] * rng.standard_normal((steps, len(PARTS), ranks)))


def watch(parts: NDArray[np.float64], samples: NDArray[np.float64] | None = None) -> list[VerdictEvent]:
    detector = Detector(parts.shape[2], has_parts=True)
    events = []
    for step, row in enumerate(parts):
        events += detector.update(row.sum(axis=0), None if samples is None else samples[step], step=step, parts=row)
    return events


def test_a_loader_that_takes_a_fifth_of_a_step_more_is_named_at_once_though_steps_vary_by_more() -> None:
    for seed in range(20):
        parts = phases(120, 2, seed)
        parts[100:, PARTS.index("data"), 1] += 0.012
        (event, *_) = watch(parts)
        assert event.verdict.ranks == [1]
        assert event.verdict.since_step == 100
        assert event.verdict.detected_step <= 100 + 8
        assert 0.12 <= event.verdict.excess_ratio <= 0.33  # five steps of a noisy whole may seem to add to it


def test_ten_times_the_input_of_a_third_of_a_millisecond_matters_to_nobody() -> None:
    parts = phases(300, 2, 3)
    parts[100:, PARTS.index("data"), 1] *= 8
    assert watch(parts) == []


def test_time_that_moves_from_one_phase_to_another_is_no_news() -> None:
    parts = phases(300, 2, 4)
    moved = 0.012
    parts[100:, PARTS.index("data"), 1] += moved
    parts[100:, PARTS.index("forward"), 1] = 0.015 - moved
    assert watch(parts) == []


def test_healthy_phases_are_silent() -> None:
    assert [event for seed in range(2) for event in watch(phases(2_000, 4, 50 + seed))] == []


def test_a_rank_that_is_slower_per_sample_is_named_where_samples_vary_by_half() -> None:
    rng = np.random.default_rng(6)
    samples = rng.integers(40, 120, (200, 4)).astype(float)
    parts = phases(200, 4, 7).mean(axis=(0, 2))[:, None] * samples[:, None, :] / 80
    parts *= np.exp(0.02 * rng.standard_normal(parts.shape))
    parts[100:, :, 2] *= 1.3
    (event, *_) = watch(parts, samples)
    assert (event.verdict.kind, event.verdict.ranks, event.verdict.since_step) == ("slow_rank", [2], 100)
    assert event.verdict.detected_step <= 112
    without = watch(parts)
    assert not without or without[0].verdict.detected_step > event.verdict.detected_step


def test_a_slower_rank_that_is_given_fewer_samples_holds_up_nobody() -> None:
    parts, samples = phases(400, 4, 8), np.full((400, 4), 100.0)
    samples[100:, 2] = 70
    parts[100:, :, 2] *= 0.98
    assert watch(parts, samples) == []


def test_what_a_busy_machine_takes_is_told_apart_from_what_a_rank_needs() -> None:
    """Both ranks wait for a CPU for half of the time, by turns; one needs 30% longer for its own work."""
    for seed in range(10):
        rng = np.random.default_rng(70 + seed)
        needed = 0.03 * np.exp(0.05 * rng.standard_normal((160, 2)))
        needed[100:, 0] *= 1.3
        run_delay = 0.03 * rng.exponential(1.0, (160, 2))
        detector, found = Detector(2, has_parts=True), []
        for step, row in enumerate(needed + run_delay):
            found += detector.update(row, step=step, run_delay=run_delay[step])
        assert [event.verdict.ranks for event in found] == [[0]]
        assert 100 <= found[0].verdict.detected_step <= 124
        assert 0.07 <= found[0].verdict.excess_ratio <= 0.4


def test_the_streams_share_one_rate_of_false_alarms() -> None:
    few, many = WindowTest(1, 4), WindowTest(STREAMS, 8)
    for screen, shares in ((few, 4), (many, 8 * STREAMS)):
        assert NormalDist().cdf(-screen.z) * shares == pytest.approx(1.0 / FALSE_ALARM_STEPS)


@pytest.mark.parametrize("mends", ["moves", "is rebalanced", "is known no more"])
def test_a_part_that_holds_up_nobody_any_more_ends_its_episode(mends: str) -> None:
    parts, samples = phases(700, 4, 9), np.full((700, 4), 100.0)
    if mends == "moves":  # the input stays slow, and the forward pass becomes as much shorter
        parts[100:, 0, 2] += 0.012
        parts[300:, 1, 2] -= 0.012
    else:  # slower per sample, which its share of samples makes up for later
        samples[:, 2] = 120.0
        parts[:, :, 2] *= 1.2
        parts[100:, :, 2] *= 1.3
        parts[300:, :, 2] /= 1.56
        if mends == "is rebalanced":
            samples[300:, 2] = 60.0
        else:
            samples[300:] = np.nan
    detector, events = Detector(4, has_parts=True), []
    for step, row in enumerate(parts):
        events += detector.update(row.sum(axis=0), samples[step], step=step, parts=row)
    assert [verdict.ranks for verdict in detector.open] == []
    assert [event.verdict.ranks for event in events if event.ended and event.verdict.ranks == [2]]


@pytest.mark.parametrize(("made_up_for", "goes_on"), [(0.78, True), (0.87, False)])
def test_a_part_is_slow_for_as_long_as_the_whole_bears_half_of_what_is_reported(
    made_up_for: float, goes_on: bool
) -> None:
    for seed in range(2):
        parts = 0.06 * SHARES[:, None] * np.exp(0.02 * np.random.default_rng(seed).standard_normal((400, 4, 4)))
        parts[100:, 0, 2] += 0.012
        parts[200:, 1, 2] -= 0.012 * made_up_for
        assert [event.ended for event in watch(parts)] == ([False] if goes_on else [False, True])


def test_a_rank_that_is_slower_per_sample_is_not_said_to_have_more_of_them() -> None:
    kinds = []
    for seed in range(12):
        rng = np.random.default_rng(200 + seed)
        samples = rng.integers(40, 120, (200, 4)).astype(float)
        parts = phases(200, 4, 300 + seed).mean(axis=(0, 2))[:, None] * samples[:, None, :] / 80
        parts *= np.exp(0.02 * rng.standard_normal(parts.shape))
        parts[100:, :, 2] *= 1.3
        kinds += [event.verdict.kind for event in watch(parts, samples) if event.verdict.ranks == [2]]
    assert len(kinds) >= 10
    assert set(kinds) == {"slow_rank"}


def test_waits_in_the_input_count_once() -> None:
    for seed in range(5):
        parts = phases(130, 2, 400 + seed)
        run_delay = 0.0005 * np.ones((130, 2))
        parts[100:, 0, 1] += 0.012
        run_delay[100:, 1] += 0.012
        detector, events = Detector(2, has_parts=True), []
        for step, row in enumerate(parts):
            events += detector.update(row.sum(axis=0), step=step, parts=row, run_delay=run_delay[step])
        assert 0.1 <= events[0].verdict.excess_ratio <= 0.34


def test_ranks_beyond_a_hundred_and_more_are_judged_as_wholes() -> None:
    detector = Detector(MOST_WITH_PARTS + 1, has_parts=True)
    rng = np.random.default_rng(1)
    for step in range(80):
        own = 0.06 * np.exp(0.02 * rng.standard_normal(MOST_WITH_PARTS + 1))
        own[7] *= 1.2 if step >= 60 else 1.0
        events = detector.update(own, step=step, parts=np.outer(SHARES, own), run_delay=np.zeros_like(own))
        if events:
            break
    assert events[0].verdict.ranks == [7]
