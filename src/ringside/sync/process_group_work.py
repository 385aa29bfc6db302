"""What a collective of the process group gives back: torch's Work and Future, and no way to fail but an exception.

Three of torch's ways to report a failure end the process when C++ asks for the result (inside DDP's backward): a Work
that is None, a future whose value is no tensor, and `Future.set_exception`. A callback that raises is the one that
works, so futures fail by one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringside.engine.background import Work as Background
from ringside.errors import DeadlineError
from ringside.sync.process_group_posted import Posted

Future = torch.futures.Future
Job = Callable[[], None]


class RingsideWork(dist.Work):
    """A collective of the process group, under way or done.

    Args:
        name: Of the collective, as users call it.
        rank: This rank.
        outputs: The tensors that hold the result when it is done.
        posted: What is to be finished by whoever waits, where it was posted.
        limit_s: Longest wait where `wait` is told none, seconds; None: as long as the engine lets it.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        outputs: list[torch.Tensor],
        posted: Posted | None = None,
        limit_s: float | None = None,
    ) -> None:
        super().__init__()
        self._limit_s = limit_s
        self._name, self._rank, self._outputs = name, rank, outputs
        self._future: Future[list[torch.Tensor]] | None = None
        self._error: BaseException | None = None
        self._under_way: Background | Posted | None = posted
        self._guard, self._finished = threading.Lock(), False
        if posted is not None:
            posted.told = self._told

    def begin(self, job: Job, start: Callable[[Job], Background]) -> RingsideWork:
        """Have `start` carry out `job` some time, and the future told when it is done; return this work."""
        future: Future[list[torch.Tensor]] = Future()
        self._future = future

        def carry() -> None:
            try:
                job()
            except BaseException as error:
                self._error = error
                raise
            finally:
                future.set_result(self._outputs)

        self._under_way = start(carry)
        return self

    def _told(self, error: BaseException | None) -> None:
        with self._guard:
            self._error, self._finished, future = error, True, self._future
        if future is not None:
            future.set_result(self._outputs)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when it is done.

        Args:
            timeout: Longest wait; not positive: as long as the group's own timeout lets it.

        Raises:
            SyncError: What went wrong, with rank and collective.
            DeadlineError: It is not done yet; it stays under way.
        """
        if self._under_way is None:
            return True
        seconds = timeout.total_seconds() if timeout else 0.0
        limit_s = seconds if seconds > 0 else self._limit_s
        try:
            self._under_way.wait(limit_s)
        except TimeoutError:
            if self._error is not None:
                raise
            raise DeadlineError(
                f"{self._name} on rank {self._rank} is not done after {limit_s:g} s; it is still under way: wait longer"
            ) from None
        return True

    def synchronize(self) -> None:
        """Wait, as `wait()`: on a CPU there is no stream to wait on instead."""
        self.wait()

    def is_completed(self) -> bool:
        """Tell whether it is done, well or badly."""
        return self._under_way is None or self._under_way.is_completed()

    def is_success(self) -> bool:
        """Tell whether it is done and went well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return what went wrong, or None."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """Wait and return the tensors that hold the result."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Return this rank: no collective has a single source (what receives from anybody is Gloo's)."""
        return self._rank

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Return a future of the tensors that hold the result; waiting for it raises what went wrong."""

        with self._guard:
            fresh = self._future is None
            future = self._future = self._future or Future()
            posted = None if self._finished else self._under_way
        if fresh and isinstance(posted, Posted):
            posted.let_go()
        elif fresh:
            future.set_result(self._outputs)

        def check(done: Future[list[torch.Tensor]]) -> list[torch.Tensor]:
            if self._error is not None:
                raise self._error
            return done.value()

        return future.then(check)

    def __repr__(self) -> str:
        state = "failed" if self._error else "done" if self.is_completed() else "under way"
        return f"<ringside {self._name} on rank {self._rank}, {state}>"


class Coalesced(dist.Work):
    """Several works as one: done when all are."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for each; raise what the first one that failed raised."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Tell whether all are done."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Any:
        """Return a future of all their results, one list."""

        def join(done: Future[list[Future[Any]]]) -> list[torch.Tensor]:
            return [tensor for each in done.value() for tensor in each.value()]

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(join)
