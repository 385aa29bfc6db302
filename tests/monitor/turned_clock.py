"""A step clock with hands to turn."""

from __future__ import annotations

import pytest

from ringside.monitor.run.records import StepRecord
from ringside.monitor.step_clock import StepClock, SyncTimes


class World:
    """A step clock with hands to turn; `records` are those it has given out."""

    def __init__(self, **how: bool) -> None:
        self.time, self.run_delay = 100.0, 5.0
        self.records: list[StepRecord] = []
        self.clock = StepClock(
            3,
            lambda draft: self.records.append(draft.record()),
            now=lambda: self.time,
            cpu=lambda: self.time * 2,
            wall=lambda: self.time + 1e9,
            run_delay=lambda: self.run_delay,
            **how,
        )

    def passes(self, seconds: float, *, run_delay: float = 0.0) -> None:
        self.time += seconds
        self.run_delay += run_delay

    def forward(self, seconds: float = 2.0, samples: int = 8) -> None:
        self.clock.forward_begins(samples)
        self.passes(seconds)
        self.clock.forward_ends()

    def backward(self, seconds: float = 3.0, exposed: float = 0.5, times: SyncTimes | None = None) -> None:
        self.passes(seconds)
        self.clock.backward_ends()
        self.passes(exposed)
        self.clock.sync_ends(lambda: lambda: times or SyncTimes(0.7, 0.2, 0.4, 1000, 2))

    def optimizer(self, seconds: float = 1.0) -> None:
        self.clock.optimizer_begins()
        self.passes(seconds)
        self.clock.optimizer_ends()

    def step(self) -> None:
        self.passes(0.25)
        self.forward()
        self.backward()
        self.optimizer()

    def finished(self) -> list[StepRecord]:
        self.clock.flush()
        for record in self.records:
            phases = record.data_seconds + record.forward_seconds + record.backward_seconds
            phases += record.exposed_seconds + record.optimizer_seconds
            assert phases == pytest.approx(record.step_seconds)
            assert record.own_seconds + record.exposed_seconds == pytest.approx(record.step_seconds)
        return self.records
