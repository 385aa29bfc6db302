"""Whom messages are waited for, and for how long already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ringside.engine.transports.base import NOBODY

PROD_S = 0.75
"""A wait that has lasted for so long is looked into."""


@dataclass(eq=False, slots=True)
class OpenWait:
    """Whom messages of one order are waited for.

    Args:
        peer: The vertex; `NOBODY`: nobody waits.
        number: Of the wait.
        work: The message that is waited for, or was at last.
        known: The wait that was seen last.
        since: When, or when something was sent to find out whether the peer is there.
    """

    peer: int = NOBODY
    number: int = 0
    work: Any = None
    known: int = -1
    since: float = 0.0

    def lasts(self, seconds: float, now: float) -> bool:
        """Tell whether the same wait has lasted for so long, since it was first seen or since this was true."""
        same = self.peer != NOBODY and self.number == self.known
        if same and now - self.since <= seconds:
            return False
        self.known, self.since = self.number, now
        return same


def long_awaited(waits: Iterable[OpenWait], some_closed: Callable[[], bool], now: float) -> Iterator[int]:
    """Yield the peers to look into: waited for long, or (whoever is waited for) where connections were closed.

    Args:
        waits: Of every order of messages.
        some_closed: Tells whether connections were closed since it was asked last; asked where somebody waits.
        now: Monotonic seconds.
    """
    asked = [(wait, wait.peer) for wait in waits if wait.peer != NOBODY]
    closed = bool(asked) and some_closed()
    for wait, peer in asked:
        if wait.lasts(PROD_S, now) or closed:
            yield peer
