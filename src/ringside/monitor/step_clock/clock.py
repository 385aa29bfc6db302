"""Cuts a rank's time into training steps and their phases; pure, with injected clocks.

A step runs from the end of one optimizer update to the end of the next. The hooks of the training loop call the
methods below as things happen; every call ascribes the time since the previous one to a phase, so that the phases of a
step always add up to the step. Where the work is a device's, marks in its queue say how long the phases took there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ringside.monitor.step_clock.draft import SYNC, DeviceEvents, Draft, PhaseEvents, StepPhases, Told

Clock = Callable[[], float]


@dataclass
class StepClock:
    """Makes drafts of this rank's `StepRecord`s.

    Args:
        rank: Global rank.
        emit: Called with every finished step, when nothing more can be added to it.
        now, cpu, wall: Clocks: monotonic seconds, CPU seconds of this process, seconds since 1970.
        always_synced: Count every optimizer update as a step, though no synchronisation was seen.
    """

    rank: int
    emit: Callable[[Draft], None]
    now: Clock = time.perf_counter
    cpu: Clock = time.process_time
    wall: Clock = time.time
    always_synced: bool = False
    step: int = 0
    _open: StepPhases = field(default_factory=StepPhases)
    _pending: Draft | None = None
    _has_optimizer: bool = False
    _marks: DeviceEvents | None = None
    _laps: PhaseEvents | None = None

    def __post_init__(self) -> None:
        self._began = self._mark = self.now()
        self._cpu_began = self.cpu()

    def time_by(self, marks: DeviceEvents) -> None:
        """Time steps by marks on a device from now on; the step under way is discarded."""
        self._marks = marks
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
        if self._laps is not None:
            self._laps.end("forward")

    def blocked(self, seconds: float) -> None:
        """This rank was blocked on others for so long inside the phase under way (buffers broadcast in forward)."""
        self._open.exposed += seconds
        self._mark += seconds
        if self._laps is not None:
            self._laps.end("exposed")

    def instrumented(self, seconds: float) -> None:
        """An instrument of ours took so long inside the phase under way, of which it stays a part."""
        self._open.overhead += seconds

    def optimizer_begins(self) -> None:
        """An optimizer update begins; frameworks that run forward and backward inside of it are not in it yet."""
        if self._open.syncs or self.always_synced:
            self._open.optimizer += self._lap("optimizer")

    def optimizer_ends(self) -> None:
        """An optimizer update ends; the step with it, if gradients were synchronised in it."""
        self._has_optimizer = True
        self._open.optimizer += self._lap("optimizer")
        if self._open.syncs or self.always_synced:
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
        self._laps = None if self._marks is None else PhaseEvents(self._marks, self._marks.mark())

    def _lap(self, phase: str, until: float | None = None) -> float:
        end = self.now() if until is None else max(until, self._mark)
        seconds, self._mark = end - self._mark, end
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
        self._pending = Draft(self.rank, self.step, self.wall(), seconds, cpu - self._cpu_began, self._open, self._laps)
        self.step += 1
        if self._laps is not None:
            self._laps = self._laps.next()
        self._open, self._began, self._cpu_began = StepPhases(), self._mark, cpu
