"""A pretended device: marks in its queue are reached when the test lets it work."""

from __future__ import annotations

import math


class FakeDevice:
    """A marker whose device works off its queue in its own time.

    Attributes:
        queued: Device time that is queued so far, seconds.
        done: How far the device has come.
        captured: A graph is captured: no marks.
        broken: Every call raises.
        never: Marks that are not reached however far the device has come.
    """

    def __init__(self) -> None:
        self.queued = 0.0
        self.done = -math.inf
        self.captured = self.broken = False
        self.never: set[float] = set()
        self.asked = 0
        self.set = 0

    def work(self, seconds: float) -> None:
        """Queue so much work."""
        self.queued += seconds

    def catch_up(self) -> None:
        """Do all that is queued."""
        self.done = self.queued

    def mark(self) -> float | None:
        self._check()
        self.set += 1
        return None if self.captured else self.queued

    def reached(self, mark: float) -> bool:
        self._check()
        self.asked += 1
        return mark <= self.done and mark not in self.never

    def seconds(self, earlier: float, later: float) -> float:
        self._check()
        assert max(earlier, later) <= self.done, "asked for the time of a mark that is not reached"
        return later - earlier

    def _check(self) -> None:
        if self.broken:
            raise RuntimeError("the device is lost")
