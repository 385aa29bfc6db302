"""Cuts a rank's time into training steps and their phases; pure, with injected clocks.

A step runs from the end of one optimizer update to the end of the next. Whoever hooks the training loop calls the
methods below as things happen; every call ascribes the time since the previous one to a phase, so that the phases of a
step always add up to the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ringside.monitor.records import StepRecord

Clock = Callable[[], float]


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


@dataclass(slots=True)
class _Sums:
    """The open step so far."""

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    exposed: float = 0.0
    optimizer: float = 0.0
    overhead: float = 0.0
    wait: float = 0.0
    sync: float = 0.0
    wire: float = 0.0
    payload_bytes: int = 0
    collectives: int = 0
    busy: float = 0.0
    latency: float = 0.0
    samples: int = 0
    loss: float | None = None
    forwards: int = 0
    synced: bool = False


@dataclass
class StepClock:
    """Makes this rank's `StepRecord`s.

    Args:
        rank: Global rank.
        emit: Called with every finished record, when nothing more can be added to it.
        now, cpu, wall: Clocks: monotonic seconds, CPU seconds of this process, seconds since 1970.
        always_synced: Count every optimizer update as a step, though no synchronisation was seen.
    """

    rank: int
    emit: Callable[[StepRecord], None]
    now: Clock = time.perf_counter
    cpu: Clock = time.process_time
    wall: Clock = time.time
    always_synced: bool = False
    step: int = 0
    _sums: _Sums = field(default_factory=_Sums)
    _pending: StepRecord | None = None
    _has_optimizer: bool = False

    def __post_init__(self) -> None:
        self._began = self._mark = self.now()
        self._cpu_began = self.cpu()

    def forward_begins(self, samples: int = 0) -> None:
        """A forward pass begins; a finished step is complete, since nothing more can be logged to it."""
        if self._sums.synced and not self._has_optimizer:
            self._close()
        if self._sums.forwards == 0:
            self._sums.data += self._lap()
        else:
            self._sums.backward += self._lap()
        self.flush()
        self._sums.forwards += 1
        self._sums.samples += samples
        self._own_time()

    def forward_ends(self) -> None:
        """A forward pass ends; the loss and backward follow."""
        self._sums.forward += self._lap()

    def backward_ends(self) -> None:
        """Backward has no work left; from here on this rank is blocked in synchronisation."""
        self._sums.backward += self._lap()

    def sync_ends(self, tell: Callable[[], SyncTimes]) -> None:
        """The gradients are synchronised; `tell` says what that took (and its own time is the instrument's)."""
        exposed = self._lap()
        times, sums = tell(), self._sums
        sums.exposed += exposed
        sums.wait += min(times.wait_seconds, exposed) if times.wait_seconds == times.wait_seconds else float("nan")
        sums.sync += times.sync_seconds
        sums.wire += times.wire_seconds
        sums.payload_bytes += times.payload_bytes
        sums.collectives += times.collectives
        sums.busy += times.busy_seconds
        sums.latency = times.latency_seconds
        sums.synced = True
        self._own_time()

    def blocked(self, seconds: float) -> None:
        """This rank was blocked on others for so long inside the phase under way (buffers broadcast in forward)."""
        self._sums.exposed += seconds
        self._mark += seconds

    def instrumented(self, seconds: float) -> None:
        """An instrument of ours took so long inside the phase under way, of which it stays a part."""
        self._sums.overhead += seconds

    def optimizer_begins(self) -> None:
        """An optimizer update begins; frameworks that run forward and backward inside of it are not in it yet."""
        if self._sums.synced or self.always_synced:
            self._sums.optimizer += self._lap()

    def optimizer_ends(self) -> None:
        """An optimizer update ends; the step with it, if gradients were synchronised in it."""
        self._has_optimizer = True
        self._sums.optimizer += self._lap()
        if self._sums.synced or self.always_synced:
            self._close()
        self._own_time()

    def log(self, loss: float | None = None, samples: int | None = None) -> None:
        """Add to the step under way, or to the one that just ended if the next has not begun."""
        if self._pending is not None and self._sums.forwards == 0:
            record = self._pending
            self._pending = msgspec.structs.replace(
                record,
                loss=record.loss if loss is None else loss,
                samples=record.samples if samples is None else samples,
            )
            return
        self._sums.loss = self._sums.loss if loss is None else loss
        self._sums.samples = self._sums.samples if samples is None else samples

    def flush(self) -> None:
        """Emit the last finished step."""
        if self._pending is not None:
            record, self._pending = self._pending, None
            self.emit(record)

    def restart(self) -> None:
        """Forget the open step and begin a new one now, as after a pause in training."""
        self._sums = _Sums()
        self._began = self._mark = self.now()
        self._cpu_began = self.cpu()

    def _lap(self) -> float:
        now = self.now()
        seconds, self._mark = now - self._mark, now
        return seconds

    def _own_time(self) -> None:
        """Ascribe what has passed since the last lap to this instrument itself (it stays part of its phase, too)."""
        self._sums.overhead += self.now() - self._mark

    def _close(self) -> None:
        self.flush()
        sums, cpu = self._sums, self.cpu()
        seconds = self._mark - self._began
        self._pending = StepRecord(
            step=self.step,
            rank=self.rank,
            ended_unix=self.wall(),
            step_seconds=seconds,
            own_seconds=max(seconds - sums.exposed, 0.0),
            wait_seconds=sums.wait,
            exposed_seconds=sums.exposed,
            sync_seconds=sums.sync,
            wire_seconds=sums.wire,
            data_seconds=sums.data,
            forward_seconds=sums.forward,
            backward_seconds=sums.backward,
            optimizer_seconds=sums.optimizer,
            cpu_seconds=cpu - self._cpu_began,
            samples=sums.samples,
            payload_bytes=sums.payload_bytes,
            collectives=sums.collectives,
            overhead_seconds=sums.overhead,
            loss=sums.loss,
            busy_seconds=sums.busy,
            latency_seconds=sums.latency,
        )
        self.step += 1
        self._sums, self._began, self._cpu_began = _Sums(), self._mark, cpu
