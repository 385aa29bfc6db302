"""Choices that are tried in the job's own all-reduces. Time is virtual: the test says what one takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from msgspec.structs import replace

from ringside.engine.algorithm import NATIVE
from ringside.engine.tuner.table import Rank, TimingRow
from ringside.engine.tuner.trials import (
    CALLS_SMALL,
    MOST,
    MOST_TURNS,
    RISK,
    SHARE,
    TURNS,
    OnlineTrials,
    settled_rank,
    trials_for,
)

MB, KB = 1 << 20, 1 << 10
Seconds = Callable[[str], float]


def rank(expected: Mapping[str, float], winner: str, size_bytes: int = 16 * MB) -> Rank:
    rows = tuple(TimingRow(name, s, None, s, True) for name, s in sorted(expected.items(), key=lambda pair: pair[1]))
    return Rank(size_bytes, winner, "", rows)


def tried(rank: Rank) -> list[str]:
    """Return the choices that take part in the trials of a size; none: there are no trials."""
    trials = trials_for(rank)
    return [] if trials is None else trials.names


def even(*names: str, calls: int = 1, pieces: bool = False) -> OnlineTrials:
    """Return trials of choices that are expected to take as long, which may begin soon."""
    return OnlineTrials(names, [1.0] * len(names), calls, pieces=pieces)


class Job:
    """All-reduces of one size, one after the other.

    Args:
        trials: The size's.
        seconds: What the next all-reduce by a choice takes.
        besides_s: What each trial takes besides.
    """

    def __init__(self, trials: OnlineTrials, seconds: Seconds | Mapping[str, float], besides_s: float = 0.0) -> None:
        self.trials, self.besides_s = trials, besides_s
        self.seconds = seconds if callable(seconds) else seconds.__getitem__
        self.called: list[str] = []
        self.took: list[float] = []

    def run(self, calls: int = 100_000) -> Job:
        """Call until it is decided, at most so often."""
        for _ in range(calls):
            if self.trials.over:
                break
            due = len(self.called) + 1 >= self.trials.paid_at
            self.called.append(self.trials.current if due else self.trials.using)
            self.took.append(self.seconds(self.called[-1]))
            if due:
                self.trials.took(self.took[-1])
                if self.trials.complete:
                    self.trials.judge(self.trials.times, self.besides_s)
        return self


def noisy(usual: Mapping[str, float], noise: float, seed: int) -> Seconds:
    """A machine that does something else now and then, for longer than a trial lasts."""
    random = np.random.default_rng(seed)
    calls = 0
    slow = 1.0

    def seconds(name: str) -> float:
        nonlocal calls, slow
        calls += 1
        if calls % 50 == 1:
            slow = float(random.choice([1.0, 1.3, 1.8]))
        return usual[name] * slow * float(random.lognormal(0.0, noise))

    return seconds


# ------------------------------------------------------------------------------------------------ who takes part


def test_the_promising_take_part_and_the_group_s_own_is_in_use() -> None:
    names = tried(rank({"direct": 1.0, "ring": 1.1, NATIVE: 1.14, "tree": 1.5}, "direct"))
    assert names == [NATIVE, "direct", "ring"]
    many = {f"tree*{k}": 1 + k / 100 for k in range(1, 12)}
    assert len(tried(rank(many, "tree*1"))) == MOST - 1
    assert tried(rank({}, NATIVE)) == []
    assert tried(rank({"tree": 1.0, NATIVE: 2.0}, "tree")) == [NATIVE, "tree"]
    timed = rank({"ring": 1.0, "hosts/native": 2.5}, "ring")
    rows = tuple(replace(row, measured_s=row.expected_s) for row in timed.rows)
    assert tried(Rank(4, "ring", "", rows)) == [], "it was timed here and is far behind"


def test_what_start_up_found_far_ahead_of_the_group_s_own_is_in_use_where_it_times_tensors() -> None:
    for size_bytes, winner in ((4, NATIVE), (KB, "tree"), (64 * KB, "tree"), (MB, NATIVE), (16 * MB, NATIVE)):
        assert tried(rank({"tree": 1.0, NATIVE: 1.5}, "tree", size_bytes))[0] == winner, size_bytes
    assert tried(rank({"tree": 1.0, NATIVE: 1.49}, "tree", KB))[0] == NATIVE


def test_of_large_tensors_a_ring_that_sends_fewer_bytes_is_in_use() -> None:
    """Links and choices were timed in a busy moment, what a ring sends is known."""
    for ring_s, first in ((1.0, "leaders/ring"), (1.12, NATIVE)):
        rows = (
            TimingRow("leaders/tree", 0.8, 0.5, 0.5, True),
            TimingRow(NATIVE, 1.17, 0.6, 0.6, True),
            TimingRow("hosts/ring", 1.16, None, 2.0, False),
            TimingRow("leaders/ring", ring_s, None, 2.0, False),
            TimingRow("ring", 0.9, None, 2.0, False),
        )
        names = tried(Rank(16 * MB, "leaders/tree", "", rows))
        assert names[0] == first
        assert {"leaders/tree", NATIVE, "hosts/ring", "leaders/ring"} <= set(names)


def test_a_revision_s_choice_is_in_use_and_earlier_all_reduces_pay_for_no_trials() -> None:
    of = rank({"ring": 1.0, "direct": 1.1, NATIVE: 1.2}, "ring")
    trials = trials_for(of, revised=True, calls_before=1000)
    assert trials is not None
    assert trials.using == "ring"
    assert trials.paid_at == pytest.approx(1000 + RISK / SHARE)


def test_who_was_tried_is_not_tried_again() -> None:
    assert trials_for(replace(rank({"ring": 1.0, "direct": 1.1}, "ring"), turns=5)) is None
    assert trials_for(rank({"ring": 1.0, "direct": 1.5}, "ring")) is not None, "direct is cheap by its price alone"
    assert trials_for(rank({"ring": 1.0, "direct": 2.5}, "ring", 4)) is None


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


def test_the_group_s_own_takes_part_even_where_it_was_timed_as_slow() -> None:
    rows = (TimingRow("ring", 1.0, 1.0, 1.0, True), TimingRow(NATIVE, 2.5, 2.5, 2.5, True))
    for size_bytes in (4, MB // 4, MB):
        assert set(tried(Rank(size_bytes, "ring", "", rows))) == {"ring", NATIVE}


# ------------------------------------------------------------------------------------------------ what trials cost


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("calls", [1, 4])
def test_trials_cost_no_more_than_a_share_of_the_all_reduces_so_far_and_one_trial(calls: int, seed: int) -> None:
    """At any time, whatever choices take; what a trial takes is unknown before, so one may be dearer than thought."""
    random = np.random.default_rng(seed)
    usual = {name: float(random.uniform(0.7, 4.0)) for name in "abcdef"}
    job = Job(even(*usual, calls=calls), noisy(usual, 0.1, seed), besides_s=0.2)
    spent, trial = 0.0, [0.0]
    while not job.trials.over and len(job.called) < 5000:
        turns, used = job.trials.turns, job.trials.using
        job.run(1)
        if job.trials.turns > turns:
            challenger_s, used_s = sum(job.took[-calls:]), sum(job.took[-2 * calls : -calls])
            usual_s = used_s / calls if calls == 1 else float(np.mean(job.took[-2 * calls : -calls][1:]))
            trial.append(max(challenger_s - used_s + job.besides_s, 0.0) / usual_s)
            spent += trial[-1]
            assert spent <= SHARE * len(job.called) + max(trial) + 1e-9, (used, job.called[-1])


def test_a_slow_choice_waits_until_its_next_trial_is_paid_for() -> None:
    job = Job(even("a", "slow"), {"a": 1.0, "slow": 1.4}).run()
    at = [number for number, name in enumerate(job.called, 1) if name == "slow"]
    assert at[0] == RISK / SHARE + 1, "the choice in use first, and it pays for the unknown"
    assert np.diff(at).min() >= 0.4 / SHARE - 1
    assert len(at) == 1 + TURNS, "one that warms up, then it is plainly slower"
    assert job.trials.using == "a"


def test_a_fast_choice_is_tried_at_once_and_in_use_soon() -> None:
    job = Job(even(NATIVE, "ring"), {NATIVE: 1.0, "ring": 0.8}).run()
    assert job.called.index("ring") == 5
    assert len(job.called) == 5 + 2 * (1 + TURNS) - 1
    assert job.trials.using == "ring"


def test_large_tensors_on_long_links_begin_with_the_cheapest_of_ours_or_with_a_ring_that_takes_little_more() -> None:
    of = rank({"ring": 1.0, "direct": 0.98, NATIVE: 1.0}, "ring")
    for of_size, long, first in ((of, True, "ring"), (of, False, NATIVE), (replace(of, size_bytes=KB), True, NATIVE)):
        trials = trials_for(of_size, long=long)
        assert trials is not None
        assert trials.using == first
    for others, first in (({"ring": 1.24}, "ring"), ({"ring": 1.26}, "direct"), ({}, "direct")):
        trials = trials_for(rank({"direct": 1.0, NATIVE: 1.0, **others}, "direct"), long=True)
        assert trials is not None
        assert trials.using == first


def test_on_long_links_only_the_group_s_own_is_tried_beside_a_large_tensor_s_ring() -> None:
    rows = (
        TimingRow("recursive_doubling", 1.3, None, 1.2, True),
        TimingRow("direct", 0.98, None, 2.0, True),
        TimingRow("ring", 1.0, None, 2.0, True),
        TimingRow(NATIVE, 1.0, None, 2.0, True),
    )
    large = Rank(16 * MB, "ring", "", rows)
    trials = trials_for(large, long=True)
    assert trials is not None
    assert trials.names == ["ring", NATIVE]
    again = trials_for(replace(large, winner="direct"), revised=True, long=True)
    assert again is not None
    assert again.names == ["ring", NATIVE], "whose flows meet is not in use because a revision found it"
    assert "recursive_doubling" in tried(large)


def test_what_is_a_lot_cheaper_than_a_ring_begins_on_long_links_whatever_it_took_at_start_up() -> None:
    rows = (
        TimingRow("ring", 1.0, 1.0, 1.0, True),
        TimingRow("tree", 0.78, None, 1.1, True),
        TimingRow(NATIVE, 1.2, 1.2, 1.2, True),
        TimingRow("direct", 0.7, 1.4, 1.4, False),
        TimingRow("hosts/native", 0.5, 1.5, 1.5, False),
    )
    trials = trials_for(Rank(4 * MB, "ring", "", rows), long=True)
    assert trials is not None
    assert trials.names == ["direct", NATIVE]


def test_with_few_calls_the_safe_choice_is_all_there_is() -> None:
    trials = trials_for(rank({"ring": 1.0, "direct": 1.1, NATIVE: 1.2}, "ring", 4))
    assert trials is not None
    assert set(Job(trials, {"ring": 0.1, "direct": 0.1, NATIVE: 1.0}).run(100).called) == {NATIVE}
    expected = {"tree": 1.0, NATIVE: 1.2}
    trials = trials_for(rank(expected, "tree"))
    assert trials is not None
    assert set(Job(trials, expected).run(4).called) == {NATIVE}


def test_agreeing_on_a_trial_and_preparing_it_is_paid_for_too() -> None:
    free, dear = (Job(even("a", "b"), {"a": 1.0, "b": 1.0}, besides_s).run(300) for besides_s in (0.0, 0.5))
    assert free.trials.over
    assert dear.trials.turns == pytest.approx(300 * SHARE / 0.5, abs=1)


def test_the_first_hundred_calls_take_no_longer_than_a_twentieth_more() -> None:
    """Whoever has the same all-reduce without us: trials included, and with the mistakes of start-up."""
    for seed in range(50):
        random = np.random.default_rng(seed)
        others = ("two_tree", "tree", "direct", "chain")
        usual = {name: float(random.uniform(0.8, 1.6)) for name in others} | {NATIVE: 1.0}
        for size_bytes in (4, 16 * MB):
            guessed = {name: float(random.uniform(0.8, 1.3)) for name in usual}
            trials = trials_for(rank(guessed, "tree", size_bytes))
            assert trials is not None
            job = Job(trials, usual).run(100)
            assert sum(job.took) <= 1.05 * len(job.took)


def test_small_ones_are_called_several_times_in_a_row_and_the_first_does_not_count() -> None:
    trials = even("a", "b", calls=3)
    for seconds in (9.0, 1.0, 2.0):
        assert trials.current == "a"
        trials.took(seconds)
    for seconds in (9.0, 4.0, 4.0):
        assert trials.current == "b"
        trials.took(seconds)
    assert trials.complete
    assert trials.times == [1.5, 4.0, 5.0]


def test_a_megabyte_is_large() -> None:
    for size_bytes, in_a_row in ((MB - 1, CALLS_SMALL), (MB, 1)):
        trials = trials_for(rank({"ring": 1.0, "direct": 1.1}, "ring", size_bytes))
        assert trials is not None
        for _ in range(in_a_row):
            assert trials.current == "ring"
            trials.took(1.0)
        assert trials.current == "direct"


def test_ranks_that_are_told_the_same_decide_alike_whatever_each_of_them_measured() -> None:
    ranks = [even("a", "b", "c") for _ in range(3)]
    random = np.random.default_rng(1)
    while not ranks[0].over:
        names = {(trials.current, trials.using, trials.paid_at) for trials in ranks}
        assert len(names) == 1
        for trials in ranks:
            trials.took(float(random.uniform(0.5, 2.0)))
        if ranks[0].complete:
            slowest = [max(times) for times in zip(*(trials.times for trials in ranks), strict=True)]
            for trials in ranks:
                trials.judge(slowest, 0.01)


# ------------------------------------------------------------------------------------------------ who wins


def test_the_hopeless_leave_and_a_single_stall_decides_nothing() -> None:
    stalls = iter([0.0] * 15 + [4.0] + [0.0] * 10_000)
    usual = {"a": 1.0, "b": 0.9, "c": 4.1}
    trials = OnlineTrials([*usual], [1.0, 0.9, 1.0])
    job = Job(trials, lambda name: usual[name] + next(stalls)).run()
    assert job.called.count("c") == 1
    assert trials.using == "b"


def test_the_first_trial_only_warms_up() -> None:
    warm = iter([5.0] + [0.9] * 1000)
    trials = OnlineTrials(["a", "b"], [1.0, 1.0])
    job = Job(trials, lambda name: 1.0 if name == "a" else next(warm))
    job.run()
    assert trials.using == "a", "five times as long is hopeless even so"
    warm = iter([3.0] + [0.9] * 1000)
    trials = OnlineTrials(["a", "b"], [1.0, 1.0])
    Job(trials, lambda name: 1.0 if name == "a" else next(warm)).run()
    assert trials.using == "b"
    assert trials.result() == pytest.approx({"a": 1.0, "b": 0.9})


def test_after_a_change_the_others_are_compared_with_the_new_choice() -> None:
    usual = {NATIVE: 1.0, "ring": 0.8, "direct": 0.9, "tree": 0.7}
    trials = OnlineTrials([*usual], [1.0, 0.7, 0.8, 0.9])
    Job(trials, usual).run()
    assert trials.using == "tree"
    assert trials.result() == pytest.approx(usual)


def test_on_a_busy_machine_nearly_always_the_better_one_is_found() -> None:
    """The machine wanders by 80%, the choices differ by 4."""
    usual = {NATIVE: 1.04, "ring": 1.0, "tree": 1.06}
    won = [Job(even(*usual), noisy(usual, 0.01, seed)).run().trials.using for seed in range(100)]
    assert won.count("ring") >= 90


@pytest.mark.parametrize("rivals", [1, 4])
def test_the_group_s_own_stays_unless_another_one_is_plainly_faster(rivals: int) -> None:
    """Whoever has the same all-reduce without us must not be slower with us because of a few lucky turns."""
    others = [f"tree*{k}" for k in range(2, 2 + rivals)]

    def kept(gain: float) -> int:
        usual = {NATIVE: 1.0} | dict.fromkeys(others, gain)
        return sum(Job(even(*usual), noisy(usual, 0.02, seed)).run().trials.using == NATIVE for seed in range(100))

    assert kept(1.05) == 100
    assert kept(0.93) == 0


def test_who_is_usually_far_ahead_wins_though_it_loses_some_turns() -> None:
    times = iter([0.5, 0.5, 0.5, 2.0] * 100)
    trials = even(NATIVE, "ring")
    Job(trials, lambda name: 1.0 if name == NATIVE else next(times)).run()
    assert trials.using == "ring"


def test_equals_are_compared_so_often_and_no_longer() -> None:
    job = Job(even("a", "b"), {"a": 1.0, "b": 1.0}).run()
    assert (job.trials.turns, job.trials.using) == (1 + MOST_TURNS, "a")


def test_of_large_tensors_what_travels_in_pieces_wins_a_tie() -> None:
    """The next tensor is begun before it is there, which trials of one at a time do not show."""

    def decided(seconds: dict[str, float], size_bytes: int = 4 * MB) -> Rank:
        found = rank(seconds, NATIVE, size_bytes)
        trials = trials_for(found, pieces_from_bytes=2 * MB)
        assert trials is not None
        return settled_rank(found, Job(trials, seconds).run().trials)

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


# ------------------------------------------------------------------------------------------------ the table


def test_what_was_decided_stands_in_the_table() -> None:
    before = rank({"chain": 1.0, "direct": 1.1, NATIVE: 1.2, "tree": 1.5}, "chain")
    trials = trials_for(before)
    assert trials is not None
    job = Job(trials, {"chain": 0.26, "direct": 0.21, NATIVE: 0.235})
    assert settled_rank(before, trials).winner == NATIVE
    while trials.using == NATIVE:
        job.run(1)
    assert settled_rank(before, trials).winner == "direct"
    after = settled_rank(before, job.run().trials)
    assert (after.winner, after.turns) == ("direct", trials.turns)
    assert [row.choice for row in after.rows] == ["direct", NATIVE, "chain", "tree"]
    assert [row.eligible for row in after.rows] == [True, True, False, True]
    assert "210 ms" in after.why
    assert "native 235 ms" in after.why


def test_before_it_is_decided_the_table_says_what_is_in_use_and_that_it_is_to_be_tried() -> None:
    before = rank({"tree": 1.0, NATIVE: 1.2}, "tree")
    trials = trials_for(before)
    assert trials is not None
    now = settled_rank(before, trials)
    assert (now.winner, now.turns) == (NATIVE, 0)
    assert now.why.startswith(f"{NATIVE}: until another one is plainly faster")
    Job(trials, {"tree": 1.0, NATIVE: 1.2}).run(9)
    assert trials.turns
    assert settled_rank(before, trials).turns == 0
