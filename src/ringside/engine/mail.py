"""What one vertex receives: places posted ahead of the messages, and messages by their number in a collective."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ringside.engine.tensors import address_of
from ringside.engine.transports.transport import Bytes, Links, Pending

HEADER_BYTES = 64
"""What the first message of a link in each collective begins with."""


class Inbox:
    """The places for the next messages of one sender, posted ahead and used in turn."""

    def __init__(self, links: Links, peer: int, size_bytes: int, window: int) -> None:
        self._links, self._peer = links, peer
        self._spare = [np.empty(size_bytes, dtype=np.uint8) for _ in range(window)]
        self._under_way: deque[tuple[Bytes, Pending]] = deque()
        self._kept = {id(place): links.keep(place) for place in self._spare}
        self._addresses = {id(place): address_of(place) for place in self._spare}
        self._seen: Bytes | None = None
        self.post(window)

    def peek(self) -> Bytes:
        """Wait for the next message and return its place without taking it."""
        if self._seen is None:
            self._seen = self.take()
        return self._seen

    def take(self) -> Bytes:
        """Wait for the next message and return its place; give it back with `free`."""
        if self._seen is not None:
            place, self._seen = self._seen, None
            return place
        place, pending = self._under_way.popleft()
        pending.wait()
        return place

    def address_of(self, place: Bytes) -> int:
        """Return where a place lies."""
        return self._addresses[id(place)]

    def free(self, place: Bytes) -> None:
        """Use a place again."""
        self._under_way.append((place, self._links.receive(self._peer, self._kept[id(place)])))

    def keep(self, place: Bytes) -> None:
        """Use a place again when told by `post`: nothing is sent for which there is no place."""
        self._spare.append(place)

    def post(self, count: int) -> None:
        """See to it that there are places for as many messages as that, as far as there are any."""
        while self._spare and len(self._under_way) < count:
            self.free(self._spare.pop())


class Mail:
    """What comes from one vertex in one collective: messages by their place in the link's order.

    Args:
        inbox: Where it comes.
        compare: Looks at the header, which the first message begins with.
    """

    def __init__(self, inbox: Inbox, compare: Callable[[Bytes], None]) -> None:
        self.inbox = inbox
        self._compare: Callable[[Bytes], None] | None = compare
        self._taken = 0
        self.paced = False
        self._early: dict[int, Bytes] = {}
        self._first: Bytes | None = None

    @property
    def heard(self) -> bool:
        """Whether anything has come."""
        return self._taken > 0

    def take(self, number: int) -> Bytes:
        """Wait for one message; those before it that are not wanted yet stay where they are."""
        while self._taken <= number:
            at = self._taken
            self._early[at] = self.take_next()
        return self._early.pop(number)

    def take_next(self) -> Bytes:
        """Wait for the next message."""
        place = self.inbox.take()
        self._taken += 1
        if self._compare is not None:
            self._compare(place)
            self._first, self._compare = place, None
        return place

    def begins(self, place: Bytes) -> int:
        """Return where a message's payload begins."""
        return HEADER_BYTES if place is self._first else 0

    def free(self, place: Bytes) -> None:
        """Use a place again."""
        if place is self._first:
            self._first = None
        if self.paced:
            self.inbox.keep(place)
        else:
            self.inbox.free(place)

    def expect(self, number: int) -> None:
        """See to it that there are places for all messages up to one."""
        self.inbox.post(number + 1 - self._taken)


class Once:
    """A message that several chunks wait for: a transport is asked once."""

    def __init__(self, pending: Pending) -> None:
        self._pending: Pending | None = pending

    def wait(self) -> None:
        """Wait for it; see `Pending`."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


@dataclass
class Bundle:
    """A message that carries several chunks.

    Args:
        place: Where it lies.
        at: Where the payload of the next chunk begins.
        left: Chunks still to be taken from it.
    """

    place: Bytes
    at: int
    left: int


__all__ = ["HEADER_BYTES", "Bundle", "Inbox", "Mail", "Once"]
