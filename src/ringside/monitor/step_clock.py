"""Cuts a rank's time into training steps and their phases; pure, with injected clocks.

A step runs from the end of one optimizer update to the end of the next. The hooks of the training loop call the
methods below as things happen; every call ascribes the time since the previous one to a phase, so that the phases of a
step always add up to the step. Where the work is a device's, marks in its queue say how long the phases took there.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ringside.monitor.device_marks import SYNC, DeviceEvents, PhaseEvents
from ringside.monitor.run.records import StepRecord
from ringside.monitor.wait_meter import GroupSums, WaitMeter

# -------------------------------------------------------------------------------------------------
# A finished training step before its record is worked out: what the training thread had to read, and no more.
#
# In a step that leaves the caches cold every line costs several times what it costs alone, so sums over collectives,
# and the record itself, are made when the record is needed, on another thread.


class SyncTimes(NamedTuple):
    """What one backward pass's synchronisation took, on this rank.

    Args:
        sync_seconds: From each bucket's hand-over to its result, summed.
        wire_seconds: The part of it after the last rank had arrived.
        wait_seconds: This rank's last arrival until the last rank's; NaN where arrivals are not known.
        payload_bytes: Bytes synchronised.
        collectives: Collectives that carried them.
        busy_seconds: What they took one after the other, without others being late for the first.
        latency_seconds: What one takes whatever its size; 0: not known.
    """

    sync_seconds: float = 0.0
    wire_seconds: float = 0.0
    wait_seconds: float = 0.0
    payload_bytes: int = 0
    collectives: int = 0
    busy_seconds: float = 0.0
    latency_seconds: float = 0.0


Told = Callable[[], SyncTimes]
"""Returns once, at any later time and on any thread, what a synchronisation took."""


@dataclass(slots=True)
class StepPhases:
    """The phases of a step, seconds, and what else was counted in it.

    Args:
        run_delay: Of the seconds that are not `exposed`, in how many the training thread wanted a CPU and had none.
        syncs: Of each backward pass how long the rank was blocked in its synchronisation, and how to get its times.
        groups: Returns what was done in watched groups (`WaitMeter.end_step`); None: none are watched.
    """

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    compute: float = 0.0
    exposed: float = 0.0
    optimizer: float = 0.0
    overhead: float = 0.0
    run_delay: float = 0.0
    samples: int = 0
    loss: float | None = None
    forwards: int = 0
    syncs: list[tuple[float, Told]] = field(default_factory=list)
    groups: Callable[[], GroupSums] | None = None


@dataclass(slots=True)
class Draft:
    """A finished step.

    Args:
        rank: Global rank.
        step: Its number.
        ended_unix: When it ended, seconds since 1970.
        seconds: How long it took.
        cpu_seconds: CPU time of the process in it.
        phases: Its parts.
        laps: Their times by its device's clock, in place of the host's; None: the host's count.
    """

    rank: int
    step: int
    ended_unix: float
    seconds: float
    cpu_seconds: float
    phases: StepPhases
    laps: PhaseEvents | None = None
    _record: StepRecord | None = None

    @property
    def lost(self) -> bool:
        """Whether it can never be recorded."""
        return self.laps is not None and self.laps.lost

    def settled(self) -> bool:
        """Return whether its record can be worked out."""
        return self.laps is None or self.laps.settle()

    def record(self) -> StepRecord:
        """Return its record, worked out the first time, once it is `settled`. Call it from one thread at a time."""
        if self._record is not None:
            return self._record
        phases = self.phases
        if self.laps is not None:  # the device's times replace the host's
            lasted, blocked = self.laps.sums()
            self.seconds = sum(lasted.values())
            for phase, seconds in lasted.items():
                setattr(phases, phase, seconds)
            phases.syncs = [(seconds, times) for seconds, (_, times) in zip(blocked, phases.syncs, strict=True)]
        syncs = [(exposed, read_times()) for exposed, read_times in phases.syncs]
        # A rank waits for others at most while it is blocked; `min` in this order keeps a NaN: it is not known.
        waits = [min(times.wait_seconds, exposed) for exposed, times in syncs]
        sums = GroupSums() if phases.groups is None else phases.groups()
        exposed = min(phases.exposed + sums.unseen_seconds, self.seconds)
        # In groups that are watched, what hides behind computing is not seen.
        unknown = math.nan if sums.uses and not syncs else 0.0
        self._record = StepRecord(
            step=self.step,
            rank=self.rank,
            ended_unix=self.ended_unix,
            step_seconds=self.seconds,
            own_seconds=max(self.seconds - exposed, 0.0),
            # Who came last in groups is found by comparing ranks.
            wait_seconds=math.nan if sums.uses else sum(waits),
            exposed_seconds=exposed,
            sync_seconds=sum((times.sync_seconds for _, times in syncs), unknown),
            wire_seconds=sum((times.wire_seconds for _, times in syncs), unknown),
            data_seconds=phases.data,
            forward_seconds=phases.forward,
            backward_seconds=phases.backward,
            optimizer_seconds=phases.optimizer,
            # A host that queues work and then waits for its device says nothing by its CPU time.
            cpu_seconds=self.cpu_seconds if self.laps is None else math.nan,
            samples=phases.samples,
            payload_bytes=sum(times.payload_bytes for _, times in syncs) + sum(use.size_bytes for use in sums.uses),
            collectives=sum(times.collectives for _, times in syncs) + sum(use.count for use in sums.uses),
            overhead_seconds=phases.overhead,
            loss=phases.loss,
            busy_seconds=sum((times.busy_seconds for _, times in syncs), unknown),
            latency_seconds=syncs[-1][1].latency_seconds if syncs else 0.0,
            compute_seconds=max(phases.compute - sums.unseen_seconds, 0.0),
            unclear_seconds=sums.unclear_seconds,
            # Where waits are only seen when they are over, what it was delayed in them is not to be taken off.
            run_delay_seconds=None if self.laps or sums.uses or math.isnan(phases.run_delay) else phases.run_delay,
            routed_bytes=sums.routed_bytes,
            groups=sums.uses,
            new_groups=sums.new_groups,
        )
        phases.syncs, phases.groups = [], None  # they hold what their times are read from
        return self._record


# -------------------------------------------------------------------------------------------------
# Steps whose device has not come so far yet, in order.

KEPT = 1024
"""Steps that wait at most; then the oldest go."""

LOOKS, PAUSE_SECONDS = 100, 0.01
"""How often it is checked once more at the end of a run, and after how long each time."""

_log = logging.getLogger(__name__)


class UnreachedSteps:
    """Drafts with marks that may not be reached yet; one thread adds, another drains.

    A step that is overtaken by the next one will never be recorded: it is left out, which is logged once. So is,
    without a word, one that lacks a mark.
    """

    def __init__(self) -> None:
        self._drafts: deque[tuple[Draft, bool]] = deque(maxlen=KEPT)
        self._guard = threading.Lock()
        self._warned = False

    def add(self, draft: Draft, recorded: bool) -> None:
        """Add a draft that waits for its marks.

        Args:
            draft: It has marks.
            recorded: Whether it is part of the run; given back with it.
        """
        with self._guard:
            self._drafts.append((draft, recorded))

    def drain(self) -> list[tuple[Draft, bool]]:
        """Return the drafts that can be recorded by now, oldest first."""
        with self._guard:
            drafts = list(self._drafts)
        # The newest first: the device goes on while it is read, and would seem to have passed over older ones.
        ready = [number for number in reversed(range(len(drafts))) if drafts[number][0].settled()][::-1]
        if not ready:
            return []
        # Up to the newest that is reached all go; the oldest of them may have been pushed out meanwhile.
        gone = drafts[: ready[-1] + 1]
        numbers = {id(draft) for draft, _ in gone}
        with self._guard:
            while self._drafts and id(self._drafts[0][0]) in numbers:
                self._drafts.popleft()
        overtaken = sum(not draft.lost for draft, _ in gone) - len(ready)
        if overtaken:
            level = logging.DEBUG if self._warned else logging.WARNING
            self._warned = True
            _log.log(
                level,
                "%d steps are not recorded: the device has gone past the end of a later one and not of these; training "
                "goes on",
                overtaken,
            )
        return [drafts[number] for number in ready]

    def drain_last(self, pause: Callable[[float], object]) -> list[tuple[Draft, bool]]:
        """Return what can be recorded within a second; what is not reached then is left out.

        Args:
            pause: Waits for so many seconds.
        """
        drafts = self.drain()
        for _ in range(LOOKS):
            if not self._drafts:
                break
            pause(PAUSE_SECONDS)
            drafts += self.drain()
        with self._guard:
            self._drafts.clear()
        return drafts


# -------------------------------------------------------------------------------------------------
# The clock itself, in the training thread.

Clock = Callable[[], float]


@dataclass
class StepClock:
    """Makes drafts of this rank's `StepRecord`s.

    Args:
        rank: Global rank.
        emit: Called with every finished step, when nothing more can be added to it.
        now, cpu, wall: Clocks: monotonic seconds, CPU seconds of this process, seconds since 1970.
        run_delay: How many seconds the calling thread has been ready to run and had no CPU, up to now; NaN: not known.
        always_synced: Count every optimizer update as a step, though no synchronisation was seen.
        groups: Adds up what is done in watched groups: an update with some of it is a step, as all ranks take part.
        is_manual: Whether only `step_ends` ends a step.
    """

    rank: int
    emit: Callable[[Draft], None]
    now: Clock = time.perf_counter
    cpu: Clock = time.process_time
    wall: Clock = time.time
    run_delay: Clock = lambda: math.nan
    always_synced: bool = False
    step: int = 0
    groups: WaitMeter | None = None
    is_manual: bool = False
    _pending: Draft | None = None
    _has_optimizer: bool = False
    _marks: DeviceEvents | None = None
    _laps: PhaseEvents | None = None

    def __post_init__(self) -> None:
        self.restart()
        self._blocked_delay = self._delay_mark

    def time_by(self, marks: DeviceEvents) -> None:
        """Time steps by marks on a device from now on; the step under way is discarded."""
        self._marks, self.run_delay = marks, float
        self.restart()

    def forward_begins(self, samples: int = 0) -> None:
        """A forward pass begins; a finished step is complete, since nothing more can be logged to it."""
        if self._open.syncs and not self._has_optimizer:
            self._close()
        if self._open.forwards == 0:
            self._open.data += self._lap("data")
        else:
            self._open.backward += self._lap("backward")
        self.flush()
        self._open.forwards += 1
        self._open.samples += samples
        self._own_time()

    def forward_ends(self) -> None:
        """A forward pass ends; the loss and backward follow."""
        self._open.forward += self._lap("forward")

    def backward_ends(self) -> None:
        """Backward has no work left; from here on this rank is blocked in synchronisation."""
        self._open.backward += self._lap("backward")

    def sync_ends(self, take: Callable[[], Told], ago: float = 0.0) -> None:
        """The gradients are synchronised.

        Args:
            take: Sets apart what has to be known to work out what that took (its own time is the instrument's).
            ago: Seconds since then; what was done meanwhile is no part of the synchronisation.
        """
        now = self.now()
        exposed = self._lap(SYNC, now - ago)
        self._open.exposed += exposed
        self._open.syncs.append((exposed, take()))
        self._open.overhead += self.now() - now

    def blocks(self) -> None:
        """This rank is about to be blocked on others inside a forward pass; `blocked` is called with how long."""
        self._blocked_delay = self.run_delay()
        if self._laps is not None:
            self._laps.end("forward")

    def blocked(self, seconds: float) -> None:
        """This rank was blocked on others for so long inside the phase under way (buffers broadcast in forward)."""
        self._open.exposed += seconds
        self._mark += seconds
        self._delay_mark += self.run_delay() - self._blocked_delay
        if self._laps is not None:
            self._laps.end("exposed")

    def waited(self, began: Any, ended: Any) -> None:
        """This rank was blocked in a watched group, inside the phase under way.

        Args:
            began, ended: Moments of `now`, or marks where steps are timed by them.
        """
        if self._laps is not None:
            self._laps.waited(began, ended)
        else:
            self._open.exposed += ended - began
            self._mark += ended - began

    def instrumented(self, seconds: float) -> None:
        """An instrument of ours took so long inside the phase under way, of which it stays a part."""
        self._open.overhead += seconds

    def optimizer_begins(self) -> None:
        """An optimizer update begins; frameworks that run forward and backward inside of it are not in it yet."""
        if self._open.syncs or self.always_synced:
            self._open.optimizer += self._lap("optimizer")
        elif self._has_collectives() and not self._open.forwards:
            self._open.compute += self._lap("compute")

    def optimizer_ends(self) -> None:
        """An optimizer update ends; the step with it, if gradients were synchronised in it."""
        self._has_optimizer = True
        self._open.optimizer += self._lap("optimizer")
        if (self._open.syncs or self._has_collectives() or self.always_synced) and not self.is_manual:
            self._close()
        self._own_time()

    def step_ends(self) -> None:
        """A step ends here, whatever optimizers do: from now on only this ends one."""
        self.is_manual = True
        self._open.compute += self._lap("compute")
        self._close()
        self._own_time()

    def log(self, loss: float | None = None, samples: int | None = None) -> None:
        """Add to the step under way, or to the one that just ended if the next has not begun."""
        late = self._pending if self._open.forwards == 0 else None
        phases = late.phases if late is not None else self._open
        phases.loss = phases.loss if loss is None else loss
        phases.samples = phases.samples if samples is None else samples

    def flush(self) -> None:
        """Emit the last finished step."""
        if self._pending is not None:
            draft, self._pending = self._pending, None
            self.emit(draft)

    def restart(self) -> None:
        """Discard the open step and begin a new one now, as after a pause in training."""
        self._open = StepPhases()
        self._began = self._mark = self.now()
        self._cpu_began = self.cpu()
        self._delay_mark = self.run_delay()
        self._laps = None if self._marks is None else PhaseEvents(self._marks, self._marks.mark())

    def _has_collectives(self) -> bool:
        return self.groups is not None and self.groups.has_issued

    def _lap(self, phase: str, until: float | None = None) -> float:
        end = self.now() if until is None else max(until, self._mark)
        seconds, self._mark = end - self._mark, end
        delay = self.run_delay()
        if phase != SYNC:
            # NaN, not known, where the kernel does not say or another thread goes on.
            self._open.run_delay += min(delay - self._delay_mark, seconds)
        self._delay_mark = delay
        if self._laps is not None:
            self._laps.end(phase)
        return seconds

    def _own_time(self) -> None:
        """Ascribe what has passed since the last lap to this instrument itself (it stays part of its phase, too)."""
        self._open.overhead += self.now() - self._mark

    def _close(self) -> None:
        self.flush()
        cpu = self.cpu()
        seconds = self._mark - self._began
        if self.groups is not None:
            self._open.groups = self.groups.end_step()
        self._pending = Draft(self.rank, self.step, self.wall(), seconds, cpu - self._cpu_began, self._open, self._laps)
        self.step += 1
        if self._laps is not None:
            self._laps = self._laps.next()
        self._open, self._began, self._cpu_began = StepPhases(), self._mark, cpu
