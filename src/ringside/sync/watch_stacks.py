"""Python stacks of the ranks of a host: a rank writes its own, and of one whose Python does not run a signal gets them.

`faulthandler` answers the signal without the GIL, from inside the signal handler; a stopped process cannot answer it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal

from ringside.monitor.hang.rank_state import catches, read_stat

MOST_BYTES = 65536


class Stacks:
    """Where this process's stacks are written to when somebody asks.

    Attributes:
        fd: An anonymous file that other processes of this host can read.
        signal: The signal that makes this process write its stacks; 0: all are taken.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("ringside-stacks")
        self.signal = _free_signal()
        if self.signal:
            faulthandler.register(self.signal, file=self.fd, all_threads=True)

    def dump(self) -> None:
        """Write this process's stacks, after those that a signal may have made it write."""
        faulthandler.dump_traceback(file=self.fd, all_threads=True)

    def clear(self) -> None:
        """Forget what was written: that hang is over."""
        if os.fstat(self.fd).st_size:
            os.ftruncate(self.fd, 0)
            os.lseek(self.fd, 0, os.SEEK_SET)

    def close(self) -> None:
        """Give the signal back."""
        if self.fd < 0:
            return
        if self.signal:
            faulthandler.unregister(self.signal)
        os.close(self.fd)
        self.fd = -1


def ask(pid: int, started: int, number: int) -> None:
    """Make another process write its stacks; nothing happens if it is not the one meant or would not survive it.

    Args:
        pid: Its id.
        started: When it started (`read_stat`).
        number: The signal it told.
    """
    with contextlib.suppress(OSError, AttributeError):
        pidfd = os.pidfd_open(pid)
        try:
            stat = read_stat(pid)
            if number and stat is not None and stat.started == started and catches(pid, number):
                signal.pidfd_send_signal(pidfd, number)
        finally:
            os.close(pidfd)


def written(pid: int, fd: int) -> str:
    """Return what a process of this host has written of its stacks; empty where it has not or is not ours to read."""
    try:
        with open(f"/proc/{pid}/fd/{fd}", "rb") as file:
            return file.read(MOST_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _free_signal() -> int:
    """Return the highest real-time signal that this process neither handles, ignores nor blocks; 0 if there is none."""
    try:
        with open("/proc/self/status") as file:
            masks = dict(line.split(":", 1) for line in file if line.startswith(("Sig", "Shd")))
        taken = int(masks["SigCgt"], 16) | int(masks["SigIgn"], 16) | int(masks["SigBlk"], 16)
        first, last = int(signal.SIGRTMIN), int(signal.SIGRTMAX)
    except (OSError, KeyError, ValueError, AttributeError):
        return 0
    return next((number for number in range(last, first - 1, -1) if not taken >> (number - 1) & 1), 0)
