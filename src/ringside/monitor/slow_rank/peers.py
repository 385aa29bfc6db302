"""Ranks are compared with those that do the same work: a detector for each set of peers of a job's mesh."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from ringside.monitor.causes import PHASES
from ringside.monitor.groups import JobGroups, Mesh, Waited, chain, describe_chain, describe_place, who_waited
from ringside.monitor.run.records import Row, StepRecord
from ringside.monitor.run.table import StepTable
from ringside.monitor.slow_rank.judge import SLOW_CAUSE
from ringside.monitor.slow_rank.watcher import SlowRankWatcher
from ringside.monitor.slow_rank.window_test import WARM_UP
from ringside.monitor.undecided import Undecided, undecided_of_job
from ringside.monitor.verdict import OWN_TIME_KINDS, Evidence, Verdict, VerdictEvent, episode_end
from ringside.text import name_ranks

KEPT = 64
"""Steps of which it is kept who waited for whom."""


BASELINE = 32
"""Steps, after the first few, that are a rank's own past where nobody does the same work."""
OF_OWN_WORK = ("own_seconds", "unclear_seconds", "run_delay_seconds", *(f"{phase}_seconds" for phase in PHASES))

CHANGED_CAUSE = "its own work takes longer than it did; no rank does the same work, so it may have more of it"
CHANGED_ADVICE = (
    "Find out whether this rank has more work than before (longer sequences, another part of the model), or whether "
    "its device or host became slower: its clocks, temperature, CPU steal and neighbours."
)


class PeersWatcher:
    """Names ranks whose own time holds the job up, each beside its peers, or where it has none beside its own past.

    Args:
        groups: What is known of how the job's ranks are arranged; where peers change, judging begins anew.
    """

    def __init__(self, groups: JobGroups) -> None:
        self._groups, self._mesh = groups, groups.mesh
        self._compared = _compared(self._mesh)
        self._rows: deque[Row] = deque(maxlen=KEPT)
        self._evidence: dict[int, Evidence] = {}  # by rank, as it was when its verdict was reached

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        """Take in a completed step; see `Watcher`."""
        events: list[VerdictEvent] = []
        mesh = self._groups.mesh
        if mesh is not self._mesh:
            before, self._mesh = self._mesh.peers, mesh
            if mesh.peers != before:
                events += [episode_end(verdict, step) for verdict in self.open]
                self._compared, self._evidence = _compared(mesh), {}
        self._rows.append(row)
        for compared in self._compared:
            for event in compared.update(step, row):
                rank = event.verdict.ranks[0]
                if not event.ended:
                    self._evidence[rank] = self._where_and_whom(rank, compared.ranks, event.verdict.since_step)
                events.append(VerdictEvent(self._with_evidence(event.verdict), event.ended))
        return events

    @property
    def open(self) -> list[Verdict]:
        """The verdicts whose episodes are not over, with their prices so far."""
        return [self._with_evidence(verdict) for compared in self._compared for verdict in compared.open]

    def undecided(self) -> Undecided:
        """Return who may be slow, with the job's numbers of ranks."""
        return undecided_of_job([(compared.ranks, compared.watcher.undecided()) for compared in self._compared])

    def _with_evidence(self, verdict: Verdict) -> Verdict:
        more = self._evidence.get(verdict.ranks[0])
        return msgspec.structs.replace(verdict, evidence={**verdict.evidence, **more}) if more else verdict

    def _where_and_whom(self, rank: int, peers: Sequence[int], since: int) -> Evidence:
        """Return where a rank is in the mesh, with whom it is compared, and whom it holds up, as far as is known."""
        found: Evidence = {}
        if place := describe_place(self._mesh.coordinates[rank]):
            found["place"] = place
        if len(peers) < self._mesh.ranks:
            found["peers"] = name_ranks([peer for peer in peers if peer != rank])
        if self._mesh.groups and (victims := self._victims(rank, since)):
            found["held_up"] = name_ranks(sorted(victims))
            farthest = max(victims.values(), key=len)
            if len(farthest) > 1:
                found["by_way_of"] = describe_chain(farthest)
        return found

    def _victims(self, culprit: int, since: int) -> dict[int, list[Waited]]:
        """Return who waits for a rank since a step, each with the way that its lateness came.

        What ranks waited for each other before counts for nothing: the bubbles of a pipeline.
        """
        sums: dict[tuple[int, int, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
        steps = [0, 0]
        for row in self._rows:
            is_since = next(iter(row.values())).step >= since
            steps[is_since] += 1
            for wait in who_waited(row, self._mesh):
                sums[wait.rank, wait.last, wait.group][is_since] += wait.seconds
        waits = []
        for (rank, last, group), (before, after) in sums.items():
            more = after / max(steps[1], 1) - before / max(steps[0], 1)
            if more > 0:
                waits.append(Waited(rank=rank, last=last, group=group, seconds=more))
        found = {}
        for rank in {wait.rank for wait in waits} - {culprit}:
            links = chain(waits, rank)
            ends = [link.last for link in links]
            if culprit in ends:
                found[rank] = links[: ends.index(culprit) + 1]
        return found


class _Compared:
    """Ranks that are compared with each other, and judged by a watcher that numbers them from 0.

    Args:
        ranks: They, ascending.
        job: Number of ranks of the job.
        by_change: They do different work: how each has changed since its first steps is compared.

    Attributes:
        watcher: Judges them, by their numbers here.
    """

    def __init__(self, ranks: Sequence[int], job: int, *, by_change: bool = False) -> None:
        self.ranks = ranks
        self._job, self._by_change = job, by_change
        self.watcher = SlowRankWatcher(len(ranks))
        self._skipped = 0
        self._past: list[list[float]] = [[] for _ in ranks]
        self._usual: list[float] = []

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        """Take in a completed step of the whole job."""
        records = [row.get(rank) for rank in self.ranks]
        if self._by_change and not self._usual:
            self._learn(records)
            return []
        mine: Row = {}
        for number, (rank, record) in enumerate(zip(self.ranks, records, strict=True)):
            if record is None:
                continue
            if self._by_change:
                known = {name: getattr(record, name) for name in OF_OWN_WORK}
                times = {name: seconds and seconds / self._usual[number] for name, seconds in known.items()}
                record = msgspec.structs.replace(record, **times)
            mine[number] = record if number == rank else msgspec.structs.replace(record, rank=number)
        return [VerdictEvent(self._of_job(event.verdict), event.ended) for event in self.watcher.update(step, mine)]

    @property
    def open(self) -> list[Verdict]:
        """The verdicts that are open, with the job's numbers of ranks."""
        return [self._of_job(verdict) for verdict in self.watcher.open]

    def _learn(self, records: Sequence[StepRecord | None]) -> None:
        """Take in one of the first steps; after enough of them it is known how long each rank usually works."""
        self._skipped += 1
        if self._skipped <= WARM_UP:
            return
        for past, record in zip(self._past, records, strict=True):
            if record is not None and record.own_seconds > 0:
                past.append(record.own_seconds)
        if all(len(past) >= BASELINE for past in self._past):
            medians = [median(past) for past in self._past]
            self._past, middle = [], median(medians)
            self._usual = [usual / middle for usual in medians]

    def _of_job(self, verdict: Verdict) -> Verdict:
        number = verdict.ranks[0]
        verdict = of_job(verdict, self.ranks, self._job)
        if not self._by_change:
            return verdict
        # Times were divided by how much more than the middle one this rank usually works.
        usual = self._usual[number]
        evidence = dict(verdict.evidence)
        evidence["before_own_seconds"] = float(evidence.pop("others_own_seconds", 0.0)) * usual
        evidence["own_seconds"] = float(evidence.get("own_seconds", 0.0)) * usual
        changed = {"kind": "changed", "advice": CHANGED_ADVICE} if verdict.kind == "slow_rank" else {}
        cause = CHANGED_CAUSE if verdict.cause == SLOW_CAUSE else verdict.cause
        cost = verdict.cost_rank_seconds * usual
        return msgspec.structs.replace(verdict, evidence=evidence, cause=cause, cost_rank_seconds=cost, **changed)


def _compared(mesh: Mesh) -> list[_Compared]:
    """Return whom to compare with whom in a job: peers, and all that have none by how they change."""
    alone = [peers[0] for peers in mesh.peers if len(peers) == 1]
    found = [_Compared(peers, mesh.ranks) for peers in mesh.peers if len(peers) > 1]
    return [*found, _Compared(alone, mesh.ranks, by_change=True)] if len(alone) > 1 else found


def among_peers(
    verdict: Verdict, table: StepTable, mesh: Mesh, judge: Callable[[Verdict, StepTable], Verdict]
) -> Verdict:
    """Return a verdict on one rank's own time judged again beside that rank's peers.

    Args:
        verdict: It.
        table: The records of all ranks.
        mesh: How they are arranged.
        judge: Judges a verdict by the records of ranks that do the same work, numbered from 0 in both.
    """
    peers = mesh.peers_of(verdict.ranks[0])
    if len(peers) == 1 < table.ranks:
        return verdict  # it was compared with its own past
    if verdict.kind not in OWN_TIME_KINDS or len(peers) == table.ranks:
        return judge(verdict, table)
    return of_job(judge(of_peers(verdict, peers, mesh.ranks), table.of_ranks(peers)), peers, mesh.ranks)


def of_peers(verdict: Verdict, peers: Sequence[int], ranks: int) -> Verdict:
    """Return a verdict with the number of its rank among peers in place of that in the job; undone by `of_job`."""
    cost = verdict.cost_rank_seconds * len(peers) / ranks
    return msgspec.structs.replace(verdict, ranks=[peers.index(rank) for rank in verdict.ranks], cost_rank_seconds=cost)


def of_job(verdict: Verdict, peers: Sequence[int], ranks: int) -> Verdict:
    """Return a verdict with the numbers of ranks among peers in place of those in the job; all ranks of it wait."""
    if len(peers) == ranks:
        return verdict
    cost = verdict.cost_rank_seconds * ranks / len(peers)
    return msgspec.structs.replace(verdict, ranks=[peers[rank] for rank in verdict.ranks], cost_rank_seconds=cost)
