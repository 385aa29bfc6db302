"""One training process's monitoring: cuts steps, sends records to rank 0, and there watches them and writes the run."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ringside.isolation import Guard, Listeners
from ringside.monitor.device_marks import DeviceEvents, Marker
from ringside.monitor.hang import attribution as hang_judge
from ringside.monitor.links import sampler as links
from ringside.monitor.links.sampler import LinkSampler
from ringside.monitor.run.records import StepRecord, Vitals
from ringside.monitor.step_clock import Draft, StepClock, UnreachedSteps
from ringside.monitor.verdict import Verdict
from ringside.monitor.vitals.gpu import open_gpu
from ringside.monitor.vitals.process import RunDelay, VitalSigns
from ringside.pytorch.hang_watch import watch
from ringside.pytorch.recording.parameter_digests import DigestComparison, ParameterDigests
from ringside.pytorch.recording.rank0 import Rank0Recorder, run_info
from ringside.pytorch.recording.record_transport import Rank0Presence, RecordSender, StoreSilence, batch_seconds
from ringside.pytorch.store import group_store, host_name

WRITING_SECONDS = 120.0  # for the summary and the report of a long run, at the end
OWN_KINDS = frozenset({"started", "verdict", "repaired", "revised", "carried", "gradient_memory", "rank_lost", "ended"})
"""Events that only the monitor writes."""
DRAFTS_KEPT = 64  # not worked out yet: each holds every collective of its step, a record only their sums

_log = logging.getLogger(__name__)
RecordListener = Callable[[StepRecord], None]


@dataclass(frozen=True)
class RecordingSettings:
    """What a session does by default suits real jobs; small ones of seconds may want other figures.

    Args:
        hello_s: How long rank 0 waits for all ranks to say where they run.
        goodbye_s: How long it waits at the end for what they still send.
        heard_s: How often it is asked whether rank 0 still takes records in.
        silent_s: A store that has not answered for so long is said not to.
        records_kept: Records that wait for the store at most; then the oldest go.
        hang_s: Least wait that is called a hang.
        links_s: How often the connections of this rank are looked at.
    """

    hello_s: float = 30.0
    goodbye_s: float = 5.0
    heard_s: float = 10.0
    silent_s: float = 10.0
    records_kept: int = 10_000
    hang_s: float = hang_judge.LIMIT_S
    links_s: float = links.PERIOD_S


DEFAULT_SETTINGS = RecordingSettings()


class RankVitals:
    """The vitals of this process. All but `step_ended` is called by one thread, which is not the one that trains.

    Args:
        signs: Reads them.
    """

    def __init__(self, signs: VitalSigns | None = None) -> None:
        self._signs = signs or VitalSigns()
        self._guard = Guard(warning="what the kernel knows of this rank is not recorded any more")
        self._gpu: str | None = None
        self._is_gpu_known = not torch.backends.cuda.is_built()  # type: ignore[no-untyped-call]

    def step_ended(self) -> None:
        """Called by the thread that trains: only there it can be seen which GPU it uses."""
        if self._is_gpu_known or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return
        self._is_gpu_known = True
        with contextlib.suppress(RuntimeError, AssertionError):
            uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
            self._gpu = None if uuid is None else str(uuid)

    def add_to(self, records: list[StepRecord]) -> list[StepRecord]:
        """Return a batch of records, ascending, with the vitals of the time since the last batch in the oldest.

        So a reader that goes step by step knows them for the steps that they are about.
        """
        vitals = self._guard.run(self._read) if records else None
        return records if vitals is None else [msgspec.structs.replace(records[0], vitals=vitals), *records[1:]]

    def skip(self) -> None:
        """Leave out the time since the last batch: what happened in it is no part of the run."""
        self._guard.run(self._signs.restart)

    def close(self) -> None:
        """Close the kernel's files and the driver."""
        self._signs.close()

    def _read(self) -> Vitals | None:
        if self._gpu is not None:  # here, not on the training thread: to load the driver's library takes long
            self._signs.gpu, self._gpu = open_gpu(self._gpu), None
        return self._signs.since()


class Session:
    """The monitor of this process; one at a time, shared by all attached models.

    Making one is a collective over the default process group.

    The training thread cuts steps (`clock`) and puts their drafts into a queue. A thread of the session makes records
    of them and sends them to rank 0 by the job's store, where its twin takes them in. So everything that calls the
    store, the kernel or the disk is done on that thread, and training waits for none of it.

    Args:
        run_dir: Where rank 0 writes the run; None: `RINGSIDE_RUN_DIR`, else a new directory under `runs/`.
        engine: What reduces gradients, for the record.
        settings: How patient it is.

    Attributes:
        rank: This process's global rank.
        clock: Informed by the hooks what happens when.
        path: The run directory, on rank 0.
        store: The session's part of the job's store.
        rank0: What only rank 0 has: it collects, judges and writes.
        outbox: Sends this rank's records.
        presence: Whether rank 0 takes this rank's records in; on rank 0 itself nobody asks.
        silence: Notices that the store does not answer.
        watch: Looks out for hangs; None where that is turned off.
        guard: Keeps what breaks in the step clock away from training.
        is_paused: Whether what is trained now is no part of the run.
        hooks: Their `remove()` is called when the session ends.
    """

    def __init__(
        self, run_dir: str | os.PathLike[str] | None, engine: str, settings: RecordingSettings = DEFAULT_SETTINGS
    ) -> None:
        group = dist.group.WORLD
        assert group is not None  # attach() has checked that there is a process group
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.store = group_store(group, "session", own_connection=True)
        # Rank 0 may be where the store lives, and the script may destroy its process group before the session ends.
        self._job_store = dist.distributed_c10d._get_default_store()
        self._settings = settings

        # What the training thread touches.
        self._run_delay = RunDelay()
        self.clock = StepClock(self.rank, self._emit, run_delay=self._run_delay)
        self._listeners: Listeners[StepRecord] = Listeners("step records")
        self.is_paused = False
        self._marks: DeviceEvents | None = None
        self.guard = Guard("timing the steps of this rank")
        self._log_guard, self._event_guard = Guard("ringside.log_step()"), Guard("session.event()")

        # What it hands to the monitor's thread: drafts, which on a GPU first wait for the device.
        self._batch: deque[Draft] = deque(maxlen=settings.records_kept)
        self._unreached = UnreachedSteps()
        self._ended = threading.Event()
        self._is_stopped = False

        # What that thread has: the way to rank 0, and what it adds to records.
        self.silence = StoreSilence(self.rank, settings.silent_s, settings.records_kept)
        self.presence = Rank0Presence(self.store, settings.heard_s)
        self.outbox = RecordSender(self.store, self.rank)
        self._digests: list[ParameterDigests] = []
        self._models = 0
        self._vitals = RankVitals()
        self._links = LinkSampler(period_s=settings.links_s)

        # Every rank says where it runs; rank 0 waits for that, and opens the run.
        self.rank0: Rank0Recorder | None = None
        if self.rank == 0:
            self.rank0 = Rank0Recorder(self.store, run_info(self.store, self.size, engine, settings.hello_s), run_dir)
        else:
            own = (host_name(), os.getpid())
            self.store.set(f"who/{self.rank}", msgspec.json.encode(own).decode())
        self.path: Path | None = self.rank0.path if self.rank0 else None
        self.hooks: list[Any] = [
            register_optimizer_step_pre_hook(self.guard.guard(lambda *_: self.clock.optimizer_begins())),
            register_optimizer_step_post_hook(self.guard.guard(lambda *_: self.clock.optimizer_ends())),
        ]
        self._thread = threading.Thread(target=self._run, name="ringside-monitor", daemon=True)
        self._thread.start()
        self.watch = watch.begin(
            self.store,
            self.rank,
            self.size,
            step=lambda: self.clock.step,
            path=self.path,
            put_event=self.rank0.put_event if self.rank0 else None,
            hang_s=settings.hang_s,
        )
        atexit.register(self.end)

    # -------------------------------------------------------------------------------------------- for the script

    def log(self, loss: float | None = None, samples: int | None = None) -> None:
        """Add the loss or the number of samples (or tokens) to this rank's current step."""
        # What the script gives may be a tensor, or nothing that is a number: the guard catches that.
        self._log_guard.run(
            lambda: self.clock.log(None if loss is None else float(loss), None if samples is None else int(samples))
        )

    def on_record(self, listener: RecordListener) -> None:
        """Call `listener` with every step record that this rank makes.

        The training thread does, and waits for it; where steps are timed by marks on a GPU, the monitor's does, later.
        """
        self._listeners.add(listener)

    def on_verdict(self, listener: Callable[[Verdict], None]) -> None:
        """On rank 0, call `listener` (on the monitor's thread) with every new verdict; elsewhere do nothing."""
        if self.rank0 is not None:
            self.rank0.listeners.add(listener)

    @property
    def verdicts(self) -> list[Verdict]:
        """The verdicts so far, on rank 0; elsewhere empty."""
        return self.rank0.verdicts if self.rank0 else []

    @property
    def unsent(self) -> int:
        """How many records of this rank wait to be sent."""
        return len(self._batch)

    def event(self, kind: str, **fields: Any) -> None:
        """Append an event to the run, on rank 0; elsewhere do nothing. The monitor's own kinds are left out."""
        if kind in OWN_KINDS:
            _log.warning("session.event(%r): events of this kind are the monitor's own; choose another name", kind)
        else:
            self.put_event(kind, fields)

    def put_event(self, kind: str, fields: dict[str, Any]) -> None:
        """As `event`, of any kind: for the monitor itself. What these hold is in `ringside.monitor.run.records`."""
        if self.rank0 is not None:
            self._event_guard.run(self.rank0.put_event, kind, fields)

    def use_device_events(self, marker: Marker) -> DeviceEvents:
        """Time steps by events of a device from now on; a session has one marker, and the first counts.

        Args:
            marker: The device's.

        Returns:
            What sets the marks and never raises; the first error drops the timing of this rank's steps.
        """
        if self._marks is None:
            self._marks = DeviceEvents(marker, self.guard.trip)
            self.clock.time_by(self._marks)
        return self._marks

    def add_model(self, named: Sequence[tuple[str, torch.Tensor]], every: int, model: str = "") -> ParameterDigests:
        """Compare these parameters between all ranks from now on; all ranks call this, in the same order.

        Args:
            named: The parameters of one model, with their names.
            every: Steps between two comparisons.
            model: What the model is called.

        Returns:
            Where the training thread reports that a step has ended; `remove_model` ends it.
        """
        store, self._models = PrefixStore(f"digests/{self._models}", self.store), self._models + 1
        digests = ParameterDigests(store, self.rank, named, every)
        self._digests.append(digests)
        if self.rank0 is not None:
            self.rank0.comparisons.append(DigestComparison(store, self.size, digests, model))
        return digests

    def remove_model(self, digests: ParameterDigests) -> None:
        """Compare a model's parameters no longer."""
        digests.off = True
        if digests in self._digests:
            self._digests.remove(digests)

    @property
    def is_recording(self) -> bool:
        """Whether steps are taken in: the session has not ended, nor has its monitor stopped, nor is this a fork."""
        return not (self._is_stopped or self._ended.is_set())

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, steps are timed for `on_record` listeners but are no part of the run."""
        self.clock.flush()
        self.clock.restart()
        self.is_paused, step = True, self.clock.step
        try:
            yield
        finally:
            self.clock.flush()
            self.clock.restart()
            # The run's steps are numbered on as if nothing had been between.
            self.is_paused, self.clock.step = False, step

    def end(self) -> None:
        """Send what is left; on rank 0 wait briefly for the others and write the summary and the report."""
        if self in _inherited or self._ended.is_set():
            return
        if self.watch is not None:
            Guard("the end of the hang watch").run(self.watch.end)
        self.guard.run(self.clock.flush)  # nothing is taken in any more once it has ended
        self._ended.set()
        atexit.unregister(self.end)
        for hook in self.hooks:
            hook.remove()

        # Wait until all is sent and written; for a store that does not answer, only a few seconds.
        deadline = time.monotonic() + WRITING_SECONDS
        self._thread.join(1.0 if self.silence.is_reported else self._settings.goodbye_s * 2)
        while self._thread.is_alive() and self.silence.since == math.inf and time.monotonic() < deadline:
            self._thread.join(0.5)  # it writes the summary of a long run
        if self._thread.is_alive():  # it waits for a silent store; what it holds goes with the process
            self.silence.report(max(time.monotonic() - self.silence.since, 0.0))
            if self.rank0 is not None:
                self.rank0.add([draft.record() for draft in list(self._batch)])
                Guard("the end of the run").run(self.rank0.close)
        for digests in list(self._digests):
            self.remove_model(digests)
        release(self)

    # -------------------------------------------------------------------------------------------- the training thread

    def _emit(self, draft: Draft) -> None:
        """A step is over: the clock calls this."""
        if draft.laps is None and self._listeners:
            self._listeners.notify(draft.record())
        self._vitals.step_ended()
        if not self.is_recording:
            return
        if draft.laps is not None:  # timed by the device, which has not come so far
            self._unreached.add(draft, not self.is_paused)
        elif not self.is_paused:
            self._put(draft)
        if self.silence.since != math.inf and not self.is_paused:
            self.silence.check(time.monotonic())  # nobody else is left to report it

    def _put(self, draft: Draft) -> None:
        """Queue a draft for the monitor's thread; where that is far behind, as the record that it comes to."""
        if len(self._batch) >= DRAFTS_KEPT:
            draft.record()
        self._batch.append(draft)

    # -------------------------------------------------------------------------------------------- the monitor's thread

    def _run(self) -> None:
        """Send records until the session ends; whatever goes wrong here, training goes on."""
        try:
            pause = batch_seconds(1 if self.rank0 is not None else self.size)
            while not self._ended.wait(pause):
                self._exchange(self._unreached.drain())
            self._exchange(self._unreached.drain_last(time.sleep))
            with self.silence.call():
                self.outbox.send([])  # the last of this rank
            if self.rank0 is not None:
                self.rank0.finish(self._settings.goodbye_s, self.silence.call)
                with self.silence.call():
                    self.presence.withdraw()
        except Exception as error:
            self._stop(error)
        finally:
            self._is_stopped = True
            self._vitals.close()
            self._run_delay.close()

    def _exchange(self, reached: list[tuple[Draft, bool]]) -> None:
        """Send this rank's records and digests to rank 0, and there take in everybody's.

        Args:
            reached: Steps that the device has done by now, and whether each is part of the run.
        """
        for draft, is_recorded in reached:
            if self._listeners:
                self._listeners.notify(draft.record())
            if is_recorded:
                self._put(draft)
        with self.silence.call():
            if self.rank0 is not None or self.presence.check():
                # The records of the steps since the last time, with what the kernel knows of that time.
                if own := [self._batch.popleft().record() for _ in range(len(self._batch))]:
                    self.outbox.send(self._links.add_to(self._vitals.add_to(own)))
                elif self.is_paused:
                    self._vitals.skip()
            # Rank 0's own digests are at hand there.
            for digests in list(self._digests) if self.rank0 is None else []:
                try:
                    digests.post()
                except Exception as error:
                    if self._ended.is_set():
                        raise  # rank 0 has left, and its store with it
                    digests.abort(error)
            records = self.rank0.inbox.poll() if self.rank0 is not None else []
        if self.rank0 is not None:
            self.rank0.add(records)
            with self.silence.call():
                self.rank0.compare()

    def _stop(self, error: Exception) -> None:
        """The monitor of this rank is over: warn, write what there is, and let the others send no more."""
        self._is_stopped = True
        of_store = isinstance(error, dist.DistError)
        if not (of_store and self._ended.is_set()):  # at the end rank 0 may have left, and its store with it
            # Where the store fails, it does so for all: rank 0 warns for them.
            quiet = of_store and self.rank != 0
            level = logging.INFO if quiet else logging.WARNING
            _log.log(level, "the monitor stopped (%s: %s); training goes on", type(error).__name__, error)
        if self.rank0 is not None:
            self.rank0.close()
            if not of_store:
                with self.silence.call():
                    self.presence.withdraw()

    def _leave_to_parent(self) -> None:
        """In a forked child, write nothing any more to what it shares with its parent: pages, store, run directory."""
        _inherited.extend((self, self.rank0))
        self._is_stopped, self.rank0 = True, None
        if self.watch is not None:
            self.watch.board.close()


_current: Session | None = None
_inherited: list[Any] = []
"""In a forked child: the parent's session and recorder, kept so that no finalizer ends them here."""


def _leave_to_parent() -> None:
    global _current
    session, _current = _current, None
    if session is not None:
        session._leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


def current() -> Session | None:
    """Return this process's session, if there is one."""
    return _current


def has_session() -> bool:
    """Return whether this process is watched."""
    return _current is not None


def begin(
    run_dir: str | os.PathLike[str] | None, engine: str, settings: RecordingSettings = DEFAULT_SETTINGS
) -> Session:
    """Return this process's session, making it if there is none; then it is a collective, and the arguments count."""
    global _current
    if _current is None:
        _current = Session(run_dir, engine, settings)
    return _current


def release(session: Session) -> None:
    """Let the next `begin` make a new session."""
    global _current
    if _current is session:
        _current = None


def log_step(loss: float | None = None, samples: int | None = None) -> None:
    """Add the loss or the number of samples (or tokens) to this rank's current step; without a session, do nothing."""
    if _current is not None:
        _current.log(loss, samples)
