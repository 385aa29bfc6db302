"""Every step of a run that goes on, in little memory: what the page's heat map and lines are drawn from.

Times are kept as two bytes each, on a logarithmic scale that is exact to 0.03%. Where a run has more steps than there
is room for, every second one is dropped, again and again, like `ringside.monitor.run.table` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.run.records import StepRecord
from ringside.monitor.stats import row_medians
from ringside.view.run.follower import FIELDS, MOST_STEPS, Floats32

MEANS = ("step_seconds", "exposed_seconds", "sync_seconds", "backward_seconds")
"""Kept of every step, as the mean over ranks."""

CELLS = 12_000_000
"""Steps × ranks at most: 72 MB."""

LEAST_S = 1e-8
_GRAIN = 33.0 / 65_534
Codes = NDArray[np.uint16]


@dataclass(frozen=True)
class Rows:
    """Some steps of a run.

    Args:
        steps: Training steps, float64 [rows] (whole numbers).
        late: How far each rank's own time is above the median of its step's, uint8 [rows, ranks]: 0 unknown, otherwise
            1 + 254·√excess, so that 255 is twice the median or more.
        lines: By name, float32 [rows], seconds: the own times' `own_low` (5%), `own`, `own_high` (95%) and
            `own_most`, `wait` and `wire` (medians), and the means `step`, `exposed`, `sync`, `backward`.
        worst: The rank with the longest own time, int32 [rows]; −1 where none is known.
        serial: Ask for what came `since` this, next time.
        more: Whether there is more by now.
    """

    steps: NDArray[np.float64]
    late: NDArray[np.uint8]
    lines: dict[str, Floats32]
    worst: NDArray[np.int32]
    serial: int
    more: bool


class History:
    """Takes in step records; gives rows that are new or have changed.

    Args:
        ranks: Number of ranks.
        cells: Steps × ranks to keep at most.

    Attributes:
        stride: How many training steps one row stands for.
        serial: Grows with every row that is added or changed.
    """

    def __init__(self, ranks: int, *, cells: int = CELLS) -> None:
        self.ranks, self.stride, self.serial = ranks, 1, 0
        self._most = max(cells // max(ranks, 1), 16)
        self._index: dict[int, int] = {}
        self._steps, self._serials = np.zeros(0), np.zeros(0, dtype=np.int64)
        self._codes: Codes = np.zeros((len(FIELDS), 0, ranks), dtype=np.uint16)
        self._sums, self._counts = np.zeros((len(MEANS), 0)), np.zeros((len(MEANS), 0), dtype=np.int64)
        self._room(16)

    def add(self, records: Iterable[StepRecord]) -> None:
        """Add records, in any order; of ranks that do not exist and of impossible steps none."""
        batch = [record for record in records if 0 <= record.rank < self.ranks and 0 <= record.step < MOST_STEPS]
        # A row for every step that is new; where there is no room, every second row goes.
        for step in sorted({record.step for record in batch if record.step % self.stride == 0}):
            if step in self._index or step % self.stride:
                continue
            if len(self._index) >= self._most:
                self._thin()
                if step % self.stride:
                    continue
            if len(self._index) == len(self._steps):
                self._room(min(2 * len(self._steps), max(self._most, 16)))
            row = self._index[step] = len(self._index)
            self._steps[row] = step
        batch = [record for record in batch if record.step in self._index]
        rows = np.array([self._index[record.step] for record in batch], dtype=np.intp)
        ranks = np.array([record.rank for record in batch], dtype=np.intp)
        for index, name in enumerate(FIELDS):
            self._codes[index, rows, ranks] = encode([getattr(record, name) for record in batch])
        for index, name in enumerate(MEANS):
            values = np.array([getattr(record, name) for record in batch], dtype=np.float64)
            known = np.isfinite(values) & (values >= 0)
            np.add.at(self._sums[index], rows[known], values[known])
            np.add.at(self._counts[index], rows[known], 1)
        # Rows that changed get new serials, in the order of their steps.
        changed = np.unique(rows)
        changed = changed[np.argsort(self._steps[changed], kind="stable")]
        self._serials[changed] = self.serial + 1 + np.arange(len(changed))
        self.serial += len(changed)

    def since(self, serial: int, *, cells: int = 2_000_000) -> Rows:
        """Return the rows that are newer than a serial, oldest change first, at most `cells` steps × ranks of them."""
        used = self._serials[: len(self._index)]
        changed = np.flatnonzero(used > serial)
        changed = changed[np.argsort(used[changed], kind="stable")]
        most = max(cells // max(self.ranks, 1), 1)
        chosen = changed[:most]
        own, wait, wire = decode(self._codes[:, chosen])
        lines, late, worst = _own_lines(own)
        for name, values in (("wait", wait), ("wire", wire)):
            lines[name] = row_medians(values.astype(np.float64)).astype(np.float32)
        for index, name in enumerate(MEANS):
            with np.errstate(invalid="ignore"):
                mean = self._sums[index, chosen] / self._counts[index, chosen]
            lines[name.removesuffix("_seconds")] = mean.astype(np.float32)
        last = int(used[chosen[-1]]) if len(chosen) else serial
        return Rows(self._steps[chosen], late, lines, worst, last, len(changed) > len(chosen))

    def rank(self, rank: int) -> tuple[NDArray[np.float64], dict[str, Floats32]]:
        """Return one rank's steps, float64 [steps] ascending, and its `own`, `wait`, `wire`, float32 [steps] each."""
        order = np.argsort(self._steps[: len(self._index)], kind="stable")
        values = decode(self._codes[:, order, rank])
        return self._steps[order], {name.removesuffix("_seconds"): values[i] for i, name in enumerate(FIELDS)}

    def _thin(self) -> None:
        """Double the stride until there is room: rows of other steps go, and the rest moves up."""
        while len(self._index) >= self._most:
            self.stride *= 2
            kept = [row for step, row in self._index.items() if step % self.stride == 0]
            for whole in (self._codes, self._sums, self._counts):
                whole[:, : len(kept)] = whole[:, kept]
            for line in (self._steps, self._serials):
                line[: len(kept)] = line[kept]
            self._codes[:, len(kept) :], self._sums[:, len(kept) :], self._counts[:, len(kept) :] = 0, 0.0, 0
            self._index = {int(step): row for row, step in enumerate(self._steps[: len(kept)])}

    def _room(self, rows: int) -> None:
        """Make room for so many rows."""
        more = (0, rows - len(self._steps))
        self._codes = np.pad(self._codes, ((0, 0), more, (0, 0)))
        self._sums, self._counts = np.pad(self._sums, ((0, 0), more)), np.pad(self._counts, ((0, 0), more))
        self._steps, self._serials = np.pad(self._steps, more), np.pad(self._serials, more)


def encode(seconds: Sequence[float]) -> Codes:
    """Return times as two bytes each; 0 where they are not known. 10 ns and less are 1."""
    values = np.asarray(seconds, dtype=np.float64)
    known = np.isfinite(values) & (values >= 0)
    grains = np.log(np.where(known, np.maximum(values, LEAST_S), 1.0) / LEAST_S) / _GRAIN
    return np.where(known, 1 + np.minimum(np.rint(grains), 65_534), 0).astype(np.uint16)


def decode(codes: Codes) -> Floats32:
    """Return what `encode` was given, float32 of the same shape; NaN where it is not known, 0 for the least."""
    seconds: Floats32 = _DECODED[codes]
    return seconds


_DECODED = (LEAST_S * np.exp(_GRAIN * (np.arange(65_536) - 1.0))).astype(np.float32)
_DECODED[:2] = np.nan, 0.0


def _own_lines(own: Floats32) -> tuple[dict[str, Floats32], NDArray[np.uint8], NDArray[np.int32]]:
    """The lines and the lateness that own times [rows, ranks] give."""
    rows, ranks = own.shape
    known = np.isfinite(own)
    full = known.any(axis=1)
    quantiles = np.full((4, rows), np.nan, dtype=np.float32)
    # Rows without a gap need no nanquantile, which is the slower one.
    whole = known.all(axis=1) & full
    for chosen, find in ((whole, np.quantile), (full & ~whole, np.nanquantile)):
        if chosen.any():
            quantiles[:, chosen] = find(own[chosen], (0.05, 0.5, 0.95, 1.0), axis=1)
    worst = np.where(full, np.argmax(np.where(known, own, -1.0), axis=1) if ranks else -1, -1).astype(np.int32)
    with np.errstate(invalid="ignore", divide="ignore"):
        excess = np.clip(own / quantiles[1][:, None] - 1.0, 0.0, 1.0)
    # The root spends the 254 codes on small differences; 0 means unknown.
    late = np.where(np.isfinite(excess), 1 + np.rint(254 * np.sqrt(np.nan_to_num(excess))), 0).astype(np.uint8)
    return dict(zip(("own_low", "own", "own_high", "own_most"), quantiles, strict=True)), late, worst
