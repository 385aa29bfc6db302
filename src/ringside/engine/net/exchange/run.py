"""Runs one vertex's part of any schedule over a transport: the interpreter between hosts.

Chunks travel in segments. A message is received into one of a few buffers per link that were posted before it was sent,
so that it arrives without asking first, and is folded or copied from there; whatever the schedule sends of that segment
next is under way before the following segment is waited for. Small chunks that go to the same vertex in the same round
share a message. Two rules keep it correct without a barrier:

-   a segment is sent after the last receive before it that writes its chunk (`MessagePlan` knows which), and
-   it is written only when every message that carries its old content has left.

The first message of a link in each collective begins with a header: what its sender called. Ranks that called different
things find out there. A link of the schedule that has nothing to carry carries the header alone.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ringside.engine.buffers import address_of
from ringside.engine.net.exchange.exchange import USUAL_WINDOW, Exchange, ExchangeRequest, HopTiming
from ringside.engine.net.exchange.message_size import MessageSize
from ringside.engine.net.exchange.pipeline import SegmentPipeline
from ringside.engine.net.exchange.receive_buffers import HEADER_BYTES, PackedMessage, ReceiveQueue, SharedRequest
from ringside.engine.net.exchange.route import Length, Parts, ReceiveSegment, route_of
from ringside.engine.net.exchange.signature import MessageHeader, SignatureMismatch
from ringside.engine.net.exchange.wire import Wire
from ringside.engine.transports.base import Bytes, Pending

Chunk = Sequence[Bytes] | Bytes | None
"""A chunk's memory: an array, or the segments it is cut into already; None: never touched by this vertex."""

_EVERY_ROUND = 1 << 30
_NO_HORIZON = (_EVERY_ROUND, 0)


class _SendQueue:
    """What is still to be sent to one vertex in one collective.

    Args:
        peer: The vertex, as the transport numbers it.
        messages: In order: the round of each, and what it carries.

    Attributes:
        sent: How many of the messages have been sent.
        header_sent: Whether the collective's header has.
    """

    __slots__ = ("header_sent", "messages", "peer", "sent")

    def __init__(self, peer: int, messages: Sequence[tuple[int, Parts]]) -> None:
        self.peer, self.messages = peer, messages
        self.sent = 0
        self.header_sent = False


class ExchangeRun:
    """One vertex's part of one collective; `run` does it, once.

    Args:
        exchange: The links.
        request: What is done.
        chunks: The chunks' memory, uint8 arrays by number, or what `Exchange.cut` makes of them.
        ordered: All vertices know the sizes of all chunks: large ones travel in an order that keeps links busy.
        feed: What fills the chunks and empties them meanwhile; default: they are all there.
        size: Of the messages, as `Exchange.size_of` returns, where an order is worked out; default: the largest.
    """

    def __init__(
        self,
        exchange: Exchange,
        request: ExchangeRequest,
        chunks: Sequence[Chunk],
        *,
        ordered: bool = False,
        feed: SegmentPipeline | None = None,
        size: MessageSize | None = None,
    ) -> None:
        plan, item_bytes, fold, call, last_fold, members, wire = request
        self.exchange, self.plan, self.item_bytes = exchange, plan, item_bytes
        self.fold, self.last_fold, self.call, self.wire, self.feed = fold, last_fold or fold, call, wire, feed
        self.peers: Sequence[int] = range(exchange.transport.size) if members is None else members
        self.me = self.peers.index(exchange.transport.rank)
        self.size = size = size or exchange.largest
        self.segment_bytes = length = exchange.segment_of(item_bytes, wire, size)
        lengths: list[Length] = []
        self.segments: list[Sequence[Bytes]] = []  # by chunk
        for chunk in chunks:
            if isinstance(chunk, np.ndarray):
                lengths.append(len(chunk))
                if len(chunk) <= length:
                    self.segments.append([chunk])
                else:
                    self.segments.append([chunk[begin : begin + length] for begin in range(0, len(chunk), length)])
            else:  # cut already, or never touched here
                lengths.append(None if chunk is None else tuple(map(len, chunk)))
                self.segments.append(chunk or ())
        self.route = route_of(plan, self.me, tuple(lengths), length, size.window, ordered)
        self.leaving: defaultdict[tuple[int, int], list[Pending]] = defaultdict(list)  # sends that read a segment
        self.headers: list[Pending] = []  # sends of a header alone
        self.done: list[int] = [0] * len(plan.dependents)  # by receive, how many of its segments have been written
        self.round = 0 if self.route.apart else _EVERY_ROUND  # of which and of those before it messages are sent
        self.ahead = exchange.window - 1  # segments of its own that are sent before the one that comes at the same time
        self.horizon = (0, self.ahead) if feed is not None and self.route.order is None else _NO_HORIZON
        sends: Sequence[tuple[int, Sequence[tuple[int, Parts]]]] = self.route.sends
        if exchange.window > USUAL_WINDOW:
            # Of several receivers every vertex begins with the next one after it: what a long link has on its way is so
            # much that all of it at one receiver at once would not fit the queues before that one's link.
            sends = sorted(sends, key=lambda each: (each[0] - self.me) % plan.schedule.vertices)
        self.send_queues = {dst: _SendQueue(self.peers[dst], messages) for dst, messages in sends}
        self.receive_queues: dict[int, ReceiveQueue] = {}
        self.packed: dict[int, PackedMessage | None] = {}  # of the round under way, by sender
        self.packed_chunks: Mapping[int, int] = {}  # how many chunks each of these carries
        # With a wire, by chunk and segment: what this vertex has encoded or got encoded; None once that has changed.
        self.encoded: dict[tuple[int, int], Bytes | None] = {}
        self.hop_times: dict[tuple[int, int], list[float]] = {}  # by round and sender: waited, first, last, bytes

    def run(self) -> None:
        """Run it to its end.

        Raises:
            LinkError: A peer is lost, late or has left.
            SignatureMismatch: A peer called something else.
        """
        exchange, order = self.exchange, self.route.order
        # Post buffers first: in whatever order peers begin, their first messages find one.
        for src, count in self.route.counts:
            compare = functools.partial(self._compare, self.peers[src])
            self.receive_queues[src] = exchange.receive_queue(
                self.peers[src], compare, self.size, count, paced=order is not None
            )
        # Send what depends on no receive.
        for queue in self.send_queues.values():
            self._send_ready(queue)
        if order is None:
            # Round by round, and in a round segment by segment of all its chunks.
            for step in self.route.rounds:
                self._enter_round(step.number)
                self.packed, self.packed_chunks = dict.fromkeys(step.bundled), step.bundled
                for index, receives in enumerate(step.segments):
                    self._set_horizon((step.number, index + self.ahead))
                    for receive in receives:
                        self._receive(receive)
            self._enter_round(_EVERY_ROUND)
            self._set_horizon(_NO_HORIZON)
        else:
            # In the order that was worked out. Messages come in that order too: a peer sends nothing for which no
            # buffer is posted, and only those of the next `ahead` receives are.
            ahead = self.size.ahead
            for receive in order[:ahead]:
                self._expect(receive)
            for index, receive in enumerate(order):
                if 0 < index <= len(order) - ahead:
                    self._expect(order[index + ahead - 1])
                self._receive(receive)
        # Read the headers of links that had nothing to carry; have buffers posted for the next collective.
        for received in self.receive_queues.values():
            if not received.has_received:
                received.free(received.receive_next())
        for received in self.receive_queues.values():
            received.finish()
        for (k, src), (waited, first, last, size_bytes) in self.hop_times.items():
            peer = self.peers[src]
            exchange.hops.append(HopTiming(exchange.seq_from(peer), k, peer, int(size_bytes), waited, first, last))
        # The caller may write the chunks again when this returns: all that reads them has to have left.
        for sends in (self.headers, *self.leaving.values()):
            for pending in sends:
                pending.wait()

    # -------------------------------------------------------------------------------------------- sending

    def _send_ready(self, queue: _SendQueue) -> None:
        """Send what may be sent, in the link's order."""
        messages, done = queue.messages, self.done
        if not messages and not queue.header_sent:
            self.headers.append(self._post(queue, self._header(queue)))
        while queue.sent < len(messages):
            k, parts = messages[queue.sent]
            if k > self.round:
                return
            for _, segment, after in parts:
                # What waits for a receive goes when that has written this segment; a vertex's own contribution goes
                # when the horizon has come to it.
                if (done[after] <= segment) if after >= 0 else ((k, segment) > self.horizon):
                    return
            queue.sent += 1
            self._send(queue, parts)

    def _enter_round(self, k: int) -> None:
        """Go on to a round, where rounds are kept apart: all receives of those before it are through.

        A rank that waits for a message of a round waits for one that may be held up in an earlier round, but in no
        later one: nobody waits in a circle.
        """
        if self.round < k:
            self.round = k
            for queue in self.send_queues.values():
                self._send_ready(queue)

    def _set_horizon(self, horizon: tuple[int, int]) -> None:
        """Send this vertex's own segments up to one of a round, (round, segment), and none beyond.

        What a peer waits for in a round is sent before this vertex waits for anything that comes later than that.
        """
        if self.horizon != _NO_HORIZON:
            self.horizon = horizon
            for queue in self.send_queues.values():
                self._send_ready(queue)

    def _send(self, queue: _SendQueue, parts: Parts) -> None:
        if self.feed is not None:
            for chunk, segment, after in parts:
                if after < 0:
                    self.feed.wait(chunk, segment)
        if self.wire is None:
            payloads = [self.segments[chunk][segment] for chunk, segment, _ in parts]
        else:
            payloads = [self._encode(self.wire, chunk, segment) for chunk, segment, _ in parts]
        if not queue.header_sent:
            payloads.insert(0, self._header(queue))
        pending = self._post(queue, payloads[0] if len(payloads) == 1 else np.concatenate(payloads))
        if len(parts) > 1:
            pending = SharedRequest(pending)
        for chunk, segment, _ in parts:
            self.leaving[chunk, segment].append(pending)

    def _post(self, queue: _SendQueue, data: Bytes) -> Pending:
        pending = self.exchange.links.send(queue.peer, data)
        self.exchange.sent_bytes[queue.peer] += len(data)
        return pending

    def _header(self, queue: _SendQueue) -> Bytes:
        queue.header_sent = True
        message = np.zeros(HEADER_BYTES, dtype=np.uint8)
        seq = self.exchange.next_seq(queue.peer, sending=True)
        MessageHeader(seq, self.plan.hash, self.segment_bytes, self.call).write(message)
        return message

    def _encode(self, wire: Wire, chunk: int, segment: int) -> Bytes:
        """Return a segment as it travels, once for what it holds now, and round it where it lies."""
        key = chunk, segment
        message = self.encoded.get(key)
        if message is None:
            message = wire.narrow(self.segments[chunk][segment], first=key not in self.encoded)
            self.encoded[key] = message
        return message

    # -------------------------------------------------------------------------------------------- receiving

    def _expect(self, receive: ReceiveSegment) -> None:
        for src, number in zip(receive.sources, receive.places, strict=True):
            self.receive_queues[src].expect(number)

    def _receive(self, receive: ReceiveSegment) -> None:
        """Receive one segment, write it, and send what may be sent then."""
        k, number, chunk, segment, overwrite, sources, own_position, final, dependents, places = receive
        own, wire = self.segments[chunk][segment], self.wire
        # Wait for the messages, by sender.
        payloads: list[Bytes] = []
        as_sent: Bytes | None = None
        used: list[tuple[ReceiveQueue, Bytes]] = []
        for index, src in enumerate(sources):
            queue = self.receive_queues[src]
            if src not in self.packed:
                message = self._wait_for_message(k, src, queue, places[index] if places else None, len(own))
                as_sent = self._payload(message, queue.payload_offset(message), len(own))
                payloads.append(as_sent if wire is None else wire.widen(as_sent))
                used.append((queue, message))
                continue
            # The next chunk of a message that carries several; it is used up with its last one.
            packed = self.packed[src]
            if packed is None:
                message = self._wait_for_message(k, src, queue, None, 0)
                packed = PackedMessage(message, queue.payload_offset(message), self.packed_chunks[src])
                self.packed[src] = packed
            self.hop_times[k, src][3] += len(own)
            as_sent = self._payload(packed.message, packed.offset, len(own))
            payloads.append(as_sent if wire is None else wire.widen(as_sent))
            packed.offset += self._wire_bytes(len(own))
            packed.left -= 1
            if not packed.left:
                used.append((queue, packed.message))
        # The segment is written when its old content has left and this vertex's own contribution lies there.
        for pending in self.leaving.pop((chunk, segment), ()):
            pending.wait()
        feed = self.feed
        if feed is not None:
            feed.wait(chunk, segment)
        if overwrite:
            own[:] = payloads[0]
            if wire is not None:  # it is handed on as it came
                assert as_sent is not None
                self.encoded[chunk, segment] = as_sent.copy() if dependents else None
        else:
            if wire is not None and wire.rounds_own:
                self._encode(wire, chunk, segment)
            # Contributions are folded in the order of ranks, this one's among them: all that fold alike get the same
            # bits.
            if own_position >= 0:
                payloads.insert(own_position, own)
            fold = self.last_fold if final else self.fold
            fold([address_of(payload) for payload in payloads], address_of(own), len(own) // self.item_bytes)
            if wire is not None:
                if (chunk, segment) in self.encoded:
                    self.encoded[chunk, segment] = None
                if final:
                    self._encode(wire, chunk, segment)
        for queue, message in used:
            queue.free(message)
        # Send what waited for it.
        self.done[number] += 1
        for dst in dependents:
            self._send_ready(self.send_queues[dst])
        if final and feed is not None:
            feed.ready(chunk, segment)

    def _wait_for_message(self, k: int, src: int, queue: ReceiveQueue, number: int | None, length: int) -> Bytes:
        """Wait for one message from a vertex, and note when."""
        waited = time.perf_counter()
        message = queue.receive_next() if number is None else queue.receive(number)
        now = time.perf_counter()
        times = self.hop_times.get((k, src))
        if times is None:
            times = self.hop_times[k, src] = [waited, now, now, 0.0]
        times[2] = now
        times[3] += length
        return message

    def _payload(self, message: Bytes, offset: int, length: int) -> Bytes:
        return message[offset : offset + self._wire_bytes(length)]

    def _wire_bytes(self, length: int) -> int:
        return length if self.wire is None else self.wire.wire_bytes(length // self.item_bytes)

    def _compare(self, peer: int, message: Bytes) -> None:
        theirs = MessageHeader.read(message)
        seq = self.exchange.next_seq(peer, sending=False)
        ours = MessageHeader(seq, self.plan.hash, self.segment_bytes, self.call)
        if theirs != ours:
            raise SignatureMismatch(peer, theirs, ours)
