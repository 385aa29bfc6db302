"""Alerts: which verdicts are firing, each told once, and resolved when its cause has ended. Pure, with injected clocks.

The book hears the collector's events. A `verdict` opens an alert, a `repaired` closes it: the detector saw the rank's
own time come back to the others'. A hang is over when steps complete again. Whatever else is open is resolved when
the run ends, except for what ended it.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from ringside.decoding import UNDECODABLE
from ringside.monitor.run.directory import Event
from ringside.monitor.verdict import KINDS, Verdict, headline

Clock = Callable[[], float]
Subject = tuple[str, tuple[int, ...]]

FIRING, RESOLVED = "firing", "resolved"
REPAIRED, PROGRESS, RUN_ENDED = "repaired", "progress", "run_ended"
"""Why an alert was resolved: the excess is gone, steps complete again, the run ended first."""

KEEP_FIRING_S = 10.0
"""A cause that comes back within this time goes on as the same alert: nobody is told twice by a rank that flaps."""

MOST_FIRING = 64
"""More alerts than this at the same time are counted and not told: they have one cause, and it is told already."""

OWN_TIME_KINDS = frozenset({"slow_rank", "uneven_work", "input_bound"})
"""Three names for one thing, a rank's own time: whoever is told one of them is not told the next as well."""

STANDSTILLS = frozenset({"hang"})
FATAL_KINDS = frozenset({"dead_rank", "hang", "mismatch", "diverged"})
"""The end of the run does not resolve these: it may well be their consequence."""

MOST_UNIX = 1e11
"""Wall-clock seconds of the year 5138: what is beyond, or no number, is damage, and told as of now."""

MINOR_KINDS = frozenset({"communication_bound", "small_collectives"})


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """What hooks are told, as JSON; new fields may come, those that exist keep their meaning.

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
        runbook: Where in the documentation it says what to do.
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


class Ending(NamedTuple):
    """A resolved alert that is held back for a while, as it may fire again.

    Args:
        due: When it is told, on the monotonic clock.
        alert: What is told then.
    """

    due: float
    alert: Alert


class AlertBook:
    """Which alerts are firing in one run; memory is bounded by `MOST_FIRING`.

    Args:
        run: The run's name.
        run_dir: Its directory.
        now: Monotonic seconds.
        wall: Seconds since 1970, where an event does not say.
        keep_firing_s: How long a resolved alert is held back.

    Attributes:
        opened: How many alerts there were so far, by kind.
        untold: Alerts beyond `MOST_FIRING` at a time.
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
        self.untold = 0
        self._run, self._run_dir = as_text(run), as_text(run_dir)
        self._now, self._wall, self._keep_firing_s = now, wall, keep_firing_s
        self._firing: dict[Subject, Alert] = {}
        self._ending: dict[Subject, Ending] = {}
        self._newest: int | None = None
        self._stood_at: dict[Subject, int | None] = {}

    @property
    def active(self) -> list[Alert]:
        """The alerts whose cause has not ended, oldest first."""
        return list(self._firing.values())

    def hear(self, event: Event) -> list[Alert]:
        """Take in one of the collector's events; return what is to be told because of it."""
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
        return self._open(verdict, unix) if event["kind"] == "verdict" else self._settle(verdict, unix)

    def tick(self, newest: int | None) -> list[Alert]:
        """Return the resolved alerts that are due by now.

        Args:
            newest: The newest completed training step; None before the first.
        """
        self._newest = newest
        for subject, stood_at in list(self._stood_at.items()):
            if newest is not None and (stood_at is None or newest > stood_at):
                self._end(subject, self._firing[subject].verdict, PROGRESS, self._wall())
        due = [subject for subject, ending in self._ending.items() if self._now() >= ending.due]
        return [self._ending.pop(subject).alert for subject in due]

    def close(self, unix: float | None = None) -> list[Alert]:
        """The run has ended, now or at `unix`: return the resolved alerts, those held back among them."""
        for subject, alert in list(self._firing.items()):
            if alert.kind not in FATAL_KINDS:
                self._end(subject, alert.verdict, RUN_ENDED, unix or self._wall())
        told = [ending.alert for ending in self._ending.values()]
        self._ending.clear()
        return told

    def _open(self, verdict: Verdict, unix: float) -> list[Alert]:
        subject = subject_of(verdict)
        if (earlier := self._again(subject)) is not None:
            self._firing[subject] = msgspec.structs.replace(
                earlier, kind=verdict.kind, severity=severity_of(verdict.kind), text=_text(verdict), verdict=verdict
            )
            self._note_standstill(verdict, subject)
            return []
        self.opened[verdict.kind] += 1
        if len(self._firing) + len(self._ending) >= MOST_FIRING:
            self.untold += 1
            return []
        alert = self._firing[subject] = self._alert(verdict, unix)
        self._note_standstill(verdict, subject)
        return [alert]

    def _note_standstill(self, verdict: Verdict, subject: Subject) -> None:
        if verdict.kind in STANDSTILLS:
            self._stood_at[subject] = self._newest

    def _again(self, subject: Subject) -> Alert | None:
        """Return the alert that fires already, or would have been resolved soon."""
        ending = self._ending.pop(subject, None)
        if ending is None:
            return self._firing.get(subject)
        return msgspec.structs.replace(ending.alert, status=FIRING, ended_unix=None, reason="")

    def _settle(self, verdict: Verdict, unix: float) -> list[Alert]:
        if (subject := subject_of(verdict)) in self._firing:
            self._end(subject, verdict, REPAIRED, unix)
        return []

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
        self._ending[subject] = Ending(self._now() + self._keep_firing_s, ended)

    def _alert(self, verdict: Verdict, unix: float) -> Alert:
        words = f"{self._run}|{self._run_dir}|{subject_of(verdict)}|{verdict.detected_step}"
        return Alert(
            status=FIRING,
            fingerprint=hashlib.sha256(words.encode()).hexdigest()[:16],
            severity=severity_of(verdict.kind),
            text=_text(verdict),
            run=self._run,
            run_dir=self._run_dir,
            kind=verdict.kind,
            ranks=verdict.ranks,
            started_unix=unix,
            runbook=f"docs/verdicts.md#{verdict.kind}",
            verdict=verdict,
        )


def subject_of(verdict: Verdict) -> Subject:
    """Return what a verdict is about; two verdicts on one subject are one alert."""
    return "own_time" if verdict.kind in OWN_TIME_KINDS else verdict.kind, tuple(verdict.ranks)


def severity_of(kind: str) -> str:
    """Return `critical` where the job stands or is wrong, `info` where no rank is at fault, else `warning`."""
    return "critical" if kind in FATAL_KINDS else "info" if kind in MINOR_KINDS else "warning"


def as_text(words: str) -> str:
    """Return text that can be written as UTF-8: a file name may hold bytes that are none."""
    return words.encode("utf-8", "backslashreplace").decode()


def _text(verdict: Verdict) -> str:
    since = f" since step {verdict.since_step}" if verdict.since_step >= 0 else ""
    return f"{headline(verdict)}{since}" + (f": {verdict.cause}" if verdict.cause else "")
