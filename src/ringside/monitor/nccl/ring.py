"""The ring in shared memory in which one process's NCCL plugin records events; `_core/nccl_ring.hpp` lays it out."""

from __future__ import annotations

import mmap
import os
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringside.errors import RingsideError, UnsupportedError
from ringside.processes import is_running

FOLDER_VARIABLE = "RINGSIDE_NCCL_DIR"
STEPS_VARIABLE = "RINGSIDE_NCCL_STEPS"
FOLDER = "/dev/shm"
PREFIX = "ringside-nccl-"

COLLECTIVE, MESSAGE, KERNEL, PROXY, STEP = range(1, 6)
"""What an event is of."""
STARTED, CHANGED, STOPPED = range(3)
SENDS, FOREIGN, CAPTURED, CALLED = 1, 2, 4, 8
KIND_BITS = 3

MAGIC = b"RNGNCCL3"
"""Its last character is the version of the layout."""
HEAD, TAIL, DROPPED = 8, 16, 24
"""Where a ring's counters lie, in words of 64 bits."""
COMMUNICATORS = 1024
"""At a time; the number of one is its place, or that and a multiple of this."""
MOST_CLOSED = 4096
"""So many are known whose places were taken: a call of theirs may not be over yet."""
HEADER_BYTES = 4096

Records = NDArray[np.void]
"""Of dtype `RECORD`."""

HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("process_started", "u8"),
        ("unix_ns", "i8"),
        ("pid", "i4"),
        ("global_rank", "i4"),
        ("interface", "u4"),
        ("communicators", "u4"),
        ("records", "u4"),
    ]
)
COMMUNICATOR = np.dtype(
    [
        ("made", "u8"),  # its number plus one; 0: none, or it is being made
        ("first", "u8"),
        ("last", "u8"),
        ("id", "u8"),
        ("ranks", "i4"),
        ("rank", "i4"),
        ("name", "S88"),
    ]
)
RECORD = np.dtype(
    [
        ("sequence", "u8"),
        ("host_ns", "u8"),
        ("handle", "u8"),
        ("gpu_ns", "u8"),
        ("number", "u8"),
        ("count", "u8"),
        ("communicator", "u4"),
        ("peer", "i4"),
        ("flags", "u4"),
        ("kind", "u1"),
        ("what", "u1"),
        ("state", "u1"),
        ("channel", "u1"),
        ("channels", "u1"),
        ("protocol", "S15"),
        ("func", "S16"),
        ("datatype", "S16"),
        ("algorithm", "S16"),
    ]
)


def joined_rows(parts: Sequence[NDArray[np.void]]) -> NDArray[np.void]:
    """Return rows one behind the other: NumPy copies words three to ten times as fast as structures."""
    rows: NDArray[np.void] = np.concatenate([part.view(np.uint64) for part in parts]).view(parts[0].dtype)
    return rows


def picked_records(records: Records, at: NDArray[np.int64]) -> Records:
    """Return the records there, copied as words likewise."""
    words = records.view(np.uint64).reshape(len(records), RECORD.itemsize // 8)
    picked: Records = words.take(at, axis=0).view(RECORD).reshape(len(at))
    return picked


class RecordedCommunicator(msgspec.Struct, frozen=True):
    """One rank's part of a communicator.

    Args:
        id: The same on all of its ranks.
        ranks: How many it has.
        rank: Which of them this process is.
        name: The user's.
    """

    id: int
    ranks: int
    rank: int
    name: str


class Ring:
    """The records of one process; whoever makes one is its only reader.

    Args:
        path: The file in shared memory.

    Attributes:
        pid: The process.
        global_rank: torchrun's; -1: not known.
        torn: Records that were begun and never finished, by a process that was killed.

    Raises:
        UnsupportedError: Its layout is that of another version.
        RingsideError: It is no ring of ours.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            at = HEADER_BYTES + COMMUNICATORS * COMMUNICATOR.itemsize
            if not stat.S_ISREG(status.st_mode) or status.st_size <= at:
                raise RingsideError(f"{path} is no ring of Ringside's NCCL plugin")
            memory: Any = mmap.mmap(descriptor, status.st_size)
        finally:
            os.close(descriptor)
        self._words: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, HEADER_BYTES // 8)
        self._header = np.frombuffer(memory, HEADER, 1)[0]
        self._communicators = np.frombuffer(memory, COMMUNICATOR, COMMUNICATORS, HEADER_BYTES)
        count = (status.st_size - at) // RECORD.itemsize
        magic = bytes(self._header["magic"])
        if magic[:-1] == MAGIC[:-1] and magic != MAGIC:
            raise UnsupportedError(
                f"{path} has version {chr(magic[-1])} of the layout, by the NCCL plugin of another Ringside: this one "
                f"reads version {chr(MAGIC[-1])}; unset NCCL_PROFILER_PLUGIN, or set it to what `ringside nccl-plugin` "
                "prints here"
            )
        if magic != MAGIC or self._header["records"] != count:
            raise RingsideError(f"{path} is no ring of Ringside's NCCL plugin")
        self._records = np.frombuffer(memory, RECORD, count, at)
        self.pid = int(self._header["pid"])
        self.global_rank = int(self._header["global_rank"])
        self._started = int(self._header["process_started"])
        self.torn = 0
        self._known: dict[int, RecordedCommunicator] = {}
        self._made = np.zeros(COMMUNICATORS, np.uint64)  # by place: `made` of the one that is known
        self._communicators_made = 0
        self._closed: deque[int] = deque()
        self._head = -1

    @property
    def interface(self) -> int:
        """The version of the interface that NCCL has chosen; 0: no communicator was made."""
        return int(self._header["interface"])

    @property
    def dropped(self) -> int:
        """Events for which there was no room."""
        return int(self._words[DROPPED])

    def communicator(self, number: int) -> RecordedCommunicator | None:
        """Return the one that records of `drain` number so; None: it is not known."""
        return self._known.get(number)

    def _learn_communicators(self) -> None:
        """Look who is new; a place is taken again once its communicator's records were taken out, and no sooner."""
        made_ever = int(self._header["communicators"])
        if made_ever == self._communicators_made:
            return
        self._communicators_made = made_ever
        made = self._communicators["made"]
        for place in np.flatnonzero(made != self._made).tolist():
            number_plus_1 = int(made[place])
            row = self._communicators[place].copy()
            if number_plus_1 == 0 or made[place] != number_plus_1:
                continue  # it is just being made: no record that was seen names it
            if self._made[place]:
                self._closed.append(int(self._made[place]) - 1)
            self._made[place] = number_plus_1
            self._known[number_plus_1 - 1] = RecordedCommunicator(
                int(row["id"]), int(row["ranks"]), int(row["rank"]), row["name"].decode("utf-8", "replace")
            )
        while len(self._closed) > MOST_CLOSED:
            self._known.pop(self._closed.popleft(), None)

    @property
    def filled_ratio(self) -> float:
        """The share of it that is full: of its records, or of its places for communicators since the last `drain`."""
        made = int(self._header["communicators"]) - self._communicators_made
        return max((int(self._words[HEAD]) - int(self._words[TAIL])) / len(self._records), made / COMMUNICATORS)

    def is_alive(self) -> bool:
        """Return whether its process may still write."""
        return is_running(self.pid, self._started)

    @property
    def has_news(self) -> bool:
        """Whether records were begun since the last `drain`: then its process was alive."""
        return int(self._words[HEAD]) != self._head

    def drain(self, alive: bool | None = None) -> Records:
        """Return the records since the last call, oldest first.

        Args:
            alive: What `is_alive` has said before; None: it is asked.

        Raises:
            RingsideError: It is damaged.
        """
        with self.taken_out(alive) as records:
            return joined_rows([records])

    @contextmanager
    def taken_out(self, alive: bool | None = None) -> Iterator[Records]:
        """Give what `drain` returns where it lies, if it can: its room is free for others when the context is left."""
        alive = self.is_alive() if alive is None else alive  # asked first: what a process wrote before it ended is seen
        size = len(self._records)
        tail, head = int(self._words[TAIL]), int(self._words[HEAD])
        if not 0 <= head - tail <= size:
            raise RingsideError(f"{self.path} is damaged: {head} records were begun and {tail} taken out")
        self._learn_communicators()
        count, self._head = head - tail, head
        found = self._records[tail % size : min(tail % size + count, size)]
        if len(found) < count:
            rest = self._records[: count - len(found)]
            sequence = np.concatenate([found["sequence"], rest["sequence"]])
            found = joined_rows([found, rest])
        else:
            sequence = found["sequence"]
        # the sequences first: a record is whole from the moment at which its own is there
        is_whole = sequence == np.arange(tail + 1, head + 1, dtype=np.uint64)
        if not is_whole.all():
            if alive:  # a thread is about to write one
                count = int(np.argmin(is_whole))
                found = found[:count]
            else:
                self.torn += int(np.count_nonzero(~is_whole))
                found = found[is_whole]
        yield found
        self._words[TAIL] = tail + count
