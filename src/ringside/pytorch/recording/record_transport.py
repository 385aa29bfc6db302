"""Brings step records from every rank to rank 0, over the job's own store, in small batches, and watches that store.

Where the store can append (torch's TCPStore and HashStore can), ranks put their batches into boxes that thirty-two of
them share. Rank 0 reads all boxes in one round trip, and now and then empties one in another. Elsewhere every rank
numbers its batches, and rank 0 asks for the next number of each rank.
"""

from __future__ import annotations

import contextlib
import logging
import math
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from torch.distributed.distributed_c10d import Store

from ringside.decoding import UNDECODABLE
from ringside.monitor.run.records import StepRecord

RANKS_PER_BOX = 32
"""So few that a box is seldom added to between reading and emptying it."""

BATCH_SECONDS, LONGEST_BATCH_SECONDS = 0.25, 1.0
BATCH_RECORDS = 1_000
EMPTIED_BYTES = 64 << 10
"""Up to here it is cheaper to read a box again than to ask the store once more: each answer takes its turn there."""

BOX_BYTES = 4 << 20
"""torch's store drops the connection of whoever sends it more than 8 MiB at once, as emptying a fuller box would."""

READY = "chief"
"""The store holds this key as long as rank 0 takes records in."""

_FRAME = struct.Struct("<II")
"""Rank, and length of the batch that follows."""

_encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(list[StepRecord]).decode
_log = logging.getLogger(__name__)


def batch_seconds(ranks: int) -> float:
    """Return for how long a rank of a job gathers records before it sends them: of many ranks, the longer."""
    return min(max(BATCH_SECONDS, ranks / 1024), LONGEST_BATCH_SECONDS)


class RecordSender:
    """One rank's end.

    Args:
        store: The session's part of the job's store, the same on all ranks.
        rank: This rank.

    Attributes:
        messages: Batches sent so far.
        sent_bytes: Their bytes.
    """

    def __init__(self, store: Store, rank: int) -> None:
        self._store: Any = store  # torch's stubs lack what it can do, and that it takes bytes as they are
        self._rank = rank
        self._appends = can_append(store)
        self.messages = self.sent_bytes = 0

    def send(self, records: list[StepRecord]) -> None:
        """Send one batch; an empty one says that nothing more will come."""
        for begin in range(0, max(len(records), 1), BATCH_RECORDS):
            self.post(_encode(records[begin : begin + BATCH_RECORDS]))

    def post(self, batch: bytes) -> None:
        """Send one batch that is encoded."""
        if self._appends:
            batch = _FRAME.pack(self._rank, len(batch)) + batch
            self._store.append(_box(self._rank), batch)
        else:
            self._store.set(_letter(self._rank, self.messages), batch)
        self.messages += 1
        self.sent_bytes += len(batch)


class RecordReceiver:
    """Rank 0's end.

    Args:
        store: The session's part of the job's store, the same on all ranks.
        ranks: Number of ranks.

    Attributes:
        open: The ranks that may still send.
    """

    def __init__(self, store: Store, ranks: int) -> None:
        self.open = set(range(ranks))
        self._is_damaged = False
        self._channel = _AppendChannel(store, ranks) if can_append(store) else _KeyChannel(store, self.open)

    def poll(self) -> list[StepRecord]:
        """Return what has arrived since the last call; of one rank in the order in which it was sent."""
        records: list[StepRecord] = []
        for rank, batch in self._channel.receive():
            try:
                arrived = decode(batch)
            except UNDECODABLE as error:
                # Warned of once; the rest of what that rank sends may be whole.
                level = logging.DEBUG if self._is_damaged else logging.WARNING
                self._is_damaged = True
                message = "records of rank %d are damaged and are left out: %s; training goes on"
                _log.log(level, message, rank, error)
                continue
            if not arrived:
                self.open.discard(rank)
            records += arrived
        return records


def can_append(store: Any) -> bool:
    """Return whether a store can append to a key, and read many at once."""
    try:
        return bool(store.has_extended_api())
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


class _AppendChannel:
    """Boxes that ranks append to. How much was read of each is remembered; one that grows meanwhile is not emptied."""

    def __init__(self, store: Any, ranks: int) -> None:
        self._store = store
        self._read = {_box(rank): 0 for rank in range(0, ranks, RANKS_PER_BOX)}
        for key in self._read:
            self._store.append(key, b"")  # now it is there, and whoever reads it need not wait

    def receive(self) -> Iterator[tuple[int, bytes | memoryview]]:
        for key, content in zip(self._read, self._store.multi_get(list(self._read)), strict=True):
            begin = self._read[key]
            if len(content) > begin:
                self._read[key] = len(content)
                if len(content) > BOX_BYTES:  # rank 0 has been away for minutes; what comes this very moment is lost
                    self._store.delete_key(key)
                    self._store.append(key, b"")
                    self._read[key] = 0
                elif len(content) >= EMPTIED_BYTES and not self._store.compare_set(key, content, b""):
                    self._read[key] = 0  # it held what was read, and no more: now it is empty
                view = memoryview(content)
                while begin + _FRAME.size <= len(content):
                    rank, size = _FRAME.unpack_from(content, begin)
                    begin += _FRAME.size + size
                    yield rank, view[begin - size : begin]


class _KeyChannel:
    """A key per batch, deleted once it is read."""

    def __init__(self, store: Store, ranks: set[int]) -> None:
        self._store, self._ranks = store, ranks
        self._next = dict.fromkeys(ranks, 0)

    def receive(self) -> Iterator[tuple[int, bytes | memoryview]]:
        for rank in sorted(self._ranks):
            while rank in self._ranks and self._store.check([key := _letter(rank, self._next[rank])]):
                batch = self._store.get(key)
                self._next[rank] += 1
                with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can delete
                    self._store.delete_key(key)
                yield rank, batch


def _box(rank: int) -> str:
    return f"box/{rank // RANKS_PER_BOX}"


def _letter(rank: int, number: int) -> str:
    return f"{rank}/{number}"


# -------------------------------------------------------------------------------------------------
# What a session learns of the job's store by calling it: that it does not answer, and that rank 0 takes records in.


class StoreSilence:
    """Notices that a call of the monitor's thread to the store does not return; the training thread asks.

    A call may take for ever, and the thread that made it cannot report that.

    Args:
        rank: This rank; rank 0 warns, the others log it: the store is silent for all.
        limit_s: A call that takes longer is silence.
        records_kept: How many steps are kept meanwhile, for the message.

    Attributes:
        since: When the call under way began, monotonic seconds; inf: there is none.
        is_reported: Whether it was reported, which is done once.
    """

    def __init__(self, rank: int, limit_s: float, records_kept: int) -> None:
        self._level = logging.WARNING if rank == 0 else logging.INFO
        self._limit_s, self._records_kept = limit_s, records_kept
        self.since = math.inf
        self.is_reported = False
        self._suspected = (math.inf, math.inf)  # the call that took too long, and when that was seen first

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Call the store inside."""
        self.since = time.monotonic()
        try:
            yield
        finally:
            self.since = math.inf

    def check(self, now: float) -> None:
        """Report the store if the call under way takes too long; for the training thread."""
        since = self.since
        if now - since < self._limit_s:
            return
        # A process that was stopped as a whole (SIGSTOP, a suspended machine) finds its own call old, and answered a
        # moment later: so the same call must be found too old twice, with some time between.
        suspected, seen = self._suspected
        if suspected != since:
            self._suspected = (since, now)
        elif now - seen > self._limit_s / 10:
            self.report(now - since)

    def report(self, seconds: float) -> None:
        """Log, once, that the store has not answered for so long."""
        if self.is_reported:
            return
        self.is_reported = True
        _log.log(
            self._level,
            "the job's store has not answered for %.0f s: nothing is recorded until it does, and the newest %d steps "
            "are kept; training goes on. Look at the process that serves it (rank 0, or torchrun)",
            seconds,
            self._records_kept,
        )


class Rank0Presence:
    """Whether rank 0 takes records in; where its monitor is over or never began, they would fill the store.

    Args:
        store: The session's part of the job's store.
        period_s: For how long rank 0 is believed to be there; while it is not, every check asks the store.
        now: Monotonic seconds.

    Attributes:
        is_present: The newest answer.
    """

    def __init__(self, store: Store, period_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._store, self._period_s, self._now = store, period_s, now
        self.is_present = False
        self._believed_until = 0.0

    def check(self) -> bool:
        """Return whether rank 0 takes records in, of the store where the newest answer is too old."""
        if not self.is_present or self._now() > self._believed_until:
            self.is_present = bool(self._store.check([READY]))
            self._believed_until = self._now() + self._period_s
        return self.is_present

    def withdraw(self) -> None:
        """On rank 0: tell the other ranks, which may train on, to send no more."""
        with contextlib.suppress(RuntimeError):  # not every store can delete
            self._store.delete_key(READY)
