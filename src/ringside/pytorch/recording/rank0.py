"""Rank 0's part of a session: takes in all ranks' records, and makes verdicts, alerts and the run directory of them."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ringside._version import __version__
from ringside.isolation import Guard, Listeners
from ringside.monitor.alerts.book import as_text
from ringside.monitor.alerts.counters import MetricsSnapshot
from ringside.monitor.alerts.live import AlertService, Endpoint, Server
from ringside.monitor.collector import StepCollector, standard_watchers
from ringside.monitor.groups import JobGroups
from ringside.monitor.nccl.report import EVENT, log_folder
from ringside.monitor.run.directory import Event, RunWriter
from ringside.monitor.run.records import SCHEMA, RunInfo, StepRecord
from ringside.monitor.run.registry import register, unregister
from ringside.monitor.summary import finish_run
from ringside.monitor.verdict import Verdict
from ringside.pytorch.hang_watch import watch
from ringside.pytorch.recording.parameter_digests import DigestComparison
from ringside.pytorch.recording.record_transport import READY, RecordReceiver
from ringside.pytorch.store import host_name
from ringside.text import name_ranks

REST_SECONDS = 1e-4

_log = logging.getLogger(__name__)


class Rank0Recorder:
    """Rank 0's part: collects everybody's records, listens for verdicts, writes the run.

    `inbox`, `add`, `compare` and `finish` belong to the monitor's thread; `put_event` to any.

    Args:
        store: The session's part of the job's store.
        info: What is known of the run; its name is set here.
        run_dir: Where to write; None: `RINGSIDE_RUN_DIR`, else a new directory under `runs/`.

    Attributes:
        path: The run directory.
        inbox: Receives the records of all ranks, from the store.
        collector: Brings the steps of all ranks together, and has them judged.
        listeners: Called with every new verdict.
        comparisons: Models whose parameters are compared.
        closed: Whether the end of the run has been written.
    """

    def __init__(self, store: Store, info: RunInfo, run_dir: str | os.PathLike[str] | None) -> None:
        requested = run_dir or os.environ.get("RINGSIDE_RUN_DIR")
        new = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.path = Path(requested) if requested else new
        self.listeners: Listeners[Verdict] = Listeners("verdicts")
        self.comparisons: list[DigestComparison] = []
        self.inbox = RecordReceiver(store, info.world_size)
        self._outside: dict[tuple[str, tuple[int, ...], int], Verdict] = {}  # of the hang watch and of digests
        info = msgspec.structs.replace(info, name=as_text(self.path.name))
        self._writer = RunWriter(self.path, info)
        self._entry = register(self.path, info.world_size, info.started_unix)
        self._alerts = AlertService(info, self.path, serve=_serve_metrics)
        groups = JobGroups(info.world_size)
        watchers = standard_watchers(info.world_size, info.hosts, groups)
        listeners = [self._on_event, self._alerts.record]
        # While this thread holds the interpreter lock, training on rank 0 waits for it (5 ms at most): every rank does.
        # A thread that only yields takes the lock again before another has woken up: this one sleeps.
        self.collector = StepCollector(
            info.world_size,
            self._writer,
            watchers=watchers,
            listeners=listeners,
            groups=groups,
            rest=lambda: time.sleep(REST_SECONDS),
        )
        self.collector.note("started", **({"metrics": self._alerts.url} if self._alerts.url else {}))
        if folder := log_folder(os.environ):
            self.collector.note(EVENT, folder=folder)
        self._lock = threading.RLock()
        self._new_verdicts: deque[Verdict] = deque()
        self._guard = Guard("watching this job")
        self.closed = False
        store.set(READY, "1")

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts so far, with their prices so far."""
        with self._lock:
            return [*self.collector.verdicts, *self._outside.values()]

    def put_event(self, kind: str, fields: dict[str, Any]) -> None:
        """Put an event into the run; verdicts of the hang watch and of the comparison of parameters are kept."""
        with self._lock:
            if kind in ("verdict", "repaired"):
                verdict = msgspec.convert(fields["verdict"], Verdict)
                self._outside[verdict.kind, tuple(verdict.ranks), verdict.detected_step] = verdict
            self.collector.note(kind, **fields)
        self._call_listeners()

    def add(self, records: list[StepRecord]) -> None:
        """Take in records; should that fail they are received as before, so that the store does not fill up."""
        with self._lock:
            if not self.closed:
                self._guard.run(self.collector.add, records)
                self._guard.run(self._alerts.tick, records, self.collector)
        self._call_listeners()

    def compare(self) -> None:
        """Report replicas that have drifted apart, or are the same again."""
        for comparison in list(self.comparisons):
            try:
                changes = comparison.changes()
            except dist.DistError:
                raise  # the store is gone, and not only for this
            except Exception as error:
                changes = []
                comparison.digests.abort(error)
            for change in changes:
                verdict = msgspec.to_builtins(change.verdict)
                self.put_event(change.kind, {"step": change.verdict.detected_step, "verdict": verdict})
            if comparison.digests.off:
                self.comparisons.remove(comparison)

    def finish(self, patience_s: float, store_call: Callable[[], AbstractContextManager[None]]) -> None:
        """Collect until every rank has reported that it is done, or for a few seconds; then write the end.

        Args:
            patience_s: How long to wait for the others.
            store_call: Entered whenever the store is called.
        """
        deadline = time.monotonic() + patience_s
        try:
            while self.inbox.open and time.monotonic() < deadline:
                with store_call():
                    records = self.inbox.poll()
                self.add(records)
                with store_call():
                    self.compare()
                time.sleep(0.01)  # the store has no way to wait for one of several keys
        finally:
            self.close()

    def close(self) -> None:
        """Write the end of the run, its summary and its report, as far as the disk allows; once."""
        with self._lock:
            if self.closed:
                return
            self.closed = True
            self._guard.run(self.collector.close)
        self._call_listeners()
        try:
            self.write_end()
        finally:
            unregister(self._entry)
            self._alerts.close()

    def write_end(self) -> None:
        """Write the summary and the report."""
        if self._writer.off:
            return
        from ringside.view.html.run_report import render_report  # at the end only: no training step pays for it

        try:
            finish_run(self.path, render_report)
        except Exception as error:
            _log.warning("the summary of %s could not be written: %s", self.path, error)

    def _on_event(self, event: Event) -> None:
        """The collector has put an event into the run, with the lock held."""
        if event["kind"] != "verdict":
            return
        verdict = msgspec.convert(event["verdict"], Verdict)
        if "RINGSIDE_LAUNCHED" not in os.environ:  # the launcher prints verdicts itself
            _log.warning("%s", watch.log_line(verdict))
        self._new_verdicts.append(verdict)

    def _call_listeners(self) -> None:
        """Give new verdicts to the listeners, with nothing locked: they may wait for a thread that reads `verdicts`."""
        with contextlib.suppress(IndexError):  # another thread was quicker
            while self._new_verdicts:
                self.listeners.notify(self._new_verdicts.popleft())


def _serve_metrics(endpoint: Endpoint, snapshot: Callable[[], MetricsSnapshot]) -> Server:
    # Imported only where metrics are requested: prometheus_client is an extra.
    from ringside.view.export.prometheus import MetricsServer, render

    return MetricsServer(endpoint, lambda accept: render(snapshot(), accept))


def run_info(store: Store, size: int, engine: str, hello_s: float) -> RunInfo:
    """Return what is known of the run, once every rank has said where it runs, or (it may watch no model) has not.

    Args:
        store: The session's part of the job's store.
        size: Number of ranks.
        engine: What reduces gradients.
        hello_s: How long to wait for the ranks, seconds.
    """
    rows, missing = [(host_name(), os.getpid())], []
    deadline = time.monotonic() + hello_s
    for rank in range(1, size):
        try:
            store.wait([f"who/{rank}"], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
            rows.append(msgspec.json.decode(store.get(f"who/{rank}"), type=tuple[str, int]))
        except RuntimeError:
            missing.append(rank)
            rows.append(("", 0))
    if missing:
        _log.warning(
            "%s did not report to the monitor within %g s; it goes on without; every rank is watched that calls "
            "ringside.attach() on a model of its own",
            name_ranks(missing),
            hello_s,
        )
    return RunInfo(
        schema=SCHEMA,
        name="",
        started_unix=time.time(),
        command=[as_text(word) for word in (sys.executable, *sys.argv)],
        world_size=size,
        hosts=[host for host, _ in rows],
        pids=[pid for _, pid in rows],
        engine=engine,
        algorithm="direct" if engine == "ringside" else "",
        versions={
            "ringside": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": sys.version.split()[0],
        },
    )
