"""The TCP connections of a Gloo group: have the kernel notice that a host is gone, and close them on purpose."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

DEAD_AFTER_S = 3.0
"""A peer whose host does not answer for so long counts as lost, seconds: with what passes until something is sent to a
host that is silent, and what it takes to tell everybody, an error comes within five."""
_NOTHING, _PROBE = 1 << 20, 3  # the tags of a message that nobody sends, and of one that nobody takes
_AT_ONCE = timedelta(milliseconds=1)


class Connections:
    """Sockets that were opened, by descriptor and inode."""

    def __init__(self) -> None:
        self._sockets: set[tuple[int, int]] = set()

    def hold(self, sockets: set[tuple[int, int]]) -> None:
        """Look after these sockets."""
        self._sockets = sockets

    def some_closed(self) -> bool:
        """Tell whether any has been closed in this process since this was true: Gloo closes what is broken."""
        closed = {(fd, inode) for fd, inode in self._sockets if not _is_open(fd, inode)}
        self._sockets -= closed
        return bool(closed)


@contextlib.contextmanager
def watched_connections(dead_after_s: float) -> Iterator[Connections]:
    """Watch the TCP connections that are opened inside the `with` statement, and yield what they are.

    Args:
        dead_after_s: A peer whose host does not answer for so long counts as lost, seconds.
    """
    before, opened = _sockets(), Connections()
    yield opened
    opened.hold(_sockets() - before)
    for fd, _ in _sockets() - before:
        _watch(fd, dead_after_s)


def close_connections(group: Any) -> None:
    """End all that is under way in a Gloo group, here and at its peers: a wait that times out closes everything."""
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in range(group.size()):
        with contextlib.suppress(RuntimeError):
            if peer != group.rank():
                group.recv([nothing], peer, _NOTHING).wait(_AT_ONCE)


def stands(group: Any, peer: int) -> bool:
    """Tell whether the connection to a peer of a Gloo group stands, as far as is known; see `breakage`."""
    return not breakage(group, peer)


def breakage(group: Any, peer: int) -> str:
    """Return Gloo's words on how the connection to a peer of a group broke; "": it stands, as far as is known.

    It is announced that a message will come, and that is not acknowledged where the peer is silent. The message does
    not: nobody takes it. Gloo keeps a note of each, 113 bytes for both ends, so this is not for often. (Nor may it ever
    be taken: a message whose `Work` is gone stops all that is sent after it.)
    """
    try:
        group.send([torch.zeros(1)], peer, _PROBE)
    except RuntimeError as error:
        return str(error)
    return ""


def _is_open(fd: int, inode: int) -> bool:
    try:
        return os.fstat(fd).st_ino == inode
    except OSError:
        return False


def _sockets() -> set[tuple[int, int]]:
    """Return this process's open sockets as (descriptor, inode): descriptors that another thread closes come again."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            about = os.fstat(int(name))
            if stat.S_ISSOCK(about.st_mode):
                found.add((int(name), about.st_ino))
    return found


def _watch(fd: int, after_s: float) -> None:
    """Have a peer given up that no longer answers, whether we send to it (TCP_USER_TIMEOUT) or wait for it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round(after_s) - 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(after_s * 1000))
