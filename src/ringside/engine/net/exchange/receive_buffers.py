"""What one vertex receives: places posted ahead of the messages, and messages by their number in a collective."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ringside.engine.buffers import address_of
from ringside.engine.transports.base import Bytes, Kept, Links, Pending

HEADER_BYTES = 64
"""What the first message of a link in each collective begins with."""


class ReceiveBuffers:
    """The places for the next messages of one sender, posted ahead and used in turn.

    Places are of two sizes. Large ones take any message; between two collectives none but these are posted. Small ones
    are posted within a collective, for messages of which both ends know that they fit: a message that is longer than
    its place ends the process (Gloo, torch 2.13).
    """

    def __init__(self, links: Links, peer: int, size_bytes: int, window: int) -> None:
        self._links, self._peer, self._large_bytes, self.window = links, peer, size_bytes, window
        self._large: list[Bytes] = []
        self._small: list[Bytes] = []
        self._smalls = 0
        self._under_way: deque[tuple[Bytes, Pending]] = deque()
        self._kept: dict[int, Kept] = {}
        self._addresses: dict[int, int] = {}
        self._seen: Bytes | None = None
        for _ in range(window):
            self._make(size_bytes)
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
        (self._large if len(place) == self._large_bytes else self._small).append(place)

    def post(self, count: int, *, small: bool = False) -> None:
        """See to it that there are places for as many messages as that, as far as there are any.

        Args:
            count: Of the next messages.
            small: They fit small places, which are used first.
        """
        while len(self._under_way) < count:
            if small and self._small:
                self.free(self._small.pop())
            elif self._large:
                self.free(self._large.pop())
            else:
                return

    def have_small(self, size_bytes: int, count: int) -> None:
        """See to it that there are so many small places, of one size always, bytes."""
        for _ in range(count - self._smalls):
            self._make(size_bytes)
        self._smalls = max(count, self._smalls)

    def _make(self, size_bytes: int) -> None:
        place = np.empty(size_bytes, dtype=np.uint8)
        self._kept[id(place)] = self._links.keep(place)
        self._addresses[id(place)] = address_of(place)
        self.keep(place)


class ReceiveQueue:
    """What comes from one vertex in one collective: messages by their place in the link's order.

    There are no small places before the header has come and been compared: a vertex that called something else may send
    messages of any length.

    Args:
        inbox: Where it comes.
        compare: Looks at the header, which the first message begins with.
        paced: There is no place for a message until it is expected.
        small: How many messages come, all of which fit small places; 0: they may be large, and any number.
        window: Of how many small ones there are places at a time.
    """

    def __init__(
        self,
        inbox: ReceiveBuffers,
        compare: Callable[[Bytes], None],
        *,
        paced: bool = False,
        small: int = 0,
        window: int = 0,
    ) -> None:
        self._inbox = inbox
        self._compare: Callable[[Bytes], None] | None = compare
        self._taken = 0
        self._expected = 0
        self._paced, self._small, self._window = paced, small, window
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
        place = self._inbox.take()
        self._taken += 1
        if self._compare is not None:
            self._compare(place)
            self._first, self._compare = place, None
            if self._small:
                self._make_room()
        return place

    def begins(self, place: Bytes) -> int:
        """Return where a message's payload begins."""
        return HEADER_BYTES if place is self._first else 0

    def free(self, place: Bytes) -> None:
        """Use a place again."""
        if place is self._first:
            self._first = None
        if not self._paced and not self._small:
            self._inbox.free(place)
            return
        self._inbox.keep(place)
        self._make_room()

    def expect(self, number: int) -> None:
        """See to it that there are places for all messages up to one that comes, as soon as any are free."""
        if number >= self._expected:
            self._expected = number + 1
            self._make_room()

    def end(self) -> None:
        """Post the places for what comes in the next collective: everything has been taken."""
        if self._paced or self._small:
            self._inbox.post(self._inbox.window)

    def _make_room(self) -> None:
        count = self._expected - self._taken if self._paced else min(self._window, self._small - self._taken)
        self._inbox.post(count, small=self._small > 0 and self._compare is None)


class SharedRequest:
    """A message that several chunks wait for: a transport is asked once."""

    def __init__(self, pending: Pending) -> None:
        self._pending: Pending | None = pending

    def wait(self) -> None:
        """Wait for it; see `Pending`."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


@dataclass
class PackedMessage:
    """A message that carries several chunks.

    Args:
        place: Where it lies.
        at: Where the payload of the next chunk begins.
        left: Chunks still to be taken from it.
    """

    place: Bytes
    at: int
    left: int


__all__ = ["HEADER_BYTES", "PackedMessage", "ReceiveBuffers", "ReceiveQueue", "SharedRequest"]
