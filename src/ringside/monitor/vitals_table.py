"""The vitals of a run as columns; only few records carry any, so they are rows of their own."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.excess import LARGEST, Floats
from ringside.monitor.records import StepRecord, Vitals

FIELDS = Vitals.__struct_fields__
KEPT = 100_000
"""Vitals kept in full: 30 MB; beyond it every second one of each rank is left out, again and again."""


class VitalsTable:
    """Vitals, one row each.

    Args:
        ranks: Number of ranks.
        steps: Training step of each row, int [rows].
        owners: Rank of each row, int [rows].
        values: float64 [rows, fields], NaN = not known, in the order of `FIELDS`.
    """

    def __init__(self, ranks: int, steps: NDArray[np.int64], owners: NDArray[np.int64], values: Floats) -> None:
        self.ranks, self.steps, self.owners = ranks, steps, owners
        self._values = values

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, field: str) -> Floats:
        """Return one field as float64 [rows]."""
        values: Floats = self._values[:, FIELDS.index(field)]
        return values

    def between(self, first_step: int, until_step: int | None = None) -> VitalsTable:
        """Return the rows of the training steps first_step ≤ step < until_step."""
        inside = self.steps >= first_step
        if until_step is not None:
            inside &= self.steps < until_step
        return VitalsTable(self.ranks, self.steps[inside], self.owners[inside], self._values[inside])

    def mean(self, values: Floats) -> Floats:
        """Return the mean of each rank, float64 [ranks], weighted by the time the rows stand for; NaN: not known.

        Args:
            values: float64 [rows], NaN = not known.
        """
        seconds = self["seconds"]
        known = np.isfinite(values) & (seconds > 0)
        sums = np.bincount(self.owners[known], (values * seconds)[known], self.ranks)
        weights = np.bincount(self.owners[known], seconds[known], self.ranks)
        return np.where(weights > 0, sums / np.where(weights > 0, weights, 1.0), np.nan)


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
        self._rows.append((number, record.step, record.rank, _values(record.vitals)))
        if len(self._rows) > self._limit:
            self._stride *= 2
            self._rows = [row for row in self._rows if row[0] % self._stride == 0]

    def table(self) -> VitalsTable:
        """Return what was taken in."""
        steps = np.array([row[1] for row in self._rows], dtype=np.int64)
        owners = np.array([row[2] for row in self._rows], dtype=np.int64)
        values = np.stack([row[3] for row in self._rows]) if self._rows else np.empty((0, len(FIELDS)))
        return VitalsTable(self._ranks, steps, owners, values)


def _values(vitals: Vitals) -> Floats:
    """Return the fields as numbers; whatever cannot be a time or a count is NaN."""
    values = np.array([_as_float(getattr(vitals, name)) for name in FIELDS])
    return np.where((values >= 0) & (values <= LARGEST), values, np.nan)


def _as_float(value: float | int | None) -> float:
    try:
        return math.nan if value is None else float(value)
    except OverflowError:  # a whole number in a file of somebody else's
        return math.nan
