"""What the kernel says of the ranks of this host: `/proc/<pid>/stat`, `status` and `wchan`."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import NamedTuple

from ringside.monitor.hang_standing import Process

_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_LEAST_SPAN_S = 0.2


class Stat(NamedTuple):
    """A part of `/proc/<pid>/stat`.

    Args:
        state: One letter.
        cpu_s: CPU time of all threads, seconds.
        started: When it started, clock ticks since boot: together with the id it names a process for good.
        exit_code: Of a zombie, as `waitpid` gives it; 0 where it is not shown.
    """

    state: str
    cpu_s: float
    started: int
    exit_code: int


def read_stat(pid: int, root: str = "/proc") -> Stat | None:
    """Return what the kernel says of a process; None where there is none (or it cannot be read)."""
    try:
        text = Path(root, str(pid), "stat").read_text(errors="replace")
        fields = text.rpartition(")")[2].split()  # the name may hold anything
        return Stat(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS_PER_S, int(fields[19]), int(fields[49]))
    except (OSError, ValueError, IndexError):
        return None


def catches(pid: int, number: int, root: str = "/proc") -> bool:
    """Return whether a process has a handler for a signal and would not be ended by it."""
    try:
        lines = Path(root, str(pid), "status").read_text(errors="replace").splitlines()
        masks = dict(line.split(":", 1) for line in lines if line.startswith("Sig"))
        return bool(int(masks["SigCgt"], 16) >> (number - 1) & 1)
    except (OSError, ValueError, KeyError):
        return False


class Observer:
    """Looks at one process again and again.

    Args:
        pid: Its id.
        started: When it started (`Stat.started`): a later process of the same id is another one.
        root: Where the proc file system is.
    """

    def __init__(self, pid: int, started: int, root: str = "/proc") -> None:
        self._pid, self._started, self._root = pid, started, root
        self._gone_since: float | None = None
        self._signal = 0
        self._cpu: tuple[float, float] | None = None
        self._share = math.nan

    def look(self, now: float) -> Process:
        """Return what is known of the process.

        Args:
            now: Monotonic seconds.
        """
        stat = read_stat(self._pid, self._root)
        if stat is None or stat.started != self._started:
            return self._gone("gone", now)
        if stat.state in ("Z", "X"):
            self._signal = stat.exit_code & 0x7F or self._signal
            return self._gone(stat.state, now)
        self._measure(stat.cpu_s, now)
        return Process(state=stat.state, cpu_share=self._share, kernel_function=self._sleeps_in())

    def _gone(self, state: str, now: float) -> Process:
        if self._gone_since is None:
            self._gone_since = now
        return Process(state=state, gone_s=now - self._gone_since, signal=self._signal)

    def _measure(self, cpu_s: float, now: float) -> None:
        if self._cpu is None:
            self._cpu = (now, cpu_s)
        elif now - self._cpu[0] >= _LEAST_SPAN_S:
            self._share = max(cpu_s - self._cpu[1], 0.0) / (now - self._cpu[0])
            self._cpu = (now, cpu_s)

    def _sleeps_in(self) -> str:
        try:
            name = Path(self._root, str(self._pid), "wchan").read_text(errors="replace").strip("\0\n ")
        except OSError:
            return ""
        return "" if name == "0" else name
