"""Ranks that die, leave, stop or are interrupted while others need them: who hears of it, how, and how soon."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import Outcome, Team, communicator, hear, on_ranks, outcomes_of, place, run_script, say
from tests.support.waiting import until

from ringside.errors import ClosedError, DeadlineError, PeerLostError, SyncError

from .exchanges import before_its_exchange

pytestmark = pytest.mark.native

PATHS = ("one_shot", "push", "staged", "ring", "tree", "empty", "async", "lanes", "private lanes", "moves", "reduce")


FAR_S = 600.0  # a deadline that no test lives to see: what is heard, is heard of the death


# ------------------------------------------------------------------------------- kill -9


def forever(path: str, comm: Any) -> None:
    """Call collectives until one fails."""
    if path == "empty":
        while True:
            comm.empty(50_000)
    if path in ("push", "lanes"):
        x = comm.empty(1_000_000)
    else:
        counts = {"one_shot": 3, "staged": 500_000, "private lanes": 500_000, "async": 2_000, "moves": 3_000}
        x = np.zeros(counts.get(path, 300_000), np.float32)
    bounds = [x.size * r // comm.size for r in range(comm.size + 1)]
    while "lanes" in path:
        comm.reduce_scatter_(x, bounds)
        comm.all_gather_(x, bounds)
    while path == "moves":
        comm.scatter(x[:700], comm.gather(x[:700], 2), 2)
        comm.broadcast(comm.all_to_all(comm.all_gather(comm.reduce_scatter(x))), 1)
    while path == "reduce":
        comm.reduce(x, 1)
    while True:
        if path == "async":
            for work in [comm.all_reduce(x, async_op=True) for _ in range(10)]:
                work.wait()
        else:
            comm.all_reduce(x, algorithm=path if path in ("ring", "tree") else None)


def until_killed(path: str) -> tuple[str, tuple[int, ...], list[str]]:
    """Call collectives until one fails; return how, and which later calls did not fail."""
    comm = communicator(timeout_s=FAR_S)
    comm.all_reduce(np.ones(3))
    say("ready")
    try:
        forever(path, comm)
    except SyncError as error:
        ended = (type(error).__name__, error.ranks)
    later = []
    for name, call in (("all_reduce", lambda: comm.all_reduce(np.ones(3))), ("empty", lambda: comm.empty(3))):
        with contextlib.suppress(PeerLostError):
            call()
            later.append(name)
    with pytest.raises((PeerLostError, ClosedError)):
        comm.all_reduce(np.ones(3), async_op=True).wait()
    comm.close()
    comm.close()
    with pytest.raises((PeerLostError, ClosedError)):
        comm.barrier()
    return (*ended, later)


# In `make test`: a death on every path, of one rank after the other.
DEATHS = [
    pytest.param(path, victim, marks=pytest.mark.core if at % 4 == victim else ())
    for at, path in enumerate(PATHS)
    for victim in range(4)
]


@pytest.mark.parametrize(("path", "victim"), DEATHS)
def test_every_survivor_hears_of_a_killed_rank_at_once(path: str, victim: int) -> None:
    with Team(4) as team:
        team.start(until_killed, path)
        team.await_word()
        time.sleep(random.Random(f"{path} {victim}").random() * 0.02)  # a random moment, not a condition
        team.kill(victim)
        outcomes = team.finish()
    assert outcomes[victim].exit_status == -signal.SIGKILL
    for rank in {0, 1, 2, 3} - {victim}:
        check_survivor(outcomes[rank], victim)


def check_survivor(outcome: Outcome, victim: int) -> None:
    assert outcome.ok, outcome
    kind, ranks, later = outcome.value
    assert (kind, ranks) == ("PeerLostError", (victim,))
    assert later == []


# ------------------------------------------------------------------------------- leaving


def leave(how: str) -> str:
    comm = communicator()
    comm.all_reduce(np.ones(4))
    if comm.rank == 1:
        if how == "close":
            comm.close()
            with pytest.raises(ClosedError):
                comm.all_reduce(np.ones(4))
            with pytest.raises(ClosedError):
                comm.barrier()
            with pytest.raises(ClosedError):
                comm.empty(4)
            return ""
        if how == "drop":
            del comm
            return ""
        os._exit(0)
    with comm, pytest.raises(PeerLostError) as caught:
        comm.all_reduce(np.ones(100_000 if comm.rank else 4_000))
    assert caught.value.ranks == (1,)
    return str(caught.value)


@pytest.mark.parametrize("how", ["close", "exit"])
def test_a_rank_that_leaves_early_is_named(how: str) -> None:
    with Team(3) as team:
        team.start(leave, how)
        outcomes = team.finish()
    assert outcomes[1].exit_status == (0 if how == "exit" else None)
    for rank in (0, 2):
        assert outcomes[rank].ok, outcomes[rank]
        assert "rank 1 died or left" in outcomes[rank].value


def last_one_out() -> None:
    """Ranks close as soon as their last collective returned; the others' result must not suffer."""
    for i in range(60):
        comm = communicator(str(i))
        x = np.ones(3 if i % 2 else 30_000)
        comm.all_reduce(x)
        comm.close()
        assert (x == comm.size).all()


@pytest.mark.parametrize("size", [2, 4])
def test_closing_right_after_a_collective_takes_nothing_from_the_others(size: int) -> None:
    on_ranks(size, last_one_out)


def close_while_waiting() -> str:
    comm = communicator()
    if comm.rank == 1:
        hear()
        x = np.ones(3)
        with pytest.raises(PeerLostError):
            comm.all_reduce(x)  # rank 0 had told what it gives to this one, and then gave it up
        assert (x == 1).all()
        return ""
    work = comm.all_reduce(np.ones(3), async_op=True)
    comm.abort()  # the peer never came
    assert isinstance(work.exception(), ClosedError)
    assert not [t for t in threading.enumerate() if t.name.startswith("ringside")]
    return "closed"


def test_close_ends_a_collective_that_nobody_joins() -> None:
    with Team(2) as team:
        team.start(close_while_waiting)
        assert team.finish_one(0).value == "closed"
        team.tell(1, "go")
        assert team.finish_one(1).ok


# ------------------------------------------------------------------------------- deadlines


def stopped(path: str) -> tuple[str, tuple[int, ...]]:
    comm = communicator(timeout_s=1.2)
    comm.all_reduce(np.ones(3))
    say("ready")
    try:
        forever(path, comm)
    except (DeadlineError, PeerLostError) as error:
        with pytest.raises(type(error)):
            comm.barrier()
        comm.close()
        return type(error).__name__, error.ranks
    raise AssertionError


@pytest.mark.parametrize("path", PATHS)
def test_a_stopped_rank_is_named_when_the_deadline_passes(path: str) -> None:
    victim = 0 if path == "staged" else 2
    with Team(4) as team:
        team.start(stopped, path)
        team.await_word()
        team.kill(victim, signal.SIGSTOP)
        try:
            for rank in {0, 1, 2, 3} - {victim}:
                outcome = team.finish_one(rank, 20)
                assert outcome.ok, outcome
                assert outcome.value == ("DeadlineError", (victim,)), (rank, outcome)
        finally:
            team.kill(victim, signal.SIGCONT)
        late = team.finish_one(victim, 20)
        assert late.ok, late  # it hears that the others went on without it


def nobody_comes() -> float:
    with communicator(timeout_s=0.6) as comm:
        if comm.rank == 0:
            hear()
            return 0.0
        since = time.monotonic()
        with pytest.raises(DeadlineError, match="Timed out waiting 600ms: rank 0 did not arrive") as caught:
            comm.barrier()
        assert caught.value.ranks == (0,)
        assert isinstance(caught.value, TimeoutError)
        return time.monotonic() - since


def test_a_deadline_is_kept() -> None:
    with Team(3) as team:
        team.start(nobody_comes)
        # Whoever came first has waited so long, and ends it for all: another may have come a moment later.
        assert max(team.finish_one(rank).value for rank in (1, 2)) >= 0.6
        team.tell(0, "go")
        assert team.finish_one(0).ok


# ------------------------------------------------------------------------------- Ctrl-C


class StaysAway(Exception):
    """This rank does not do what the others count on."""


def stay_away() -> None:
    say("ready")
    hear()
    raise StaysAway


def interrupted(way: str) -> None:
    comm = communicator(timeout_s=FAR_S)
    comm.barrier()
    if comm.rank == 2:
        if way == "empty":  # it comes, but stays away from the exchange that follows
            with contextlib.suppress(StaysAway), before_its_exchange(comm, stay_away):
                comm.empty(10)
        else:
            say("ready")
            hear()
    elif way != "empty":
        threading.Thread(target=tell_when_waiting, args=(comm,)).start()
    try:
        if way == "async":
            comm.all_reduce(np.ones(3000), async_op=True).wait()
        elif way == "empty" and comm.rank != 2:
            with before_its_exchange(comm, lambda: say("ready")):
                comm.empty(10)
        else:
            comm.all_reduce(np.ones(3000))
    finally:
        if way == "sync":
            with pytest.raises(SyncError):
                comm.barrier()
        comm.__exit__(*sys.exc_info())


def tell_when_waiting(comm: Any) -> None:
    """Say so once this rank waits in its second collective, which cannot end without rank 2."""
    until(comm.absent)
    say("ready")


@pytest.mark.parametrize("way", ["sync", "async", "empty"])
@pytest.mark.parametrize("victim", [0, 1])
def test_ctrl_c_interrupts_a_waiting_rank_and_the_others_hear_of_it(way: str, victim: int) -> None:
    with Team(3) as team:
        team.start(interrupted, way)
        team.await_word()
        team.kill(victim, signal.SIGINT)
        there = team.finish_one(victim)
        assert there.error == "KeyboardInterrupt", there
        other = team.finish_one(1 - victim)
        assert (other.error, other.ranks) == ("PeerLostError", (victim,)), other
        team.tell(2, "go")
        late = team.finish_one(2)
        assert late.error == "PeerLostError", late
        assert victim in late.ranks


# ------------------------------------------------------------------------------- interpreters that end


SCRIPT = Path(__file__).parent / "scripts" / "interpreter_ends.py"


@pytest.mark.parametrize("way", ["at once", "symmetric", "async", "async, forgotten", "two", "in a circle"])
def test_an_interpreter_may_end_without_close(way: str) -> None:
    for ended in run_script(2, SCRIPT, way):
        assert (ended.status, ended.out, ended.err) == (0, "", "")


def test_an_interpreter_ends_though_a_collective_is_under_way_that_nobody_joins() -> None:
    first, second = run_script(2, SCRIPT, "under way")
    assert (first.status, second.status) == (0, 0), (first, second)
    assert "Fatal" not in first.err
    assert "leaked" not in first.err


def test_an_exception_on_one_rank_reaches_the_others_as_a_lost_peer() -> None:
    ended = run_script(3, SCRIPT, "raises")
    assert [e.status for e in ended] == [1, 1, 1]
    assert "ValueError: mine" in ended[1].err
    for rank in (0, 2):
        assert "PeerLostError: all_reduce (collective 2) on rank" in ended[rank].err
        assert "rank 1 died or left" in ended[rank].err


def test_a_forked_child_does_not_hurt_its_parent() -> None:
    for ended in run_script(2, SCRIPT, "forks"):
        assert (ended.status, ended.out, ended.err) == (0, "unhurt\n", "")


def test_outcomes_tell_failures_apart() -> None:
    """The harness itself: a raised error, a value, and that the team can be used again."""
    outcomes = outcomes_of(2, one_raises)
    assert [o.error for o in outcomes] == ["", "ZeroDivisionError"]
    assert on_ranks(2, one_raises, 0) == [0, 0]


def one_raises(rank: int = 1) -> int:
    if rank and place().rank == rank:
        return 1 // 0
    return 0
