"""The hang watch: where every rank stands goes in, from time to time; verdicts come out, each once.

A pure state machine. It knows which hang is open, sees it end, and remembers pauses that ended by themselves: a rank
that writes a checkpoint for a minute while the others wait is reported once.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ringside.monitor.hang.attribution import LIMIT_S, NORMAL_WAITS, HangFinding, find_cause
from ringside.monitor.hang.rank_state import RankState
from ringside.monitor.hang.verdict_text import resumed_verdict, verdict_of
from ringside.monitor.verdict import Verdict, VerdictEvent

__all__ = ["HangDetector"]

GAP_S = 2.0
"""Checks further apart than this: the watcher itself was stopped, and no rank can be blamed for the time between."""
_SELF_ENDING = ("busy", "asleep", "disk", "no_answer")


class HangDetector:
    """Reports each hang once.

    Args:
        pids: Process ids by rank, for the advice.
        limit_s: Least wait that is called a hang.

    Attributes:
        open: The verdict on the hang that is going on.
        over: Whether the job cannot go on any more; nothing is reported after that.
    """

    def __init__(self, pids: Sequence[int] = (), limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self.open: Verdict | None = None
        self.over = False
        self._pids = pids
        self._finding: HangFinding | None = None
        self._culprits: dict[int, RankState] = {}
        self._began = 0.0
        self._checked: float | None = None
        self._watching_since = 0.0
        # By rank and line of the script: how long a pause there took that ended by itself.
        self._excused: dict[tuple[int, str], float] = {}

    def check(self, states: Sequence[RankState], now: float, *, at_end: bool = False) -> VerdictEvent | None:
        """Judge where every rank stands; return what began or ended, if anything did.

        Args:
            states: Where every rank stands now.
            now: Monotonic seconds.
            at_end: This is the last check.
        """
        if self.over:
            return None
        self.stay_awake(now)
        if self.open is not None:
            return self._check_open(states, now)
        seen = [_limit_ages(state, now - self._watching_since) for state in states]
        finding = find_cause(seen, at_end=at_end, least_s=self._limit_s)
        if finding is None:
            return None
        if finding.why in _SELF_ENDING and finding.ranks:
            # All culprits are where they were in a pause that ended by itself, and for not much longer than then.
            places = {s.rank: s.where for s in seen}
            earlier = min(self._excused.get((rank, places[rank]), 0.0) for rank in finding.ranks)
            if finding.waited_s <= NORMAL_WAITS * earlier:
                return None
        verdict = verdict_of(finding, seen, self._pids)
        self.over = finding.kind == "dead_rank" or finding.why == "told"
        self.open, self._finding, self._began = verdict, finding, now - finding.waited_s
        self._culprits = {s.rank: s for s in seen if s.rank in finding.ranks}
        return VerdictEvent(verdict, ended=False)

    def stay_awake(self, now: float) -> None:
        """Note that the watcher runs, also while another rank's does the checking."""
        if self._checked is None or now - self._checked > GAP_S:
            self._watching_since = now
        self._checked = now

    def _check_open(self, states: Sequence[RankState], now: float) -> VerdictEvent | None:
        """End the open hang once no rank waits any more because all go on (and none because it has failed)."""
        assert self.open is not None
        assert self._finding is not None
        verdict, finding = self.open, self._finding
        if any(s.failure is not None or (s.process.gone and not s.left) for s in states):
            self.over = True
            return None
        active = [s for s in states if not s.left]
        if any(s.process.stopped or s.waiting_s > self._limit_s for s in active):
            return None
        if not any(s.entered > finding.seq or s.still_s < self._limit_s for s in active):
            return None
        lasted = now - self._began
        self.open = self._finding = None
        if finding.why in _SELF_ENDING:
            for rank, state in self._culprits.items():
                self._excused[rank, state.where] = lasted
        return VerdictEvent(resumed_verdict(verdict, lasted), ended=True)


def _limit_ages(state: RankState, watched_s: float) -> RankState:
    """Return a state whose ages go back no further than the watch itself."""
    if max(state.waiting_s, state.still_s, state.silent_s) <= watched_s:
        return state
    return msgspec.structs.replace(
        state,
        waiting_s=min(state.waiting_s, max(watched_s, 1e-9)) if state.waiting_s else 0.0,  # 0: it does not wait
        still_s=min(state.still_s, watched_s),
        silent_s=min(state.silent_s, watched_s),
    )
