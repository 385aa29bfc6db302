"""Runs one vertex's part of any schedule over a transport: the interpreter between hosts.

Chunks travel in segments. A message is received into one of a few places per link that were posted before it was sent,
so that it arrives without asking first, and is folded or copied from there; whatever the schedule sends of that segment
next is under way before the following segment is waited for. Small chunks that go to the same vertex in the same round
share a message. Two rules keep it correct without a barrier:

-   a segment is sent after the last receive before it that writes its chunk (`MessagePlan` knows which), and
-   it is written only when every message that carries its old content has left.

The first message of a link in each collective begins with a header that says what its sender called; ranks that called
different things find out there. A link of the schedule that has nothing to carry carries the header alone.
"""

from __future__ import annotations

import functools
import math
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from ringside.engine.calls import KINDS
from ringside.engine.dtypes import DTYPES, ITEM_BYTES, OPS
from ringside.engine.mail import HEADER_BYTES, Bundle, Inbox, Mail
from ringside.engine.message_order import Order, order_messages
from ringside.engine.message_plan import MessagePlan, Receive, Send
from ringside.engine.tensors import address_of
from ringside.engine.transports.transport import Bytes, Cause, LinkError, Pending, Transport
from ringside.engine.wire import Wire

_HEADER = struct.Struct("<QIIQdIBBBB")  # seq, plan, segment, then a Call: elements, extra, tag, kind, dtype, op, flags
OWN_SCALE, WHOLE_FOLD, WIRE_BFLOAT16, WIRE_FLOAT16 = 1, 2, 4, 8
HOPS_KEPT = 1 << 16
_LARGEST_ITEM = max(ITEM_BYTES)
_SHARED_BYTES = 1 << 16  # of chunks that share a message: copying more takes longer than sending them one by one
_AHEAD = 8  # receives whose messages may be on their way before it is their turn
_ORDERED_BYTES = 1 << 16  # of a chunk: smaller ones are a matter of latency, and the rounds' order is the shortest

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


class Call(NamedTuple):
    """What a rank called, as its peers are told.

    Args:
        kind: Code of the collective.
        dtype: Code of the element type.
        op: Code of the reduction.
        elements: Elements of the tensor.
        extra: A number that must be equal, such as the root or the scale.
        tag: Hash of whatever else must be equal, such as bounds.
        flags: How it is carried out, where a vertex that was not called itself must know: `OWN_SCALE`, `WHOLE_FOLD`,
            `WIRE_BFLOAT16`, `WIRE_FLOAT16`.
    """

    kind: int
    dtype: int
    op: int
    elements: int
    extra: float = 0.0
    tag: int = 0
    flags: int = 0

    def pack(self) -> tuple[int, float, int, int, int, int, int]:
        """Return the fields in the header's order."""
        return self.elements, self.extra, self.tag, self.kind, self.dtype, self.op, self.flags

    @staticmethod
    def unpack(elements: int, extra: float, tag: int, kind: int, dtype: int, op: int, flags: int) -> Call:
        """Return what `pack` gave."""
        return Call(kind, dtype, op, elements, extra, tag, flags)

    def __str__(self) -> str:
        name = KINDS[self.kind] if self.kind < len(KINDS) else f"collective {self.kind}"
        extra = "" if self.extra in (0.0, 1.0) or math.isnan(self.extra) else f", {self.extra:g}"
        extra += f", of hash {self.tag:08x}" if self.tag else ""
        extra += ", weighted" if self.flags & OWN_SCALE else ""
        extra += ", as bfloat16" if self.flags & WIRE_BFLOAT16 else ", as float16" if self.flags & WIRE_FLOAT16 else ""
        op = f"{OPS[self.op]}, " if "reduce" in name else ""
        return f"{name}({op}{DTYPES[self.dtype]}, {self.elements} elements{extra})"


class Doing(NamedTuple):
    """What a rank is about, as the others are told when something goes wrong.

    Args:
        call: What it called.
        way: How that is carried out.
    """

    call: Call
    way: str

    def __str__(self) -> str:
        return f"{self.call} by {self.way}"


class Disagreement(Exception):
    """A peer called something else.

    Args:
        peer: The vertex.
        theirs: (seq, plan hash, segment, call) of the peer.
        ours: The same of this vertex.
    """

    def __init__(self, peer: int, theirs: tuple[int, int, int, Call], ours: tuple[int, int, int, Call]) -> None:
        super().__init__(f"vertex {peer} called {theirs}, this one {ours}")
        self.peer, self.theirs, self.ours = peer, theirs, ours


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


class Exchange:
    """One vertex's links to the others, and the interpreter that uses them.

    Args:
        transport: Carries the messages.
        segment_bytes: Largest payload of one message, bytes, at least an element; equal on all vertices.
        window: Messages per link whose places are posted ahead.
    """

    def __init__(self, transport: Transport, *, segment_bytes: int = 1 << 18, window: int = 4) -> None:
        self.transport = transport
        self.segment_bytes = max(segment_bytes, _LARGEST_ITEM)
        self.hops: deque[Hop] = deque(maxlen=HOPS_KEPT)
        self.sent_bytes: defaultdict[int, int] = defaultdict(int)
        self._window = window
        self._inboxes: dict[int, Inbox] = {}
        self._seq: defaultdict[int, int] = defaultdict(int)

    def run(
        self,
        plan: MessagePlan,
        chunks: Sequence[Chunk],
        item_bytes: int,
        fold: Fold,
        call: Call,
        *,
        last_fold: Fold | None = None,
        members: Sequence[int] | None = None,
        wire: Wire | None = None,
        ordered: bool = False,
        feed: Feed | None = None,
    ) -> None:
        """Carry out this vertex's part of a collective.

        Args:
            plan: Its part of the schedule, by the numbers of the schedule.
            chunks: The chunks' memory, uint8 arrays by number, or what `cut` makes of them.
            item_bytes: Size of an element, bytes.
            fold: The reduction.
            call: What was called; must be equal on all.
            last_fold: The reduction after which a chunk is complete here, where it is another (`plan.finished`).
            members: The transport's vertex for each vertex of the schedule (default: the same).
            wire: How elements travel, where not as they are. Where a chunk ends it is rounded like that.
            ordered: All vertices know the sizes of all chunks: large ones travel in an order that keeps links busy.
            feed: What fills the chunks and empties them meanwhile; default: they are all there.

        Raises:
            LinkError: A peer is lost, late or has left.
            Disagreement: A peer called something else.
        """
        _Run(self, plan, chunks, item_bytes, fold, last_fold or fold, call, members, wire, ordered, feed).go()

    def cut(self, memory: Bytes, item_bytes: int, wire: Wire | None) -> list[Bytes]:
        """Return memory as the segments it travels in; arguments as for `run`."""
        length = self.segment_of(item_bytes, wire)
        return [memory[start : start + length] for start in range(0, len(memory), length)]

    def segment_of(self, item_bytes: int, wire: Wire | None) -> int:
        """Return how many bytes of a tensor one message carries at most."""
        ratio = 1 if wire is None else item_bytes // wire.item_bytes
        return max(self.segment_bytes * ratio // item_bytes, 1) * item_bytes

    def inbox(self, peer: int) -> Inbox:
        """Return the places for messages from a peer, posting them the first time."""
        inbox = self._inboxes.get(peer)
        if inbox is None:
            inbox = self._inboxes[peer] = Inbox(self.transport, peer, HEADER_BYTES + self.segment_bytes, self._window)
        return inbox

    def peek(self, peer: int) -> tuple[int, Call]:
        """Wait for the next collective that a peer begins with this vertex; return its plan's hash and the call."""
        _, plan, _, *call = _HEADER.unpack_from(self.inbox(peer).peek().data)
        return plan, Call.unpack(*call)

    def next_seq(self, peer: int, *, sending: bool) -> int:
        """Return the number of this collective on a link; both ends count alike."""
        key = 2 * peer + sending
        self._seq[key] += 1
        return self._seq[key]


class _Once:
    """A message that several chunks wait for: a transport is asked once."""

    def __init__(self, pending: Pending) -> None:
        self._pending: Pending | None = pending

    def wait(self) -> None:
        """Wait for it; see `Pending`."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()


@dataclass(frozen=True)
class _Outbox:
    """What is still to be sent to one vertex in one collective, message by message: (chunk, segment, after) of each
    part, in order."""

    peer: int
    queue: deque[tuple[tuple[int, int, int], ...]]


class _Run:
    """One collective on one vertex."""

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
    ) -> None:
        self.exchange, self.plan, self.chunks, self.item = exchange, plan, chunks, item_bytes
        self.fold, self.last_fold, self.call, self.wire, self.feed = fold, last_fold, call, wire, feed
        self.members = members
        self.me = exchange.transport.rank if members is None else list(members).index(exchange.transport.rank)
        self.segment = exchange.segment_of(item_bytes, wire)
        self.leaving: defaultdict[tuple[int, int], list[Pending]] = defaultdict(list)
        self.done: list[int] = [0] * len(plan.dependents)
        self.order = self._order() if ordered else None
        self.outboxes = {dst: self._outbox(dst, sends) for dst, sends in plan.links.items()}
        self.mail: dict[int, Mail] = {}
        self.greeted: set[int] = set()
        self.bundled: dict[int, Bundle | None] = {}  # of the round under way, by sender
        self.times: dict[tuple[int, int], list[float]] = {}

    def go(self) -> None:
        for src in self.plan.sources:
            peer = self._vertex(src)  # whatever order they come in, the first messages have a place
            self.mail[peer] = Mail(self.exchange.inbox(peer), functools.partial(self._compare, peer))
        for outbox in self.outboxes.values():
            self._pump(outbox)
        if self.order is None:
            first = 0
            for k, receives in enumerate(self.plan.rounds):
                if receives:
                    self._round(k, receives, first)
                    first += len(receives)
        else:
            self._in_order(self.order)
        self._hear_the_rest()
        self._note_hops()
        for pendings in self.leaving.values():
            for pending in pendings:
                pending.wait()

    def _order(self) -> Order | None:
        """Return in which order messages go; None: in that of the rounds."""
        sizes = [len(chunk) if isinstance(chunk, np.ndarray) else sum(map(len, chunk or ())) for chunk in self.chunks]
        if self.plan.switches or max(sizes, default=0) < _ORDERED_BYTES:
            return None
        segments = [self._segments(chunk) for chunk in range(self.plan.chunks)]
        return order_messages(self.plan.schedule, self.me, segments, self.exchange._window)

    # -------------------------------------------------------------------------------------------- sending

    def _outbox(self, dst: int, sends: tuple[Send, ...]) -> _Outbox:
        """List the messages of a link: as ordered, or per round, segment by segment."""
        queue: deque[tuple[tuple[int, int, int], ...]] = deque()
        if self.order is not None:
            after = {(send.round, send.chunk): send.after for send in sends}
            parts = self.order.sends.get(dst, ())
            return _Outbox(self._vertex(dst), deque(((c, segment, after[k, c]),) for k, c, segment in parts))
        for group in self.plan.outgoing[dst]:
            if len(group) > 1 and self._share_a_message([send.chunk for send in group]):
                queue.append(tuple((send.chunk, 0, send.after) for send in group if self._segments(send.chunk)))
                continue
            for segment in range(max(self._segments(send.chunk) for send in group)):
                queue.extend(
                    ((send.chunk, segment, send.after),) for send in group if segment < self._segments(send.chunk)
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
            for _, segment, after in queue[0]:
                if after >= 0 and done[after] <= segment:
                    return
            self._send(outbox.peer, queue.popleft())

    def _send(self, peer: int, parts: tuple[tuple[int, int, int], ...]) -> None:
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

    def _post(self, peer: int, data: Bytes, parts: tuple[tuple[int, int, int], ...]) -> None:
        pending: Pending = self.exchange.transport.send(peer, data)
        if len(parts) > 1:
            pending = _Once(pending)
        self.exchange.sent_bytes[peer] += len(data)
        for chunk, segment, _ in parts or ((-1, 0, -1),):
            self.leaving[chunk, segment].append(pending)

    def _header(self, peer: int) -> Bytes:
        self.greeted.add(peer)
        message = np.zeros(HEADER_BYTES, dtype=np.uint8)
        seq = self.exchange.next_seq(peer, sending=True)
        _HEADER.pack_into(message.data, 0, seq, self.plan.hash, self.segment, *self.call.pack())
        return message

    # -------------------------------------------------------------------------------------------- receiving

    def _in_order(self, order: Order) -> None:
        """Take messages in order, and have them come in that order: what there is no place for yet is not sent."""
        receives = [receive for receives in self.plan.rounds for receive in receives]
        indices = [self.plan.receives[k, chunk] for (k, chunk, _), _ in order.takes]
        for mail in self.mail.values():
            mail.paced = True
        for at, ((k, _, segment), places) in enumerate(order.takes):
            for ahead in range(at, min(at + _AHEAD, len(indices))):
                for src, number in zip(receives[indices[ahead]].sources, order.takes[ahead].places, strict=True):
                    self.mail[self._vertex(src)].expect(number)
            self._receive(k, indices[at], receives[indices[at]], segment, places)
        for mail in self.mail.values():
            mail.paced = False
            mail.inbox.post(self.exchange._window)

    def _round(self, k: int, receives: tuple[Receive, ...], first: int) -> None:
        counts = [self._segments(receive.chunk) for receive in receives]
        several = self.plan.incoming[k]
        self.bundled = {src: None for src, chunks in several.items() if self._share_a_message(chunks)}
        for segment in range(max(counts)):
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
        seq = self.exchange._seq
        for (k, src), (waited, arrived, last, size) in sorted(self.times.items()):
            self.exchange.hops.append(Hop(seq[2 * src], k, src, int(size), waited, arrived, last))

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
        seq, plan, segment, *call = _HEADER.unpack_from(place.data)
        theirs = (seq, plan, segment, Call.unpack(*call))
        ours = (self.exchange.next_seq(peer, sending=False), self.plan.hash, self.segment, self.call)
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


__all__ = ["HEADER_BYTES", "Call", "Cause", "Disagreement", "Doing", "Exchange", "Fold", "Hop", "LinkError"]
