"""Marks in a device's queue of work, by which a step is timed where the host only queues what the device does later.

A mark is reached when all that was queued before it is done, and two that are reached say how long the device took
from one to the other. Nothing here waits: a step is recorded when its marks are reached, usually one step late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any, Protocol, TypeVar

_T = TypeVar("_T")
MOST_LAPS = 4096
"""A step with more (a long validation in it) is not recorded, so that marks do not pile up."""

SYNC = "sync"
"""Names a lap that is a synchronisation of gradients; "exposed" names other waiting for ranks."""


class Marker(Protocol):
    """What a device offers."""

    def mark(self) -> Any:
        """Set a mark behind all that training has queued; None: none may be set now."""

    def mark_here(self) -> Any:
        """Set a mark behind all that is queued on this thread's current queue; None: none may be set now."""

    def mark_alone(self) -> Any:
        """Set a mark on a queue with nothing else in it, so that the device comes to it at once."""

    def is_training(self) -> bool:
        """Return whether this thread's current queue is the one that training uses."""

    def trains_here(self) -> None:
        """From now on this thread's current queue is the one that training uses."""

    def reached(self, mark: Any) -> bool:
        """Return whether the device has come to a mark; never waits. On any thread."""

    def times(self, since: Any, marks: Collection[Any]) -> list[float]:
        """Return how long after a mark, which is reached, each of others was; NaN: it is not yet, or it is None.

        On any thread.
        """


class DeviceEvents:
    """A marker that never raises: the first error drops it.

    Args:
        marker: The device's.
        on_error: Called with that error, once.
    """

    def __init__(self, marker: Marker, on_error: Callable[[Exception], None]) -> None:
        self._marker, self._on_error = marker, on_error
        self._off = False

    def mark(self) -> Any:
        """Set a mark behind all that training has queued; None: none may be set now, or the marker has been dropped."""
        return self._ask(self._marker.mark, None)

    def mark_here(self) -> Any:
        """Set a mark on this thread's current queue; None: as of `mark`."""
        return self._ask(self._marker.mark_here, None)

    def mark_alone(self) -> Any:
        """Set a mark that the device comes to at once; None: as of `mark`."""
        return self._ask(self._marker.mark_alone, None)

    def is_training(self) -> bool:
        """Return whether this thread's current queue is the one that training uses."""
        return self._ask(self._marker.is_training, False)

    def trains_here(self) -> None:
        """From now on this thread's current queue is the one that training uses."""
        self._ask(self._marker.trains_here, None)

    def reached(self, marks: Collection[Any]) -> bool:
        """Return whether all of these are set and reached."""
        is_set = all(mark is not None for mark in marks)
        return is_set and self._ask(lambda: all(self._marker.reached(mark) for mark in marks), False)

    def times(self, since: Any, marks: Collection[Any]) -> list[float]:
        """Return how long after a mark the device came to each of others, seconds; NaN: it is not known."""
        unknown = [math.nan] * len(marks)
        return unknown if since is None else self._ask(lambda: self._marker.times(since, marks), unknown)

    def _ask(self, call: Callable[[], _T], without: _T) -> _T:
        if self._off:
            return without
        try:
            return call()
        except Exception as error:
            self._off = True
            self._on_error(error)
            return without


class PhaseEvents:
    """The marks of one step: at its beginning, and at the end of each part of it.

    Args:
        marks: Sets them.
        began: The mark at its beginning.
    """

    def __init__(self, marks: DeviceEvents, began: Any) -> None:
        self._marks, self._began = marks, began
        self._laps: list[tuple[str | None, Any]] = []
        self._seconds: list[tuple[str | None, float]] = []

    def end(self, phase: str) -> None:
        """A part of the step ends here.

        Args:
            phase: A field of `StepPhases`, or `SYNC`.
        """
        if len(self._laps) <= MOST_LAPS:
            self._laps.append((phase, self._marks.mark()))

    def waited(self, began: Any, ended: Any) -> None:
        """Between two marks this rank was blocked on others, inside a phase whose end will tell which it is."""
        if len(self._laps) <= MOST_LAPS:
            self._laps += [(None, began), ("exposed", ended)]

    def next(self) -> PhaseEvents:
        """Return those of the next step, which begins where this one has ended, or here where that is not known."""
        ended = self._laps[-1][1] if 0 < len(self._laps) <= MOST_LAPS else None
        return PhaseEvents(self._marks, self._marks.mark() if ended is None else ended)

    @property
    def lost(self) -> bool:
        """Whether a mark is missing, so that the step can never be recorded."""
        return len(self._laps) > MOST_LAPS or any(mark is None for mark in self._all())

    def settle(self) -> bool:
        """Read what every part took, and drop the marks; False: some mark is not reached yet."""
        if self.lost or not self._marks.reached(self._all()[::-1]):  # the last is the likeliest one to be missing
            return False
        ends = self._marks.times(self._began, [mark for _, mark in self._laps])
        if any(map(math.isnan, ends)):  # the marker has been dropped
            return False
        parts = zip(self._laps, pairwise([0.0, *ends]), strict=True)
        self._seconds, self._laps = [(phase, end - begin) for (phase, _), (begin, end) in parts], []
        return True

    def sums(self) -> tuple[dict[str, float], list[float]]:
        """Return how long the device was in each phase and blocked, seconds, and each synchronisation; after `settle`.

        The phases have the names of `StepPhases`' fields; together they are the step.
        """
        sums = dict.fromkeys(("data", "forward", "backward", "compute", "exposed", "optimizer"), 0.0)
        syncs = []
        under_way = "compute"
        for phase, seconds in reversed(self._seconds):
            if phase == SYNC:
                syncs.append(seconds)
            elif phase != "exposed":
                under_way = phase or under_way
            sums["exposed" if phase in (SYNC, "exposed") else under_way] += seconds
        return sums, syncs[::-1]

    def _all(self) -> list[Any]:
        return [self._began, *(mark for _, mark in self._laps)]
