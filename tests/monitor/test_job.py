"""Verdicts on a whole job, from generated rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from ringside.monitor.collector import standard_watchers
from ringside.monitor.job.watcher import (
    WARM_UP_STEPS,
    WINDOW_STEPS,
    CommunicationBound,
    Episode,
    InputBound,
    JobStep,
    JobWatcher,
    SmallCollectives,
    reprice,
)
from ringside.monitor.run.records import Row, StepRecord
from ringside.monitor.run.table import least_of_ranks, tabulate

from .jobs import opened, row, watch

TINY = {"collectives": 100, "payload_bytes": 2_000_000, "busy_seconds": 0.042, "latency_seconds": 400e-6}


def job(steps: int, ranks: int = 4, *, first: int = 0, seed: int = 0, **how: float) -> Iterator[Row]:
    noise = np.random.default_rng((seed, first))
    return (row(step, ranks, noise, **how) for step in range(first, first + steps))  # type: ignore[arg-type]


def watcher(ranks: int = 4) -> JobWatcher:
    found = [one for one in standard_watchers(ranks) if isinstance(one, JobWatcher)]
    assert len(found) == 1
    return found[0]


def test_a_job_bound_by_communication_is_named_once_priced_and_over_when_it_is() -> None:
    watched = watcher()
    assert opened(watch(watched, job(100))) == []
    (verdict,) = opened(watch(watched, job(200, first=100, exposed=0.2)))
    assert (verdict.kind, verdict.ranks) == ("communication_bound", [])
    assert verdict.since_step == pytest.approx(100, abs=2)
    assert verdict.evidence["exposed_ratio"] == pytest.approx(0.74, abs=0.05)
    (so_far,) = watched.open
    assert so_far.cost_rank_seconds == pytest.approx(4 * 200 * 0.2, rel=0.05)
    (ended,) = watch(watched, job(100, first=300))
    assert ended.ended
    assert ended.verdict.evidence["until_step"] == pytest.approx(300, abs=2)
    assert watched.open == []


def test_waiting_for_a_slow_rank_is_not_being_bound_by_communication() -> None:
    assert watch(watcher(), job(300, slow_rank=2)) == []


def test_toys_are_left_alone_until_it_has_lasted() -> None:
    """A job of one-millisecond steps, all communication: 5 seconds of it are needed."""
    short = {"own": 0.0002, "exposed": 0.0008}
    assert watch(watcher(), job(3_000, **short)) == []
    assert len(watch(watcher(), job(8_000, **short))) == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_job_at_the_bar_does_not_flap(seed: int) -> None:
    """Exposed for half of the step, wandering: each end makes the next beginning rarer."""
    noise = np.random.default_rng(seed)
    level = np.cumsum(noise.normal(0, 0.01, 20_000))
    share = 0.47 + 0.1 * np.sin(np.arange(20_000) / 300) + 0.05 * np.tanh(level)
    rows = (row(step, 2, noise, exposed=0.06 * s / (1 - s)) for step, s in enumerate(share))
    assert len(opened(watch(watcher(2), rows))) <= 5  # of 33 swings over the bar


def test_what_is_explained_is_not_said_again() -> None:
    trouble = [True]
    watched = JobWatcher(4, [CommunicationBound(lambda: trouble[0])])
    assert watch(watched, job(200, exposed=0.2)) == []
    trouble[0] = False
    assert len(watch(watched, job(200, first=200, exposed=0.2))) == 1


def test_small_collectives_are_named_with_a_bucket_size_and_not_as_communication() -> None:
    watched = watcher()
    (verdict,) = opened(watch(watched, job(200, exposed=0.045, own=0.03, **TINY)))
    assert verdict.kind == "small_collectives"
    assert verdict.evidence["bucket_mb"] == 1
    assert verdict.evidence["saved_seconds_per_step"] == pytest.approx(98 * 400e-6, rel=0.05)
    assert "bucket_cap_mb=1" in verdict.advice
    (so_far,) = watched.open
    assert so_far.cost_rank_seconds == pytest.approx(4 * 200 * 98 * 400e-6, rel=0.1)


def test_small_collectives_are_the_reason_even_if_their_latency_is_known_late() -> None:
    unknown = {**TINY, "latency_seconds": 0.0}
    rows = [*job(16, exposed=0.045, own=0.03, **unknown), *job(200, first=16, exposed=0.045, own=0.03, **TINY)]
    assert [verdict.kind for verdict in opened(watch(watcher(), rows))] == ["small_collectives"]


def test_small_collectives_in_unsteady_steps_are_named_once() -> None:
    """On a busy machine every other step's synchronisation takes twice as long."""
    watched, noise = watcher(2), np.random.default_rng(0)
    rows = []
    for step in range(600):
        busy = 0.009 * (1 + (noise.random() < 0.5))
        fields = {"collectives": 60, "payload_bytes": 10**6, "busy_seconds": busy, "latency_seconds": 80e-6}
        rows.append(row(step, 2, noise, own=0.02, exposed=busy / 2, **fields))
    assert [finding.ended for finding in watch(watched, rows)] == [False]


def test_small_collectives_that_backward_hides_cost_nothing_and_are_not_named() -> None:
    assert watch(watcher(), job(300, exposed=0.001, **TINY)) == []


def test_more_than_ten_collectives_are_too_small_where_a_quarter_of_the_synchronisation_would_be_saved() -> None:
    latency = 1 / 128  # beside it the bytes take 17 times that, so four buckets would be best
    step = JobStep(0, 1.0, 0.5, 0.0, (11 + 17) * latency, latency, 1e6, 11)

    def share(**changes: float) -> float:
        return SmallCollectives().share(step._replace(**changes))

    assert share() == 7 * latency
    assert share(busy_seconds=(11 + 17.1) * latency) == 0.0
    assert share(busy_seconds=12 * latency) == 10 * latency
    assert share(busy_seconds=12 * latency, collectives=10) == 0.0


def test_an_episode_begins_at_its_bar_and_ends_below_the_other() -> None:
    episode = Episode(begins_at=0.5, ends_at=0.25, seconds=0.0)

    def is_open(share: float) -> bool:
        for step in range(WARM_UP_STEPS + WINDOW_STEPS):
            episode.update(step, share, 1.0)
        return episode.is_open

    assert [is_open(share) for share in (0.49, 0.5, 0.25, 0.24)] == [False, True, True, False]


def test_few_large_collectives_are_not_small() -> None:
    large = {"collectives": 4, "payload_bytes": 100_000_000, "busy_seconds": 0.05, "latency_seconds": 400e-6}
    assert watch(watcher(), job(300, exposed=0.02, **large)) == []


def test_a_job_that_waits_for_its_input_is_named_without_a_rank() -> None:
    (verdict,) = opened(watch(watcher(), job(200, data_seconds=0.03)))
    assert (verdict.kind, verdict.ranks) == ("input_bound", [])
    assert verdict.evidence["data_ratio"] == pytest.approx(0.4, abs=0.05)


def test_one_ranks_slow_input_is_not_the_jobs() -> None:
    noise = np.random.default_rng(0)
    rows = []
    for step in range(200):
        one = row(step, 4, noise)
        one[1] = StepRecord(step=step, rank=1, ended_unix=0.0, step_seconds=0.1, own_seconds=0.08, data_seconds=0.06)
        rows.append(one)
    assert watch(watcher(), rows) == []


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_healthy_jobs_give_nothing(ranks: int) -> None:
    fields = {"collectives": 4, "payload_bytes": 4_000_000, "busy_seconds": 0.02, "latency_seconds": 300e-6}
    assert watch(watcher(ranks), job(5_000, ranks, jitter=0.1, exposed=0.02, data_seconds=0.005, **fields)) == []


def test_missing_ranks_and_values_that_are_none_are_no_trouble() -> None:
    watched = watcher()
    nan = float("nan")
    broken = StepRecord(step=3, rank=2, ended_unix=0, step_seconds=nan, own_seconds=nan, exposed_seconds=nan)
    for step in range(100):
        assert watched.update(step, {2: broken}) == []


def test_nobody_speaks_for_a_rank_whose_records_are_missing() -> None:
    """Three ranks wait for a fourth that records nothing: that is no communication."""
    rows = [{rank: one[rank] for rank in (0, 1, 3)} for one in job(400, slow_rank=2)]
    assert watch(watcher(), rows) == []


def test_an_episode_needs_steps_and_seconds() -> None:
    episode, step = Episode(0.5, 0.4, seconds=100.0), count()
    for _ in range(WARM_UP_STEPS + WINDOW_STEPS - 1):
        assert not episode.update(next(step), 0.9, 50.0)
    assert episode.update(next(step), 0.9, 50.0)  # as many seconds have long been over
    assert episode.is_open
    assert episode.since_step == WARM_UP_STEPS
    short = Episode(0.5, 0.4, seconds=100.0)
    assert [short.update(number, 0.9, 1.0) for number in range(WARM_UP_STEPS + 101)].index(True) == WARM_UP_STEPS + 99


def test_the_price_at_the_end_is_that_of_all_records() -> None:
    watched = watcher()
    rows = list(job(300, exposed=0.2))
    (verdict,) = opened(watch(watched, rows))
    table = tabulate((record for one in rows for record in one.values()), 4)
    exposed = least_of_ranks(table["exposed_seconds"])
    assert reprice(verdict, table).cost_rank_seconds == pytest.approx(4 * exposed.sum())
    assert watched.open[0].cost_rank_seconds == pytest.approx(4 * exposed[10:].sum(), rel=0.02)


def test_rules_are_what_they_say() -> None:
    assert [rule.kind for rule in (CommunicationBound(), InputBound(), SmallCollectives())] == [
        "communication_bound",
        "input_bound",
        "small_collectives",
    ]
