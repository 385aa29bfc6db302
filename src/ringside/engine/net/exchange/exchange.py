"""One vertex's links to the others, and what stays between collectives: receive buffers, counters, sizes of messages.

`Channels` are several of them, whose collectives may be under way at the same time.

`ringside.engine.net.exchange.run` interprets a schedule over them; `ringside.engine.net.exchange.persistent` does the
same for a small chunk that stays where it is.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.exchange.message_size import MessageSize, size_of
from ringside.engine.net.exchange.plan import MessagePlan
from ringside.engine.net.exchange.receive_buffers import HEADER_BYTES, ReceiveBuffers, ReceiveQueue
from ringside.engine.net.exchange.signature import CollectiveSignature, MessageHeader
from ringside.engine.net.exchange.wire import Wire
from ringside.engine.runtime.worker import Work, Worker
from ringside.engine.transports.base import Bytes, Links, Transport
from ringside.engine.transports.striping import StripedLinks
from ringside.schedule import Schedule

HOPS_KEPT = 1 << 16
USUAL_WINDOW = 4
"""Messages per link whose buffers are posted ahead, where links are not long."""
_LARGEST_ITEM = max(ITEM_BYTES)
_RECENT = 4  # jobs that may still be under way: two channels, and the one before on each

Fold = Callable[[Sequence[int], int, int], None]
"""Reduces arrays: (addresses of the sources in order, address of the result, elements)."""


class ExchangeRequest(NamedTuple):
    """What one vertex is to do in a collective, whatever memory that is about.

    Args:
        plan: Its part of the schedule, by the numbers of the schedule.
        item_bytes: Size of an element, bytes.
        fold: The reduction.
        call: What was called; must be equal on all.
        last_fold: The reduction after which a chunk is complete here (`plan.finished`); None: `fold`.
        members: The transport's vertex for each vertex of the schedule; None: the same.
        wire: How elements travel, where not as they are. Where a chunk ends it is rounded like that.
    """

    plan: MessagePlan
    item_bytes: int
    fold: Fold
    call: CollectiveSignature
    last_fold: Fold | None = None
    members: Sequence[int] | None = None
    wire: Wire | None = None


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


class Exchange:
    """One vertex's links to the others.

    Args:
        transport: Delivers the messages.
        segment_bytes: Payload of a message, bytes, at least an element; equal on all vertices. What is cut evenly has
            up to half as much more (`MessageSize.messages_of`).
        window: Messages per link whose buffers are posted ahead.
        links: Of the transport; None: its own.

    Attributes:
        hops: When what came from whom, the latest `HOPS_KEPT`.
        sent_bytes: By peer, headers included.
        bytes_per_s: What a link carries, as all vertices have agreed between two collectives; None: not known.
        window: As given, until `widen` is called.
        connections: Over how many the messages of a link take turns.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        segment_bytes: int = 1 << 18,
        window: int = USUAL_WINDOW,
        links: Links | None = None,
    ) -> None:
        self.transport = transport
        self.links: Links = transport if links is None else links
        self.segment_bytes = max(segment_bytes, _LARGEST_ITEM)
        self.hops: deque[HopTiming] = deque(maxlen=HOPS_KEPT)
        self.sent_bytes: defaultdict[int, int] = defaultdict(int)
        self.window, self.connections = window, 1
        self.bytes_per_s: float | None = None
        self.largest = MessageSize(self.segment_bytes, window)
        self._receive_buffers: dict[int, ReceiveBuffers] = {}
        # Collectives so far on each link, by 2 * peer + (1 where this vertex sends). Every link has its own count, as
        # a schedule need not use all links; both ends of one count alike, so a header finds out who has missed one.
        self._seq: defaultdict[int, int] = defaultdict(int)

    def open_channel(self) -> Exchange:
        """Return another one whose collectives may be under way at the same time, on another thread.

        All vertices call this alike. Hops of both are noted together; each counts what it has sent.
        """
        links = self._open_links() if self.connections > 1 else self.transport.open_channel()
        other = Exchange(self.transport, segment_bytes=self.segment_bytes, window=self.window, links=links)
        other.hops, other.connections, other.largest = self.hops, self.connections, self.largest
        return other

    def widen(self, places: int, connections: int) -> None:
        """Have more messages on their way from now on; all vertices call this alike, between two collectives.

        Args:
            places: Messages per link whose buffers are posted ahead; no fewer than now.
            connections: Over how many they take turns; no fewer than now.
        """
        if connections > self.connections:
            # Between two collectives a peer has posted just the buffers of `window` messages, if it ever posted any:
            # this vertex has sent to it then. They come as before; every later message finds its buffer by its number.
            posted = {key // 2: self.window for key in self._seq if key % 2}
            self.connections = connections
            self.links = self._open_links(self.links, posted)
        for buffers in self._receive_buffers.values():
            buffers.widen(self.links, places)
        self.window, self.largest = places, MessageSize(self.segment_bytes, places, ahead=2 * places)

    def _open_links(self, before: Links | None = None, posted: Mapping[int, int] | None = None) -> StripedLinks:
        connections = [self.transport.open_channel(connection) for connection in range(self.connections)]
        return StripedLinks(connections, before, posted)

    # -------------------------------------------------------------------------------------------- sizes of messages

    def size_of(self, schedule: Schedule, size_bytes: int, item_bytes: int, wire: Wire | None) -> MessageSize:
        """Return how large the messages are that a tensor travels in; all vertices must find the same.

        Args:
            schedule: What moves it.
            size_bytes: Of the tensor in memory.
            item_bytes: Of one element there.
            wire: How elements travel, where not as they are.
        """
        on_wire = size_bytes if wire is None else wire.wire_bytes(size_bytes // item_bytes)
        return size_of(schedule, on_wire, self.largest, self.bytes_per_s)

    def segment_of(self, item_bytes: int, wire: Wire | None, size: MessageSize | None = None) -> int:
        """Return how many bytes of a tensor one message carries: at most, unless it is cut evenly."""
        segment_bytes = (size or self.largest).segment_bytes
        elements = segment_bytes // item_bytes if wire is None else wire.elements_in(segment_bytes)
        return max(elements, 1) * item_bytes

    def cut(self, memory: Bytes, item_bytes: int, wire: Wire | None, size: MessageSize) -> list[Bytes]:
        """Return memory as the segments it travels in, as equal as may be; arguments as for `ExchangeRun`."""
        count = size.messages_of(len(memory), self.segment_of(item_bytes, wire, size))
        if not count:
            return []
        elements = len(memory) // item_bytes
        edges = [elements * index // count * item_bytes for index in range(count + 1)]
        return [memory[begin:end] for begin, end in itertools.pairwise(edges)]

    # -------------------------------------------------------------------------------------------- receiving

    def receive_queue(
        self, peer: int, compare: Callable[[Bytes], None], size: MessageSize, messages: int, *, paced: bool
    ) -> ReceiveQueue:
        """Return what comes from a peer in one collective.

        Args:
            peer: The vertex.
            compare: Looks at the header.
            size: Of the messages.
            messages: How many of them come; 0: a header alone.
            paced: There is no buffer for a message until it is expected.
        """
        buffers = self.receive_buffers(peer)
        if size == self.largest or not messages:
            return ReceiveQueue(buffers, compare, paced=paced)
        count = size.places(ordered=paced)
        # The first of them come into large buffers, which are posted between collectives, so fewer small ones will do.
        buffers.ensure_small(HEADER_BYTES + self.largest.small_place_bytes, count - self.window)
        return ReceiveQueue(buffers, compare, paced=paced, small=messages, window=count)

    def receive_buffers(self, peer: int) -> ReceiveBuffers:
        """Return the buffers for messages from a peer, posting them the first time."""
        buffers = self._receive_buffers.get(peer)
        if buffers is None:
            buffers = self._receive_buffers[peer] = ReceiveBuffers(
                self.links, peer, HEADER_BYTES + self.largest.place_bytes, self.window
            )
        return buffers

    def peek(self, peer: int) -> tuple[int, CollectiveSignature]:
        """Wait for the next collective that a peer begins with this vertex; return its plan's hash and the call."""
        header = MessageHeader.read(self.receive_buffers(peer).peek())
        return header.plan, header.call

    # -------------------------------------------------------------------------------------------- sequence numbers

    def next_seq(self, peer: int, *, sending: bool) -> int:
        """Return the number of this collective on a link; both ends count alike."""
        key = 2 * peer + sending
        self._seq[key] += 1
        return self._seq[key]

    def seq_from(self, peer: int) -> int:
        """Return the number of the latest collective in which a peer sent to this vertex."""
        return self._seq[2 * peer]


class Channels:
    """Exchanges with a thread each, made when they are needed (NCCL's word; here a channel is a whole collective's).

    Which channel runs what must follow from the order of the calls alone, so that all ranks use the same.

    Args:
        exchange: The first channel's.
        name: Of the threads.
    """

    def __init__(self, exchange: Exchange, name: str) -> None:
        self._exchanges = [exchange]
        self._workers: list[Worker] = []
        self._name = name
        self._recent: deque[Work] = deque(maxlen=_RECENT)

    def exchange(self, channel: int) -> Exchange:
        """Return a channel's exchange."""
        while len(self._exchanges) <= channel:
            self._exchanges.append(self._exchanges[0].open_channel())
        return self._exchanges[channel]

    def widen(self, places: int, connections: int) -> None:
        """Have more messages on their way on every channel; see `Exchange.widen`."""
        for exchange in self._exchanges:
            exchange.widen(places, connections)

    def submit(self, job: Callable[[], None], channel: int = 0) -> Work:
        """Run a job on a channel's thread, after those before it."""
        while len(self._workers) <= channel:
            self._workers.append(Worker(self._name))
        work = self._workers[channel].submit(job)
        self._recent.append(work)
        return work

    def drain(self, timeout_s: float) -> None:
        """Wait for the jobs under way, which work in the caller's memory, each that long; drop their errors."""
        for work in self._recent:
            with contextlib.suppress(BaseException):
                work.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the threads; wait for each that long."""
        for worker in self._workers:
            worker.stop(timeout_s)
