"""All ranks' dumps side by side: where every rank stands in every process group."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from ringside.doctor.findings import Note
from ringside.doctor.flight_recorder.dump import Dump, Group, RecordedCall

ROOTED = frozenset({"broadcast", "_broadcast_oop", "reduce", "_reduce_oop", "gather", "scatter"})
"""Collectives that some ranks may leave before others have come."""


CallsByGroup = Mapping[int, Mapping[str, list[RecordedCall]]]


class GroupView:
    """One process group of the job, seen by all of its ranks.

    Args:
        group: What the group is.
        dumps: Dumps of its members, by global rank, in the order of `members`.
        members: Its global ranks; those known to be, where no dump lists them.
        made: Calls by rank and name of group, as `Dump.by_group` gives them.

    Attributes:
        calls: Collectives (no sends, no receives) by rank and sequence number.
        last: Last collective that each rank is known to have entered.
        completed: Last collective that each rank is known to have completed.
    """

    def __init__(self, group: Group, dumps: dict[int, Dump], members: Sequence[int], made: CallsByGroup) -> None:
        self.group, self.dumps, self.members = group, dumps, tuple(members)
        self.calls: dict[int, dict[int, RecordedCall]] = {}
        self.p2p: dict[int, list[RecordedCall]] = {}
        for rank in dumps:
            own = made[rank].get(group.name, [])
            self.calls[rank] = {call.seq: call for call in own if not call.p2p and call.op != "coalesced"}
            self.p2p[rank] = [call for call in own if call.p2p and call.op in ("send", "recv")]
        counted = {} if any(self.p2p.values()) else dumps
        entered = {rank: dump.entered.get(group.name, -1) for rank, dump in counted.items()}
        ended = {rank: dump.completed.get(group.name, -1) for rank, dump in counted.items()}
        self._entered = {rank for rank, seq in entered.items() if seq >= 0}
        self.last = {rank: max([entered.get(rank, -1), *self.calls[rank]]) for rank in dumps}
        done = {
            rank: [seq for seq, call in calls.items() if call.done and not call.endless]
            for rank, calls in self.calls.items()
        }
        self.completed = {rank: max([ended.get(rank, -1), *done[rank]]) for rank in dumps}

    @cached_property
    def pending(self) -> dict[int, list[RecordedCall]]:
        """Collectives that have no end, by rank, in order."""
        return {
            rank: sorted((call for call in calls.values() if self._open(rank, call)), key=lambda call: call.seq)
            for rank, calls in self.calls.items()
        }

    def _open(self, rank: int, call: RecordedCall) -> bool:
        """Whether a collective has no end. Gloo marks what failed as ended too: it cannot have without everybody."""
        if call.endless:
            return self.least < call.seq and call.op not in ROOTED
        if not call.done or call.backend != "gloo":
            return not call.done
        short = self.least < call.seq
        waited = self.dumps[rank].written_s - call.created_s
        return short and call.op not in ROOTED and call.seq == self.last[rank] and waited >= call.timeout_s / 2

    @property
    def open_p2p(self) -> dict[int, list[RecordedCall]]:
        """Sends and receives that have no end, by rank."""
        return {rank: [call for call in calls if not call.done] for rank, calls in self.p2p.items()}

    @cached_property
    def stale(self) -> frozenset[int]:
        """Members that went on after their dump was written: peers finished collectives that need them, and later ones.

        Dumps of a job that runs are written at different moments, and one that breaks off lacks its newest calls. (What
        Gloo marks as ended may have failed.)
        """
        finished = {
            rank: max((s for s, call in calls.items() if call.done and call.op not in ROOTED), default=-1)
            for rank, calls in self.calls.items()
        }
        known = (call.backend != "gloo" and not call.endless for own in self.calls.values() for call in own.values())
        furthest = max(finished.values(), default=-1) if all(known) else -1
        older = {rank for rank, calls in self.calls.items() if calls and max(calls) < furthest}
        return frozenset(older | {rank for rank, dump in self.dumps.items() if dump.lost and rank not in self._entered})

    @cached_property
    def least(self) -> int:
        """The collective that all members with a dump are known to have entered."""
        return min(self.last.values(), default=-1)

    def global_rank(self, index: int) -> int | None:
        """Return the global rank of a rank of the group; None for anyone, and where the group's ranks are not known."""
        ranks = self.group.ranks
        if index < 0:
            return None
        if ranks:
            return ranks[index] if index < len(ranks) else None
        return index if self.group.name == "0" else None


def group_views(dumps: Iterable[Dump]) -> list[GroupView]:
    """Return the job's groups in a stable order; groups of one name but other ranks are different groups."""
    by_rank = {dump.rank: dump for dump in dumps}
    found: dict[tuple[str, tuple[int, ...]], tuple[Group, list[int]]] = {}
    for rank, dump in by_rank.items():
        for group in dump.groups.values():
            found.setdefault((group.name, group.ranks), (group, []))[1].append(rank)
    made = {rank: dump.by_group() for rank, dump in by_rank.items()}
    views = []
    for group, naming in found.values():
        everybody = group.name == "0" or group.desc == "default_pg"
        members = group.ranks or sorted(by_rank if everybody else naming)
        views.append(GroupView(group, {rank: by_rank[rank] for rank in members if rank in by_rank}, members, made))
    return views


# -------------------------------------------------------------------------------------------------
# Which dumps belong together: one job, one dump per rank.

KIND = "flight-recorder dump"
APART_S = 86_400.0
"""Dumps of one hang lie minutes apart; a day means another run."""


def sort_into_jobs(dumps: Sequence[Dump]) -> tuple[list[list[Dump]], list[Note]]:
    """Return the dumps job by job, and notes on those that were left out.

    Folders are jobs where the same rank lies in several of them. Within one job, dumps of another world or of another
    day are left out, and of two dumps of a rank the newer is used.
    """
    folders: dict[str, list[Dump]] = defaultdict(list)
    for dump in dumps:
        folders[dump.file.rpartition("/")[0]].append(dump)
    places = Counter(rank for members in folders.values() for rank in {dump.rank for dump in members})
    several = any(count > 1 for count in places.values())
    jobs, notes = [], []
    for members in folders.values() if several else [list(dumps)]:
        worlds = Counter(dump.world for dump in members if dump.world)
        world = worlds.most_common(1)[0][0] if worlds else ()
        times = sorted(last for dump in members if (last := last_s(dump)))
        median = times[len(times) // 2] if times else 0.0
        kept: dict[int, Dump] = {}
        # the newest first; of equally old ones the one that shows more waiting
        for dump in sorted(members, key=lambda dump: (last_s(dump), sum(not c.done for c in dump.calls)), reverse=True):
            apart = abs(last_s(dump) - median) / APART_S
            if dump.world and dump.world != world:
                why = f"is of another job: its world has {len(dump.world)} ranks, most others' {len(world)}"
            elif last_s(dump) and apart > 1.0:
                why = f"is of another run: its last call is {apart:.0f} days from the others'"
            elif dump.rank in kept:
                why = f"is a second dump of rank {dump.rank}; {kept[dump.rank].file} is newer and was used"
            else:
                kept[dump.rank] = dump
                continue
            notes.append(Note(file=dump.file, kind=KIND, text=f"{why}; left out", used=False))
        jobs.append(sorted(kept.values(), key=lambda dump: dump.rank))
    return jobs, notes


def last_s(dump: Dump) -> float:
    """Return when the dump's last call was made, seconds since 1970; 0 where it has none."""
    return max((call.created_s for call in dump.calls), default=0.0)
