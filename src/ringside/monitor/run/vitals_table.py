"""The vitals of a run as columns; only few records carry any, so they are rows of their own."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.run.records import StepRecord, Vitals
from ringside.monitor.stats import LARGEST, Floats

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
        numbers = []
        for name in FIELDS:
            value = getattr(record.vitals, name)
            try:
                numbers.append(math.nan if value is None else float(value))
            except OverflowError:  # a whole number in a file of somebody else's
                numbers.append(math.nan)
        values = np.array(numbers)
        # What cannot be a time or a count is not known.
        values = np.where((values >= 0) & (values <= LARGEST), values, np.nan)
        self._rows.append((number, record.step, record.rank, values))
        if len(self._rows) > self._limit:
            self._stride *= 2
            self._rows = [row for row in self._rows if row[0] % self._stride == 0]

    def table(self) -> VitalsTable:
        """Return what was taken in."""
        steps = np.array([row[1] for row in self._rows], dtype=np.int64)
        owners = np.array([row[2] for row in self._rows], dtype=np.int64)
        values = np.stack([row[3] for row in self._rows]) if self._rows else np.empty((0, len(FIELDS)))
        return VitalsTable(self._ranks, steps, owners, values)


# -------------------------------------------------------------------------------------------------
# Vitals as shares of a rank's own time: one number per row, comparable between ranks and times.
#
# A rank that waits for others neither runs nor wants to, so what kept it from working is a share of its *own* time, as
# its excess is. Every function takes vitals and the share of the time that each rank is blocked in synchronisation,
# float64 [ranks], and returns float64 [rows], NaN where it is not known.

FAULT_SECONDS = 1e-4
"""A page from a fast disk takes about this long; from a slow one it takes longer, and the rank is seen to sleep."""
LEAST_OWN = 0.05
"""A rank's own time is taken to be at least this share of its time."""


def throttled_share(vitals: VitalsTable, synced: Floats) -> Floats:
    """Time throttled by a CPU quota; 0 where there is none."""
    return _of_own(np.nan_to_num(vitals["throttled_seconds"]), vitals, synced)


def waited_share(vitals: VitalsTable, synced: Floats) -> Floats:
    """Time ready to run without a CPU, without what the quota took (most kernels count it here as well)."""
    waited = np.maximum(vitals["waited_seconds"] - np.nan_to_num(vitals["throttled_seconds"]), 0.0)
    return _of_own(waited, vitals, synced)


def held_share(vitals: VitalsTable, synced: Floats) -> Floats:
    """Time in which it wanted a CPU and had none: because of a quota, or of what else ran."""
    return _of_own(np.fmax(vitals["waited_seconds"], vitals["throttled_seconds"]), vitals, synced)


def stolen_share(vitals: VitalsTable, synced: Floats) -> Floats:
    """Share of the time its CPUs had work in which the hypervisor gave them to others."""
    return vitals["steal_ratio"]


def stalled_share(vitals: VitalsTable, synced: Floats) -> Floats:
    """Time in which some task of its cgroup, or of the machine, stood still for want of memory."""
    return vitals["memory_stalled_seconds"] / vitals["seconds"]


def fault_share(vitals: VitalsTable, synced: Floats) -> Floats:
    """Time that its major page faults took at least."""
    return _of_own(vitals["major_faults"] * FAULT_SECONDS, vitals, synced)


def asleep_share(vitals: VitalsTable, synced: Floats) -> Floats:
    """Time in which the thread neither ran nor wanted to, outside synchronisation."""
    wanted = vitals["ran_seconds"] + np.fmax(vitals["waited_seconds"], vitals["throttled_seconds"])  # as held_share
    return _of_own(vitals["seconds"] * (1.0 - synced[vitals.owners]) - wanted, vitals, synced)


def fault_rate(vitals: VitalsTable, synced: Floats) -> Floats:
    """Major page faults per second of own time."""
    return vitals["major_faults"] / _own_seconds(vitals, synced)


def _of_own(seconds: Floats, vitals: VitalsTable, synced: Floats) -> Floats:
    return np.clip(seconds / _own_seconds(vitals, synced), 0.0, 1.0)


def _own_seconds(vitals: VitalsTable, synced: Floats) -> Floats:
    own: Floats = vitals["seconds"] * np.maximum(1.0 - synced[vitals.owners], LEAST_OWN)
    return own
