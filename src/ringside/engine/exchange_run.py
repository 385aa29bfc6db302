"""One collective on one vertex: takes what comes, writes it, and sends what may be sent then.

See `ringside.engine.exchange` for how it goes about it, and why that is correct without a barrier.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ringside.engine.mail import HEADER_BYTES, Bundle, Mail, Once
from ringside.engine.message_order import Order, Take, order_messages
from ringside.engine.message_plan import MessagePlan, Receive, Send
from ringside.engine.message_rounds import rounds_apart
from ringside.engine.message_size import LEAST_ORDERED_BYTES, MessageSize
from ringside.engine.tensors import address_of
from ringside.engine.told import Call, Disagreement, Header
from ringside.engine.transports.transport import Bytes, Pending
from ringside.engine.wire import Wire

if TYPE_CHECKING:
    from ringside.engine.exchange import Exchange

_SHARED_BYTES = 1 << 16  # of chunks that share a message: copying more takes longer than sending them one by one
_EVERY_ROUND = 1 << 30
_NO_HORIZON = (_EVERY_ROUND, 0)

AHEAD = 3
"""Segments of this vertex's own that are sent before the one is received that comes at the same time: what is fed in
piece by piece is added up when messages need it, and no sooner."""

Fold = Callable[[Sequence[int], int, int], None]
"""Reduces arrays: (addresses of the sources in order, address of the result, elements)."""


Chunk = Sequence[Bytes] | Bytes | None
"""A chunk's memory: an array, or the segments it is cut into already; None: never touched by this vertex."""


class Feed(Protocol):
    """Where segments come from and go to while a collective is under way."""

    def wait(self, chunk: int, segment: int) -> None:
        """Return when this vertex's own contribution lies there."""

    def ready(self, chunk: int, segment: int) -> None:
        """Take note that the result lies there; it is only read from now on."""


class Hop(NamedTuple):
    """What one rank received from one other in one round; times in seconds on this process's `perf_counter`.

    Args:
        seq: The collective.
        round: The schedule's round.
        src: The sender.
        size_bytes: Payload.
        waited: When this rank began to wait for it.
        first: When its first segment was there: waited → first is the sender being late (or one way of the wire).
        last: When all of it was there: first → last is the wire.
    """

    seq: int
    round: int
    src: int
    size_bytes: int
    waited: float
    first: float
    last: float


Parts = tuple[tuple[int, int, int], ...]
"""What a message carries: (chunk, segment, the receive it waits for) of each part, in order."""


@dataclass(frozen=True)
class _Outbox:
    """What is still to be sent to one vertex in one collective, message by message: its round, and what it carries."""

    peer: int
    queue: deque[tuple[int, Parts]]


class Run:
    """One collective on one vertex; arguments as for `Exchange.run`."""

    def __init__(
        self,
        exchange: Exchange,
        plan: MessagePlan,
        chunks: Sequence[Chunk],
        item_bytes: int,
        fold: Fold,
        last_fold: Fold,
        call: Call,
        members: Sequence[int] | None,
        wire: Wire | None,
        ordered: bool,
        feed: Feed | None,
        size: MessageSize,
    ) -> None:
        self.exchange, self.plan, self.chunks, self.item = exchange, plan, chunks, item_bytes
        self.fold, self.last_fold, self.call, self.wire, self.feed = fold, last_fold, call, wire, feed
        self.members = members
        self.me = exchange.transport.rank if members is None else list(members).index(exchange.transport.rank)
        self.size, self.segment = size, exchange.segment_of(item_bytes, wire, size)
        self.leaving: defaultdict[tuple[int, int], list[Pending]] = defaultdict(list)
        self.done: list[int] = [0] * len(plan.dependents)
        large = ordered and self._is_large()
        segments = [self._segments(chunk) for chunk in range(plan.chunks)] if large else []
        self.order = order_messages(plan.schedule, self.me, segments, size.window) if large else None
        apart = large and self.order is None and rounds_apart(plan.schedule, segments)
        self.round = 0 if apart else _EVERY_ROUND  # of which and of those before it messages are sent
        self.horizon = (0, AHEAD) if feed is not None and self.order is None else _NO_HORIZON
        self.outboxes = {dst: self._outbox(dst, sends) for dst, sends in plan.links.items()}
        self.mail: dict[int, Mail] = {}
        self.greeted: set[int] = set()
        self.bundled: dict[int, Bundle | None] = {}  # of the round under way, by sender
        self.times: dict[tuple[int, int], list[float]] = {}

    def go(self) -> None:
        """Carry it out."""
        messages = self._messages()
        for src in self.plan.sources:
            peer = self._vertex(src)  # whatever order they come in, the first messages have a place
            compare, paced = functools.partial(self._compare, peer), self.order is not None
            self.mail[peer] = self.exchange.mail(peer, compare, self.size, messages[src], paced=paced)
        for outbox in self.outboxes.values():
            self._pump(outbox)
        if self.order is None:
            first = 0
            for k, receives in enumerate(self.plan.rounds):
                if receives:
                    self._reach(k)
                    self._round(k, receives, first)
                    first += len(receives)
            self._reach(_EVERY_ROUND)
            self._look_to(_NO_HORIZON)
        else:
            self._in_order(self.order)
        self._hear_the_rest()
        for mail in self.mail.values():
            mail.end()
        self._note_hops()
        for pendings in self.leaving.values():
            for pending in pendings:
                pending.wait()

    def _is_large(self) -> bool:
        """Whether the order of messages matters: not through switches, nor for what is a matter of latency."""
        sizes = [len(chunk) if isinstance(chunk, np.ndarray) else sum(map(len, chunk or ())) for chunk in self.chunks]
        return not self.plan.switches and max(sizes, default=0) >= LEAST_ORDERED_BYTES

    # -------------------------------------------------------------------------------------------- sending

    def _outbox(self, dst: int, sends: tuple[Send, ...]) -> _Outbox:
        """List the messages of a link: as ordered, or per round, segment by segment."""
        queue: deque[tuple[int, Parts]] = deque()
        if self.order is not None:
            after = {(send.round, send.chunk): send.after for send in sends}
            parts = self.order.sends.get(dst, ())
            return _Outbox(self._vertex(dst), deque((k, ((c, segment, after[k, c]),)) for k, c, segment in parts))
        for group in self.plan.outgoing[dst]:
            if len(group) > 1 and self._share_a_message([send.chunk for send in group]):
                parts = tuple((send.chunk, 0, send.after) for send in group if self._segments(send.chunk))
                queue.append((group[0].round, parts))
                continue
            for segment in range(max(self._segments(send.chunk) for send in group)):
                queue.extend(
                    (send.round, ((send.chunk, segment, send.after),))
                    for send in group
                    if segment < self._segments(send.chunk)
                )
        return _Outbox(self._vertex(dst), queue)

    def _share_a_message(self, chunks: Sequence[int]) -> bool:
        """Tell whether chunks of one round and link go in one message; both ends see the same sizes."""
        arrays = [self._chunk(chunk) for chunk in chunks]
        if not all(isinstance(array, np.ndarray) for array in arrays):
            return False  # large ones, cut already
        return 0 < sum(map(len, arrays)) <= min(self.segment, _SHARED_BYTES)

    def _pump(self, outbox: _Outbox) -> None:
        """Send what may be sent."""
        queue, done = outbox.queue, self.done
        if not queue and outbox.peer not in self.greeted:
            self._post(outbox.peer, self._header(outbox.peer), ())
        while queue:
            k, parts = queue[0]
            if k > self.round:
                return
            for _, segment, after in parts:
                if (done[after] <= segment) if after >= 0 else ((k, segment) > self.horizon):
                    return
            queue.popleft()
            self._send(outbox.peer, parts)

    def _reach(self, k: int) -> None:
        """Go on to a round, where rounds are kept apart: all receives of those before it are through.

        Whoever waits for a message of a round waits for somebody who may be held up in an earlier one, but in no later
        one: nobody waits in a circle.
        """
        if self.round < k:
            self.round = k
            for outbox in self.outboxes.values():
                self._pump(outbox)

    def _look_to(self, horizon: tuple[int, int]) -> None:
        """Send this vertex's own segments up to one of a round, (round, segment), and none beyond.

        What a peer waits for in a round is sent before this vertex waits for anything that comes later than that.
        """
        if self.horizon != _NO_HORIZON:
            self.horizon = horizon
            for outbox in self.outboxes.values():
                self._pump(outbox)

    def _send(self, peer: int, parts: Parts) -> None:
        if self.feed is not None:
            for chunk, segment, after in parts:
                if after < 0:
                    self.feed.wait(chunk, segment)
        pieces = [self._part(chunk, segment) for chunk, segment, _ in parts]
        if self.wire is not None:
            pieces = [self.wire.narrow(piece) for piece in pieces]
        if peer not in self.greeted:
            pieces.insert(0, self._header(peer))
        self._post(peer, pieces[0] if len(pieces) == 1 else np.concatenate(pieces), parts)

    def _post(self, peer: int, data: Bytes, parts: Parts) -> None:
        pending: Pending = self.exchange.links.send(peer, data)
        if len(parts) > 1:
            pending = Once(pending)
        self.exchange.sent_bytes[peer] += len(data)
        for chunk, segment, _ in parts or ((-1, 0, -1),):
            self.leaving[chunk, segment].append(pending)

    def _header(self, peer: int) -> Bytes:
        self.greeted.add(peer)
        message = np.zeros(HEADER_BYTES, dtype=np.uint8)
        seq = self.exchange.next_seq(peer, sending=True)
        Header(seq, self.plan.hash, self.segment, self.call).write(message)
        return message

    # -------------------------------------------------------------------------------------------- receiving

    def _in_order(self, order: Order) -> None:
        """Take messages in order, and have them come in that order: what there is no place for yet is not sent."""
        receives = [receive for receives in self.plan.rounds for receive in receives]
        indices = [self.plan.receives[k, chunk] for (k, chunk, _), _ in order.takes]
        ahead = self.size.ahead
        for at in range(min(ahead, len(indices))):
            self._expect(receives[indices[at]], order.takes[at])
        for at, ((k, _, segment), places) in enumerate(order.takes):
            if 0 < at <= len(indices) - ahead:
                self._expect(receives[indices[at + ahead - 1]], order.takes[at + ahead - 1])
            self._receive(k, indices[at], receives[indices[at]], segment, places)

    def _expect(self, receive: Receive, take: Take) -> None:
        for src, number in zip(receive.sources, take.places, strict=True):
            self.mail[self._vertex(src)].expect(number)

    def _messages(self) -> defaultdict[int, int]:
        """Return how many messages come from each sender, where none carries several chunks."""
        counts: defaultdict[int, int] = defaultdict(int)
        for receive in (receive for receives in self.plan.rounds for receive in receives):
            for src in receive.sources:
                counts[src] += self._segments(receive.chunk)
        return counts

    def _round(self, k: int, receives: tuple[Receive, ...], first: int) -> None:
        counts = [self._segments(receive.chunk) for receive in receives]
        several = self.plan.incoming[k]
        self.bundled = {src: None for src, chunks in several.items() if self._share_a_message(chunks)}
        for segment in range(max(counts)):
            self._look_to((k, segment + AHEAD))
            for index, receive in enumerate(receives):
                if segment < counts[index]:
                    self._receive(k, first + index, receive, segment, None)

    def _receive(self, k: int, index: int, receive: Receive, segment: int, places: tuple[int, ...] | None) -> None:
        """Take one segment of a receive, write it, and send what may be sent then."""
        own = self._part(receive.chunk, segment)
        arrived: list[tuple[int, Bytes | None, Bytes]] = []
        for at, src in enumerate(receive.sources):
            if src in self.bundled:
                arrived.append((src, *self._from_bundle(k, src, len(own))))
            else:
                peer = self._vertex(src)
                message = self._message(k, peer, None if places is None else places[at], len(own))
                arrived.append((src, message, self._payload(message, self.mail[peer].begins(message), len(own))))
        for pending in self.leaving.pop((receive.chunk, segment), ()):
            pending.wait()
        if self.feed is not None:
            self.feed.wait(receive.chunk, segment)
        final = index in self.plan.finals
        self._store(receive, own, arrived, self.last_fold if final else self.fold)
        for src, place, _ in arrived:
            if place is not None:
                self.mail[self._vertex(src)].free(place)
        if final and self.wire is not None:
            self.wire.round(own)
        self.done[index] += 1
        for dst in self.plan.dependents[index]:
            self._pump(self.outboxes[dst])
        if final and self.feed is not None:
            self.feed.ready(receive.chunk, segment)

    def _message(self, k: int, peer: int, number: int | None, length: int) -> Bytes:
        """Wait for one message from a vertex, and note when."""
        mail = self.mail[peer]
        waited = time.perf_counter()
        place = mail.take_next() if number is None else mail.take(number)
        now = time.perf_counter()
        hop = self.times.setdefault((k, peer), [waited, now, now, 0.0])
        hop[2] = now
        hop[3] += length
        return place

    def _note_hops(self) -> None:
        for (k, src), (waited, arrived, last, size) in sorted(self.times.items()):
            self.exchange.hops.append(Hop(self.exchange.seq_from(src), k, src, int(size), waited, arrived, last))

    def _store(self, receive: Receive, own: Bytes, arrived: list[tuple[int, Bytes | None, Bytes]], fold: Fold) -> None:
        if receive.overwrite:
            own[:] = arrived[0][2]
            return
        sources = [(src, payload) for src, _, payload in arrived]
        if self.me < self.plan.ranks:  # a switch has nothing of its own to add
            sources.append((self.me, own))
            sources.sort(key=lambda pair: pair[0])
        addresses = [address_of(payload) for _, payload in sources]
        fold(addresses, address_of(own), len(own) // self.item)

    def _payload(self, place: Bytes, start: int, length: int) -> Bytes:
        if self.wire is None:
            return place[start : start + length]
        return self.wire.widen(place[start : start + self._on_the_wire(length)])

    def _on_the_wire(self, length: int) -> int:
        return length if self.wire is None else length * self.wire.item_bytes // self.item

    def _from_bundle(self, k: int, src: int, length: int) -> tuple[Bytes | None, Bytes]:
        """Return the next chunk of a shared message, and the message's place when all of it has been used."""
        bundle = self.bundled[src]
        if bundle is None:
            peer = self._vertex(src)
            place = self._message(k, peer, None, 0)
            several = sum(self._segments(chunk) for chunk in self.plan.incoming[k][src])
            bundle = self.bundled[src] = Bundle(place, self.mail[peer].begins(place), several)
        self.times[k, self._vertex(src)][3] += length
        payload = self._payload(bundle.place, bundle.at, length)
        bundle.at += self._on_the_wire(length)
        bundle.left -= 1
        return (None if bundle.left else bundle.place), payload

    def _hear_the_rest(self) -> None:
        """Take the headers of links that had nothing to carry."""
        for mail in self.mail.values():
            if not mail.heard:
                mail.free(mail.take_next())

    def _compare(self, peer: int, place: Bytes) -> None:
        theirs = Header.read(place)
        ours = Header(self.exchange.next_seq(peer, sending=False), self.plan.hash, self.segment, self.call)
        if theirs != ours:
            raise Disagreement(peer, theirs, ours)

    # -------------------------------------------------------------------------------------------- places

    def _vertex(self, number: int) -> int:
        return number if self.members is None else self.members[number]

    def _chunk(self, chunk: int) -> Sequence[Bytes] | Bytes:
        memory = self.chunks[chunk]
        assert memory is not None, "the schedule uses a chunk for which there is no memory"
        return memory

    def _segments(self, chunk: int) -> int:
        memory = self._chunk(chunk)
        return -(-len(memory) // self.segment) if isinstance(memory, np.ndarray) else len(memory)

    def _part(self, chunk: int, segment: int) -> Bytes:
        memory = self._chunk(chunk)
        if not isinstance(memory, np.ndarray):
            return memory[segment]
        return memory if len(memory) <= self.segment else memory[segment * self.segment : (segment + 1) * self.segment]
