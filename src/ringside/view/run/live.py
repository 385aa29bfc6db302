"""A run that goes on, as live views see it: the newest steps of every rank as arrays, and what was found.

Memory is bounded by ranks, not by steps. A run directory that vanishes, or that another run takes over, is followed
anew: a view stays open over a restart of the job.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringside.decoding import UNDECODABLE
from ringside.doctor.calls.follow import LogFollower
from ringside.errors import RingsideError
from ringside.monitor.groups import Blocked, Mesh, mean_waits, read_groups, sum_blocked
from ringside.monitor.nccl.attribution import attribute
from ringside.monitor.nccl.logs import EVENT as LOGS_EVENT
from ringside.monitor.nccl.logs import read_log_folder
from ringside.monitor.nccl.report import NcclReport, read_reports, report_files
from ringside.monitor.run.directory import RUN, STEPS, Event, RunReader
from ringside.monitor.run.records import NOTES_KEPT, Revised, RunInfo, StepRecord, revisions
from ringside.monitor.run.registry import running_runs
from ringside.monitor.slow_rank.judge import PriceMeter, meter_of
from ringside.monitor.slow_rank.peers import of_peers
from ringside.monitor.stats import excess_ratios, known_median, row_medians
from ringside.monitor.summary import assess_run
from ringside.monitor.undecided import NOTHING, Undecided
from ringside.monitor.verdict import OWN_TIME_KINDS, Verdict
from ringside.text import counted
from ringside.view.mesh_text import read_blocked
from ringside.view.verdict_text import Calm, describe_calm, verdict_text

# -------------------------------------------------------------------------------------------------
# What a live view knows of a run: the newest of its records and events, in memory that does not grow with steps.

RECENT_STEPS = 16
"""Steps that a rank's current figures are medians of."""
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


@dataclass(frozen=True)
class RankFigures:
    """One rank's medians over the last few steps, seconds; NaN where nothing is known."""

    rank: int
    own_seconds: float
    wait_seconds: float


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

    def figures(self) -> list[RankFigures]:
        """Return each rank's figures."""
        figures = []
        for rank in range(self.ranks):
            records = [row[rank] for row in self._rows if rank in row]
            own = np.array([record.own_seconds for record in records])
            wait = np.array([record.wait_seconds for record in records])
            figures.append(RankFigures(rank, known_median(own, math.nan), known_median(wait, math.nan)))
        return figures

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


Floats32 = NDArray[np.float32]

FIELDS = ("own_seconds", "wait_seconds", "wire_seconds")
"""Kept of every step and rank."""
FIGURES = (*FIELDS, "excess_ratio")
"""What is known of every rank at one moment."""
STEPS_KEPT = 512
CELLS_KEPT = 1_000_000
MOST_STEPS = 1 << 53
"""Whole numbers up to it are exact in every language a view is written in."""
QUIET_S, QUIET_STEPS = 5.0, 10
JUDGED_BYTES = 256 << 20
"""The records of larger runs are not all judged again: they keep the summary that was written at their end."""


@dataclass(frozen=True)
class RankNow:
    """One rank's figures in seconds, medians over the last steps, or over a whole run that has ended; NaN = not known.

    Args:
        rank: Who.
        host: Where.
        step: Its newest step, −1 before the first.
        own_seconds: Own time.
        wait_seconds: Wait for the last rank.
        wire_seconds: Bytes in flight.
        excess_ratio: How much longer its own time is than the median of the others'.
        verdicts: Kinds of the verdicts that are open on it.
        coordinates: Where it is in the mesh, by dimension, as far as that is known.
    """

    rank: int
    host: str
    step: int
    own_seconds: float
    wait_seconds: float
    wire_seconds: float
    excess_ratio: float
    verdicts: tuple[str, ...]
    coordinates: Mapping[str, int] = field(default_factory=dict)


def ranks_now(
    hosts: Sequence[str],
    named: Iterable[tuple[str, Sequence[int]]],
    steps: NDArray[Any],
    figures: Mapping[str, NDArray[Any]],
    coordinates: Sequence[Mapping[str, int]] = (),
) -> list[RankNow]:
    """Return every rank's figures.

    Args:
        hosts: Where each rank is, as far as that is known.
        named: Kind and ranks of every open verdict.
        steps: The newest step of each rank, [ranks].
        figures: Each of `FIGURES`, [ranks].
        coordinates: Where each rank is in the mesh; empty: none is known.
    """
    kinds: dict[int, list[str]] = defaultdict(list)
    for kind, ranks in named:
        for rank in ranks:
            kinds[rank].append(kind)
    return [
        RankNow(
            rank=rank,
            host=hosts[rank] if rank < len(hosts) else "",
            step=int(step),
            verdicts=tuple(kinds[rank]),
            coordinates=coordinates[rank] if coordinates else {},
            **{name: float(values[rank]) for name, values in figures.items()},
        )
        for rank, step in enumerate(steps)
    ]


class _OfRank(msgspec.Struct):
    own_seconds_median: float | None
    wait_seconds_median: float | None
    excess_ratio: float | None


class _Summary(msgspec.Struct):
    """What views read of a summary; one that another program wrote may lack it."""

    world_size: int
    steps: int
    step_seconds: dict[str, float | None]
    sync: dict[str, Any]
    ranks: list[_OfRank]
    verdicts: list[dict[str, Any]]


class LiveRun:
    """Follows a run directory.

    Args:
        path: The run directory; it need not be there yet.
        steps_kept: Steps to keep of each rank at most.
        at_once: Records that one poll reads at most, so that of a long run something can be shown soon; None: all.
        quiet_s: A run of no process here that wrote nothing for so long, nor for the time of `QUIET_STEPS` steps, is
            judged as one that has ended.
        follow_logs: Have logs of single collectives judged while the run goes on, where its NCCL writes some.

    Attributes:
        path: The run directory.
        following: The run as far as it was read: stage, findings with prices, losses.
        version: Grows with whatever changed; a view that has drawn this version is up to date.
        restarts: How often another run has begun in this directory.
        fresh, fresh_events, fresh_findings: What the last poll read; the verdicts are among the events, too.
        behind: Whether it left records for the next.
        records_read: How many records were read of this run.
        settled: The summary of a run that goes on no more, as `ringside report` writes it: every view of it takes its
            verdicts and figures from there. None while the run goes on, or where it cannot be judged.
    """

    def __init__(
        self,
        path: Path,
        *,
        steps_kept: int = STEPS_KEPT,
        at_once: int | None = None,
        quiet_s: float = QUIET_S,
        follow_logs: bool = False,
    ) -> None:
        self.path, self._quiet_s, self._follow_logs = path, quiet_s, follow_logs
        self._logs: LogFollower | None = None
        self._steps_kept, self._at_once = steps_kept, at_once
        self.restarts = self.version = 0
        self.fresh: list[StepRecord] = []
        self.fresh_events: list[Event] = []
        self.fresh_findings: list[ShownFinding] = []
        self._reader: RunReader | None = None
        self._unread: Iterator[StepRecord] = iter(())
        self._identity: tuple[int, int] | None = None
        self._begin(None)

    def _begin(self, info: RunInfo | None) -> None:
        self.following = RunFollower()
        self.ended = self.behind = False
        self.records_read = 0
        self._end_logs()
        self._reports: list[NcclReport] = []
        self._reports_of: list[tuple[Path, int]] = []
        self.settled: dict[str, Any] | None = None
        self._is_settled = False
        self.version += 1
        if info is not None:
            self.following.start(info)
        # Fewer steps of many ranks: memory is bounded by cells, whatever the job.
        ranks = self.ranks
        kept = max(min(self._steps_kept, CELLS_KEPT // max(ranks * len(FIELDS), 1)), RECENT_STEPS)
        self._values = np.full((len(FIELDS), kept, ranks), np.nan, dtype=np.float32)
        self._steps = np.full(kept, -1, dtype=np.int64)
        self._newest = np.full(ranks, -1, dtype=np.int64)
        self._wire = [math.nan] * ranks

    def poll(self) -> bool:
        """Read what was added; return whether anything changed.

        Raises:
            RingsideError: The run cannot be read (damaged, of a newer Ringside, permission, disk).
        """
        self.fresh, self.fresh_events, self.fresh_findings = [], [], []
        # Another run.json is another run: this directory was begun anew.
        identity = None
        with contextlib.suppress(OSError):
            status = (self.path / RUN).stat()
            identity = status.st_ino, status.st_mtime_ns
        if identity is not None and identity != self._identity:
            reader = RunReader(self.path)
            self.restarts += self.info is not None
            self._begin(reader.info)
            self._reader, self._identity = reader, identity
        if self._reader is None:
            return False
        if not self.behind:
            self._unread = self._reader.iterate()
        records = list(islice(self._unread, self._at_once))
        self.behind = len(records) == self._at_once
        events = self._reader.poll_events()
        reports_of = self._look_at_reports()
        if is_news := reports_of != self._reports_of:
            self._reports_of, self._reports = reports_of, read_reports(self.path)
        if records or events:
            self.fresh, self.fresh_events = records, events
            self._keep(records)
            self.records_read += len(records)
            self.fresh_findings = self.following.feed(records, events)
            self.following.undecided = self._reader.undecided() or self.following.undecided
            self.ended |= any(event["kind"] == "ended" for event in events)
        is_news |= self._poll_logs()
        if records or events or is_news:
            self.settled, self._is_settled = None, False
            self.version += 1
        return bool(records or events or is_news)

    def _poll_logs(self) -> bool:
        """Return whether logs of single collectives say something else by now."""
        if self.ended:
            self._end_logs()
        elif self._logs is None and self._follow_logs and self.following.log_folder and self.info is not None:
            self._logs = LogFollower(Path(self.following.log_folder), self.info.started_unix)
        return self._logs is not None and self._logs.poll()

    def _end_logs(self) -> None:
        if self._logs is not None:
            self._logs.close()
            self._logs = None

    def close(self) -> None:
        """End what was begun beside; nothing is polled any more."""
        self._end_logs()

    @property
    def notes(self) -> list[str]:
        """What else happened, and what logs of single collectives say, in words."""
        notes = [change.describe() for change in self.following.revised]
        return [*notes, *(self._logs.lines if self._logs is not None else ())]

    def _look_at_reports(self) -> list[tuple[Path, int]]:
        """Return what holds NCCL's own records, and of when each is."""
        found = []
        for path in report_files(self.path):
            with contextlib.suppress(OSError):
                found.append((path, path.stat().st_mtime_ns))
        return found

    def settle(self) -> bool:
        """Judge a run that goes on no more from all its records, once; return whether that was now."""
        if not self.is_unjudged():
            return False
        self._is_settled = True
        with contextlib.suppress(RingsideError, OSError, *UNDECODABLE):
            if (self.path / STEPS).stat().st_size > JUDGED_BYTES:
                summary = RunReader(self.path).summary()
                if len(msgspec.convert(summary, _Summary).ranks) == self.ranks:
                    self.settled = summary
            else:
                self.settled, table = assess_run(RunReader(self.path))
                self._wire = [known_median(table["wire_seconds"][:, rank], math.nan) for rank in range(table.ranks)]
        self.version += 1
        return True

    def is_unjudged(self) -> bool:
        """Whether it goes on no more, was read to its end, and was not judged yet."""
        if self._is_settled or self.info is None or self.behind:
            return False
        return self.ended or self.is_abandoned()

    def is_abandoned(self) -> bool:
        """Whether nobody writes it any more: no process here, and nothing new for a while."""
        # steps of a job on other hosts may take longer than that
        if self.age_s() <= max(self._quiet_s, QUIET_STEPS * self.following.median("step_seconds")):
            return False
        path = self.path.absolute()
        return not any(entry.directory == path for entry in running_runs())

    def age_s(self) -> float:
        """How long ago the newest record was written, seconds; 0 before there is one."""
        try:
            return max(time.time() - (self.path / STEPS).stat().st_mtime, 0.0)
        except OSError:
            return 0.0

    @property
    def info(self) -> RunInfo | None:
        """What was known at the run's start; None before."""
        return self.following.info

    @property
    def ranks(self) -> int:
        """Number of ranks; 0 while it is not known."""
        return self.following.ranks

    @property
    def findings(self) -> list[ShownFinding]:
        """The verdicts, those that are open first, then by time: those so far, or of an ended run its summary's."""
        found = self._attributed()
        if self.settled:
            found = []
            for content in self.settled["verdicts"]:
                with contextlib.suppress(ValueError, TypeError, ArithmeticError, *UNDECODABLE):
                    verdict = verdict_text(content, self.settled).verdict
                    found.append(ShownFinding(verdict, None, over="until_step" in verdict.evidence))
        return sorted(found, key=lambda finding: finding.over)

    def _attributed(self) -> list[ShownFinding]:
        """Return the verdicts so far, with what NCCL's own records say of them."""
        known = self.following.findings
        if not self._reports:
            return known
        steps = (self.following.first, self.following.step)
        verdicts = attribute([finding.verdict for finding in known], self._reports, self.ranks, steps)
        found = [replace(finding, verdict=verdict) for finding, verdict in zip(known, verdicts, strict=False)]
        return [*found, *(ShownFinding(verdict, None) for verdict in verdicts[len(known) :])]

    @property
    def calm(self) -> Calm | None:
        """What an ended run without a verdict says; None of others."""
        if not self.settled or self.settled["verdicts"]:
            return None
        return describe_calm(self.settled)

    @property
    def stage(self) -> str:
        """What is going on: `starting`, `training`, `comparison` or `ended`."""
        return "ended" if self.ended else self.following.stage

    @property
    def window(self) -> str:
        """What the figures of `now` are medians of, in words."""
        return "whole run" if self.settled else f"last {RECENT_STEPS} steps"

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
        # Medians over the last steps; ranks that recorded none of them stay NaN.
        newest = self._values[:, self._order()[-RECENT_STEPS:]].astype(np.float64)
        figures: dict[str, NDArray[Any]] = {
            name: row_medians(values.T).astype(np.float32) for name, values in zip(FIELDS, newest, strict=True)
        }
        mesh = self.following.mesh
        own = figures["own_seconds"].astype(np.float64)
        figures["excess_ratio"] = excess_ratios(own, [] if mesh is None else mesh.peers)
        if self.settled:
            for name in ("own_seconds_median", "wait_seconds_median", "excess_ratio"):
                known = [rank[name] for rank in self.settled["ranks"]]
                figures[name.removesuffix("_median")] = np.array(known, dtype=np.float64)  # None becomes NaN
            figures["wire_seconds"] = np.array(self._wire)
        named = [(finding.verdict.kind, finding.verdict.ranks) for finding in self.findings if not finding.over]
        return ranks_now(info.hosts, named, self._newest, figures, [] if mesh is None else mesh.coordinates)

    def blocked(self) -> list[Blocked]:
        """Return how long ranks are blocked along each dimension of the mesh, over `window`."""
        if not self.settled:
            return self.following.blocked()
        return read_blocked(self.settled)

    def _keep(self, records: list[StepRecord]) -> None:
        """Put records into the ring of steps: a step's slot is its number modulo their count; older ones are void."""
        kept, ranks = len(self._steps), self.ranks
        for record in records:
            slot, step = record.step % kept, record.step
            # A slot that a newer step holds stays: late records of old steps are void.
            if not 0 <= record.rank < ranks or not self._steps[slot] <= step < MOST_STEPS:
                continue
            if self._steps[slot] != step:
                self._steps[slot] = step
                self._values[:, slot] = np.nan
            self._values[:, slot, record.rank] = [getattr(record, name) for name in FIELDS]
            self._newest[record.rank] = max(self._newest[record.rank], step)

    def _order(self) -> NDArray[np.intp]:
        # Slots that were never used hold step -1.
        order = np.argsort(self._steps, kind="stable")
        return order[self._steps[order] >= 0]
