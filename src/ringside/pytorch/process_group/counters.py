"""Who carried the collectives of a process group: counted, so that nothing falls through to another engine unseen."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any


class GroupCounters:
    """Collectives by name and engine.

    What C++ calls past the process group lands in its inner Gloo group without our knowledge; Gloo's own number of what
    it carried tells of it.

    Args:
        gloo: The inner group.
    """

    def __init__(self, gloo: Any) -> None:
        self._gloo, self._guard = gloo, threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._known: int = gloo._get_sequence_number_for_group()

    def add(self, name: str, engine: str) -> None:
        """Count one collective that `engine` carries."""
        with self._guard:
            self._counts[name, engine] += 1

    def through_gloo(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Count one collective that is given to the inner group on purpose, and give it."""
        with self._guard:
            self._counts[name, "gloo"] += 1
            before = self._gloo._get_sequence_number_for_group()
        try:
            return call(*args)
        finally:
            with self._guard:
                self._known += self._gloo._get_sequence_number_for_group() - before

    def total(self) -> int:
        """Return how many collectives this rank has begun, whoever carried them."""
        with self._guard:
            return sum(self._counts.values())

    def table(self) -> dict[str, dict[str, int]]:
        """Return for every engine how many of which collectives it carried.

        Collectives that came to Gloo past us are counted as `unseen`.
        """
        with self._guard:
            counts = dict(self._counts)
            unseen = self._gloo._get_sequence_number_for_group() - self._known
        table: dict[str, dict[str, int]] = {}
        for (name, engine), count in sorted(counts.items()):
            table.setdefault(engine, {})[name] = count
        if unseen > 0:
            table.setdefault("gloo", {})["unseen"] = unseen
        return table
