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

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import numpy as np

from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.exchange.compression import WireCompression
from ringside.engine.net.exchange.message_size import MessageSize, size_of
from ringside.engine.net.exchange.plan import MessagePlan
from ringside.engine.net.exchange.receive_buffers import HEADER_BYTES, ReceiveBuffers, ReceiveQueue
from ringside.engine.net.exchange.route import Length, route_of
from ringside.engine.net.exchange.run import Chunk, ExchangeRun, Fold, LinkBuffers, LocalSource
from ringside.engine.net.exchange.signature import CollectiveSignature, MessageHeader
from ringside.engine.transports.base import Bytes, Links, Transport
from ringside.schedule import Schedule

HOPS_KEPT = 1 << 16
_LARGEST_ITEM = max(ITEM_BYTES)


class Exchange:
    """One vertex's links to the others, and the interpreter that uses them.

    Args:
        transport: Carries the messages.
        segment_bytes: Payload of a message, bytes, at least an element; equal on all vertices. What is cut evenly has
            up to half as much more (`MessageSize.messages_of`).
        window: Messages per link whose places are posted ahead.
        links: Of the transport; None: its own.

    Attributes:
        bytes_per_s: What a link carries, as all vertices have agreed between two collectives; None: not known.
    """

    def __init__(
        self, transport: Transport, *, segment_bytes: int = 1 << 18, window: int = 4, links: Links | None = None
    ) -> None:
        self.transport = transport
        self.links: Links = transport if links is None else links
        self.segment_bytes = max(segment_bytes, _LARGEST_ITEM)
        self.hops: deque[LinkBuffers] = deque(maxlen=HOPS_KEPT)
        self.sent_bytes: defaultdict[int, int] = defaultdict(int)
        self.window = window
        self.bytes_per_s: float | None = None
        self._large = MessageSize(self.segment_bytes, window)
        self._inboxes: dict[int, ReceiveBuffers] = {}
        self._seq: defaultdict[int, int] = defaultdict(int)

    def run(
        self,
        plan: MessagePlan,
        chunks: Sequence[Chunk],
        item_bytes: int,
        fold: Fold,
        call: CollectiveSignature,
        *,
        last_fold: Fold | None = None,
        members: Sequence[int] | None = None,
        wire: WireCompression | None = None,
        ordered: bool = False,
        feed: LocalSource | None = None,
        size: MessageSize | None = None,
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
            size: Of the messages, as `size_of` says, where an order is worked out; default: as large as may be.

        Raises:
            LinkError: A peer is lost, late or has left.
            Disagreement: A peer called something else.
        """
        size = size or self._large
        ExchangeRun(
            self, plan, chunks, item_bytes, fold, last_fold or fold, call, members, wire, ordered, feed, size
        ).go()

    def beside(self) -> Exchange:
        """Return another one whose collectives may be under way at the same time, on another thread.

        All vertices call this alike. Hops of both are noted together; each counts what it has sent.
        """
        links = self.transport.open_channel()
        other = Exchange(self.transport, segment_bytes=self.segment_bytes, window=self.window, links=links)
        other.hops = self.hops
        return other

    def size_of(
        self, schedule: Schedule, size_bytes: int, item_bytes: int, wire: WireCompression | None
    ) -> MessageSize:
        """Return how large the messages are that a tensor travels in; all vertices must find the same.

        Args:
            schedule: What carries it.
            size_bytes: Of the tensor in memory.
            item_bytes: Of one element there.
            wire: How elements travel, where not as they are.
        """
        return size_of(schedule, size_bytes // _ratio(item_bytes, wire), self._large, self.bytes_per_s)

    def rehearse(
        self,
        plan: MessagePlan,
        me: int,
        chunks: Sequence[Sequence[int]],
        item_bytes: int,
        wire: WireCompression | None,
        size: MessageSize,
        *,
        evenly: bool = False,
    ) -> None:
        """Work out the messages that `run` needs the first time, and their order.

        Args:
            plan: As for `run`.
            me: This vertex's number there.
            chunks: How long the parts are that are cut into segments, bytes, by chunk.
            item_bytes, wire, size: As for `run`.
            evenly: They are cut by `cut`, not by `run`.
        """
        lengths: list[Length] = [sum(parts) for parts in chunks]
        if evenly:
            cuts = [[self.cut(np.empty(part, np.uint8), item_bytes, wire, size) for part in parts] for parts in chunks]
            lengths = [tuple(len(segment) for cut in parts for segment in cut) for parts in cuts]
        route_of(plan, me, tuple(lengths), self.segment_of(item_bytes, wire, size), size.window, True)

    def cut(self, memory: Bytes, item_bytes: int, wire: WireCompression | None, size: MessageSize) -> list[Bytes]:
        """Return memory as the segments it travels in, as equal as may be; arguments as for `run`."""
        count = size.messages_of(len(memory), self.segment_of(item_bytes, wire, size))
        edges = [len(memory) // item_bytes * at // count * item_bytes for at in range(count + 1)] if count else []
        return [memory[begin:end] for begin, end in itertools.pairwise(edges)]

    def segment_of(self, item_bytes: int, wire: WireCompression | None, size: MessageSize | None = None) -> int:
        """Return how many bytes of a tensor one message carries: at most, unless it is cut evenly."""
        segment_bytes = (size or self._large).segment_bytes
        return max(segment_bytes * _ratio(item_bytes, wire) // item_bytes, 1) * item_bytes

    def mail(
        self, peer: int, compare: Callable[[Bytes], None], size: MessageSize, messages: int, *, paced: bool
    ) -> ReceiveQueue:
        """Return what comes from a peer in one collective.

        Args:
            peer: The vertex.
            compare: Looks at the header.
            size: Of the messages.
            messages: How many of them come; 0: a header alone.
            paced: There is no place for a message until it is expected.
        """
        inbox = self.inbox(peer)
        if size == self._large or not messages:
            return ReceiveQueue(inbox, compare, paced=paced)
        places = size.places(ordered=paced)
        inbox.have_small(HEADER_BYTES + self._large.small_place_bytes, places - self.window)
        return ReceiveQueue(inbox, compare, paced=paced, small=messages, window=places)

    def inbox(self, peer: int) -> ReceiveBuffers:
        """Return the places for messages from a peer, posting them the first time."""
        inbox = self._inboxes.get(peer)
        if inbox is None:
            inbox = self._inboxes[peer] = ReceiveBuffers(
                self.links, peer, HEADER_BYTES + self._large.place_bytes, self.window
            )
        return inbox

    def peek(self, peer: int) -> tuple[int, CollectiveSignature]:
        """Wait for the next collective that a peer begins with this vertex; return its plan's hash and the call."""
        header = MessageHeader.read(self.inbox(peer).peek())
        return header.plan, header.call

    def next_seq(self, peer: int, *, sending: bool) -> int:
        """Return the number of this collective on a link; both ends count alike."""
        key = 2 * peer + sending
        self._seq[key] += 1
        return self._seq[key]

    def seq_from(self, peer: int) -> int:
        """Return the number of the latest collective in which a peer sent to this vertex."""
        return self._seq[2 * peer]


def _ratio(item_bytes: int, wire: WireCompression | None) -> int:
    """Return how many times fewer bytes travel than lie in memory."""
    return 1 if wire is None else item_bytes // wire.item_bytes
