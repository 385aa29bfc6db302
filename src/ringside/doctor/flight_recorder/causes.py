"""The first causes that dumps show: who holds a hung job up, and who called another collective than the others."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from ringside.doctor.flight_recorder.dump import ANYONE, UNTOLD, RecordedCall
from ringside.doctor.flight_recorder.groups import ROOTED, GroupView

# -------------------------------------------------------------------------------------------------
# Who holds a hung job up: the first cause, separated from the ranks that only wait because of it.
#
# A rank waits for every member of a group that never entered a collective it is in, and for the other side of a send or
# receive that was never posted. The rank that is waited for and waits for nobody is a first cause. So is a rank whose
# own device stopped: its collectives have no end though its peers, who needed it, finished them.

STUCK_BY = 2
"""A rank's device counts as stopped when peers finished so many collectives more; one may be a watchdog's round."""
LIVE_S = 0.5
"""A call that is so young when its dump is written hangs nowhere: the job was running."""
MOST_STARTS = 64
"""Ranks from which a circle of waiting is looked for."""


@dataclass
class HangWait:
    """Rank `waiting` is in `call` of `view`; `awaited` is not."""

    waiting: int
    awaited: int
    view: GroupView
    call: RecordedCall


@dataclass
class HangCause:
    """One first cause of a hang.

    Attributes:
        view: The group in which it shows first.
        call: The collective that hangs, as a waiting rank called it.
        absent: Culprits that never entered it.
        stopped: Culprits whose own device stopped: rank → (last completed, what peers completed).
        circle: Culprits that wait for each other.
        waiting: Ranks that wait in it.
    """

    view: GroupView
    call: RecordedCall
    absent: set[int] = field(default_factory=set)
    stopped: dict[int, tuple[int, int]] = field(default_factory=dict)
    circle: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)

    @property
    def ranks(self) -> list[int]:
        """All culprits, ascending."""
        return sorted(self.absent | set(self.stopped) | self.circle)


def find_causes(views: list[GroupView]) -> list[HangCause]:
    """Return the first causes of a hang, the earliest first; none where nobody waits for anybody."""
    # Who waits for whom, in collectives and in sends and receives.
    waits = [wait for view in views for wait in (*_absences(view), *_unmatched(view))]
    stopped = _stopped_devices(views)
    later = {rank for view in views for rank in view.stale}
    edges: dict[int, set[int]] = defaultdict(set)
    for wait in waits:
        edges[wait.waiting].add(wait.awaited)
    awaited = {rank for targets in edges.values() for rank in targets}
    # Who is waited for and waits for nobody is a first cause; so is a stopped device.
    roots = {rank for rank in awaited if not edges.get(rank) or rank in stopped}
    if roots and roots <= later:
        return []  # all that is waited for are ranks whose dumps are older than the others'
    roots -= later
    # Where nobody is the first, ranks wait for each other and for nobody else: the smallest set that all waiting leads
    # into. (A stopped rank has no excuse in waiting for others itself: it is a cause, and no circle is looked for.)
    circle: set[int] = set()
    for start in sorted(awaited)[:MOST_STARTS] if not roots and not stopped else ():
        reached: set[int] = set()
        todo = [start]
        while todo:
            further = edges.get(todo.pop(), set()) - reached
            reached |= further
            todo += further
        if start in reached and (not circle or len(reached) < len(circle)):
            circle = reached
    # Each culprit at the collective in which it was missed first; other culprits and stopped ranks are no witnesses.
    culprits = roots | circle
    no_witnesses = (culprits | set(stopped)) - circle
    first: dict[int, HangWait] = {}
    for wait in waits:
        if wait.awaited in culprits and wait.waiting not in no_witnesses:
            best = first.get(wait.awaited)
            if best is None or _order(wait) < _order(best):
                first[wait.awaited] = wait
    # Culprits of one group are one cause; a circle is one wherever it shows.
    causes: list[HangCause] = []
    for rank, wait in sorted(first.items(), key=lambda item: _order(item[1])):
        if not circle:
            _cause_of(causes, wait.view, wait.call).absent.add(rank)
        elif not causes:
            _cause_of(causes, wait.view, wait.call).circle |= circle
    for cause in causes:
        missed = set(cause.ranks)
        cause.waiting |= {wait.waiting for wait in waits if wait.view is cause.view and wait.awaited in missed}
    for rank, signs in stopped.items():
        sign = next((sign for sign in signs if any(cause.view is sign.view for cause in causes)), signs[0])
        _cause_of(causes, sign.view, sign.call).stopped[rank] = sign.counts
    return sorted(causes, key=lambda cause: cause.call.created_s)


def _absences(view: GroupView) -> Iterable[HangWait]:
    """Each waiting rank with each member that is not where it is, at the first call in which it misses it."""
    for rank, pending in view.pending.items():
        reached = -2
        for call in pending:
            age_s = view.dumps[rank].written_s - call.created_s
            is_young = bool(call.created_s) and 0.0 <= age_s < LIVE_S
            if call.endless:  # nothing else shows which dumps are older
                is_young = min(dump.written_s for dump in view.dumps.values()) - call.created_s < LIVE_S
            if call.seq > view.least and not is_young:
                absent = [other for other, last in view.last.items() if reached <= last < call.seq and other != rank]
                yield from (HangWait(rank, awaited, view, call) for awaited in absent)
                reached = call.seq


def _unmatched(view: GroupView) -> Iterable[HangWait]:
    """Sends and receives without an end that the other side has not posted as often.

    Who receives from anyone, or does not tell from whom, waits for nobody in particular, and may yet take what others
    send to it.
    """
    posted: dict[int, Counter[tuple[str, int]]] = {}
    open_to_all: Counter[int] = Counter()
    calls: dict[tuple[int, str, int], list[RecordedCall]] = defaultdict(list)
    for rank, own in view.p2p.items():
        posted[rank] = Counter()
        for call in own:
            peer = view.global_rank(call.peer)
            open_to_all[rank] += call.op == "recv" and call.peer in (ANYONE, UNTOLD) and not call.done
            if peer is not None and not call.done:
                posted[rank][call.op, peer] += 1
                calls[rank, call.op, peer].append(call)
    for (rank, op, peer), made in calls.items():
        if peer not in posted:
            continue
        there = posted[peer]["recv" if op == "send" else "send", rank] + (open_to_all[peer] if op == "send" else 0)
        if len(made) > there:
            yield HangWait(rank, peer, view, made[there])


@dataclass(frozen=True)
class HangSign:
    """Where a stopped device shows: the first call without an end, and (own last completed, peers' last)."""

    view: GroupView
    call: RecordedCall
    counts: tuple[int, int]


def _stopped_devices(views: list[GroupView]) -> dict[int, list[HangSign]]:
    """Ranks that have no end of what peers of theirs finished: where it shows, the largest group first."""
    found: dict[int, list[HangSign]] = defaultdict(list)
    for view in views:
        for rank, pending in view.pending.items():
            peers = max((last for peer, last in view.completed.items() if peer != rank), default=-1)
            own = view.completed[rank]
            late = [call for call in pending if call.seq <= peers and call.op not in ROOTED and call.backend != "gloo"]
            # A call that peers saw end only when this rank's dump was being written is no sign.
            signs = []
            for call in late:
                ends = [calls[call.seq].ended_s for calls in view.calls.values() if call.seq in calls]
                ended_s = min(filter(None, ends), default=None)
                if ended_s is None or view.dumps[rank].written_s - ended_s >= LIVE_S:
                    signs.append(call)
            if own >= 0 and peers - own >= STUCK_BY and len(signs) >= STUCK_BY and rank not in view.stale:
                found[rank].append(HangSign(view, signs[0], (own, peers)))
    return {rank: sorted(signs, key=lambda sign: -len(sign.view.members)) for rank, signs in found.items()}


def _order(wait: HangWait) -> tuple[bool, float, int]:
    """Collectives before sends and receives; then by time."""
    return (wait.call.p2p, wait.call.created_s, wait.call.seq)


def _cause_of(causes: list[HangCause], view: GroupView, call: RecordedCall) -> HangCause:
    """The cause that shows in this group; made where there is none."""
    for cause in causes:
        if cause.view is view:
            return cause
    causes.append(HangCause(view=view, call=call))
    return causes[-1]


# -------------------------------------------------------------------------------------------------
# Ranks that called different collectives under the same number: another operation, size or dtype, or another order.

SAME_SIZES = frozenset({
    "all_reduce", "allreduce", "allreduce_coalesced", "all_reduce_barrier", "_all_gather_base",
    "all_gather_single", "all_gather", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter",
    "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
    "broadcast", "reduce", "barrier",
})  # fmt: skip
"""Collectives whose ranks must all give the same sizes; an all-to-all's may differ."""
SOON = 8
"""Calls within which another order is recognised as one."""


@dataclass(frozen=True)
class Mismatch:
    """One collective that ranks did not agree on.

    Args:
        view: Its group.
        seq: Its number.
        aspect: `operation`, `size` or `dtype`.
        common: The call that most made.
        others: The calls of those that differ, by rank; all ranks where there is no majority.
        decided: Whether there is a majority, so that `others` are the culprits.
        skipped: Whether those that differ called the same as the others, but in another order.
    """

    view: GroupView
    seq: int
    aspect: str
    common: RecordedCall
    others: dict[int, RecordedCall]
    decided: bool
    skipped: bool

    @property
    def ranks(self) -> list[int]:
        """The culprits, ascending."""
        return sorted(self.others)


def find_mismatches(views: list[GroupView]) -> list[Mismatch]:
    """Return the first mismatch of each group; what follows it in that group is its consequence."""
    found: list[Mismatch] = []
    for view in views:
        by_seq: dict[int, dict[int, RecordedCall]] = {}
        for rank, calls in view.calls.items():
            for seq, call in calls.items():
                by_seq.setdefault(seq, {})[rank] = call
        mismatches = (
            mismatch
            for seq in sorted(by_seq)
            if len({call.shape for call in by_seq[seq].values()}) > 1
            for aspect in ("operation", "dtype", "size")
            if (mismatch := _differ(view, seq, aspect, by_seq[seq])) is not None
        )
        found += islice(mismatches, 1)
    return found


def _differ(view: GroupView, seq: int, aspect: str, calls: dict[int, RecordedCall]) -> Mismatch | None:
    """Whether ranks differ in one aspect of collective number `seq`, and who."""
    # What is compared; calls whose ranks may differ in this are left out.
    values: dict[int, str] = {}
    for rank, call in calls.items():
        op, inputs, outputs, dtypes = call.shape
        # Gathered from uneven shards, or scattered into them: the rank's own one may differ, the list may not.
        shards = outputs if op == "all_gather" else inputs if op == "reduce_scatter" else ""
        uneven = len(set(shards[2:-2].split("], ["))) > 1
        if aspect == "operation":
            values[rank] = op
        elif aspect == "dtype" and op not in ("barrier", "coalesced"):
            values[rank] = dtypes
        elif aspect == "size" and op in SAME_SIZES:
            values[rank] = shards if uneven else f"{inputs} → {outputs}"
    values = {rank: text for rank, text in values.items() if text}
    counts = Counter(values.values()).most_common(2)
    if len(counts) < 2:
        return None
    # A tie decides nothing: then all are shown and nobody is blamed.
    majority, count = counts[0]
    decided = count > counts[1][1]
    others = {rank: calls[rank] for rank, text in values.items() if text != majority or not decided}
    same = [rank for rank, text in values.items() if text == majority]
    common = calls[same[0]]
    # Another order: each side soon calls what the other called here.
    skipped = aspect == "operation" and all(
        _called_later(view, rank, seq, common) and any(_called_later(view, member, seq, calls[rank]) for member in same)
        for rank in others
    )
    return Mismatch(view=view, seq=seq, aspect=aspect, common=common, others=others, decided=decided, skipped=skipped)


def _called_later(view: GroupView, rank: int, seq: int, call: RecordedCall) -> bool:
    """Whether a rank made a call of this shape soon after number `seq`."""
    own = view.calls[rank]
    return any(number in own and own[number].shape == call.shape for number in range(seq + 1, seq + 1 + SOON))
