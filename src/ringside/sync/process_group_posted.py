"""Small all-reduces of the process group that are to be waited for, without a second thread.

Handing 4 KB to another thread and back costs many times what reducing them does. So the payload is told to the other
ranks at the call, which waits for nobody, and whoever waits for the result takes it himself. Ranks that never meet in
a wait still go on, since what they need of this one is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ringside.engine import Communicator as HostCommunicator

MOST_RANKS = 8
MOST_READ_BYTES = 256 << 10  # every rank reads all payloads; with more of them that is the larger part


def is_small(comm: Any, size_bytes: int) -> bool:
    """Tell whether an all-reduce of that size is carried out in one shot; all ranks tell the same."""
    if not isinstance(comm, HostCommunicator) or comm.size > MOST_RANKS:
        return False
    return size_bytes <= comm.inline_bytes and size_bytes * comm.size <= MOST_READ_BYTES


class Finisher(Protocol):
    """Who finishes what was posted, one thread at a time."""

    def finish_posted(self) -> None:
        """Finish it on the thread that calls."""

    def hand_over(self) -> Any:
        """Have another thread finish it; return what can be waited for."""


class Posted:
    """An all-reduce that the others know of and that is still to be finished; stands in for a `background.Work`.

    Args:
        finish: Waits for the others and reduces.
        engine: Calls `finish` below in turn.

    Attributes:
        done: Whether it is finished, well or badly.
        told: Called with the error, or None, when it is.
    """

    def __init__(self, finish: Callable[[], None], engine: Finisher) -> None:
        self._finish, self._engine = finish, engine
        self.done = False
        self._error: BaseException | None = None
        self.told: Callable[[BaseException | None], None] | None = None

    def finish(self) -> None:
        """Finish it, once; only while no other thread uses the communicator."""
        if self.done:
            return
        try:
            self._finish()
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise  # Ctrl-C is not for whoever waits for this one alone
        finally:
            self.done = True
            told, self.told = self.told, None  # nothing is left that only the garbage collector could free
            if told is not None:
                told(self._error)

    def wait(self, timeout_s: float | None = None) -> None:
        """Finish it here, or with a timeout on the engine's thread; raise what went wrong."""
        if not self.done and timeout_s is not None:
            self._engine.hand_over().wait(timeout_s)
        if not self.done:
            self._engine.finish_posted()
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Tell whether it is done; who asks instead of waiting has it finished by the engine's thread."""
        if not self.done:
            self.let_go()
        return self.done

    def let_go(self) -> None:
        """Have the engine's thread finish it."""
        self._engine.hand_over()
