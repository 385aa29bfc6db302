"""Choices that take turns in the job's own all-reduces."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from ringside.engine.audition import MOST, TURNS_LARGE, TURNS_SMALL, Audition, invited, settled, turns_at
from ringside.engine.choice import NATIVE
from ringside.engine.selection_table import Rank, Row

MB = 1 << 20


def rank(expected: dict[str, float], winner: str) -> Rank:
    rows = tuple(Row(name, s, None, s, True) for name, s in sorted(expected.items(), key=lambda pair: pair[1]))
    return Rank(16 * MB, winner, "", rows)


def play(audition: Audition, seconds: dict[str, float], stalls: dict[int, float] | None = None) -> list[str]:
    """Carry out all-reduces until it is decided; `stalls` adds seconds to the n-th of them."""
    called = []
    while not audition.over:
        name = audition.current
        called.append(name)
        audition.took(seconds[name] + (stalls or {}).get(len(called), 0.0))
        if audition.complete:
            audition.judge(audition.times)
    return called


def test_the_promising_take_part_and_the_present_choice_first() -> None:
    names = invited(rank({"ring": 1.0, "direct": 1.1, NATIVE: 1.2, "tree": 1.5}, NATIVE))
    assert names == [NATIVE, "ring", "direct"]
    many = {f"tree*{k}": 1 + k / 100 for k in range(1, 12)}
    assert len(invited(rank(many, "tree*1"))) == MOST - 1
    assert invited(rank({}, NATIVE)) == []
    assert invited(rank({"ring": 1.0, NATIVE: 2.0}, "ring")) == ["ring", NATIVE]
    timed = rank({"ring": 1.0, NATIVE: 2.0}, "ring")
    rows = tuple(replace(row, measured_s=row.expected_s) for row in timed.rows)
    assert invited(Rank(4, "ring", "", rows)) == ["ring"], "native was timed here and is far behind"


def test_all_have_their_turns_and_each_begins_one() -> None:
    audition = Audition(["a", "b", "c"], 3)
    called = play(audition, {"a": 1.0, "b": 1.1, "c": 1.2})
    assert Counter(called) == {"a": 3, "b": 3, "c": 3}
    assert {called[0], called[3], called[6]} == {"a", "b", "c"}
    assert audition.result() == pytest.approx({"a": 1.0, "b": 1.1, "c": 1.2})


def test_the_hopeless_leave_and_a_single_stall_decides_nothing() -> None:
    audition = Audition(["a", "b", "c"], 5)
    called = play(audition, {"a": 1.0, "b": 0.95, "c": 3.1}, stalls={5: 0.4})
    assert Counter(called)["c"] == 1
    assert Counter(called)["b"] == 5
    assert settled(rank({"a": 1.0, "b": 1.0, "c": 1.0}, "a"), audition).winner == "b"


def test_the_first_turn_only_warms_up() -> None:
    audition = Audition(["a", "b"], 5)
    play(audition, {"a": 1.0, "b": 0.9}, stalls={2: 1.0})
    assert audition.result() == pytest.approx({"a": 1.0, "b": 0.9})
    assert audition.finalists() == {"a", "b"}


def test_one_that_is_left_alone_wins_at_once() -> None:
    audition = Audition(["a", "b"], 8)
    assert len(play(audition, {"a": 1.0, "b": 5.0})) == 2


def test_what_was_decided_stands_in_the_table() -> None:
    before = rank({"ring": 1.0, "direct": 1.1, NATIVE: 1.2, "tree": 1.5}, "ring")
    audition = Audition(invited(before), TURNS_LARGE)
    play(audition, {"ring": 0.26, "direct": 0.21, NATIVE: 0.235})
    after = settled(before, audition)
    assert after.winner == "direct"
    assert after.turns == TURNS_LARGE
    assert [row.choice for row in after.rows] == ["direct", NATIVE, "ring", "tree"]
    assert [row.eligible for row in after.rows] == [True, True, False, True]
    assert "210 ms" in after.why
    assert "native 235 ms" in after.why


def test_small_ones_have_more_turns() -> None:
    assert turns_at(4) == TURNS_SMALL > turns_at(4 * MB) == TURNS_LARGE
