"""A small collective on one vertex, worked out beforehand: what is left to be done is to send, to wait and to add up.

Small all-reduces cost processor time, not bytes: of a schedule of one chunk that fits a message everything but the
payload and the numbers of the collectives is the same each time. So headers are written, messages have their memory,
and the order of sends and receives is a list. Messages are those of `ringside.engine.net.exchange.run`, byte for byte;
one vertex may go this way while its peer goes that one.
"""

from __future__ import annotations

import ctypes
import time
from typing import NamedTuple

import numpy as np

from ringside.engine.buffers import address_of
from ringside.engine.net.exchange.exchange import Exchange, ExchangeRequest, Fold, HopTiming
from ringside.engine.net.exchange.plan import MessagePlan
from ringside.engine.net.exchange.receive_buffers import HEADER_BYTES, ReceiveBuffers
from ringside.engine.net.exchange.signature import MessageHeader, SignatureMismatch
from ringside.engine.transports.base import Bytes, Pending, Transport

_SEQ_BYTES = 8  # of a header: the number of the collective on its link, which comes first


class PersistentExchange:
    """One vertex's part of a schedule, for one chunk in one place.

    Args:
        exchange: The links.
        request: What is done: a plan of one chunk, no switch, no wire dtype.
        chunk: The chunk's memory, uint8 [n], 1 to a message's payload.
    """

    def __init__(self, exchange: Exchange, request: ExchangeRequest, chunk: Bytes) -> None:
        plan, item_bytes, fold, call, last_fold, members, _ = request
        self._exchange, self._chunk, self._address = exchange, chunk, address_of(chunk)
        self._elements = len(chunk) // item_bytes
        # This vertex's header, but for the number of the collective, which is written into it each time.
        self._header = np.zeros(HEADER_BYTES, dtype=np.uint8)
        MessageHeader(0, plan.hash, exchange.segment_of(item_bytes, None), call).write(self._header)
        self._vertices = vertices = list(range(exchange.transport.size)) if members is None else list(members)
        me = vertices.index(exchange.transport.rank)
        self._used: list[tuple[ReceiveBuffers, Bytes]] = []
        self._posted = False  # whether the buffers of all senders are
        # The first message of a link in a collective begins with the header, in both directions.
        greeted: set[int] = set()
        heard: set[int] = set()
        self._first = self._messages_after(plan, -1, greeted)
        self._steps: list[_ReceiveStep] = []
        for k, receives in enumerate(plan.rounds):
            for receive in receives:
                senders = []
                for src in receive.sources:
                    senders.append(_Sender(src, vertices[src], 0 if src in heard else HEADER_BYTES))
                    heard.add(src)
                index = len(self._steps)
                by = (last_fold or fold) if index in plan.finals else fold
                messages = self._messages_after(plan, index, greeted)
                own_position = sum(src < me for src in receive.sources)
                self._steps.append(_ReceiveStep(k, receive.overwrite, own_position, senders, by, messages))

    @staticmethod
    def fits(exchange: Exchange, plan: MessagePlan, size_bytes: int) -> bool:
        """Tell whether a collective can be run this way."""
        return plan.chunks == 1 and not plan.switches and 0 < size_bytes <= exchange.segment_bytes

    def start(self) -> None:
        """Send what needs nothing of the others, of what the chunk holds now; waits for nobody."""
        if not self._posted:
            # In whatever order peers begin, their first messages find a buffer.
            for step in self._steps:
                for sender in step.senders:
                    sender.buffers = self._exchange.receive_buffers(sender.peer)
            self._posted = True
        for message in self._first:
            self._send(message)

    def wait(self) -> None:
        """Receive what comes, send what depends on it, and leave the result in the chunk.

        Raises:
            LinkError, SignatureMismatch: As `ExchangeRun.run`.
        """
        exchange, own, size_bytes = self._exchange, self._address, len(self._chunk)
        for step in self._steps:
            addresses = []
            for sender in step.senders:
                buffers = sender.buffers
                waited = time.perf_counter()
                received = buffers.receive()
                now = time.perf_counter()
                if sender.offset:
                    # Compare the header; both ends of a link count its collectives alike.
                    seq = exchange.next_seq(sender.peer, sending=False)
                    self._header[:_SEQ_BYTES].view(np.uint64)[0] = seq
                    if received[:HEADER_BYTES].tobytes() != self._header.tobytes():
                        theirs, ours = MessageHeader.read(received), MessageHeader.read(self._header)
                        raise SignatureMismatch(sender.peer, theirs, ours)
                self._used.append((buffers, received))
                addresses.append(buffers.address_of(received) + sender.offset)
                seq = exchange.seq_from(sender.peer)
                exchange.hops.append(HopTiming(seq, step.round, sender.vertex, size_bytes, waited, now, now))
            if step.overwrite:
                ctypes.memmove(own, addresses[0], size_bytes)
            else:
                addresses.insert(step.own_position, own)  # contributions are folded in the order of ranks
                step.fold(addresses, own, self._elements)
            for message in step.messages:
                self._send(message)

    def release_buffers(self) -> None:
        """Post the messages' buffers again, which nobody waits for: after `wait`, when there is time."""
        for buffers, received in self._used:
            buffers.free(received)
        self._used.clear()

    def close(self) -> None:
        """Wait until all that was sent has left: this is not used any more."""
        for message in (*self._first, *(message for step in self._steps for message in step.messages)):
            if message.pending is not None:
                message.pending.wait()

    def _messages_after(self, plan: MessagePlan, receive: int, greeted: set[int]) -> list[_OutMessage]:
        """Return what may be sent after a receive, by its number (-1: at once)."""
        messages = []
        for dst, sends in plan.links.items():
            for _ in (send for send in sends if send.after == receive):
                header = self._header[: 0 if dst in greeted else HEADER_BYTES]
                greeted.add(dst)
                messages.append(_OutMessage(self._exchange.transport, self._vertices[dst], header, len(self._chunk)))
        return messages

    def _send(self, message: _OutMessage) -> None:
        if message.pending is not None:
            message.pending.wait()  # of the last time: it has long left
        if message.offset:
            seq = self._exchange.next_seq(message.peer, sending=True)
            message.memory[:_SEQ_BYTES].view(np.uint64)[0] = seq
        ctypes.memmove(message.address, self._address, len(self._chunk))
        message.pending = self._exchange.links.send(message.peer, message.kept)
        self._exchange.sent_bytes[message.peer] += len(message.memory)


class _OutMessage:
    """A message that is sent once in every collective, and what became of it the last time.

    Args:
        transport: What sends it.
        peer: To whom.
        header: What it begins with; may be empty.
        size_bytes: Of its payload.

    Attributes:
        offset: Where the payload begins.
        address: The payload's.
        pending: The last send; None: there was none.
    """

    def __init__(self, transport: Transport, peer: int, header: Bytes, size_bytes: int) -> None:
        self.peer, self.offset = peer, len(header)
        self.memory = np.concatenate([header, np.zeros(size_bytes, dtype=np.uint8)])
        self.kept = transport.keep(self.memory)
        self.address = address_of(self.memory) + self.offset
        self.pending: Pending | None = None


class _Sender:
    """One sender of a receive: its number in the schedule, in the transport, and where its payload begins."""

    buffers: ReceiveBuffers

    def __init__(self, vertex: int, peer: int, offset: int) -> None:
        self.vertex, self.peer, self.offset = vertex, peer, offset


class _ReceiveStep(NamedTuple):
    """One receive: from whom, what to do with it, and what is sent then.

    `own_position` is where this vertex's own contribution comes among theirs.
    """

    round: int
    overwrite: bool
    own_position: int
    senders: list[_Sender]
    fold: Fold
    messages: list[_OutMessage]
