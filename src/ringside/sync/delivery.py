"""Brings step records from every rank to rank 0, over the job's own store, in small batches.

Every rank numbers its batches; rank 0 asks for the next number of each rank and deletes what it has read.
"""

from __future__ import annotations

import contextlib

import msgspec
from torch.distributed.distributed_c10d import Store

from ringside.monitor.records import StepRecord

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[StepRecord]).decode


class Outbox:
    """One rank's end."""

    def __init__(self, store: Store, rank: int) -> None:
        self._store, self._rank, self._sent = store, rank, 0

    def send(self, records: list[StepRecord]) -> None:
        """Send one batch; an empty one says that nothing more will come."""
        self._store.set(f"{self._rank}/{self._sent}", _encode(records))  # type: ignore[arg-type]  # bytes are taken as they are
        self._sent += 1


class Inbox:
    """Rank 0's end."""

    def __init__(self, store: Store, ranks: int) -> None:
        self._store = store
        self._next = dict.fromkeys(range(ranks), 0)

    @property
    def open(self) -> bool:
        """Tell whether some rank may still send."""
        return bool(self._next)

    def poll(self) -> list[StepRecord]:
        """Return what has arrived since the last call."""
        records: list[StepRecord] = []
        for rank in list(self._next):
            while rank in self._next and self._store.check([self._key(rank)]):
                records += self._take(rank)
        return records

    def _take(self, rank: int) -> list[StepRecord]:
        key = self._key(rank)
        batch = _decode(self._store.get(key))
        with contextlib.suppress(RuntimeError, NotImplementedError):  # not every store can delete
            self._store.delete_key(key)
        self._next[rank] += 1
        if not batch:
            del self._next[rank]
        return batch

    def _key(self, rank: int) -> str:
        return f"{rank}/{self._next[rank]}"
