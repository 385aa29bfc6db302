"""The TCP connections of a Gloo group: have the kernel notice that a host is gone, and close them on purpose."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import stat
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

DEAD_AFTER_S = 3.0
"""A peer whose host does not answer for so long counts as lost, seconds: with what passes until something is sent to a
host that is silent, and what it takes to notify all ranks, an error comes within five."""
_NEVER_SENT, _PROBE = 1 << 20, 3  # the tags of a message that nobody sends, and of one that nobody receives
_AT_ONCE = timedelta(milliseconds=1)


class Connections:
    """Sockets that were opened, by descriptor and inode.

    Attributes:
        sockets: Those that are open as far as is known.
    """

    def __init__(self) -> None:
        self.sockets: set[tuple[int, int]] = set()

    def some_closed(self) -> bool:
        """Return whether any has been closed in this process since this was true: Gloo closes what is broken."""
        closed = set()
        for fd, inode in self.sockets:
            try:
                is_open = os.fstat(fd).st_ino == inode  # or the descriptor is another file's now
            except OSError:
                is_open = False
            if not is_open:
                closed.add((fd, inode))
        self.sockets -= closed
        return bool(closed)


@contextlib.contextmanager
def watched_connections() -> Iterator[Connections]:
    """Watch the TCP connections that are opened inside the `with` statement, and yield what they are."""
    before, opened = _sockets(), Connections()
    yield opened
    opened.sockets = _sockets() - before
    # Have the kernel give up a peer that no longer answers, whether we send to it (TCP_USER_TIMEOUT) or wait for it.
    for fd, _ in opened.sockets:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
            if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
                continue
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, round(DEAD_AFTER_S) - 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(DEAD_AFTER_S * 1000))


def close_connections(group: Any) -> None:
    """End all that is under way in a Gloo group, here and at its peers: a wait that times out closes everything."""
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in range(group.size()):
        with contextlib.suppress(RuntimeError):
            if peer != group.rank():
                group.recv([nothing], peer, _NEVER_SENT).wait(_AT_ONCE)


def stands(group: Any, peer: int) -> bool:
    """Return whether the connection to a peer of a Gloo group stands, as far as is known; see `breakage`."""
    return not breakage(group, peer)


def breakage(group: Any, peer: int) -> str:
    """Return Gloo's message on how the connection to a peer of a group broke; "": it stands, as far as is known.

    It is announced that a message will come, and that is not acknowledged where the peer is silent. The message does
    not: nobody takes it. Gloo keeps a note of each, 113 bytes for both ends, so this is not for often. (Nor may it ever
    be taken: a message whose `Work` is gone stops all that is sent after it.)
    """
    try:
        group.send([torch.zeros(1)], peer, _PROBE)
    except RuntimeError as error:
        return str(error)
    return ""


def _sockets() -> set[tuple[int, int]]:
    """Return this process's open sockets as (descriptor, inode): descriptors that another thread closes come again."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            about = os.fstat(int(name))
            if stat.S_ISSOCK(about.st_mode):
                found.add((int(name), about.st_ino))
    return found


# -------------------------------------------------------------------------------------------------
# Ends a wait for a message that Gloo forgets.
#
# When a connection breaks, Gloo (torch 2.13) ends every wait for a message of it, except for a message of which a part
# has arrived already, or has left already: that wait lasts until its timeout, since closing the connection once more
# changes nothing. torch can end such a wait (`c10d::Work::abort`) but does not give
# that to Python. So it is called by its name in torch's library, on an object that was seen to be one of the two kinds
# it is for.

_WORKS = (
    "N4c10d16ProcessGroupGloo8RecvWork",
    "N4c10d16ProcessGroupGloo8SendWork",
)  # C++ names, as compilers write them
_FIRST_ENTRY = 2 * ctypes.sizeof(ctypes.c_void_p)  # an object points to its class's table there (Itanium C++ ABI)
_VALUE = object.__basicsize__  # where pybind11 keeps the C++ object's address in a Python object that has just one

Abort = Callable[[int], object]


def end_wait(work: Any) -> None:
    """Have a wait for a message, on another thread or a later one, return at once: `wait` is False then.

    What cannot be ended this way is left alone; connections stay as they are.

    Args:
        work: What `ProcessGroupGloo.send` or `recv` returned.
    """
    aborts = _aborts()
    if not aborts or not isinstance(work, torch.distributed.Work):
        return
    address = ctypes.c_void_p.from_address(id(work) + _VALUE).value
    kind = ctypes.c_void_p.from_address(address).value if address else None
    if address and kind in aborts:
        aborts[kind](address)


@functools.cache
def _aborts() -> dict[int | None, Abort]:
    """Return what ends a wait, by the address that an object of the kind begins with."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found: dict[int | None, Abort] = {}
        for name in _WORKS:
            abort = library[f"_Z{name}5abortEv"]
            abort.argtypes, abort.restype = [ctypes.c_void_p], None
            found[ctypes.addressof(ctypes.c_char.in_dll(library, f"_ZTV{name}E")) + _FIRST_ENTRY] = abort
        return found
    except (OSError, AttributeError, ValueError):  # another system, or another torch
        return {}


# -------------------------------------------------------------------------------------------------
# The threads of Gloo that read and write for a group: they do not take the processor from a thread that sends.
#
# A Gloo thread that wakes on the processor of the very thread that woke it, in the middle of a send, finds the
# connection locked and asks again and again until its time is over, while the one that holds the lock does not run.
# Linux lets a thread of the policy for batch jobs have its share as before, but does not put it in another's place
# when it wakes.

_NAME = "gloo"  # the kernel's names of these threads begin so


@contextlib.contextmanager
def patient_io_threads() -> Iterator[None]:
    """Have the Gloo threads that begin inside the `with` statement wait for their turn, where the system lets us."""
    before = set(os.listdir("/proc/self/task"))
    yield
    for task in set(os.listdir("/proc/self/task")) - before:
        with contextlib.suppress(OSError, ValueError):
            is_ours = Path(f"/proc/self/task/{task}/comm").read_text().startswith(_NAME)
            if is_ours and os.sched_getscheduler(int(task)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(task), os.SCHED_BATCH, os.sched_param(0))
