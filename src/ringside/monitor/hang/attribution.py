"""Where a rank stands, as plain values that travel between ranks; and who keeps a standing job from going on.

The latter is a pure function of where every rank stands.

A rank that is waited for and waits for none is the first cause; all others that wait are victims. A rank *waits* while
it is blocked in a collective, and is *behind* if it has not entered one in which others wait.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

# -------------------------------------------------------------------------------------------------
# Where one rank stands: what is known of it, as plain values that any rank can judge.

GONE = ("Z", "X", "gone")
"""States of a process that has ended: a zombie, dying, no longer there."""
STOPPED = ("T", "t")
"""States of a process that a signal or a debugger has stopped."""


class WaitingCall(msgspec.Struct, frozen=True, array_like=True):
    """One collective that a rank has entered.

    Args:
        seq: Its number among this rank's gradient collectives, from 1.
        op: What was called, such as `all_reduce`.
        size_bytes: Size of its tensor.
    """

    seq: int
    op: str
    size_bytes: int


class ProcessState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the kernel reports of a rank's process; empty where its host cannot be seen from here.

    Args:
        state: The letter of `/proc/<pid>/stat`, or `gone`.
        gone_s: For how long it has been seen to be gone, seconds.
        signal: The number of the signal that ended it; 0: none, or not known.
        cpu_share: CPU seconds per second lately (all threads); NaN where not known.
        kernel_function: Where in the kernel its main thread sleeps (`/proc/<pid>/wchan`), where that is shown.
    """

    state: str = ""
    gone_s: float = 0.0
    signal: int = 0
    cpu_share: float = float("nan")
    kernel_function: str = ""

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        return self.state in GONE

    @property
    def stopped(self) -> bool:
        """Whether the process has been stopped and does nothing at all."""
        return self.state in STOPPED


class Failure(msgspec.Struct, frozen=True):
    """The error that a gradient collective raised on a rank.

    Args:
        kind: `mismatch`, `late`, `lost` or `other`.
        ranks: Whom it names.
        text: Its message.
    """

    kind: str
    ranks: list[int]
    text: str


class RankState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One rank as it was last seen. All ages are in seconds and need no common clock.

    Args:
        rank: Global rank.
        step: Training step under way.
        entered: Gradient collectives that it has handed over so far; -1: nothing was ever heard of it.
        synced: Backward passes whose gradients it has waited for.
        waiting_s: For how long it has been blocked in a collective; 0: it is not.
        still_s: For how long it has entered and left no collective.
        longest_s: Its longest normal wait so far.
        calls: The newest gradient collectives that it entered, oldest first.
        group_seq: Collectives of the process group that it has begun, of any kind.
        call: The collective of the script's own that its training thread stands in; empty: none.
        call_bytes: Size of that one's tensor; 0 where not known.
        group: Name of the process group that the call is one of, where groups are watched; empty: not known.
        group_number: Which of its collectives in that group it stands in; 0: a message.
        group_ranks: Whom it needs for that; empty: every rank.
        group_counts: How many collectives it has issued in each group; empty: not known.
        where: The innermost line of the script in which its training thread was last seen.
        silent_s: For how long nothing has come from its own watcher.
        left: Whether its session has ended in good order.
        process: What the kernel reports of it.
        failure: What its last gradient collective raised.
    """

    rank: int
    step: int = 0
    entered: int = 0
    synced: int = 0
    waiting_s: float = 0.0
    still_s: float = 0.0
    longest_s: float = 0.0
    calls: list[WaitingCall] = []
    group_seq: int = 0
    call: str = ""
    call_bytes: int = 0
    group: str = ""
    group_number: int = 0
    group_ranks: list[int] = []
    group_counts: dict[str, int] = {}
    where: str = ""
    silent_s: float = 0.0
    left: bool = False
    process: ProcessState = ProcessState()
    failure: Failure | None = None

    def needs(self, other: RankState) -> bool:
        """Return whether this rank waits in a watched group for what another has not issued yet."""
        if not self.group or other.rank == self.rank or (self.group_ranks and other.rank not in self.group_ranks):
            return False
        if not self.group_number:
            return True
        return bool(other.group_counts) and other.group_counts.get(self.group, 0) < self.group_number

    def call_of(self, seq: int) -> WaitingCall | None:
        """Return the gradient collective of this number, if it is among the newest."""
        return next((call for call in self.calls if call.seq == seq), None)


# -------------------------------------------------------------------------------------------------
# Who keeps the job from going on.

LIMIT_S = 4.0
"""Least wait that is called a hang: with the time to check and to report, a rank is named within 5 s."""
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
"""A watcher reports four times a second: one that is silent for so long does not run."""
BUSY_SHARE = 0.25
"""Of a core: one that sleeps uses none, and on a busy machine a loop gets less than a whole one."""

_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class HangFinding:
    """What keeps the job from going on.

    Args:
        kind: `hang`, `mismatch` or `dead_rank`.
        ranks: The first causes, ascending; empty: none of the ranks.
        why: `stopped`, `dead`, `left`, `no_answer`, `unheard`, `disk`, `busy`, `asleep`, `different`, `sizes`, `told`,
            `crossed` or `inside`.
        seq: Number of the collective.
        op: What it is.
        size_bytes: Its size; 0 where not known.
        arrived: Who entered it.
        missing: Who did not.
        waited_s: How long the longest waiting rank has waited.
        waiting: Who waits.
        text: The message of an error.
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


def find_cause(
    states: Sequence[RankState], *, at_end: bool = False, least_s: float = LIMIT_S, is_patient: bool = True
) -> HangFinding | None:
    """Return what keeps the job from going on; None while nothing does.

    Args:
        states: Where every rank stands.
        at_end: There will be no later check: a rank that is gone is called dead at once.
        least_s: Least wait that is called a hang.
        is_patient: Give a rank that may be at work (compiling, writing a checkpoint) the time that such work takes.
    """
    # A rank that died: the others' waits are its consequence.
    confirm_s = 0.0 if at_end else CONFIRM_S
    gone = [s for s in states if s.process.gone and not s.left]
    dead = [s for s in gone if s.process.gone_s >= confirm_s and s.process.signal not in _ASKED]
    if dead:
        return _missing("dead_rank", "dead", dead, states)
    # What the engine has found out itself: ranks that called different things, or did not come in time.
    for state in states:
        failure = state.failure
        if failure is None or failure.kind not in ("mismatch", "late"):
            continue
        named = [s for s in states if s.rank in failure.ranks]
        finding = _missing("mismatch" if failure.kind == "mismatch" else "hang", "told", named, states)
        seq = state.entered if failure.kind == "mismatch" else finding.seq
        return replace(finding, seq=seq, text=failure.text, ranks=tuple(failure.ranks))
    # The ranks that the others wait for, once they have waited for longer than is normal.
    present = [s for s in states if not s.left and not s.process.gone]
    waiting = [s for s in present if s.waiting_s > 0 and not s.process.stopped]
    waited = max((s.waiting_s for s in waiting), default=0.0)
    limit = max(least_s, NORMAL_WAITS * max((s.longest_s for s in states), default=0.0))
    # Of a rank on a host that cannot be seen from here, nothing is known but what its watcher sends.
    unheard = [s for s in present if not s.process.state and s.silent_s > limit]
    if waited <= limit or min(s.still_s for s in present if s not in unheard) <= limit:
        return None
    stopped = [s for s in present if s.process.stopped]
    if stopped:
        return _missing("hang", "stopped", stopped, states)
    # Ranks at work that have not entered a collective in which another waits, and of these the furthest behind.
    able = [s for s in states if s not in waiting and s not in unheard and (s.left or not s.process.gone)]
    late = [s for s in able if any(_is_behind(s, other) for other in waiting)]
    if late:
        first = min(s.entered for s in late)
        culprits = [s for s in late if s.entered == first]
        patience = 0.0
        if all(other.call for other in waiting):
            patience = OWN_CALL_S
        # Where groups are watched, backward passes are not counted, and steps are.
        if min(s.step if s.group_counts else s.synced for s in (*waiting, *culprits)) < WARM_UP_PASSES:
            patience = WARM_UP_S
        if is_patient and waited <= patience and not any(s.left for s in culprits):
            return None
        return _missing("hang", _occupation(culprits[0]), culprits, states)
    if unheard:
        if min(s.synced for s in waiting) < WARM_UP_PASSES and waited <= WARM_UP_S:
            return None
        return _missing("hang", "unheard", unheard, states)
    # All wait, in several groups: which calls belong together is not known, so nobody called another one than others.
    if len({s.group for s in waiting if s.group}) > 1:
        return _missing("hang", "crossed", [], states)
    return _find_mismatch(waiting, states) or _missing("hang", "inside", [], states)


def _is_behind(state: RankState, waiting: RankState) -> bool:
    """Return whether a rank has not entered what another waits in."""
    if waiting.group:
        return waiting.needs(state)
    return state.group_seq < waiting.group_seq if waiting.call else state.entered < waiting.entered


def _occupation(state: RankState) -> str:
    """Return what a rank does that others wait for, as `HangFinding.why` calls it."""
    if state.left:
        return "left"
    if state.process.state == "D":
        return "disk"
    if state.process.state and state.silent_s > NO_ANSWER_S:
        return "no_answer"
    runs = state.process.state == "R" or state.process.cpu_share >= BUSY_SHARE
    return "busy" if runs else "asleep"


def _find_mismatch(waiting: Sequence[RankState], states: Sequence[RankState]) -> HangFinding | None:
    """All wait: find out whether for different things. The minority is named; of a tie, the rank that is behind."""
    for seq in sorted({call.seq for s in waiting for call in s.calls}):
        sizes = {s.rank: call.size_bytes for s in waiting if (call := s.call_of(seq)) is not None}
        if len(set(sizes.values())) > 1:
            odd = _odd_ones(sizes, {rank: -rank for rank in sizes})
            finding = _missing("mismatch", "sizes", [s for s in states if s.rank in odd], states)
            common = next(size for rank, size in sizes.items() if rank not in odd)
            return replace(finding, seq=seq, arrived=tuple(sorted(sizes)), missing=(), size_bytes=common)
    places = {s.rank: s.call or f"gradient {s.entered}" for s in waiting}
    if len(set(places.values())) > 1:
        odd = _odd_ones(places, {s.rank: s.entered for s in waiting})
        return _missing("mismatch", "different", [s for s in states if s.rank in odd], states)
    return None


def _odd_ones(values: Mapping[int, object], order: Mapping[int, int]) -> set[int]:
    """Return the ranks whose value is not the most frequent one; of a tie, those that come first in the order."""
    counts = Counter(values.values())
    first = {value: min(order[rank] for rank in values if values[rank] == value) for value in counts}
    common = max(counts, key=lambda value: (counts[value], first[value]))
    return {rank for rank, value in values.items() if value != common}


def _missing(kind: str, why: str, culprits: Sequence[RankState], states: Sequence[RankState]) -> HangFinding:
    """Describe the collective that the culprits did not enter."""
    waiting = [s for s in states if s.waiting_s > 0 and s not in culprits]
    # Either all wait in collectives of the script's own, or gradients: then it is the first that a culprit lacks.
    own = [s for s in waiting if s.call]
    if own and len(own) == len(waiting):
        furthest = max(own, key=lambda s: s.group_seq)
        seq, op, size = furthest.group_seq, furthest.call, furthest.call_bytes
        arrived = tuple(s.rank for s in states if s.group_seq >= seq and s not in culprits)
    else:
        newest = max((s.entered for s in states), default=0)
        known = [s.entered for s in culprits if s.entered >= 0]
        seq = min(min(known, default=newest) + 1, newest)
        call = next((call for s in states if (call := s.call_of(seq)) is not None), None)
        op, size = (call.op, call.size_bytes) if call else ("all_reduce", 0)
        arrived = tuple(s.rank for s in states if s.entered >= seq)
    return HangFinding(
        kind,
        tuple(sorted(s.rank for s in culprits)),
        why,
        seq,
        op,
        size,
        arrived,
        tuple(s.rank for s in states if s.rank not in arrived),
        max((s.waiting_s for s in waiting), default=0.0),
        tuple(s.rank for s in waiting),
    )
