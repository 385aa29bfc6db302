"""What `ringside top` shows: a run as it is now, as a value, and where it comes from."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ringside.errors import RingsideError
from ringside.monitor.run.directory import RUN, STEPS, RunReader, decode_record, open_regular
from ringside.monitor.run.records import RunInfo, StepRecord
from ringside.monitor.verdict import Verdict
from ringside.view.run.live import LiveRun, RankNow

TAIL_BYTES = 8 << 20
"""So much of the end of `steps.jsonl` is looked through for one rank's records."""

LATEST_STEP = 1 << 62

Floats32 = NDArray[np.float32]


@dataclass(frozen=True)
class Open:
    """A verdict as it stands.

    Args:
        verdict: As it was reached.
        cost_rank_seconds: Its price so far.
        over: Whether its episode has ended.
        words: Its headline, where another program put it in words.
    """

    verdict: Verdict
    cost_rank_seconds: float
    over: bool
    words: str = ""


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment.

    Args:
        where: The run directory or address.
        info: What was known at its start; None before.
        stage: `starting`, `training`, `comparison` or `ended`.
        step: The newest step of any rank, −1 before the first.
        of: How many steps are planned; 0 where that is not known.
        ranks: Every rank's figures.
        verdicts: Those that are open first, then by time.
        steps: The training steps of `own_seconds`, ascending, int64 [steps].
        own_seconds: Own time, float32 [steps, ranks]; NaN where nothing is known.
        trouble: Why no more can be seen, one sentence; empty where all is well.
        version: Grows with whatever changed.
        detail: The newest records of the rank that was asked for, oldest first.
        notes: What else happened, in words, oldest first.
    """

    where: str
    info: RunInfo | None
    stage: str
    step: int
    of: int
    ranks: tuple[RankNow, ...]
    verdicts: tuple[Open, ...]
    steps: NDArray[np.int64]
    own_seconds: Floats32
    trouble: str = ""
    version: int = 0
    detail: tuple[StepRecord, ...] = ()
    notes: tuple[str, ...] = ()


class RunSource(Protocol):
    """Where a run is seen: on this machine's disk, or at an address."""

    where: str

    def poll(self) -> bool:
        """Read what is new; return whether anything changed. Takes its time; raises `RingsideError`."""

    def snapshot(self) -> Snapshot:
        """Return the run as far as it was read."""

    def records(self, rank: int) -> list[StepRecord]:
        """Return the newest records of one rank, oldest first; empty where they cannot be had."""


def take_snapshot(source: RunSource, rank: int | None = None) -> Snapshot:
    """Poll once and return the run, with one rank's records where `rank` is given; trouble is part of the value."""
    trouble = ""
    try:
        source.poll()
    except RingsideError as error:
        trouble = str(error)
    snapshot = replace(source.snapshot(), trouble=trouble)
    if rank is None:
        return snapshot
    with contextlib.suppress(RingsideError):
        return replace(snapshot, detail=tuple(source.records(rank)))
    return snapshot


class Local:
    """A run directory on this machine.

    Args:
        path: The run directory; it need not be there yet.
        tail_bytes: How much of the end of its records is read for those of one rank.

    Attributes:
        where: That directory, as text.
    """

    def __init__(self, path: Path, *, tail_bytes: int = TAIL_BYTES) -> None:
        self.where = str(path)
        self._tail_bytes = tail_bytes
        self._path = path
        self._live = LiveRun(path)
        self._checked: tuple[int, int] | None = None

    def poll(self) -> bool:
        """Read what was added; return whether anything changed.

        Raises:
            RingsideError: The run cannot be read (any more): it is of another schema, damaged, or not permitted.
        """
        # Why a new run cannot be read is raised once for each `run.json`; one that is not there yet is no trouble.
        identity = self._checked
        with contextlib.suppress(OSError):
            status = (self._path / RUN).stat()
            identity = status.st_ino, status.st_mtime_ns
        if identity != self._checked:
            RunReader(self._path)
            self._checked = identity
        try:
            return self._live.poll()
        except (ValueError, TypeError, IndexError, OverflowError, KeyError) as error:
            raise RingsideError(
                f"a part of {self.where} is damaged and was left out ({type(error).__name__}); look into events.jsonl"
            ) from error

    def snapshot(self) -> Snapshot:
        """Return the run as far as it was read."""
        live, run = self._live, self._live.following
        return Snapshot(
            where=self.where,
            info=live.info,
            stage="ended" if live.ended else run.stage,
            step=run.step,
            of=run.of,
            ranks=tuple(live.now()),
            verdicts=tuple(Open(finding.verdict, finding.cost_rank_seconds, finding.over) for finding in live.findings),
            steps=live.steps(),
            own_seconds=live.rows("own_seconds"),
            version=live.version,
            notes=tuple(change.describe() for change in run.revised),
        )

    def records(self, rank: int) -> list[StepRecord]:
        """Return the newest records of one rank, oldest first, as far as the end of the file holds them."""
        with contextlib.suppress(OSError), open_regular(self._path / STEPS) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - self._tail_bytes, 0))
            # Both ends of what is read may be torn.
            lines = file.read(self._tail_bytes).split(b"\n")[int(size > self._tail_bytes) : -1]
            sign = b'"rank":%d,' % rank  # before decoding: most lines are other ranks'
            records = (decode_record(line) for line in lines if sign in line)
            found = [
                record
                for record in records
                if record is not None and record.rank == rank and 0 <= record.step < LATEST_STEP
            ]
            return sorted(found, key=lambda record: record.step)
        return []
