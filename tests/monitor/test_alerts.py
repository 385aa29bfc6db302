"""Which alerts fire, each told once, and when they are over."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.waiting import Clock

from ringside.monitor import KINDS, Verdict
from ringside.monitor.alerts.book import KEEP_FIRING_S, MOST_FIRING, AlertBook, as_text
from ringside.monitor.alerts.hooks import encode

from .jobs import event


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def book(clock: Clock) -> AlertBook:
    return AlertBook("run", "/runs/run", now=clock, wall=lambda: 1.7e9 + clock())


def test_an_alert_fires_once_and_is_resolved_once(book: AlertBook, clock: Clock) -> None:
    (firing,) = book.record(event())
    assert (firing.status, firing.kind, firing.ranks, firing.severity) == ("firing", "slow_rank", [1], "warning")
    assert firing.text == "rank 1 is 30% slower than the others since step 45"
    assert firing.started_unix == 1050.0
    assert book.record(event()) == []
    assert book.record(event(at=60)) == []
    assert book.record(event("repaired", at=60, cost_rank_seconds=7.0)) == []
    assert book.active == []
    assert book.tick(70) == []
    clock.now += KEEP_FIRING_S
    (over,) = book.tick(80)
    assert (over.status, over.reason, over.ended_unix) == ("resolved", "repaired", 1060.0)
    assert over.fingerprint == firing.fingerprint
    assert over.verdict.cost_rank_seconds == 7.0
    assert book.tick(90) == book.close() == []


def test_a_second_standstill_soon_after_the_first_is_over_with_progress_as_well(book: AlertBook, clock: Clock) -> None:
    told = []
    for at in (11, 13):
        book.tick(at - 1)
        told += book.record(event(verdict="hang", at=at))
        book.tick(at + 1)
        assert book.active == []
        clock.now += 1
    assert [alert.status for alert in told] == ["firing"]
    clock.now += KEEP_FIRING_S
    assert [alert.status for alert in book.tick(100)] == ["resolved"]


def test_a_rank_that_flaps_is_one_alert(book: AlertBook, clock: Clock) -> None:
    (firing,) = book.record(event())
    for turn in range(5):
        assert book.record(event("repaired", at=60 + turn)) == []
        clock.now += 0.9 * KEEP_FIRING_S
        assert book.tick(60 + turn) == []
        assert book.record(event(at=61 + turn)) == []
        assert [alert.fingerprint for alert in book.active] == [firing.fingerprint]
        assert book.active[0].status == "firing"
    assert book.opened["slow_rank"] == 1
    clock.now += 10 * KEEP_FIRING_S
    assert book.tick(100) == []
    book.record(event("repaired", at=100))
    clock.now += KEEP_FIRING_S
    assert [alert.status for alert in book.tick(101)] == ["resolved"]
    (again,) = book.record(event(at=200))
    assert again.fingerprint != firing.fingerprint


def test_another_name_for_the_same_slow_rank_is_no_second_alert(book: AlertBook) -> None:
    book.record(event())
    assert book.record(event(verdict="input_bound", at=70)) == []
    assert [alert.kind for alert in book.active] == ["input_bound"]
    (other,) = book.record(event(verdict="slow_link", at=70))
    assert other.kind == "slow_link"
    assert book.record(event("repaired", rank=5)) == []


def test_a_hang_is_over_when_steps_complete_again(book: AlertBook, clock: Clock) -> None:
    book.tick(49)
    (firing,) = book.record(event(verdict="hang"))
    assert firing.severity == "critical"
    clock.now += 100 * KEEP_FIRING_S
    assert book.tick(49) == []
    assert book.active
    assert book.tick(50) == []
    assert book.active == []
    clock.now += KEEP_FIRING_S
    (over,) = book.tick(51)
    assert (over.status, over.reason) == ("resolved", "progress")


def test_the_end_of_the_run_resolves_what_did_not_end_it(book: AlertBook) -> None:
    for rank, kind in enumerate(("slow_rank", "dead_rank", "diverged", "communication_bound")):
        book.record(event(verdict=kind, rank=rank))
    book.record(event(rank=9))
    book.record(event("repaired", rank=9))
    told = book.record({"unix": 2000.0, "kind": "ended", "steps": 100})
    assert {(alert.kind, alert.ranks[0], alert.reason) for alert in told} == {
        ("slow_rank", 0, "run_ended"),
        ("communication_bound", 3, "run_ended"),
        ("slow_rank", 9, "repaired"),
    }
    assert [alert.ended_unix for alert in told if alert.reason == "run_ended"] == [2000.0, 2000.0]
    assert {alert.kind for alert in book.active} == {"dead_rank", "diverged"}


def test_a_flood_of_verdicts_is_bounded(book: AlertBook) -> None:
    told = [alert for rank in range(500) for alert in book.record(event(rank=rank))]
    assert len(told) == len(book.active) == MOST_FIRING
    assert book.suppressed == 500 - MOST_FIRING
    assert book.opened["slow_rank"] == 500


@pytest.mark.parametrize(
    "strange",
    [
        {},
        {"kind": "verdict"},
        {"kind": "verdict", "verdict": {"kind": "nonsense"}},
        {"kind": "repaired", "verdict": 7},
        {"kind": "note", "text": "hello"},
    ],
)
def test_strange_events_change_nothing(book: AlertBook, strange: dict[str, Any]) -> None:
    assert book.record(strange) == []
    assert book.active == []


def test_every_kind_has_a_severity_and_a_place_in_the_runbook(book: AlertBook) -> None:
    kinds: dict[str, set[str]] = {"critical": set(), "warning": set(), "info": set()}
    for rank, kind in enumerate(KINDS):
        (alert,) = book.record(event(verdict=kind, rank=rank))
        kinds[alert.severity].add(kind)
        assert alert.runbook == f"docs/verdicts.md#{kind}"
    assert kinds["critical"] == {"dead_rank", "hang", "mismatch", "diverged"}
    assert kinds["info"] == {"communication_bound", "small_collectives", "stage_imbalance"}


def test_messages_are_one_line_of_json_whatever_is_in_them(clock: Clock) -> None:
    book = AlertBook('a"\n\udcff', now=clock)
    (alert,) = book.record(event(excess_ratio=float("inf"), evidence={"odd": float("nan")}))
    line = encode(alert)
    assert line.count(b"\n") == 1
    assert b'"excess_ratio":null' in line
    assert isinstance(alert.verdict, Verdict)
    assert as_text("a\udcff") == "a\\udcff"


def test_alerts_that_wait_to_be_told_that_they_are_over_count_for_the_flood(book: AlertBook) -> None:
    """What fires and what is held back are messages of one moment: a flood that flaps stays bounded as well."""
    for rank in range(MOST_FIRING):
        book.record(event(rank=rank))
        book.record(event("repaired", rank=rank))
    assert book.active == []
    assert book.record(event(rank=MOST_FIRING)) == []
    assert book.suppressed == 1


def test_a_hang_before_the_first_step_is_over_with_it(book: AlertBook, clock: Clock) -> None:
    book.record(event(verdict="hang"))
    assert book.tick(None) == []
    assert book.active
    assert book.tick(0) == []
    assert book.active == []
    clock.now += KEEP_FIRING_S
    assert [alert.reason for alert in book.tick(1)] == ["progress"]


def test_an_alert_that_fires_again_is_what_the_newest_verdict_says(book: AlertBook) -> None:
    (first,) = book.record(event())
    book.record(event("repaired", at=60))
    book.record(event(at=65, verdict="input_bound", excess_ratio=0.5))
    (again,) = book.active
    assert (again.fingerprint, again.started_unix) == (first.fingerprint, first.started_unix)
    assert (again.status, again.ended_unix, again.reason) == ("firing", None, "")
    assert (again.kind, again.verdict.excess_ratio) == ("input_bound", 0.5)
    assert again.text != first.text


@pytest.mark.parametrize("kind", ["dead_rank", "hang", "mismatch", "diverged"])
def test_the_end_of_the_run_does_not_resolve_what_may_have_ended_it(book: AlertBook, kind: str) -> None:
    (alert,) = book.record(event(verdict=kind))
    assert alert.severity == "critical"
    assert book.close(2000.0) == []
    assert [alert.kind for alert in book.active] == [kind]


def test_a_cause_that_was_there_from_the_first_step_is_told_of_since_then(book: AlertBook) -> None:
    (alert,) = book.record(event(at=5))
    assert "since step 0" in alert.text
    (alert,) = book.record(event(verdict="dead_rank", at=4))
    assert "since" not in alert.text
