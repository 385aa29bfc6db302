"""The hang watch: where every rank stands goes in, from time to time; verdicts come out, each once.

A pure state machine. It knows which hang is open, sees it end, and remembers pauses that ended by themselves: a rank
that writes a checkpoint for a minute while the others wait is reported once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from ringside.monitor.hang.attribution import LIMIT_S, NORMAL_WAITS, HangFinding, RankState, find_cause
from ringside.monitor.verdict import Evidence, Verdict, VerdictEvent
from ringside.processes import signal_name
from ringside.text import name_ranks, percent

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
        awaited: Whom the others wait for, for longer than is normal, though it may be at work and no hang yet.
    """

    def __init__(self, pids: Sequence[int] = (), limit_s: float = LIMIT_S) -> None:
        self._limit_s = limit_s
        self.open: Verdict | None = None
        self.over = False
        self.awaited: HangFinding | None = None
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
        if self.open is not None and self._finding is not None:
            return self._check_open(self.open, self._finding, states, now)
        seen = [_limit_ages(state, now - self._watching_since) for state in states]
        finding = find_cause(seen, at_end=at_end, least_s=self._limit_s)
        self.awaited = None
        if finding is None:
            awaited = find_cause(seen, least_s=self._limit_s, is_patient=False)
            self.awaited = awaited if awaited is not None and awaited.why in _SELF_ENDING else None
            return None
        culprits = {s.rank: s for s in seen if s.rank in finding.ranks}
        if finding.why in _SELF_ENDING and culprits:
            # All culprits are where they were in a pause that ended by itself, and for not much longer than then.
            earlier = min(self._excused.get((rank, state.where), 0.0) for rank, state in culprits.items())
            if finding.waited_s <= NORMAL_WAITS * earlier:
                return None
        verdict = verdict_of(finding, seen, self._pids)
        self.over = finding.kind == "dead_rank" or finding.why == "told"
        self.open, self._finding, self._began = verdict, finding, now - finding.waited_s
        self._culprits = culprits
        return VerdictEvent(verdict, ended=False)

    def stay_awake(self, now: float) -> None:
        """Note that the watcher runs, also while another rank's does the checking."""
        if self._checked is None or now - self._checked > GAP_S:
            self._watching_since = now
        self._checked = now

    def _check_open(
        self, verdict: Verdict, finding: HangFinding, states: Sequence[RankState], now: float
    ) -> VerdictEvent | None:
        """End the open hang once no rank waits any more because all go on (and none because it has failed)."""
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
        waiting = str(verdict.evidence.get("arrived", "")).count(",") + 1
        resumed = msgspec.structs.replace(
            verdict,
            cause=f"{verdict.cause}; it went on after {lasted:.1f} s",
            evidence={**verdict.evidence, "resumed_after_seconds": round(lasted, 3)},
            cost_rank_seconds=max(verdict.cost_rank_seconds, lasted * waiting),
        )
        return VerdictEvent(resumed, ended=True)


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


# -------------------------------------------------------------------------------------------------
# A finding of the hang watch as a verdict: its cause, evidence and advice in plain words.

STACKS = "stacks"
"""Folder of a run directory that holds the ranks' Python stacks."""

_ADVICE = {
    "stopped": "Send it SIGCONT (kill -CONT {pid}), and find out who stopped it: a debugger, a shell's job control, a "
    "freezer of the container's.",
    "dead": "Restart from the last checkpoint. A SIGKILL of unknown origin is mostly the kernel's, out of memory: look "
    "at dmesg and at the memory limit of the container (memory.events).",
    "left": "Give every rank the same number of steps (DistributedSampler with drop_last, or DDP's join()).",
    "no_answer": "Its Python does not run: some C code holds the GIL. Its stack shows which call that is.",
    "unheard": "Look whether that host and its network are up.",
    "disk": "It waits for a disk or a network file system: look at dmesg and at the mounts of its host.",
    "busy": "Look at its stack: it works in a loop that others are not in, or at something that only this rank does.",
    "asleep": "Look at its stack for what it waits for: a lock, a queue, a child process, a branch that only this rank "
    "took.",
    "different": "All ranks must call the same collectives in the same order: compare the stacks for the branch that "
    "only some ranks took.",
    "sizes": "All ranks must build the same model: compare parameters and their order between the ranks.",
    "told": "All ranks must call the same collectives in the same order: compare what they called.",
    "crossed": "Ranks call collectives of several groups in another order, or a network is down: compare their stacks.",
    "inside": "All ranks arrived, so it is no rank's code: look at the network between the hosts and at the devices.",
}


def verdict_of(finding: HangFinding, states: Sequence[RankState], pids: Sequence[int] = ()) -> Verdict:
    """Return the verdict on a finding.

    Args:
        finding: What `find_cause` found.
        states: Where every rank stood.
        pids: Process ids by rank, where they are known.
    """
    ranks = {state.rank: state for state in states}
    culprit = ranks.get(finding.ranks[0]) if finding.ranks else None
    step = max((state.step for state in states), default=0)
    pid = pids[culprit.rank] if culprit is not None and culprit.rank < len(pids) else 0
    why = "late" if finding.why == "told" and finding.kind == "hang" else finding.why
    advice = _ADVICE.get(why, "Look at what it does, or raise RINGSIDE_TIMEOUT_S.")
    return Verdict(
        kind=finding.kind,
        ranks=list(finding.ranks),
        since_step=step,
        detected_step=step,
        excess_ratio=0.0,
        cause=_cause(finding, culprit),
        evidence=_evidence(finding, culprit, pid),
        cost_rank_seconds=sum(ranks[rank].waiting_s for rank in finding.waiting),
        advice=advice.replace("{pid}", str(pid or "PID")),
    )


def _cause(finding: HangFinding, culprit: RankState | None) -> str:
    if finding.text:
        return finding.text
    size = f" ({finding.size_bytes} bytes)" if finding.size_bytes else ""
    collective = f"{finding.op} number {finding.seq}{size}"
    if finding.why == "crossed":
        return f"all ranks wait for each other in several process groups for {finding.waited_s:.1f} s, and none goes on"
    if culprit is None:
        return f"all ranks are in {collective} for {finding.waited_s:.1f} s and it does not end"
    waiting = [rank for rank in finding.waiting if rank not in finding.ranks]
    others = f"{name_ranks(waiting)} wait{'s' if len(waiting) == 1 else ''}" if waiting else "the others need it"
    if finding.why == "different":
        call = culprit.call or f"all_reduce number {culprit.entered}"
        place = f" ({culprit.where})" if culprit.where else ""
        return f"{name_ranks(finding.ranks)} called {call}{place}, while {others} in {collective}"
    if finding.why == "sizes":
        own_call = culprit.call_of(finding.seq)
        given = f"{own_call.size_bytes} bytes" if own_call else "another size"
        return f"it gave {given} to {collective} of the others"
    since = f" since {finding.waited_s:.1f} s" if finding.waited_s else ""
    return f"{_occupation(finding, culprit)}; {others}{' for it' if waiting else ''} in {collective}{since}"


def _occupation(finding: HangFinding, culprit: RankState) -> str:
    """Return what the culprit does instead, in a sentence."""
    place = f", last seen in {culprit.where}" if culprit.where else ""
    process = culprit.process
    share = f" ({percent(process.cpu_share)} of a core)" if math.isfinite(process.cpu_share) else ""
    kernel = f" ({process.kernel_function})" if process.kernel_function else ""
    by_signal = f" by {signal_name(process.signal)}" if process.signal else ""
    sentences = {
        "stopped": f"its process is stopped (state {process.state}){place}",
        "dead": f"its process ended{by_signal}{place}",
        "left": f"it has ended its training after collective {culprit.entered}",
        "no_answer": f"no Python thread of it runs (state {process.state}{share}){place}",
        "unheard": f"it has not reported for {culprit.silent_s:.1f} s{place}",
        "disk": f"it waits for a disk or a file system in the kernel{kernel}{place}",
        "busy": f"it is busy with something else{share}{place}",
        "asleep": f"it sleeps elsewhere{kernel}{place}",
    }
    return sentences.get(finding.why, finding.why)


def _evidence(finding: HangFinding, culprit: RankState | None, pid: int) -> Evidence:
    evidence: Evidence = {
        "why": finding.why,
        "collective": finding.seq,
        "op": finding.op,
        "size_bytes": finding.size_bytes,
        "arrived": ", ".join(map(str, finding.arrived)),
        "missing": ", ".join(map(str, finding.missing)),
        "waited_seconds": round(finding.waited_s, 3),
        "stacks": STACKS,
    }
    if culprit is None:
        return evidence
    process = culprit.process
    # What is empty or 0 was not seen, and is left out.
    known: Evidence = {
        "pid": pid,
        "process_state": process.state,
        "signal": signal_name(process.signal) if process.signal else "",
        "kernel_function": process.kernel_function,
        "where": culprit.where,
        "called": culprit.call,
        "silent_seconds": round(culprit.silent_s, 3) if finding.why in ("no_answer", "unheard") else 0,
    }
    if math.isfinite(process.cpu_share):
        known["cpu_share"] = round(process.cpu_share, 3)
    return {**evidence, **{key: value for key, value in known.items() if value != "" and value != 0}}
