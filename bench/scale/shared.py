"""What the processes of a job of `job.py` share: numbers in memory, and gates to wait at."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np

_PER_RANK = ("ready", "sent", "messages", "bytes", "failed")
_SINGLE = ("completed", "late", "port", "finish_us", "complete_us")


class Gate:
    """Where processes wait until their parent lets them go on, or is gone."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def forked(self) -> None:
        """In a child, first of all: give up its copy of the parent's end, which would hold the gate shut."""
        os.close(self._write)

    def wait(self) -> None:
        """In a child: wait."""
        os.read(self._read, 1)

    def open(self) -> None:
        """In the parent: let all go on; what was open stays so."""
        for end in (self._read, self._write):
            if end >= 0:
                with contextlib.suppress(OSError):
                    os.close(end)
        self._read = self._write = -1


class Shared:
    """How far everybody is.

    Args:
        ranks: Number of ranks.

    Attributes:
        ready, sent, messages, bytes, failed: Per rank, int64 [ranks]: whether it has joined, steps it has finished,
            what its outbox has sent, whether it has failed.
        completed, late: Of the collector, int64 [1]; `complete_us` says when it last completed a step, microseconds
            after the start, `finish_us` what summary and report took.
        port: Where the store listens; 0 before it does.
        start: When the first step begins, float64 [1], monotonic seconds.
        begin, leave: Where ranks wait before the first and after the last step.
    """

    def __init__(self, ranks: int) -> None:
        count = len(_PER_RANK) * ranks + len(_SINGLE) + 1
        self._memory = mmap.mmap(-1, 8 * count)
        numbers = np.frombuffer(self._memory, dtype=np.int64)
        self.ready, self.sent, self.messages, self.bytes, self.failed = numbers[: len(_PER_RANK) * ranks].reshape(
            len(_PER_RANK), ranks
        )
        singles = numbers[len(_PER_RANK) * ranks : -1].reshape(len(_SINGLE), 1)
        self.completed, self.late, self.port, self.finish_us, self.complete_us = singles
        self.start = np.frombuffer(self._memory, dtype=np.float64)[-1:]
        self.begin, self.leave = Gate(), Gate()
