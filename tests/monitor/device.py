"""A pretended device: marks in its queue are reached when the test lets it work."""

from __future__ import annotations

import math
from collections.abc import Collection


class FakeDevice:
    """A marker whose device works off its queue in its own time.

    Attributes:
        queued: Device time that is queued so far, seconds.
        done: How far the device has come.
        captured: A graph is captured: no marks.
        broken: Every call raises.
        never: Marks that are not reached however far the device has come.
        is_here: Whether the current queue is the one that training uses.
        beside: How far another queue of the device is queued, on its clock.
    """

    def __init__(self) -> None:
        self.queued = 0.0
        self.done = -math.inf
        self.captured = self.broken = False
        self.never: set[float] = set()
        self.is_here, self.beside, self.settled = True, 0.0, 0
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

    def mark_here(self) -> float | None:
        self._check()
        return self.queued if self.is_here else self.beside

    def mark_alone(self) -> float | None:
        self._check()
        return self.done

    def is_training(self) -> bool:
        self._check()
        return self.is_here

    def trains_here(self) -> None:
        self._check()
        self.settled += 1

    def reached(self, mark: float) -> bool:
        self._check()
        self.asked += 1
        return mark <= self.done and mark not in self.never

    def times(self, since: float, marks: Collection[float | None]) -> list[float]:
        return [math.nan if mark is None or not self.reached(mark) else mark - since for mark in marks]

    def _check(self) -> None:
        if self.broken:
            raise RuntimeError("the device is lost")
