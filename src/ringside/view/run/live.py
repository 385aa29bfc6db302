"""A run that goes on, as live views see it: the newest steps of every rank as arrays, and what was found.

Memory is bounded by ranks, not by steps. A run directory that vanishes, or that another run takes over, is followed
anew: a view stays open over a restart of the job.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ringside.decoding import UNDECODABLE
from ringside.errors import RingsideError
from ringside.monitor.groups import Blocked
from ringside.monitor.nccl.attribution import attribute
from ringside.monitor.nccl.report import NcclReport, read_reports, report_files
from ringside.monitor.run.directory import RUN, STEPS, Event, RunReader
from ringside.monitor.run.records import RunInfo, StepRecord
from ringside.monitor.run.registry import running_runs
from ringside.monitor.stats import excess_ratios, known_median
from ringside.monitor.summary import assess_run
from ringside.view.mesh_text import read_blocked
from ringside.view.run.follower import FIELDS, RECENT_STEPS, STEPS_KEPT, RecentSteps, RunFollower, ShownFinding
from ringside.view.run.log_follower import LogFollower
from ringside.view.verdict_text import Calm, describe_calm, verdict_text

FIGURES = (*FIELDS, "excess_ratio")
"""What is known of every rank at one moment."""
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
        follow_logs: Follows the logs of single collectives that lie in a folder and are of a job that began then;
            None: what NCCL's profilers write is not looked at.

    Attributes:
        path: The run directory.
        following: The run as far as it was read: stage, findings with prices, losses.
        recent: Its newest steps.
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
        follow_logs: Callable[[Path, float], LogFollower] | None = None,
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
        self.close()
        self._reports: list[NcclReport] = []
        self._reports_of: list[tuple[Path, int]] = []
        self.settled: dict[str, Any] | None = None
        self._is_settled = False
        self.version += 1
        if info is not None:
            self.following.start(info)
        self.recent = RecentSteps(self.ranks, self._steps_kept)
        self._wire = [math.nan] * self.ranks

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
        has_reports = reports_of != self._reports_of
        if has_reports:
            self._reports_of, self._reports = reports_of, read_reports(self.path)
        if records or events:
            self.fresh, self.fresh_events = records, events
            self.recent.add(records)
            self.records_read += len(records)
            self.fresh_findings = self.following.feed(records, events)
            self.following.undecided = self._reader.undecided() or self.following.undecided
            self.ended |= any(event["kind"] == "ended" for event in events)
        changed = bool(records or events or has_reports)
        if changed:
            self.settled, self._is_settled = None, False
        # What logs of single collectives say stands beside what the records say, and judges nothing anew.
        if self.ended:
            self.close()
        elif self._logs is None and self._follow_logs is not None and self.following.log_folder:
            self._logs = self._follow_logs(Path(self.following.log_folder), self._reader.info.started_unix)
        changed |= self._logs is not None and self._logs.poll()
        self.version += changed
        return changed

    def close(self) -> None:
        """End what goes on beside: nobody follows logs any more."""
        if self._logs is not None:
            self._logs.close()
            self._logs = None

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
        if not self.settled:
            return sorted(self._attributed(), key=lambda finding: finding.over)
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

    def now(self) -> list[RankNow]:
        """Return every rank's figures."""
        info = self.info
        if info is None:
            return []
        figures: dict[str, NDArray[Any]] = {**self.recent.medians()}
        mesh = self.following.mesh
        own = figures["own_seconds"].astype(np.float64)
        figures["excess_ratio"] = excess_ratios(own, [] if mesh is None else mesh.peers)
        if self.settled:
            for name in ("own_seconds_median", "wait_seconds_median", "excess_ratio"):
                known = [rank[name] for rank in self.settled["ranks"]]
                figures[name.removesuffix("_median")] = np.array(known, dtype=np.float64)  # None becomes NaN
            figures["wire_seconds"] = np.array(self._wire)
        named = [(finding.verdict.kind, finding.verdict.ranks) for finding in self.findings if not finding.over]
        return ranks_now(info.hosts, named, self.recent.newest, figures, [] if mesh is None else mesh.coordinates)

    def blocked(self) -> list[Blocked]:
        """Return how long ranks are blocked along each dimension of the mesh, over `window`."""
        return read_blocked(self.settled) if self.settled else self.following.blocked()
