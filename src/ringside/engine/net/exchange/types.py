"""The types that the interpreter, its pipeline and its callers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from ringside.engine.transports.base import Bytes

Fold = Callable[[Sequence[int], int, int], None]
"""Reduces arrays: (addresses of the sources in order, address of the result, elements)."""

Chunk = Sequence[Bytes] | Bytes | None
"""A chunk's memory: an array, or the segments it is cut into already; None: never touched by this vertex."""

AHEAD = 3
"""Segments of this vertex's own that are sent before the one is received that comes at the same time: what is fed in
piece by piece is added up when messages need it, and no sooner."""


class LocalSource(Protocol):
    """Where segments come from and go to while a collective is under way."""

    def wait(self, chunk: int, segment: int) -> None:
        """Return when this vertex's own contribution lies there."""

    def ready(self, chunk: int, segment: int) -> None:
        """Take note that the result lies there; it is only read from now on."""


class HopTiming(NamedTuple):
    """What one rank received from one other in one round; times in seconds on this process's `perf_counter`.

    Args:
        seq: The collective.
        round: The schedule's round.
        src: The sender.
        size_bytes: Payload.
        waited: When this rank began to wait for it.
        first: When its first segment was there: waited → first is the sender being late (or one way of the wire).
        last: When all of it was there: first → last is the wire.
    """

    seq: int
    round: int
    src: int
    size_bytes: int
    waited: float
    first: float
    last: float
