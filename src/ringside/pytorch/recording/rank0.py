"""Rank 0's part of a session: everybody's records come in; verdicts, alerts and the run directory come of them."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ringside.monitor.alerts.book import as_text
from ringside.monitor.alerts.counters import MetricsSnapshot
from ringside.monitor.alerts.live import AlertService, Server
from ringside.monitor.alerts.settings import Endpoint
from ringside.monitor.collector import StepCollector
from ringside.monitor.run.directory import Event, RunWriter
from ringside.monitor.run.records import RunInfo, StepRecord
from ringside.monitor.run.registry import register, unregister
from ringside.monitor.summary import finish_run
from ringside.monitor.verdict import Verdict
from ringside.monitor.watchers import standard_watchers
from ringside.pytorch.hang_watch import watch
from ringside.pytorch.isolation import Guard
from ringside.pytorch.recording.parameter_digests import DigestComparison
from ringside.pytorch.recording.record_transport import RecordReceiver

READY = "chief"
"""The store holds this key once there is somebody who takes records in."""

_log = logging.getLogger("ringside")


class Rank0Recorder:
    """Rank 0's part: collects everybody's records, listens for verdicts, writes the run.

    `fetch`, `take`, `compare` and `finish` belong to the monitor's thread.

    Args:
        store: The session's part of the job's store.
        info: What is known of the run; its name is set here.
        run_dir: Where to write; None: `RINGSIDE_RUN_DIR`, else a new directory under `runs/`.

    Attributes:
        path: The run directory.
        collector: Brings the steps of all ranks together, and has them judged.
        listeners: Called with every new verdict.
        comparisons: Models whose parameters are compared.
        closed: Whether the end of the run has been written.
    """

    def __init__(self, store: Store, info: RunInfo, run_dir: str | os.PathLike[str] | None) -> None:
        self.path = run_directory(run_dir)
        self.listeners: list[Callable[[Verdict], None]] = []
        self.comparisons: list[DigestComparison] = []
        self._inbox = RecordReceiver(store, info.world_size)
        self._hangs: dict[tuple[str, tuple[int, ...], int], Verdict] = {}
        info = msgspec.structs.replace(info, name=as_text(self.path.name))
        self._writer = RunWriter(self.path, info)
        self._entry = register(self.path, info.world_size, info.started_unix)
        self._alarm = AlertService(info, self.path, serve=_serve_metrics)
        watchers = standard_watchers(info.world_size, info.hosts)
        listeners = [self._hear, self._alarm.record]
        self.collector = StepCollector(info.world_size, self._writer, watchers=watchers, listeners=listeners)
        self.collector.note("started", **({"metrics": self._alarm.url} if self._alarm.url else {}))
        self._guard = threading.RLock()
        self._news: deque[Verdict] = deque()
        self._fuse = Guard("watching this job")
        self.closed = False
        store.set(READY, "1")

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts so far, with their prices so far."""
        with self._guard:
            return [*self.collector.verdicts, *self._hangs.values()]

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        """Put an event into the run."""
        with self._guard:
            self.collector.note(kind, **fields)
        self._spread()

    def tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Take in what the hang watch and the comparison of parameters tell."""
        if kind in ("verdict", "repaired"):
            verdict = msgspec.convert(fields["verdict"], Verdict)
            with self._guard:
                self._hangs[verdict.kind, tuple(verdict.ranks), verdict.detected_step] = verdict
        self.note(kind, fields)

    def fetch(self) -> list[StepRecord]:
        """Return the records that have arrived, from the store."""
        return self._inbox.poll()

    def take(self, records: list[StepRecord]) -> None:
        """Take in records; should that fail they are fetched as before, so that the store does not fill up."""
        with self._guard:
            if not self.closed:
                self._fuse.run(self._take, records)
        self._spread()

    def _take(self, records: list[StepRecord]) -> None:
        self.collector.add(records)
        self._alarm.tick(records, self.collector)

    def compare(self) -> None:
        """Tell of replicas that have drifted apart, or are the same again."""
        for comparison in list(self.comparisons):
            try:
                changes = comparison.changes()
            except dist.DistError:
                raise  # the store is gone, and not only for this
            except Exception as error:
                changes = []
                comparison.digests.give_up(error)
            for change in changes:
                verdict = msgspec.to_builtins(change.verdict)
                self.tell(change.kind, {"step": change.verdict.detected_step, "verdict": verdict})
            if comparison.digests.off:
                self.comparisons.remove(comparison)

    def finish(self, patience_s: float, asking: Callable[[], AbstractContextManager[None]]) -> None:
        """Collect until every rank has said that it is done, or for a few seconds; then write the end.

        Args:
            patience_s: How long to wait for the others.
            asking: Entered whenever the store is asked.
        """
        deadline = time.monotonic() + patience_s
        try:
            while self._inbox.open and time.monotonic() < deadline:
                with asking():
                    records = self.fetch()
                self.take(records)
                with asking():
                    self.compare()
                time.sleep(0.01)  # the store has no way to wait for one of several keys
        finally:
            self.close()

    def close(self) -> None:
        """Write the end of the run, its summary and its report, as far as the disk allows; once."""
        with self._guard:
            if self.closed:
                return
            self.closed = True
            self._fuse.run(self.collector.close)
        self._spread()
        try:
            self.write_end()
        finally:
            unregister(self._entry)
            self._alarm.close()

    def write_end(self) -> None:
        """Write the summary and the report."""
        if self._writer.off:
            return
        from ringside.view.html.run_report import render_report  # at the end only: no training step pays for it

        try:
            finish_run(self.path, render_report)
        except Exception as error:
            _log.warning("the summary of %s could not be written: %s", self.path, error)

    def _hear(self, event: Event) -> None:
        if event["kind"] != "verdict":
            return
        verdict = msgspec.convert(event["verdict"], Verdict)
        if "RINGSIDE_LAUNCHED" not in os.environ:  # the launcher prints verdicts itself
            _log.warning("%s", watch.sentence(verdict))
        self._news.append(verdict)

    def _spread(self) -> None:
        """Tell the listeners, with nothing locked: they may wait for a thread that asks for the verdicts."""
        with contextlib.suppress(IndexError):  # another thread was quicker
            while self._news:
                self._tell_all(self._news.popleft())

    def _tell_all(self, verdict: Verdict) -> None:
        for listener in list(self.listeners):
            try:
                listener(verdict)
            except Exception:
                self.listeners.remove(listener)
                _log.exception("a listener for verdicts raised and will not be called again")


def _serve_metrics(endpoint: Endpoint, snapshot: Callable[[], MetricsSnapshot]) -> Server:
    # Imported only where metrics are requested: prometheus_client is an extra.
    from ringside.view.export.prometheus import MetricsServer, render

    return MetricsServer(endpoint, lambda accept: render(snapshot(), accept))


def run_directory(given: str | os.PathLike[str] | None) -> Path:
    """Return where a run is to be written: as given, else `RINGSIDE_RUN_DIR`, else a new one under `runs/`."""
    asked = given or os.environ.get("RINGSIDE_RUN_DIR")
    if asked:
        return Path(asked)
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
