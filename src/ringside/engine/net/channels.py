"""Exchanges whose collectives may be under way at the same time, each on a thread of its own."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

from ringside.engine.net.exchange.exchange import Exchange
from ringside.engine.runtime.worker import Work, Worker

_RECENT = 4  # jobs that may still be under way: two channels, and the one before on each


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


__all__ = ["Channels"]
