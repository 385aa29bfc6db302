"""Carries alerts to a hook on a thread of its own, from a queue that does not grow: nobody waits for a hook."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

from ringside.monitor.alerts import Alert
from ringside.monitor.notify import DeliveryError, Hook

MOST_WAITING = 64
PAUSES_S = (1.0, 4.0)
"""Before the second and the third try."""

DELIVERED, FAILED, DROPPED = "delivered", "failed", "dropped"

_log = logging.getLogger("ringside")


class Courier:
    """Delivers alerts to one hook, in order; whatever goes wrong is said once.

    Args:
        hook: Who is told.
        most_waiting: Alerts that may wait; beyond it the oldest is dropped.
        pauses_s: How long to wait before each further try.

    Attributes:
        hook: Who is told.
        counts: How many alerts were delivered, failed or were dropped.
    """

    def __init__(self, hook: Hook, *, most_waiting: int = MOST_WAITING, pauses_s: Sequence[float] = PAUSES_S) -> None:
        self.hook = hook
        self.counts: Counter[str] = Counter({DELIVERED: 0, FAILED: 0, DROPPED: 0})
        self._most, self._pauses_s = most_waiting, pauses_s
        self._waiting: deque[Alert] = deque()
        self._change = threading.Condition()
        self._busy = self._said = self._closing = False
        self._thread = threading.Thread(target=self._run, name="ringside-notify", daemon=True)
        self._thread.start()

    def offer(self, alert: Alert) -> None:
        """Have an alert delivered soon; returns at once."""
        with self._change:
            if len(self._waiting) >= self._most:
                self._waiting.popleft()
                self.counts[DROPPED] += 1
                self._say("too many alerts wait for it, the oldest are dropped")
            self._waiting.append(alert)
            self._change.notify_all()

    def close(self, patience_s: float) -> None:
        """Wait until everything is delivered, at most so long; what is left then is dropped."""
        deadline = time.monotonic() + patience_s
        with self._change:
            self._closing = True
            self._change.notify_all()
            done = self._change.wait_for(lambda: not self._waiting and not self._busy, patience_s)
            if not done:
                self.counts[DROPPED] += len(self._waiting)
                self._waiting.clear()
                self._say("it was not told of everything before the run ended")
        if not done:
            self.hook.cancel()
        self._thread.join(max(deadline - time.monotonic(), 0.5))

    def _run(self) -> None:
        while (alert := self._take()) is not None:
            outcome = self._deliver(alert)
            with self._change:
                self.counts[outcome] += 1
                self._busy = False
                self._change.notify_all()

    def _take(self) -> Alert | None:
        with self._change:
            self._change.wait_for(lambda: self._waiting or self._closing)
            self._busy = bool(self._waiting)
            return self._waiting.popleft() if self._waiting else None

    def _deliver(self, alert: Alert) -> str:
        for pause in (*self._pauses_s, None):
            try:
                self.hook.deliver(alert)
                return DELIVERED
            except DeliveryError as error:
                if pause is None or not error.again or self._pause(pause):
                    self._say(str(error))
                    return FAILED
            except Exception as error:
                self._say(f"{type(error).__name__}: {error}")
                return FAILED
        return FAILED

    def _pause(self, seconds: float) -> bool:
        """Wait before the next try; tell whether the run has ended meanwhile."""
        with self._change:
            return self._change.wait_for(lambda: self._closing, seconds)

    def _say(self, why: str) -> None:
        level = logging.DEBUG if self._said else logging.WARNING
        self._said = True
        _log.log(level, "%s could not be told of a verdict (%s); training goes on", self.hook.name, why)
