"""Collectives one at a time, in the order of their calls, each by whoever waits for it.

To hand a small collective to another thread and take it back costs more than the collective. So what is called
asynchronously only joins a line, and whoever waits carries out what is before it, and then it itself. What nobody waits
for is carried out by a thread: soon after, when an alarm wakes it, or at once where it is asked to.

Ctrl-C may come between any two calls of Python, also before the first line of what a `finally` calls. It comes once, so
what must not be left undone is written to be done twice, and is.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from ringside.engine.runtime.timer import Timer, new_alarm
from ringside.errors import ClosedError, SyncError

Job = Callable[[], Any]

PATIENCE_S = 1e-3
"""How long the thread leaves a call to whoever may wait for it, seconds, unless it is told otherwise."""

_LAST_S = 1.0  # a collective takes to hear that its communicator is closed


class QueuedCollective:
    """One collective that was called: its place in the line, and what became of it.

    Args:
        turns: The line.
        job: Carries it out.
        number: Of the call.
        due: When the thread carries it out if nobody else has begun, on the monotonic clock.
        keeps: What must live until it is done.

    Attributes:
        begun: Whether somebody carries it out, or has.
        done: Whether it is done, well or badly.
        error: What went wrong.
    """

    __slots__ = ("_job", "_keeps", "_told", "_turns", "begun", "done", "due", "error", "number")

    def __init__(self, turns: CollectiveQueue, job: Job, number: int, due: float, keeps: Any) -> None:
        self._turns, self._job, self._keeps = turns, job, keeps
        self.number, self.due = number, due
        self.begun = self.done = False
        self.error: Exception | None = None
        self._told: Job | None = None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Carry it out, or wait until it is done; False: not within the timeout, and it goes on.

        With a timeout it is not carried out here, since nothing could end that in time.

        Raises:
            SyncError: What went wrong in it, or the line is a forked child's.
        """
        if not self.done and not self._turns.finish(self, timeout_s):
            return False
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Tell whether it is done; who asks instead of waiting has it carried out by the thread."""
        if not self.done:
            self._turns.let_go(self)
        return self.done

    def when_done(self, told: Job) -> None:
        """Have the thread carry it out, and call `told` once, on whichever thread does, or here where it is done."""
        if self._turns.is_told(self, told):
            self._turns.let_go(self)
        else:
            told()

    def carry(self) -> None:
        """Carry it out, in its turn; raise only what is not for those who wait for it, such as Ctrl-C."""
        try:
            self.begun = True
            self._job()
        except Exception as error:
            self.error = error
        except BaseException as error:
            self.error = SyncError(f"the collective was interrupted on this rank ({type(error).__name__})")
            raise

    def tell(self) -> None:
        """Tell whoever asked that it is done, and let go of what it needed."""
        told, self._job, self._keeps = self._told, _nothing, None
        if told is not None:
            told()
            self._told = None

    @property
    def is_over(self) -> bool:
        """Whether it is done, and everybody who asked has been told."""
        return self.done and self._told is None and self._job is _nothing


class QueueState(NamedTuple):
    """How a line stands, for who wonders why nothing goes on.

    Args:
        lined_up: Collectives that are not done.
        waiting: Threads that wait for one which another carries out.
        looks_at: When the thread comes by itself, on the monotonic clock; inf: when it is told to; 0: now.
    """

    lined_up: int
    waiting: int
    looks_at: float


class CollectiveQueue:
    """The line of one communicator's collectives.

    Callbacks of a collective run on the thread that carries it out; what they call is carried out at once.

    Args:
        name: Of the thread.
        refusal: What is said to who calls when it is closed, or in a forked child.
    """

    def __init__(self, name: str, refusal: str) -> None:
        self._name, self._refusal, self._owner_pid = name, refusal, os.getpid()
        self._guard = threading.RLock()  # of all below; held for moments, in which a finalizer may call `stop`
        self._line: deque[QueuedCollective] = deque()
        self._carrier = 0  # the thread that carries out
        self._sleepers: list[threading.Lock] = []
        self._calls = self._wanted = 0  # numbers: of the last call, of the last one that the thread takes at once
        self._open = True
        self._thread: threading.Thread | None = None
        self._alarm: Timer | None = None
        self._alarm_at = math.inf  # when the thread looks; 0: it is about to

    @property
    def is_here(self) -> bool:
        """Tell whether the caller is inside a collective, as in a callback: nobody else can carry one out."""
        return self._carrier == threading.get_ident()

    def state(self) -> QueueState:
        """Return how the line stands; may be asked on any thread, and waits for none."""
        return QueueState(len(self._line), len(self._sleepers), self._alarm_at)

    # -------------------------------------------------------------------------------------------- calls

    def run(self, job: Job) -> None:
        """Carry out a collective here, after those called before it; raise what goes wrong."""
        if self._is_forked():
            raise ClosedError(self._refusal)
        me = threading.get_ident()
        if self._carrier == me:
            job()
            return
        try:
            if self._claim(me):
                job()
                return
        finally:
            try:
                self._release(me)
            finally:
                if self._carrier == me:
                    self._release(me)
        with self._guard:
            if not self._open:
                raise ClosedError(self._refusal)
            turn = self._append(job, math.inf)
        try:
            turn.wait()
        except BaseException:
            self.let_go(turn)  # Ctrl-C came while others were before it: the other ranks count on it
            raise

    def start(self, job: Job, patience_s: float = PATIENCE_S) -> QueuedCollective:
        """Line a collective up, and return what can be waited for.

        Args:
            job: Carries it out.
            patience_s: How long the thread leaves it to whoever may wait, seconds.

        Raises:
            ClosedError: The line is closed, or this is a forked child.
        """
        if self._is_forked():
            raise ClosedError(self._refusal)
        due = time.monotonic() + patience_s
        with self._guard:
            if not self._open:
                raise ClosedError(self._refusal)
            self._begin_thread()
            turn = self._append(job, due)
            head = self._line[0]
            head.due = min(head.due, due)
            if patience_s == 0:
                self._wanted = turn.number
            if head is turn or due < self._alarm_at:  # what it was set for has been carried out, or is later
                self._set_alarm(self._due(turn))
            return turn

    def post(self, begin: Callable[..., Job | None], *args: Any) -> QueuedCollective | None:
        """Begin here what waits for nobody; None: something is before it, or it could not be begun.

        Nobody needs this rank before it waits or calls the next one: the thread leaves it alone.

        Args:
            begin: Begins it and returns what finishes it, or None. What it begins must be found again by whatever
                comes next, as Ctrl-C may come before it is lined up.
            args: Of `begin`; kept as long as it is under way.
        """
        me = threading.get_ident()
        if self._carrier == me or self._is_forked():
            return None
        try:
            if not self._claim(me):
                return None
            job = begin(*args)
            if job is None:
                return None
            with self._guard:
                return self._append(job, math.inf, args)
        finally:
            try:
                self._release(me)
            finally:
                if self._carrier == me:
                    self._release(me)

    def _append(self, job: Job, due: float, keeps: Any = None) -> QueuedCollective:
        self._calls += 1
        turn = QueuedCollective(self, job, self._calls, due, keeps)
        self._line.append(turn)
        return turn

    # -------------------------------------------------------------------------------------------- waiting

    def finish(self, turn: QueuedCollective, timeout_s: float | None = None) -> bool:
        """Carry out all up to a turn, or wait until others have; see `QueuedCollective.wait`."""
        if self._is_forked():
            raise ClosedError(self._refusal)
        me = threading.get_ident()
        if self._carrier == me:
            while not turn.done:
                self._carry_next()
        elif timeout_s is not None:
            self.let_go(turn)
            return self._await(turn, timeout_s)
        while not turn.done:
            try:
                if self._take(me, turn):
                    self._carry_next()
            finally:
                try:
                    self._release(me)
                finally:
                    if self._carrier == me:
                        self._release(me)
        return True

    def let_go(self, turn: QueuedCollective) -> None:
        """Have the thread carry out all up to a turn at once."""
        if turn.done or self._is_forked():
            return
        with self._guard:
            self._wanted = max(self._wanted, turn.number)
            if self._open:
                self._begin_thread()
            self._set_alarm(0.0)

    def is_told(self, turn: QueuedCollective, told: Job) -> bool:
        """Have `told` be called when a turn is done; False: it is already, and `told` is not called."""
        if self._is_forked():
            raise ClosedError(self._refusal)
        with self._guard:
            if not turn.done:
                turn._told = told
            return not turn.done

    def _await(self, turn: QueuedCollective, timeout_s: float) -> bool:
        """Wait until a turn is done, whoever carries it out; False: not in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._guard:
                if turn.done:
                    return True
                bell = self._new_sleeper()
            left_s = min(deadline - time.monotonic(), threading.TIMEOUT_MAX)
            if left_s <= 0 or not bell.acquire(timeout=left_s):
                return turn.done

    # -------------------------------------------------------------------------------------------- whose turn it is

    def _claim(self, me: int) -> bool:
        """Become the one who carries out, if nobody does and nothing is lined up."""
        with self._guard:
            if self._carrier or self._line:
                return False
            self._carrier = me  # there is nothing the alarm is set for
            return True

    def _take(self, me: int, turn: QueuedCollective) -> bool:
        """Become the one who carries out, when nobody else does; False: that turn is done by then."""
        while True:
            with self._guard:
                if turn.done:
                    return False
                if not self._carrier:
                    self._carrier = me
                    self._set_alarm(math.inf)  # until `_release`
                    return True
                bell = self._new_sleeper()
            bell.acquire()

    def _release(self, me: int) -> None:
        """Let others carry out, if this thread does; Ctrl-C may have come before it did."""
        with self._guard:
            if self._carrier == me:
                if self._line:
                    self._set_alarm(self._due(self._line[0]))
                while self._sleepers:
                    self._sleepers.pop().release()
                self._carrier = 0

    def _new_sleeper(self) -> threading.Lock:
        """Return a lock that can be acquired when whoever carries out has done with one."""
        bell = threading.Lock()
        bell.acquire()
        self._sleepers.append(bell)
        return bell

    def _carry_next(self) -> None:
        """Carry out the first in the line, here: this thread is the one who does."""
        turn = self._line[0]
        if turn.begun:
            raise SyncError(
                "a collective is waited for while this very thread carries it out, as by a signal's handler"
            )
        try:
            turn.carry()
        finally:
            try:
                self._end(turn)
            finally:
                if not self._has_ended(turn):
                    self._end(turn)

    def _end(self, turn: QueuedCollective) -> None:
        if not turn.begun:  # Ctrl-C came before
            return
        with self._guard:
            turn.done = True  # from here on nobody else asks to be told
            if self._line and self._line[0] is turn:
                self._line.popleft()
        turn.tell()

    def _has_ended(self, turn: QueuedCollective) -> bool:
        """Tell whether nothing is left of a turn, or it was not begun."""
        return not turn.begun or (turn.is_over and not (self._line and self._line[0] is turn))

    # -------------------------------------------------------------------------------------------- the thread

    def stop(self, finish_s: float) -> None:
        """Take no more calls, and have the thread carry out what is lined up; wait for that as long as told."""
        if self._is_forked():
            return  # the thread is the parent's, which may have held the guard
        with self._guard:
            if not self._open:
                return
            self._open, self._wanted = False, self._calls
            if self._line:
                with contextlib.suppress(RuntimeError):  # no more threads, as in a process that is about to end
                    self._begin_thread()
            self._set_alarm(0.0)
        self.join(finish_s)

    def leave(self, communicator: Job, finish_s: float) -> None:
        """Stop, leave the communicator whose line this is, which ends what is still under way, and end the thread.

        Args:
            communicator: Leaves it.
            finish_s: How long what is lined up may take before, seconds.
        """
        self.stop(finish_s)
        communicator()
        self.join(_LAST_S)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, after `stop`; who is inside a collective does not wait, nor the thread itself."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and not self.is_here:
            thread.join(timeout_s)

    def _begin_thread(self) -> None:
        if self._thread is not None:
            return
        alarm = new_alarm()
        thread = threading.Thread(target=self._look_after, args=(alarm,), name=self._name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            alarm.close()
            raise
        self._alarm, self._thread = alarm, thread

    def _set_alarm(self, at: float) -> None:
        """Have the thread look at a time, 0 being now; while this holds the guard."""
        if self._alarm is not None and at != self._alarm_at:
            self._alarm_at = at
            self._alarm.set(at)

    def _due(self, turn: QueuedCollective) -> float:
        """Return when the thread carries out the first in the line; 0: at once."""
        return 0.0 if turn.number <= self._wanted else turn.due

    def _look_after(self, alarm: Timer) -> None:
        """Carry out what nobody waits for."""
        me = threading.get_ident()
        while True:
            with self._guard:
                turn = self._line[0] if self._line else None
                if turn is None and not self._open:
                    self._alarm = None
                    alarm.close()
                    return
                due = math.inf if turn is None else self._due(turn)
                if due > 0 and self._carrier:
                    due = math.inf  # `_release` sets the alarm again
                sleeps = due > time.monotonic()
                self._alarm_at = -1.0  # it has rung, maybe a moment too early
                self._set_alarm(due if sleeps else math.inf)
            if turn is not None and not sleeps:
                self._carry_as_thread(me, turn)
            del turn  # nothing of it is kept while the thread sleeps
            if sleeps:
                alarm.sleep()

    def _carry_as_thread(self, me: int, turn: QueuedCollective) -> None:
        try:
            with contextlib.suppress(BaseException):  # the turn tells it to whoever waits
                if self._take(me, turn):
                    self._carry_next()
        finally:
            self._release(me)  # Ctrl-C is for the main thread

    def _is_forked(self) -> bool:
        return self._owner_pid != os.getpid()


def _nothing() -> None:
    """Nothing is left to do."""
