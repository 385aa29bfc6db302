"""A run that goes on, as live views see it: the newest steps of every rank as arrays, and what was found.

Memory is bounded by ranks, not by steps. A run directory that vanishes, or that another run takes over, is followed
anew: a view stays open over a restart of the job.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringside.monitor.records import RunInfo, StepRecord
from ringside.monitor.run_directory import RUN, Event, RunReader
from ringside.view.following import Finding, Following

Floats32 = NDArray[np.float32]

FIELDS = ("own_seconds", "wait_seconds", "wire_seconds", "exposed_seconds", "step_seconds", "sync_seconds")
STEPS_KEPT = 512
CELLS_KEPT = 2_000_000
EVENTS_KEPT = 200
MOST_STEPS = 1 << 53
"""Whole numbers up to it are exact in every language a view is written in."""
FEW = 16
"""Steps that a rank's current figures are medians of."""


@dataclass(frozen=True)
class RankNow:
    """One rank's figures now, medians over the last steps; seconds, NaN where nothing is known.

    Args:
        rank: Who.
        host: Where.
        step: Its newest step, −1 before the first.
        own_seconds: Own time.
        wait_seconds: Wait for the last rank.
        wire_seconds: Bytes in flight.
        excess_ratio: How much longer its own time is than the median of the others'.
        verdicts: Kinds of the verdicts that are open on it.
    """

    rank: int
    host: str
    step: int
    own_seconds: float
    wait_seconds: float
    wire_seconds: float
    excess_ratio: float
    verdicts: tuple[str, ...]


class Live:
    """Follows a run directory.

    Args:
        path: The run directory; it need not be there yet.
        steps_kept: Steps to keep of each rank at most.
        at_once: Records that one poll reads at most, so that of a long run something can be shown soon; None: all.

    Attributes:
        path: The run directory.
        following: The run as far as it was read: stage, findings with prices, losses.
        events: The newest events, oldest first.
        version: Grows with whatever changed; a view that has drawn this version is up to date.
        restarts: How often another run has begun in this directory.
        fresh, fresh_events: What the last poll read.
        behind: Whether it left records for the next.
    """

    def __init__(self, path: Path, *, steps_kept: int = STEPS_KEPT, at_once: int | None = None) -> None:
        self.path = path
        self.restarts = 0
        self.version = 0
        self.fresh: list[StepRecord] = []
        self.fresh_events: list[Event] = []
        self.following = Following()
        self.events: list[Event] = []
        self.ended = self.behind = False
        self._steps_kept, self._at_once = steps_kept, at_once
        self._reader: RunReader | None = None
        self._unread: Iterator[StepRecord] = iter(())
        self._identity: tuple[int, int] | None = None
        self._begin(None)

    def poll(self) -> bool:
        """Read what was added; return whether anything changed.

        Raises:
            RingsideError: The run cannot be read (damaged, of a newer Ringside, permission, disk).
        """
        self.fresh, self.fresh_events = [], []
        identity = self._look()
        if identity is not None and identity != self._identity:
            reader = RunReader(self.path)
            self._begin(reader.info)
            self._reader, self._identity = reader, identity
        if self._reader is None:
            return False
        records, events = self._read(self._reader), self._reader.poll_events()
        if records or events:
            self.fresh, self.fresh_events = records, events
            self._take(records)
            self.events = [*self.events, *events][-EVENTS_KEPT:]
            self.following.feed(records, events)
            self.ended |= any(event["kind"] == "ended" for event in events)
            self.version += 1
        return bool(records or events)

    @property
    def info(self) -> RunInfo | None:
        """What was known at the run's start; None before."""
        return self.following.info

    @property
    def ranks(self) -> int:
        """Number of ranks; 0 while it is not known."""
        return self.following.ranks

    @property
    def findings(self) -> list[Finding]:
        """The verdicts so far, those that are open first, then by time."""
        return sorted(self.following.findings, key=lambda finding: finding.over)

    def steps(self) -> NDArray[np.int64]:
        """Return the training steps that are kept, ascending, int64 [steps]."""
        return self._steps[self._order()]

    def rows(self, field: str) -> Floats32:
        """Return one of `FIELDS` of the steps that are kept, float32 [steps, ranks]; NaN where nothing is known."""
        rows: Floats32 = self._values[FIELDS.index(field)][self._order()]
        return rows

    def now(self) -> list[RankNow]:
        """Return every rank's figures."""
        info = self.info
        if info is None:
            return []
        order = self._order()[-FEW:]
        own, wait, wire = (_medians(self._values[FIELDS.index(f"{name}_seconds"), order]) for name in _SHOWN)
        excess = _excess(own)
        named: dict[int, list[str]] = {}
        for finding in self.following.findings:
            for rank in () if finding.over else finding.verdict.ranks:
                named.setdefault(rank, []).append(finding.verdict.kind)
        return [
            RankNow(
                rank=rank,
                host=info.hosts[rank] if rank < len(info.hosts) else "",
                step=int(self._newest[rank]),
                own_seconds=float(own[rank]),
                wait_seconds=float(wait[rank]),
                wire_seconds=float(wire[rank]),
                excess_ratio=float(excess[rank]),
                verdicts=tuple(named.get(rank, ())),
            )
            for rank in range(self.ranks)
        ]

    def _read(self, reader: RunReader) -> list[StepRecord]:
        if not self.behind:
            self._unread = reader.iterate()
        records = list(islice(self._unread, self._at_once))
        self.behind = len(records) == self._at_once
        return records

    def _look(self) -> tuple[int, int] | None:
        try:
            status = (self.path / RUN).stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns

    def _begin(self, info: RunInfo | None) -> None:
        self.restarts += info is not None and self.info is not None
        self.following = Following()
        self.events, self.ended, self.behind = [], False, False
        self.version += 1
        ranks = info.world_size if info is not None else 0
        kept = max(min(self._steps_kept, CELLS_KEPT // max(ranks * len(FIELDS), 1)), FEW)
        self._values = np.full((len(FIELDS), kept, ranks), np.nan, dtype=np.float32)
        self._steps = np.full(kept, -1, dtype=np.int64)
        self._newest = np.full(ranks, -1, dtype=np.int64)
        if info is not None:
            self.following.start(info)

    def _take(self, records: list[StepRecord]) -> None:
        kept, ranks = len(self._steps), self.ranks
        for record in records:
            slot, step = record.step % kept, record.step
            if not 0 <= record.rank < ranks or not self._steps[slot] <= step < MOST_STEPS:
                continue
            if self._steps[slot] != step:
                self._steps[slot] = step
                self._values[:, slot] = np.nan
            self._values[:, slot, record.rank] = [getattr(record, name) for name in FIELDS]
            self._newest[record.rank] = max(self._newest[record.rank], step)

    def _order(self) -> NDArray[np.intp]:
        order = np.argsort(self._steps, kind="stable")
        return order[self._steps[order] >= 0]

    def as_dict(self) -> dict[str, Any]:
        """Return what a view shows at the top, as plain data: stage, step, verdicts with prices."""
        run = self.following
        return {
            "name": run.info.name if run.info else "",
            "stage": "ended" if self.ended else run.stage,
            "step": run.step,
            "of": run.of,
            "ranks": self.ranks,
            "restarts": self.restarts,
        }


_SHOWN = ("own", "wait", "wire")


def _medians(rows: Floats32) -> Floats32:
    medians = np.full(rows.shape[1], np.nan, dtype=np.float32)
    known = ~np.isnan(rows).all(axis=0)
    if known.any():
        medians[known] = np.nanmedian(rows[:, known], axis=0)
    return medians


def _excess(own: Floats32) -> NDArray[np.float64]:
    """Each rank's own time over the median of all others', minus 1."""
    known = np.isfinite(own)
    excess = np.full(len(own), math.nan)
    if known.sum() < 2:
        return excess
    ordered = np.sort(own[known])
    for rank in np.flatnonzero(known):
        others = np.delete(ordered, int(np.searchsorted(ordered, own[rank])))
        excess[rank] = own[rank] / np.median(others) - 1.0
    return excess
