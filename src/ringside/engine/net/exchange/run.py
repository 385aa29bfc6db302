"""One collective on one vertex: takes what comes, writes it, and sends what may be sent then.

See `ringside.engine.net.exchange.exchange` for how it goes about it, and why that is correct without a barrier.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from ringside.engine.buffers import address_of
from ringside.engine.net.exchange.compression import WireCompression
from ringside.engine.net.exchange.message_size import MessageSize
from ringside.engine.net.exchange.plan import MessagePlan
from ringside.engine.net.exchange.receive_buffers import HEADER_BYTES, PackedMessage, ReceiveQueue, SharedRequest
from ringside.engine.net.exchange.route import Length, Parts, RouteRound, ReceiveSegment, route_of
from ringside.engine.net.exchange.signature import CollectiveSignature, MessageHeader, SignatureMismatch
from ringside.engine.transports.base import Bytes, Pending

if TYPE_CHECKING:
    from ringside.engine.net.exchange.exchange import Exchange

_EVERY_ROUND = 1 << 30
_NO_HORIZON = (_EVERY_ROUND, 0)
_NOTHING: Parts = ((-1, 0, -1),)

AHEAD = 3
"""Segments of this vertex's own that are sent before the one is received that comes at the same time: what is fed in
piece by piece is added up when messages need it, and no sooner."""

Fold = Callable[[Sequence[int], int, int], None]
"""Reduces arrays: (addresses of the sources in order, address of the result, elements)."""


Chunk = Sequence[Bytes] | Bytes | None
"""A chunk's memory: an array, or the segments it is cut into already; None: never touched by this vertex."""


class LocalSource(Protocol):
    """Where segments come from and go to while a collective is under way."""

    def wait(self, chunk: int, segment: int) -> None:
        """Return when this vertex's own contribution lies there."""

    def ready(self, chunk: int, segment: int) -> None:
        """Take note that the result lies there; it is only read from now on."""


class HopTiming(NamedTuple):
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


class _Outbox:
    """What is still to be sent to one vertex in one collective.

    Args:
        peer: The vertex, as the transport numbers it.
        messages: In order: the round of each, and what it carries.
    """

    __slots__ = ("at", "greeted", "messages", "peer")

    def __init__(self, peer: int, messages: Sequence[tuple[int, Parts]]) -> None:
        self.peer, self.messages = peer, messages
        self.at = 0
        self.greeted = False


class ExchangeRun:
    """One collective on one vertex; arguments as for `Exchange.run`."""

    def __init__(
        self,
        exchange: Exchange,
        plan: MessagePlan,
        chunks: Sequence[Chunk],
        item_bytes: int,
        fold: Fold,
        last_fold: Fold,
        call: CollectiveSignature,
        members: Sequence[int] | None,
        wire: WireCompression | None,
        ordered: bool,
        feed: LocalSource | None,
        size: MessageSize,
    ) -> None:
        self.exchange, self.plan, self.item = exchange, plan, item_bytes
        self.fold, self.last_fold, self.call, self.wire, self.feed = fold, last_fold, call, wire, feed
        self.peers: Sequence[int] = range(exchange.transport.size) if members is None else members
        self.me = self.peers.index(exchange.transport.rank)
        self.size, self.segment = size, exchange.segment_of(item_bytes, wire, size)
        lengths = tuple([_length_of(chunk) for chunk in chunks])
        self.route = route_of(plan, self.me, lengths, self.segment, size.window, ordered)
        self.parts = [_cut(chunk, self.segment) for chunk in chunks]
        self.leaving: defaultdict[tuple[int, int], list[Pending]] = defaultdict(list)
        self.done: list[int] = [0] * len(plan.dependents)
        self.round = 0 if self.route.apart else _EVERY_ROUND  # of which and of those before it messages are sent
        self.horizon = (0, AHEAD) if feed is not None and self.route.order is None else _NO_HORIZON
        self.outboxes = {dst: _Outbox(self.peers[dst], messages) for dst, messages in self.route.sends}
        self.mail: dict[int, ReceiveQueue] = {}
        self.bundled: dict[int, PackedMessage | None] = {}  # of the round under way, by sender
        self.bundles: Mapping[int, int] = {}  # how many chunks each of these carries
        self.times: dict[tuple[int, int], list[float]] = {}

    def go(self) -> None:
        """Carry it out."""
        order = self.route.order
        for src, count in self.route.counts:  # whatever order they come in, the first messages have a place
            compare = functools.partial(self._compare, self.peers[src])
            self.mail[src] = self.exchange.mail(self.peers[src], compare, self.size, count, paced=order is not None)
        for outbox in self.outboxes.values():
            self._pump(outbox)
        if order is None:
            for one in self.route.rounds:
                self._take_round(one)
            self._reach(_EVERY_ROUND)
            self._look_to(_NO_HORIZON)
        else:
            self._take_in_order(order)
        self._hear_the_rest()
        for mail in self.mail.values():
            mail.end()
        self._note_hops()
        for pendings in self.leaving.values():
            for pending in pendings:
                pending.wait()

    # -------------------------------------------------------------------------------------------- sending

    def _pump(self, outbox: _Outbox) -> None:
        """Send what may be sent."""
        messages, done = outbox.messages, self.done
        if not messages and not outbox.greeted:
            self._post(outbox, self._header(outbox), ())
        while outbox.at < len(messages):
            k, parts = messages[outbox.at]
            if k > self.round:
                return
            for _, segment, after in parts:
                if (done[after] <= segment) if after >= 0 else ((k, segment) > self.horizon):
                    return
            outbox.at += 1
            self._send(outbox, parts)

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

    def _send(self, outbox: _Outbox, parts: Parts) -> None:
        if self.feed is not None:
            for chunk, segment, after in parts:
                if after < 0:
                    self.feed.wait(chunk, segment)
        pieces = [self.parts[chunk][segment] for chunk, segment, _ in parts]
        if self.wire is not None:
            pieces = [self.wire.narrow(piece) for piece in pieces]
        if not outbox.greeted:
            pieces.insert(0, self._header(outbox))
        self._post(outbox, pieces[0] if len(pieces) == 1 else np.concatenate(pieces), parts)

    def _post(self, outbox: _Outbox, data: Bytes, parts: Parts) -> None:
        pending: Pending = self.exchange.links.send(outbox.peer, data)
        if len(parts) > 1:
            pending = SharedRequest(pending)
        self.exchange.sent_bytes[outbox.peer] += len(data)
        for chunk, segment, _ in parts or _NOTHING:
            self.leaving[chunk, segment].append(pending)

    def _header(self, outbox: _Outbox) -> Bytes:
        outbox.greeted = True
        message = np.zeros(HEADER_BYTES, dtype=np.uint8)
        seq = self.exchange.next_seq(outbox.peer, sending=True)
        MessageHeader(seq, self.plan.hash, self.segment, self.call).write(message)
        return message

    # -------------------------------------------------------------------------------------------- receiving

    def _take_round(self, one: RouteRound) -> None:
        self._reach(one.number)
        self.bundled, self.bundles = dict.fromkeys(one.bundled), one.bundled
        for at, takings in enumerate(one.segments):
            self._look_to((one.number, at + AHEAD))
            for taking in takings:
                self._take(taking)

    def _take_in_order(self, order: Sequence[ReceiveSegment]) -> None:
        """Take messages in order, and have them come in that order: what there is no place for yet is not sent."""
        ahead = self.size.ahead
        for taking in order[:ahead]:
            self._expect(taking)
        for at, taking in enumerate(order):
            if 0 < at <= len(order) - ahead:
                self._expect(order[at + ahead - 1])
            self._take(taking)

    def _expect(self, taking: ReceiveSegment) -> None:
        for src, number in zip(taking.sources, taking.places, strict=True):
            self.mail[src].expect(number)

    def _take(self, taking: ReceiveSegment) -> None:
        """Take one segment of a receive, write it, and send what may be sent then."""
        k, receive, chunk, segment, overwrite, sources, at, final, dependents, places = taking
        own = self.parts[chunk][segment]
        payloads: list[Bytes] = []
        used: list[tuple[ReceiveQueue, Bytes]] = []
        for number, src in enumerate(sources):
            mail = self.mail[src]
            if src in self.bundled:
                payloads.append(self._from_bundle(k, src, mail, len(own), used))
            else:
                place = self._message(k, src, mail, places[number] if places else None, len(own))
                payloads.append(self._payload(place, mail.begins(place), len(own)))
                used.append((mail, place))
        for pending in self.leaving.pop((chunk, segment), ()):
            pending.wait()
        feed = self.feed
        if feed is not None:
            feed.wait(chunk, segment)
        if overwrite:
            own[:] = payloads[0]
        else:
            if at >= 0:
                payloads.insert(at, own)
            by = self.last_fold if final else self.fold
            by([address_of(payload) for payload in payloads], address_of(own), len(own) // self.item)
        for mail, place in used:
            mail.free(place)
        if final and self.wire is not None:
            self.wire.round(own)
        self.done[receive] += 1
        for dst in dependents:
            self._pump(self.outboxes[dst])
        if final and feed is not None:
            feed.ready(chunk, segment)

    def _message(self, k: int, src: int, mail: ReceiveQueue, number: int | None, length: int) -> Bytes:
        """Wait for one message from a vertex, and note when."""
        waited = time.perf_counter()
        place = mail.take_next() if number is None else mail.take(number)
        now = time.perf_counter()
        hop = self.times.get((k, src))
        if hop is None:
            hop = self.times[k, src] = [waited, now, now, 0.0]
        hop[2] = now
        hop[3] += length
        return place

    def _note_hops(self) -> None:
        for (k, src), (waited, arrived, last, size) in self.times.items():
            peer = self.peers[src]
            self.exchange.hops.append(
                HopTiming(self.exchange.seq_from(peer), k, peer, int(size), waited, arrived, last)
            )

    def _payload(self, place: Bytes, start: int, length: int) -> Bytes:
        if self.wire is None:
            return place[start : start + length]
        return self.wire.widen(place[start : start + self._on_the_wire(length)])

    def _on_the_wire(self, length: int) -> int:
        return length if self.wire is None else length * self.wire.item_bytes // self.item

    def _from_bundle(
        self, k: int, src: int, mail: ReceiveQueue, length: int, used: list[tuple[ReceiveQueue, Bytes]]
    ) -> Bytes:
        """Return the next chunk of a shared message; the message is used when all of it has been."""
        bundle = self.bundled[src]
        if bundle is None:
            place = self._message(k, src, mail, None, 0)
            bundle = self.bundled[src] = PackedMessage(place, mail.begins(place), self.bundles[src])
        self.times[k, src][3] += length
        payload = self._payload(bundle.place, bundle.at, length)
        bundle.at += self._on_the_wire(length)
        bundle.left -= 1
        if not bundle.left:
            used.append((mail, bundle.place))
        return payload

    def _hear_the_rest(self) -> None:
        """Take the headers of links that had nothing to carry."""
        for mail in self.mail.values():
            if not mail.heard:
                mail.free(mail.take_next())

    def _compare(self, peer: int, place: Bytes) -> None:
        theirs = MessageHeader.read(place)
        ours = MessageHeader(self.exchange.next_seq(peer, sending=False), self.plan.hash, self.segment, self.call)
        if theirs != ours:
            raise SignatureMismatch(peer, theirs, ours)


def _length_of(chunk: Chunk) -> Length:
    """Return how long a chunk is, or the segments it is cut into already."""
    if isinstance(chunk, np.ndarray):
        return len(chunk)
    return None if chunk is None else tuple(map(len, chunk))


def _cut(chunk: Chunk, length: int) -> Sequence[Bytes]:
    """Return a chunk's segments."""
    if not isinstance(chunk, np.ndarray):
        return chunk or ()
    return [chunk] if len(chunk) <= length else [chunk[at : at + length] for at in range(0, len(chunk), length)]
