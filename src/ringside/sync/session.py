"""One training process's monitoring: cuts steps, sends records to rank 0, and there watches them and writes the run."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ringside.engine.failures import name_ranks
from ringside.monitor.alerts import as_text
from ringside.monitor.alerts_live import Alarm
from ringside.monitor.links import LinkSampler
from ringside.monitor.online import Collector
from ringside.monitor.records import SCHEMA, RunInfo, StepRecord
from ringside.monitor.run_directory import Event, RunWriter
from ringside.monitor.step_clock import StepClock
from ringside.monitor.summary import finish
from ringside.monitor.verdict import Verdict
from ringside.monitor.watchers import standard_watchers
from ringside.sync import watch
from ringside.sync.delivery import Inbox, Outbox
from ringside.sync.digests import Comparison, Digests, shared_store
from ringside.sync.group import group_store, host_name
from ringside.sync.vitals import RankVitals

BATCH_SECONDS = 0.25
GOODBYE_SECONDS = 5.0
HELLO_SECONDS = 30.0

_log = logging.getLogger("ringside")
RecordListener = Callable[[StepRecord], None]


class Session:
    """The monitor of this process; one at a time, shared by all attached models.

    Making one is a collective over the default process group.

    Args:
        run_dir: Where rank 0 writes the run; None: `RINGSIDE_RUN_DIR`, else a new directory under `runs/`.
        engine: Who carries gradients, for the record.

    Attributes:
        rank: This process's global rank.
        clock: Told by the hooks what happens when.
        path: The run directory, on rank 0.
        watch: Looks out for hangs; None where that is turned off.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None, engine: str) -> None:
        group = dist.group.WORLD
        assert group is not None  # attach() has checked that there is a process group
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        prefix = group_store(group, "session", own_connection=True)
        # Rank 0 may be where the store lives, and the script may destroy its process group before the session ends.
        self._job_store = dist.distributed_c10d._get_default_store()
        self.clock = StepClock(self.rank, self._emit)
        self._listeners: list[RecordListener] = []
        self._aside = False
        self._batch: list[StepRecord] = []
        self._guard = threading.Lock()
        self._ended = threading.Event()
        if self.rank != 0:
            prefix.set(f"who/{self.rank}", msgspec.json.encode((host_name(), os.getpid())).decode())
        self._outbox = Outbox(prefix, self.rank)
        self._store = prefix
        self._digests: list[Digests] = []
        self._models = 0
        self._vitals = RankVitals()
        self._links = LinkSampler()
        self._chief = _Chief(prefix, self._info(prefix, engine), run_dir) if self.rank == 0 else None
        self.path: Path | None = self._chief.path if self._chief else None
        self._hooks: list[Any] = [
            register_optimizer_step_pre_hook(self._optimizer_begins),
            register_optimizer_step_post_hook(self._optimizer_ends),
        ]
        self._thread = threading.Thread(target=self._run, name="ringside-monitor", daemon=True)
        self._thread.start()
        tell = self._chief.tell if self._chief else None
        self.watch = watch.begin(prefix, self.rank, self.size, step=lambda: self.clock.step, path=self.path, tell=tell)
        atexit.register(self.end)

    # -------------------------------------------------------------------------------------------- for the script

    def log(self, loss: float | None = None, samples: int | None = None) -> None:
        """Add the loss or the number of samples (or tokens) to this rank's current step."""
        self.clock.log(loss, samples)

    def on_record(self, listener: RecordListener) -> None:
        """Call `listener` with every step record that this rank makes."""
        self._listeners.append(listener)

    def on_verdict(self, listener: Callable[[Verdict], None]) -> None:
        """On rank 0, call `listener` (on the monitor's thread) with every new verdict; elsewhere do nothing."""
        if self._chief is not None:
            self._chief.listeners.append(listener)

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts so far, on rank 0; elsewhere empty."""
        return self._chief.verdicts if self._chief else []

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event to the run, on rank 0; elsewhere do nothing."""
        if self._chief is not None:
            self._chief.note(kind, fields)

    def compare(self, named: Sequence[tuple[str, torch.Tensor]], every: int, model: str = "") -> Digests:
        """Compare these parameters between all ranks from now on; all must say so, in the same order.

        Args:
            named: The parameters of one model, with their names.
            every: Steps between two comparisons.
            model: What the model is called.

        Returns:
            Where the training thread says that a step has ended; `forget_digests` ends it.
        """
        store, self._models = shared_store(self._store, self._models), self._models + 1
        digests = Digests(store, self.rank, named, every)
        self._digests.append(digests)
        if self._chief is not None:
            self._chief.comparisons.append(Comparison(store, self.size, digests, model))
        return digests

    def forget_digests(self, digests: Digests) -> None:
        """Compare a model's parameters no longer."""
        digests.off = True
        if digests in self._digests:
            self._digests.remove(digests)

    @property
    def is_aside(self) -> bool:
        """Whether what is trained now is no part of the run."""
        return self._aside

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, steps are timed for `on_record` listeners but are no part of the run."""
        step = self._turn(True, self.clock.step)
        try:
            yield
        finally:
            self._turn(False, step)

    def end(self) -> None:
        """Send what is left; on rank 0 wait briefly for the others and write the summary and the report."""
        if self._ended.is_set():
            return
        if self.watch is not None:
            self.watch.end()
        self.clock.flush()  # nothing is taken in any more once it has ended
        self._ended.set()
        atexit.unregister(self.end)
        for hook in self._hooks:
            hook.remove()
        self._thread.join(GOODBYE_SECONDS * 2)
        for digests in list(self._digests):
            self.forget_digests(digests)
        forget(self)

    # -------------------------------------------------------------------------------------------- inside

    def _turn(self, aside: bool, step: int) -> int:
        self.clock.flush()
        before, self._aside = self.clock.step, aside
        self.clock.step = step
        self.clock.restart()
        return before

    def _optimizer_begins(self, *_: Any) -> None:
        self.clock.optimizer_begins()

    def _optimizer_ends(self, *_: Any) -> None:
        self.clock.optimizer_ends()

    def _emit(self, record: StepRecord) -> None:
        for listener in list(self._listeners):
            try:
                listener(record)
            except Exception:
                self._listeners.remove(listener)
                _log.exception("a listener for step records raised and will not be called again")
        self._vitals.step_ended()
        if not self._aside and not self._ended.is_set():
            with self._guard:
                self._batch.append(record)

    def _run(self) -> None:
        """Carry records until the session ends; whatever goes wrong here, training goes on."""
        try:
            while not self._ended.wait(BATCH_SECONDS):
                self._send()
                self._post_digests()
                if self._chief is not None:
                    self._chief.collect()
            self._send()
            self._post_digests()
            self._outbox.send([])
            if self._chief is not None:
                self._chief.finish()
        except Exception as error:
            if not self._ended.is_set():
                _log.warning("the monitor stopped (%s: %s); training goes on", type(error).__name__, error)
            if self._chief is not None:
                self._chief.close()
        finally:
            self._vitals.close()

    def _send(self) -> None:
        with self._guard:
            batch, self._batch = self._batch, []
        if batch:
            self._outbox.send(self._links.add_to(self._vitals.add_to(batch)))
        elif self._aside:
            self._vitals.skip()

    def _post_digests(self) -> None:
        if self._chief is None:  # rank 0's own are at hand there
            for digests in list(self._digests):
                self._post(digests)

    def _post(self, digests: Digests) -> None:
        try:
            digests.post()
        except Exception as error:
            if self._ended.is_set():
                raise  # rank 0 has left, and its store with it
            digests.give_up(error)

    def _info(self, store: Store, engine: str) -> RunInfo:
        """Learn where every rank runs, on rank 0."""
        rows = [(host_name(), os.getpid()), *_places(store, range(1, self.size))]
        return RunInfo(
            schema=SCHEMA,
            name="",
            started_unix=time.time(),
            command=[as_text(word) for word in (sys.executable, *sys.argv)],
            world_size=self.size,
            hosts=[host for host, _ in rows],
            pids=[pid for _, pid in rows],
            engine=engine,
            algorithm="direct" if engine == "ringside" else "",
            versions=_versions(),
        )


def _places(store: Store, ranks: range) -> list[tuple[str, int]]:
    """Return host and process id of each rank; of ranks that do not come soon, as they may watch no model, ("", 0)."""
    rows, missing = [], []
    deadline = time.monotonic() + HELLO_SECONDS
    for rank in ranks:
        try:
            store.wait([f"who/{rank}"], timedelta(seconds=max(deadline - time.monotonic(), 0.01)))
            rows.append(msgspec.json.decode(store.get(f"who/{rank}"), type=tuple[str, int]))
        except RuntimeError:
            missing.append(rank)
            rows.append(("", 0))
    if missing:
        _log.warning(
            "the monitor has not heard of %s within %g s and goes on without; every rank is watched that calls "
            "ringside.attach() on a model of its own",
            name_ranks(missing),
            HELLO_SECONDS,
        )
    return rows


class _Chief:
    """Rank 0's part: collects everybody's records, listens for verdicts, writes the run."""

    def __init__(self, store: Store, info: RunInfo, run_dir: str | os.PathLike[str] | None) -> None:
        self.path = _run_directory(run_dir)
        self.listeners: list[Callable[[Verdict], None]] = []
        self.comparisons: list[Comparison] = []
        self._inbox = Inbox(store, info.world_size)
        self._hangs: dict[tuple[str, tuple[int, ...], int], Verdict] = {}
        info = msgspec.structs.replace(info, name=as_text(self.path.name))
        self._writer = RunWriter(self.path, info)
        self._alarm = Alarm(info, self.path)
        watchers = standard_watchers(info.world_size, info.hosts)
        listeners = [self._hear, self._alarm.hear]
        self._collector = Collector(info.world_size, self._writer, watchers=watchers, listeners=listeners)
        self._collector.note("started", **({"metrics": self._alarm.url} if self._alarm.url else {}))
        self._guard = threading.RLock()

    @property
    def verdicts(self) -> list[Verdict]:
        with self._guard:
            return [*self._collector.verdicts, *self._hangs.values()]

    def note(self, kind: str, fields: dict[str, Any]) -> None:
        with self._guard:
            self._collector.note(kind, **fields)

    def tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Take in what the hang watch and the comparison of parameters tell."""
        if kind in ("verdict", "repaired"):
            verdict = msgspec.convert(fields["verdict"], Verdict)
            with self._guard:
                self._hangs[verdict.kind, tuple(verdict.ranks), verdict.detected_step] = verdict
        self.note(kind, fields)

    def collect(self) -> None:
        records = self._inbox.poll()
        with self._guard:
            self._collector.add(records)
            self._alarm.tick(records, self._collector)
        self._compare()

    def _compare(self) -> None:
        """Tell of replicas that have drifted apart, or are the same again."""
        for comparison in list(self.comparisons):
            try:
                changes = comparison.changes()
            except Exception as error:
                changes = []
                comparison.digests.give_up(error)
            for change in changes:
                verdict = msgspec.to_builtins(change.verdict)
                self.tell(change.kind, {"step": change.verdict.detected_step, "verdict": verdict})
            if comparison.digests.off:
                self.comparisons.remove(comparison)

    def finish(self) -> None:
        """Collect until every rank has said that it is done, or for a few seconds."""
        deadline = time.monotonic() + GOODBYE_SECONDS
        try:
            while self._inbox.open and time.monotonic() < deadline:
                self.collect()
                time.sleep(0.01)  # the store has no way to wait for one of several keys
        finally:
            self.close()

    def close(self) -> None:
        """Write the end of the run, its summary and its report, as far as the disk allows."""
        with self._guard:
            self._collector.close()
        try:
            self._write_end()
        finally:
            self._alarm.close()

    def _write_end(self) -> None:
        if self._writer.off:
            return
        try:
            finish(self.path)
        except Exception as error:
            _log.warning("the summary of %s could not be written: %s", self.path, error)

    def _hear(self, event: Event) -> None:
        if event["kind"] != "verdict":
            return
        verdict = msgspec.convert(event["verdict"], Verdict)
        if "RINGSIDE_LAUNCHED" not in os.environ:  # the launcher prints verdicts itself
            _log.warning("%s", watch.sentence(verdict))
        for listener in list(self.listeners):
            try:
                listener(verdict)
            except Exception:
                self.listeners.remove(listener)
                _log.exception("a listener for verdicts raised and will not be called again")


def _run_directory(given: str | os.PathLike[str] | None) -> Path:
    asked = given or os.environ.get("RINGSIDE_RUN_DIR")
    if asked:
        return Path(asked)
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def _versions() -> dict[str, str]:
    from ringside import __version__

    return {
        "ringside": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": sys.version.split()[0],
    }


_current: Session | None = None


def current() -> Session | None:
    """Return this process's session, if there is one."""
    return _current


def begin(run_dir: str | os.PathLike[str] | None, engine: str) -> Session:
    """Return this process's session, making it if there is none. A collective the first time."""
    global _current
    if _current is None:
        _current = Session(run_dir, engine)
    return _current


def forget(session: Session) -> None:
    """Let the next `begin` make a new session."""
    global _current
    if _current is session:
        _current = None


def log(loss: float | None = None, samples: int | None = None) -> None:
    """Add the loss or the number of samples (or tokens) to this rank's current step; without a session, do nothing."""
    if _current is not None:
        _current.log(loss, samples)
