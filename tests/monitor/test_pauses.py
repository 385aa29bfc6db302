"""A rank that pauses again and again: named from how often, and by nothing that happens to all ranks alike."""

import math
import re

import numpy as np
import pytest

from ringside.monitor import StepRecord, Verdict, detect
from ringside.monitor.collector import StepCollector
from ringside.monitor.run.records import Vitals
from ringside.monitor.slow_rank.detector import Detector
from ringside.monitor.slow_rank.pauses import Rhythm, judge_pauses, rejudge_pauses, stands_out
from ringside.monitor.verdict import headline


def pausing(ranks, steps=600, *, rank=1, begin=120, end=None, every=10, seconds=0.2, seed=0):
    """Own times of 0.1 s with 2% jitter, one rank of which is so much longer in every so many-th step."""
    own = 0.1 * np.exp(np.random.default_rng(seed).normal(0, 0.02, (steps, ranks)))
    own[begin : end or steps : every, rank] += seconds
    return own


@pytest.mark.parametrize(("ranks", "within"), [(2, 290), (4, 170), (8, 145), (64, 145)])
def test_a_pause_in_every_tenth_step_is_named_with_its_rhythm_and_its_price(ranks, within):
    own = pausing(ranks)
    (verdict,) = detect(own)
    assert (verdict.kind, verdict.ranks, verdict.since_step) == ("slow_rank", [1], 120)
    assert verdict.detected_step - 120 <= within
    assert verdict.evidence["pauses"] == 48
    assert verdict.evidence["pause_seconds"] == pytest.approx(0.2, rel=0.02)
    assert verdict.excess_ratio == pytest.approx(0.2, rel=0.05)
    assert verdict.cost_rank_seconds == pytest.approx(ranks * 48 * 0.2, rel=0.05)
    assert "about every 10 steps one takes 200 ms longer (48 times so far)" in verdict.cause
    assert headline(verdict) == "rank 1 pauses again and again: 20% slower than the others in all"
    assert "garbage collection" in verdict.advice


def test_pauses_of_all_ranks_at_once_or_in_turn_name_nobody():
    together, in_turn = pausing(4, every=1_000), pausing(4, every=1_000)
    together[120::10] += 0.2
    for rank in range(4):
        in_turn[120 + 3 * rank :: 12, rank] += 0.2
    assert detect(together) == detect(in_turn) == []


def test_pauses_that_cost_less_than_five_percent_and_one_burst_name_nobody():
    burst = pausing(4, begin=200, end=260, every=5)
    assert detect(pausing(4, seconds=0.04)) == detect(pausing(4, every=60)) == detect(burst) == []


@pytest.mark.parametrize("steps", [600, pytest.param(4_000, marks=pytest.mark.thorough)])
def test_spikes_on_all_ranks_alike_name_nobody(steps):
    for ranks in (2, 8):
        rng = np.random.default_rng(ranks)
        own = 0.1 * np.exp(rng.normal(0, 0.03, (steps, ranks)))
        own[rng.random(own.shape) < 0.08] *= 3
        assert detect(own) == []


def test_it_is_over_when_the_pauses_are_and_begins_anew_when_they_do():
    own = pausing(4, 1_600, end=500)
    own[1000:1500:10, 1] += 0.2
    first, second = detect(own)
    assert (first.since_step, first.evidence["until_step"]) == (120, 491)
    assert (second.since_step, second.evidence["until_step"]) == (1000, 1491)
    assert first.cost_rank_seconds == pytest.approx(4 * 38 * 0.2, rel=0.05)


def test_who_becomes_slow_in_every_step_is_told_of_that_instead():
    own = pausing(4, 700)
    own[420:, 1] *= 2
    pauses, slow = detect(own)
    assert "pauses" in pauses.evidence
    assert pauses.evidence["until_step"] == pytest.approx(421, abs=10)
    assert "pauses" not in slow.evidence
    assert slow.since_step == pytest.approx(420, abs=2)
    assert "until_step" not in slow.evidence  # the end of its pauses is not the end of that
    detector = Detector(4)
    for row in own:
        for finding in detector.update(row):
            assert (finding.verdict in detector.open) != finding.ended
        assert len(detector.open) <= 1


def test_a_slow_rank_is_not_named_a_second_time_for_its_pauses():
    own = pausing(4, 700)
    own[100:, 1] *= 1.5
    assert [(verdict.ranks, "pauses" in verdict.evidence) for verdict in detect(own)] == [([1], False)]


def test_while_it_goes_on_the_price_is_that_of_the_whole_run():
    own = pausing(3, 500)
    collector = StepCollector(3, clock=lambda: 0.0)
    for step, row in enumerate(own):
        collector.add(
            StepRecord(step=step, rank=rank, ended_unix=0, step_seconds=1, own_seconds=float(seconds))
            for rank, seconds in enumerate(row)
        )
    (live,), (whole,) = collector.verdicts, detect(own)
    assert live.cost_rank_seconds == pytest.approx(whole.cost_rank_seconds, rel=0.02)
    assert live.cost_rank_seconds == pytest.approx(3 * 38 * 0.2, rel=0.05)
    assert live.kind == "slow_rank"


def test_missing_steps_and_ranks_do_no_harm():
    own = pausing(4, 480)
    own[np.random.default_rng(1).random(own.shape) < 0.1] = np.nan
    own[:, 3] = np.nan
    assert [verdict.ranks for verdict in detect(own)] == [[1]]


def test_small_pauses_of_the_other_rank_speak_for_nobody():
    own = pausing(2, 460)
    own[130::45, 0] *= 1.7  # now and then, a sixth of what the other one's take
    assert [verdict.ranks for verdict in detect(own)] == [[1]]
    own[130::10, 0] *= 3.0
    assert detect(own) == []


def test_a_verdict_without_its_pauses_in_the_records_stays_as_it_is():
    (verdict,) = detect(pausing(4))
    assert rejudge_pauses(verdict, pausing(4, seconds=0.0)) == verdict
    assert rejudge_pauses(verdict, np.full((5, 4), np.nan)) == verdict


@pytest.mark.parametrize("ranks", [2, 4, 128])
def test_more_pauses_of_one_rank_are_more_telling_and_more_of_the_others_less(ranks):
    least = next(count for count in range(1, 100) if stands_out(count, count, ranks))
    assert 4 <= least <= 25
    assert not stands_out(least, 2 * least, ranks) or ranks > 2
    assert not stands_out(least, ranks * least, ranks)
    # An exact tail, of which the bound is no more: so many of all pauses on one of several ranks alike.
    assert ranks * (1 / ranks) ** least <= math.exp(-10)


def test_what_is_said_of_it_is_finite():
    (verdict,) = detect(pausing(2, seconds=30.0))
    assert isinstance(verdict, Verdict)
    assert "30.0 s longer" in verdict.cause
    (verdict,) = detect(1e-3 * pausing(2))
    assert "200 µs longer" in verdict.cause
    # The steps of a job may be numbered more coarsely than they are recorded.
    rhythm = Rhythm(first=1, pauses=30, typical=0.1, bar=0.2, extra=6.0, lost=6.0)
    said = judge_pauses(0, rhythm, 4, since_step=50, detected_step=59).cause
    assert "about every 1 steps one takes 200 ms longer (30 times so far)" in said


def pausing_and_writing(written, *, ranks=4, batch=3):
    """The verdict on a rank that pauses, of records whose batches carry what was written in them.

    Args:
        written: From a rank, and whether it pauses in a step, to the bytes it writes in that step; None: not known.
        ranks: How many.
        batch: Steps to a batch.
    """
    own = pausing(ranks, 460)
    collector = StepCollector(ranks, clock=lambda: 0.0)
    pauses = own[:, 1] > 0.25
    for step, row in enumerate(own):
        for rank, seconds in enumerate(row):
            vitals = None
            if step % batch == 0:
                inside = range(step, min(step + batch, len(own)))
                bytes_each = [written(rank, rank == 1 and bool(pauses[each])) for each in inside]
                whole = None if None in bytes_each else sum(bytes_each)
                vitals = Vitals(seconds=float(own[inside, :].max(axis=1).sum()), written_bytes=whole)
            record = StepRecord(
                step=step, rank=rank, ended_unix=0, step_seconds=float(row.max()), own_seconds=float(seconds),
                vitals=vitals,
            )  # fmt: skip
            collector.add([record])
    (verdict,) = collector.verdicts
    return verdict


def test_what_a_rank_that_pauses_writes_alone_is_named():
    verdict = pausing_and_writing(lambda rank, pauses: 50_000_000 if pauses else 1000 * rank)
    assert re.search(r"as fast as ever; it writes (49|50)\.\d MB to storage each time$", verdict.cause)
    assert "async_save" in verdict.advice
    assert verdict.evidence["written_bytes_per_pause"] == pytest.approx(50e6, rel=0.05)
    assert verdict.evidence["others_written_bytes_per_pause"] == pytest.approx(30_000, rel=0.2)
    again = rejudge_pauses(verdict, pausing(4))  # without records that show it
    assert "garbage collection" in again.advice
    assert "written_bytes_per_pause" not in again.evidence


@pytest.mark.parametrize(
    ("what", "written"),
    [
        ("not known", lambda rank, pauses: None),
        ("nothing", lambda rank, pauses: 0),
        ("not known of another rank", lambda rank, pauses: None if rank == 3 else 50_000_000 * pauses),
        ("little", lambda rank, pauses: 900_000 * pauses),
        ("all the time", lambda rank, pauses: 5_000_000 * (rank == 1)),
        ("another rank more than half as much", lambda rank, pauses: 50_000_000 * pauses + 2_600_000 * (rank == 2)),
    ],
)
def test_what_it_does_not_write_alone_and_in_its_pauses_is_not_named(what, written):
    verdict = pausing_and_writing(written)
    assert verdict.cause.endswith("between those it is as fast as ever"), what
    assert "garbage collection" in verdict.advice
    assert "written_bytes_per_pause" not in verdict.evidence
