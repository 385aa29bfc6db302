"""Collectives in the order of their calls, by whoever waits: with jobs that only take notes, and real threads."""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.support.waiting import until

from ringside.engine.runtime.queue import CollectiveQueue, QueuedCollective
from ringside.engine.runtime.timer import KernelTimer, ThreadTimer, new_timer
from ringside.errors import ClosedError, SyncError

LIMIT_S = 20.0
LATER_S = 1e6  # longer than any test: the thread does not come by itself


@pytest.fixture(params=[KernelTimer, ThreadTimer])
def turns(request, monkeypatch) -> Iterator[CollectiveQueue]:
    monkeypatch.setattr("ringside.engine.runtime.queue.new_timer", request.param)
    line = CollectiveQueue("ringside-turns", "closed")
    yield line
    line.stop(LIMIT_S)
    line.join(LIMIT_S)


class Notes:
    """What was carried out, in order, and by which threads."""

    def __init__(self) -> None:
        self.names: list[Any] = []
        self.threads: list[int] = []

    def job(self, name: Any) -> Callable[[], None]:
        def job() -> None:
            self.names.append(name)
            self.threads.append(threading.get_ident())

        return job


def in_thread(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


# ------------------------------------------------------------------------------------------------ who carries out


def test_whoever_waits_carries_out_what_is_before_it_in_order(turns):
    notes = Notes()
    started = [turns.start(notes.job(k), LATER_S) for k in range(4)]
    assert started[2].wait()
    assert (notes.names, notes.threads) == ([0, 1, 2], [threading.get_ident()] * 3)
    assert [turn.done for turn in started] == [True, True, True, False]
    turns.run(notes.job("at once"))
    assert notes.names == [0, 1, 2, 3, "at once"]


def test_what_nobody_waits_for_is_carried_out_by_the_thread(turns):
    notes, done = Notes(), threading.Event()
    for k in range(3):
        turns.start(notes.job(k))
    turns.start(done.set)
    assert done.wait(LIMIT_S)
    assert notes.names == [0, 1, 2]
    assert threading.get_ident() not in notes.threads


def test_the_thread_comes_when_it_has_slept_long(turns):
    for _ in range(2):
        done = threading.Event()
        turns.start(done.set)
        assert done.wait(LIMIT_S)
        until(lambda: turns.state().wakes_at == math.inf)


def test_large_ones_are_begun_at_once_and_take_with_them_what_is_before(turns):
    notes, done = Notes(), threading.Event()
    turns.start(notes.job("small"), LATER_S)
    turns.start(done.set, 0.0)
    assert done.wait(LIMIT_S)
    assert notes.names == ["small"]


def test_who_asks_instead_of_waiting_has_it_done(turns):
    turn = turns.start(lambda: None, LATER_S)
    until(turn.is_completed)
    assert turn.wait()


def test_who_wants_to_be_told_is_told_once(turns):
    told: list[str] = []
    done = threading.Event()
    turn = turns.start(lambda: None, LATER_S)
    turn.when_done(lambda: (told.append("first"), done.set()))
    assert done.wait(LIMIT_S)
    turn.when_done(lambda: told.append("late"))
    assert told == ["first", "late"]


def test_a_short_wait_ends_in_time_and_the_collective_goes_on(turns):
    go, notes = threading.Event(), Notes()
    turn = turns.start(lambda: (go.wait(LIMIT_S), notes.job("slow")()), LATER_S)
    assert not turn.wait(0.01)
    assert not turn.done
    go.set()
    assert turn.wait(LIMIT_S)
    assert notes.threads != [threading.get_ident()]


def test_several_threads_wait_for_one_that_another_carries_out(turns):
    go, ended = threading.Event(), []
    slow, after = turns.start(lambda: go.wait(LIMIT_S), LATER_S), turns.start(lambda: None, LATER_S)
    carrier = in_thread(slow.wait)
    until(lambda: slow.begun)
    waiters = [in_thread(lambda turn=turn: ended.append(turn.wait())) for turn in (slow, slow, after, after)]
    until(lambda: turns.state().waiting == 4)
    assert ended == []
    go.set()
    for thread in (carrier, *waiters):
        thread.join(LIMIT_S)
    assert ended == [True] * 4


def test_the_thread_is_not_woken_for_what_others_carry_out(monkeypatch):
    """By the kernel's timer; without one it is woken each time."""
    if not isinstance(alarm := new_timer(), KernelTimer):
        pytest.skip("this kernel has no timers to wait for (timerfd)")
    alarm.close()
    slept: list[float] = []

    class Noted(KernelTimer):
        def sleep(self) -> None:
            slept.append(time.monotonic())
            super().sleep()

    monkeypatch.setattr("ringside.engine.runtime.queue.new_timer", Noted)
    turns = CollectiveQueue("ringside-turns", "closed")
    for _ in range(50):
        assert turns.start(lambda: None, 0.5).wait()
    assert len(slept) <= 1  # when it begins
    turns.stop(LIMIT_S)


# ------------------------------------------------------------------------------------------------ posted


def test_what_was_posted_is_finished_by_who_waits_or_calls_the_next(turns):
    notes = Notes()
    begin = lambda name: notes.job(f"begins {name}")() or notes.job(f"ends {name}")  # noqa: E731
    first = turns.post(begin, 1)
    assert first is not None
    assert turns.post(begin, 2) is None  # one is before it
    turns.run(notes.job("next"))
    assert notes.names == ["begins 1", "ends 1", "next"]
    assert first.done
    second = turns.post(begin, 2)
    assert second is not None
    until(second.is_completed)
    assert notes.threads[-1] != threading.get_ident()


def test_the_thread_leaves_what_was_posted_alone_but_not_what_comes_after(turns):
    notes, done = Notes(), threading.Event()
    turns.post(lambda: notes.job("posted"))
    assert "ringside-turns" not in {thread.name for thread in threading.enumerate()}
    turns.start(done.set)
    assert done.wait(LIMIT_S)
    assert notes.names == ["posted"]


def test_tensors_live_as_long_as_what_was_posted_and_no_longer(turns):
    class Tensor:
        pass

    tensor = Tensor()
    gone = weakref.ref(tensor)
    turn = turns.post(lambda _: lambda: None, tensor)
    del tensor
    gc.collect()
    assert gone() is not None
    turn.wait()
    assert gone() is None


# ------------------------------------------------------------------------------------------------ inside a collective


def test_callbacks_call_more_at_once_and_wait_for_what_is_behind(turns):
    notes = Notes()
    first, second = turns.start(notes.job(1), LATER_S), turns.start(notes.job(2), LATER_S)
    behind = turns.start(notes.job(3), LATER_S)

    def told() -> None:
        assert turns.is_here
        turns.run(notes.job("in callback"))
        behind.wait()

    turns.add_callback(first, told)
    assert second.wait()
    assert notes.names == [1, "in callback", 2, 3]
    assert set(notes.threads) == {threading.get_ident()}
    assert not turns.is_here


def test_a_collective_that_waits_for_itself_is_refused(turns):
    turn: list[QueuedCollective] = []
    turn.append(turns.start(lambda: turn[0].wait(), LATER_S))
    with pytest.raises(SyncError, match="very thread"):
        turn[0].wait()


# ------------------------------------------------------------------------------------------------ what goes wrong


def fails(error: BaseException) -> Callable[[], None]:
    def job() -> None:
        raise error

    return job


def test_an_error_is_for_those_who_wait_for_that_one(turns):
    wrong, right = turns.start(fails(KeyError("x")), LATER_S), turns.start(lambda: None, LATER_S)
    assert right.wait()
    for _ in range(2):
        with pytest.raises(KeyError):
            wrong.wait()
    with pytest.raises(ZeroDivisionError):
        turns.run(fails(ZeroDivisionError()))
    assert turns.start(lambda: None, LATER_S).wait()


def test_ctrl_c_is_for_who_carries_out_and_the_line_goes_on(turns):
    interrupted, mine = turns.start(fails(KeyboardInterrupt()), LATER_S), turns.start(lambda: None, LATER_S)
    with pytest.raises(KeyboardInterrupt):
        mine.wait()
    assert not mine.done
    assert mine.wait()
    with pytest.raises(SyncError, match="interrupted on this rank"):
        interrupted.wait()
    with pytest.raises(KeyboardInterrupt):
        turns.run(fails(KeyboardInterrupt()))
    assert turns.start(lambda: None, LATER_S).wait()


def test_the_thread_survives_what_is_raised_there(turns):
    for error in (KeyError(), SystemExit()):
        turn = turns.start(fails(error), 0.0)
        until(turn.is_completed)
    turns.start((done := threading.Event()).set, 0.0)
    assert done.wait(LIMIT_S)


def test_stop_carries_out_what_is_lined_up_and_takes_no_more():
    turns, notes = CollectiveQueue("ringside-turns", "it is closed"), Notes()
    started = [turns.start(notes.job(k), LATER_S) for k in range(3)]
    turns.stop(LIMIT_S)
    assert notes.names == [0, 1, 2]
    assert all(turn.wait() for turn in started)
    with pytest.raises(ClosedError, match="it is closed"):
        turns.start(lambda: None)
    turns.join(LIMIT_S)


def test_who_stops_it_from_inside_does_not_wait_for_itself():
    turns, notes = CollectiveQueue("ringside-turns", "closed"), Notes()
    first, second = turns.start(lambda: turns.stop(LIMIT_S), LATER_S), turns.start(notes.job(2), LATER_S)
    assert first.wait()
    assert second.wait()
    turns.join(LIMIT_S)
    assert notes.names == [2]


class SluggishTimer:
    """Wakes a moment after its time, as on a busy machine, and not if it has been set to another one meanwhile."""

    def __init__(self) -> None:
        self.wakes_at, self.sleeps = math.inf, threading.Event()

    def set(self, wakes_at: float) -> None:
        self.wakes_at = wakes_at

    def sleep(self) -> None:
        self.sleeps.set()
        while self.wakes_at > time.monotonic():
            time.sleep(0.05)

    def close(self) -> None:
        pass


def test_the_thread_ends_though_the_last_one_was_carried_out_before_it_woke(monkeypatch):
    timer = SluggishTimer()
    monkeypatch.setattr("ringside.engine.runtime.queue.new_timer", lambda: timer)
    turns, notes = CollectiveQueue("ringside-turns", "closed"), Notes()
    first, second = turns.start(lambda: turns.stop(LIMIT_S), LATER_S), turns.start(notes.job(2), LATER_S)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "ringside-turns")
    assert timer.sleeps.wait(LIMIT_S)
    assert first.wait()
    assert second.wait()
    turns.join(LIMIT_S)
    assert not thread.is_alive()


# ------------------------------------------------------------------------------------------------ all at once


def test_any_mix_of_threads_carries_out_each_once_in_order_and_one_at_a_time(turns):
    order: list[tuple[int, int]] = []
    inside: list[tuple[int, int]] = []
    wrong: list[str] = []

    def job(name: tuple[int, int]) -> Callable[[], None]:
        def carry() -> None:
            inside.append(name)
            if len(inside) > 1:
                wrong.append(f"{inside} at once")
            time.sleep(0)  # others may come in
            order.append(name)
            inside.pop()

        return carry

    def busy(seed: int) -> None:
        chance, mine = random.Random(seed), []
        for k in range(150):
            way = chance.randrange(5)
            if way == 0:
                turns.run(job((seed, k)))
            else:
                mine.append(turns.start(job((seed, k)), chance.choice([0.0, 1e-4, LATER_S])))
            if way == 1:
                chance.choice(mine).wait()
            elif way == 2:
                chance.choice(mine).is_completed()
            elif way == 3 and not mine[-1].wait(LIMIT_S):
                wrong.append("not done in time")
        for turn in mine:
            turn.wait()

    threads = [in_thread(lambda seed=seed: busy(seed)) for seed in range(4)]
    for thread in threads:
        thread.join(LIMIT_S * 3)
    assert not wrong
    assert len(order) == len(set(order)) == 4 * 150
    for seed in range(4):
        assert [k for who, k in order if who == seed] == list(range(150))


# ------------------------------------------------------------------------------------------------ Ctrl-C anywhere


@pytest.mark.parametrize("way", ["run", "start", "post"])
def test_ctrl_c_at_any_moment_leaves_no_line_stuck(way):
    """Real signals, each at another moment of a call; then nobody carries out, and the next call goes through."""
    ways: dict[str, Callable[[CollectiveQueue], Any]] = {
        "run": lambda line: line.run(lambda: None),
        "start": lambda line: line.start(lambda: None, LATER_S).wait(),
        "post": lambda line: (posted := line.post(lambda: lambda: None)) and posted.wait(),
    }
    armed, rng, hits = [False], random.Random(way), 0

    def interrupt(*_: Any) -> None:
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    line = CollectiveQueue("ringside-turns", "closed")
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(1500):
            try:
                armed[0] = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 2e-4))
                while armed[0]:
                    ways[way](line)
            except KeyboardInterrupt:
                hits += 1
            finally:
                armed[0] = False
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert not line.is_here
            assert line.start(lambda: None, LATER_S).wait()
            assert line.state().queued == 0
    finally:
        signal.signal(signal.SIGALRM, before)
        line.stop(LIMIT_S)
    assert hits > 500


def test_without_another_thread_nothing_is_lined_up_and_closing_goes_on(monkeypatch):
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    line, notes = CollectiveQueue("ringside-turns", "it is closed"), Notes()
    posted = line.post(lambda: notes.job("posted"))
    assert posted is not None
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="thread"):
        line.start(notes.job("lost"))
    assert line.run(notes.job("here")) is None
    assert notes.names == ["posted", "here"]
    assert line.post(lambda: notes.job("left"))
    line.stop(LIMIT_S)
    line.join(LIMIT_S)
    with pytest.raises(ClosedError):
        line.start(notes.job("late"))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_stops_nothing_though_the_parents_thread_held_the_guard(turns):
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with turns._guard:
            held.set()
            over.wait(LIMIT_S)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(LIMIT_S)
    child = os.fork()
    if child == 0:
        turns.stop(LIMIT_S)
        os._exit(0)
    deadline, ended = time.monotonic() + LIMIT_S, 0
    while not ended and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    over.set()
    holder.join(LIMIT_S)
    assert ended, "the child waits for a thread that it does not have"
    assert status == 0


def test_a_finalizer_may_stop_it_wherever_it_runs(turns):
    def collected() -> None:
        with turns._guard:  # as where the cyclic collector runs inside
            turns.stop(LIMIT_S)

    thread = threading.Thread(target=collected, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    with pytest.raises(ClosedError):
        turns.start(lambda: None)
