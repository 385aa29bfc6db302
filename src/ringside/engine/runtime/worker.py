"""One thread that executes a communicator's asynchronous collectives in the order they were submitted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

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
