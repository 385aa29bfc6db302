"""Messages over torch.distributed: point-to-point of a Gloo group made over the job's own store.

The group is our own, of the same ranks as the user's, so that our messages never meet theirs and a failure of ours
leaves theirs usable; rendezvous, addresses and sockets are torch's. What matters about Gloo (torch 2.13):

-   A message waits for the receiver's "ready" unless the receive was posted before; posted ahead, it takes one way.
-   A receive may be longer than the message; messages of one tag between two ranks are taken in order.
-   Nothing can be cancelled. But a wait that times out closes every connection of its group, which ends all other waits
    here at once and, since connections close, at the peers: that is how a rank gives up (`fail`).
-   A host that vanishes without a word is not noticed; the sockets are told to (keep-alive, TCP_USER_TIMEOUT).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import stat
import threading
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from ringside.engine.transports.transport import Bytes, Cause, LinkError

_DATA, _CONTROL, _NOBODY = 1, 2, 3
_KINDS = ("lost", "late", "left", "disagreed")
_GRACE = datetime.timedelta(milliseconds=300)
_AT_ONCE = datetime.timedelta(milliseconds=1)


class TorchPeerToPeer:
    """One rank's end of a group that exchanges messages through Gloo.

    Args:
        store: A part of the job's store that only this group uses.
        rank: This vertex.
        size: Number of vertices, at least 2.
        timeout_s: Longest wait for one message, seconds.
        dead_after_s: A peer whose host does not answer for so long is taken for lost, seconds.

    Raises:
        RuntimeError: The group could not be made (a rank did not come, no interface).
    """

    def __init__(self, store: Store, rank: int, size: int, *, timeout_s: float, dead_after_s: float = 4.0) -> None:
        self.rank, self.size = rank, size
        self._timeout = datetime.timedelta(seconds=timeout_s)
        before = _sockets()
        gloo: Any = dist.ProcessGroupGloo
        self._group = gloo(store, rank, size, self._timeout)
        for fd in _sockets() - before:
            _notice_death(fd, dead_after_s)
        self._cause: Cause | None = None
        self._closed = False
        self._guard = threading.Lock()
        self._words = {peer: torch.full((2,), -1, dtype=torch.int64) for peer in range(size) if peer != rank}
        self._control = {peer: self._group.recv([word], peer, _CONTROL) for peer, word in self._words.items()}

    def send(self, peer: int, data: Bytes) -> _Message:
        """Start sending; see `Transport`."""
        try:
            return _Message(self, peer, self._group.send([torch.from_numpy(data)], peer, _DATA))
        except RuntimeError as error:
            raise self._error(peer, error) from None

    def receive(self, peer: int, into: Bytes) -> _Message:
        """Start receiving; see `Transport`."""
        try:
            return _Message(self, peer, self._group.recv([torch.from_numpy(into)], peer, _DATA))
        except RuntimeError as error:
            raise self._error(peer, error) from None

    def fail(self, cause: Cause) -> Cause:
        """Tell the peers, as far as they can be reached, and close all connections; the first cause counts."""
        with self._guard:
            if self._closed:
                return self._cause or cause
            self._closed = True
            self._cause = self._cause or self._heard() or cause
            word = torch.tensor([_KINDS.index(self._cause.kind), self._cause.vertex], dtype=torch.int64)
            told = []
            for peer in self._words:
                if self._cause != Cause("lost", peer):
                    with contextlib.suppress(RuntimeError):
                        told.append(self._group.send([word], peer, _CONTROL))
            for work in told:
                with contextlib.suppress(RuntimeError):
                    work.wait(_GRACE)
            self._tear_down()
            return self._cause

    def close(self) -> None:
        """Leave; a peer that still waits for this rank hears that it left."""
        self.fail(Cause("left", self.rank))

    def describe(self) -> dict[str, Any]:
        """Return its name."""
        return {"transport": "torch point-to-point (gloo)"}

    def cause(self, *, wait: bool = False) -> Cause | None:
        """Return why the group is unusable, if some rank said so; `wait`: give the word a moment to arrive."""
        if wait and self._cause is None and self._heard() is None:
            threading.Event().wait(_GRACE.total_seconds())
        return self._cause or self._heard()

    def _tear_down(self) -> None:
        for peer in self._words:
            with contextlib.suppress(RuntimeError):
                self._group.recv([torch.empty(1)], peer, _NOBODY).wait(_AT_ONCE)
                return

    def _heard(self) -> Cause | None:
        for word in self._words.values():
            kind, vertex = word.tolist()
            if vertex >= 0:
                return Cause(_KINDS[kind], vertex)  # type: ignore[arg-type]
        return None

    def _error(self, peer: int, error: RuntimeError) -> LinkError:
        text = str(error)
        late = "Timed out waiting" in text and not self._closed
        known = self.cause(wait=not late)
        return LinkError(known or Cause("late" if late else "lost", peer), text.partition("\n")[0][:300])


@dataclass(frozen=True, slots=True)
class _Message:
    transport: TorchPeerToPeer
    peer: int
    work: Any

    def wait(self) -> None:
        """Wait for it; see `Pending`."""
        try:
            self.work.wait(self.transport._timeout)
        except RuntimeError as error:
            raise self.transport._error(self.peer, error) from None


def _sockets() -> set[int]:
    """Return this process's open sockets."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found.add(int(name))
    return found


def _notice_death(fd: int, after_s: float) -> None:
    """Let the kernel give up on a TCP peer that no longer answers, whether we send to it or wait for it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, round(after_s) - 1))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(after_s * 1000))
