"""Watchers plugged into the collector: events, alerts, prices, and one that fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ringside.monitor import RunInfo
from ringside.monitor.alerts.book import FIRING, RESOLVED, AlertBook
from ringside.monitor.collector import StepCollector, standard_watchers
from ringside.monitor.run.directory import RunReader, RunWriter
from ringside.monitor.run.records import Row, Wire
from ringside.monitor.summary import finish_run
from ringside.monitor.verdict import Verdict, VerdictEvent
from ringside.view.html.run_report import render_report

from .jobs import row

Info = Callable[..., RunInfo]
MB = 1_000_000


class Counting:
    """Counts steps; raises at one of them."""

    def __init__(self, raises_at: int = -1) -> None:
        self.steps, self.raises_at = 0, raises_at

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        self.steps += 1
        if step == self.raises_at:
            raise ZeroDivisionError
        return []

    @property
    def open(self) -> list[Verdict]:
        return []


def feed(collector: StepCollector, steps: range, ranks: int = 2, **how: Any) -> None:
    noise = np.random.default_rng(steps.start)
    for step in steps:
        collector.add(row(step, ranks, noise, **how).values())


def test_any_watcher_plugs_in_and_one_that_raises_is_dropped_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = Counting(), Counting(raises_at=5)
    collector = StepCollector(2, watchers=[bad, good])
    with caplog.at_level(logging.ERROR):
        feed(collector, range(20))
    assert (good.steps, bad.steps) == (20, 6)
    assert len(caplog.records) == 1
    assert collector.verdicts == []


def test_other_threads_may_go_on_after_every_step_that_was_judged() -> None:
    watcher, rests = Counting(), list[int]()
    collector = StepCollector(2, watchers=[watcher], rest=lambda: rests.append(watcher.steps))
    noise = np.random.default_rng(0)
    collector.add([record for step in range(3) for record in row(step, 2, noise).values()])
    assert rests == [1, 2, 3]


def test_a_jobs_verdict_reaches_events_alerts_and_the_summary_and_is_over(tmp_path: Path, make_info: Info) -> None:
    book = AlertBook("run", keep_firing_s=0.0)
    told: list[str] = []
    writer = RunWriter(tmp_path / "run", make_info(2))
    collector = StepCollector(
        2, writer, listeners=[lambda event: told.extend(alert.status for alert in book.record(event))]
    )
    feed(collector, range(50))
    feed(collector, range(50, 200), exposed=0.2)
    (so_far,) = collector.verdicts
    assert (so_far.kind, [alert.kind for alert in book.active]) == ("communication_bound", ["communication_bound"])
    feed(collector, range(200, 300))
    told.extend(one.status for one in book.tick(collector.newest))
    collector.close()
    assert told == [FIRING, RESOLVED]
    events = RunReader(tmp_path / "run").poll_events()
    assert [event["kind"] for event in events] == ["verdict", "repaired", "ended"]
    (verdict,) = finish_run(tmp_path / "run", render_report)["verdicts"]
    assert verdict["evidence"]["until_step"] == pytest.approx(200, abs=2)
    assert verdict["cost_rank_seconds"] == pytest.approx(2 * 150 * 0.2, rel=0.05)


def test_wires_find_their_peers_and_are_written_with_them(tmp_path: Path, make_info: Info) -> None:
    collector = StepCollector(2, RunWriter(tmp_path / "run", make_info(2)))
    noise = np.random.default_rng(0)
    for step in range(20):
        one = row(step, 2, noise)
        ends = ("10.0.0.1 11", "10.0.0.2 22")
        for rank in (0, 1):
            wire = Wire(seconds=1.0, sent_bytes=MB, wire_seconds=0.1, local=ends[rank], remote=ends[1 - rank], peer=-1)
            one[rank] = msgspec.structs.replace(one[rank], wires=(wire,))
        collector.add(one.values())
    collector.close()
    peers = {(record.rank, record.wires[0].peer) for record in RunReader(tmp_path / "run").poll() if record.step}
    assert peers == {(0, 1), (1, 0)}
    summary = finish_run(tmp_path / "run", render_report)
    assert [(link["src"], link["dst"], link["bytes_per_s"]) for link in summary["links"]] == [
        (1, 0, 10 * MB),
        (0, 1, 10 * MB),
    ]


@pytest.mark.parametrize("slow_link", [False, True])
def test_communication_is_not_blamed_where_a_link_explains_it(slow_link: bool) -> None:
    """A link slows down and with it the job; without wires to tell it, the job is bound by communication."""
    collector, noise = StepCollector(2), np.random.default_rng(0)
    for step in range(80):
        slow = step >= 40
        one = row(step, 2, noise, own=0.4, exposed=0.6 if slow else 0.1)
        if slow_link:
            wire = Wire(seconds=0.5, sent_bytes=MB, wire_seconds=0.6 if slow else 0.05, peer=1)
            wire = msgspec.structs.replace(wire, local="10.0.0.1 1", remote="10.0.0.2 2")
            back = Wire(seconds=0.5, sent_bytes=0, wire_seconds=0.0, local="10.0.0.2 2", remote="10.0.0.1 1")
            one[0] = msgspec.structs.replace(one[0], wires=(wire,))
            one[1] = msgspec.structs.replace(one[1], wires=(back,))
        collector.add(one.values())
    assert [verdict.kind for verdict in collector.verdicts] == (["slow_link"] if slow_link else ["communication_bound"])


@pytest.mark.parametrize("steps", [400, pytest.param(2_000, marks=pytest.mark.thorough)])
def test_healthy_jobs_with_standard_watchers_say_nothing(steps: int) -> None:
    collector = StepCollector(4, watchers=standard_watchers(4, ["a", "a", "b", "b"]))
    feed(collector, range(steps), 4, exposed=0.02, data_seconds=0.004, collectives=3, payload_bytes=10 * MB)
    assert collector.verdicts == []
