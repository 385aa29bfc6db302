"""What a collective of the process group gives back: torch's Work and Future, and no way to fail but an exception.

Three of torch's ways to report a failure end the process when C++ asks for the result (inside DDP's backward): a Work
that is None, a future whose value is no tensor, and `Future.set_exception`. A callback that raises is the one that
works, so futures fail by one.
"""

from __future__ import annotations

import functools
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringside.engine.runtime.queue import QueuedCollective
from ringside.errors import DeadlineError
from ringside.pytorch.process_group.engine import Engine
from ringside.text import NOT_DONE, name_ranks, timed_out

Future = torch.futures.Future


class OwnWork(dist.Work):
    """A work of ours that can be found behind the one that torch's C++ gives out for it (torch ≥ 2.14).

    C++ asks it for its future: on a thread that looks for a work, one found this way notes itself instead.

    Attributes:
        watched: Times the first wait, where the group is watched (`ringside.pytorch.group_watch`).
    """

    class _Search(threading.local):
        is_on = False
        found: OwnWork | None = None

    _search = _Search()
    _nobodys: Future[list[torch.Tensor]] = Future()
    watched: Any = None

    @classmethod
    def behind(cls, work: Any) -> OwnWork | None:
        """Return the work of ours that `work` passes calls on to; None: it is somebody else's."""
        search = cls._search
        search.is_on, search.found = True, None
        try:
            work.get_future()
        except Exception:  # somebody else's, which has none
            return None
        finally:
            search.is_on = False
        found, search.found = search.found, None
        return found

    def get_future(self) -> Future[list[torch.Tensor]]:
        """Return a future of the tensors that hold the result; waiting for it raises what went wrong."""
        if self._search.is_on:
            self._search.found = self
            return self._nobodys
        return self.future()

    def future(self) -> Future[list[torch.Tensor]]:
        """As `get_future`."""
        raise NotImplementedError


class RingsideWork(OwnWork):
    """A collective of the process group, under way or done.

    Args:
        name: Of the collective, as users call it.
        engine: Of the group.
        outputs: The tensors that hold the result when it is done.
        turn: Its place among the group's collectives; None: it is done.
        limit_s: Longest wait where `wait` is given none, seconds; None: as long as the engine lets it.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        outputs: list[torch.Tensor],
        turn: QueuedCollective | None = None,
        limit_s: float | None = None,
    ) -> None:
        super().__init__()
        self._limit_s = limit_s
        self._name, self._engine, self._outputs, self._turn = name, engine, outputs, turn
        self._future: Future[list[torch.Tensor]] | None = None
        self._guard = threading.Lock()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return True when it is done; without a timeout it may run here.

        Args:
            timeout: Longest wait; not positive: as long as the group's own timeout lets it.

        Raises:
            SyncError: What went wrong, with rank and collective.
            DeadlineError: It is not done yet; it stays under way.
        """
        if self.watched is not None:
            watched, self.watched = self.watched, None
            return bool(watched.timed(self.wait, timeout))
        if self._turn is None:
            return True
        seconds = timeout.total_seconds() if timeout else 0.0
        limit_s = seconds if seconds > 0 else self._limit_s
        if not self._turn.wait(limit_s):
            absent = self._engine.absent()
            who = f": {name_ranks(absent)} did not arrive" if absent else ""
            late = f"{NOT_DONE} It is not done after {seconds:g} s" if seconds > 0 else timed_out(self._limit_s or 0.0)
            raise DeadlineError(
                f"{self._name} on rank {self._engine.rank}: {late}{who}; it is still under way: wait longer", absent
            )
        return True

    def synchronize(self) -> None:
        """Wait, as `wait()`: on a CPU there is no stream to wait on instead."""
        self.wait()

    def is_completed(self) -> bool:
        """Tell whether it is done, well or badly."""
        return self._turn is None or self._turn.is_completed()

    def is_success(self) -> bool:
        """Tell whether it is done and went well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return what went wrong, or None."""
        return None if self._turn is None else self._turn.error

    def result(self) -> list[torch.Tensor]:
        """Wait and return the tensors that hold the result."""
        self.wait()
        return self._outputs

    def source_rank(self) -> int:
        """Return this rank: no collective has a single source (what receives from anybody is Gloo's)."""
        return self._engine.rank

    def future(self) -> Future[list[torch.Tensor]]:
        """Return a future of the result, one for each call."""
        # One future for all callers, completed by the thread that runs the collective; each call returns a check of it.
        with self._guard:
            fresh = self._future is None
            future = self._future = self._future or Future()
        if fresh:
            complete = functools.partial(_complete, future, self._outputs, self.watched)
            if self._turn is None:
                complete()
            else:
                self._turn.when_done(complete)
        return future.then(self._value_or_raise)

    def _value_or_raise(self, done: Future[list[torch.Tensor]]) -> list[torch.Tensor]:
        error = self.exception()
        if error is not None:
            raise error
        return done.value()

    def __repr__(self) -> str:
        state = "failed" if self.exception() else "done" if self.is_completed() else "under way"
        return f"<ringside {self._name} on rank {self._engine.rank}, {state}>"


def _complete(future: Future[list[torch.Tensor]], outputs: list[torch.Tensor], watched: Any) -> None:
    """Give a future its result; once, though it may be called twice where Ctrl-C came in between."""
    if watched is not None:
        watched.ended()
    if not future.done():
        future.set_result(outputs)


class Coalesced(OwnWork):
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

    def future(self) -> Any:
        """Return a future of all their results, one list."""
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(_join)


def _join(done: Future[list[Future[Any]]]) -> list[torch.Tensor]:
    return [tensor for each in done.value() for tensor in each.value()]
