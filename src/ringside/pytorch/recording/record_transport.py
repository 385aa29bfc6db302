"""Brings step records from every rank to rank 0, over the job's own store, in small batches.

Where the store can append (torch's TCPStore and HashStore can), ranks put their batches into boxes that thirty-two of
them share. Rank 0 reads all boxes in one round trip, and now and then empties one in another. Elsewhere every rank
numbers its batches, and rank 0 asks for the next number of each rank.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Iterator
from typing import Protocol, cast

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
        self._store, self._rank = store, rank
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
            cast(_Appending, self._store).append(_box(self._rank), batch)
        else:
            self._store.set(_letter(self._rank, self.messages), batch)  # type: ignore[arg-type]  # as it is
        self.messages += 1
        self.sent_bytes += len(batch)


class RecordReceiver:
    """Rank 0's end.

    Args:
        store: The session's part of the job's store, the same on all ranks.
        ranks: Number of ranks.
    """

    def __init__(self, store: Store, ranks: int) -> None:
        self._open = set(range(ranks))
        self._is_damaged = False
        self._channel: _Channel = _AppendChannel(store, ranks) if can_append(store) else _KeyChannel(store, self._open)

    @property
    def open(self) -> bool:
        """Tell whether some rank may still send."""
        return bool(self._open)

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
                self._open.discard(rank)
            records += arrived
        return records


def can_append(store: Store) -> bool:
    """Return whether a store can append to a key, and read many at once."""
    try:
        return cast(_Appending, store).has_extended_api()
    except (AttributeError, NotImplementedError, RuntimeError):
        return False


class _Appending(Protocol):
    """What such a store can do beyond others; torch's own stubs lack it, and that bytes are taken as they are."""

    def has_extended_api(self) -> bool: ...

    def append(self, key: str, value: bytes) -> None: ...

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes: ...

    def multi_get(self, keys: list[str]) -> list[bytes]: ...

    def delete_key(self, key: str) -> bool: ...


class _Channel(Protocol):
    """A way in which batches come to rank 0."""

    def receive(self) -> Iterator[tuple[int, bytes | memoryview]]:
        """Yield rank and batch of whatever has arrived since the last call."""


class _AppendChannel:
    """Boxes that ranks append to. How much was read of each is remembered; one that grows meanwhile is not emptied."""

    def __init__(self, store: Store, ranks: int) -> None:
        self._store = cast(_Appending, store)
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
                yield from _frames(content, begin)


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


def _frames(content: bytes, begin: int) -> Iterator[tuple[int, memoryview]]:
    """Yield rank and batch of the frames in a box, from `begin` on."""
    view = memoryview(content)
    while begin + _FRAME.size <= len(content):
        rank, size = _FRAME.unpack_from(content, begin)
        begin += _FRAME.size + size
        yield rank, view[begin - size : begin]


def _box(rank: int) -> str:
    return f"box/{rank // RANKS_PER_BOX}"


def _letter(rank: int, number: int) -> str:
    return f"{rank}/{number}"
