"""Messages between threads of one process: the transport of tests, and the plainest statement of what one must do."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ringside.engine.transports.transport import Bytes, Cause, LinkError


@dataclass
class _Mailbox:
    """Messages of one sender to one receiver; they meet the receiver's memory in order."""

    waiting: deque[tuple[Bytes, threading.Event]] = field(default_factory=deque)
    places: deque[tuple[Bytes, threading.Event]] = field(default_factory=deque)

    def match(self) -> None:
        while self.waiting and self.places:
            data, left = self.waiting.popleft()
            into, arrived = self.places.popleft()
            into[: len(data)] = data
            left.set()
            arrived.set()


class Switchboard:
    """What the threads of a group share.

    Args:
        size: Number of vertices.
        timeout_s: Longest wait for one message, seconds.
    """

    def __init__(self, size: int, timeout_s: float = 20.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.cause: Cause | None = None
        self._boxes = {(a, b): _Mailbox() for a in range(size) for b in range(size)}
        self._guard = threading.Lock()
        self._events: list[threading.Event] = []

    def post(self, src: int, dst: int, message: Bytes, *, receiving: bool) -> threading.Event:
        """Put a message or a place for one."""
        event = threading.Event()
        with self._guard:
            self._events = [known for known in self._events if not known.is_set()]
            self._events.append(event)
            box = self._boxes[src, dst]
            (box.places if receiving else box.waiting).append((message, event))
            box.match()
        return event

    def fail(self, cause: Cause) -> Cause:
        """End everything; the first cause counts."""
        with self._guard:
            self.cause = self.cause or cause
            for event in self._events:
                event.set()
            return self.cause


@dataclass(frozen=True)
class _Message:
    board: Switchboard
    peer: int
    event: threading.Event

    def wait(self) -> None:
        """Wait for it; see `Pending`."""
        if not self.event.wait(self.board.timeout_s):
            raise LinkError(Cause("late", self.peer), f"no message within {self.board.timeout_s:g} s")
        if self.board.cause is not None:
            raise LinkError(self.board.cause)


@dataclass(frozen=True)
class Threads:
    """One thread's end of a `Switchboard`."""

    board: Switchboard
    rank: int

    @property
    def size(self) -> int:
        """Number of vertices."""
        return self.board.size

    def send(self, peer: int, data: Bytes) -> _Message:
        """Start sending."""
        self._check()
        return _Message(self.board, peer, self.board.post(self.rank, peer, data, receiving=False))

    def receive(self, peer: int, into: Bytes) -> _Message:
        """Start receiving."""
        self._check()
        return _Message(self.board, peer, self.board.post(peer, self.rank, into, receiving=True))

    def fail(self, cause: Cause) -> Cause:
        """Give up."""
        return self.board.fail(cause)

    def close(self) -> None:
        """Leave; whoever still waits for this vertex hears of it."""
        self.board.fail(Cause("left", self.rank))

    def describe(self) -> dict[str, Any]:
        """Return its name."""
        return {"transport": "threads"}

    def _check(self) -> None:
        if self.board.cause is not None:
            raise LinkError(self.board.cause)
