"""The collector: takes step records from all ranks in any order, keeps the verdicts and the run directory current."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from ringside.isolation import Listeners
from ringside.monitor.groups import JobGroups
from ringside.monitor.job.watcher import CommunicationBound, InputBound, JobWatcher, SmallCollectives
from ringside.monitor.links.sampler import LinkMap
from ringside.monitor.links.watcher import LinkWatcher
from ringside.monitor.pipeline import StageWatcher
from ringside.monitor.run.directory import Event, RunWriter
from ringside.monitor.run.records import Row, StepRecord
from ringside.monitor.slow_rank.watcher import PeersWatcher
from ringside.monitor.verdict import Verdict, VerdictEvent

BEHIND_STEPS = 20
"""A rank whose records are this far behind the newest is not waited for ..."""

BEHIND_S = 2.0
"""... nor for less than this, during which ranks' batches come in turn however short their steps are."""

PENDING_RECORDS = 65_536
"""More than this are never waited for."""

FARTHEST_STEPS, LARGEST_STEP = 1_000_000, 1 << 48
"""A record that is so many steps beyond all others is damaged, and so is a first one beyond the largest step."""

GIVEN_UP_STEPS = 80
"""A rank that was missing in so many steps on end is not waited for at all until it reports again."""

LOOK_STEPS = 16
"""Steps after which it is written anew what is undecided."""

ENDED_KEPT = 100

Listener = Callable[[Event], object]

_log = logging.getLogger(__name__)


class StepCollector:
    """Completes steps, watches them and writes them; memory is bounded by ranks, not by steps.

    It never raises because of what a record holds, and a listener that raises is dropped and logged.

    Args:
        ranks: Number of ranks.
        writer: Where to write records and events, if anywhere.
        watchers: What judges every step; by default `standard_watchers`.
        listeners: Called with every event, in order.
        groups: What is known of the job's process groups; its records add to it.
        clock: Seconds since 1970.
        rest: Called after every step that was judged: a process that also trains lets its other threads go on here.

    Attributes:
        groups: As given, or its own.
        steps: Number of steps completed so far.
        newest: The newest completed step, None before the first.
        late: Records that came after their step was completed; they are written and not analysed.
        absurd: Records of steps that cannot be; they are dropped, and the first is logged.
        completed: The steps that the last `add` (or `close`) completed, in order.
        clock: As given.
    """

    def __init__(
        self,
        ranks: int,
        writer: RunWriter | None = None,
        *,
        watchers: Iterable[Watcher] | None = None,
        listeners: Iterable[Listener] = (),
        groups: JobGroups | None = None,
        clock: Callable[[], float] = time.time,
        rest: Callable[[], None] | None = None,
    ) -> None:
        self._rest = rest
        self.ranks, self.steps, self.late, self.absurd = ranks, 0, 0, 0
        self.newest: int | None = None
        self._listeners = Listeners("events of the run", listeners)
        self._writer, self.clock = writer, clock
        self.groups = groups or JobGroups(ranks)
        self._watchers = standard_watchers(ranks, groups=self.groups) if watchers is None else list(watchers)
        self._links = LinkMap()
        self._pending: dict[int, Row] = {}
        self._highest = -1
        self._absent: set[int] = set()
        self._missed = [0] * ranks
        self._ended: deque[Verdict] = deque(maxlen=ENDED_KEPT)
        self.completed: list[Row] = []

    def add(self, records: Iterable[StepRecord]) -> list[Event]:
        """Take in a batch of records; return the events it led to."""
        done: list[StepRecord] = []
        learnt: list[Event] = []
        for record in records:
            if not 0 <= record.rank < self.ranks or record.step < 0:
                continue
            # One far beyond the others would make all of them late for good.
            if record.step > (self._highest + FARTHEST_STEPS if self._highest >= 0 else LARGEST_STEP):
                self.absurd += 1
                if self.absurd == 1:
                    text = "rank %d reported step %d and was at most at %d; such records are dropped"
                    _log.warning(text, record.rank, record.step, self._highest)
                continue
            record = self._links.resolve(record)
            if record.new_groups:
                if news := self.groups.learn(record.new_groups):
                    learnt.append(self._emit({"kind": "groups", "groups": msgspec.to_builtins(news)}))
                record = msgspec.structs.replace(record, new_groups=())
            if self.newest is not None and record.step <= self.newest:
                self.late += 1
                done.append(record)  # written, and no longer judged
                continue
            self._absent.discard(record.rank)
            self._pending.setdefault(record.step, {}).setdefault(record.rank, record)
            self._highest = max(self._highest, record.step)
        return [*learnt, *self._complete(done, everything=False)]

    def note(self, kind: str, **details: object) -> None:
        """Put an event of somebody else's into the run (`started`, `note`, ...)."""
        self._emit({"kind": kind, **details})

    def close(self) -> list[Event]:
        """Complete what is pending, with gaps where records are missing, and write the end; return the last events."""
        events = self._complete([], everything=True)
        return [*events, self._emit({"kind": "ended", "steps": self.steps})]

    @property
    def verdicts(self) -> list[Verdict]:
        """All verdicts so far with their prices so far (of those that are over, the newest hundred)."""
        return [*self._ended, *(verdict for watcher in self._watchers for verdict in watcher.open)]

    @property
    def lag_steps(self) -> int:
        """How many steps the newest completed one is behind the newest that any rank has reported."""
        return max(self._highest - (-1 if self.newest is None else self.newest), 0)

    def _complete(self, done: list[StepRecord], *, everything: bool) -> list[Event]:
        """Complete every step that can be, oldest first, and write all of them in one batch."""
        findings: list[VerdictEvent] = []
        self.completed = []
        while self._pending:
            step = min(self._pending)
            row = self._pending[step]
            if not everything and self._is_awaited(step, row):
                break
            # Ranks that were missing in many steps on end are waited for no more, until they report again.
            if len(row) < self.ranks or any(self._missed):
                for rank in range(self.ranks):
                    self._missed[rank] = 0 if rank in row else self._missed[rank] + 1
                    if self._missed[rank] >= GIVEN_UP_STEPS:
                        self._absent.add(rank)
            row = with_waits(self._pending.pop(step))
            self.completed.append(row)
            done.extend(row.values())
            self.newest, self.steps = step, self.steps + 1
            for watcher in list(self._watchers):
                try:
                    findings += watcher.update(step, row)
                except Exception:  # a job is worth more than a kind of verdict
                    self._watchers.remove(watcher)
                    _log.exception("A watcher of the monitor failed and was dropped; the run goes on.")
            if self._rest is not None:
                self._rest()
        self._ended.extend(finding.verdict for finding in findings if finding.ended)
        # Records before events: a reader that knows of a verdict finds the steps it rests on.
        if self._writer is not None and done:
            self._writer.append(done)
        events = [
            self._emit({"kind": finding.kind, "step": self.newest, "verdict": msgspec.to_builtins(finding.verdict)})
            for finding in findings
        ]
        is_time = (self.steps - len(self.completed)) // LOOK_STEPS < self.steps // LOOK_STEPS
        if self._writer is not None and (is_time or findings or everything):
            for watcher in self._watchers:
                if isinstance(watcher, PeersWatcher):
                    try:
                        self._writer.put_undecided(watcher.undecided())
                    except Exception:  # verdicts are worth more than what is not decided
                        _log.exception("What is undecided could not be worked out; the run goes on.")
        return events

    def _is_awaited(self, step: int, row: Row) -> bool:
        """Return whether a record of this step, or a whole step before it, may still be on its way."""
        # Others wait for a rank for BEHIND_STEPS, and for as many as pass in BEHIND_S while there is room for them.
        seconds = max(record.step_seconds for record in row.values())
        meanwhile = min(BEHIND_S / seconds if seconds > 0 else 0.0, PENDING_RECORDS / self.ranks)
        if self._highest - step >= max(BEHIND_STEPS, meanwhile):
            return False
        if step > (-1 if self.newest is None else self.newest) + 1:
            return True
        return len(row) < self.ranks and any(rank not in row and rank not in self._absent for rank in range(self.ranks))

    def _emit(self, event: Event) -> Event:
        event = {"unix": self.clock(), **event}
        if self._writer is not None:
            self._writer.event(event)
        self._listeners.notify(event)
        return event


def with_waits(row: Row) -> Row:
    """Return the records of one step with `wait_seconds` filled in where a rank could not know it (NaN).

    All ranks leave a synchronisation together, so the rank that was blocked least arrived last: a rank waited for
    `exposed_seconds` minus the least `exposed_seconds` of all. That needs no common clock.
    """
    if not any(math.isnan(record.wait_seconds) for record in row.values()):
        return row
    known = [record.exposed_seconds for record in row.values() if math.isfinite(record.exposed_seconds)]
    least = min(known, default=math.nan)
    return {
        rank: msgspec.structs.replace(record, wait_seconds=record.exposed_seconds - least)
        if math.isnan(record.wait_seconds)
        else record
        for rank, record in row.items()
    }


# -------------------------------------------------------------------------------------------------
# What plugs into the collector: watchers of a job, which see every completed step and return what began or ended.


class Watcher(Protocol):
    """Judges some kinds of verdicts. Its memory does not grow with steps."""

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        """Take in a completed step, in order; return the episodes that began or ended at it, mostly none.

        A verdict that ended has its final price, and `until_step` in its evidence.
        """

    @property
    def open(self) -> list[Verdict]:
        """The verdicts whose episodes are not over, with their prices so far."""


def standard_watchers(ranks: int, hosts: Sequence[str] = (), groups: JobGroups | None = None) -> list[Watcher]:
    """Return the watchers of every job: ranks' own times, links between hosts, the job as a whole, and its stages.

    A job is bound by communication only where neither a slow link nor small collectives explain it.

    Args:
        ranks: Number of ranks.
        hosts: Host of each rank, in rank order, where it is known.
        groups: What is known of the job's process groups.
    """
    groups = groups or JobGroups(ranks)
    links, small = LinkWatcher(ranks, hosts), SmallCollectives()
    bound = CommunicationBound(functools.partial(_is_explained, links, small, groups))
    return [PeersWatcher(groups), links, JobWatcher(ranks, [small, bound, InputBound()]), StageWatcher(groups)]


def _is_explained(links: LinkWatcher, small: SmallCollectives, groups: JobGroups) -> bool:
    """Return whether there is, or may be, a narrower reason for long communication: a pipeline has bubbles."""
    return links.suspects or small.suspects or groups.mesh.has_stages
