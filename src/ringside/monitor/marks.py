"""Marks in a device's queue of work, by which a step is timed where the host only queues what the device does later.

A mark is reached when all that was queued before it is done, and two that are reached say how long the device took from
one to the other. Nothing here waits: a step is told when its marks are reached, usually one step late.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

from ringside.monitor.collectives import Span
from ringside.monitor.step_draft import Phases

MOST_LAPS = 4096
"""A step with more (a long validation in it) is not told, so that marks do not pile up."""

SYNC = "sync"
"""Names a lap that is a synchronisation of gradients; "exposed" names other waiting for ranks."""


class Marker(Protocol):
    """What a device offers."""

    def mark(self) -> Any:
        """Set a mark behind all that is queued on this thread's current queue; None: none may be set now."""

    def reached(self, mark: Any) -> bool:
        """Tell whether the device has come to a mark; never waits. On any thread."""

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return how long it took from one mark to another, both reached. On any thread."""


class Marks:
    """A marker that never raises: the first error drops it.

    Args:
        marker: The device's.
        blow: Called with that error, which it tells once.
    """

    def __init__(self, marker: Marker, blow: Callable[[Exception], None]) -> None:
        self._marker, self._blow = marker, blow
        self._off = False

    def mark(self) -> Any:
        """Set a mark; None: none may be set now, or the marker has been dropped."""
        if self._off:
            return None
        try:
            return self._marker.mark()
        except Exception as error:
            self._drop(error)
            return None

    def reached(self, marks: Collection[Any]) -> bool:
        """Tell whether all of these are set and reached."""
        if self._off or any(mark is None for mark in marks):
            return False
        try:
            return all(self._marker.reached(mark) for mark in marks)
        except Exception as error:
            self._drop(error)
            return False

    def seconds(self, earlier: Any, later: Any) -> float | None:
        """Return the time between two that are reached; None: the marker has been dropped."""
        if self._off:
            return None
        try:
            return self._marker.seconds(earlier, later)
        except Exception as error:
            self._drop(error)
            return None

    def timed(self, spans: Collection[Span]) -> list[Span]:
        """Return collectives whose ends are marks in seconds since the first one's beginning, where all is reached."""
        done = [span for span in spans if self.reached((span.began, span.ended))]
        found = []
        for span in done:
            began, ended = (self.seconds(done[0].began, mark) for mark in (span.began, span.ended))
            if began is not None and ended is not None:
                found.append(Span(began, ended, span.size_bytes))
        return found

    def _drop(self, error: Exception) -> None:
        self._off = True
        self._blow(error)


class Laps:
    """The marks of one step: at its beginning, and at the end of each part of it.

    Args:
        marks: Who sets them.
        began: The mark at its beginning.
    """

    def __init__(self, marks: Marks, began: Any) -> None:
        self._marks, self._began = marks, began
        self._laps: list[tuple[str, Any]] = []
        self._seconds: list[tuple[str, float]] = []

    def end(self, phase: str) -> None:
        """A part of the step ends here.

        Args:
            phase: A field of `Phases`, or `SYNC`.
        """
        if len(self._laps) <= MOST_LAPS:
            self._laps.append((phase, self._marks.mark()))

    def next(self) -> Laps:
        """Return those of the next step, which begins where this one has ended, or here where that is not known."""
        ended = self._laps[-1][1] if 0 < len(self._laps) <= MOST_LAPS else None
        return Laps(self._marks, self._marks.mark() if ended is None else ended)

    @property
    def lost(self) -> bool:
        """Whether a mark is missing, so that the step can never be told."""
        return len(self._laps) > MOST_LAPS or any(mark is None for mark in self._all())

    def settle(self) -> bool:
        """Look up what every part took, and let the marks go; False: some mark is not reached yet."""
        if self.lost or not self._marks.reached(self._all()[::-1]):  # the last is the likeliest one to be missing
            return False
        before, found = self._began, []
        for phase, mark in self._laps:
            seconds = self._marks.seconds(before, mark)
            if seconds is None:
                return False
            found.append((phase, seconds))
            before = mark
        self._seconds, self._laps = found, []
        return True

    def write(self, phases: Phases) -> float:
        """Replace the host's times by the device's, and return that of the step; after `settle`."""
        phases.data = phases.forward = phases.backward = phases.exposed = phases.optimizer = 0.0
        syncs = []
        for phase, seconds in self._seconds:
            if phase == SYNC:
                syncs.append(seconds)
            field = "exposed" if phase == SYNC else phase
            setattr(phases, field, getattr(phases, field) + seconds)
        phases.syncs = [(seconds, told) for seconds, (_, told) in zip(syncs, phases.syncs, strict=True)]
        return sum(seconds for _, seconds in self._seconds)

    def _all(self) -> list[Any]:
        return [self._began, *(mark for _, mark in self._laps)]
