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
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ringside.processes import hold, is_running, machine_id, namespace_id, read_stat, start_time
from ringside.survive.protocol.decision import MemberId
from ringside.survive.protocol.generation import Link
from ringside.survive.state.kept import START

BEATS_S = 2.0
"""A process on another host that gives no sign of life for so long is taken for dead."""
STOPPED_S = 1.0
"""A process that somebody stopped (SIGSTOP) is given up after so long."""
KILL_S = 5.0
"""How long a process that was sent SIGKILL may take to end (a page being read from a disk holds it up)."""


_MARK_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

_log = logging.getLogger(__name__)


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


def _is_worker(pid: int) -> bool:
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
        if self._process.alive() and not _is_worker(self.place.pid):
            _log.warning(
                "process %d is registered as a rank, but shows no sign of being one: it is not killed", self.place.pid
            )
            return True
        self._process.send(signal.SIGKILL)
        return self._process.wait(KILL_S)

    def close(self) -> None:
        """Close the handle; the process goes on."""
        if self._process is not None:
            self._process.close()
            self._process = None


_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3
_CHECK_S = 0.002
"""Between two checks of whether members live, seconds."""


# -------------------------------------------------------------------------------------------------
# Waiting for members, and noticing while it lasts that one of them is dead, stopped or silent.


class GaveUp(Exception):
    """An exchange cannot be finished.

    Args:
        suspects: Who is dead, does not answer or cannot be reached; nobody: it is not known.
        broken: The link that carries nothing though both of its ends live.
    """

    def __init__(self, *suspects: MemberId, broken: Link | None = None) -> None:
        super().__init__(", ".join(map(str, suspects)) or str(broken or "the exchange failed"))
        self.suspects = suspects
        self.broken: tuple[Link, ...] = () if broken is None else (broken,)


class Superseded(Exception):
    """The member is at something else now: what is under way leads nowhere."""


@dataclass
class PeerWait:
    """Waits for members of one generation.

    Args:
        peers: The other members.
        attend: Called several hundred times a second while something is waited for, with those who are dead or silent;
            it raises `Superseded` to end the wait.
        silent_s: A process that lives and takes no part is given up after so long, seconds: the longest that a rank may
            be later than another.
        clock: Seconds.
        pause: Does nothing for so many seconds.
    """

    peers: Mapping[MemberId, Peer]
    attend: Callable[[Sequence[MemberId]], object]
    silent_s: float = 60.0
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], object] = time.sleep
    _stopped_since: dict[MemberId, float] = field(default_factory=dict)
    _dead: list[MemberId] = field(default_factory=list)
    _checked: float = -1.0

    def wait(self, late: Callable[[], Sequence[MemberId]]) -> None:
        """Return when nobody is late any more.

        Args:
            late: Returns who is.

        Raises:
            Superseded: There is nothing to wait for any more.
        """
        began = attended = self.clock()
        pause_s = 0.0
        while True:
            missing = late()
            if not missing:
                return
            now = self.clock()
            if now - attended > _CHECK_S:
                attended = now
                patient = now - began <= self.silent_s
                silent = [] if patient else [seat for seat in missing if seat in self.peers]
                self.attend([*self.dead(), *silent])
            self.pause(pause_s)
            pause_s = min(max(_FIRST_PAUSE_S, 1.5 * pause_s), _LONGEST_PAUSE_S)

    def dead(self) -> list[MemberId]:
        """Return the members that are known to have ended, or were stopped for too long, as of a moment ago."""
        if self.clock() - self._checked > _CHECK_S:
            self._checked = self.clock()
            self._dead = [seat for seat in self.peers if self._is_dead(seat)]
        return self._dead

    def _is_dead(self, seat: MemberId) -> bool:
        peer, now = self.peers[seat], self.clock()
        if peer.ended():
            return True
        if not peer.stopped():
            self._stopped_since.pop(seat, None)
            return False
        return now - self._stopped_since.setdefault(seat, now) > STOPPED_S
