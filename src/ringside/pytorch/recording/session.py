"""One training process's monitoring: cuts steps, sends records to rank 0, and there watches them and writes the run."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections import deque
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

from ringside._version import __version__
from ringside.engine.failures import name_ranks
from ringside.monitor.alerts.book import as_text
from ringside.monitor.links.sampler import LinkSampler
from ringside.monitor.run.records import SCHEMA, RunInfo, StepRecord
from ringside.monitor.step_clock.clock import StepClock
from ringside.monitor.step_clock.device_events import DeviceEvents, Marker, UnreachedSteps
from ringside.monitor.step_clock.draft import Draft
from ringside.monitor.verdict import Verdict
from ringside.pytorch.hang_watch import watch
from ringside.pytorch.isolation import Guard
from ringside.pytorch.recording.parameter_digests import DigestComparison, ParameterDigests, shared_store
from ringside.pytorch.recording.rank0 import READY, Rank0Recorder
from ringside.pytorch.recording.record_transport import RecordSender, batch_seconds
from ringside.pytorch.recording.settings import RecordingSettings
from ringside.pytorch.recording.vitals import RankVitals
from ringside.pytorch.store import group_store, host_name

WRITING_SECONDS = 120.0
OWN_KINDS = frozenset({"started", "verdict", "repaired", "revised", "gradient_memory", "rank_lost", "ended"})
"""Events that only the monitor writes."""
DRAFTS_KEPT = 64  # not worked out yet; they hold every collective of their step

_log = logging.getLogger("ringside")
RecordListener = Callable[[StepRecord], None]


DEFAULT_SETTINGS = RecordingSettings()


class Session:
    """The monitor of this process; one at a time, shared by all attached models.

    Making one is a collective over the default process group.

    Args:
        run_dir: Where rank 0 writes the run; None: `RINGSIDE_RUN_DIR`, else a new directory under `runs/`.
        engine: Who carries gradients, for the record.
        settings: How patient it is.

    Attributes:
        rank: This process's global rank.
        clock: Told by the hooks what happens when.
        path: The run directory, on rank 0.
        chief: What only rank 0 has: it collects, judges and writes.
        outbox: Sends this rank's records.
        heard: Whether rank 0 takes this rank's records in, when it was asked last; of rank 0 itself nobody asks.
        watch: Looks out for hangs; None where that is turned off.
        fuse: Keeps what breaks in the step clock away from training.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str] | None, engine: str, settings: RecordingSettings = DEFAULT_SETTINGS
    ) -> None:
        group = dist.group.WORLD
        assert group is not None  # attach() has checked that there is a process group
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        prefix = group_store(group, "session", own_connection=True)
        # Rank 0 may be where the store lives, and the script may destroy its process group before the session ends.
        self._job_store = dist.distributed_c10d._get_default_store()
        self.clock = StepClock(self.rank, self._emit)
        self._settings = settings
        self._listeners: list[RecordListener] = []
        self._aside = False
        self._batch: deque[Draft] = deque(maxlen=settings.records_kept)
        self._marks: DeviceEvents | None = None
        self._waiting = UnreachedSteps()
        self._guard = threading.Lock()
        self._ended = threading.Event()
        self._stopped = self.heard = self._said_silent = False
        self._asking_since = math.inf
        self._heard_until = 0.0
        self._suspected = (math.inf, math.inf)
        self.fuse = Guard("timing the steps of this rank")
        self._logging, self._events = Guard("ringside.log_step()"), Guard("session.event()")
        self._linking = Guard("recording the links of this rank")
        if self.rank != 0:
            prefix.set(f"who/{self.rank}", msgspec.json.encode((host_name(), os.getpid())).decode())
        self.outbox = RecordSender(prefix, self.rank)
        self._store = prefix
        self._digests: list[ParameterDigests] = []
        self._models = 0
        self._vitals = RankVitals()
        self._links = LinkSampler(period_s=settings.links_s)
        self.chief = Rank0Recorder(prefix, self._info(prefix, engine), run_dir) if self.rank == 0 else None
        self.path: Path | None = self.chief.path if self.chief else None
        self._hooks: list[Any] = [
            register_optimizer_step_pre_hook(self.fuse.guard(lambda *_: self.clock.optimizer_begins())),
            register_optimizer_step_post_hook(self.fuse.guard(lambda *_: self.clock.optimizer_ends())),
        ]
        self._thread = threading.Thread(target=self._run, name="ringside-monitor", daemon=True)
        self._thread.start()
        tell = self.chief.tell if self.chief else None
        self.watch = watch.begin(
            prefix,
            self.rank,
            self.size,
            step=lambda: self.clock.step,
            path=self.path,
            tell=tell,
            hang_s=settings.hang_s,
        )
        atexit.register(self.end)

    # -------------------------------------------------------------------------------------------- for the script

    def log(self, loss: float | None = None, samples: int | None = None) -> None:
        """Add the loss or the number of samples (or tokens) to this rank's current step."""
        self._logging.run(self._add, loss, samples)

    def on_record(self, listener: RecordListener) -> None:
        """Call `listener` with every step record that this rank makes.

        The training thread does, and waits for it; where steps are timed by marks on a GPU, the monitor's does, later.
        """
        self._listeners.append(listener)

    def on_verdict(self, listener: Callable[[Verdict], None]) -> None:
        """On rank 0, call `listener` (on the monitor's thread) with every new verdict; elsewhere do nothing."""
        if self.chief is not None:
            self.chief.listeners.append(listener)

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts so far, on rank 0; elsewhere empty."""
        return self.chief.verdicts if self.chief else []

    @property
    def unsent(self) -> int:
        """How many records of this rank wait to be sent."""
        return len(self._batch)

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event to the run, on rank 0; elsewhere do nothing. The monitor's own kinds are left out."""
        if kind in OWN_KINDS:
            _log.warning("session.event(%r): events of this kind are the monitor's own; choose another name", kind)
        elif self.chief is not None:
            self._events.run(self.chief.note, kind, fields)

    def revised(self, fields: dict[str, Any]) -> None:
        """Put into the run, on rank 0, that gradients go another way from now on (`algorithm_changes`)."""
        if self.chief is not None:
            self._events.run(self.chief.note, "revised", {"step": self.clock.step, **fields})

    def gradient_memory(self, model: int, memory: dict[str, int]) -> None:
        """Put into the run, on rank 0, where a model's buckets lie; see `ringside.monitor.job.gradient_memory`."""
        if self.chief is not None:
            self._events.run(self.chief.note, "gradient_memory", {"model": model, **memory})

    def time_by(self, marker: Marker) -> DeviceEvents:
        """Time steps by marks on a device from now on; a session has one marker, and the first counts.

        Args:
            marker: The device's.

        Returns:
            What sets the marks and never raises; the first error drops the timing of this rank's steps.
        """
        if self._marks is None:
            self._marks = DeviceEvents(marker, self.fuse.blow)
            self.clock.time_by(self._marks)
        return self._marks

    def compare(self, named: Sequence[tuple[str, torch.Tensor]], every: int, model: str = "") -> ParameterDigests:
        """Compare these parameters between all ranks from now on; all must say so, in the same order.

        Args:
            named: The parameters of one model, with their names.
            every: Steps between two comparisons.
            model: What the model is called.

        Returns:
            Where the training thread says that a step has ended; `forget_digests` ends it.
        """
        store, self._models = shared_store(self._store, self._models), self._models + 1
        digests = ParameterDigests(store, self.rank, named, every)
        self._digests.append(digests)
        if self.chief is not None:
            self.chief.comparisons.append(DigestComparison(store, self.size, digests, model))
        return digests

    def forget_digests(self, digests: ParameterDigests) -> None:
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
        if self in _inherited or self._ended.is_set():
            return
        if self.watch is not None:
            Guard("the end of the hang watch").run(self.watch.end)
        self.fuse.run(self.clock.flush)  # nothing is taken in any more once it has ended
        self._ended.set()
        atexit.unregister(self.end)
        for hook in self._hooks:
            hook.remove()
        self._await_thread()
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

    def _emit(self, draft: Draft) -> None:
        if draft.laps is None:
            self._tell_listeners(draft)
        self._vitals.step_ended()
        if self._stopped or self._ended.is_set():
            return
        if draft.laps is not None:
            self._waiting.add(draft, not self._aside)
        elif not self._aside:
            self._take_in(draft)
        if self._asking_since != math.inf and not self._aside:
            self._notice_silence(time.monotonic())

    def _tell_listeners(self, draft: Draft) -> None:
        for listener in list(self._listeners):
            try:
                listener(draft.record())
            except Exception:
                self._listeners.remove(listener)
                _log.exception("a listener for step records raised and will not be called again")

    def _take_in(self, draft: Draft) -> None:
        if len(self._batch) >= DRAFTS_KEPT:
            draft.record()
        with self._guard:
            self._batch.append(draft)

    def _add(self, loss: float | None, samples: int | None) -> None:
        self.clock.log(None if loss is None else float(loss), None if samples is None else int(samples))

    # -------------------------------------------------------------------------------------------- the monitor's thread

    def _run(self) -> None:
        """Carry records until the session ends; whatever goes wrong here, training goes on."""
        try:
            pause = batch_seconds(1 if self.chief is not None else self.size)
            while not self._ended.wait(pause):
                self._settle(self._waiting.drain())
                self._carry()
            self._settle(self._waiting.drain_last(time.sleep))
            self._carry()
            with self._asking():
                self.outbox.send([])
            if self.chief is not None:
                self.chief.finish(self._settings.goodbye_s, self._asking)
                self._send_no_more()
        except Exception as error:
            self._stop(error)
        finally:
            self._stopped = True
            self._vitals.close()

    def _settle(self, drafts: list[tuple[Draft, bool]]) -> None:
        """Tell of steps that a device has done by now."""
        for draft, recorded in drafts:
            self._tell_listeners(draft)
            if recorded:
                self._take_in(draft)

    def _carry(self) -> None:
        """Bring this rank's records to rank 0, and there take in everybody's."""
        with self._asking():
            self._send()
            self._post_digests()
            records = self.chief.fetch() if self.chief is not None else []
        if self.chief is not None:
            self.chief.take(records)
            with self._asking():
                self.chief.compare()

    def _stop(self, error: Exception) -> None:
        self._stopped = True
        of_store = isinstance(error, dist.DistError)
        if not (of_store and self._ended.is_set()):  # at the end rank 0 may have left, and its store with it
            # Where the store fails, it does so for all: rank 0 says it for them.
            quiet = of_store and self.rank != 0
            level = logging.INFO if quiet else logging.WARNING
            _log.log(level, "the monitor stopped (%s: %s); training goes on", type(error).__name__, error)
        if self.chief is not None:
            self.chief.close()
            if not of_store:
                self._send_no_more()

    def _send_no_more(self) -> None:
        """Tell the other ranks, which may train on, that nobody takes their records in."""
        with self._asking(), contextlib.suppress(RuntimeError):  # not every store can delete
            self._store.delete_key(READY)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """Inside, the store is asked, which may take for ever."""
        self._asking_since = time.monotonic()
        try:
            yield
        finally:
            self._asking_since = math.inf

    def _notice_silence(self, now: float) -> None:
        """Called by the training thread: nobody else is left to say that the store does not answer."""
        since = self._asking_since
        if now - since < self._settings.silent_s:
            return
        # A process that was stopped as a whole finds its own question old, and answered a moment later.
        suspected, noticed = self._suspected
        if suspected != since:
            self._suspected = (since, now)
        elif now - noticed > self._settings.silent_s / 10:
            self._say_silent(now - since)

    def _say_silent(self, seconds: float) -> None:
        if self._said_silent:
            return
        self._said_silent = True
        _log.log(
            logging.WARNING if self.rank == 0 else logging.INFO,
            "the job's store has not answered for %.0f s: nothing is recorded until it does, and the newest %d steps "
            "are kept; training goes on. Look at the process that holds it (rank 0, or torchrun)",
            seconds,
            self._settings.records_kept,
        )

    def _await_thread(self) -> None:
        """Wait until all is sent and written; for a store that does not answer, only a few seconds."""
        deadline = time.monotonic() + WRITING_SECONDS
        self._thread.join(1.0 if self._said_silent else self._settings.goodbye_s * 2)
        while self._thread.is_alive() and self._asking_since == math.inf and time.monotonic() < deadline:
            self._thread.join(0.5)  # it writes the summary of a long run
        if self._thread.is_alive():
            self._end_without_store()

    def _end_without_store(self) -> None:
        """The thread waits for a store that does not answer; what it holds goes with the process."""
        self._say_silent(max(time.monotonic() - self._asking_since, 0.0))
        if self.chief is not None:
            with self._guard:
                own = list(self._batch)
            self.chief.take([draft.record() for draft in own])
            Guard("the end of the run").run(self.chief.close)

    def _send(self) -> None:
        if not self._is_heard():
            return
        with self._guard:
            drafts = list(self._batch)
            self._batch.clear()
        batch = [draft.record() for draft in drafts]
        if batch:
            self.outbox.send(self._with_links(self._vitals.add_to(batch)))
        elif self._aside:
            self._vitals.skip()

    def _with_links(self, batch: list[StepRecord]) -> list[StepRecord]:
        if self._linking.blown:
            return batch
        try:
            return self._links.add_to(batch)
        except Exception as error:
            self._linking.blow(error)
            return batch

    def _is_heard(self) -> bool:
        """Tell whether rank 0 takes records in; where its monitor is over or never began, they would fill the store."""
        if self.chief is not None:
            return True
        if not self.heard or time.monotonic() > self._heard_until:
            self.heard = bool(self._store.check([READY]))
            self._heard_until = time.monotonic() + self._settings.heard_s
        return self.heard

    def _post_digests(self) -> None:
        if self.chief is None:  # rank 0's own are at hand there
            for digests in list(self._digests):
                self._post(digests)

    def _post(self, digests: ParameterDigests) -> None:
        try:
            digests.post()
        except Exception as error:
            if self._ended.is_set():
                raise  # rank 0 has left, and its store with it
            digests.give_up(error)

    def _leave_to_parent(self) -> None:
        """In a forked child, write nothing any more to what it shares with its parent: pages, store, run directory."""
        _inherited.append(self)
        _inherited.append(self.chief)  # nothing of it is ended here, either
        self._stopped, self.chief = True, None
        if self.watch is not None:
            self.watch.board.close()

    def _info(self, store: Store, engine: str) -> RunInfo:
        """Learn where every rank runs, on rank 0."""
        rows = [(host_name(), os.getpid()), *places(store, range(1, self.size), self._settings.hello_s)]
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


def places(store: Store, ranks: range, hello_s: float) -> list[tuple[str, int]]:
    """Return host and process id of each rank; of ranks that do not come soon, as they may watch no model, ("", 0)."""
    rows, missing = [], []
    deadline = time.monotonic() + hello_s
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
            hello_s,
        )
    return rows


def _versions() -> dict[str, str]:
    return {
        "ringside": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": sys.version.split()[0],
    }


_current: Session | None = None
_inherited: list[Any] = []


def _leave_to_parent() -> None:
    global _current
    session, _current = _current, None
    if session is not None:
        session._leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def current() -> Session | None:
    """Return this process's session, if there is one."""
    return _current


def begin(
    run_dir: str | os.PathLike[str] | None, engine: str, settings: RecordingSettings = DEFAULT_SETTINGS
) -> Session:
    """Return this process's session, making it if there is none; then it is a collective, and the arguments count."""
    global _current
    if _current is None:
        _current = Session(run_dir, engine, settings)
    return _current


def forget(session: Session) -> None:
    """Let the next `begin` make a new session."""
    global _current
    if _current is session:
        _current = None


def log_step(loss: float | None = None, samples: int | None = None) -> None:
    """Add the loss or the number of samples (or tokens) to this rank's current step; without a session, do nothing."""
    if _current is not None:
        _current.log(loss, samples)
