"""The life of a rank's end of a communicator: its thread for asynchronous jobs, and closing it, once."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from ringside.engine.runtime.worker import Work, Worker
from ringside.errors import ClosedError

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
