"""Which peers messages are waited for, and for how long already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ringside.engine.transports.base import NOBODY

PROD_S = 0.75
"""After so long the peer of a wait is probed."""


@dataclass(eq=False, slots=True)
class OpenWait:
    """Which peer messages of one order are waited for.

    Args:
        peer: The vertex; `NOBODY`: nobody waits.
        number: Of the wait.
        work: The message that is waited for, or was at last.
        known: The wait that was seen last.
        since: When that was, or when the peer was probed last.
    """

    peer: int = NOBODY
    number: int = 0
    work: Any = None
    known: int = -1
    since: float = 0.0

    def lasts(self, seconds: float, now: float) -> bool:
        """Return whether the same wait has lasted for so long, since it was first seen or since this was true."""
        same = self.peer != NOBODY and self.number == self.known
        if same and now - self.since <= seconds:
            return False
        self.known, self.since = self.number, now
        return same


def long_awaited(waits: Iterable[OpenWait], some_closed: Callable[[], bool], now: float) -> Iterator[int]:
    """Yield the peers to probe: those waited for long, and all that are waited for where connections were closed.

    Args:
        waits: Of every order of messages.
        some_closed: Returns whether connections were closed since its last call; called only where there is a wait.
        now: Monotonic seconds.
    """
    open_waits = [(wait, wait.peer) for wait in waits if wait.peer != NOBODY]  # another thread may end them meanwhile
    closed = bool(open_waits) and some_closed()
    for wait, peer in open_waits:
        if wait.lasts(PROD_S, now) or closed:
            yield peer
