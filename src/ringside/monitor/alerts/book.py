"""Alerts: which verdicts are firing, each sent once, and resolved when its cause has ended. Pure, with injected clocks.

The book takes in the collector's events. A `verdict` opens an alert, a `repaired` closes it: the detector saw the
rank's own time come back to the others'. A hang is over when steps complete again. Whatever else is open is resolved
when the run ends, except for what ended it.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable

import msgspec

from ringside.decoding import UNDECODABLE
from ringside.monitor.run.directory import Event
from ringside.monitor.verdict import KINDS, OWN_TIME_KINDS, Verdict, headline, onset

Clock = Callable[[], float]
Subject = tuple[str, tuple[int, ...]]

FIRING, RESOLVED = "firing", "resolved"
REPAIRED, PROGRESS, RUN_ENDED = "repaired", "progress", "run_ended"
"""Why an alert was resolved: the excess is gone, steps complete again, the run ended first."""

KEEP_FIRING_S = 10.0
"""A cause that comes back within this time goes on as the same alert: a rank that flaps is one alert."""

MOST_FIRING = 64
"""More alerts than this at the same time are counted and not sent: they have one cause, which has been sent."""

FATAL_KINDS = frozenset({"dead_rank", "hang", "mismatch", "diverged"})
"""The job stands or is wrong. The end of the run does not resolve these: it may well be their consequence."""

MOST_UNIX = 1e11
"""Wall-clock seconds of the year 5138: what is beyond, or no number, is damage, and dated now."""

MINOR_KINDS = frozenset({"communication_bound", "small_collectives", "stage_imbalance"})
"""No rank is at fault."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """What hooks receive, as JSON; new fields may come, those that exist keep their meaning.

    Args:
        schema: 1.
        status: `firing` or `resolved`.
        fingerprint: The same for the firing and the resolved message of one alert, and different for another alert.
        severity: `critical`, `warning` or `info`.
        text: One sentence for people.
        run: The run's name.
        run_dir: Its directory, on rank 0's host.
        kind: The verdict's kind.
        ranks: The verdict's ranks.
        started_unix: When it began to fire, seconds since 1970.
        ended_unix: When its cause ended; None while it fires.
        reason: Why it is resolved: `repaired`, `progress` or `run_ended`; empty while it fires.
        runbook: The place in the documentation with what to do.
        verdict: The whole verdict; when resolved, with its final price.
    """

    schema: int = 1
    status: str
    fingerprint: str
    severity: str
    text: str
    run: str
    run_dir: str
    kind: str
    ranks: list[int]
    started_unix: float
    ended_unix: float | None = None
    reason: str = ""
    runbook: str
    verdict: Verdict


class AlertBook:
    """Which alerts are firing in one run; memory is bounded by `MOST_FIRING`.

    Args:
        run: The run's name.
        run_dir: Its directory.
        now: Monotonic seconds.
        wall: Seconds since 1970, where an event has no usable time.
        keep_firing_s: How long a resolved alert is held back.

    Attributes:
        opened: How many alerts there were so far, by kind.
        suppressed: Alerts beyond `MOST_FIRING` at a time.
    """

    def __init__(
        self,
        run: str,
        run_dir: str = "",
        *,
        now: Clock = time.monotonic,
        wall: Clock = time.time,
        keep_firing_s: float = KEEP_FIRING_S,
    ) -> None:
        self.opened: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self.suppressed = 0
        self._run, self._run_dir = as_text(run), as_text(run_dir)
        self._now, self._wall, self._keep_firing_s = now, wall, keep_firing_s
        self._firing: dict[Subject, Alert] = {}
        # Resolved alerts that are held back, as they may fire again, and when each is sent.
        self._ending: dict[Subject, tuple[float, Alert]] = {}
        self._newest: int | None = None
        self._stood_at: dict[Subject, int | None] = {}

    @property
    def active(self) -> list[Alert]:
        """The alerts whose cause has not ended, oldest first."""
        return list(self._firing.values())

    def record(self, event: Event) -> list[Alert]:
        """Take in one of the collector's events; return what is to be sent because of it."""
        unix = event.get("unix")
        unix = unix if isinstance(unix, int | float) and 0 < unix < MOST_UNIX else self._wall()
        if event.get("kind") == "ended":
            return self.close(unix)
        if event.get("kind") not in ("verdict", "repaired"):
            return []
        try:
            verdict = msgspec.convert(event.get("verdict"), Verdict)
        except UNDECODABLE:
            return []
        # Two verdicts on one subject are one alert; three kinds are about one subject, a rank's own time.
        subject = "own_time" if verdict.kind in OWN_TIME_KINDS else verdict.kind, tuple(verdict.ranks)
        if event["kind"] == "verdict":
            return self._open(verdict, subject, unix)
        if subject in self._firing:
            self._end(subject, verdict, REPAIRED, unix)
        return []  # a resolved alert is held back: it is returned by `tick`, or goes on firing

    def tick(self, newest: int | None) -> list[Alert]:
        """Return the resolved alerts that are due by now.

        Args:
            newest: The newest completed training step; None before the first.
        """
        self._newest = newest
        # A hang has no `repaired` where its watcher died: it is over once a later step is complete.
        for subject, stood_at in list(self._stood_at.items()):
            if newest is not None and (stood_at is None or newest > stood_at):
                self._end(subject, self._firing[subject].verdict, PROGRESS, self._wall())
        due = [subject for subject, (sent_at, _) in self._ending.items() if self._now() >= sent_at]
        return [self._ending.pop(subject)[1] for subject in due]

    def close(self, unix: float | None = None) -> list[Alert]:
        """The run has ended, now or at `unix`: return the resolved alerts, those held back among them."""
        for subject, alert in list(self._firing.items()):
            if alert.kind not in FATAL_KINDS:
                self._end(subject, alert.verdict, RUN_ENDED, unix or self._wall())
        ended = [alert for _, alert in self._ending.values()]
        self._ending.clear()
        return ended

    def _open(self, verdict: Verdict, subject: Subject, unix: float) -> list[Alert]:
        """Begin an alert and return it; return nothing where one on this subject fires already or may fire again."""
        # One that is held back has not been sent as resolved: it goes on with its start and its fingerprint.
        _, earlier = self._ending.pop(subject, (0.0, self._firing.get(subject)))
        if earlier is None:
            self.opened[verdict.kind] += 1
            if len(self._firing) + len(self._ending) >= MOST_FIRING:
                self.suppressed += 1
                return []
        identity = f"{self._run}|{self._run_dir}|{subject}|{verdict.detected_step}"
        severity = "critical" if verdict.kind in FATAL_KINDS else "info" if verdict.kind in MINOR_KINDS else "warning"
        alert = self._firing[subject] = Alert(
            status=FIRING,
            fingerprint=earlier.fingerprint if earlier else hashlib.sha256(identity.encode()).hexdigest()[:16],
            severity=severity,
            text=_text(verdict),
            run=self._run,
            run_dir=self._run_dir,
            kind=verdict.kind,
            ranks=verdict.ranks,
            started_unix=earlier.started_unix if earlier else unix,
            runbook=earlier.runbook if earlier else f"docs/verdicts.md#{verdict.kind}",
            verdict=verdict,
        )
        if verdict.kind == "hang":
            self._stood_at[subject] = self._newest
        return [] if earlier else [alert]

    def _end(self, subject: Subject, verdict: Verdict, reason: str, unix: float) -> None:
        alert = self._firing.pop(subject)
        self._stood_at.pop(subject, None)
        ended = msgspec.structs.replace(
            alert,
            status=RESOLVED,
            text=f"Over: {_text(verdict)}" if reason != RUN_ENDED else f"The run ended: {_text(verdict)}",
            ended_unix=unix,
            reason=reason,
            verdict=verdict,
        )
        self._ending[subject] = self._now() + self._keep_firing_s, ended


def as_text(name: str) -> str:
    """Return text that can be written as UTF-8: a file name may hold bytes that are none."""
    return name.encode("utf-8", "backslashreplace").decode()


def _text(verdict: Verdict) -> str:
    since = f" {onset(verdict)}" if verdict.since_step >= 0 else ""
    return f"{headline(verdict)}{since}" + (f": {verdict.cause}" if verdict.cause else "")
