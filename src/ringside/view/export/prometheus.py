"""A run's figures as Prometheus metrics: base units, and never more labels than a bounded number of ranks and kinds."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import io
import logging
import math
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ringside.monitor.alerts.book import as_text
from ringside.monitor.alerts.counters import RANK_FIELDS, STEP_BUCKETS_S, MetricsSnapshot
from ringside.monitor.alerts.live import Endpoint
from ringside.view.server.guard import bind, is_called, own_names
from ringside.view.tui.console import printable_lines

RANKS_SHOWN = 256
"""Up to so many ranks, each has its own series."""

WORST_SHOWN = 16
"""Of more ranks, those with the most own time over the last steps have."""

STATISTICS = {"min": 0.0, "median": 0.5, "p95": 0.95, "max": 1.0}
LABEL_CHARACTERS = 128

WHAT = {
    "own_seconds": "own work: the steps without the time blocked on others",
    "wait_seconds": "waiting for the last rank to arrive at the synchronisation",
    "exposed_seconds": "blocked in gradient synchronisation after backward had no work left",
}


Labelled = CounterMetricFamily | GaugeMetricFamily


class RunMetrics(Collector):
    """One scrape of one run.

    Args:
        figures: The aggregate as it is now.
    """

    def __init__(self, figures: MetricsSnapshot) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family, always in the same order."""
        yield from _job_metrics(self._figures)
        yield from _rank_metrics(self._figures)
        yield from _verdict_metrics(self._figures)
        yield from _monitor_metrics(self._figures)


def render(figures: MetricsSnapshot, accept: str = "") -> tuple[bytes, str]:
    """Return the page `/metrics` and its content type, in the format that the header `Accept` prefers."""
    registry = CollectorRegistry()
    registry.register(RunMetrics(figures))
    encoder, content_type = choose_encoder(accept)
    return encoder(registry), content_type


def _job_metrics(figures: MetricsSnapshot) -> Iterator[Metric]:
    info = figures.info
    labels = {
        "run": info.name,
        "engine": info.engine,
        "algorithm": info.algorithm,
        "version": info.versions.get("ringside", ""),
    }
    # Somebody else's texts as labels: of bounded length and fit for a terminal; prometheus_client escapes them.
    texts = [printable_lines(as_text(value[:LABEL_CHARACTERS])) for value in labels.values()]
    yield _labelled(GaugeMetricFamily("ringside_run_info", "The run; always 1.", labels=list(labels)), [(texts, 1)])
    yield _gauge("ringside_run_start_time_seconds", "When the run began, seconds since 1970.", info.started_unix)
    yield _gauge("ringside_ranks", "Ranks of the job.", info.world_size)
    yield _counter("ringside_steps", "Training steps completed.", figures.steps)
    edges = [*(repr(edge) for edge in STEP_BUCKETS_S), "+Inf"]
    counts = np.cumsum(figures.step_counts)
    yield HistogramMetricFamily(
        "ringside_step_seconds",
        "How long a training step took.",
        buckets=[(edge, float(count)) for edge, count in zip(edges, counts, strict=True)],
        sum_value=figures.step_sum,
    )
    yield _gauge(
        "ringside_last_step_timestamp_seconds",
        "When the newest step was completed, seconds since 1970.",
        figures.last_step_unix,
    )
    sums = figures.job_totals
    yield _counter("ringside_payload_bytes", "Gradient bytes synchronised, over all ranks.", sums["payload_bytes"])
    yield _counter("ringside_samples", "Samples (or tokens) worked on, over all ranks.", sums["samples"])


def _rank_metrics(figures: MetricsSnapshot) -> Iterator[Metric]:
    # Of many ranks those that are slowest over the last steps have series of their own.
    own = figures.rank_recent["own_seconds"]
    shown = np.arange(len(own))
    if len(own) > RANKS_SHOWN:
        shown = np.sort(np.argsort(-np.nan_to_num(own), kind="stable")[:WORST_SHOWN])
    for name in RANK_FIELDS:
        totals = figures.rank_totals[name]
        family = CounterMetricFamily(f"ringside_rank_{name}", f"A rank's seconds of {WHAT[name]}.", labels=["rank"])
        yield _labelled(family, [([str(rank)], float(totals[rank])) for rank in shown.tolist()])
    # However many ranks there are: how the last steps spread over all of them.
    for name in RANK_FIELDS:
        text = f"Seconds per step over the last steps, over all ranks: {WHAT[name]}."
        recent = figures.rank_recent[name]
        known = recent[np.isfinite(recent)]
        spread = STATISTICS.items() if known.size else ()
        yield _labelled(
            GaugeMetricFamily(f"ringside_recent_{name}", text, labels=["of"]),
            [([statistic], float(np.quantile(known, quantile))) for statistic, quantile in spread],
        )


def _verdict_metrics(figures: MetricsSnapshot) -> Iterator[Metric]:
    labels = ["kind", "rank"]
    active = GaugeMetricFamily("ringside_verdict_active", "1 while a verdict is open.", labels=labels)
    text = "How much longer the culprit's own time was than the others' when the verdict was reached; 0.12 is 12%."
    excess = GaugeMetricFamily("ringside_verdict_excess_ratio", text, labels=labels)
    # A verdict on several ranks counts for each, one on none for rank ""; of too many the largest.
    ratios: dict[tuple[str, str], float] = {}
    for alert in figures.active:
        for culprit in [str(rank) for rank in alert.ranks[:RANKS_SHOWN]] or [""]:
            ratios[alert.kind, culprit] = alert.verdict.excess_ratio
    known = {culprit: ratio if math.isfinite(ratio) else 0.0 for culprit, ratio in ratios.items()}
    largest = sorted(sorted(known.items(), key=lambda item: -item[1])[:RANKS_SHOWN])
    yield _labelled(active, [(culprit, 1) for culprit, _ in largest])
    yield _labelled(excess, largest)
    opened = CounterMetricFamily("ringside_verdicts", "Verdicts so far.", labels=["kind"])
    yield _labelled(opened, [([kind], count) for kind, count in figures.opened.items()])
    yield _counter(
        "ringside_cost_rank_seconds",
        "Rank-seconds that the job lost to the culprits of all verdicts.",
        figures.cost_rank_seconds,
    )


def _monitor_metrics(figures: MetricsSnapshot) -> Iterator[Metric]:
    sums = figures.job_totals
    yield _counter(
        "ringside_overhead_seconds", "Ringside's own bookkeeping in steps, over all ranks.", sums["overhead_seconds"]
    )
    yield _counter("ringside_rank_step_seconds", "Durations of steps, over all ranks.", sums["step_seconds"])
    yield _gauge(
        "ringside_collector_lag_seconds",
        "End of the newest completed step on rank 0 until the collector had it.",
        figures.lag_seconds,
    )
    yield _gauge("ringside_collector_lag_steps", "Newest step reported minus newest step completed.", figures.lag_steps)
    yield _counter("ringside_records", "Step records taken in.", figures.records)
    dropped = CounterMetricFamily(
        "ringside_records_dropped",
        "Step records that no analysis saw: late, of ranks that do not exist, or never come.",
        labels=["reason"],
    )
    yield _labelled(dropped, [([reason], getattr(figures, reason)) for reason in ("late", "invalid", "missing")])
    labels = ["hook", "outcome"]
    outcomes = CounterMetricFamily("ringside_notifications", "Alerts by what became of them.", labels=labels)
    yield _labelled(outcomes, sorted(figures.notifications.items()))


def _gauge(name: str, text: str, value: float) -> Metric:
    """A gauge without labels; one whose value is not known has no sample."""
    family = GaugeMetricFamily(name, text)
    if math.isfinite(value):
        family.add_metric([], value)
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _labelled(family: Labelled, samples: Iterable[tuple[Sequence[str], float]]) -> Metric:
    """Return a family with samples added to it: values of its labels, and a figure."""
    for values, figure in samples:
        family.add_metric(values, figure)
    return family


# -------------------------------------------------------------------------------------------------
# `/metrics` over HTTP: one page for whoever may read it, on one thread; slow readers make place for others.

PLACES = 128
"""Connections of which the request is not there yet, and as many to which a page is on its way."""
AT_ONCE = 32
"""Connections taken in at a time: too few for those that come together with Prometheus to take its place."""
QUEUE = 1024
"""Connections that wait to be taken in."""
READER_S = 10.0
"""From the connection to the last byte of the answer: as long as Prometheus waits by default."""
MOST_HEAD_BYTES = 16 << 10

Render = Callable[[str], tuple[bytes, str]]
"""From the value of the header `Accept` to a page and its content type."""

_log = logging.getLogger(__name__)


class MetricsServer:
    """Serves `/metrics` until it is closed.

    A reader has `reader_s` for all of it. Where there is no place left, the one that has held its place longest is hung
    up on: a request that comes whole is answered, whoever else holds connections open.

    Args:
        endpoint: Where, and what to ask of readers.
        render: Makes the page.
        reader_s: What one reader may take in all, in seconds.

    Attributes:
        url: Where the page is.

    Raises:
        OSError: The address cannot be had.
    """

    def __init__(self, endpoint: Endpoint, render: Render, *, reader_s: float = READER_S) -> None:
        listening = bind(endpoint.host, endpoint.port, QUEUE)
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        self.url = f"http://{host}:{listening.getsockname()[1]}/metrics"
        self._render, self._token, self._names = render, endpoint.token, own_names()
        self._reader_s = reader_s
        self._requesting, self._reading = _Places(), _Places()
        self._loop, self._closed = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, args=(listening,), name="ringside-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closed.set)
            self._thread.join()

    def _run(self, listening: socket.socket) -> None:
        with contextlib.closing(self._loop), listening:
            self._loop.run_until_complete(self._serve(listening))

    async def _serve(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._answer, sock=listening, limit=MOST_HEAD_BYTES, backlog=AT_ONCE)
        listening.listen(QUEUE)
        await self._closed.wait()
        server.close()
        # Whoever is still connected is hung up on.
        readers = asyncio.all_tasks() - {asyncio.current_task()}
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.wait_for(self._exchange(reader, writer), self._reader_s)
        except (OSError, EOFError, asyncio.TimeoutError, asyncio.LimitOverrunError, asyncio.CancelledError):
            _log.debug("a reader of metrics was too slow or went away", exc_info=True)
        finally:
            writer.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with self._requesting.taken():
            head = await reader.readuntil(b"\r\n\r\n")
        with self._reading.taken():
            writer.transport.set_write_buffer_limits(0)  # drained: all of it is with the kernel
            writer.write(_Handler(head, self._render, self._token, self._names).answer)
            await writer.drain()


class _Places:
    """So many readers at a time; who has been here longest makes place for the next."""

    def __init__(self) -> None:
        self._here: dict[asyncio.Task[Any], None] = {}

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        # A dict keeps the order of insertion: its first key is the longest here.
        if len(self._here) >= PLACES:
            longest = next(iter(self._here))
            del self._here[longest]
            longest.cancel()
        self._here[task] = None
        try:
            yield
        finally:
            self._here.pop(task, None)


class _Handler(BaseHTTPRequestHandler):
    """The answer to one request, all of which is there."""

    server_version, sys_version = "ringside", ""

    def __init__(self, head: bytes, render: Render, token: str, names: frozenset[str]) -> None:
        self._render, self._token, self._names = render, token, names
        self.client_address = ("", 0)
        self.rfile = io.BufferedReader(io.BytesIO(head))
        self.wfile = self._written = io.BytesIO()
        self.handle()

    @property
    def answer(self) -> bytes:
        """All of it."""
        return self._written.getvalue()

    def do_GET(self) -> None:
        """Serve the page."""
        if self.path.split("?")[0] != "/metrics":
            self._answer(404, b"there is only /metrics here\n")
            return
        # A page behind which a web site points a name of its own here would not know the token.
        token = self._token
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
            self._answer(401, b"send the token: Authorization: Bearer ...\n", ("WWW-Authenticate", "Bearer"))
            return
        if not token and not all(is_called(host, self._names) for host in self.headers.get_all("Host", [])):
            self._answer(421, b"this host is not called that; give its address, localhost, or set a token\n")
            return
        try:
            page, kind = self._render(self.headers.get("Accept", ""))
        except Exception:
            _log.exception("metrics cannot be made; training goes on")
            self._answer(500, b"metrics cannot be made; see the job's log\n")
            return
        self._answer(200, page, ("Content-Type", kind))

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Readers are not logged: stderr is the job's."""

    def _answer(self, status: int, body: bytes, *headers: tuple[str, str]) -> None:
        self.send_response(status)
        for name, value in headers or (("Content-Type", "text/plain; charset=utf-8"),):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
