"""Alerts of a run that is going on, on rank 0: notifies hooks, serves metrics, and never stops training."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from ringside.errors import RingsideError, UsageError
from ringside.isolation import Guard
from ringside.monitor.alerts.book import FATAL_KINDS, Alert, AlertBook
from ringside.monitor.alerts.counters import MetricCounters, MetricsSnapshot
from ringside.monitor.alerts.hooks import Hook, HookQueue, parse_hooks
from ringside.monitor.collector import StepCollector
from ringside.monitor.run.directory import Event, RunReader
from ringside.monitor.run.records import RunInfo, StepRecord

# -------------------------------------------------------------------------------------------------
# What the user requested: which hooks to notify of verdicts, and where to serve metrics.

ON_VERDICT, METRICS_PORT, METRICS_TOKEN = "RINGSIDE_ON_VERDICT", "RINGSIDE_METRICS_PORT", "RINGSIDE_METRICS_TOKEN"


class Endpoint(NamedTuple):
    """Where `/metrics` is served.

    Args:
        host: A numeric address of this host.
        port: 0 for any that is free.
        token: Requests must send it as `Authorization: Bearer ...`; empty: none need.
    """

    host: str
    port: int
    token: str = ""

    @classmethod
    def parse(cls, text: str, token: str = "") -> Endpoint:
        """Return where to serve: `9464` (this host alone can ask), `10.0.0.5:9464`, `0.0.0.0:9464`, `[::]:9464`.

        Raises:
            UsageError: It cannot be read, or others could ask and there is no token.
        """
        host, _, port = text.strip().rpartition(":")
        try:
            address = ipaddress.ip_address(host.strip("[]") or "127.0.0.1")
            number = int(port)
        except ValueError:
            raise UsageError(
                f"--metrics-port takes a port or ADDRESS:PORT with a numeric address, such as 9464 or 10.0.0.5:9464, "
                f"not {text!r}"
            ) from None
        if not 0 <= number <= 65535:
            raise UsageError(f"there is no port {number}: --metrics-port takes 0 (any that is free) to 65535")
        if not address.is_loopback and not token:
            raise UsageError(
                f"metrics at {address} could be read by others: set {METRICS_TOKEN} and have Prometheus send it "
                "(authorization: credentials), or give the port alone to serve this host only"
            )
        return cls(str(address), number, token)


@dataclass(frozen=True)
class AlertSettings:
    """What was requested.

    Args:
        hooks: What to notify of verdicts.
        endpoint: Where to serve metrics; None: nowhere.
    """

    hooks: tuple[Hook, ...] = ()
    endpoint: Endpoint | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> AlertSettings:
        """Return what RINGSIDE_ON_VERDICT, RINGSIDE_METRICS_PORT and RINGSIDE_METRICS_TOKEN request.

        Raises:
            UsageError: One of them cannot be.
        """
        hooks, port = environ.get(ON_VERDICT, ""), environ.get(METRICS_PORT, "")
        return cls(
            tuple(parse_hooks(hooks)) if hooks.strip() else (),
            Endpoint.parse(port, environ.get(METRICS_TOKEN, "")) if port.strip() else None,
        )


# -------------------------------------------------------------------------------------------------
# Alerts of a run that is going on.

PATIENCE_S = 3.0
"""How long the end of a run waits for hooks."""

_log = logging.getLogger(__name__)


class Server(Protocol):
    """A metrics server: where it listens, and how it is stopped."""

    url: str

    def close(self) -> None:
        """Stop serving."""


Serve = Callable[[Endpoint, Callable[[], MetricsSnapshot]], Server]
"""Starts a metrics server that renders the snapshot it is given; ImportError: what it needs is not installed."""


class AlertService:
    """Everything that alerts need in a running job; without hooks and metrics it does nothing.

    No method raises: what goes wrong is logged once.

    Args:
        info: What was known when the run began.
        run_dir: The run directory.
        settings: What was requested; by default what the environment requests.
        serve: Starts the metrics server; None: no metrics are served.

    Attributes:
        off: Whether it is closed, or never had anything to do.
        url: Where metrics are served; empty where they are not.
    """

    def __init__(
        self, info: RunInfo, run_dir: Path, settings: AlertSettings | None = None, *, serve: Serve | None = None
    ) -> None:
        settings = _settings_of(os.environ) if settings is None else settings
        self.off = not settings.hooks and settings.endpoint is None
        self._guard = Guard(warning="alerts stopped")
        self._lock = threading.Lock()
        self._queues = [HookQueue(hook) for hook in settings.hooks]
        self._book = AlertBook(info.name, str(run_dir.absolute()))
        self._counters = MetricCounters(info)
        self._server: Server | None = None
        endpoint = settings.endpoint
        if endpoint is not None and serve is not None:
            try:
                self._server = serve(endpoint, self.snapshot)
            except ImportError:
                _log.warning(
                    "no metrics: prometheus_client is missing, pip install 'torch-ringside[metrics]'; training goes on"
                )
            except (OSError, RingsideError) as error:
                _log.warning(
                    "no metrics: port %d at %s is not available (%s); give another --metrics-port, or 0 for any that "
                    "is free; training goes on",
                    endpoint.port,
                    endpoint.host,
                    getattr(error, "strerror", None) or error,
                )
        self.url = "" if self._server is None else self._server.url

    def record(self, event: Event) -> None:
        """Take in one of the collector's events."""
        if self.off or self._guard.tripped:
            return
        with self._guard:
            with self._lock:
                alerts = self._book.record(event)
            self._offer(alerts)
            if event.get("kind") == "repaired":
                self._counters.add_final_cost(float((event.get("verdict") or {}).get("cost_rank_seconds") or 0.0))

    def tick(self, records: Sequence[StepRecord], collector: StepCollector) -> None:
        """Take in a batch of records after the collector has; call it several times a second."""
        if self.off or self._guard.tripped:
            return
        with self._guard:
            with self._lock:
                alerts = self._book.tick(collector.newest)
            self._offer(alerts)
            if self._server is not None:
                self._counters.add(records, collector)

    def close(self) -> None:
        """Stop serving, and deliver what is still queued, for as long as a few seconds."""
        self.off = True
        if self._server is not None:
            self._server.close()
        # One deadline for all hooks: a slow one leaves the next less time, and the run ends within PATIENCE_S.
        deadline = time.monotonic() + PATIENCE_S
        for queue in self._queues:
            queue.close(max(deadline - time.monotonic(), 0.0))

    def snapshot(self) -> MetricsSnapshot:
        """Return what metrics show; called on the server's threads."""
        notifications: Counter[tuple[str, str]] = Counter()
        for queue in self._queues:
            notifications.update({(queue.hook.label, outcome): count for outcome, count in list(queue.counts.items())})
        with self._lock:
            active, opened = self._book.active, dict(self._book.opened)
        return self._counters.snapshot(active, opened, dict(notifications))

    def _offer(self, alerts: Sequence[Alert]) -> None:
        for alert in alerts:
            for queue in self._queues:
                queue.offer(alert)


@contextlib.contextmanager
def notify_afterwards(hooks: Sequence[Hook], run_dir: Path) -> Iterator[None]:
    """Notify hooks of what ranks that died could not: of their death, and of what they left open.

    Inside, the launcher writes the end of the run; no error of a delivery leaves this.

    Args:
        hooks: What to notify.
        run_dir: The run directory, after its ranks have ended.
    """
    if not hooks:
        yield
        return
    known = _read_events(run_dir)
    yield
    new = _read_events(run_dir)[len(known) :]
    book = AlertBook(run_dir.name, str(run_dir.absolute()))
    before = [alert for event in known for alert in book.record(event)]
    alerts = [alert for event in new for alert in book.record(event)]
    if known and not any(event["kind"] == "ended" for event in known):
        # Rank 0 was cut off, maybe before it could deliver: deaths are sent again, with the same fingerprint, as twice
        # is better than never, and what it left open is resolved.
        alerts = [*(alert for alert in before if alert.kind in FATAL_KINDS), *alerts, *book.close()]
    queues = [HookQueue(hook) for hook in hooks if alerts]
    for queue in queues:
        for alert in alerts:
            queue.offer(alert)
    for queue in queues:
        queue.close(PATIENCE_S)


def _read_events(run_dir: Path) -> list[Event]:
    try:
        return RunReader(run_dir).poll_events()
    except RingsideError:
        return []


def _settings_of(environ: Mapping[str, str]) -> AlertSettings:
    """Return what the environment requests; a part that cannot be is logged, and the rest holds."""
    settings = AlertSettings()
    for names in ((ON_VERDICT,), (METRICS_PORT, METRICS_TOKEN)):
        try:
            part = AlertSettings.read({name: environ[name] for name in names if name in environ})
        except UsageError as error:
            _log.warning("%s is not followed: %s; training goes on", names[0], error)
        else:
            settings = AlertSettings(settings.hooks + part.hooks, settings.endpoint or part.endpoint)
    return settings
