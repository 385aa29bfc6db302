"""Messages over several connections in turn, over pairs of sockets."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringside.engine.transports.base import Bytes, Kept
from ringside.engine.transports.striping import StripedLinks

from .conformance import message

HERE, PEER = 0, 1


class OverSocket:
    """One end of a connection: whatever is received fills the memory that was posted first."""

    def __init__(self, end: socket.socket) -> None:
        self.end, self.sent = end, 0
        self.posted: deque[Bytes] = deque()
        self.filled: list[Bytes] = []

    def keep(self, data: Bytes) -> Kept:
        """Return it as it is sent again and again."""
        return [data]

    def send(self, peer: int, data: Bytes | Kept) -> Arrival:
        """Send it, behind its length."""
        data = data[0] if isinstance(data, list) else data
        self.sent += 1
        self.end.sendall(len(data).to_bytes(4, "little") + data.tobytes())
        return Arrival(self, None)

    def receive(self, peer: int, into: Bytes | Kept) -> Arrival:
        """Have the next message come there."""
        into = into[0] if isinstance(into, list) else into
        self.posted.append(into)
        return Arrival(self, into)

    def read_one(self) -> Bytes:
        """Read the next message, and return where it came."""
        into = self.posted.popleft()
        length = int.from_bytes(self.end.recv(4, socket.MSG_WAITALL), "little")
        into[:length] = np.frombuffer(self.end.recv(length, socket.MSG_WAITALL), dtype=np.uint8)
        return into


class Arrival:
    """A message under way."""

    def __init__(self, connection: OverSocket, into: Bytes | None) -> None:
        self.connection, self.into = connection, into

    def wait(self) -> None:
        """Read until it is there."""
        while self.into is not None and not any(filled is self.into for filled in self.connection.filled):
            self.connection.filled.append(self.connection.read_one())


@contextmanager
def connections(count: int) -> Iterator[tuple[list[OverSocket], list[OverSocket]]]:
    with ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(count)]
        for end in (end for pair in pairs for end in pair):
            stack.enter_context(closing(end))
        yield [OverSocket(one) for one, _ in pairs], [OverSocket(other) for _, other in pairs]


@given(
    window=st.integers(1, 5),
    stages=st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(1, 300), max_size=20)), min_size=1, max_size=3),
)
def test_every_message_meets_its_place_however_often_connections_are_added(
    window: int, stages: list[tuple[int, list[int]]]
) -> None:
    """As an exchange does it: so many places are posted ahead, and these are filled as those before them were."""
    number, numbers = 0, iter(range(10**6))
    with connections(sum(count for count, _ in stages)) as (near, far):
        sender: StripedLinks | None = None
        receiver: StripedLinks | None = None
        pending: deque[tuple[Bytes, Arrival]] = deque()
        used = 0
        for count, sizes in stages:
            here, there = near[used : used + count], far[used : used + count]
            used += count
            sender = StripedLinks(here, sender, {PEER: window} if sender is not None and number else {})
            receiver = StripedLinks(there, receiver, {})
            if sizes and not pending:
                for _ in range(window):
                    place = np.zeros(300, dtype=np.uint8)
                    pending.append((place, receiver.receive(HERE, receiver.keep(place))))
            before = sum(each.sent for each in here)
            for size in sizes:
                sender.send(PEER, message(number, size=size)).wait()
                number += 1
            sent = [each.sent for each in here]
            assert max(sent) - min(sent) <= 1, "they take turns"
            assert sum(sent) - before <= len(sizes)
            for size in sizes:
                place, arrival = pending.popleft()
                arrival.wait()
                assert (place[:size] == message(next(numbers), size=size)).all()
                place = np.zeros(300, dtype=np.uint8)
                pending.append((place, receiver.receive(HERE, place)))


def test_every_peer_has_its_own_turn() -> None:
    sent: list[tuple[str, int]] = []

    class Noting:
        def __init__(self, name: str) -> None:
            self.name = name

        def keep(self, data: Bytes) -> Kept:
            return [data]

        def send(self, peer: int, data: Bytes | Kept) -> None:
            sent.append((self.name, peer))

        receive = send

    old, one, two = (Noting(name) for name in ("old", "one", "two"))
    links = StripedLinks([one, two], old, {4: 2})  # type: ignore[list-item, arg-type]
    nothing = np.zeros(1, dtype=np.uint8)
    for peer in (4, 5, 4, 4, 5, 4, 5):
        links.send(peer, nothing)
    assert sent == [("old", 4), ("one", 5), ("old", 4), ("one", 4), ("two", 5), ("two", 4), ("one", 5)]
    sent.clear()
    for peer in (4, 4, 5):
        links.receive(peer, nothing)
    assert sent == [("one", 4), ("two", 4), ("one", 5)]
