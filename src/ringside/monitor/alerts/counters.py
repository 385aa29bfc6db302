"""What a run adds up to: the one aggregate that `/metrics` is read from. Memory is bounded by ranks, not by steps."""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ringside.monitor.alerts.book import Alert
from ringside.monitor.collector import StepCollector
from ringside.monitor.run.records import Row, RunInfo, StepRecord
from ringside.monitor.stats import Floats

RANK_FIELDS = ("own_seconds", "wait_seconds", "exposed_seconds")
JOB_FIELDS = ("step_seconds", "overhead_seconds", "payload_bytes", "samples")
RECENT_STEPS = 32
STEP_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0, 300.0)


@dataclass
class MetricsSnapshot:
    """The aggregate at one moment; nothing of it changes any more, so any thread may read it.

    Args:
        info: What was known when the run began.
        steps: Completed steps.
        rank_totals: Seconds per rank since the start, by field of `RANK_FIELDS`; float64 [ranks] each.
        rank_recent: Mean seconds per step and rank over the newest steps, likewise; NaN = unknown.
        job_totals: Sums over ranks and steps, by field of `JOB_FIELDS`.
        step_counts: Completed steps per bucket of `STEP_BUCKETS_S`, and one more for those beyond; not cumulative.
        step_sum: Sum of the steps' durations, seconds.
        last_step_unix: When the newest step was completed; NaN before the first.
        lag_seconds: End of the newest completed step on rank 0 until it was completed here; NaN where not known.
        lag_steps: Newest step that any rank reported minus the newest completed one.
        records: Records taken in.
        late: Records that came after their step was completed.
        invalid: Records of ranks that do not exist.
        missing: Records that never came for completed steps.
        cost_rank_seconds: Sum of all verdicts' prices so far; never falls.
        active: Alerts whose cause has not ended.
        opened: Alerts so far, by kind.
        notifications: (hook's label, outcome) to number of alerts.
    """

    info: RunInfo
    rank_totals: dict[str, Floats]
    rank_recent: dict[str, Floats]
    job_totals: dict[str, float]
    step_counts: tuple[int, ...]
    steps: int = 0
    step_sum: float = 0.0
    last_step_unix: float = math.nan
    lag_seconds: float = math.nan
    lag_steps: int = 0
    records: int = 0
    late: int = 0
    invalid: int = 0
    missing: int = 0
    cost_rank_seconds: float = 0.0
    active: list[Alert] = field(default_factory=list)
    opened: dict[str, int] = field(default_factory=dict)
    notifications: dict[tuple[str, str], int] = field(default_factory=dict)


class MetricCounters:
    """Adds up what the collector has completed.

    Args:
        info: What was known when the run began.
        wall: Seconds since 1970.
    """

    def __init__(self, info: RunInfo, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._guard = threading.Lock()
        self._ended_cost = 0.0
        self._recent: deque[Floats] = deque(maxlen=RECENT_STEPS)
        self._counts = [0] * (len(STEP_BUCKETS_S) + 1)
        totals = {name: np.zeros(info.world_size) for name in RANK_FIELDS}
        self._sums = MetricsSnapshot(info, totals, {}, dict.fromkeys(JOB_FIELDS, 0.0), ())

    def add(self, records: Sequence[StepRecord], collector: StepCollector) -> None:
        """Take in what the collector has just taken in, once.

        Args:
            records: The same batch that its `add` was given.
            collector: The collector, after that.
        """
        # Episodes that are over have `until_step`; their final prices are in `_ended_cost`.
        open_cost = sum(v.cost_rank_seconds for v in collector.verdicts if "until_step" not in v.evidence)
        with self._guard:
            sums = self._sums
            invalid = sum(not 0 <= record.rank < sums.info.world_size or record.step < 0 for record in records)
            sums.records, sums.invalid = sums.records + len(records) - invalid, sums.invalid + invalid
            for row in collector.completed:
                self._count_step(row)
            sums.steps, sums.late, sums.lag_steps = collector.steps, collector.late, collector.lag_steps
            sums.cost_rank_seconds = max(sums.cost_rank_seconds, self._ended_cost + open_cost)

    def add_final_cost(self, cost_rank_seconds: float) -> None:
        """Add the final price of a verdict whose episode is over."""
        with self._guard:
            self._ended_cost += cost_rank_seconds

    def snapshot(
        self, active: list[Alert], opened: dict[str, int], notifications: dict[tuple[str, str], int]
    ) -> MetricsSnapshot:
        """Return everything as it is now, with what the caller knows of alerts."""
        with self._guard:
            sums, means = self._sums, np.full((len(RANK_FIELDS), self._sums.info.world_size), np.nan)
            if self._recent:
                stack = np.stack(self._recent, axis=1)  # [fields, newest steps, ranks]
                known = np.sum(~np.isnan(stack), axis=1)
                means = np.where(known > 0, np.nansum(stack, axis=1) / np.maximum(known, 1), np.nan)
            return replace(
                sums,
                rank_totals={name: values.copy() for name, values in sums.rank_totals.items()},
                rank_recent=dict(zip(RANK_FIELDS, means, strict=True)),
                job_totals=dict(sums.job_totals),
                step_counts=tuple(self._counts),
                active=active,
                opened=opened,
                notifications=notifications,
            )

    def _count_step(self, row: Row) -> None:
        """Add a completed step to the totals; what is no duration or count (NaN, negative) adds nothing."""
        sums = self._sums
        values = np.full((len(RANK_FIELDS), sums.info.world_size), np.nan)
        for rank, record in row.items():
            times = [getattr(record, name) for name in RANK_FIELDS]
            values[:, rank] = [value if 0 <= value < math.inf else math.nan for value in times]
            for name in JOB_FIELDS:
                sums.job_totals[name] += _known(getattr(record, name))
        for name, line in zip(RANK_FIELDS, values, strict=True):
            sums.rank_totals[name] += np.nan_to_num(line)
        self._recent.append(values)
        sums.missing += sums.info.world_size - len(row)
        # The step's duration is the median over ranks, which agree in synchronous training.
        seconds = float(np.median([_known(record.step_seconds) for record in row.values()]))
        self._counts[bisect_left(STEP_BUCKETS_S, seconds)] += 1
        sums.step_sum += seconds
        sums.last_step_unix = self._wall()
        sums.lag_seconds = max(sums.last_step_unix - row[0].ended_unix, 0.0) if 0 in row else math.nan


def _known(value: float) -> float:
    return value if 0 <= value < math.inf else 0.0
