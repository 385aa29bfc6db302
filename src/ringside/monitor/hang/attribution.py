"""Who keeps a standing job from going on: a pure function of where every rank stands.

Whoever is waited for and waits for nobody is the first cause; all others that wait are victims. A rank *waits* while it
is blocked in a collective, and is *behind* if it has not entered one in which others wait.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ringside.monitor.hang.rank_state import RankState

LIMIT_S = 4.0
"""Least wait that is called a hang: with the time to look and to tell, a rank is named within 5 s."""
NORMAL_WAITS = 2.75
"""A wait this many times as long as the longest normal one is called a hang (named within 3 times)."""
WARM_UP_S = 120.0
"""Patience with a rank at work in its first steps: it may compile, or fill caches that others have."""
WARM_UP_PASSES = 2
OWN_CALL_S = 30.0
"""Patience with a rank at work while others wait in a collective of the script's own: it may write a checkpoint."""
CONFIRM_S = 0.4
"""A rank must be gone for so long before it is called dead: ranks that are ended together die one after the other."""
NO_ANSWER_S = 2.0
"""A watcher speaks four times a second: one that is silent for so long does not run."""
BUSY_SHARE = 0.25
"""Of a core: one that sleeps uses none, and on a busy machine a loop gets less than a whole one."""

_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class HangFinding:
    """What keeps the job from going on.

    Args:
        kind: `hang`, `mismatch` or `dead_rank`.
        ranks: The first causes, ascending; empty: none of the ranks.
        why: `stopped`, `dead`, `left`, `no_answer`, `unheard`, `disk`, `busy`, `asleep`, `different`, `sizes`, `told`
            or `inside`.
        seq: Number of the collective.
        op: What it is.
        size_bytes: Its size; 0 where not known.
        arrived: Who entered it.
        missing: Who did not.
        waited_s: How long the longest waiting rank has waited.
        waiting: Who waits.
        text: What an error said.
    """

    kind: str
    ranks: tuple[int, ...]
    why: str
    seq: int
    op: str = "all_reduce"
    size_bytes: int = 0
    arrived: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    waited_s: float = 0.0
    waiting: tuple[int, ...] = ()
    text: str = ""


def limit_s(standings: Sequence[RankState], least_s: float = LIMIT_S) -> float:
    """Return the wait from which on a job is said to hang, seconds: it adapts to the longest normal wait."""
    return max(least_s, NORMAL_WAITS * max((standing.longest_s for standing in standings), default=0.0))


def judge(standings: Sequence[RankState], *, at_end: bool = False, least_s: float = LIMIT_S) -> HangFinding | None:
    """Return what keeps the job from going on; None while nothing does.

    Args:
        standings: Where every rank stands.
        at_end: There will be no later look: a rank that is gone is called dead at once.
        least_s: Least wait that is called a hang.
    """
    return _dead(standings, 0.0 if at_end else CONFIRM_S) or _told(standings) or _hung(standings, least_s)


def _dead(standings: Sequence[RankState], confirm_s: float) -> HangFinding | None:
    gone = [s for s in standings if s.process.gone and not s.left]
    dead = [s for s in gone if s.process.gone_s >= confirm_s and s.process.signal not in _ASKED]
    return _missing("dead_rank", "dead", dead, standings) if dead else None


def _told(standings: Sequence[RankState]) -> HangFinding | None:
    """What the engine has found out itself: ranks that called different things, or did not come in time."""
    for standing in standings:
        failure = standing.failure
        if failure is None or failure.kind not in ("mismatch", "late"):
            continue
        named = [s for s in standings if s.rank in failure.ranks]
        found = _missing("mismatch" if failure.kind == "mismatch" else "hang", "told", named, standings)
        seq = standing.entered if failure.kind == "mismatch" else found.seq
        return _with(found, seq=seq, text=failure.text, ranks=tuple(failure.ranks))
    return None


def _hung(standings: Sequence[RankState], least_s: float) -> HangFinding | None:
    present = [s for s in standings if not s.left and not s.process.gone]
    waiting = [s for s in present if s.waiting_s > 0 and not s.process.stopped]
    waited = max((s.waiting_s for s in waiting), default=0.0)
    limit = limit_s(standings, least_s)
    heard = [s for s in present if not _unheard(s, limit)]
    if waited <= limit or min(s.still_s for s in heard) <= limit:
        return None
    stopped = [s for s in present if s.process.stopped]
    if stopped:
        return _missing("hang", "stopped", stopped, standings)
    unheard = [s for s in present if _unheard(s, limit)]
    able = [s for s in standings if s not in waiting and s not in unheard and (s.left or not s.process.gone)]
    late = [s for s in able if _behind(s, waiting)]
    if late:
        return _late(late, waiting, waited, standings)
    if unheard:
        if min(s.synced for s in waiting) < WARM_UP_PASSES and waited <= WARM_UP_S:
            return None
        return _missing("hang", "unheard", unheard, standings)
    return _disagreement(waiting, standings) or _missing("hang", "inside", [], standings)


def _unheard(standing: RankState, limit: float) -> bool:
    """Whether a rank on a host that cannot be seen from here says nothing any more."""
    return not standing.process.state and standing.silent_s > limit


def _behind(standing: RankState, waiting: Sequence[RankState]) -> bool:
    """Whether a rank has not entered a collective in which another waits."""
    return any(
        standing.group_seq < other.group_seq if other.call else standing.entered < other.entered for other in waiting
    )


def _late(
    late: list[RankState], waiting: Sequence[RankState], waited: float, standings: Sequence[RankState]
) -> HangFinding | None:
    """Of the ranks at work that others wait for, those that are furthest behind."""
    first = min(s.entered for s in late)
    culprits = [s for s in late if s.entered == first]
    patience = 0.0
    if all(other.call for other in waiting):
        patience = OWN_CALL_S
    if min(s.synced for s in (*waiting, *culprits)) < WARM_UP_PASSES:
        patience = WARM_UP_S
    if waited <= patience and not any(s.left for s in culprits):
        return None
    return _missing("hang", _occupation(culprits[0]), culprits, standings)


def _occupation(standing: RankState) -> str:
    if standing.left:
        return "left"
    if standing.process.state == "D":
        return "disk"
    if standing.process.state and standing.silent_s > NO_ANSWER_S:
        return "no_answer"
    runs = standing.process.state == "R" or standing.process.cpu_share >= BUSY_SHARE
    return "busy" if runs else "asleep"


def _disagreement(waiting: Sequence[RankState], standings: Sequence[RankState]) -> HangFinding | None:
    """All wait: find out whether for different things. The minority is named; of a tie, who is behind."""
    for seq in sorted({call.seq for s in waiting for call in s.calls}):
        sizes = {s.rank: call.size_bytes for s in waiting if (call := s.call_of(seq)) is not None}
        if len(set(sizes.values())) > 1:
            odd = _odd_ones(sizes, {rank: -rank for rank in sizes})
            found = _missing("mismatch", "sizes", [s for s in standings if s.rank in odd], standings)
            return _with(found, seq=seq, arrived=tuple(sorted(sizes)), missing=(), size_bytes=_usual(sizes, odd))
    places = {s.rank: s.call or f"gradient {s.entered}" for s in waiting}
    if len(set(places.values())) > 1:
        odd = _odd_ones(places, {s.rank: s.entered for s in waiting})
        return _missing("mismatch", "different", [s for s in standings if s.rank in odd], standings)
    return None


def _odd_ones(values: dict[int, object] | dict[int, int] | dict[int, str], order: dict[int, int]) -> set[int]:
    """Return the ranks whose value is not the most frequent one; of a tie, those that come first in the order."""
    counts = Counter(values.values())
    first = {value: min(order[rank] for rank in values if values[rank] == value) for value in counts}
    usual = max(counts, key=lambda value: (counts[value], first[value]))
    return {rank for rank, value in values.items() if value != usual}


def _usual(sizes: dict[int, int], odd: set[int]) -> int:
    return next(size for rank, size in sizes.items() if rank not in odd)


def _missing(kind: str, why: str, culprits: Sequence[RankState], standings: Sequence[RankState]) -> HangFinding:
    """Describe the collective that the culprits did not enter."""
    waiting = [s for s in standings if s.waiting_s > 0 and s not in culprits]
    own = [s for s in waiting if s.call]
    if own and len(own) == len(waiting):
        furthest = max(own, key=lambda s: s.group_seq)
        seq, op, size = furthest.group_seq, furthest.call, furthest.call_bytes
        arrived = tuple(s.rank for s in standings if s.group_seq >= seq and s not in culprits)
    else:
        newest = max((s.entered for s in standings), default=0)
        known = [s.entered for s in culprits if s.entered >= 0]
        seq = min(min(known, default=newest) + 1, newest)
        call = next((call for s in standings if (call := s.call_of(seq)) is not None), None)
        op, size = (call.op, call.size_bytes) if call else ("all_reduce", 0)
        arrived = tuple(s.rank for s in standings if s.entered >= seq)
    return HangFinding(
        kind,
        tuple(sorted(s.rank for s in culprits)),
        why,
        seq,
        op,
        size,
        arrived,
        tuple(s.rank for s in standings if s.rank not in arrived),
        max((s.waiting_s for s in waiting), default=0.0),
        tuple(s.rank for s in waiting),
    )


def _with(finding: HangFinding, **changes: object) -> HangFinding:
    return replace(finding, **changes)  # type: ignore[arg-type]
