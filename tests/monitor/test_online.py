from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringside.monitor import RunInfo, StepRecord, Verdict
from ringside.monitor.collector import (
    FARTHEST_STEPS,
    GIVEN_UP_STEPS,
    LARGEST_STEP,
    PENDING_RECORDS,
    StepCollector,
    standard_watchers,
    with_waits,
)
from ringside.monitor.run.directory import RunReader, RunWriter
from ringside.monitor.run.records import Row
from ringside.monitor.verdict import VerdictEvent

from .states import StepsSeen

Make = Callable[..., np.ndarray]
Records = Callable[..., list[StepRecord]]


def test_a_slow_rank_is_named_while_the_run_goes_on(make_own: Make, make_records: Records) -> None:
    own = make_own(200, 4)
    own[100:160, 2] *= 1.3
    heard: list[dict[str, object]] = []
    collector = StepCollector(4, listeners=[heard.append], clock=lambda: 42.0)
    records = make_records(own)
    for step in range(200):
        collector.add(records[4 * step : 4 * step + 4])
    verdict, repaired = heard
    assert (verdict["kind"], repaired["kind"]) == ("verdict", "repaired")
    assert verdict["unix"] == 42.0
    assert verdict["step"] <= 112  # type: ignore[operator]
    (final,) = collector.verdicts
    assert final.ranks == [2]
    assert final.cost_rank_seconds == pytest.approx(4 * 60 * 0.03, rel=0.2)
    assert final.evidence["until_step"] == pytest.approx(160, abs=3)


class Rows:
    """A watcher that keeps what it was shown."""

    def __init__(self) -> None:
        self.open: list[Verdict] = []
        self.seen: list[tuple[int, dict[int, float]]] = []

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        self.seen.append((step, {rank: row[rank].own_seconds for rank in sorted(row)}))
        return []


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), batch=st.integers(1, 40))
def test_the_order_of_records_does_not_matter(seed: int, batch: int) -> None:
    """Records of a few neighbouring steps shuffled, in batches of any size: watchers see the same rows, in order."""
    records = [
        StepRecord(step=s, rank=r, ended_unix=0, step_seconds=1, own_seconds=0.1 * s + r)
        for s in range(90)
        for r in range(3)
    ]
    records.sort(key=lambda record: record.step + 5 * random.Random(seed + 7 * record.step + record.rank).random())
    rows = Rows()
    collector = StepCollector(3, watchers=[rows])
    for begin in range(0, len(records), batch):
        collector.add(records[begin : begin + batch])
    collector.close()
    assert rows.seen == [(s, {r: 0.1 * s + r for r in range(3)}) for s in range(90)]
    assert (collector.steps, collector.late) == (90, 0)


def test_a_rank_that_falls_silent_is_not_waited_for(make_own: Make, make_records: Records) -> None:
    collector = StepCollector(3)
    records = make_records(make_own(150, 3))
    for step in range(150):
        collector.add(record for record in records[3 * step : 3 * step + 3] if record.rank < 2 or step < 10)
        assert collector.steps >= step - 20
    assert collector.newest == 149  # given up after GIVEN_UP_STEPS, so no longer 20 steps behind
    assert GIVEN_UP_STEPS < 130


def test_ranks_whose_batches_come_in_turn_are_awaited_however_short_their_steps_are() -> None:
    """Steps of 4 ms in batches of a quarter of a second: a rank is 62 steps behind before it is its turn."""
    collector = StepCollector(4)
    for turn in range(6):
        for rank in range(4):
            steps = range(62 * turn, 62 * turn + 62)
            collector.add(
                StepRecord(step=step, rank=rank, ended_unix=0, step_seconds=0.004, own_seconds=0.003) for step in steps
            )
    assert (collector.steps, collector.late) == (6 * 62, 0)


def test_of_short_steps_those_of_two_seconds_are_awaited_and_not_more() -> None:
    collector = StepCollector(2, watchers=[])
    for step in range(1_000):
        collector.add([StepRecord(step=step, rank=0, ended_unix=0, step_seconds=0.004, own_seconds=0.003)])
    assert collector.newest == 999  # the other rank was missing in GIVEN_UP_STEPS steps
    collector.add([StepRecord(step=1_000, rank=1, ended_unix=0, step_seconds=0.004, own_seconds=0.003)])
    for step in range(1_000, 1_550):
        collector.add([StepRecord(step=step, rank=0, ended_unix=0, step_seconds=0.004, own_seconds=0.003)])
    assert collector.newest == 1_549 - 500


def test_of_many_ranks_fewer_steps_are_awaited_so_that_what_is_kept_stays_bounded() -> None:
    """Two seconds are 2,000 of these steps; 1,024 ranks would have sent two million records by then."""
    collector = StepCollector(1_024, watchers=[])
    for step in range(100):
        collector.add([StepRecord(step=step, rank=0, ended_unix=0, step_seconds=0.001, own_seconds=0.001)])
    assert collector.newest == 99 - PENDING_RECORDS // 1_024


def test_a_late_record_is_kept_and_not_analysed(tmp_path: Path, make_info: Callable[..., RunInfo]) -> None:
    writer = RunWriter(tmp_path, make_info(2))
    collector = StepCollector(2, writer)
    for step in range(30):
        collector.add([StepRecord(step=step, rank=0, ended_unix=0, step_seconds=1, own_seconds=1)])
    assert collector.steps == 10
    collector.add([StepRecord(step=3, rank=1, ended_unix=0, step_seconds=1, own_seconds=1)])
    assert collector.late == 1
    assert collector.steps == 10
    assert any(record.rank == 1 for record in RunReader(tmp_path).poll())


def test_of_two_records_of_one_step_and_rank_the_first_counts(
    tmp_path: Path, make_info: Callable[..., RunInfo]
) -> None:
    writer = RunWriter(tmp_path, make_info(2))
    seen = StepsSeen()
    collector = StepCollector(2, writer, watchers=[*standard_watchers(2), seen])
    for rank, own in ((0, 0.1), (0, 9.0), (1, 0.2)):
        collector.add([StepRecord(step=0, rank=rank, ended_unix=0, step_seconds=1, own_seconds=own)])
    assert [state.own_seconds for state in seen.states(2)] == [0.1, 0.2]
    assert sorted(record.own_seconds for record in RunReader(tmp_path).poll()) == [0.1, 0.2]


def test_impossible_records_count_for_nothing() -> None:
    collector = StepCollector(2)
    bad = [(-1, 0), (0, 2), (0, -1)]
    collector.add(StepRecord(step=s, rank=r, ended_unix=0, step_seconds=1, own_seconds=1) for s, r in bad)
    collector.add(
        StepRecord(step=s, rank=r, ended_unix=0, step_seconds=math.nan, own_seconds=v)
        for s in range(9)
        for r, v in ((0, math.inf), (1, -3.0))
    )
    assert collector.steps == 9


def test_a_step_that_cannot_be_is_dropped_and_the_ranks_are_watched_on(
    make_own: Make, make_records: Records, caplog: pytest.LogCaptureFixture
) -> None:
    own = make_own(160, 4)
    own[100:, 2] *= 1.3
    collector, records = StepCollector(4), make_records(own)
    damaged = [StepRecord(step=1 << 62, rank=1, ended_unix=0, step_seconds=1, own_seconds=1.0)]
    with caplog.at_level(logging.WARNING):
        collector.add(damaged)
        for step in range(160):
            collector.add(records[4 * step : 4 * step + 3])  # rank 3 comes a step late
            collector.add(damaged if step == 50 else [])
            collector.add(records[4 * step - 1 : 4 * step])
    assert [verdict.ranks for verdict in collector.verdicts] == [[2]]
    assert (collector.steps, collector.late, collector.absurd) == (159, 0, 2)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    ("newest", "step", "taken"),
    [
        (7, 7 + FARTHEST_STEPS, True),
        (7, 8 + FARTHEST_STEPS, False),
        (None, LARGEST_STEP, True),
        (None, LARGEST_STEP + 1, False),
    ],
)
def test_a_step_is_within_a_million_of_the_newest_or_the_first_below_two_to_the_48(
    newest: int | None, step: int, taken: bool
) -> None:
    collector = StepCollector(1, watchers=[])
    for number in (newest, step):
        if number is not None:
            collector.add([StepRecord(step=number, rank=0, ended_unix=0, step_seconds=1, own_seconds=1)])
    assert (collector.absurd, collector.close()[-1]["steps"]) == (int(not taken), taken + (newest is not None))


def test_a_rank_alone_is_watched_and_never_slow(make_records: Records, caplog: pytest.LogCaptureFixture) -> None:
    own = np.full((200, 1), 0.1)
    own[60::20] *= 9.0
    assert [event["kind"] for event in StepCollector(1).add(make_records(own))] == []
    assert not caplog.records


def test_waits_are_filled_in_without_a_common_clock() -> None:
    row = {
        rank: StepRecord(
            step=0, rank=rank, ended_unix=0, step_seconds=1, own_seconds=1, exposed_seconds=e, wait_seconds=w
        )
        for rank, (e, w) in enumerate([(0.5, math.nan), (0.2, math.nan), (0.9, 0.6)])
    }
    assert [record.wait_seconds for record in with_waits(row).values()] == [pytest.approx(0.3), 0.0, 0.6]


def test_a_listener_that_raises_is_dropped(make_own: Make, caplog: pytest.LogCaptureFixture) -> None:
    def broken(event: dict[str, object]) -> None:
        raise ValueError("no")

    heard: list[dict[str, object]] = []
    collector = StepCollector(2, listeners=[broken, heard.append])
    with caplog.at_level(logging.ERROR):
        collector.note("note", text="a")
        collector.note("note", text="b")
    assert len(heard) == 2
    assert len(caplog.records) == 1


def test_memory_is_bounded_by_ranks_not_steps(make_own: Make, make_records: Records) -> None:
    import pickle

    collector = StepCollector(2, clock=float)
    records = make_records(make_own(700, 2))
    sizes = []
    for step in range(700):
        collector.add(records[2 * step : 2 * step + 2])
        if step in (400, 699):
            sizes.append(len(pickle.dumps(collector)))
    assert sizes[1] <= sizes[0] * 1.02


def test_states_are_medians_of_what_was_kept(make_records: Records) -> None:
    seen = StepsSeen()
    collector = StepCollector(2, watchers=[*standard_watchers(2), seen])
    collector.add(make_records(np.array([[0.1, 0.2]] * 9)))
    first, second = seen.states(2)
    assert (first.own_seconds, first.wait_seconds) == (pytest.approx(0.1), pytest.approx(0.1))
    assert (second.step, second.wait_seconds) == (8, pytest.approx(0.0))
    assert math.isnan(StepsSeen().states(1)[0].own_seconds)
