"""The thread for asynchronous collectives, the timer that wakes one, and closing: once, and not in a child."""

from __future__ import annotations

import math
import os
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any

import pytest

from ringside.engine.runtime.timer import KernelTimer, ThreadTimer, Timer
from ringside.engine.runtime.worker import FINISH_S, AtExit, Closeable, Work, Worker
from ringside.errors import ClosedError, UsageError

LIMIT_S = 20.0


@pytest.fixture
def worker():
    made = Worker("ringside-test")
    yield made
    made.stop(LIMIT_S)


# ------------------------------------------------------------------------------------------------ work


def test_work_under_way_done_and_failed() -> None:
    future: Future[Any] = Future()
    work = Work(future)
    assert (work.is_completed(), work.is_success(), work.exception()) == (False, False, None)
    for timeout in (0.01, timedelta(milliseconds=10)):
        with pytest.raises(TimeoutError, match=r"the collective is not done after 0\.01 s"):
            work.wait(timeout)
    with pytest.raises(UsageError, match="timeout"):
        work.wait(0)
    future.set_result([1, 2])
    assert (work.wait(), work.result(), work.get_future()) == (True, [1, 2], future)
    assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None)
    failed: Future[Any] = Future()
    failed.set_exception(error := FutureTimeoutError("its own"))
    assert (Work(failed).is_completed(), Work(failed).is_success(), Work(failed).exception()) == (True, False, error)
    with pytest.raises(FutureTimeoutError, match="its own"):
        Work(failed).wait(1.0)


def test_a_worker_is_idle_before_anybody_is_told_and_goes_on_after_an_error(worker: Worker) -> None:
    go, seen = threading.Event(), []
    assert worker.idle
    assert not worker.is_here
    first = worker.submit(lambda: go.wait(LIMIT_S))
    second = worker.submit(lambda: (worker.is_here, worker.idle))
    wrong = worker.submit(lambda: [][0])
    for work in (first, wrong):
        work.get_future().add_done_callback(lambda _: seen.append(worker.idle))
    assert not worker.idle
    go.set()
    assert second.result() == (True, False)
    with pytest.raises(IndexError):
        wrong.wait(LIMIT_S)
    assert worker.submit(lambda: "more").result() == "more"
    assert (seen, worker.idle) == ([False, True], True), "the first one had others behind it, the last one none"


def test_a_worker_that_is_stopped_finishes_what_is_queued_and_takes_no_more(worker: Worker) -> None:
    go, done = threading.Event(), []
    work = worker.submit(lambda: go.wait(LIMIT_S))
    worker.submit(lambda: (worker.join(LIMIT_S), done.append("of its own it does not wait for itself")))
    worker.stop(0.0)  # waits for nobody
    assert not work.is_completed()
    with pytest.raises(ClosedError, match="closed on this rank"):
        worker.submit(int)
    go.set()
    worker.join(LIMIT_S)
    assert len(done) == 1
    assert "ringside-test" not in {thread.name for thread in threading.enumerate()}


# ------------------------------------------------------------------------------------------------ timers


@pytest.mark.parametrize("kind", [KernelTimer, ThreadTimer])
def test_a_timer_wakes_at_its_time_or_at_once_and_the_last_time_counts(kind: type[Timer]) -> None:
    timer = kind()
    try:
        for wakes_at in (0.0, time.monotonic() - 1.0, time.monotonic() + 0.03):
            timer.set(math.inf)
            timer.set(wakes_at)
            timer.sleep()
            while time.monotonic() < wakes_at:
                timer.sleep()
        if kind is ThreadTimer:
            timer.sleep()  # its time is over
    finally:
        timer.close()
    timer, woken = kind(), threading.Event()
    if kind is KernelTimer:  # of the other one each earlier time wakes the sleeper
        timer.set(time.monotonic() + 0.05)
        timer.set(math.inf)
    sleeper = threading.Thread(target=lambda: (timer.sleep(), woken.set()), daemon=True)
    sleeper.start()
    try:
        assert not woken.wait(0.15), "never"
        timer.set(0.0)
        assert woken.wait(LIMIT_S)
        sleeper.join(LIMIT_S)
    finally:
        timer.close()


# ------------------------------------------------------------------------------------------------ closing


class Noted(Closeable):
    """Notes how it was closed."""

    def __init__(self, log: list[Any], rank: int = 3) -> None:
        self.rank, self.log = rank, log
        self._begin()

    def _release(self, finish_s: float) -> None:
        self.log.append((self.rank, finish_s))
        if self.rank == 13:
            raise OSError("no")


def test_it_is_closed_once_in_good_order_or_at_once_where_something_was_raised() -> None:
    log: list[Any] = []
    one = Noted(log)
    one.close()
    one.abort()
    assert log == [(3, FINISH_S)]
    with Noted(log):
        pass
    with pytest.raises(KeyError), Noted(log):
        raise KeyError
    Noted(log).abort()
    assert log[1:] == [(3, FINISH_S), (3, 0.0), (3, 0.0)]
    with pytest.raises(ClosedError, match="closed on this rank"):
        one.submit(int)


def test_jobs_run_on_a_thread_of_its_rank_and_are_finished_before_anything_is_released() -> None:
    log: list[Any] = []
    one = Noted(log)
    go = threading.Event()
    work = one.submit(lambda: (go.wait(LIMIT_S), log.append(threading.current_thread().name)))
    go.set()
    assert work.wait()
    one.submit(lambda: log.append("queued"))
    one.close()
    assert log == ["ringside-3", "queued", (3, FINISH_S)]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_closes_nothing_and_runs_nothing() -> None:
    log: list[Any] = []
    one = Noted(log)
    child = os.fork()
    if child == 0:
        one.close()
        try:
            one.submit(int)
        except ClosedError as error:
            os._exit(7 if "forked child" in str(error) and not log else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    one.close()
    assert log == [(3, FINISH_S)]


def test_what_is_open_at_exit_is_closed_oldest_first_and_one_that_fails_keeps_none_open(caplog) -> None:
    log: list[Any] = []
    at_exit = AtExit()
    kept = [Noted(log, rank) for rank in (5, 13, 2)]
    for one in (*kept, Noted(log, 9)):
        at_exit.add(one)
    del one
    at_exit.close_all()
    assert [rank for rank, _ in log] == [5, 13, 2], "the last one is not there any more"
    assert "could not be closed" in caplog.text
