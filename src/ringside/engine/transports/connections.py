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

DEAD_AFTER_S = 3.2
"""A peer whose host does not answer for so long counts as lost, seconds: with half a second until something is sent to
a host that is silent, and what it takes to tell everybody, an error comes within five."""
_NOTHING = 1 << 20  # the tag of a message that nobody sends
_AT_ONCE = timedelta(milliseconds=1)


@contextlib.contextmanager
def watched_connections(dead_after_s: float) -> Iterator[None]:
    """Watch the TCP connections that are opened inside the `with` statement.

    Args:
        dead_after_s: A peer whose host does not answer for so long counts as lost, seconds.
    """
    before = _sockets()
    yield
    for fd, _ in _sockets() - before:
        _watch(fd, dead_after_s)


def close_connections(group: Any) -> None:
    """End all that is under way in a Gloo group, here and at its peers: a wait that times out closes everything."""
    nothing = torch.empty(1, dtype=torch.uint8)
    for peer in range(group.size()):
        with contextlib.suppress(RuntimeError):
            if peer != group.rank():
                group.recv([nothing], peer, _NOTHING).wait(_AT_ONCE)


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
