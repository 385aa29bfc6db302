"""Marks in a device's queue of work, by which a step is timed where the host only queues what the device does later.

A mark is reached when all that was queued before it is done, and two that are reached say how long the device took from
one to the other. Nothing here waits: a step is recorded when its marks are reached, usually one step late.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

from ringside.monitor.job.collectives import CollectiveSpan
from ringside.monitor.step_clock.draft import Draft, StepPhases

MOST_LAPS = 4096
"""A step with more (a long validation in it) is not recorded, so that marks do not pile up."""

SYNC = "sync"
"""Names a lap that is a synchronisation of gradients; "exposed" names other waiting for ranks."""


class Marker(Protocol):
    """What a device offers."""

    def mark(self) -> Any:
        """Set a mark behind all that is queued on this thread's current queue; None: none may be set now."""

    def reached(self, mark: Any) -> bool:
        """Return whether the device has come to a mark; never waits. On any thread."""

    def seconds(self, earlier: Any, later: Any) -> float:
        """Return how long it took from one mark to another, both reached. On any thread."""


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
        """Set a mark; None: none may be set now, or the marker has been dropped."""
        if self._off:
            return None
        try:
            return self._marker.mark()
        except Exception as error:
            self._drop(error)
            return None

    def reached(self, marks: Collection[Any]) -> bool:
        """Return whether all of these are set and reached."""
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

    def timed(self, spans: Collection[CollectiveSpan]) -> list[CollectiveSpan]:
        """Return collectives whose ends are marks in seconds since the first one's beginning, where all is reached."""
        done = [span for span in spans if self.reached((span.began, span.ended))]
        found = []
        for span in done:
            began, ended = (self.seconds(done[0].began, mark) for mark in (span.began, span.ended))
            if began is not None and ended is not None:
                found.append(CollectiveSpan(began, ended, span.size_bytes))
        return found

    def _drop(self, error: Exception) -> None:
        self._off = True
        self._on_error(error)


class PhaseEvents:
    """The marks of one step: at its beginning, and at the end of each part of it.

    Args:
        marks: Sets them.
        began: The mark at its beginning.
    """

    def __init__(self, marks: DeviceEvents, began: Any) -> None:
        self._marks, self._began = marks, began
        self._laps: list[tuple[str, Any]] = []
        self._seconds: list[tuple[str, float]] = []

    def end(self, phase: str) -> None:
        """A part of the step ends here.

        Args:
            phase: A field of `StepPhases`, or `SYNC`.
        """
        if len(self._laps) <= MOST_LAPS:
            self._laps.append((phase, self._marks.mark()))

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
        before, found = self._began, []
        for phase, mark in self._laps:
            seconds = self._marks.seconds(before, mark)
            if seconds is None:
                return False
            found.append((phase, seconds))
            before = mark
        self._seconds, self._laps = found, []
        return True

    def write(self, phases: StepPhases) -> float:
        """Replace the host's times by the device's, and return that of the step; after `settle`."""
        phases.data = phases.forward = phases.backward = phases.exposed = phases.optimizer = 0.0
        syncs = []
        for phase, seconds in self._seconds:
            if phase == SYNC:
                syncs.append(seconds)
            field = "exposed" if phase == SYNC else phase
            setattr(phases, field, getattr(phases, field) + seconds)
        phases.syncs = [(seconds, times) for seconds, (_, times) in zip(syncs, phases.syncs, strict=True)]
        return sum(seconds for _, seconds in self._seconds)

    def _all(self) -> list[Any]:
        return [self._began, *(mark for _, mark in self._laps)]


# -------------------------------------------------------------------------------------------------
# Steps whose device has not come so far yet, in order.

KEPT = 1024
"""Steps that wait at most; then the oldest go."""

LOOKS, PAUSE_SECONDS = 100, 0.01
"""How often it is checked once more at the end of a run, and after how long each time."""

_log = logging.getLogger("ringside")


class UnreachedSteps:
    """Drafts with marks that may not be reached yet; one thread adds, another drains.

    A step that is overtaken by the next one will never be recorded: it is left out, which is logged once. So is,
    without a word, one that lacks a mark.
    """

    def __init__(self) -> None:
        self._drafts: deque[tuple[Draft, bool]] = deque(maxlen=KEPT)
        self._guard = threading.Lock()
        self._warned = False

    def add(self, draft: Draft, recorded: bool) -> None:
        """Add a draft that waits for its marks.

        Args:
            draft: It has marks.
            recorded: Whether it is part of the run; given back with it.
        """
        with self._guard:
            self._drafts.append((draft, recorded))

    def drain(self) -> list[tuple[Draft, bool]]:
        """Return the drafts that can be recorded by now, oldest first."""
        with self._guard:
            drafts = list(self._drafts)
        # The newest first: the device goes on while it is read, and would seem to have passed over older ones.
        ready = [number for number in reversed(range(len(drafts))) if drafts[number][0].settled()][::-1]
        if not ready:
            return []
        # Up to the newest that is reached all go; the oldest of them may have been pushed out meanwhile.
        gone = drafts[: ready[-1] + 1]
        numbers = {id(draft) for draft, _ in gone}
        with self._guard:
            while self._drafts and id(self._drafts[0][0]) in numbers:
                self._drafts.popleft()
        overtaken = sum(not draft.lost for draft, _ in gone) - len(ready)
        if overtaken:
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            _log.log(
                level,
                "%d steps are not recorded: the device has gone past the end of a later one and not of these; training "
                "goes on",
                overtaken,
            )
        return [drafts[number] for number in ready]

    def drain_last(self, pause: Callable[[float], object]) -> list[tuple[Draft, bool]]:
        """Return what can be recorded within a second; what is not reached then is left out.

        Args:
            pause: Waits for so many seconds.
        """
        drafts = self.drain()
        for _ in range(LOOKS):
            if not self._drafts:
                break
            pause(PAUSE_SECONDS)
            drafts += self.drain()
        with self._guard:
            self._drafts.clear()
        return drafts
