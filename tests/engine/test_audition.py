"""Choices that take turns in the job's own all-reduces."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from msgspec.structs import replace

from ringside.engine.algorithm import NATIVE
from ringside.engine.tuner.table import Rank, TimingRow
from ringside.engine.tuner.trials import (
    MORE_LARGE,
    MOST,
    TURNS_LARGE,
    TURNS_SMALL,
    OnlineTrials,
    settled_rank,
    trials_for,
)

MB = 1 << 20


def tried(rank: Rank) -> list[str]:
    """Return the choices that take part in the trials of a size; none: there are no trials."""
    trials = trials_for(rank)
    return [] if trials is None else trials.names


def rank(expected: dict[str, float], winner: str) -> Rank:
    rows = tuple(TimingRow(name, s, None, s, True) for name, s in sorted(expected.items(), key=lambda pair: pair[1]))
    return Rank(16 * MB, winner, "", rows)


def play(audition: OnlineTrials, seconds: dict[str, float], stalls: dict[int, float] | None = None) -> list[str]:
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
    names = tried(rank({"ring": 1.0, "direct": 1.1, NATIVE: 1.2, "tree": 1.5}, NATIVE))
    assert names == [NATIVE, "ring", "direct"]
    many = {f"tree*{k}": 1 + k / 100 for k in range(1, 12)}
    assert len(tried(rank(many, "tree*1"))) == MOST - 1
    assert tried(rank({}, NATIVE)) == []
    assert tried(rank({"ring": 1.0, NATIVE: 2.0}, "ring")) == ["ring", NATIVE]
    timed = rank({"ring": 1.0, "hosts/native": 2.5}, "ring")
    rows = tuple(replace(row, measured_s=row.expected_s) for row in timed.rows)
    assert tried(Rank(4, "ring", "", rows)) == [], "it was timed here and is far behind"


def test_all_have_their_turns_and_each_begins_one() -> None:
    audition = OnlineTrials(["a", "b", "c"], 3)
    called = play(audition, {"a": 1.0, "b": 1.1, "c": 1.2})
    assert Counter(called) == {"a": 3, "b": 3, "c": 3}
    assert {called[0], called[3], called[6]} == {"a", "b", "c"}
    assert audition.result() == pytest.approx({"a": 1.0, "b": 1.1, "c": 1.2})


def test_the_hopeless_leave_and_a_single_stall_decides_nothing() -> None:
    audition = OnlineTrials(["a", "b", "c"], 5)
    called = play(audition, {"a": 1.0, "b": 0.95, "c": 3.1}, stalls={5: 0.4})
    assert Counter(called)["c"] == 1
    assert Counter(called)["b"] == 5
    assert settled_rank(rank({"a": 1.0, "b": 1.0, "c": 1.0}, "a"), audition).winner == "b"


def test_who_takes_just_as_long_as_is_hopeless_stays_and_of_large_tensors_the_group_s_own_has_no_bonus() -> None:
    for times, left in ((3.0, {"a", "b"}), (3.01, {"a"})):
        audition = OnlineTrials(["a", "b"], 5)
        turns_of = {"a": 1.0, "b": times}
        while not audition.complete:
            audition.took(turns_of[audition.current])
        audition.judge(audition.times)
        assert ({"a", "b"} if not audition.over else {"a"}) == left
    level = {NATIVE: [1.0, 1.0, 1.0, 1.1], "ring": [1.0, 0.99, 1.01, 1.0]}
    assert turns(OnlineTrials([NATIVE, "ring"], 4), level).winner() == "ring"
    assert turns(OnlineTrials([NATIVE, "ring"], 4, stays=True), level).winner() == NATIVE


def test_the_first_turn_only_warms_up() -> None:
    audition = OnlineTrials(["a", "b"], 5)
    play(audition, {"a": 1.0, "b": 0.9}, stalls={2: 1.0})
    assert audition.result() == pytest.approx({"a": 1.0, "b": 0.9})
    assert audition.winner() == "b"


def test_one_that_is_left_alone_wins_at_once() -> None:
    audition = OnlineTrials(["a", "b"], 8)
    assert len(play(audition, {"a": 1.0, "b": 5.0})) == 2


def test_a_network_that_changes_meanwhile_leaves_what_does_not_fit_together() -> None:
    audition = OnlineTrials(["a", "b"], 5)
    play(audition, {"a": 1.0, "b": 1.4})
    assert audition.speed_ratio < 1, "who left was slower and is"
    changed = OnlineTrials(["a", "b"], 5)
    for level in (1.0, 1.0, 2.4, 2.4, 2.4):
        turn = {"a": level, "b": 1.6}
        while not changed.complete:
            changed.took(turn[changed.current])
        changed.judge(changed.times)
    assert changed.over
    assert changed.winner() == "a"
    assert changed.speed_ratio == pytest.approx(2.4 / 1.6)


def test_what_was_decided_stands_in_the_table() -> None:
    before = rank({"ring": 1.0, "direct": 1.1, NATIVE: 1.2, "tree": 1.5}, "ring")
    audition = trials_for(before)
    assert audition is not None
    play(audition, {"ring": 0.26, "direct": 0.21, NATIVE: 0.235})
    after = settled_rank(before, audition)
    assert after.winner == "direct"
    assert after.turns == TURNS_LARGE, "4 of 4 turns won and over a tenth ahead: no more are needed"
    assert [row.choice for row in after.rows] == ["direct", NATIVE, "ring", "tree"]
    assert [row.eligible for row in after.rows] == [True, True, False, True]
    assert "210 ms" in after.why
    assert "native 235 ms" in after.why


def test_small_ones_stay_in_the_race_for_longer() -> None:
    """A single small all-reduce may take twice as long by chance, a large one does not."""
    for size, left in ((4, 3), (16 * MB, 2)):
        audition = trials_for(replace(rank({"ring": 1.0, "direct": 1.1, "tree": 1.2}, "ring"), size_bytes=size))
        assert audition is not None
        for seconds in ((1.0, 1.0, 1.0), (1.0, 1.1, 1.9)):
            while not audition.complete:
                audition.took(seconds[audition.names.index(audition.current)])
            audition.judge(audition.times)
        names = set()
        while not audition.complete:
            names.add(audition.current)
            audition.took(1.0)
        assert len(names) == left


def test_small_ones_are_called_several_times_in_a_row_and_the_first_does_not_count() -> None:
    audition = OnlineTrials(["a", "b"], 4, calls=3)
    for seconds in (9.0, 1.0, 2.0):
        assert audition.current == "a"
        audition.took(seconds)
    assert audition.current == "b"
    for seconds in (9.0, 4.0, 4.0):
        audition.took(seconds)
    assert audition.times == [1.5, 4.0]


def test_a_megabyte_is_large() -> None:
    """Small ones are called four times in a row, large ones once."""
    for size, in_a_row in ((MB - 1, 4), (MB, 1)):
        audition = trials_for(replace(rank({"ring": 1.0, "direct": 1.1}, "ring"), size_bytes=size))
        assert audition is not None
        for _ in range(in_a_row):
            assert audition.current == "ring"
            audition.took(1.0)
        assert audition.current == "direct"


def test_who_had_an_audition_needs_none() -> None:
    assert trials_for(replace(rank({"ring": 1.0, "direct": 1.1}, "ring"), turns=5)) is None
    assert trials_for(rank({"ring": 1.0, "direct": 1.5}, "ring")) is not None, "direct is cheap by its price alone"
    assert trials_for(replace(rank({"ring": 1.0, "direct": 2.5}, "ring"), size_bytes=4)) is None


def test_a_large_size_is_not_decided_by_what_small_ones_took() -> None:
    """What was timed is native's; the others' times are guesses from the pace of small ones in a busy moment."""
    rows = (
        TimingRow("hosts/native", 0.22, None, 0.25, True),
        TimingRow("hosts/halving_doubling", 0.18, None, 0.26, True),
        TimingRow("hosts/direct", 0.18, None, 0.57, False),
        TimingRow("hosts/ring", 0.22, None, 0.52, False),
        TimingRow("leaders/ring", 0.23, None, 0.52, False),
    )
    names = tried(Rank(16 * MB, "hosts/native", "", rows))
    assert set(names) == {"hosts/native", "hosts/halving_doubling", "hosts/direct", "hosts/ring", "leaders/ring"}
    rows = (
        *rows[:3],
        TimingRow("leaders/ring", 0.21, None, 0.52, False),
        TimingRow("hosts/ring", 0.22, None, 0.52, False),
    )
    assert {"hosts/ring", "leaders/ring"} <= set(tried(Rank(16 * MB, "hosts/native", "", rows))), "whichever is cheaper"


def busy(audition: OnlineTrials, seconds: dict[str, float], noise: float, seed: int) -> str:
    """Carry it out on a machine that does something else now and then, for about as long as a turn lasts."""
    random = np.random.default_rng(seed)
    while not audition.over:
        slow = float(random.choice([1.0, 1.3, 1.8]))
        while not audition.complete:
            audition.took(seconds[audition.current] * slow * float(random.lognormal(0.0, noise)))
        audition.judge(audition.times)
    return audition.winner()


def test_close_ones_are_compared_side_by_side_on_a_busy_machine() -> None:
    """The machine wanders by 80%, the choices differ by 4: nearly always the better one is found."""
    seconds = {NATIVE: 1.04, "ring": 1.0, "tree": 1.06}
    won = Counter(busy(OnlineTrials([*seconds], TURNS_LARGE, MORE_LARGE), seconds, 0.02, seed) for seed in range(200))
    assert won["ring"] >= 185


def test_close_ones_go_on_until_one_is_plainly_ahead() -> None:
    level = OnlineTrials(["a", "b"], TURNS_LARGE, MORE_LARGE)
    while not level.over:
        level.took(1.0)
        level.took(1.0)
        level.judge(level.times)
    assert level.turns == TURNS_LARGE + MORE_LARGE
    ahead = OnlineTrials(["a", "b"], TURNS_LARGE, MORE_LARGE)
    play(ahead, {"a": 1.0, "b": 0.99})
    assert (ahead.turns, ahead.winner()) == (TURNS_LARGE, "b")
    apart = OnlineTrials(["a", "b", "c"], 3, MORE_LARGE)
    play(apart, {"a": 1.0, "b": 1.13, "c": 1.14})
    assert apart.turns == 3, "nobody else is close"


def test_what_close_ones_took_stands_in_the_order_in_which_they_were_found() -> None:
    """A stall of the machine in one's turn must not make the table say that the other one was faster."""
    audition = OnlineTrials(["a", "b"], TURNS_LARGE, MORE_LARGE)
    busy(audition, {"a": 1.02, "b": 1.0}, 0.004, 7)
    heard = audition.result()
    assert min(heard, key=lambda name: heard[name]) == audition.winner() == "b"
    assert heard["a"] / heard["b"] == pytest.approx(1.02, abs=0.01)


def test_whoever_was_faster_in_most_turns_wins_whatever_the_machine_did_in_the_others() -> None:
    """A turn counts for what the choices took beside each other in it, not for how slow it was for both."""
    audition = turns(OnlineTrials(["a", "b"], 4), {"a": [1.0, 1.0, 2.0, 0.9], "b": [1.0, 1.1, 1.8, 0.81]})
    assert audition.turns == 4
    assert audition.winner() == "b"
    assert audition.result()["b"] / audition.result()["a"] == pytest.approx(0.9)


def test_small_ones_that_are_cheap_take_part_whatever_a_busy_moment_said() -> None:
    rows = (
        TimingRow("leaders/direct", 0.86e-3, None, 3.7e-3, True),
        TimingRow("leaders/ring", 1.09e-3, 4.9e-3, 4.9e-3, True),
        TimingRow("leaders/recursive_doubling", 0.93e-3, 9e-3, 9e-3, True),
        TimingRow("leaders/one_shot", 0.90e-3, None, 9.5e-3, False),
        TimingRow("one_shot", 2.2e-3, None, 9.6e-3, False),
    )
    names = tried(Rank(16 << 10, "leaders/direct", "", rows))
    assert set(names) == {"leaders/direct", "leaders/ring", "leaders/recursive_doubling", "leaders/one_shot"}


@pytest.mark.parametrize("rivals", [1, 4])
def test_the_group_s_own_is_compared_until_another_one_is_plainly_ahead(rivals: int) -> None:
    """Whoever has the same all-reduce without us must not be slower with us because of a few lucky turns."""
    others = [f"tree*{k}" for k in range(2, 2 + rivals)]

    def won(gain: float) -> int:
        count = 0
        for seed in range(100):
            rng = np.random.default_rng(seed)
            audition = OnlineTrials([NATIVE, *others], TURNS_LARGE, MORE_LARGE)
            while not audition.over:
                audition.took((1.0 if audition.current == NATIVE else gain) * (1 + 0.02 * rng.standard_normal()))
                if audition.complete:
                    audition.judge(audition.times)
            count += audition.winner() == NATIVE
        return count

    assert won(1.05) == 100
    assert won(0.95) == 0


def turns(audition: OnlineTrials, seconds: dict[str, list[float]]) -> OnlineTrials:
    """Let every choice take in each turn what is given for it, the last one on and on."""
    turn = 0
    while not audition.over:
        while not audition.complete:
            times = seconds[audition.current]
            audition.took(times[min(turn, len(times) - 1)])
        audition.judge(audition.times)
        turn += 1
    return audition


def test_the_group_s_own_does_not_leave_for_a_few_bad_turns() -> None:
    for name, left in ((NATIVE, False), ("direct", True)):
        lasting = OnlineTrials([name, "ring"], TURNS_LARGE, MORE_LARGE)
        audition = turns(lasting, {name: [1.0, 1.4, 1.4, 1.0], "ring": [1.04]})
        assert (audition.winner() == "ring") == left
    gone = turns(OnlineTrials([NATIVE, "ring"], TURNS_LARGE, MORE_LARGE), {NATIVE: [1.6], "ring": [1.0]})
    assert gone.turns == 2, "it leaves where it is far behind"
    behind = turns(OnlineTrials([NATIVE, "ring"], TURNS_LARGE, MORE_LARGE), {NATIVE: [1.2], "ring": [1.0]})
    assert (behind.turns, behind.winner()) == (TURNS_LARGE, "ring"), "nor is it kept where it is plainly behind"


def test_the_group_s_own_takes_part_even_where_it_was_timed_as_slow() -> None:
    rows = (TimingRow("ring", 1.0, 1.0, 1.0, True), TimingRow(NATIVE, 2.5, 2.5, 2.5, True))
    for size_bytes in (4, MB // 4, MB):
        assert tried(Rank(size_bytes, "ring", "", rows)) == ["ring", NATIVE]


def small_audition(*names: str) -> OnlineTrials:
    rows = tuple(TimingRow(name, 1.0, 1.0, 1.0, True) for name in names)
    audition = trials_for(Rank(4, names[0], "", rows))
    assert audition is not None
    return audition


def test_of_small_tensors_the_group_s_own_stays_while_there_is_doubt() -> None:
    """Start-up and the first turns say little of a millisecond: another one must be faster in turn after turn."""
    lucky = turns(small_audition("ring", NATIVE), {NATIVE: [0.9], "ring": [0.2, 0.2, 0.3, 1.0]})
    assert lucky.winner() == NATIVE, "in its first turns it was four times as fast"
    close = turns(small_audition("ring", NATIVE), {NATIVE: [1.0, 1.1] * 8, "ring": [1.05, 1.0] * 8})
    assert close.winner() == NATIVE
    far = turns(small_audition("ring", NATIVE), {NATIVE: [2.0, 2.0, 0.8] * 5, "ring": [1.0]})
    assert far.winner() == "ring", "it loses a third of the turns, and is usually twice as fast"
    faster = turns(small_audition("ring", NATIVE), {NATIVE: [1.0], "ring": [0.9]})
    assert (faster.winner(), faster.turns) == ("ring", TURNS_SMALL), "plainly, and at once"


def test_where_the_group_s_own_wins_for_want_of_a_better_one_the_table_says_so() -> None:
    audition = turns(small_audition("ring", NATIVE), {NATIVE: [1.0, 1.1] * 8, "ring": [1.05, 1.0] * 8})
    rows = tuple(TimingRow(name, 1.0, 1.0, 1.0, True) for name in ("ring", NATIVE))
    rank = settled_rank(Rank(4, "ring", "", rows), audition)
    assert rank.winner == NATIVE
    assert rank.why.startswith(f"{NATIVE}: ")


def test_of_large_tensors_what_travels_in_pieces_wins_a_tie() -> None:
    """The next tensor is begun before it is there, which turns of one at a time do not show."""

    def decided(seconds: dict[str, float], size_bytes: int = 4 * MB) -> Rank:
        found = replace(rank(seconds, NATIVE), size_bytes=size_bytes)
        audition = trials_for(found, pieces_from_bytes=2 * MB)
        assert audition is not None
        play(audition, seconds)
        return settled_rank(found, audition)

    tie = {"hosts/native": 1.0, "hosts/ring": 1.02, "ring": 1.01, NATIVE: 1.2}
    assert decided(tie).winner == "hosts/ring"
    assert decided(tie).why.endswith("begun before it is there")
    assert decided(tie | {"leaders/ring": 1.01}).winner == "leaders/ring"
    assert decided(tie | {"ring": 0.99, "direct": 0.995}).winner == "hosts/ring", "nor has what is over ranks pieces"
    assert decided(tie, 1 * MB).winner == "hosts/native", "too small for pieces"
    for clear in ({"hosts/ring": 1.06}, {"hosts/ring": 1.01, "hosts/native": 0.95}):
        assert decided(tie | clear).winner == "hosts/native", clear
    assert decided({"ring": 1.01, NATIVE: 1.0}).winner == NATIVE, "over ranks there are no pieces"
    assert decided({"hosts/ring": 1.02, "hosts/tree": 1.0, NATIVE: 1.5}).winner == "hosts/tree"
    assert decided(tie, 4096).winner != "hosts/ring", "small ones have no pieces"
