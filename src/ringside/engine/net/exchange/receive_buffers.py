"""What one vertex receives: buffers posted ahead of the messages, and messages by their number in a collective."""

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
    """The buffers for the next messages of one sender, posted ahead and used in turn.

    Buffers are of two sizes. Large ones take any message; between two collectives none but these are posted. Small ones
    are posted within a collective, for messages of which both ends know that they fit: a message that is longer than
    its buffer ends the process (Gloo, torch 2.13).

    Args:
        links: From which messages come.
        peer: The sender.
        size_bytes: Of a large buffer.
        window: How many large ones there are.
    """

    def __init__(self, links: Links, peer: int, size_bytes: int, window: int) -> None:
        self._links, self._peer, self._large_bytes, self.window = links, peer, size_bytes, window
        # A buffer is in one of three places: posted (in the order in which messages fill them), in the hands of a
        # collective, or put aside in `_large` or `_small` until it may be posted again.
        self._posted: deque[tuple[Bytes, Pending]] = deque()
        self._large: list[Bytes] = []
        self._small: list[Bytes] = []
        self._small_count = 0
        self._kept: dict[int, Kept] = {}  # what the transport made of a buffer, by its id
        self._addresses: dict[int, int] = {}
        self._peeked: Bytes | None = None
        for _ in range(window):
            self._make(size_bytes)
        self.post(window)

    def peek(self) -> Bytes:
        """Wait for the next message and return its buffer; `receive` returns the same one again."""
        if self._peeked is None:
            self._peeked = self.receive()
        return self._peeked

    def receive(self) -> Bytes:
        """Wait for the next message and return its buffer; give it back with `free`."""
        if self._peeked is not None:
            buffer, self._peeked = self._peeked, None
            return buffer
        buffer, pending = self._posted.popleft()
        pending.wait()
        return buffer

    def address_of(self, buffer: Bytes) -> int:
        """Return where a buffer lies."""
        return self._addresses[id(buffer)]

    def free(self, buffer: Bytes) -> None:
        """Post a buffer again."""
        self._posted.append((buffer, self._links.receive(self._peer, self._kept[id(buffer)])))

    def put_aside(self, buffer: Bytes) -> None:
        """Leave it to `post` when a buffer is used again: a peer sends nothing for which none is posted."""
        (self._large if len(buffer) == self._large_bytes else self._small).append(buffer)

    def post(self, count: int, *, small: bool = False) -> None:
        """Post buffers until there are as many as that, as far as there are any.

        Args:
            count: Of the next messages.
            small: They fit small buffers, which are used first.
        """
        while len(self._posted) < count:
            if small and self._small:
                self.free(self._small.pop())
            elif self._large:
                self.free(self._large.pop())
            else:
                return

    def ensure_small(self, size_bytes: int, count: int) -> None:
        """Make small buffers until there are so many, of one size always, bytes."""
        for _ in range(count - self._small_count):
            self._make(size_bytes)
        self._small_count = max(count, self._small_count)

    def widen(self, links: Links, window: int) -> None:
        """Post more large buffers, between two collectives; from now on all of them on the given links."""
        self._links = links
        for _ in range(window - self.window):
            self._make(self._large_bytes)
        self.window = window
        self.post(window)

    def _make(self, size_bytes: int) -> None:
        buffer = np.empty(size_bytes, dtype=np.uint8)
        self._kept[id(buffer)] = self._links.keep(buffer)
        self._addresses[id(buffer)] = address_of(buffer)
        self.put_aside(buffer)


class ReceiveQueue:
    """What comes from one vertex in one collective: messages by their place in the link's order.

    No small buffers are posted before the header has come and been compared: a vertex that called something else may
    send messages of any length.

    Args:
        buffers: Where it comes.
        compare: Looks at the header, which the first message begins with.
        paced: There is no buffer for a message until it is expected.
        small: How many messages come, all of which fit small buffers; 0: they may be large, and any number.
        window: For how many small ones there are buffers at a time.
    """

    def __init__(
        self,
        buffers: ReceiveBuffers,
        compare: Callable[[Bytes], None],
        *,
        paced: bool = False,
        small: int = 0,
        window: int = 0,
    ) -> None:
        self._buffers = buffers
        self._compare: Callable[[Bytes], None] | None = compare  # None when the header has been compared
        self._received = 0
        self._expected = 0
        self._paced, self._small, self._window = paced, small, window
        self._early: dict[int, Bytes] = {}  # messages that came before one that was waited for
        self._first: Bytes | None = None

    @property
    def has_received(self) -> bool:
        """Whether anything has come."""
        return self._received > 0

    def receive(self, number: int) -> Bytes:
        """Wait for one message; those before it that nobody has asked for yet stay where they are."""
        while self._received <= number:
            index = self._received
            self._early[index] = self.receive_next()
        return self._early.pop(number)

    def receive_next(self) -> Bytes:
        """Wait for the next message."""
        message = self._buffers.receive()
        self._received += 1
        if self._compare is not None:
            self._compare(message)
            self._first, self._compare = message, None
            if self._small:
                self._post_expected()
        return message

    def payload_offset(self, message: Bytes) -> int:
        """Return where a message's payload begins."""
        return HEADER_BYTES if message is self._first else 0

    def free(self, message: Bytes) -> None:
        """Use a message's buffer again."""
        if message is self._first:
            self._first = None
        if not self._paced and not self._small:
            self._buffers.free(message)
            return
        self._buffers.put_aside(message)
        self._post_expected()

    def expect(self, number: int) -> None:
        """Post buffers for all messages up to one that comes, as soon as any are free."""
        if number >= self._expected:
            self._expected = number + 1
            self._post_expected()

    def finish(self) -> None:
        """Post the buffers for what comes in the next collective: everything has been received."""
        if self._paced or self._small:
            self._buffers.post(self._buffers.window)

    def _post_expected(self) -> None:
        count = self._expected - self._received if self._paced else min(self._window, self._small - self._received)
        self._buffers.post(count, small=self._small > 0 and self._compare is None)


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
        message: All of it.
        offset: Where the payload of the next chunk begins.
        left: Chunks that have not been read from it.
    """

    message: Bytes
    offset: int
    left: int
