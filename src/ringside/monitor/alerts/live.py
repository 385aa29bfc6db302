"""Alerts of a run that is going on, on rank 0: tells hooks, serves metrics, and never stops training."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from ringside.errors import RingsideError, UsageError
from ringside.monitor.alerts.book import FATAL_KINDS, Alert, AlertBook
from ringside.monitor.alerts.counters import MetricCounters, MetricsSnapshot
from ringside.monitor.alerts.hooks import Hook, HookQueue
from ringside.monitor.alerts.settings import METRICS_PORT, METRICS_TOKEN, ON_VERDICT, AlertSettings, Endpoint
from ringside.monitor.collector import StepCollector
from ringside.monitor.run.directory import Event, RunReader
from ringside.monitor.run.records import RunInfo, StepRecord

PATIENCE_S = 3.0
"""How long the end of a run waits for hooks."""

_log = logging.getLogger("ringside")


class Server(Protocol):
    """A metrics server: where it listens, and how it is stopped."""

    url: str

    def close(self) -> None:
        """Stop serving."""


class AlertService:
    """Everything that alerts need in a running job; without hooks and metrics it does nothing.

    No method raises: what goes wrong is said once.

    Args:
        info: What was known when the run began.
        run_dir: The run directory.
        settings: What was asked for; by default what the environment says.

    Attributes:
        off: Whether it has given up, or never had anything to do.
        url: Where metrics are served; empty where they are not.
    """

    def __init__(self, info: RunInfo, run_dir: Path, settings: AlertSettings | None = None) -> None:
        settings = _settings(os.environ) if settings is None else settings
        self.off = not settings.hooks and settings.endpoint is None
        self.url = ""
        self._guard = threading.Lock()
        self._couriers = [HookQueue(hook) for hook in settings.hooks]
        self._book = AlertBook(info.name, str(run_dir.absolute()))
        self._tally = MetricCounters(info)
        self._server = None if settings.endpoint is None else _serve(settings.endpoint, self.figures)
        if self._server is not None:
            self.url = self._server.url

    def hear(self, event: Event) -> None:
        """Take in one of the collector's events."""
        self._try(lambda: self._hear(event))

    def tick(self, records: Sequence[StepRecord], collector: StepCollector) -> None:
        """Take in a batch of records after the collector has; call it several times a second."""
        self._try(lambda: self._tick(records, collector))

    def close(self) -> None:
        """End: what was not told yet is told, for as long as a few seconds."""
        self.off = True
        if self._server is not None:
            self._server.close()
        deadline = time.monotonic() + PATIENCE_S
        for courier in self._couriers:
            courier.close(max(deadline - time.monotonic(), 0.0))

    def figures(self) -> MetricsSnapshot:
        """Return what metrics show; called on the server's threads."""
        told: Counter[tuple[str, str]] = Counter()
        for courier in self._couriers:
            told.update({(courier.hook.label, outcome): count for outcome, count in list(courier.counts.items())})
        with self._guard:
            active, opened = self._book.active, dict(self._book.opened)
        return self._tally.figures(active, opened, dict(told))

    def _hear(self, event: Event) -> None:
        with self._guard:
            alerts = self._book.hear(event)
        self._tell(alerts)
        if event.get("kind") == "repaired":
            self._tally.ended(float((event.get("verdict") or {}).get("cost_rank_seconds") or 0.0))

    def _tick(self, records: Sequence[StepRecord], collector: StepCollector) -> None:
        with self._guard:
            alerts = self._book.tick(collector.newest)
        self._tell(alerts)
        if self._server is not None:
            self._tally.add(records, collector)

    def _tell(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            for courier in self._couriers:
                courier.offer(alert)

    def _try(self, act: Callable[[], None]) -> None:
        if self.off:
            return
        try:
            act()
        except Exception as error:
            self.off = True
            _log.warning("alerts stopped (%s: %s); training goes on", type(error).__name__, error)


@contextlib.contextmanager
def afterwards(hooks: Sequence[Hook], run_dir: Path) -> Iterator[None]:
    """Tell hooks what ranks that died could not: of their death, and what they left open.

    Inside, the run is concluded by whoever launched it; no error of the telling leaves this.

    Args:
        hooks: Whom to tell.
        run_dir: The run directory, after its ranks have ended.
    """
    known = _events(run_dir) if hooks else []
    yield
    alerts = _left_open(run_dir, known, _events(run_dir)[len(known) :]) if hooks else []
    couriers = [HookQueue(hook) for hook in hooks if alerts]
    for courier in couriers:
        for alert in alerts:
            courier.offer(alert)
    for courier in couriers:
        courier.close(PATIENCE_S)


def _left_open(run_dir: Path, known: Sequence[Event], new: Sequence[Event]) -> list[Alert]:
    """Return what is to be told of a run by somebody else than its rank 0.

    Where that was cut off it may have died of what it was about to tell: deaths are told again, with the same
    fingerprint, as twice is better than never.
    """
    book = AlertBook(run_dir.name, str(run_dir.absolute()))
    told = [alert for event in known for alert in book.hear(event)]
    alerts = [alert for event in new for alert in book.hear(event)]
    if not known or any(event["kind"] == "ended" for event in known):
        return alerts
    return [*(alert for alert in told if alert.kind in FATAL_KINDS), *alerts, *book.close()]


def _events(run_dir: Path) -> list[Event]:
    try:
        return RunReader(run_dir).poll_events()
    except RingsideError:
        return []


def _settings(environ: Mapping[str, str]) -> AlertSettings:
    """What the environment asks for; of what cannot be, it is said why, and the rest holds."""
    found = AlertSettings()
    for names in ((ON_VERDICT,), (METRICS_PORT, METRICS_TOKEN)):
        try:
            part = AlertSettings.read({name: environ[name] for name in names if name in environ})
        except UsageError as error:
            _log.warning("%s is not followed: %s; training goes on", names[0], error)
        else:
            found = AlertSettings(found.hooks + part.hooks, found.endpoint or part.endpoint)
    return found


def _serve(endpoint: Endpoint, figures: Callable[[], MetricsSnapshot]) -> Server | None:
    # Like the summary asks for its page: the one arrow from the monitor to a view, and only while it runs.
    try:
        from ringside.view.export.prometheus import MetricsServer, render

        return MetricsServer(endpoint, lambda accept: render(figures(), accept))
    except ImportError:
        _log.warning("no metrics: prometheus_client is missing, pip install 'ringside[metrics]'; training goes on")
    except (OSError, RingsideError) as error:
        _log.warning(
            "no metrics: port %d at %s cannot be had (%s); give another --metrics-port, or 0 for any that is free; "
            "training goes on",
            endpoint.port,
            endpoint.host,
            getattr(error, "strerror", None) or error,
        )
    return None
