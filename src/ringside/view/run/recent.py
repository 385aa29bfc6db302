"""The newest steps of every rank as arrays, in memory that is bounded by ranks, not by steps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.run.records import StepRecord
from ringside.monitor.stats import row_medians

Floats32 = NDArray[np.float32]

FIELDS = ("own_seconds", "wait_seconds", "wire_seconds")
"""Kept of every step and rank."""
RECENT_STEPS = 16
"""Steps that a rank's current figures are medians of."""
STEPS_KEPT = 512
CELLS_KEPT = 1_000_000
MOST_STEPS = 1 << 53
"""Whole numbers up to it are exact in every language a view is written in."""


class RecentSteps:
    """A ring of steps: a step's slot is its number modulo their count.

    Args:
        ranks: Number of ranks.
        steps_kept: Steps to keep of each rank at most; of many ranks fewer: cells are bounded, whatever the job.

    Attributes:
        newest: The newest step of each rank, −1 before the first, int64 [ranks].
    """

    def __init__(self, ranks: int, steps_kept: int = STEPS_KEPT) -> None:
        kept = max(min(steps_kept, CELLS_KEPT // max(ranks * len(FIELDS), 1)), RECENT_STEPS)
        self.newest = np.full(ranks, -1, dtype=np.int64)
        self._values = np.full((len(FIELDS), kept, ranks), np.nan, dtype=np.float32)
        self._steps = np.full(kept, -1, dtype=np.int64)

    def add(self, records: Iterable[StepRecord]) -> None:
        """Add records, in any order; of ranks that do not exist and of steps that a newer one has replaced none."""
        for record in records:
            slot, step = record.step % len(self._steps), record.step
            if not 0 <= record.rank < len(self.newest) or not self._steps[slot] <= step < MOST_STEPS:
                continue
            if self._steps[slot] != step:
                self._steps[slot] = step
                self._values[:, slot] = np.nan
            self._values[:, slot, record.rank] = [getattr(record, name) for name in FIELDS]
            self.newest[record.rank] = max(self.newest[record.rank], step)

    def steps(self) -> NDArray[np.int64]:
        """Return the training steps that are kept, ascending, int64 [steps]."""
        return self._steps[self._order()]

    def rows(self, field: str) -> Floats32:
        """Return one of `FIELDS` of the steps that are kept, float32 [steps, ranks]; NaN where nothing is known."""
        rows: Floats32 = self._values[FIELDS.index(field)][self._order()]
        return rows

    def medians(self) -> dict[str, Floats32]:
        """Return each of `FIELDS`, float32 [ranks]: medians over the last steps; NaN of ranks that recorded none."""
        newest = self._values[:, self._order()[-RECENT_STEPS:]].astype(np.float64)
        return {name: row_medians(values.T).astype(np.float32) for name, values in zip(FIELDS, newest, strict=True)}

    def _order(self) -> NDArray[np.intp]:
        # Slots that were never used hold step -1.
        order = np.argsort(self._steps, kind="stable")
        return order[self._steps[order] >= 0]
