"""Replicas that drift apart, judged from what ranks say: who is named, when, and when it is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import pytest

from ringside.errors import UsageError
from ringside.monitor.alerts.book import AlertBook
from ringside.monitor.replicas import Check, ReplicaCheck, digest_steps, find_odd_ranks
from ringside.monitor.verdict import headline

NAMES = ["body.weight", "body.bias", "head.weight"]
Lists = dict[int, dict[int, list[int]]]


def said(number: int, *digests: int, step: int | None = None) -> dict[int, list[Check]]:
    """What each rank says at one check."""
    return {
        rank: [Check(number, number - 1 if step is None else step, digest, float(number))]
        for rank, digest in enumerate(digests)
    }


def merged(*parts: Mapping[int, Sequence[Check]]) -> dict[int, list[Check]]:
    return {rank: [check for part in parts for check in part.get(rank, [])] for rank in parts[0]}


def none_left(number: int) -> dict[int, list[int]]:
    return {}


@pytest.mark.parametrize(
    ("digests", "ranks", "decided"),
    [
        ([1, 1, 2], (2,), True),
        ([1, 1, 2, 3], (2, 3), True),
        ([5, 1, 1, 1, 4, 1], (0, 4), True),
        ([1, 2], (0, 1), False),
        ([1, 1, 2, 2], (0, 1, 2, 3), False),
        ([1, 2, 3], (0, 1, 2), False),
    ],
)
def test_the_minority_is_named_and_a_tie_is_said_to_be_one(
    digests: list[int], ranks: tuple[int, ...], decided: bool
) -> None:
    assert find_odd_ranks(dict(enumerate(digests))) == (ranks, decided)


def test_agreement_says_nothing() -> None:
    replicas = ReplicaCheck(range(3), NAMES)
    assert replicas.judge(said(1, 7, 7, 7), none_left) == []
    assert replicas.judge(said(100, 8, 8, 8), none_left) == []
    assert replicas.judged == 100


def test_a_rank_that_drifts_is_told_once_with_its_parameter_and_resolved_when_it_is_back() -> None:
    lists = {200: {0: [1, 2, 3], 1: [1, 9, 3], 2: [1, 2, 3]}}
    replicas = ReplicaCheck(range(3), NAMES, "Net")
    assert replicas.judge(said(100, 4, 4, 4), none_left) == []
    (change,) = replicas.judge(said(200, 5, 6, 5), lists.__getitem__)
    verdict = change.verdict
    assert (change.kind, verdict.kind, verdict.ranks) == ("verdict", "diverged", [1])
    assert (verdict.since_step, verdict.detected_step) == (100, 199)
    assert verdict.evidence == {
        "first_seen_step": 199,
        "last_agreed_step": 99,
        "decided": 1,
        "model": "Net",
        "parameter": "body.bias",
        "parameters_differing": 1,
        "parameters": 3,
    }
    assert verdict.cost_rank_seconds == pytest.approx(3 * 100.0)
    assert headline(verdict) == "the replica of rank 1 drifted apart from the others"
    assert verdict.cause.startswith("parameter body.bias differs from those of ranks 0 and 2; they still agreed")
    assert "before step 100" in verdict.advice
    assert "rank 1" in verdict.advice
    assert replicas.judge(said(300, 7, 8, 7), none_left) == []  # the same episode
    (over,) = replicas.judge(said(400, 9, 9, 9), none_left)
    assert (over.kind, over.verdict.ranks, over.verdict.evidence["until_step"]) == ("repaired", [1], 399)
    assert over.verdict.cost_rank_seconds == pytest.approx(3 * 300.0)
    (again,) = replicas.judge(said(500, 1, 1, 2), none_left)
    assert again.verdict.ranks == [2]
    assert again.verdict.since_step == 400


def test_a_second_rank_that_follows_is_told_too_and_both_end_together() -> None:
    replicas = ReplicaCheck(range(4), NAMES)
    assert [c.verdict.ranks for c in replicas.judge(said(1, 1, 1, 1, 2), none_left)] == [[3]]
    assert [c.verdict.ranks for c in replicas.judge(said(2, 1, 1, 3, 2), none_left)] == [[2, 3]]
    assert [c.kind for c in replicas.judge(said(3, 1, 1, 1, 1), none_left)] == ["repaired", "repaired"]


def test_of_two_neither_can_be_told_right() -> None:
    replicas = ReplicaCheck(range(2), NAMES)
    (change,) = replicas.judge(said(1, 1, 2), {1: {0: [1, 2, 3], 1: [4, 5, 6]}}.__getitem__)
    verdict = change.verdict
    assert verdict.ranks == [0, 1]
    assert headline(verdict) == "the replicas of ranks 0 and 1 drifted apart"
    assert "of two, either may be right" in verdict.cause
    assert "they never agreed" in verdict.cause
    assert verdict.evidence["parameter"] == "body.weight"
    assert verdict.evidence["parameters_differing"] == 3
    assert "last_agreed_step" not in verdict.evidence


def test_several_checks_at_once_in_any_order_and_what_not_all_have_told_waits() -> None:
    replicas = ReplicaCheck(range(2), NAMES)
    told = merged(said(3, 5, 6), said(1, 4, 4), said(2, 5, 5))
    told[1] = [check for check in told[1] if check.number != 3]
    assert replicas.judge(told, none_left) == []
    assert replicas.judged == 2
    (change,) = replicas.judge(merged(said(2, 5, 5), said(3, 5, 6), said(1, 4, 4)), none_left)
    assert change.verdict.evidence["last_agreed_step"] == 1


def test_a_parameter_is_named_from_a_later_check_where_the_first_lists_are_gone() -> None:
    replicas = ReplicaCheck(range(2), NAMES)
    lists: Lists = {1: {0: [1, 2, 3]}, 2: {0: [1, 2, 3], 1: [1, 2, 4]}}
    (change,) = replicas.judge(merged(said(1, 1, 2), said(2, 1, 2)), lists.__getitem__)
    assert change.verdict.evidence["parameter"] == "head.weight"
    assert change.verdict.evidence["first_seen_step"] == 0


def test_without_lists_there_is_a_verdict_all_the_same() -> None:
    (change,) = ReplicaCheck(range(2), NAMES).judge(said(1, 1, 2), none_left)
    assert "parameter" not in change.verdict.evidence
    assert change.verdict.cause.startswith("its parameters differ between the ranks")


def test_other_parameters_are_said_to_be_others() -> None:
    (change,) = ReplicaCheck(range(2), NAMES).judge(said(1, 1, 2), {1: {0: [1, 2, 3], 1: [1, 2]}}.__getitem__)
    assert "it has other parameters" in change.verdict.cause


def test_who_takes_no_part_is_not_waited_for() -> None:
    replicas = ReplicaCheck(range(3), NAMES)
    told = {rank: checks for rank, checks in said(1, 1, 1, 2).items() if rank != 1}
    assert replicas.judge(told, none_left) == []
    replicas.without([1])
    assert [change.verdict.ranks for change in replicas.judge(told, none_left)] == [[0, 2]]


def test_an_alert_fires_is_resolved_when_they_agree_again_and_not_by_the_end_of_the_run() -> None:
    now = [0.0]
    book = AlertBook("run", now=lambda: now[0])
    replicas = ReplicaCheck(range(3), NAMES)
    told: list[tuple[str, str]] = []
    for number, digests in enumerate(([1, 1, 1], [1, 2, 1], [3, 3, 3], [4, 5, 4]), start=1):
        for change in replicas.judge(said(number, *digests), none_left):
            event = {"unix": 1.0, "kind": change.kind, "verdict": change.verdict}
            told += [(alert.status, alert.severity) for alert in book.record(_plain(event))]
        now[0] += 100.0
        told += [(alert.status, alert.severity) for alert in book.tick(number)]
    told += [(alert.status, alert.severity) for alert in book.close()]
    assert told == [("firing", "critical"), ("resolved", "critical"), ("firing", "critical")]


def _plain(event: dict[str, object]) -> dict[str, object]:
    return msgspec.to_builtins(event)


def test_every_how_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RINGSIDE_DIGEST_EVERY", raising=False)
    assert digest_steps(None) == 100
    assert digest_steps(0) == 0
    monkeypatch.setenv("RINGSIDE_DIGEST_EVERY", "0")
    assert digest_steps(None) == 0
    assert digest_steps(7) == 7
    for wrong in (-1, "often", 0.5, "1.5"):
        with pytest.raises(UsageError, match="whole number of steps"):
            digest_steps(wrong)  # type: ignore[arg-type]
