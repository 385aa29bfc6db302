"""A finished training step before its record is worked out: what the training thread had to read, and no more.

In a step that leaves the caches cold every line costs several times what it costs alone, so sums over collectives, and
the record itself, are made when the record is needed, on another thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ringside.monitor.run.records import StepRecord


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
        syncs: Of each backward pass how long the rank was blocked in its synchronisation, and how to get its times.
    """

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    exposed: float = 0.0
    optimizer: float = 0.0
    overhead: float = 0.0
    samples: int = 0
    loss: float | None = None
    forwards: int = 0
    syncs: list[tuple[float, Told]] = field(default_factory=list)


class PhaseLaps(Protocol):
    """Times a step by its device's clock; see `ringside.monitor.step_clock.device_events.PhaseEvents`."""

    @property
    def lost(self) -> bool:
        """Whether the step can never be recorded."""

    def settle(self) -> bool:
        """Read what every part took; False: the device has not come so far."""

    def write(self, phases: StepPhases) -> float:
        """Replace the host's times by the device's, and return that of the step, seconds."""


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
    laps: PhaseLaps | None = None
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
        if self.laps is not None:
            self.seconds = self.laps.write(phases)
        syncs = [(exposed, read_times()) for exposed, read_times in phases.syncs]
        # A rank waits for others at most while it is blocked; `min` in this order keeps a NaN: it is not known.
        waits = [min(times.wait_seconds, exposed) for exposed, times in syncs]
        self._record = StepRecord(
            step=self.step,
            rank=self.rank,
            ended_unix=self.ended_unix,
            step_seconds=self.seconds,
            own_seconds=max(self.seconds - phases.exposed, 0.0),
            wait_seconds=sum(waits),
            exposed_seconds=phases.exposed,
            sync_seconds=sum(times.sync_seconds for _, times in syncs),
            wire_seconds=sum(times.wire_seconds for _, times in syncs),
            data_seconds=phases.data,
            forward_seconds=phases.forward,
            backward_seconds=phases.backward,
            optimizer_seconds=phases.optimizer,
            cpu_seconds=self.cpu_seconds,
            samples=phases.samples,
            payload_bytes=sum(times.payload_bytes for _, times in syncs),
            collectives=sum(times.collectives for _, times in syncs),
            overhead_seconds=phases.overhead,
            loss=phases.loss,
            busy_seconds=sum(times.busy_seconds for _, times in syncs),
            latency_seconds=syncs[-1][1].latency_seconds if syncs else 0.0,
        )
        phases.syncs = []  # they hold what their times are read from
        return self._record
