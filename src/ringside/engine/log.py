"""What each collective took, on this rank, and when every rank arrived at it."""

from __future__ import annotations

from typing import Any, NamedTuple

PATHS = ("local", "barrier", "one_shot", "push", "staged", "program")


class Collective(NamedTuple):
    """One finished collective; times in ns on the host's monotonic clock, which all its ranks share.

    Args:
        seq: Number of the collective, from 1.
        kind: Index into `ringside.engine.calls.KINDS`: 0 barrier, 1 all-reduce, ...
        path: Index into `PATHS`.
        payload_bytes: Size of the tensor.
        submitted: When this rank was ready.
        entered: When it started waiting for the others.
        ready: When it saw that the last rank had arrived.
        done: When its result was there.
        arrivals: When each rank was ready, by rank.
    """

    seq: int
    kind: int
    path: int
    payload_bytes: int
    submitted: int
    entered: int
    ready: int
    done: int
    arrivals: tuple[int, ...]

    @property
    def wait_seconds(self) -> float:
        """Time from this rank's arrival until the last rank's."""
        return max(max(self.arrivals) - self.submitted, 0) * 1e-9


class Totals(NamedTuple):
    """Some finished collectives summed up.

    Args:
        collectives: How many.
        sync_ns: From each one's submission to its result.
        wire_ns: The part of it after the last rank had arrived.
        last_wait_ns: Of the last one, from this rank's arrival until the last rank's.
        payload_bytes: Their tensors' sizes.
        by_path: How many took each of `PATHS`.
    """

    collectives: int
    sync_ns: int
    wire_ns: int
    last_wait_ns: int
    payload_bytes: int
    by_path: list[int]


class CollectiveLog:
    """Drains the core's log; the core keeps the oldest 4096 collectives that were not drained, and counts the rest."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._width: int = core.log_width()

    def drain(self) -> list[Collective]:
        """Return what finished since the last call, in order."""
        numbers = memoryview(self._core.drain()).cast("q").tolist()
        width = self._width
        return [
            Collective(seq, kind, path, size, submitted, entered, ready, done, tuple(numbers[at + 8 : at + width]))
            for at in range(0, len(numbers), width)
            for seq, kind, path, size, submitted, entered, ready, done in [numbers[at : at + 8]]
        ]

    def totals(self) -> Totals:
        """Return the sums over what finished since the last call; cheap enough for every step."""
        return Totals(*self._core.drain_totals())
