"""The hang watch: where every rank stands goes in, from time to time; verdicts come out, each once.

A pure state machine. It knows which hang is open, sees it end, and remembers pauses that ended by themselves: a rank
that writes a checkpoint for a minute while the others wait is told of once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ringside.monitor.hang.attribution import LIMIT_S, NORMAL_WAITS, HangFinding, judge
from ringside.monitor.hang.rank_state import RankState
from ringside.monitor.hang.verdict_text import resumed, verdict_of
from ringside.monitor.verdict import Verdict

__all__ = ["HangChange", "HangDetector"]

GAP_S = 2.0
"""Looks further apart than this: the watcher itself was stopped, and nobody can be blamed for the time between."""
_SELF_ENDING = ("busy", "asleep", "disk", "no_answer")


class HangChange(msgspec.Struct, frozen=True):
    """What a look led to.

    Args:
        kind: `verdict`, or `repaired` for a hang that is over.
        verdict: The verdict; of a hang that is over with how long it took.
    """

    kind: str
    verdict: Verdict


class HangDetector:
    """Tells each hang once.

    Args:
        pids: Process ids by rank, for the advice.
        limit_s: Least wait that is called a hang.

    Attributes:
        open: The verdict on the hang that is going on.
        over: Whether the job cannot go on any more; nothing is said after that.
    """

    def __init__(self, pids: Sequence[int] = (), limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self.open: Verdict | None = None
        self.over = False
        self._pids = pids
        self._finding: HangFinding | None = None
        self._culprits: dict[int, RankState] = {}
        self._began = 0.0
        self._looked: float | None = None
        self._watching_since = 0.0
        self._excused: dict[tuple[int, str], float] = {}

    def look(self, standings: Sequence[RankState], now: float, *, at_end: bool = False) -> HangChange | None:
        """Judge where every rank stands; return a change, if there is one.

        Args:
            standings: Where every rank stands now.
            now: Monotonic seconds.
            at_end: This is the last look.
        """
        if self.over:
            return None
        self.stay_awake(now)
        if self.open is not None:
            return self._close(standings, now)
        seen = [_since(standing, now - self._watching_since) for standing in standings]
        finding = judge(seen, at_end=at_end, least_s=self._limit_s)
        return None if finding is None or self._excuses(finding, seen) else self._announce(finding, seen, now)

    def stay_awake(self, now: float) -> None:
        """Note that the watcher runs, also while another rank's does the looking."""
        if self._looked is None or now - self._looked > GAP_S:
            self._watching_since = now
        self._looked = now

    def _announce(self, finding: HangFinding, standings: Sequence[RankState], now: float) -> HangChange:
        verdict = verdict_of(finding, standings, self._pids)
        self.over = finding.kind == "dead_rank" or finding.why == "told"
        self.open, self._finding, self._began = verdict, finding, now - finding.waited_s
        self._culprits = {s.rank: s for s in standings if s.rank in finding.ranks}
        return HangChange("verdict", verdict)

    def _close(self, standings: Sequence[RankState], now: float) -> HangChange | None:
        """End the open hang once nobody waits any more because everybody goes on (and nobody because it gave up)."""
        assert self.open is not None
        assert self._finding is not None
        if any(s.failure is not None or (s.process.gone and not s.left) for s in standings):
            self.over = True
            return None
        here = [s for s in standings if not s.left]
        if any(s.process.stopped or s.waiting_s > self._limit_s for s in here) or not self._moved(standings):
            return None
        lasted, verdict, finding = now - self._began, self.open, self._finding
        self.open = self._finding = None
        if finding.why in _SELF_ENDING:
            for rank, standing in self._culprits.items():
                self._excused[rank, standing.where] = lasted
        return HangChange("repaired", resumed(verdict, lasted))

    def _moved(self, standings: Sequence[RankState]) -> bool:
        assert self._finding is not None
        return any(s.entered > self._finding.seq or s.still_s < self._limit_s for s in standings if not s.left)

    def _excuses(self, finding: HangFinding, standings: Sequence[RankState]) -> bool:
        """Whether all culprits are where they were in a pause that ended by itself, and not much longer than then."""
        if finding.why not in _SELF_ENDING:
            return False
        places = {s.rank: s.where for s in standings}
        known = [self._excused.get((rank, places[rank]), 0.0) for rank in finding.ranks]
        return bool(known) and finding.waited_s <= NORMAL_WAITS * min(known)


def _since(standing: RankState, watched_s: float) -> RankState:
    """Return a standing whose ages go back no further than the watch itself."""
    if max(standing.waiting_s, standing.still_s, standing.silent_s) <= watched_s:
        return standing
    waiting = min(standing.waiting_s, max(watched_s, 1e-9)) if standing.waiting_s else 0.0
    return msgspec.structs.replace(
        standing,
        waiting_s=waiting,
        still_s=min(standing.still_s, watched_s),
        silent_s=min(standing.silent_s, watched_s),
    )
