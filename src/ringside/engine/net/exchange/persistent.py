"""A small collective on one vertex, worked out beforehand: what is left to be done is to send, to wait and to add up.

Small all-reduces cost processor time, not bytes: of a schedule of one chunk that fits a message everything but the
payload and the numbers of the collectives is the same each time. So headers are written, messages have their memory,
and the order of sends and receives is a list. Messages are those of `ringside.engine.net.exchange.run`, byte for byte;
one vertex may go this way while its peer goes that one.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ringside.engine.buffers import address_of
from ringside.engine.net.exchange.plan import MessagePlan, Receive
from ringside.engine.net.exchange.receive_buffers import HEADER_BYTES, ReceiveBuffers
from ringside.engine.net.exchange.run import Fold, HopTiming
from ringside.engine.net.exchange.signature import CollectiveSignature, MessageHeader, SignatureMismatch
from ringside.engine.transports.base import Bytes, Pending, Transport

if TYPE_CHECKING:
    from ringside.engine.net.exchange.exchange import Exchange

_SEQ_BYTES = 8  # of a header: the number of the collective on its link, which comes first


class PersistentExchange:
    """One vertex's part of a schedule, for one chunk in one place.

    Args:
        exchange: The links.
        plan: Its part of the schedule: one chunk, no switch.
        chunk: The chunk's memory, uint8 [n], 1 to a message's payload.
        item_bytes: Size of an element, bytes.
        fold: The reduction.
        last_fold: The reduction after which the chunk is complete here.
        call: What is called.
        members: The transport's vertex for each vertex of the schedule; None: the same.
    """

    def __init__(
        self,
        exchange: Exchange,
        plan: MessagePlan,
        chunk: Bytes,
        item_bytes: int,
        fold: Fold,
        last_fold: Fold,
        call: CollectiveSignature,
        members: Sequence[int] | None,
    ) -> None:
        self._exchange, self._chunk, self._at = exchange, chunk, address_of(chunk)
        self._elements = len(chunk) // item_bytes
        self._head = np.zeros(HEADER_BYTES, dtype=np.uint8)
        MessageHeader(0, plan.hash, exchange.segment_of(item_bytes, None), call).write(self._head)
        self._vertices = list(range(exchange.transport.size)) if members is None else list(members)
        self._me = self._vertices.index(exchange.transport.rank)
        self._used: list[tuple[ReceiveBuffers, Bytes]] = []
        self._greeting: set[int] = set()
        self._first = self._letters(plan, -1)
        self._takes = [
            _ReceiveStep(k, receive, self._me, self._sources(receive), last_fold if index in plan.finals else fold)
            for index, (k, receive) in enumerate((k, one) for k, some in enumerate(plan.rounds) for one in some)
        ]
        self._then = [self._letters(plan, index) for index in range(len(self._takes))]
        self._ready = False

    @staticmethod
    def fits(exchange: Exchange, plan: MessagePlan, size_bytes: int) -> bool:
        """Tell whether a collective can be carried out this way."""
        return plan.chunks == 1 and not plan.switches and 0 < size_bytes <= exchange.segment_bytes

    def run(self) -> None:
        """Carry it out on what the chunk holds now, and leave the result there; raises as `Exchange.run` does."""
        self.begin()
        self.finish()

    def begin(self) -> None:
        """Send what needs nothing of the others: the first part of `run`, which waits for nobody."""
        if not self._ready:
            self._find_places()
        for letter in self._first:
            self._send(letter)

    def finish(self) -> None:
        """Take what comes, and send what depends on it: the second part of `run`."""
        for take, letters in zip(self._takes, self._then, strict=True):
            self._take(take)
            for letter in letters:
                self._send(letter)

    def rest(self) -> None:
        """Give back the places of the messages, which nobody waits for: the end of `run`, when there is time."""
        for inbox, place in self._used:
            inbox.free(place)
        self._used.clear()

    def end(self) -> None:
        """Wait until all that was sent has left: this is not used any more."""
        for letter in (*self._first, *(letter for letters in self._then for letter in letters)):
            if letter.pending is not None:
                letter.pending.wait()

    # -------------------------------------------------------------------------------------------- worked out

    def _letters(self, plan: MessagePlan, after: int) -> list[_OutMessage]:
        """Return what may be sent after a receive; the first message of a link begins with the header."""
        found = []
        transport, size_bytes = self._exchange.transport, len(self._chunk)
        for dst, sends in plan.links.items():
            for _ in (send for send in sends if send.after == after):
                begins = 0 if dst in self._greeting else HEADER_BYTES
                self._greeting.add(dst)
                found.append(_OutMessage(transport, self._vertices[dst], self._head[:begins], size_bytes))
        return found

    def _sources(self, receive: Receive) -> list[_Sender]:
        found = []
        for src in receive.sources:
            begins = 0 if ~src in self._greeting else HEADER_BYTES
            self._greeting.add(~src)
            found.append(_Sender(src, self._vertices[src], begins))
        return found

    # -------------------------------------------------------------------------------------------- each time

    def _send(self, letter: _OutMessage) -> None:
        if letter.pending is not None:
            letter.pending.wait()  # of the last time: it has long left
        if letter.begins:
            letter.number(self._exchange.next_seq(letter.peer, sending=True))
        ctypes.memmove(letter.at, self._at, len(self._chunk))
        letter.pending = self._exchange.transport.send(letter.peer, letter.kept)
        self._exchange.sent_bytes[letter.peer] += len(letter.message)

    def _find_places(self) -> None:
        """Whatever order they come in, the first messages have a place."""
        for take in self._takes:
            for source in take.sources:
                source.inbox = self._exchange.inbox(source.peer)
        self._ready = True

    def _take(self, take: _ReceiveStep) -> None:
        addresses = []
        for source in take.sources:
            inbox = source.inbox
            waited = time.perf_counter()
            place = inbox.take()
            now = time.perf_counter()
            if source.begins:
                self._compare(source.peer, place)
            self._used.append((inbox, place))
            addresses.append(inbox.address_of(place) + source.begins)
            seq = self._exchange.seq_from(source.peer)
            self._exchange.hops.append(HopTiming(seq, take.round, source.vertex, len(self._chunk), waited, now, now))
        if take.overwrite:
            ctypes.memmove(self._at, addresses[0], len(self._chunk))
            return
        addresses.insert(take.own, self._at)
        take.fold(addresses, self._at, self._elements)

    def _compare(self, peer: int, place: Bytes) -> None:
        """Raise where a peer called something else; both ends of a link count its collectives alike."""
        self._head[:_SEQ_BYTES].view(np.uint64)[0] = self._exchange.next_seq(peer, sending=False)
        if place[:HEADER_BYTES].tobytes() != self._head.tobytes():
            raise SignatureMismatch(peer, MessageHeader.read(place), MessageHeader.read(self._head))


class _OutMessage:
    """A message that is sent once in every collective, and what became of it the last time."""

    def __init__(self, transport: Transport, peer: int, head: Bytes, size_bytes: int) -> None:
        self.peer, self.begins = peer, len(head)
        self.message = np.concatenate([head, np.zeros(size_bytes, dtype=np.uint8)])
        self.kept = transport.keep(self.message)
        self.at = address_of(self.message) + self.begins
        self.pending: Pending | None = None

    def number(self, seq: int) -> None:
        """Write the number of the collective."""
        self.message[:_SEQ_BYTES].view(np.uint64)[0] = seq


class _Sender:
    """One sender of a receive: its number in the schedule, in the transport, and where its payload begins."""

    inbox: ReceiveBuffers

    def __init__(self, vertex: int, peer: int, begins: int) -> None:
        self.vertex, self.peer, self.begins = vertex, peer, begins


class _ReceiveStep:
    """One receive: from whom, what to do with it, and where this vertex's own contribution comes among theirs."""

    def __init__(self, k: int, receive: Receive, me: int, sources: list[_Sender], fold: Fold) -> None:
        self.round, self.sources, self.fold, self.overwrite = k, sources, fold, receive.overwrite
        self.own = sum(src < me for src in receive.sources)


__all__ = ["PersistentExchange"]
