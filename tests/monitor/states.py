"""What every rank did lately, as the collector's watchers are shown it."""

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from ringside.monitor.run.records import Row
from ringside.monitor.verdict import Verdict, VerdictEvent

STEPS_KEPT = 128


class LastSteps(NamedTuple):
    """One rank; seconds are medians over the steps kept, NaN where nothing is known."""

    rank: int
    step: int
    own_seconds: float
    wait_seconds: float


class StepsSeen:
    """A watcher that keeps the newest completed steps and judges nothing."""

    def __init__(self) -> None:
        self._rows: deque[Row] = deque(maxlen=STEPS_KEPT)

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        """Keep a step."""
        self._rows.append(row)
        return []

    @property
    def open(self) -> list[Verdict]:
        """None is ever open."""
        return []

    def states(self, ranks: int) -> list[LastSteps]:
        """Return what each rank did in the steps kept."""
        return [self._state(rank) for rank in range(ranks)]

    def _state(self, rank: int) -> LastSteps:
        records = [row[rank] for row in self._rows if rank in row]
        if not records:
            return LastSteps(rank, -1, math.nan, math.nan)
        own, wait = ([getattr(record, name) for record in records] for name in ("own_seconds", "wait_seconds"))
        return LastSteps(rank, records[-1].step, float(np.median(own)), float(np.median(wait)))
