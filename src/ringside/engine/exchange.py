"""Runs one vertex's part of any schedule over a transport: the interpreter between hosts.

Chunks travel in segments. A message is received into one of a few places per link that were posted before it was sent,
so that it arrives without asking first, and is folded or copied from there; whatever the schedule sends of that segment
next is under way before the following segment is waited for. Two rules keep it correct without a barrier:

-   a segment is sent after the last receive before it that writes its chunk (`MessagePlan` knows which), and
-   it is written only when every message that carries its old content has left.

The first message of a link in each collective begins with a header that says what its sender called; ranks that called
different things find out there. A link of the schedule that has nothing to carry carries the header alone.
"""

from __future__ import annotations

import itertools
import math
import struct
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ringside.engine.calls import KINDS
from ringside.engine.dtypes import DTYPES, ITEM_BYTES, OPS
from ringside.engine.message_plan import MessagePlan, Receive, Send
from ringside.engine.tensors import address_of
from ringside.engine.transports.transport import Bytes, Cause, LinkError, Pending, Transport
from ringside.engine.wire import Wire

_HEADER = struct.Struct("<QIIQdIBBBB")  # seq, plan, segment, then a Call: elements, extra, tag, kind, dtype, op, flags
HEADER_BYTES = 64
OWN_SCALE, WHOLE_FOLD, WIRE_BFLOAT16, WIRE_FLOAT16 = 1, 2, 4, 8
HOPS_KEPT = 1 << 16
_LARGEST_ITEM = max(ITEM_BYTES)

Fold = Callable[[Sequence[int], int, int], None]
"""Reduces arrays: (addresses of the sources in order, address of the result, elements)."""


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
        self._inboxes: dict[int, _Inbox] = {}
        self._seq: defaultdict[int, int] = defaultdict(int)

    def run(
        self,
        plan: MessagePlan,
        chunks: Sequence[Bytes | None],
        item_bytes: int,
        fold: Fold,
        call: Call,
        *,
        members: Sequence[int] | None = None,
        wire: Wire | None = None,
    ) -> None:
        """Carry out this vertex's part of a collective.

        Args:
            plan: Its part of the schedule, by the numbers of the schedule.
            chunks: The chunks' memory, uint8 arrays by number; None: never touched by this vertex.
            item_bytes: Size of an element, bytes.
            fold: The reduction.
            call: What was called; must be equal on all.
            members: The transport's vertex for each vertex of the schedule (default: the same).
            wire: How elements travel, where not as they are.

        Raises:
            LinkError: A peer is lost, late or has left.
            Disagreement: A peer called something else.
        """
        _Run(self, plan, chunks, item_bytes, fold, call, members, wire).go()

    def inbox(self, peer: int) -> _Inbox:
        """Return the places for messages from a peer, posting them the first time."""
        inbox = self._inboxes.get(peer)
        if inbox is None:
            inbox = self._inboxes[peer] = _Inbox(self.transport, peer, HEADER_BYTES + self.segment_bytes, self._window)
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


class _Inbox:
    """The places for the next messages of one sender, posted ahead and used in turn."""

    def __init__(self, transport: Transport, peer: int, size_bytes: int, window: int) -> None:
        self._transport, self._peer = transport, peer
        self._places = [np.empty(size_bytes, dtype=np.uint8) for _ in range(window)]
        self._under_way = deque((place, transport.receive(peer, place)) for place in self._places)
        self._seen: Bytes | None = None

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

    def free(self, place: Bytes) -> None:
        """Use a place again."""
        self._under_way.append((place, self._transport.receive(self._peer, place)))


@dataclass(frozen=True)
class _Outbox:
    """What is still to be sent to one vertex in one collective: (chunk, segment, after), in order."""

    peer: int
    queue: deque[tuple[int, int, int]]


class _Run:
    """One collective on one vertex."""

    def __init__(
        self,
        exchange: Exchange,
        plan: MessagePlan,
        chunks: Sequence[Bytes | None],
        item_bytes: int,
        fold: Fold,
        call: Call,
        members: Sequence[int] | None,
        wire: Wire | None,
    ) -> None:
        self.exchange, self.plan, self.chunks, self.item = exchange, plan, chunks, item_bytes
        self.fold, self.call, self.wire = fold, call, wire
        self.members = members
        self.me = exchange.transport.rank if members is None else list(members).index(exchange.transport.rank)
        ratio = 1 if wire is None else item_bytes // wire.item_bytes
        self.segment = max(exchange.segment_bytes * ratio // item_bytes, 1) * item_bytes
        self.leaving: defaultdict[tuple[int, int], list[Pending]] = defaultdict(list)
        self.done: list[int] = [0] * len(plan.dependents)
        self.outboxes = {dst: self._outbox(dst, sends) for dst, sends in plan.links.items()}
        self.greeted: set[int] = set()
        self.heard: set[int] = set()

    def go(self) -> None:
        for src in self.plan.sources:
            self.exchange.inbox(self._vertex(src))  # whatever order they come in, the first messages have a place
        for outbox in self.outboxes.values():
            self._pump(outbox)
        first = 0
        for k, receives in enumerate(self.plan.rounds):
            if receives:
                self._round(k, receives, first)
                first += len(receives)
        self._hear_the_rest()
        for pendings in self.leaving.values():
            for pending in pendings:
                pending.wait()

    # -------------------------------------------------------------------------------------------- sending

    def _outbox(self, dst: int, sends: tuple[Send, ...]) -> _Outbox:
        """List the messages of a link: per round, segment by segment."""
        queue: deque[tuple[int, int, int]] = deque()
        for _, grouped in itertools.groupby(sends, key=lambda send: send.round):
            group = list(grouped)
            for segment in range(max(self._segments(send.chunk) for send in group)):
                queue.extend(
                    (send.chunk, segment, send.after) for send in group if segment < self._segments(send.chunk)
                )
        return _Outbox(self._vertex(dst), queue)

    def _pump(self, outbox: _Outbox) -> None:
        """Send what may be sent."""
        queue, done = outbox.queue, self.done
        if not queue and outbox.peer not in self.greeted:
            self._post(outbox.peer, self._header(outbox.peer), (-1, 0))
        while queue:
            chunk, segment, after = queue[0]
            if after >= 0 and done[after] <= segment:
                return
            queue.popleft()
            self._send(outbox.peer, chunk, segment)

    def _send(self, peer: int, chunk: int, segment: int) -> None:
        data = self._part(chunk, segment)
        if self.wire is not None:
            data = self.wire.narrow(data)
        if peer not in self.greeted:
            data = np.concatenate([self._header(peer), data])
        self._post(peer, data, (chunk, segment))

    def _post(self, peer: int, data: Bytes, part: tuple[int, int]) -> None:
        pending = self.exchange.transport.send(peer, data)
        self.exchange.sent_bytes[peer] += len(data)
        self.leaving[part].append(pending)

    def _header(self, peer: int) -> Bytes:
        self.greeted.add(peer)
        message = np.zeros(HEADER_BYTES, dtype=np.uint8)
        seq = self.exchange.next_seq(peer, sending=True)
        _HEADER.pack_into(message.data, 0, seq, self.plan.hash, self.segment, *self.call.pack())
        return message

    # -------------------------------------------------------------------------------------------- receiving

    def _round(self, k: int, receives: tuple[Receive, ...], first: int) -> None:
        counts = [self._segments(receive.chunk) for receive in receives]
        times: dict[int, list[float]] = {}
        for segment in range(max(counts)):
            for index, receive in enumerate(receives):
                if segment < counts[index]:
                    self._receive(receive, segment, times)
                    self.done[first + index] += 1
                    for dst in self.plan.dependents[first + index]:
                        self._pump(self.outboxes[dst])
        seq = self.exchange._seq
        for src, (waited, arrived, last, size) in times.items():
            self.exchange.hops.append(Hop(seq[2 * src], k, src, int(size), waited, arrived, last))

    def _receive(self, receive: Receive, segment: int, times: dict[int, list[float]]) -> None:
        own = self._part(receive.chunk, segment)
        arrived: list[tuple[int, _Inbox, Bytes, Bytes]] = []
        for src in receive.sources:
            peer = self._vertex(src)
            inbox = self.exchange.inbox(peer)
            waited = time.perf_counter()
            place = inbox.take()
            now = time.perf_counter()
            hop = times.setdefault(peer, [waited, now, now, 0.0])
            hop[2] = now
            hop[3] += len(own)
            arrived.append((src, inbox, place, self._payload(peer, place, len(own))))
        for pending in self.leaving.pop((receive.chunk, segment), ()):
            pending.wait()
        self._store(receive, own, arrived)
        for _, inbox, place, _ in arrived:
            inbox.free(place)

    def _store(self, receive: Receive, own: Bytes, arrived: list[tuple[int, _Inbox, Bytes, Bytes]]) -> None:
        if receive.overwrite:
            own[:] = arrived[0][3]
            return
        sources = [(src, payload) for src, _, _, payload in arrived]
        if self.me < self.plan.ranks:  # a switch has nothing of its own to add
            sources.append((self.me, own))
            sources.sort(key=lambda pair: pair[0])
        addresses = [address_of(payload) for _, payload in sources]
        self.fold(addresses, address_of(own), len(own) // self.item)

    def _payload(self, peer: int, place: Bytes, length: int) -> Bytes:
        start = 0
        if peer not in self.heard:
            self._compare(peer, place)
            start = HEADER_BYTES
        if self.wire is None:
            return place[start : start + length]
        return self.wire.widen(place[start : start + length * self.wire.item_bytes // self.item])

    def _hear_the_rest(self) -> None:
        """Take the headers of links that had nothing to carry."""
        for peer in map(self._vertex, self.plan.sources):
            if peer not in self.heard:
                inbox = self.exchange.inbox(peer)
                place = inbox.take()
                self._compare(peer, place)
                inbox.free(place)

    def _compare(self, peer: int, place: Bytes) -> None:
        self.heard.add(peer)
        seq, plan, segment, *call = _HEADER.unpack_from(place.data)
        theirs = (seq, plan, segment, Call.unpack(*call))
        ours = (self.exchange.next_seq(peer, sending=False), self.plan.hash, self.segment, self.call)
        if theirs != ours:
            raise Disagreement(peer, theirs, ours)

    # -------------------------------------------------------------------------------------------- places

    def _vertex(self, number: int) -> int:
        return number if self.members is None else self.members[number]

    def _chunk(self, chunk: int) -> Bytes:
        memory = self.chunks[chunk]
        assert memory is not None, "the schedule uses a chunk for which there is no memory"
        return memory

    def _segments(self, chunk: int) -> int:
        return -(-len(self._chunk(chunk)) // self.segment)

    def _part(self, chunk: int, segment: int) -> Bytes:
        memory = self._chunk(chunk)
        return memory if len(memory) <= self.segment else memory[segment * self.segment : (segment + 1) * self.segment]


__all__ = ["HEADER_BYTES", "Call", "Cause", "Disagreement", "Doing", "Exchange", "Fold", "Hop", "LinkError"]
