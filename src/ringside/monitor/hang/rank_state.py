"""Where one rank stands: what is known of it, as plain values that any rank can judge."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from ringside.processes import read_stat

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
# A rank of this host as a process.

_LEAST_SPAN_S = 0.2


class Observer:
    """Reads the state of one process again and again.

    Args:
        pid: Its id.
        started: When it started (`ProcessStat.started`): a later process of the same id is another one.
        root: Where the proc file system is.
    """

    def __init__(self, pid: int, started: int, root: str = "/proc") -> None:
        self._pid, self._started, self._root = pid, started, root
        self._gone_since: float | None = None
        self._signal = 0
        self._cpu: tuple[float, float] | None = None
        self._share = math.nan

    def read(self, now: float) -> ProcessState:
        """Return what is known of the process.

        Args:
            now: Monotonic seconds.
        """
        stat = read_stat(self._pid, self._root)
        if stat is None or stat.started != self._started:
            return self._gone("gone", now)
        if stat.ended:
            self._signal = stat.exit_code & 0x7F or self._signal  # the low bits of a wait status
            return self._gone(stat.state, now)
        # The kernel counts in ticks: a share over less than a few of them means nothing.
        if self._cpu is None:
            self._cpu = (now, stat.cpu_s)
        elif now - self._cpu[0] >= _LEAST_SPAN_S:
            self._share = max(stat.cpu_s - self._cpu[1], 0.0) / (now - self._cpu[0])
            self._cpu = (now, stat.cpu_s)
        try:
            function = Path(self._root, str(self._pid), "wchan").read_text(errors="replace").strip("\0\n ")
        except OSError:
            function = ""
        function = "" if function == "0" else function  # it runs, or this kernel does not show it
        return ProcessState(state=stat.state, cpu_share=self._share, kernel_function=function)

    def _gone(self, state: str, now: float) -> ProcessState:
        if self._gone_since is None:
            self._gone_since = now
        return ProcessState(state=state, gone_s=now - self._gone_since, signal=self._signal)
