"""Peers as processes of this host: who they are, whether they live, and making sure that one is dead.

Whoever is suspected is killed through its pidfd and waited for before anything goes on without it, so that "suspected"
and "dead" are the same on one host. Of a peer on another host nothing is known here; deadlines and the store decide.

Anybody who reaches the store can write any process number into it. So a process is killed only if it shows itself that
it is a worker of this job: by memory of its own that is named after the job and holds its number.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import signal
import weakref
from collections.abc import Callable
from pathlib import Path

import msgspec

from ringside.processes import hold, is_running, machine_id, namespace_id, read_stat, start_time
from ringside.survive.state.kept import START

BEATS_S = 2.0
"""A process on another host that gives no sign of life for so long is taken for dead."""
KILL_S = 5.0
"""How long a process that was sent SIGKILL may take to end (a page being read from a disk holds it up)."""


_MARK_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_log = logging.getLogger("ringside")


class PeerPlace(msgspec.Struct, frozen=True):
    """Where a worker runs, as it tells the others.

    Args:
        machine: What processes have in common that see each other's memory and numbers.
        pid: Its process number.
        started: When it started, in the kernel's ticks: tells it from a later process of the same number.
        life: Counts the seats that this process has had.
        step: The next step that the state is good for which it brings.
        keeper: The process that starts it again when it dies, and when that started; (0, 0): none does.
    """

    machine: str
    pid: int
    started: int
    life: int = 0
    step: int = 0
    keeper: tuple[int, int] = (0, 0)


def own_place(life: int = 0, step: int = 0) -> PeerPlace:
    """Return this process's."""
    keeper = os.getppid() if START in os.environ else 0
    held = (keeper, start_time(keeper)) if keeper else (0, 0)
    return PeerPlace(f"{machine_id()}/{namespace_id('pid')}", os.getpid(), start_time(os.getpid()), life, step, held)


def comes_again(place: PeerPlace, machine: str) -> bool:
    """Tell whether a process may live, or somebody who starts it again; elsewhere that is not known."""
    numbers = ((place.pid, place.started), place.keeper)
    return place.machine != machine or any(pid and is_running(pid, started) for pid, started in numbers)


class PeerMark:
    """Shows that this process is a worker of its job. A child may inherit the memory; its number is another one."""

    def __init__(self) -> None:
        fd = os.memfd_create(_mark_name(), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._close = weakref.finalize(self, os.close, fd)
        os.write(fd, str(os.getpid()).encode())
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _MARK_SEALS)

    def close(self) -> None:
        """Be no worker any more."""
        self._close()


def is_worker(pid: int) -> bool:
    """Tell whether a process of this host and user shows that it is a worker of this process's own job."""
    with contextlib.suppress(OSError):
        if os.stat(f"/proc/{pid}").st_uid == os.geteuid():
            name, own_number = f"/memfd:{_mark_name()} (deleted)", str(pid).encode()
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # a descriptor that was closed meanwhile
                    # The number tells the worker from its children, which may have inherited the memory.
                    if os.readlink(path) == name and path.read_bytes() == own_number:
                        return True
    return False


def _mark_name() -> str:
    """Return what the memory is called by all workers of a job, and by no other job of this host."""
    job = [os.environ.get(name, "") for name in ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
    return f"ringside-survive-worker-{hashlib.sha256(repr(job).encode()).hexdigest()[:32]}"


class Peer:
    """A worker, held so that its process number cannot come to mean another.

    Args:
        place: Where it says it runs.
        machine: This process's own machine.
        silent_s: Returns for how long a worker of another host has given no sign of life, seconds.

    Attributes:
        here: Whether it is on this host.
    """

    def __init__(self, place: PeerPlace, machine: str, silent_s: Callable[[], float] = float) -> None:
        self.place, self.here = place, place.machine == machine
        self._silent_s = silent_s
        process = hold(place.pid) if self.here else None
        if process is not None and start_time(place.pid) != place.started:
            process.close()  # the number belongs to a later process: the worker has ended
            process = None
        self._process = process

    @property
    def is_this_process(self) -> bool:
        """Whether it is the process that asks, under an earlier seat."""
        return self.here and self.place.pid == os.getpid()

    def ended(self) -> bool:
        """Tell whether it is known to have ended; elsewhere it is taken for dead when it gives no sign of life."""
        if not self.here:
            return self._silent_s() > BEATS_S
        return self._process is None or not self._process.alive()

    def stopped(self) -> bool:
        """Tell whether somebody stopped it (SIGSTOP), so that it does nothing though it lives."""
        stat = read_stat(self.place.pid) if self.here and not self.ended() else None
        return stat is not None and stat.stopped

    def put_to_death(self) -> bool:
        """Kill it and wait until it has ended; return whether it has. Elsewhere nothing is done.

        A process that is no worker of this job, or none any more, is left alone: it takes no part.
        """
        if self._process is None:
            return self.here
        if self._process.alive() and not is_worker(self.place.pid):
            _log.warning("process %d is said to be a rank, but shows no sign of it: it is left alone", self.place.pid)
            return True
        self._process.send(signal.SIGKILL)
        return self._process.wait(KILL_S)

    def close(self) -> None:
        """Close the handle; the process goes on."""
        if self._process is not None:
            self._process.close()
            self._process = None
