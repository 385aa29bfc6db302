"""What each collective took, on this rank, and when every rank arrived at it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ringside._core.enums import Path

PATHS: tuple[str, ...] = tuple(Path.__members__)
"""Names of the ways in which a collective was carried out, by code."""


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
    """Sums up the core's log; the core keeps the oldest 4096 collectives that were not drained, and counts the rest.

    Attributes:
        core: Whose log it is.
    """

    def __init__(self, core: Any) -> None:
        self.core = core

    def totals(self) -> Totals:
        """Return the sums over what finished since the last call; cheap enough for every step."""
        return Totals(*self.core.drain_totals())


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
