"""What watches the ranks of a job, each beside those that do the same work: a detector for each set of peers.

What a detector finds gets a cause and a price, and is told where it has lasted and matters.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from statistics import median

import msgspec
import numpy as np

from ringside.monitor.causes import PHASES, explain_verdict
from ringside.monitor.groups import JobGroups, Mesh, Waited, chain, describe_chain, describe_place, who_waited
from ringside.monitor.run.records import Row, StepRecord
from ringside.monitor.run.table import StepTable, tabulate
from ringside.monitor.slow_rank.detector import SLOW_CAUSE, WINDOW, Detector, PriceMeter, meter_of
from ringside.monitor.slow_rank.pauses import is_of_pauses
from ringside.monitor.slow_rank.window_test import PARTS, PERSISTENCE, WARM_UP
from ringside.monitor.undecided import NOT_LASTED, TOO_LITTLE, Suspect, Undecided, undecided_of_job
from ringside.monitor.verdict import OWN_TIME_KINDS, Evidence, Verdict, VerdictEvent, episode_end
from ringside.text import name_ranks

RECORDS_KEPT = 16_384

MATERIAL = 0.02
"""The share of a job's step that a rank's excess must take up. Less holds nobody up: where a link is slow and steps
take ten times as long, the rank that sends over it may well need a millisecond more for its own work."""

LASTED_S, LOST_S = 0.3, 0.05
"""Seconds that an excess must have lasted, and must have added up to, and it must still be there. Now and then a
virtual machine's processor is another's for a fifth of a second, and two ranks on cores that share a physical one lag
by turns, by a tenth for a dozen steps: that is much where steps take milliseconds, and nobody can do anything about."""

LOOK_AGAIN = 8
"""Steps between two looks at who is slow and does not matter yet."""


class SlowRankWatcher:
    """Names ranks whose own time holds the job up: `slow_rank`, `uneven_work`, `input_bound`.

    Args:
        ranks: Number of ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._detector = Detector(ranks, has_parts=True)
        self._recent: deque[Row] = deque(maxlen=max(32, min(WINDOW, RECORDS_KEPT // ranks)))
        self._meters: dict[int, PriceMeter] = {}
        # By rank. A finding of the detector is pending until it has lasted, then minor until it is material, then open.
        self._pending: dict[int, Verdict] = {}
        self._minor: dict[int, Verdict] = {}
        self._open: dict[int, Verdict] = {}

    def update(self, step: int, row: Row) -> list[VerdictEvent]:
        """Take in a completed step; see `Watcher`."""
        self._recent.append(row)
        times = np.full((2 + len(PARTS) + 2, self._ranks), np.nan)
        for rank, of in row.items():
            forward = of.forward_seconds + of.compute_seconds  # what is not told apart stands in the second
            spent = of.data_seconds, forward, of.backward_seconds, of.optimizer_seconds
            times[:, rank] = of.own_seconds, of.samples, *spent, of.routed_bytes, of.run_delay_seconds
        own, samples, *parts, routed, run_delay = times
        findings = self._detector.update(own, samples, step=step, routed=routed, parts=parts, run_delay=run_delay)
        for meter in self._meters.values():
            meter.add(own[None])
        events = []
        for finding in findings:
            rank = finding.verdict.ranks[0]
            if not finding.ended:
                self._pending[rank] = finding.verdict
            elif rank in self._open:
                verdict = self._priced(rank, self._open.pop(rank))
                del self._meters[rank]
                events.append(episode_end(verdict, int(finding.verdict.evidence["until_step"])))
            else:  # over before it was a verdict
                self._pending.pop(rank, None)
                self._minor.pop(rank, None)
        lasted = [rank for rank, verdict in self._pending.items() if self._has_lasted(verdict)]
        self._minor.update({rank: self._pending.pop(rank) for rank in lasted})
        for rank in lasted if step % LOOK_AGAIN else list(self._minor):
            if self._is_material(self._minor[rank]):
                verdict = msgspec.structs.replace(self._minor.pop(rank), detected_step=step)
                table = tabulate((record for row in self._recent for record in row.values()), self._ranks)
                since = verdict.since_step
                verdict = explain_verdict(verdict, table.between(since), table.before(since))
                self._meters[rank] = meter_of(verdict)
                self._open[rank] = verdict
                events.append(VerdictEvent(verdict, ended=False))
        return events

    @property
    def open(self) -> list[Verdict]:
        """The verdicts whose episodes are not over, with their prices so far."""
        return [self._priced(rank, verdict) for rank, verdict in self._open.items()]

    def undecided(self) -> Undecided:
        """Return who may be slow: by the detector, or by it for sure but too briefly or by too little to be told."""
        state = self._detector.undecided()
        open_cases = [(self._pending, NOT_LASTED), (self._minor, TOO_LITTLE)]
        held = [
            Suspect(
                rank=rank,
                since_step=verdict.since_step,
                excess_ratio=verdict.excess_ratio,
                bar_ratio=1.0,
                healthy_steps=0,
                why=why,
            )
            for cases, why in open_cases
            for rank, verdict in cases.items()
        ]
        return msgspec.structs.replace(state, suspects=[*held, *state.suspects])

    def _has_lasted(self, verdict: Verdict) -> bool:
        """Return whether a rank's excess has lasted and cost enough, and is there in most of the newest steps."""
        if is_of_pauses(verdict):
            return True
        rank, seconds, lost = verdict.ranks[0], 0.0, 0.0
        late: list[bool] = []
        for row in filter(None, reversed(self._recent)):
            if next(iter(row.values())).step < verdict.since_step:
                break
            times = [time for record in row.values() for time in (record.step_seconds, record.own_seconds)]
            seconds += max((time for time in times if time > 0), default=0.0)  # what is not known is not positive
            known = {other: record.own_seconds for other, record in row.items() if record.own_seconds > 0}
            own = known.pop(rank, None)
            if own is not None:
                own -= row[rank].unclear_seconds  # of what was not seen, what is kinder to the accused
            if own is None or not known:
                continue
            usual = median(known.values())
            lost += own - usual
            late.append(own >= (1.0 + verdict.excess_ratio / 2.0) * usual)
        else:
            seconds, lost = LASTED_S, LOST_S  # longer than is remembered
        newest = late[:PERSISTENCE]
        return seconds >= LASTED_S and lost >= LOST_S and 2 * sum(newest) >= len(newest)

    def _is_material(self, verdict: Verdict) -> bool:
        """Return whether what the rank needs beyond the others is a good part of the newest steps."""
        rows = list(self._recent)[-PERSISTENCE:]
        steps = [record.step_seconds for row in rows for record in row.values() if record.step_seconds > 0]
        usual = float(verdict.evidence.get("others_own_seconds", verdict.evidence["own_seconds"]))
        return not steps or usual * verdict.excess_ratio >= MATERIAL * float(np.median(steps))

    def _priced(self, rank: int, verdict: Verdict) -> Verdict:
        return msgspec.structs.replace(verdict, cost_rank_seconds=self._meters[rank].rank_seconds)


# -------------------------------------------------------------------------------------------------
# With whom a rank is compared: its peers in the job's mesh, or its own past.

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
