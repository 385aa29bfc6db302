"""What a session learns of the job's store by calling it: that it does not answer, and that rank 0 takes records in."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator

from torch.distributed.distributed_c10d import Store

READY = "chief"
"""The store holds this key as long as rank 0 takes records in."""

_log = logging.getLogger(__name__)


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
            "are kept; training goes on. Look at the process that holds it (rank 0, or torchrun)",
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
