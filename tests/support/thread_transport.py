"""Messages between threads of one process: the transport of tests, and the simplest that meets the protocol."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ringside.engine.transports.base import NOBODY, Bytes, Kept, LinkError, LinkFailure


@dataclass
class _Half:
    """A message, or the place for one; `over` when both have met, or never will."""

    memory: Bytes
    done: bool = False
    over: threading.Event = field(default_factory=threading.Event)


@dataclass
class _Mailbox:
    """Messages of one sender to one receiver; they meet the receiver's memory in order."""

    messages: deque[_Half] = field(default_factory=deque)
    places: deque[_Half] = field(default_factory=deque)

    def match(self) -> None:
        # The first message meets the first place, in the order of the calls.
        while self.messages and self.places:
            message, place = self.messages.popleft(), self.places.popleft()
            place.memory[: len(message.memory)] = message.memory
            for half in (message, place):
                half.done = True
                half.over.set()

    def end(self) -> None:
        for half in (*self.messages, *self.places):
            half.over.set()


class Switchboard:
    """What the threads of a group share.

    Args:
        size: Number of vertices.
        timeout_s: Longest wait for one message, seconds.
    """

    def __init__(self, size: int, timeout_s: float = 20.0) -> None:
        self.size, self.timeout_s = size, timeout_s
        self.cause: LinkFailure | None = None
        self.gone: list[int] = []
        self._boxes: defaultdict[tuple[int, int, int], _Mailbox] = defaultdict(_Mailbox)
        self._guard = threading.Lock()

    def post(self, src: int, dst: int, memory: Bytes, *, receiving: bool, order: int = 0) -> _Half:
        """Put a message or a place for one; messages of different orders do not meet."""
        half = _Half(memory)
        with self._guard:
            if cause := self.why(src, dst):
                raise LinkError(cause)
            box = self._boxes[src, dst, order]
            (box.places if receiving else box.messages).append(half)
            box.match()
        return half

    def why(self, src: int, dst: int) -> LinkFailure | None:
        """Return why there are no messages from one to the other any more."""
        return self.cause or next((LinkFailure("left", rank) for rank in self.gone if rank in (src, dst)), None)

    def leave(self, rank: int) -> None:
        """End what has not arrived from or at a vertex."""
        with self._guard:
            if rank not in self.gone:
                self.gone.append(rank)
            for link, box in self._boxes.items():
                if rank in link[:2]:
                    box.end()

    def fail(self, cause: LinkFailure) -> LinkFailure:
        """End everything that has not arrived; the first cause counts."""
        with self._guard:
            if self.cause is None:  # a vertex that aborts because another left names that one
                self.cause = LinkFailure("left", self.gone[0]) if self.gone and cause.kind == "left" else cause
            for box in self._boxes.values():
                box.end()
            return self.cause


@dataclass(frozen=True)
class _Message:
    board: Switchboard
    rank: int
    peer: int
    half: _Half

    def wait(self) -> None:
        """Wait for it; see `Pending`."""
        if not self.half.over.wait(self.board.timeout_s):
            cause = self.board.fail(LinkFailure("late", self.peer))
            raise LinkError(cause, f"no message within {self.board.timeout_s:g} s")
        if not self.half.done:
            why = self.board.why(self.rank, self.peer)
            assert why is not None
            raise LinkError(why)


@dataclass
class Threads:
    """One thread's end of a `Switchboard`."""

    board: Switchboard
    rank: int
    doing: object = ""
    number: int = 0
    waits_inside: Callable[[], int] = lambda: NOBODY
    on_failure: Callable[[], object] = lambda: None
    order: int = 0
    orders: int = 1

    @property
    def size(self) -> int:
        """Number of vertices."""
        return self.board.size

    def keep(self, data: Bytes) -> Kept:
        """Return what `send` and `receive` take in place of `data`."""
        return [data]

    def send(self, peer: int, data: Bytes | Kept) -> _Message:
        """Start sending."""
        data = data[0] if isinstance(data, list) else data
        half = self.board.post(self.rank, peer, data, receiving=False, order=self.order)
        return _Message(self.board, self.rank, peer, half)

    def receive(self, peer: int, into: Bytes | Kept) -> _Message:
        """Start receiving."""
        into = into[0] if isinstance(into, list) else into
        half = self.board.post(peer, self.rank, into, receiving=True, order=self.order)
        return _Message(self.board, self.rank, peer, half)

    def open_channel(self, connection: int = 0) -> Threads:
        """Return messages with an order of their own; all connections are this process's memory."""
        self.orders += 1
        return Threads(self.board, self.rank, order=self.orders - 1)

    def fail(self, cause: LinkFailure) -> LinkFailure:
        """Abort."""
        cause = self.board.fail(cause)
        self.on_failure()
        return cause

    def close(self, *, patience_s: float = 5.0) -> None:
        """Leave; a wait for this vertex fails."""
        self.board.leave(self.rank)

    def describe(self) -> dict[str, Any]:
        """Return its name."""
        return {"transport": "threads"}


def each_on_a_thread(size: int, function: Callable[[int], Any], failed: Callable[[int], object]) -> list[Any]:
    """Run a function for every vertex on a thread of its own; return what each returned, or raise what came first.

    Args:
        size: Number of vertices.
        function: Called with each.
        failed: Called with one whose function raised, so that the others do not wait for it.
    """
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            errors.append(error)
            failed(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive(), "a vertex does not end"
    if errors:
        raise errors[0]
    return results
