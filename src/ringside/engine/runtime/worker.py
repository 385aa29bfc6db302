"""One thread that executes a communicator's asynchronous collectives in the order they were submitted.

It belongs to a rank's end of a communicator, which closes once, and with it the thread.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

from ringside.engine.settings import timeout_seconds
from ringside.errors import ClosedError

Job = Callable[[], Any]


class Work:
    """A collective under way, as `async_op=True` returns it; what it has of `torch.distributed.Work` behaves alike."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self, timeout: float | timedelta | None = None) -> bool:
        """Block until it is done, and return True.

        Args:
            timeout: A `timedelta` or seconds; None: as long as it takes.

        Raises:
            TimeoutError: It is not done by then, and goes on.
            RingsideError: What the collective raised.
        """
        timeout_s = None if timeout is None else timeout_seconds(timeout)
        try:
            self._future.result(timeout_s)
        except FutureTimeoutError:
            if self._future.done():
                raise  # what the collective raised is a timeout itself
            raise TimeoutError(f"the collective is not done after {timeout_s:g} s") from None
        return True

    def result(self) -> Any:
        """Block until it is done, and return what the collective returns without `async_op`, or raise what it raised.

        torch's is a list of tensors, and raises while it is under way.
        """
        return self._future.result()

    def get_future(self) -> Future[Any]:
        """Return the future of `result()`: one of `concurrent.futures`, for there is no torch here."""
        return self._future

    def is_completed(self) -> bool:
        """Return whether it is done, well or badly."""
        return self._future.done()

    def is_success(self) -> bool:
        """Return whether it is done, well."""
        return self._future.done() and self._future.exception() is None

    def exception(self) -> BaseException | None:
        """Return what the finished collective raised, or None."""
        return self._future.exception() if self._future.done() else None


class Worker:
    """Runs jobs one after the other on a daemon thread."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Job, Future[Any]] | None] = SimpleQueue()
        self._open = True
        self._guard = threading.Lock()
        self._unfinished = 0  # jobs queued or running
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        return self._unfinished == 0

    @property
    def is_here(self) -> bool:
        """Whether the caller runs on this thread, that is, inside a job."""
        return threading.current_thread() is self._thread

    def submit(self, job: Job) -> Work:
        """Queue a job."""
        future: Future[Any] = Future()
        with self._guard:
            if not self._open:
                raise ClosedError("the communicator is closed on this rank")
            self._unfinished += 1
            self._jobs.put((job, future))
        return Work(future)

    def stop(self, timeout_s: float) -> None:
        """Finish what is queued and end the thread; wait at most `timeout_s` seconds for that."""
        with self._guard:
            if not self._open:
                return
            self._open = False
            self._jobs.put(None)
        self.join(timeout_s)

    def join(self, timeout_s: float = 1.0) -> None:
        """Wait for the thread to end, after `stop`."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                result = job()
            except BaseException as error:
                self._count_down()  # before the future: its callbacks see the worker idle
                future.set_exception(error)
            else:
                self._count_down()
                future.set_result(result)
            del item, job, future  # hold no tensor while waiting for the next job

    def _count_down(self) -> None:
        with self._guard:
            self._unfinished -= 1


# -------------------------------------------------------------------------------------------------
# The life of a rank's end of a communicator: its thread for asynchronous jobs, and closing it, once.

FINISH_S = 5.0  # for what is under way when a rank closes in good order
_Self = TypeVar("_Self", bound="Closeable")


class Closeable(ABC):
    """Runs jobs in the background and closes, for every communicator; a forked child may do neither."""

    rank: int

    def _begin(self) -> None:
        self._background: Worker | None = None
        self._background_guard = threading.Lock()
        self._closed = False
        self._owner_pid = os.getpid()

    @abstractmethod
    def _release(self, finish_s: float) -> None:
        """Release everything, after the background has had `finish_s` seconds (0: at once) for what was queued."""

    def submit(self, job: Callable[[], Any]) -> Work:
        """Run a callable on the communicator's thread, after the collectives submitted before it."""
        with self._background_guard:
            if self._closed or self._is_forked():
                raise ClosedError("the communicator is closed on this rank (or this is a forked child of it)")
            if self._background is None:
                self._background = Worker(f"ringside-{self.rank}")
            return self._background.submit(job)

    def close(self) -> None:
        """Finish what is under way, within seconds, and close; peers that still need this rank get `PeerLostError`."""
        self._close(FINISH_S)

    def abort(self) -> None:
        """Close at once: what is under way raises `ClosedError` here, and `PeerLostError` at peers that need it."""
        self._close(0.0)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(FINISH_S if kind is None else 0.0)

    def _close(self, finish_s: float) -> None:
        if self._is_forked():
            return  # the memory, the sockets and the peers are the parent's, and so is who held the guard
        with self._background_guard:
            if self._closed:
                return
            self._closed = True
        if self._background is not None:
            self._background.stop(finish_s)
        self._release(finish_s)

    def _is_forked(self) -> bool:
        return self._owner_pid != os.getpid()

    def _must_queue(self) -> bool:
        """Return whether collectives are under way in the background that a new one has to come after."""
        background = self._background
        return background is not None and not background.idle and not background.is_here


# -------------------------------------------------------------------------------------------------
# What is still open when the program ends is closed in good order, before the interpreter goes away.

_log = logging.getLogger(__name__)


class AtExit:
    """Closes what was not, the oldest first: alike on all ranks, which may wait for each other there.

    No thread may be in the core, wait in Gloo or complete a future when the interpreter goes away. Of several of these
    the one that was made last runs first.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakValueDictionary[int, Closeable] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        atexit.register(self.close_all)

    def add(self, closeable: Closeable) -> None:
        """Close it at exit, if it still is there; it is not kept alive."""
        self._open[next(self._numbers)] = closeable

    def close_all(self) -> None:
        """Close all that are there; one that cannot be does not keep the others open."""
        for _, closeable in sorted(self._open.items()):
            try:
                closeable.close()
            except Exception:
                _log.exception("what was open at exit could not be closed")
