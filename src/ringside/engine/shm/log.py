"""What each collective took, on this rank, and when every rank arrived at it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ringside._core.enums import Path

PATHS: tuple[str, ...] = tuple(Path.__members__)
"""Names of the ways in which a collective was carried out, by code."""


class LoggedCollective(NamedTuple):
    """One finished collective; times in ns on the host's monotonic clock, which all its ranks share.

    Args:
        seq: Number of the collective, from 1.
        kind: Index into `ringside.engine.request.KINDS`.
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
        last_wait_ns: Of the last one, from this rank's arrival until the last rank's; NaN: not known.
        payload_bytes: Their tensors' sizes.
        by_path: How many took each of `PATHS`.
        by_name: How many were carried in which other way, by its name (between hosts).
    """

    collectives: int
    sync_ns: int
    wire_ns: int
    last_wait_ns: float
    payload_bytes: int
    by_path: list[int]
    by_name: Mapping[str, int] = MappingProxyType({})


class CollectiveLog:
    """Drains the core's log; the core keeps the oldest 4096 collectives that were not drained, and counts the rest."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def drain(self) -> list[LoggedCollective]:
        """Return what finished since the last call, in order."""
        rows = np.frombuffer(self._core.drain(), np.int64).reshape(-1, self._core.log_width()).tolist()
        return [LoggedCollective._make([*row[:8], tuple(row[8:])]) for row in rows]

    def totals(self) -> Totals:
        """Return the sums over what finished since the last call; cheap enough for every step."""
        return Totals(*self._core.drain_totals())


class AcrossLog:
    """Adds up what collectives between hosts took; when ranks of other hosts arrived is not known."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._sync_ns = self._payload_bytes = 0
        self._names: Counter[str] = Counter()

    def note(self, name: str, sync_ns: int, payload_bytes: int) -> None:
        """Add a finished collective: how it was carried, from its submission to its result, its tensor's size."""
        with self._guard:
            self._names[name] += 1
            self._sync_ns += sync_ns
            self._payload_bytes += payload_bytes

    def totals(self) -> Totals:
        """Return the sums over what finished since the last call."""
        with self._guard:
            names, self._names = self._names, Counter()
            sync_ns, payload_bytes = self._sync_ns, self._payload_bytes
            self._sync_ns = self._payload_bytes = 0
        return Totals(names.total(), sync_ns, 0, float("nan"), payload_bytes, [0] * len(PATHS), names)
