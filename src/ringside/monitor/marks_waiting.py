"""Steps whose device has not come so far yet, in order."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from ringside.monitor.step_draft import Draft

KEPT = 1024
"""Steps that wait at most; then the oldest go."""

LOOKS, PAUSE_SECONDS = 100, 0.01
"""How often it is looked once more at the end of a run, and after how long each time."""

_log = logging.getLogger("ringside")


class Waiting:
    """Drafts with marks that may not be reached yet; one thread adds, another takes.

    A step that is overtaken by the next one will never be told: it is left out, which is said once. So is, without a
    word, one that lacks a mark.
    """

    def __init__(self) -> None:
        self._drafts: deque[tuple[Draft, bool]] = deque(maxlen=KEPT)
        self._guard = threading.Lock()
        self._said = False

    def add(self, draft: Draft, recorded: bool) -> None:
        """Have a draft wait.

        Args:
            draft: It has marks.
            recorded: Whether it is part of the run; given back with it.
        """
        with self._guard:
            self._drafts.append((draft, recorded))

    def take(self) -> list[tuple[Draft, bool]]:
        """Return the drafts that can be told by now, oldest first."""
        with self._guard:
            drafts = list(self._drafts)
        # The newest first: the device goes on while it is asked, and would seem to have passed over older ones.
        ready = [number for number in reversed(range(len(drafts))) if drafts[number][0].settled()][::-1]
        if not ready:
            return []
        gone = drafts[: ready[-1] + 1]
        self._forget(gone)
        overtaken = sum(not draft.lost for draft, _ in gone) - len(ready)
        if overtaken:
            self._say_overtaken(overtaken)
        return [drafts[number] for number in ready]

    def take_last(self, pause: Callable[[float], object]) -> list[tuple[Draft, bool]]:
        """Return what can be told within a second; what is not reached then is left out.

        Args:
            pause: Waits for so many seconds.
        """
        told = self.take()
        for _ in range(LOOKS):
            if not self._drafts:
                break
            pause(PAUSE_SECONDS)
            told += self.take()
        with self._guard:
            self._drafts.clear()
        return told

    def _forget(self, drafts: list[tuple[Draft, bool]]) -> None:
        numbers = {id(draft) for draft, _ in drafts}
        with self._guard:
            while self._drafts and id(self._drafts[0][0]) in numbers:  # the oldest may have gone meanwhile
                self._drafts.popleft()

    def _say_overtaken(self, steps: int) -> None:
        level = logging.DEBUG if self._said else logging.WARNING
        self._said = True
        _log.log(
            level,
            "%d steps are not recorded: the device has gone past the end of a later one and not of these; training "
            "goes on",
            steps,
        )
