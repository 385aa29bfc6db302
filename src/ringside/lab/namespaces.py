"""Network namespaces: acting inside one, who runs in one, and removing those that nobody owns any more."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import TypeVar

from ringside.errors import RingsideError
from ringside.processes import hold, is_running, start_time

# -------------------------------------------------------------------------------------------------
# What a lab's network namespaces are called: the name holds their owner's process, so that any can check whether it
# lives.
#
# `ringside-<owner's pid>-<owner's start time>-<count>-<node>`: a process number comes to mean another process one day,
# a number together with a start time does not.

DIRECTORY = Path("/run/netns")
"""Where `ip netns` keeps names."""

_count = itertools.count()
_PATTERN = re.compile(r"ringside-(\d+)-(\d+)-(\d+)-(h\d+|switch)")


@dataclass(frozen=True)
class LabName:
    """The name of a lab.

    Args:
        pid: Process number of its owner.
        start: When the owner started, clock ticks since boot.
        count: How many labs the owner made before.
    """

    pid: int
    start: int
    count: int

    def __str__(self) -> str:
        return f"ringside-{self.pid}-{self.start}-{self.count}"

    @classmethod
    def new(cls) -> LabName:
        """Return a name that no other lab has, owned by this process."""
        return cls(os.getpid(), start_time(os.getpid()), next(_count))

    @classmethod
    def of_namespace(cls, namespace: str) -> LabName | None:
        """Return the lab that a namespace belongs to; None if it belongs to none."""
        match = _PATTERN.fullmatch(namespace)
        return None if match is None else cls(int(match[1]), int(match[2]), int(match[3]))

    def namespace(self, node: str) -> str:
        """Return the name of a node's namespace (`h0`, `h1`, ..., `switch`)."""
        return f"{self}-{node}"

    def owner_lives(self) -> bool:
        """Return whether the process that made the lab still lives."""
        return is_running(self.pid, self.start)


def namespaces_there() -> list[str]:
    """Return the names of all namespaces that belong to a lab, of whomever."""
    try:
        return sorted(name for name in os.listdir(DIRECTORY) if _PATTERN.fullmatch(name))
    except OSError:
        return []


_CLONE_NEWNET = 0x40000000
_MNT_DETACH = 2
_KILL_S = 5.0
_libc = ctypes.CDLL(None, use_errno=True)
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def enter(namespace: str) -> None:
    """Move the calling thread into a network namespace; what it opens and starts from now on belongs there.

    Raises:
        OSError: There is no such namespace, or no privilege.
    """
    fd = os.open(DIRECTORY / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        check(_libc.setns(fd, _CLONE_NEWNET), namespace)
    finally:
        os.close(fd)


def check(result: int, name: str | None = None) -> int:
    """Return what a function of libc returned; raise its `OSError`, on what is called `name`, if that is below 0."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)
    return result


def inside(namespace: str, function: Callable[[], _T]) -> _T:
    """Return what `function` returns when it is called inside a network namespace, on a thread of its own.

    Sockets that it opens stay in that namespace wherever they are used later.

    Raises:
        OSError: There is no such namespace, or no privilege; and whatever the function raises.
    """

    def call() -> _T:
        enter(namespace)
        return function()

    with ThreadPoolExecutor(1, thread_name_prefix="ringside-lab-inside") as thread:
        return thread.submit(call).result()


def remove(lab: LabName) -> None:
    """Remove a lab: the processes in its namespaces, and these with all their links. Nothing happens if it is gone."""
    names = [name for name in namespaces_there() if LabName.of_namespace(name) == lab]
    inodes = {inode for name in names if (inode := _inode(DIRECTORY / name)) is not None}
    gone = _kill_all_in(inodes)
    for path in (DIRECTORY / name for name in names):
        # As `ip netns delete` does it; somebody else may do it at the same time.
        _libc.umount2(os.fsencode(path), _MNT_DETACH)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise RingsideError(
                f"cannot remove the namespace {path.name}: {error.strerror}; try ip netns delete"
            ) from None
    # A process that was about to enter a namespace that still had its name is in there by now; none can follow.
    if not (gone and _kill_all_in(inodes)):
        _log.warning("some processes in the lab %s could not be killed; its namespaces live on in them", lab)


def remove_leftovers() -> list[str]:
    """Remove every lab whose owner is dead, and leave labs of living owners alone.

    Returns:
        The names of the labs that were removed.
    """
    labs = {lab for name in namespaces_there() if (lab := LabName.of_namespace(name)) is not None}
    dead = sorted((lab for lab in labs if not lab.owner_lives()), key=str)
    for lab in dead:
        _log.info("removing what the dead lab %s left", lab)
        remove(lab)
    return [str(lab) for lab in dead]


def _processes_in(inodes: set[tuple[int, int]]) -> list[int]:
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()] if inodes else []
    return [pid for pid in pids if pid != os.getpid() and _inode(Path(f"/proc/{pid}/ns/net")) in inodes]


def _kill_all_in(inodes: set[tuple[int, int]]) -> bool:
    """Kill every process in these namespaces, those that come up meanwhile too; return whether all are gone."""
    deadline = time.monotonic() + _KILL_S
    while time.monotonic() < deadline:
        held = {pid: process for pid in _processes_in(inodes) if (process := hold(pid)) is not None}
        # Between the listing and the hold a number may have passed to a stranger: only what is still there is killed.
        there = set(_processes_in(inodes)) & set(held) if held else set()
        for pid in there:
            held[pid].send(signal.SIGKILL)
        for pid in there:
            held[pid].wait(max(deadline - time.monotonic(), 0.0))
        for process in held.values():
            process.close()
        if not held:
            return True
    return False


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


# -------------------------------------------------------------------------------------------------
# A process beside every lab that waits for the lab's owner to die, and then removes the lab.
#
# It covers every way a process can end without cleaning up: SIGKILL, SIGTERM without a handler, the OOM killer, a
# crash. Should it be killed as well, the next lab that starts removes what is left (`remove_leftovers`).


def start_guard(lab: LabName) -> Popen[bytes]:
    """Start the guard of a lab that this process is about to build; it is to be killed once the lab is removed."""
    command = [sys.executable, "-m", "ringside.lab.namespaces", *map(str, (lab.pid, lab.start, lab.count))]
    # In a session of its own: Ctrl-C at the terminal is for the owner.
    return Popen(command, stdin=DEVNULL, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)


def main(arguments: list[str]) -> None:
    """Wait for the owner to end, then remove its lab."""
    lab = LabName(*map(int, arguments))
    owner = hold(lab.pid)
    if owner is not None and lab.owner_lives():
        select.select([owner], [], [])
    remove(lab)


if __name__ == "__main__":
    main(sys.argv[1:])
