"""Messages over torch.distributed: point-to-point of a Gloo group made over the job's own store.

The group is our own, of the same ranks as the user's, so that our messages never meet theirs and a failure of ours
leaves theirs usable; rendezvous, addresses and sockets are torch's. What matters about Gloo (torch 2.13):

-   A message waits for the receiver's "ready" unless the receive was posted before; posted ahead, it takes one way.
-   A receive may be longer than the message; messages of one tag between two ranks are taken in order.
-   Nothing can be cancelled. But a wait that times out closes every connection of its group, which ends all other waits
    here at once and, since connections close, at the peers: that is how a rank gives up. Why, it says on a second
    group (`ringside.engine.transports.abort`).
-   A message of which a part is there when its connection breaks is forgotten, and so is who waits for it (`half_way`).
-   A host that vanishes without a word is not noticed; the sockets are told to (`connections`). Keepalives that the own
    host's queue drops are not counted by the kernel, so whoever waits for long also sends a little, and finds out there
    that a connection is broken.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside.engine.transports.abort import AbortChannel, AbortListener, AbortNotice, find_late, tell_apart
from ringside.engine.transports.base import NOBODY, Bytes, Kept, LinkError, LinkFailure
from ringside.engine.transports.gloo_internals import (
    DEAD_AFTER_S,
    breakage,
    close_connections,
    end_wait,
    patient_io_threads,
    stands,
    watched_connections,
)
from ringside.engine.transports.waits import OpenWait, long_awaited

_DATA, _BESIDE = 1, 4
_WORD_S, _WORD_UNDER_LOAD_S = 0.3, 5.0  # what a word takes, and what it may take where the machine is very busy
_NOTICED_S, _LOOK_S = 2.0, 0.1  # a silent host is noticed on all connections to it, but not on all at once
_SILENCE_S = 1.0  # who says nothing for so long after everybody was woken takes no part
_AT_ONCE = datetime.timedelta(milliseconds=1)
JOINING_S = 60.0
"""How long ranks that have met take at most to say where they are, seconds."""


class GlooTransport:
    """One rank's end of a group that exchanges messages through Gloo.

    Args:
        store: A part of the job's store that only this group uses.
        rank: This vertex.
        size: Number of vertices, at least 2.
        timeout_s: Longest wait for one message, seconds.
        dead_after_s: A peer whose host does not answer for so long is taken for lost, seconds.
        joining_s: Longest time until all have said where they are, seconds; a peer that does not answer there is given
            up after five times as long, by Gloo.

    Raises:
        LinkError: The group could not be made (a rank died or did not come, no interface); Gloo names nobody.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        dead_after_s: float = DEAD_AFTER_S,
        joining_s: float = JOINING_S,
    ) -> None:
        self.rank, self.size = rank, size
        self.waits_inside: Callable[[], int] = _for_nobody
        self.on_failure: Callable[[], object] = _nothing
        self._doing: object = ""
        self._since = time.monotonic()
        self._timeout = datetime.timedelta(seconds=timeout_s)
        gloo: Any = dist.ProcessGroupGloo
        joining = datetime.timedelta(seconds=joining_s)
        try:
            with watched_connections(dead_after_s) as self._connections, patient_io_threads():
                self._group = gloo(PrefixStore("data", store), rank, size, joining)
            with watched_connections(dead_after_s), patient_io_threads():
                words = gloo(PrefixStore("words", store), rank, size, joining)
        except RuntimeError as error:
            raise LinkError(LinkFailure("lost", NOBODY), str(error).partition("\n")[0][:300]) from None
        self._words = AbortChannel(words, rank, size)
        self._own = OpenWait()
        self._waits = [self._own]
        self._cause: LinkFailure | None = None
        self._over = False
        self._guard = threading.Lock()
        self._listener = AbortListener(self._words, self.fail, self._prod, f"ringside-listener-{rank}")

    @property
    def doing(self) -> object:
        """What this vertex is about; see `Transport`."""
        return self._doing

    @doing.setter
    def doing(self, what: object) -> None:
        self._doing, self._since = what, time.monotonic()

    def keep(self, data: Bytes) -> Kept:
        """Return what `send` and `receive` take in place of `data`; see `Transport`."""
        return [torch.from_numpy(data)]

    def send(self, peer: int, data: Bytes | Kept) -> _Message:
        """Start sending; see `Transport`."""
        return self._send(self._own, _DATA, peer, data)

    def receive(self, peer: int, into: Bytes | Kept) -> _Message:
        """Start receiving; see `Transport`. That the peer has left is an error only for who waits for the message."""
        return self._receive(self._own, _DATA, peer, into)

    def set_timeout(self, timeout_s: float) -> None:
        """Wait so long for every message from now on, seconds."""
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def beside(self) -> _Beside:
        """Return messages with an order of their own; see `Transport`."""
        self._waits.append(OpenWait())
        return _Beside(self, self._waits[-1], _BESIDE + len(self._waits) - 2)

    def _send(self, wait: OpenWait, tag: int, peer: int, data: Bytes | Kept) -> _Message:
        try:
            kept = data if data.__class__ is list else [torch.from_numpy(data)]
            return _Message(self, wait, peer, self._group.send(kept, peer, tag))
        except RuntimeError as error:
            raise self._error(peer, error) from None

    def _receive(self, wait: OpenWait, tag: int, peer: int, into: Bytes | Kept) -> _Message:
        try:
            kept = into if into.__class__ is list else [torch.from_numpy(into)]
            work = self._group.recv(kept, peer, tag)
        except RuntimeError as error:
            work = _Refused(error)
        return _Message(self, wait, peer, work)

    def fail(self, cause: LinkFailure) -> LinkFailure:
        """Tell the peers, as far as they can be reached, and close all connections; the first cause counts.

        Args:
            cause: As this rank sees it. Who is lost or late may be left to be found out (vertex -1).
        """
        with self._guard:
            if self._cause is None:
                self._cause = self._settled(cause)
            return self._cause

    def close(self, *, patience_s: float = 5.0) -> None:
        """Leave; a peer that still waits for this rank hears that it left, and every peer if it was in a collective.

        Connections stay until every peer has left too, since what was sent may still be on its way, but not for longer
        than `patience_s`.
        """
        with self._guard:
            if self._cause is None:
                self._cause = LinkFailure("left", self.rank)
                word = self._word(self._cause, NOBODY)
                self._words.tell(replace(word, goodbye=not word.doing))  # in the middle of something it gives up
                self._words.silent(patience_s)
                self._end_waits()
        self._listener.stop()

    def describe(self) -> dict[str, Any]:
        """Return its name."""
        return {"transport": "torch point-to-point (gloo)"}

    def has_lost(self, peer: int, or_left: bool = False) -> bool:
        """Tell whether the connection to a peer is known to be broken; see that it will be, where the peer is silent.

        Args:
            peer: The vertex.
            or_left: It counts as lost though it left in good order.
        """
        if stands(self._group, peer):
            return False
        return or_left or (word := self._words.of(peer)) is None or not word.goodbye

    def _settled(self, cause: LinkFailure) -> LinkFailure:
        """Find out who is to blame, and tell."""
        waits_for = next((wait.peer for wait in self._waits if wait.peer != NOBODY), NOBODY)
        if waits_for == NOBODY:
            waits_for = self.waits_inside()
        if waits_for == NOBODY and cause.kind in ("lost", "late"):
            waits_for = cause.vertex
        heard = self._words.first()
        if heard is None and cause.kind == "lost":
            heard, cause = self._look_for_the_lost(cause)
        cause = heard.cause if heard is not None else cause
        own = self._word(cause, waits_for)
        self._words.tell(own)
        self._end_waits()
        self.on_failure()
        if cause.kind == "late":
            cause = find_late(self._words, self.rank, own, _SILENCE_S)
        if cause.kind == "disagreed":
            cause = tell_apart(self._words, self.rank, own, cause, _SILENCE_S)
        return cause

    def _word(self, cause: LinkFailure, waits_for: int) -> AbortNotice:
        return AbortNotice(cause, waits_for, time.monotonic() - self._since, str(self._doing))

    def _look_for_the_lost(self, cause: LinkFailure) -> tuple[AbortNotice | None, LinkFailure]:
        """Give whoever closed a connection on purpose time to say so; else find whose connection broke."""
        heard = self._words.first(_WORD_S)
        if heard is None and cause.vertex == NOBODY:
            deadline = time.monotonic() + _NOTICED_S
            while not (broken := [peer for peer in self._peers() if not stands(self._group, peer)]):
                if (heard := self._words.first(_LOOK_S)) is not None or time.monotonic() > deadline:
                    return heard, cause
            lost = [peer for peer in broken if self._words.of(peer) is None]
            cause = LinkFailure("lost", lost[0] if lost else broken[0])
        if heard is None and "by peer" in breakage(self._group, cause.vertex):
            # "Connection closed by peer", or reset: not the network. If its other connection stands it has not died but
            # given up, or left in good order, and its word is on its way.
            deadline = time.monotonic() + _WORD_UNDER_LOAD_S
            while self._words.reaches(cause.vertex) and time.monotonic() < deadline:
                if heard := self._words.first(_LOOK_S) or self._words.of(cause.vertex):
                    break
        return heard or self._words.of(cause.vertex), cause

    def _end_waits(self) -> None:
        """Close all connections, and end what waits for messages nevertheless."""
        self._over = True  # who begins to wait after this does not for long
        close_connections(self._group)
        for wait in self._waits:
            end_wait(wait.work)

    def _prod(self) -> None:
        """See to whoever is waited for: where nothing comes for long, or connections were closed, ask for the peer's.

        What is sent to ask ends a connection that is silent, once it is not acknowledged.
        """
        for peer in long_awaited(self._waits, self._connections.some_closed, time.monotonic()):
            if not stands(self._group, peer):
                self.fail(LinkFailure("lost", peer))  # whoever waits may not hear of it
                return

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.size) if peer != self.rank]

    def _error(self, peer: int, error: RuntimeError) -> LinkError:
        text = str(error)
        kind = "late" if "Timed out waiting" in text else "lost"
        return LinkError(self.fail(LinkFailure(kind, peer)), text.partition("\n")[0][:300])  # type: ignore[arg-type]


def _for_nobody() -> int:
    return NOBODY


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class _Refused:
    error: RuntimeError

    def wait(self, timeout: datetime.timedelta) -> bool:
        """Raise why the message cannot come."""
        raise self.error


@dataclass(frozen=True, slots=True)
class _Beside:
    """Messages of a `GlooTransport` with an order of their own: those of another tag."""

    transport: GlooTransport
    waits: OpenWait
    tag: int

    @property
    def rank(self) -> int:
        """This vertex."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """Number of vertices."""
        return self.transport.size

    def keep(self, data: Bytes) -> Kept:
        """Return what `send` and `receive` take in place of `data`; see `Links`."""
        return self.transport.keep(data)

    def send(self, peer: int, data: Bytes | Kept) -> _Message:
        """Start sending; see `Links`."""
        return self.transport._send(self.waits, self.tag, peer, data)

    def receive(self, peer: int, into: Bytes | Kept) -> _Message:
        """Start receiving; see `Links`."""
        return self.transport._receive(self.waits, self.tag, peer, into)


class _Message:
    __slots__ = ("peer", "transport", "waits", "work")

    def __init__(self, transport: GlooTransport, waits: OpenWait, peer: int, work: Any) -> None:
        self.transport, self.waits, self.peer, self.work = transport, waits, peer, work

    def wait(self) -> None:
        """Wait for it; see `Pending`."""
        waits, transport = self.waits, self.transport
        waits.work = self.work
        waits.number += 1  # before the peer: or it would look like the wait before it
        waits.peer = self.peer
        try:
            if not self.work.wait(transport._timeout if not transport._over else _AT_ONCE):
                raise RuntimeError("the wait was ended: a connection broke while a part of the message was there")
        except RuntimeError as error:
            raise transport._error(self.peer, error) from None
        waits.peer = NOBODY
