"""The hang watch's judgement, on standings made by hand and an injected clock."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ringside.monitor.hang.attribution import (
    LIMIT_S,
    NORMAL_WAITS,
    OWN_CALL_S,
    WARM_UP_S,
    Failure,
    ProcessState,
    RankState,
    WaitingCall,
    find_cause,
)
from ringside.monitor.hang.detector import HangDetector, verdict_of
from ringside.monitor.verdict import headline, onset
from ringside.processes import catches, read_stat

LONG_S = LIMIT_S + 1
TICK_S = 0.25
"""How often a watcher looks (ringside.pytorch.hang_watch.watch)."""
ASLEEP = ProcessState(state="S", cpu_share=0.0, kernel_function="futex_wait_queue")
STOPPED = ProcessState(state="T")
GONE = ProcessState(state="Z", gone_s=1.0, signal=9)


def waits(rank: int, seq: int = 41, seconds: float = LONG_S, **more: Any) -> RankState:
    calls = [WaitingCall(number, "all_reduce", 4096) for number in range(seq - 2, seq + 1)]
    known = {"step": 7, "entered": seq, "synced": 20, "waiting_s": seconds, "still_s": seconds, "calls": calls}
    return RankState(**{"rank": rank, "process": ASLEEP, **known, **more})


def works(rank: int, seq: int = 40, seconds: float = LONG_S + 1, **more: Any) -> RankState:
    calls = [WaitingCall(number, "all_reduce", 4096) for number in range(seq - 2, seq + 1)]
    known = {"step": 7, "entered": seq, "synced": 20, "still_s": seconds, "calls": calls, "where": "train.py:9 in f"}
    return RankState(**{"rank": rank, "process": ASLEEP, **known, **more})


def in_call(rank: int, call: str = "barrier", number: int = 6, seconds: float = LONG_S, **more: Any) -> RankState:
    return works(rank, seconds=seconds, waiting_s=seconds, call=call, group_seq=number, **more)


def blames(*standings: RankState) -> tuple[str, str, tuple[int, ...]] | None:
    found = find_cause(standings)
    return None if found is None else (found.kind, found.why, found.ranks)


# ------------------------------------------------------------------------------------------------ in several groups


def in_group(rank: int, group: str, ranks: list[int], number: int = 5, **more: Any) -> RankState:
    return in_call(rank, group=group, group_ranks=ranks, group_number=number, group_counts={group: number}, **more)


def test_who_did_not_enter_a_collective_of_a_subgroup_is_waited_for_and_nobody_else() -> None:
    """0 waits for 1, and 2 for 0; 3 is in none of their groups, and further behind."""
    states = [
        in_group(0, "a", [0, 1], seconds=OWN_CALL_S + 1),
        works(1, group_counts={"a": 4}, seconds=OWN_CALL_S + 1),
        in_group(2, "b", [0, 2], seconds=OWN_CALL_S + 1),
        works(3, group_counts={"c": 1}, seconds=OWN_CALL_S + 1),
    ]
    assert blames(*states) == ("hang", "asleep", (1,))
    states[1] = works(1, group_counts={"a": 5}, seconds=OWN_CALL_S + 1)
    assert blames(*states) != ("hang", "asleep", (1,)), "it has entered: it is not who is missing"


def test_one_of_hundreds_that_is_missing_from_a_barrier_of_all_is_waited_for() -> None:
    long_s = OWN_CALL_S + 1
    states = [in_group(rank, "0", [], seconds=long_s) for rank in range(703)]
    states.append(works(703, group_counts={"0": 4}, seconds=long_s))
    assert blames(*states) == ("hang", "asleep", (703,))
    states[-1] = works(703, seconds=long_s)
    assert blames(*states) != ("hang", "asleep", (703,)), "how far it is is not known"


def test_who_sends_a_message_is_waited_for() -> None:
    states = [in_group(0, "pp", [1], number=0, seconds=OWN_CALL_S + 1), works(1, seconds=OWN_CALL_S + 1)]
    assert blames(*states) == ("hang", "asleep", (1,))


def test_a_rank_that_may_be_at_work_is_waited_for_before_it_is_called_a_hang() -> None:
    states = [in_group(0, "a", [0, 1]), works(1, group_counts={"a": 4})]
    assert blames(*states) is None
    early = find_cause(states, is_patient=False)
    assert early is not None
    assert early.ranks == (1,)
    detector = HangDetector()
    for tick in range(20):
        assert detector.check(states, 100.0 + TICK_S * tick) is None
    assert detector.awaited is not None
    assert detector.awaited.ranks == (1,)


def test_where_all_wait_in_several_groups_nobody_has_called_another_collective() -> None:
    """Without the groups the one in a call of its own would be blamed."""
    states = [in_group(0, "a", [0, 1]), in_group(1, "b", [0, 1], call="broadcast"), in_group(2, "a", [0, 2])]
    assert blames(*states) == ("hang", "crossed", ())
    assert "several process groups" in verdict_of(find_cause(states), states).cause  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ who it is


@pytest.mark.parametrize(
    ("process", "more", "why"),
    [
        (STOPPED, {}, "stopped"),
        (ASLEEP, {}, "asleep"),
        (ProcessState(state="D"), {}, "disk"),
        (ProcessState(state="R", cpu_share=0.98), {}, "busy"),
        (ProcessState(state="R", cpu_share=0.98), {"silent_s": LONG_S}, "no_answer"),
        (ProcessState(), {"silent_s": LONG_S}, "unheard"),
        (GONE, {"left": True}, "left"),
    ],
)
def test_a_rank_that_does_not_come(process: ProcessState, more: dict[str, Any], why: str) -> None:
    assert blames(waits(0), works(1, process=process, **more), waits(2)) == ("hang", why, (1,))
    found = find_cause([waits(0), works(1, process=process, **more), waits(2)])
    assert found is not None
    assert (found.seq, found.op, found.size_bytes, found.arrived, found.missing) == (
        41,
        "all_reduce",
        4096,
        (0, 2),
        (1,),
    )
    assert found.waiting == (0, 2)


def test_a_rank_stopped_inside_the_collective() -> None:
    assert blames(waits(0), waits(1, process=STOPPED)) == ("hang", "stopped", (1,))


def test_first_causes_are_told_from_victims() -> None:
    assert blames(waits(0, 43), works(1, 41), works(2, 40), works(3, 40)) == ("hang", "asleep", (2, 3))
    assert blames(waits(0), in_call(1), works(2, group_seq=5)) == ("hang", "asleep", (2,))
    assert blames(waits(0), works(1, process=STOPPED), works(2)) == ("hang", "stopped", (1,))


def test_ranks_in_different_collectives() -> None:
    assert blames(waits(0), in_call(1)) == ("mismatch", "different", (1,)), "of two, who is behind"
    assert blames(waits(0), in_call(1), in_call(2)) == ("mismatch", "different", (0,)), "the minority"
    assert blames(waits(0), in_call(1), waits(2)) == ("mismatch", "different", (1,))


def test_ranks_with_different_sizes() -> None:
    other = [WaitingCall(40, "all_reduce", 4096), WaitingCall(41, "all_reduce", 512)]
    standings = [waits(0), waits(1, calls=other), waits(2)]
    assert blames(*standings) == ("mismatch", "sizes", (1,))
    found = find_cause(standings)
    assert found is not None
    assert (found.seq, found.size_bytes) == (41, 4096)
    assert "512 bytes" in verdict_of(found, standings).cause


def test_all_arrived_and_it_does_not_end() -> None:
    assert blames(waits(0), waits(1)) == ("hang", "inside", ())
    assert blames(waits(0), waits(1, process=ProcessState(), silent_s=60.0)) == ("hang", "unheard", (1,))


def test_a_host_that_was_never_heard_of() -> None:
    never = RankState(rank=1, entered=-1, still_s=60.0, silent_s=60.0)
    found = find_cause([waits(0), never])
    assert found is not None
    assert (found.why, found.ranks, found.seq, found.missing) == ("unheard", (1,), 41, (1,))
    assert find_cause([waits(0, synced=1), never]) is None, "it may come late in the first steps"


def test_what_the_engine_told() -> None:
    told = Failure("mismatch", [1], "ranks called different things")
    assert blames(works(0, failure=told), works(1, failure=told)) == ("mismatch", "told", (1,))
    assert blames(works(0, failure=Failure("late", [1], "")), works(1, 39)) == ("hang", "told", (1,))
    assert blames(works(0, failure=Failure("lost", [1], "")), works(1, left=True)) is None


def test_dead_ranks() -> None:
    assert blames(works(0, seconds=0.1), works(1, process=GONE)) == ("dead_rank", "dead", (1,))
    assert blames(works(0), works(1, process=GONE, left=True)) is None
    asked = msgspec.structs.replace(GONE, signal=int(signal.SIGTERM))
    assert blames(works(0), works(1, process=asked)) is None, "somebody ended the job"
    fresh = msgspec.structs.replace(GONE, gone_s=0.0)
    assert find_cause([works(0), works(1, process=fresh)]) is None, "the others may be about to end, too"
    assert find_cause([works(0), works(1, process=fresh)], at_end=True) is not None


# ------------------------------------------------------------------------------------------------ what is no hang


@pytest.mark.parametrize(
    "standings",
    [
        [works(0, 40, 600.0), works(1, 40, 600.0)],  # all validate
        [waits(0, seconds=LIMIT_S - 1), works(1)],  # not long enough
        [waits(0, seconds=60.0), works(1, seconds=1.0)],  # slow, and it goes on
        [waits(0, seconds=WARM_UP_S - 1, synced=0), works(1, seconds=WARM_UP_S, synced=0)],  # it compiles
        [waits(0, seconds=WARM_UP_S - 1), works(1, seconds=WARM_UP_S, synced=0)],  # one of them does
        [waits(0, seconds=WARM_UP_S - 1), works(1, seconds=WARM_UP_S, synced=1)],  # it does in its second pass
        [in_call(0, seconds=OWN_CALL_S - 1), works(1, seconds=OWN_CALL_S)],  # a checkpoint before a barrier
        [waits(0, seconds=9.0, longest_s=4.0), works(1, seconds=10.0)],  # waits of 4 s are normal here
    ],
    ids=["validation", "short", "slow", "compiles", "one compiles", "one compiles later", "checkpoint", "usual"],
)
def test_normal_pauses(standings: list[RankState]) -> None:
    assert find_cause(standings) is None


def test_patience_ends() -> None:
    assert (
        find_cause([waits(0, seconds=WARM_UP_S + 1, synced=0), works(1, seconds=WARM_UP_S + 2, synced=0)]) is not None
    )
    assert find_cause([in_call(0, seconds=OWN_CALL_S + 1), works(1, seconds=OWN_CALL_S + 2)]) is not None
    assert find_cause([waits(0, seconds=12.0, longest_s=4.0), works(1, seconds=13.0)]) is not None
    assert find_cause([waits(0, synced=0), works(1, synced=0, process=STOPPED)]) is not None, "no compiler does that"


@pytest.mark.parametrize("longest", [0.0, 0.1, 1.0, 2.0, 10.0])
def test_the_limit_keeps_the_promise(longest: float) -> None:
    limit = max(LIMIT_S, NORMAL_WAITS * longest)
    assert find_cause([waits(0, seconds=limit, longest_s=longest), works(1, seconds=limit + 1)]) is None
    assert find_cause([waits(0, seconds=limit + 0.01, longest_s=longest), works(1, seconds=limit + 1)]) is not None
    assert longest < limit + 0.5 <= max(5.0, 3 * longest)


# ------------------------------------------------------------------------------------------------ once


class Looks:
    """A `HangDetector` that is shown standings twice a second."""

    def __init__(self) -> None:
        self.watch, self.now = HangDetector([100, 101]), 1000.0
        self.told: list[tuple[str, Any]] = []

    def see(self, *standings: RankState, seconds: float = 0.5) -> None:
        change = self.watch.check(standings, self.now)
        self.now += seconds
        if change is not None:
            self.told.append((change.kind, change.verdict))

    def hang(self, seconds: float, **more: Any) -> None:
        for at in range(int(seconds * 2)):
            self.see(waits(0, seconds=at / 2 + 1e-9), works(1, seconds=at / 2 + 0.1, **more))

    def train(self, seq: int = 50) -> None:
        for _ in range(30):
            self.see(works(0, seq, seconds=0.01), works(1, seq, seconds=0.01))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.told]


@pytest.mark.parametrize("longest", [0.0, 0.5, 1.3, 1.6, 2.0, 5.0, 40.0])
@pytest.mark.parametrize("phase", [0.0, 0.13, 0.24])
def test_a_rank_is_named_in_time(longest: float, phase: float) -> None:
    """Within max(5 s, 3 × the longest normal wait), and no normal wait is called a hang: on a virtual clock."""
    watch, began, told = HangDetector(), 100.0 + phase, None
    for tick in range(1200):
        now = 95.0 + tick * TICK_S
        waited = max(now - began, 0.0)
        blocked = {"seconds": waited, "longest_s": longest} if waited else {"seconds": 0.01, "longest_s": longest}
        change = watch.check([waits(0, **blocked), works(1, seconds=max(waited, 0.01)), waits(2, **blocked)], now)
        if change is not None:
            told = now - began
            break
    assert told is not None
    assert told <= max(5.0, 3 * longest)
    assert told > max(4.0, 2.5 * longest)
    assert change is not None
    assert (change.kind, change.verdict.kind, change.verdict.ranks) == ("verdict", "hang", [1])


def test_a_hang_is_told_once_and_its_end_with_the_price() -> None:
    looks = Looks()
    looks.train(40)
    looks.hang(20, process=STOPPED)
    assert looks.kinds == ["verdict"]
    first = looks.told[0][1]
    assert first.evidence["pid"] == 101
    assert "kill -CONT 101" in first.advice
    assert headline(first) == "rank 1 did not arrive: the job hangs"
    looks.train()
    assert looks.kinds == ["verdict", "repaired"]
    last = looks.told[1][1]
    assert 19 <= last.evidence["resumed_after_seconds"] <= 21
    assert last.cost_rank_seconds == pytest.approx(last.evidence["resumed_after_seconds"], rel=0.1)
    assert "kept all others waiting" in headline(last)
    assert (onset(first), onset(last)) == (f"since step {first.since_step}", f"at step {last.since_step}")
    looks.hang(20, process=STOPPED)
    assert looks.kinds == ["verdict", "repaired", "verdict"], "it is a new one"


def test_a_pause_that_ended_by_itself_is_known_the_next_time() -> None:
    looks = Looks()
    looks.train(40)
    for _ in range(3):
        looks.hang(10)
        looks.train()
    assert looks.kinds == ["verdict", "repaired"]
    looks.hang(10 * NORMAL_WAITS + 3)
    assert looks.kinds == ["verdict", "repaired", "verdict"], "this one is longer than it ever was"


def test_nothing_more_is_said_of_a_job_that_is_lost() -> None:
    looks = Looks()
    looks.train(40)
    looks.see(works(0, seconds=0.1), works(1, process=GONE))
    looks.see(works(0, process=GONE), works(1, process=GONE))
    looks.hang(20, process=STOPPED)
    assert looks.kinds == ["verdict"]


def test_the_end_of_a_hung_job_is_no_repair() -> None:
    looks = Looks()
    looks.train(40)
    looks.hang(20, process=STOPPED)
    looks.see(works(0, failure=Failure("other", [], "timeout")), works(1, process=GONE))
    looks.train()
    assert looks.kinds == ["verdict"]


def test_nobody_is_blamed_for_a_pause_of_the_watcher_itself() -> None:
    looks = Looks()
    looks.train(40)
    looks.now += 600.0  # the whole job was stopped, or the machine slept
    for at in range(4):
        looks.see(waits(0, seconds=600.0 + at), works(1, seconds=600.0 + at))
    assert looks.kinds == []
    for at in range(10):
        looks.see(waits(0, seconds=602.0 + at), works(1, seconds=602.0 + at))
    assert looks.kinds == ["verdict"]


@pytest.mark.parametrize("why", [STOPPED, ASLEEP, ProcessState(state="R", cpu_share=1.0), ProcessState(state="D")])
def test_every_verdict_says_who_what_and_what_next(why: ProcessState) -> None:
    standings = [waits(0), works(1, process=why), waits(2)]
    found = find_cause(standings)
    assert found is not None
    verdict = verdict_of(found, standings, [5, 6, 7])
    assert "all_reduce number 41 (4096 bytes)" in verdict.cause
    assert "train.py:9 in f" in verdict.cause
    assert verdict.evidence["arrived"] == "0, 2"
    assert verdict.evidence["missing"] == "1"
    assert all(not isinstance(value, float) or math.isfinite(value) for value in verdict.evidence.values())
    assert verdict.cost_rank_seconds == pytest.approx(2 * LONG_S)
    assert verdict.advice.endswith(".")


# ------------------------------------------------------------------------------------------------ the kernel's word


def test_proc_may_be_missing_or_odd(tmp_path: Path) -> None:
    assert read_stat(9, str(tmp_path)) is None
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "stat").write_text("nonsense")
    (tmp_path / "9" / "status").write_text("SigCgt:\t0000000000000100\nSigIgn: x\n")
    assert read_stat(9, str(tmp_path)) is None
    assert catches(9, 9, str(tmp_path))
    assert not catches(9, 10, str(tmp_path))
    assert not catches(8, 9, str(tmp_path))
