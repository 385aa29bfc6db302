"""Step records as arrays, bounded in memory: by step and rank, and the vitals that few of them carry as rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.run.records import StepRecord, Vitals
from ringside.monitor.stats import LARGEST, Floats, row_medians, share_of

# -------------------------------------------------------------------------------------------------
# Vitals as columns, one row for each record that carries any.

VITALS_FIELDS = Vitals.__struct_fields__
KEPT = 100_000
"""Vitals kept in full: 30 MB; beyond it every second one of each rank is left out, again and again."""


class VitalsTable:
    """Vitals, one row each.

    Args:
        ranks: Number of ranks.
        steps: Training step of each row, int [rows].
        owners: Rank of each row, int [rows].
        values: float64 [rows, fields], NaN = not known, in the order of `VITALS_FIELDS`.
    """

    def __init__(self, ranks: int, steps: NDArray[np.int64], owners: NDArray[np.int64], values: Floats) -> None:
        self.ranks, self.steps, self.owners = ranks, steps, owners
        self._values = values

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, field: str) -> Floats:
        """Return one field as float64 [rows]."""
        return self._values[:, VITALS_FIELDS.index(field)]

    def between(self, first_step: int, until_step: int | None = None) -> VitalsTable:
        """Return the rows of the training steps first_step ≤ step < until_step."""
        inside = self.steps >= first_step
        if until_step is not None:
            inside &= self.steps < until_step
        return VitalsTable(self.ranks, self.steps[inside], self.owners[inside], self._values[inside])

    def of_ranks(self, ranks: Sequence[int]) -> VitalsTable:
        """Return the rows of some ranks, ascending, which are numbered from 0 in it."""
        inside = np.isin(self.owners, ranks)
        owners = np.searchsorted(ranks, self.owners[inside])
        return VitalsTable(len(ranks), self.steps[inside], owners, self._values[inside])

    def mean(self, values: Floats) -> Floats:
        """Return the mean of each rank, float64 [ranks], weighted by the time the rows stand for; NaN: not known.

        Args:
            values: float64 [rows], NaN = not known.
        """
        seconds = self["seconds"]
        known = np.isfinite(values) & (seconds > 0)
        sums = np.bincount(self.owners[known], (values * seconds)[known], self.ranks)
        weights = np.bincount(self.owners[known], seconds[known], self.ranks)
        return share_of(sums, weights)


class VitalsGatherer:
    """Makes a `VitalsTable` of records in any order.

    Args:
        ranks: Number of ranks.
        limit: Vitals to keep at most.
    """

    def __init__(self, ranks: int, limit: int = KEPT) -> None:
        self._ranks, self._limit, self._stride = ranks, max(limit, 2 * ranks), 1
        self._seen = [0] * ranks
        self._rows: list[tuple[int, int, int, Floats]] = []

    def add(self, record: StepRecord) -> None:
        """Take in a record of a rank that exists."""
        if record.vitals is None or not 0 < record.vitals.seconds <= LARGEST:
            return
        number = self._seen[record.rank]
        self._seen[record.rank] += 1
        if number % self._stride:
            return
        read = (getattr(record.vitals, name) for name in VITALS_FIELDS)
        # What cannot be a time or a count is not known; a whole number may be larger than any float.
        values = np.array([math.nan if value is None else float(max(min(value, 2 * LARGEST), -1)) for value in read])
        values = np.where((values >= 0) & (values <= LARGEST), values, np.nan)
        self._rows.append((number, record.step, record.rank, values))
        if len(self._rows) > self._limit:
            self._stride *= 2
            self._rows = [row for row in self._rows if row[0] % self._stride == 0]

    def table(self) -> VitalsTable:
        """Return what was taken in."""
        steps = np.array([row[1] for row in self._rows], dtype=np.int64)
        owners = np.array([row[2] for row in self._rows], dtype=np.int64)
        values = np.stack([row[3] for row in self._rows]) if self._rows else np.empty((0, len(VITALS_FIELDS)))
        return VitalsTable(self._ranks, steps, owners, values)


# -------------------------------------------------------------------------------------------------
# Step records as arrays [steps, ranks]: a long run is kept at a coarser stride.

_NO_NUMBERS = frozenset({"step", "rank", "ended_unix", "vitals", "wires", "groups", "new_groups"})
FIELDS = tuple(name for name in StepRecord.__struct_fields__ if name not in _NO_NUMBERS)
"""What a table has of a record: the figures of a step."""
CELLS = 1_000_000
"""Records kept in full: 160 MB; beyond it every second step is dropped, again and again."""


class StepTable:
    """What was recorded, by field.

    Args:
        steps: Training step of each row, int [steps], ascending.
        stride: How many training steps one row stands for.
        values: float64 [fields, steps, ranks], NaN = missing, in the order of `FIELDS`.
        vitals: What the machines reported of the ranks; in steps of its own, that the stride does not thin out.
    """

    def __init__(self, steps: np.ndarray, stride: int, values: Floats, vitals: VitalsTable) -> None:
        self.steps, self.stride, self.vitals = steps, stride, vitals
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

    def of_ranks(self, ranks: Sequence[int]) -> StepTable:
        """Return the columns of some ranks, ascending, which are numbered from 0 in it."""
        return StepTable(self.steps, self.stride, self._values[:, :, list(ranks)], self.vitals.of_ranks(ranks))


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
            read = (getattr(record, name) for name in FIELDS)
            row[:, record.rank] = [math.nan if value is None else value for value in read]
        if len(rows) > limit:
            stride *= 2
            rows = {kept: value for kept, value in rows.items() if kept % stride == 0}
    steps = np.array(sorted(rows), dtype=np.int64)
    values = np.stack([rows[int(step)] for step in steps], axis=1) if rows else np.empty((len(FIELDS), 0, ranks))
    return StepTable(steps, stride, values, vitals.table())


def job_step_seconds(table: StepTable) -> Floats:
    """Return how long each step of the job took, float64 [steps]: the median over ranks, which agree in synchronous
    training."""
    return row_medians(table["step_seconds"])


def job_exposed_seconds(table: StepTable) -> Floats:
    """Return how long each step was blocked in synchronisation, float64 [steps]: on the rank that was blocked least.

    Nobody's lateness is in it. Of steps in which a rank is missing that reports at all it is not known (NaN).
    """
    return least_of_ranks(of_whole_steps(table["exposed_seconds"]))


def least_of_ranks(values: Floats, *, positive: bool = False) -> Floats:
    """Return the least of every step's values, float64 [steps]; NaN where none is known (or none is positive).

    Args:
        values: float64 [steps, ranks], NaN = missing.
        positive: Whether 0 stands for not known as well.
    """
    known = np.isfinite(values) & (values > 0 if positive else values >= 0)
    least: Floats = np.fmin.reduce(np.where(known, values, np.nan), axis=1, initial=np.nan)
    return least


def of_whole_steps(values: Floats) -> Floats:
    """Return values [steps, ranks] without the steps in which a rank is missing that reports at all.

    It may be the one that the others waited for: what is least among those is nobody's measure.
    """
    known = np.isfinite(values)
    reports = known.any(axis=0)
    whole = known[:, reports].all(axis=1, keepdims=True)
    return np.where(whole, values, np.nan)


def fill_waits(table: StepTable) -> Floats:
    """Return `wait_seconds` [steps, ranks], with exposed − min over ranks of exposed where a rank could not know it.

    All ranks leave a synchronisation together, so who was blocked least arrived last and waited for nobody.
    """
    waits, exposed = table["wait_seconds"], table["exposed_seconds"]
    least = np.fmin.reduce(exposed, axis=1, initial=np.nan, keepdims=True)
    with np.errstate(invalid="ignore"):  # inf - inf
        return np.where(np.isnan(waits), exposed - least, waits)
