"""What a live view knows of a run: the newest of its records and events, in memory that does not grow with steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from ringside.decoding import UNDECODABLE
from ringside.monitor.metering import Metered, meter_of
from ringside.monitor.records import RunInfo, StepRecord
from ringside.monitor.revised import NOTES_KEPT, Revised, read_revised
from ringside.monitor.run_directory import Event
from ringside.monitor.verdict import Verdict

RECENT_STEPS = 16
LOSSES_KEPT = 4096


@dataclass(frozen=True)
class RankFigures:
    """One rank's medians over the last few steps, seconds; NaN where nothing is known."""

    rank: int
    own_seconds: float
    wait_seconds: float
    exposed_seconds: float


@dataclass
class Finding:
    """A verdict and what it costs by now.

    Args:
        verdict: As it was reached.
        meter: Adds up its price; None for verdicts that have none.
        over: Whether its episode has ended.
        final: What it cost in all, as told when it ended, rank-seconds; 0: not told.
    """

    verdict: Verdict
    meter: Metered | None
    over: bool = False
    final: float = 0.0

    @property
    def cost_rank_seconds(self) -> float:
        """The price so far, in rank-seconds."""
        if self.over and self.final > 0:
            return self.final
        return self.meter.rank_seconds if self.meter is not None else self.verdict.cost_rank_seconds


@dataclass
class Following:
    """A run as far as it has been read.

    Attributes:
        info: What is known from its start; None before.
        step: The newest step of any rank, −1 before the first.
        of: How many steps are planned; 0 where nobody said.
        stage: What is going on: `starting`, `training`, `comparison`, `ended`.
        done: How far the comparison is, 0 to 1.
        findings: The verdicts so far, in order.
        comparison: What the comparison found, once it is done.
        losses: Mean loss over ranks of the newest steps, oldest first.
        revised: When gradients went another way between hosts, oldest first.
    """

    info: RunInfo | None = None
    step: int = -1
    of: int = 0
    stage: str = "starting"
    done: float = 0.0
    findings: list[Finding] = field(default_factory=list)
    comparison: dict[str, Any] = field(default_factory=dict)
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=LOSSES_KEPT))
    revised: deque[Revised] = field(default_factory=lambda: deque(maxlen=NOTES_KEPT))
    _rows: deque[dict[int, StepRecord]] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _row: dict[int, StepRecord] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Number of ranks; 0 while it is not known."""
        return self.info.world_size if self.info else 0

    def start(self, info: RunInfo) -> None:
        """Take in what is known from the start."""
        self.info = info
        self.stage = "training"

    def feed(self, records: Iterable[StepRecord], events: Iterable[Event]) -> list[Finding]:
        """Take in what was added to the run; return the verdicts among it.

        Events come first: a verdict's price grows with the steps after it, which may have been read at once with it.
        """
        found = [self._hear_carefully(event) for event in events]
        for record in records:  # the collector writes a step's records together
            if record.step > self.step:
                self._complete()
                self.step = record.step
            if record.step == self.step:
                self._row[record.rank] = record
        if len(self._row) == self.ranks:
            self._complete()
        return [finding for finding in found if finding is not None]

    def figures(self) -> list[RankFigures]:
        """Return each rank's figures."""
        return [
            RankFigures(
                rank, *(self._middle(rank, name) for name in ("own_seconds", "wait_seconds", "exposed_seconds"))
            )
            for rank in range(self.ranks)
        ]

    def middle(self, name: str) -> float:
        """Return the median of one field of the records over the last steps and all ranks; NaN if there are none."""
        values = [getattr(record, name) for row in self._rows for record in row.values()]
        return float(np.nanmedian(values)) if values else math.nan

    def _middle(self, rank: int, name: str) -> float:
        values = [getattr(row[rank], name) for row in self._rows if rank in row]
        values = [value for value in values if math.isfinite(value)]
        return float(np.median(values)) if values else math.nan

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
        for finding in self.findings:
            if finding.meter is not None and not finding.over and self.step > finding.verdict.detected_step:
                finding.meter.add(own)
        self._rows.append(self._row)
        self._row = {}

    def _hear_carefully(self, event: Event) -> Finding | None:
        """Anybody may have written the file: an event that is not what it should be is passed over."""
        try:
            return self._hear(event)
        except (TypeError, ValueError, OverflowError):
            return None

    def _hear(self, event: Event) -> Finding | None:
        kind = event["kind"]
        if kind == "stage":
            self.stage = str(event.get("stage", self.stage))
            if self.stage == "training":
                self.of = int(event.get("of", 0))
            else:
                self.done = event.get("done", 0) / max(event.get("of", 1), 1)
        elif kind == "comparison":
            self.comparison = {key: value for key, value in event.items() if key not in ("kind", "unix")}
        elif kind in ("verdict", "repaired"):
            return self._judge(event)
        elif (revised := read_revised(event)) is not None:
            self.revised.append(revised)
        return None

    def _judge(self, event: Event) -> Finding | None:
        try:
            verdict = msgspec.convert(event.get("verdict"), Verdict)
        except UNDECODABLE:
            return None
        if event["kind"] == "repaired":
            for finding in self.findings:
                if (finding.verdict.kind, finding.verdict.ranks) == (verdict.kind, verdict.ranks) and not finding.over:
                    finding.over, finding.final = True, verdict.cost_rank_seconds
            return None
        meter = None
        if any(not 0 <= rank < self.ranks for rank in verdict.ranks):
            return None
        if verdict.kind in ("slow_rank", "uneven_work", "input_bound") and len(verdict.ranks) == 1:
            meter = meter_of(verdict)
        self.findings.append(Finding(verdict, meter))
        return self.findings[-1]
