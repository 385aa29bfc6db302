"""A run as far as it has been read: the newest of its records and events, in memory that does not grow with steps.

The newest steps of all ranks are arrays (`RecentSteps`).
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringside.decoding import UNDECODABLE
from ringside.monitor.groups import Blocked, Mesh, mean_waits, read_groups, sum_blocked
from ringside.monitor.nccl.report import EVENT as LOGS_EVENT
from ringside.monitor.nccl.report import read_log_folder
from ringside.monitor.run.directory import Event
from ringside.monitor.run.records import NOTES_KEPT, Revised, RunInfo, StepRecord, revisions
from ringside.monitor.slow_rank.detector import PriceMeter, meter_of
from ringside.monitor.slow_rank.watcher import of_peers
from ringside.monitor.stats import known_median, row_medians
from ringside.monitor.undecided import NOTHING, Undecided
from ringside.monitor.verdict import OWN_TIME_KINDS, Verdict
from ringside.text import counted

# -------------------------------------------------------------------------------------------------
# The newest steps of every rank as arrays, in memory that is bounded by ranks, not by steps.

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


# -------------------------------------------------------------------------------------------------
# A run as far as it has been read.

HISTORY_STEPS = 48
"""Steps whose own times a live view draws."""
LOSSES_KEPT = 4096


def progress_text(steps: int, last: int, of: int) -> str:
    """Return how far a run is, in words: steps are counted as a summary counts them, those that were recorded.

    Args:
        steps: Number of steps that were recorded.
        last: The newest step; steps are numbered from 0.
        of: How many steps are planned; 0 where that is not known.
    """
    planned = f" of at most {of}" if of else ""
    resumed = f" (steps {last - steps + 1} to {last}{planned})"
    return counted(steps, "step") + (resumed if last >= steps else planned)


@dataclass
class ShownFinding:
    """A verdict and what it costs by now.

    Args:
        verdict: As it was reached.
        meter: Adds up its price among `peers`; None for verdicts that have none.
        peers: Ranks that do the same work as its culprit, which the meter numbers from 0; empty: all ranks do.
        scale: How many times as many ranks the job has, all of which wait.
        over: Whether its episode has ended.
        final: What it cost in all, as recorded when it ended, rank-seconds; 0: not recorded.
        until_step: The first step after the episode, as recorded when it ended; None: not recorded.
    """

    verdict: Verdict
    meter: PriceMeter | None
    peers: list[int] = field(default_factory=list)
    scale: float = 1.0
    over: bool = False
    final: float = 0.0
    until_step: int | None = None

    @property
    def cost_rank_seconds(self) -> float:
        """The price so far, in rank-seconds."""
        if self.over and self.final > 0:
            return self.final
        return self.meter.rank_seconds * self.scale if self.meter is not None else self.verdict.cost_rank_seconds


@dataclass
class RunFollower:
    """A run as far as it has been read.

    Attributes:
        info: What is known from its start; None before.
        step: The newest step of any rank, −1 before the first.
        first: The oldest; more than 0 where the record begins in the middle of a training that was resumed.
        of: How many steps are planned; 0 where that is not known.
        stage: What is going on: `starting`, `training`, `comparison`, `ended`.
        done: How far the comparison is, 0 to 1.
        findings: The verdicts so far, in order.
        comparison: What the comparison found, once it is done.
        losses: Mean loss over ranks of the newest steps, oldest first.
        own: Own times of all ranks in the newest steps where all are known, oldest first, seconds [ranks].
        revised: When gradients went another way between hosts, oldest first.
        mesh: How ranks are arranged, as far as their groups tell; None before the start.
        undecided: What the detector of slow ranks has not decided.
        log_folder: Where NCCL's profilers write logs of single collectives; empty: not known.
    """

    info: RunInfo | None = None
    step: int = -1
    first: int = 0
    of: int = 0
    stage: str = "starting"
    done: float = 0.0
    findings: list[ShownFinding] = field(default_factory=list)
    comparison: dict[str, Any] = field(default_factory=dict)
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES_KEPT))
    own: deque[NDArray[np.float64]] = field(default_factory=lambda: deque(maxlen=HISTORY_STEPS))
    revised: deque[Revised] = field(default_factory=lambda: deque(maxlen=NOTES_KEPT))
    mesh: Mesh | None = None
    undecided: Undecided = NOTHING
    log_folder: str = ""
    _rows: deque[dict[int, StepRecord]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _row: dict[int, StepRecord] = field(default_factory=dict)
    _blocked: list[Blocked] | None = None

    @property
    def ranks(self) -> int:
        """Number of ranks; 0 while it is not known."""
        return self.info.world_size if self.info else 0

    @property
    def steps(self) -> int:
        """Number of steps that were recorded, as a summary counts them."""
        return self.step - self.first + 1 if self.step >= 0 else 0

    def progress(self) -> str:
        """Return how far it is, in words."""
        return progress_text(self.steps, self.step, self.of)

    def start(self, info: RunInfo) -> None:
        """Take in what is known from the start."""
        self.info, self.mesh = info, Mesh(info.world_size)
        self.stage = "training"

    def feed(self, records: Iterable[StepRecord], events: Iterable[Event]) -> list[ShownFinding]:
        """Take in what was added to the run; return the verdicts among it.

        Events come first: a verdict's price grows with the steps after it, which may have been read at once with it.
        """
        known = len(self.findings)
        for event in events:
            self._read_event(event)
        for record in records:  # the collector writes a step's records together
            self.first = record.step if self.step < 0 else min(self.first, record.step)
            # The first record of a newer step closes the one before, whoever is missing from it.
            if record.step > self.step:
                self._complete()
                self.step = record.step
            if record.step == self.step:
                self._row[record.rank] = record
        if len(self._row) == self.ranks:
            self._complete()
        return self.findings[known:]

    def rank_medians(self, name: str) -> list[float]:
        """Return the median of one field of the records over the last steps, rank by rank; NaN if none is known."""
        known = [[getattr(row[rank], name) for row in self._rows if rank in row] for rank in range(self.ranks)]
        return [known_median(np.array(values), math.nan) for values in known]

    def median(self, name: str) -> float:
        """Return the median of one field of the records over the last steps and all ranks; NaN if none is known."""
        values = [getattr(record, name) for row in self._rows for record in row.values()]
        return known_median(np.array(values, dtype=np.float64), math.nan)

    def exposed_seconds(self) -> float:
        """Return the median over the last steps of what is exposed on the rank that was blocked least; NaN if none."""
        known = [[each.exposed_seconds for each in row.values() if each.exposed_seconds >= 0] for row in self._rows]
        least = [min(seconds) for seconds in known if seconds]
        return float(np.median(least)) if least else math.nan

    def blocked(self) -> list[Blocked]:
        """Return how long ranks were blocked along each dimension of the mesh in the last steps."""
        if self._blocked is None:
            step = self.median("step_seconds")
            self._blocked = [] if self.mesh is None else sum_blocked(self._rows, self.mesh, step)
        return self._blocked

    def waits(self, most: int) -> list[tuple[int, int, float]]:
        """Return who waited longest for whom in the last steps, group by group; see `mean_waits`."""
        return [] if self.mesh is None else mean_waits(self._rows, self.mesh, most)

    def _complete(self) -> None:
        if not self._row:
            return
        losses = [record.loss for record in self._row.values() if record.loss is not None]
        if losses:
            self.losses.append(sum(losses) / len(losses))
        own = np.full((1, self.ranks), np.nan)
        for rank, record in self._row.items():
            if rank < self.ranks:
                own[0, rank] = record.own_seconds
        if np.isfinite(own).all():
            self.own.append(own[0])
        for finding in self.findings:
            if finding.meter is not None and not finding.over and self.step > finding.verdict.detected_step:
                finding.meter.add(own[:, finding.peers] if finding.peers else own)
        self._rows.append(self._row)
        self._row, self._blocked = {}, None

    def _shown(self, verdict: Verdict) -> ShownFinding:
        """Of one rank that holds the others up every further step adds to the price."""
        if verdict.kind not in OWN_TIME_KINDS or len(verdict.ranks) != 1 or self.mesh is None:
            return ShownFinding(verdict, None)
        peers = self.mesh.peers_of(verdict.ranks[0])
        if len(peers) in (1, self.ranks):
            return ShownFinding(verdict, meter_of(verdict))
        return ShownFinding(verdict, meter_of(of_peers(verdict, peers, self.ranks)), peers, self.ranks / len(peers))

    def _read_event(self, event: Event) -> None:
        """Anybody may have written the file: an event that is not what it should be is passed over."""
        with contextlib.suppress(TypeError, ValueError, OverflowError, *UNDECODABLE):
            kind = event["kind"]
            if kind == "stage":
                self.stage = str(event.get("stage", self.stage))
                if self.stage == "training":
                    self.of = int(event.get("of", 0))
                else:
                    self.done = event.get("done", 0) / max(event.get("of", 1), 1)
            elif kind == "comparison":
                self.comparison = {key: value for key, value in event.items() if key not in ("kind", "unix")}
            elif kind == "verdict":
                verdict = msgspec.convert(event.get("verdict"), Verdict)
                if any(not 0 <= rank < self.ranks for rank in verdict.ranks):
                    return
                self.findings.append(self._shown(verdict))
            elif kind == "groups" and self.mesh is not None:
                self.mesh = Mesh(self.mesh.ranks, self.mesh.groups | read_groups([event]))
            elif kind == "repaired":
                verdict = msgspec.convert(event.get("verdict"), Verdict)
                same, until = (verdict.kind, verdict.ranks), verdict.evidence.get("until_step")
                for finding in self.findings:
                    if (finding.verdict.kind, finding.verdict.ranks) == same and not finding.over:
                        finding.over, finding.final = True, verdict.cost_rank_seconds
                        finding.until_step = until if isinstance(until, int) else None
            elif kind == LOGS_EVENT:
                self.log_folder = read_log_folder([event]) or self.log_folder
            else:
                self.revised += revisions([event])
