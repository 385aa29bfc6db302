"""Collectives one at a time, in the order of their calls, each by whoever waits for it.

To hand a small collective to another thread and take it back costs more than the collective. So a collective that is
called asynchronously only joins the queue, and the thread that waits for it executes those before it, and then it
itself. Those that nobody waits for are executed by the queue's own thread: soon after, when a timer wakes it, or at
once on request.

Ctrl-C may come between any two calls of Python, also before the first line of what a `finally` calls. It comes once, so
what must not be left undone is written to be done twice, and is.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ringside.engine.runtime.timer import Timer, new_timer
from ringside.errors import ClosedError, SyncError

Job = Callable[[], Any]

PATIENCE_S = 1e-3
"""How long the queue's thread leaves a call to a caller that may wait for it, seconds, by default."""

_LAST_S = 1.0  # a collective may take to notice that its communicator is closed


class QueuedCollective(ABC):
    """One collective that was called: its place in a queue, and its outcome.

    A class of its own for what is called often (`pytorch/ddp/ringside_reducer.py`); any callable is a `QueuedJob`.

    Attributes:
        number: Of the call.
        due: When the queue's thread executes it if nobody else has begun, on the monotonic clock.
        begun: Whether some thread executes it, or has.
        done: Whether it is done, well or badly.
        is_over: Whether it is done, and its callback has run.
        error: What went wrong.
        callback: Called once when it is done, by the thread that executed it.
    """

    number, due = 0, math.inf
    begun = done = is_over = False
    error: Exception | None = None
    callback: Job | None = None
    _queue: CollectiveQueue

    @abstractmethod
    def execute(self) -> None:
        """Execute it, in its turn."""

    @abstractmethod
    def forget(self) -> None:
        """Drop the references that it needed until it was done; may be called twice."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Execute it, or wait until it is done; False: not within the timeout, and it goes on.

        With a timeout it is not executed here, since nothing could end that in time.

        Raises:
            SyncError: What went wrong in it, or the queue is a forked child's.
        """
        if not self.done and not self._queue.finish(self, timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Return whether it is done; a caller that polls instead of waiting has the queue's thread execute it."""
        if not self.done:
            self._queue.run_soon(self)
        return self.done

    def when_done(self, callback: Job) -> None:
        """Have the queue's thread execute it, and call `callback` once: on the thread that does, or here if done."""
        if self._queue.add_callback(self, callback):
            self._queue.run_soon(self)
        else:
            callback()


class QueuedJob(QueuedCollective):
    """A callable in a queue.

    Args:
        job: Executes the collective.
        keeps: What must live until it is done.
    """

    def __init__(self, job: Job, keeps: Any = None) -> None:
        self._job, self._keeps = job, keeps

    def execute(self) -> None:
        """Call it."""
        self._job()

    def forget(self) -> None:
        """Drop it."""
        self._job, self._keeps = _nothing, None


class QueueState(NamedTuple):
    """What is in a queue, to see why nothing goes on.

    Args:
        queued: Collectives that are not done.
        waiting: Threads that wait for one which another executes.
        wakes_at: When the thread wakes by itself, on the monotonic clock; inf: only on request; 0: now.
    """

    queued: int
    waiting: int
    wakes_at: float


class CollectiveQueue:
    """The queue of one communicator's collectives.

    Callbacks of a collective run on the thread that executes it; what they call is executed at once.

    One class, though a large one: who executes, what is queued and when the thread wakes change together, under one
    guard, and every method is a step of a few microseconds that a collective pays for.

    Args:
        name: Of the thread.
        refusal: Message of the error for a call when it is closed, or in a forked child.
    """

    def __init__(self, name: str, refusal: str) -> None:
        self._name, self._refusal, self._owner_pid = name, refusal, os.getpid()
        self._guard = threading.RLock()  # of all below; held for moments, in which a finalizer may call `stop`
        self._queue: deque[QueuedCollective] = deque()
        self._executor = 0  # the thread that executes, by its ident; 0: none
        self._sleepers: list[threading.Lock] = []
        self._calls = self._urgent = 0  # numbers: of the last call, of the last one that the thread executes at once
        self._open = True
        self._thread: threading.Thread | None = None
        self._timer: Timer | None = None
        self._wakes_at = math.inf  # when the thread wakes; 0: it is about to

    @property
    def is_here(self) -> bool:
        """Whether the caller is inside a collective, as in a callback: no other thread can execute one."""
        return self._executor == threading.get_ident()

    def state(self) -> QueueState:
        """Return what is queued; may be called on any thread, and waits for none."""
        return QueueState(len(self._queue), len(self._sleepers), self._wakes_at)

    # -------------------------------------------------------------------------------------------- calls

    def run(self, job: Job) -> None:
        """Execute a collective here, after those called before it; raise what goes wrong."""
        if self._is_forked():
            raise ClosedError(self._refusal)
        if self.is_here:  # a callback calls it: it is executed inside the other
            job()
            return
        # The usual case: nothing is queued, and nothing has to be.
        if self.run_if_free(_then_true, job):
            return
        # Others are before it.
        with self._guard:
            if not self._open:
                raise ClosedError(self._refusal)
            queued = QueuedJob(job)
            self._append(queued, math.inf)
        try:
            queued.wait()
        except BaseException:
            self.run_soon(queued)  # Ctrl-C came while others were before it: the other ranks count on it
            raise

    def run_if_free(self, job: Callable[..., Any], *args: Any) -> Any:
        """Execute a collective here and return what `job` does; None: others are before it, or it is in a callback."""
        me = threading.get_ident()
        if self._executor == me or self._is_forked():
            return None
        try:
            return job(*args) if self._claim(me) else None
        finally:
            try:
                self._release(me)
            finally:
                if self._executor == me:
                    self._release(me)

    def start(self, job: Job, patience_s: float = PATIENCE_S) -> QueuedCollective:
        """Queue a callable that executes a collective, and return what can be waited for; see `enqueue`."""
        queued = QueuedJob(job)
        self.enqueue(queued, patience_s)
        return queued

    def enqueue(self, queued: QueuedCollective, patience_s: float) -> None:
        """Queue a collective.

        Args:
            queued: A new one.
            patience_s: How long the queue's thread leaves it to a caller that may wait, seconds.

        Raises:
            ClosedError: The queue is closed, or this is a forked child.
        """
        if self._is_forked():
            raise ClosedError(self._refusal)
        due = time.monotonic() + patience_s
        with self._guard:
            if not self._open:
                raise ClosedError(self._refusal)
            if self._thread is None:
                self._start_thread()
            self._append(queued, due)
            head = self._queue[0]
            head.due = min(head.due, due)
            if patience_s == 0:
                self._urgent = queued.number
            if head is queued or due < self._wakes_at:  # what it was set for has been executed, or is later
                self._set_timer(due if patience_s else 0.0)

    def post(self, begin: Callable[..., Job | None], *args: Any) -> QueuedCollective | None:
        """Begin here a collective that waits for no peer; None: something is before it, or it could not be begun.

        Nobody needs this rank before it waits or calls the next one: the queue's thread leaves it alone.

        Args:
            begin: Begins it and returns what finishes it, or None. What it begins must be found again by the next
                collective, as Ctrl-C may come before it is queued.
            args: Of `begin`; kept as long as it is under way.
        """
        queued: QueuedCollective | None = self.run_if_free(self._begin, begin, args)
        return queued

    def _begin(self, begin: Callable[..., Job | None], args: tuple[Any, ...]) -> QueuedCollective | None:
        job = begin(*args)
        if job is None:
            return None
        queued = QueuedJob(job, args)
        with self._guard:
            self._append(queued, math.inf)
        return queued

    def _append(self, queued: QueuedCollective, due: float) -> None:
        self._calls += 1
        queued._queue, queued.number, queued.due = self, self._calls, due
        self._queue.append(queued)

    # -------------------------------------------------------------------------------------------- waiting

    def finish(self, queued: QueuedCollective, timeout_s: float | None = None) -> bool:
        """Execute all up to this collective, or wait until others have; see `QueuedCollective.wait`."""
        if self._is_forked():
            raise ClosedError(self._refusal)
        me = threading.get_ident()
        if self._executor == me:  # in a callback
            while not queued.done:
                self._run_next()
        elif timeout_s is not None:  # the queue's thread executes it
            self.run_soon(queued)
            deadline = time.monotonic() + timeout_s
            while True:
                with self._guard:
                    if queued.done:
                        return True
                    sleeper = self._new_sleeper()
                left_s = min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
                if left_s <= 0 or not sleeper.acquire(timeout=left_s):
                    return queued.done
        while not queued.done:
            try:
                if self._wait_for_turn(me, queued):
                    self._run_next()
            finally:
                try:
                    self._release(me)
                finally:
                    if self._executor == me:
                        self._release(me)
        return True

    def run_soon(self, queued: QueuedCollective) -> None:
        """Have the queue's thread execute all up to this collective at once."""
        if queued.done or self._is_forked():
            return
        with self._guard:
            self._urgent = max(self._urgent, queued.number)
            if self._open and self._thread is None:
                self._start_thread()
            self._set_timer(0.0)

    def add_callback(self, queued: QueuedCollective, callback: Job) -> bool:
        """Have `callback` called when a collective is done; False: it is already, and `callback` is not called."""
        if self._is_forked():
            raise ClosedError(self._refusal)
        with self._guard:
            if not queued.done:
                queued.callback = callback
            return not queued.done

    # -------------------------------------------------------------------------------------------- whose turn it is

    def _claim(self, me: int) -> bool:
        """Become the thread that executes, if none does and nothing is queued."""
        with self._guard:
            if self._executor or self._queue:
                return False
            self._executor = me  # there is nothing the timer is set for
            return True

    def _wait_for_turn(self, me: int, queued: QueuedCollective) -> bool:
        """Become the thread that executes, when no other does; False: that collective is done by then."""
        while True:
            with self._guard:
                if queued.done:
                    return False
                if not self._executor:
                    self._executor = me
                    self._set_timer(math.inf)  # until `_release`
                    return True
                sleeper = self._new_sleeper()
            sleeper.acquire()

    def _release(self, me: int) -> None:
        """Let other threads execute, if this one does; Ctrl-C may have come before it did."""
        with self._guard:
            if self._executor == me:
                if self._queue:
                    self._set_timer(self._due(self._queue[0]))
                elif not self._open:
                    self._set_timer(0.0)  # to end: `_wait_for_turn` may have taken back what `stop` had set
                while self._sleepers:
                    self._sleepers.pop().release()
                self._executor = 0

    def _new_sleeper(self) -> threading.Lock:
        """Return a lock that can be acquired when the thread that executes has done with one collective."""
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        return sleeper

    def _run_next(self) -> None:
        """Execute the first collective of the queue, on this thread, whose turn it is."""
        queued = self._queue[0]
        if queued.begun:
            raise SyncError(
                "a collective is waited for while this very thread carries it out, as by a signal's handler"
            )
        try:
            queued.begun = True
            queued.execute()
        except Exception as error:
            queued.error = error
        except BaseException as error:  # not for the threads that wait for it, such as Ctrl-C
            queued.error = SyncError(f"the collective was interrupted on this rank ({type(error).__name__})")
            raise
        finally:
            try:
                self._end(queued)
            finally:
                if not queued.is_over:  # Ctrl-C broke `_end` off: what is left of it is done again
                    self._end(queued)

    def _end(self, queued: QueuedCollective) -> None:
        if not queued.begun:  # Ctrl-C came before
            return
        with self._guard:
            queued.done = True  # from here on no callback is added
            if self._queue and self._queue[0] is queued:
                self._queue.popleft()
        queued.forget()
        if queued.callback is not None:
            queued.callback()
            queued.callback = None
        queued.is_over = True

    # -------------------------------------------------------------------------------------------- the thread

    def stop(self, finish_s: float) -> None:
        """Refuse more calls, have the thread execute what is queued, and wait at most `finish_s` seconds for that."""
        if self._is_forked():
            return  # the thread is the parent's, which may have held the guard
        with self._guard:
            if not self._open:
                return
            self._open, self._urgent = False, self._calls
            if self._queue and self._thread is None:
                with contextlib.suppress(RuntimeError):  # no more threads, as in a process that is about to end
                    self._start_thread()
            self._set_timer(0.0)
        self.join(finish_s)

    def close(self, close_communicator: Job, finish_s: float) -> None:
        """Stop, close the communicator whose queue this is, which ends what is still under way, and end the thread.

        Args:
            close_communicator: Closes it.
            finish_s: How long what is queued may take before, seconds.
        """
        self.stop(finish_s)
        close_communicator()
        self.join(_LAST_S)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, after `stop`; returns at once inside a collective and on the thread itself."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and not self.is_here:
            thread.join(timeout_s)

    def _start_thread(self) -> None:
        timer = new_timer()
        thread = threading.Thread(target=self._run_unawaited, args=(timer,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            timer.close()
            raise
        self._timer, self._thread = timer, thread

    def _set_timer(self, wakes_at: float) -> None:
        """Have the thread wake at a time, 0 being now; the caller holds the guard."""
        if self._timer is not None and wakes_at != self._wakes_at:
            self._wakes_at = wakes_at
            self._timer.set(wakes_at)

    def _due(self, queued: QueuedCollective) -> float:
        """Return when the thread executes the first collective of the queue; 0: at once."""
        return 0.0 if queued.number <= self._urgent else queued.due

    def _run_unawaited(self, timer: Timer) -> None:
        """Execute the collectives that nobody waits for; the body of the thread."""
        me = threading.get_ident()
        while True:
            with self._guard:
                queued = self._queue[0] if self._queue else None
                if queued is None and not self._open:
                    self._timer = None
                    timer.close()
                    return
                due = math.inf if queued is None else self._due(queued)
                if due > 0 and self._executor:
                    due = math.inf  # `_release` sets the timer again
                sleeps = due > time.monotonic()
                self._wakes_at = -1.0  # it has fired, maybe a moment too early
                self._set_timer(due if sleeps else math.inf)
            if queued is not None and not sleeps:
                try:
                    with contextlib.suppress(BaseException):  # the collective keeps it for the threads that wait
                        if self._wait_for_turn(me, queued):
                            self._run_next()
                finally:
                    self._release(me)  # once will do: Ctrl-C is for the main thread
            del queued  # nothing of it is kept while the thread sleeps
            if sleeps:
                timer.sleep()

    def _is_forked(self) -> bool:
        return self._owner_pid != os.getpid()


def _then_true(job: Job) -> bool:
    job()
    return True


def _nothing() -> None:
    """Nothing is left to do."""
