"""Step records as arrays [steps, ranks], bounded in memory: a long run is kept at a coarser stride."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ringside.monitor.run.records import StepRecord
from ringside.monitor.run.vitals_table import VitalsGatherer, VitalsTable
from ringside.monitor.stats import Floats

FIELDS = (
    "step_seconds",
    "own_seconds",
    "wait_seconds",
    "exposed_seconds",
    "sync_seconds",
    "wire_seconds",
    "data_seconds",
    "forward_seconds",
    "backward_seconds",
    "optimizer_seconds",
    "cpu_seconds",
    "samples",
    "payload_bytes",
    "collectives",
    "overhead_seconds",
    "loss",
    "busy_seconds",
    "latency_seconds",
)
CELLS = 1_000_000
"""Records kept in full: 144 MB; beyond it every second step is dropped, again and again."""


class StepTable:
    """What was recorded, by field.

    Args:
        steps: Training step of each row, int [steps], ascending.
        stride: How many training steps one row stands for.
        values: float64 [fields, steps, ranks], NaN = missing, in the order of `FIELDS`.
        vitals: What the machines reported of the ranks; in steps of its own, that the stride does not thin out.
    """

    def __init__(self, steps: np.ndarray, stride: int, values: Floats, vitals: VitalsTable | None = None) -> None:
        self.steps = steps
        self.stride = stride
        self.vitals = vitals if vitals is not None else VitalsGatherer(values.shape[2]).table()
        self._values = values

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self._values.shape[2])

    def __getitem__(self, field: str) -> Floats:
        """Return one field as float64 [steps, ranks]."""
        values: Floats = self._values[FIELDS.index(field)]
        return values

    def between(self, first_step: int, until_step: int | None = None) -> StepTable:
        """Return the rows of the training steps first_step ≤ step < until_step; at least one, if any."""
        rows = self.rows(first_step, until_step)
        return StepTable(
            self.steps[rows], self.stride, self._values[:, rows], self.vitals.between(first_step, until_step)
        )

    def rows(self, first_step: int, until_step: int | None = None) -> slice:
        """Return which rows those are."""
        begin = min(int(np.searchsorted(self.steps, first_step)), max(len(self) - 1, 0))
        end = len(self) if until_step is None else max(int(np.searchsorted(self.steps, until_step)), begin + 1)
        return slice(begin, end)

    def before(self, step: int) -> StepTable:
        """Return the rows before a training step; none, where there are none."""
        end = int(np.searchsorted(self.steps, step))
        return StepTable(self.steps[:end], self.stride, self._values[:, :end], self.vitals.between(0, step))


def tabulate(records: Iterable[StepRecord], ranks: int, *, cells: int = CELLS, stride: int = 1) -> StepTable:
    """Arrange step records by step and rank.

    Args:
        records: In any order; of two records of one step and rank the first counts, and records of ranks that do not
            exist or of negative steps count for nothing.
        ranks: Number of ranks.
        cells: Records to keep at most (beyond it the stride doubles).
        stride: Keep one training step of so many at most: where some stretches have no more, all are to weigh the same.
    """
    rows: dict[int, Floats] = {}
    vitals = VitalsGatherer(ranks)
    limit = max(cells // max(ranks, 1), 16)
    for record in records:
        step = record.step
        if step < 0 or not 0 <= record.rank < ranks:
            continue
        vitals.add(record)
        if step % stride:
            continue
        row = rows.get(step)
        if row is None:
            row = rows[step] = np.full((len(FIELDS), ranks), np.nan)
        if math.isnan(row[1, record.rank]):
            row[:, record.rank] = _values(record)
        if len(rows) > limit:
            stride *= 2
            rows = {kept: value for kept, value in rows.items() if kept % stride == 0}
    steps = np.array(sorted(rows), dtype=np.int64)
    values = np.stack([rows[int(step)] for step in steps], axis=1) if rows else np.empty((len(FIELDS), 0, ranks))
    return StepTable(steps, stride, values, vitals.table())


def _values(record: StepRecord) -> list[float]:
    return [math.nan if (value := getattr(record, name)) is None else value for name in FIELDS]


def fill_waits(table: StepTable) -> Floats:
    """Return `wait_seconds` [steps, ranks], with exposed − min over ranks of exposed where a rank could not know it.

    All ranks leave a synchronisation together, so who was blocked least arrived last and waited for nobody.
    """
    waits, exposed = table["wait_seconds"], table["exposed_seconds"]
    least = np.where(np.isnan(exposed), np.inf, exposed).min(axis=1, initial=np.inf, keepdims=True)
    with np.errstate(invalid="ignore"):
        estimate = np.where(np.isfinite(least), exposed - least, np.nan)
    return np.where(np.isnan(waits), estimate, waits)
