"""Processes on this host: what the kernel tells of them, how they died, ending them without ever hitting a stranger.

Every process is held by a pidfd, so that a signal can never reach another process that was given the same number.
Linux only, like everything that starts ranks; elsewhere the readers of `/proc` find nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1
_libc: Any = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def die_with_parent(signum: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Have this process sent `signum` when the thread that started it ends, however it ends (SIGKILL included).

    Args:
        signum: The signal.
        parent: The parent's process number, where it is known: it may have died already.
    """
    _libc.prctl(PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signum)


@contextlib.contextmanager
def handle_signals(numbers: Iterable[int], handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """Within it, `handler` gets these signals; afterwards those have them who had them before."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


class Process:
    """A process of this host, held so that its number cannot come to mean another one.

    Args:
        pid: Its number.

    Raises:
        ProcessLookupError: There is no such process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._fd = os.pidfd_open(pid)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process has ended."""
        return self._fd

    def alive(self) -> bool:
        """Return whether it has not ended yet."""
        return self._fd >= 0 and not _ended([self], 0.0)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended, at most `timeout_s` seconds; return whether it has."""
        return self._fd < 0 or bool(_ended([self], timeout_s))

    def send(self, signum: int) -> None:
        """Send it a signal; nothing happens if it has ended."""
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._fd, signum)

    def close(self) -> None:
        """Close the descriptor; the process is left alone."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def hold(pid: int) -> Process | None:
    """Return the process with that number, if there is one."""
    try:
        return Process(pid)
    except OSError:
        return None


def has_ended(pidfd: int) -> bool:
    """Return whether the process of a pidfd has ended; False for -1, which stands for this process."""
    if pidfd < 0:
        return False
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


# -------------------------------------------------------------------------------------------------
# What the kernel tells of a process: `/proc/<pid>/stat`, `status`, `task` and `environ` (proc(5)).


class ProcessStat(NamedTuple):
    """A part of `/proc/<pid>/stat`.

    Args:
        state: One letter.
        cpu_s: CPU time of all threads, seconds.
        started: When it started, clock ticks since boot: together with the number it names a process for good.
        exit_code: Of a zombie, as `waitpid` gives it; 0 where it is not shown.
    """

    state: str
    cpu_s: float
    started: int
    exit_code: int

    @property
    def ended(self) -> bool:
        """Whether it has ended, though its parent may not have waited for it yet."""
        return self.state in ("Z", "X")

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.state in ("T", "t")


def read_stat(pid: int, root: str = "/proc") -> ProcessStat | None:
    """Return what the kernel reports of a process; None where there is none (or it cannot be read)."""
    try:
        text = Path(root, str(pid), "stat").read_text(errors="replace")
        fields = text.rpartition(")")[2].split()  # the name, in parentheses, may hold anything
        cpu_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        return ProcessStat(fields[0], cpu_s, int(fields[19]), int(fields[49]))
    except (OSError, ValueError, IndexError):
        return None


def start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 where there is none."""
    stat = read_stat(pid)
    return 0 if stat is None else stat.started


def is_running(pid: int, started: int) -> bool:
    """Return whether a process is there that has this number, started then, and has not ended."""
    stat = read_stat(pid)
    return stat is not None and stat.started == started and not stat.ended


def signal_mask(pid: int, name: str, root: str = "/proc") -> int | None:
    """Return a set of signals of a process, bit `number - 1` for each; None where it is not shown.

    Args:
        pid: The process.
        name: As in `/proc/<pid>/status`: SigCgt (it has a handler), SigIgn (ignored), SigBlk (blocked).
        root: Where the proc file system is.
    """
    try:
        lines = Path(root, str(pid), "status").read_text(errors="replace").splitlines()
        return int(dict(line.split(":", 1) for line in lines if line.startswith("Sig"))[name], 16)
    except (OSError, ValueError, KeyError):
        return None


def catches(pid: int, number: int, root: str = "/proc") -> bool:
    """Return whether a process has a handler for a signal and would not be ended by it."""
    caught = signal_mask(pid, "SigCgt", root)
    return caught is not None and bool(caught >> (number - 1) & 1)


def children(pid: int) -> list[int]:
    """Return the numbers of a process's children."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # it ends meanwhile
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found.extend(map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()))
    return found


def descendants(pid: int) -> list[int]:
    """Return the numbers of a process's children, their children, and so on."""
    found: list[int] = []
    todo = [pid]
    while todo:
        for child in children(todo.pop()):
            if child not in found:
                found.append(child)
                todo.append(child)
    return found


def rank_of(pid: int) -> int | None:
    """Return the rank that a launcher gave a process in its environment (RANK); None where it is no rank."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next((int(item[5:]) for item in variables if item.startswith(b"RANK=")), None)
    except (OSError, ValueError):
        return None


# -------------------------------------------------------------------------------------------------
# Where a process runs. Two that have the same are on one host, and in one container as far as it matters.


def boot_id() -> str:
    """Return what identifies the running kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def namespace_id(kind: str) -> int:
    """Return what identifies this process's namespace of a kind (`net`, `pid`, `cgroup`)."""
    return os.stat(f"/proc/self/ns/{kind}").st_ino


def machine_id() -> str:
    """Identify what ranks must have in common to share memory: the kernel, and its network namespace (for sockets).

    RINGSIDE_MACHINE overrides it: ranks with equal values must be able to share memory.
    """
    return os.environ.get("RINGSIDE_MACHINE") or f"{boot_id()}/{namespace_id('net')}"


def host_key() -> str:
    """Return what ranks have in common that see each other's processes: kernel, process namespace, user."""
    try:
        return f"{boot_id()}/{namespace_id('pid')}/{os.getuid()}"
    except OSError:
        return f"pid {os.getpid()}"


# -------------------------------------------------------------------------------------------------
# Ranks below a launcher.


@dataclass(frozen=True)
class Death:
    """How a rank ended.

    Args:
        rank: Who.
        pid: Its process.
        status: Its exit status; None where a signal ended it or it is not known.
        signum: The signal that ended it; 0 where none did or it is not known.
    """

    rank: int
    pid: int
    status: int | None
    signum: int

    @property
    def signal_name(self) -> str:
        """Name of the signal, such as SIGKILL."""
        return signal_name(self.signum)


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class RankWatch:
    """Watches ranks start and end below a launcher, and records in which order they end.

    Args:
        launcher: The launcher's process number; the ranks are its children.

    Attributes:
        deaths: Every rank that ended, first to last.
    """

    def __init__(self, launcher: int) -> None:
        self.deaths: list[Death] = []
        self._launcher = launcher
        self._ranks: dict[int, tuple[int, Process]] = {}

    def poll(self, timeout_s: float) -> None:
        """Find new ranks, then wait for at most `timeout_s` seconds until one of those known ends."""
        for pid in children(self._launcher):
            # Between fork and exec a child still has the launcher's environment: it is checked again next time.
            rank = None if pid in self._ranks else rank_of(pid)
            process = None if rank is None else hold(pid)
            if rank is not None and process is not None:
                self._ranks[pid] = (rank, process)
        if not self._ranks:
            time.sleep(timeout_s)
        for process in _ended([process for _, process in self._ranks.values()], timeout_s):
            status, signum = _exit_of(process.pid)
            rank, _ = self._ranks.pop(process.pid)
            self.deaths.append(Death(rank, process.pid, status, signum))
            process.close()

    def close(self) -> None:
        """Close the ranks that are left; they go on."""
        for _, process in self._ranks.values():
            process.close()
        self._ranks.clear()


def end_all(first: Process, signum: int, graces_s: Iterable[float], hurry: Callable[[], bool]) -> bool:
    """End a launcher and everything below it: signal the launcher, then terminate all, then kill all.

    Args:
        first: The launcher; it passes the first signal on to its ranks.
        signum: The first signal.
        graces_s: How long to wait after the first signal, after SIGTERM and after SIGKILL, seconds.
        hurry: Returns whether to go on to the next signal at once.

    Returns:
        Whether all of them have ended.
    """
    held = {first.pid: first}
    for number, grace in zip((signum, signal.SIGTERM, signal.SIGKILL), graces_s, strict=True):
        _hold_more(held)
        for process in [first] if number == signum and number != signal.SIGKILL else list(held.values()):
            process.send(number)
        for process in held.values():
            process.send(signal.SIGCONT)  # one that is stopped would not act on the others
        # Wait until all have ended, those among them that were forked meanwhile.
        deadline, alive = time.monotonic() + grace, list(held.values())
        while alive and time.monotonic() < deadline and not hurry():
            alive = [process for process in held.values() if process.alive()]
            if alive:
                _ended(alive, 0.05)
                _hold_more(held)
        if not alive:
            break
    gone = not any(process.alive() for process in held.values())
    for process in held.values():
        process.close()
    return gone


def _hold_more(held: dict[int, Process]) -> None:
    for pid in [below for above in list(held) if held[above].alive() for below in descendants(above)]:
        process = None if pid in held else hold(pid)
        if process is not None:
            held[pid] = process


def _ended(processes: list[Process], timeout_s: float) -> list[Process]:
    """Return those that have ended, after waiting at most `timeout_s` seconds for one."""
    poll = select.poll()
    by_fd = {process.fileno(): process for process in processes if process.fileno() >= 0}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(1e3 * timeout_s)]


def _exit_of(pid: int) -> tuple[int | None, int]:
    """Return (exit status, signal) of a process that ended and was not yet waited for by its parent."""
    stat = read_stat(pid)
    if stat is None:
        return None, 0
    code = stat.exit_code
    return (None, code & 0x7F) if code & 0x7F else (code >> 8, 0)
