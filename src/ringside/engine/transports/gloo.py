"""Messages over torch.distributed: point-to-point of a Gloo group made over the job's own store.

The group is our own, of the same ranks as the user's, so that our messages never meet theirs and a failure of ours
leaves theirs usable; rendezvous, addresses and sockets are torch's. What matters about Gloo (torch 2.13):

-   A message waits for the receiver's "ready" unless the receive was posted before; posted ahead, it takes one way.
-   A receive may be longer than the message; messages of one tag between two ranks are taken in order.
-   Nothing can be cancelled. But a wait that times out closes every connection of its group, which ends all other waits
    here at once and, since connections close, at the peers: that is how a rank aborts. The reason it sends over a
    second group (`ringside.engine.transports.abort`).
-   A message of which a part is there when its connection breaks is forgotten, and the wait for it never ends
    (`gloo_internals.end_wait`).
-   A host that vanishes silently is not noticed; the sockets are set to (`gloo_internals.watched_connections`).
    Keepalives that the own host's queue drops are not counted by the kernel, so a rank that waits for long also sends a
    little, and finds out there that a connection is broken.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside.engine.transports.abort import AbortChannel, AbortListener, AbortNotice, find_disagreement, find_late
from ringside.engine.transports.arrival import await_arrivals
from ringside.engine.transports.base import NOBODY, Bytes, Kept, Kind, LinkError, LinkFailure
from ringside.engine.transports.gloo_internals import (
    Connections,
    breakage,
    close_connections,
    end_wait,
    patient_io_threads,
    watched_connections,
)

_DATA, _CHANNEL = 1, 4  # tags of messages: this transport's own, and those of its first channel
_NOTICE_S, _NOTICE_UNDER_LOAD_S = 0.3, 5.0  # a notice takes so long, or that where the machine is very busy
_NOTICED_S, _POLL_S = 2.0, 0.1  # a silent host is noticed on all connections to it, but not on all at once
_SILENCE_S = 1.0  # a rank that sends no notice for so long after all were woken takes no part
_TIMED_OUT = ("timeout", "timed out")  # in what Gloo and stores say of connections that could not be made
_BY_PEER = ("by peer", "refused", "unreachable", "no route")  # that it is not for want of something here
_AT_ONCE = datetime.timedelta(milliseconds=1)
JOINING_S = 60.0
"""How long ranks that have met take at most to exchange their addresses, seconds."""
PROD_S = 0.75
"""After so long the peer of a wait is probed."""


@dataclass(eq=False, slots=True)
class OpenWait:
    """Which peer messages of one order are waited for.

    Args:
        peer: The vertex; `NOBODY`: nobody waits.
        number: Of the wait.
        work: The message that is waited for, or was at last.
        known: The wait that was seen last.
        since: When that was, or when the peer was probed last.
    """

    peer: int = NOBODY
    number: int = 0
    work: Any = None
    known: int = -1
    since: float = 0.0

    def lasts(self, seconds: float, now: float) -> bool:
        """Return whether the same wait has lasted for so long, since it was first seen or since this was true."""
        same = self.peer != NOBODY and self.number == self.known
        if same and now - self.since <= seconds:
            return False
        self.known, self.since = self.number, now
        return same


def long_awaited(waits: Iterable[OpenWait], some_closed: Callable[[], bool], now: float) -> Iterator[int]:
    """Yield the peers to probe: those waited for long, and all that are waited for where connections were closed.

    Args:
        waits: Of every order of messages.
        some_closed: Returns whether connections were closed since its last call; called only where there is a wait.
        now: Monotonic seconds.
    """
    open_waits = [(wait, wait.peer) for wait in waits if wait.peer != NOBODY]  # another thread may end them meanwhile
    closed = bool(open_waits) and some_closed()
    for wait, peer in open_waits:
        if wait.lasts(PROD_S, now) or closed:
            yield peer


class GlooTransport:
    """One rank's end of a group that exchanges messages through Gloo.

    Args:
        store: A part of the job's store that only this group uses.
        rank: This vertex.
        size: Number of vertices, at least 2.
        timeout_s: Longest wait for one message, seconds.
        joining_s: Longest time until all have published their addresses, seconds; Gloo gives up a peer that does not
            answer there after five times as long.

    Raises:
        LinkError: The group could not be made (a rank died or did not come, no interface); Gloo does not name it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        timeout_s: float,
        joining_s: float = JOINING_S,
    ) -> None:
        self.rank, self.size = rank, size
        self.waits_inside: Callable[[], int] = lambda: NOBODY
        self.on_failure: Callable[[], object] = lambda: None
        self._operation: object = ""
        self._since = time.monotonic()
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._store, self._joining = store, datetime.timedelta(seconds=joining_s)
        # Every group has one connection to each peer; the sockets of those that carry messages are watched.
        self._groups: list[Any] = []
        self._sockets: list[Connections] = []
        try:
            self._connect("data", self._joining)
            gloo: Any = dist.ProcessGroupGloo
            with watched_connections(), patient_io_threads():
                notices = gloo(PrefixStore("words", store), rank, size, self._joining)
        except RuntimeError as error:
            raise LinkError(LinkFailure("lost", NOBODY), str(error).partition("\n")[0][:300]) from None
        self._notices = AbortChannel(notices, rank, size)
        self._own = OpenWait()
        self._waits = [self._own]
        self._cause: LinkFailure | None = None
        self._over = False
        self.number = 0
        self._guard = threading.Lock()
        self._listener = AbortListener(self._notices, self.fail, self._check_waits, f"ringside-listener-{rank}")

    @property
    def doing(self) -> object:
        """The collective that this vertex is in; see `Transport`."""
        return self._operation

    @doing.setter
    def doing(self, operation: object) -> None:
        self._operation, self._since = operation, time.monotonic()

    def keep(self, data: Bytes) -> Kept:
        """Return what `send` and `receive` take in place of `data`; see `Transport`."""
        return [torch.from_numpy(data)]

    def send(self, peer: int, data: Bytes | Kept) -> _Message:
        """Start sending; see `Transport`."""
        return self._send(self._groups[0], self._own, _DATA, peer, data)

    def receive(self, peer: int, into: Bytes | Kept) -> _Message:
        """Start receiving; see `Transport`. That the peer has left is an error only of the wait for the message."""
        return self._receive(self._groups[0], self._own, _DATA, peer, into)

    def set_timeout(self, timeout_s: float) -> None:
        """Wait so long for every message from now on, seconds."""
        self._timeout = datetime.timedelta(seconds=timeout_s)

    def open_channel(self, connection: int = 0) -> _Channel:
        """Return messages with an order of their own; see `Transport`."""
        wait = OpenWait()
        self._waits.append(wait)
        tag = _CHANNEL + len(self._waits) - 2
        while len(self._groups) <= connection:
            self._add_connection(wait)
        return _Channel(self, self._groups[connection], wait, tag)

    def _add_connection(self, wait: OpenWait) -> None:
        """Make one more connection to every peer, once all of them are about to; notices end the wait for that."""
        name, timeout = f"data/{len(self._groups)}", self._timeout

        def attend(peer: int) -> None:
            if peer != wait.peer:
                wait.number += 1
                wait.peer = peer
            self._check_open(peer)

        try:
            arrivals = PrefixStore(name, self._store)
            await_arrivals(arrivals, self.rank, range(self.size), timeout.total_seconds(), attend)
            wait.peer = NOBODY
            self._connect(name, min(timeout, self._joining))
            if self._over:  # given up before the group was there
                close_connections(self._groups[-1])
            self._check_open(NOBODY)
        except LinkError as error:
            raise LinkError(self.fail(error.cause), error.detail) from None
        except RuntimeError as error:
            text = str(error).partition("\n")[0][:300]
            raise LinkError(self.fail(self._why_not_connected(error)), text) from None

    def _check_open(self, peer: int) -> None:
        """Raise `LinkError` where this has failed on another thread, as by a notice."""
        if self._over:
            raise LinkError(LinkFailure("lost", peer), "given up")

    def _why_not_connected(self, error: RuntimeError) -> LinkFailure:
        """Return which peer is lost or late, as far as is known; where none is, it is for want of something here."""
        text = str(error).lower()
        if any(words in text for words in _TIMED_OUT):
            broken = any(peer != self.rank and self._breakage(peer) for peer in range(self.size))
            return LinkFailure("lost" if broken else "late", NOBODY)
        if isinstance(error, dist.DistError) or any(words in text for words in _BY_PEER):
            # Or its host had no more descriptors, and its Gloo does not say so to anybody.
            notice, cause = self._find_lost(LinkFailure("lost", NOBODY))
            if notice is not None or cause.vertex != NOBODY:
                return notice.cause if notice is not None else cause
        return LinkFailure("left", self.rank, str(error).partition("\n")[0][:300])

    def _connect(self, name: str, joining: datetime.timedelta) -> None:
        """Make a connection to every peer, which all of them make at the same time."""
        gloo: Any = dist.ProcessGroupGloo
        with watched_connections() as sockets, patient_io_threads():
            group = gloo(PrefixStore(name, self._store), self.rank, self.size, joining)
        self._groups.append(group)
        self._sockets.append(sockets)

    def _send(self, group: Any, wait: OpenWait, tag: int, peer: int, data: Bytes | Kept) -> _Message:
        try:
            kept = data if data.__class__ is list else [torch.from_numpy(data)]
            return _Message(self, wait, peer, group.send(kept, peer, tag))
        except RuntimeError as error:
            raise self._error(peer, error) from None

    def _receive(self, group: Any, wait: OpenWait, tag: int, peer: int, into: Bytes | Kept) -> _Message:
        try:
            kept = into if into.__class__ is list else [torch.from_numpy(into)]
            work = group.recv(kept, peer, tag)
        except RuntimeError as error:
            work = _Refused(error)
        return _Message(self, wait, peer, work)

    def fail(self, cause: LinkFailure) -> LinkFailure:
        """Send the peers a notice, as far as they can be reached, and close all connections; the first cause counts.

        Args:
            cause: As this rank sees it. Which vertex is lost or late may be left to be found out (vertex -1).
        """
        with self._guard:
            if self._cause is not None:
                return self._cause
            # Which vertex this one waits for: another host's, or one in its own host's shared memory.
            waits_for = next((wait.peer for wait in self._waits if wait.peer != NOBODY), NOBODY)
            if waits_for == NOBODY:
                waits_for = self.waits_inside()
            if waits_for == NOBODY and cause.kind in ("lost", "late"):
                waits_for = cause.vertex
            # A peer that aborted before knows the reason; else find the one that was lost.
            notice = self._notices.first()
            if notice is None and cause.kind == "lost":
                notice, cause = self._find_lost(cause)
            cause = notice.cause if notice is not None else cause
            # Pass it on, wake all, and then find the culprit among what all of them send.
            own = self._own_notice(cause, waits_for)
            self._notices.send(own)
            self._end_waits()
            self.on_failure()
            if cause.kind == "late":
                cause = find_late(self._notices, self.rank, own, _SILENCE_S)
            if cause.kind == "disagreed":
                cause = find_disagreement(self._notices, self.rank, own, cause, _SILENCE_S)
            self._cause = cause
            return cause

    def close(self, *, patience_s: float = 5.0) -> None:
        """Leave; a peer that still waits for this rank gets the notice of it, and every peer if it was in a collective.

        Connections stay until every peer has left too, since messages may still be on their way, but not for longer
        than `patience_s`.
        """
        with self._guard:
            if self._cause is None:
                self._cause = LinkFailure("left", self.rank)
                notice = self._own_notice(self._cause, NOBODY)
                self._notices.send(replace(notice, goodbye=not notice.operation))  # in a collective it is an abort
                self._notices.silent(patience_s)
                self._end_waits()
        self._listener.stop()

    def describe(self) -> dict[str, Any]:
        """Return its name."""
        return {"transport": "torch point-to-point (gloo)"}

    def has_lost(self, peer: int, or_left: bool) -> bool:
        """Return whether the connection to a peer is known to be broken; it will be, where the peer is silent.

        Args:
            peer: The vertex.
            or_left: It counts as lost though it left in good order.
        """
        if not self._breakage(peer):
            return False
        return or_left or (notice := self._notices.of(peer)) is None or not notice.goodbye

    def _own_notice(self, cause: LinkFailure, waits_for: int) -> AbortNotice:
        return AbortNotice(cause, waits_for, time.monotonic() - self._since, str(self._operation), number=self.number)

    def _find_lost(self, cause: LinkFailure) -> tuple[AbortNotice | None, LinkFailure]:
        """Wait for the notice of a peer that closed a connection on purpose; else find whose connection broke."""
        notice = self._notices.first(_NOTICE_S)
        if notice is None and cause.vertex == NOBODY:
            peers = [peer for peer in range(self.size) if peer != self.rank]
            deadline = time.monotonic() + _NOTICED_S
            while not (broken := [peer for peer in peers if self._breakage(peer)]):
                if (notice := self._notices.first(_POLL_S)) is not None or time.monotonic() > deadline:
                    return notice, cause
            lost = [peer for peer in broken if self._notices.of(peer) is None]
            cause = LinkFailure("lost", lost[0] if lost else broken[0])
        if notice is None and "by peer" in self._breakage(cause.vertex):
            # "Connection closed by peer", or reset: not the network. If its other connection stands it has not died but
            # aborted, or left in good order, and its notice is on its way.
            deadline = time.monotonic() + _NOTICE_UNDER_LOAD_S
            while self._notices.reaches(cause.vertex) and time.monotonic() < deadline:
                if notice := self._notices.first(_POLL_S) or self._notices.of(cause.vertex):
                    break
        return notice or self._notices.of(cause.vertex), cause

    def _end_waits(self) -> None:
        """Close all connections, and end the waits for messages that outlast them."""
        self._over = True  # a wait that begins after this is short
        for group in self._groups:
            close_connections(group)
        for wait in self._waits:
            end_wait(wait.work)

    def _check_waits(self) -> None:
        """Probe the peers that are waited for: where nothing comes for long, or connections were closed.

        The probe ends a connection that is silent, once it is not acknowledged.
        """
        for peer in long_awaited(self._waits, self._some_closed, time.monotonic()):
            if broken := self._breakage(peer):
                self.fail(LinkFailure(_kind_of(broken), peer))  # Gloo may not end the wait by itself
                return

    def _some_closed(self) -> bool:
        """Return whether a connection was closed since this was true."""
        return any(sockets.some_closed() for sockets in self._sockets)

    def _breakage(self, peer: int) -> str:
        """Return how a connection to a peer broke; "": they stand, as far as is known (`gloo_internals.breakage`)."""
        return next(filter(None, (breakage(group, peer) for group in self._groups)), "")

    def _error(self, peer: int, error: RuntimeError) -> LinkError:
        text = str(error)
        return LinkError(self.fail(LinkFailure(_kind_of(text), peer)), text.partition("\n")[0][:300])


def _kind_of(text: str) -> Kind:
    """Return what Gloo's message says of a connection.

    Where one wait is over, it closes all connections of the group: so the wait's own thread reads "Timed out waiting",
    and every other one, which may be the first that asks, "Application timeout caused pair closure".
    """
    return "late" if "Timed out waiting" in text or "Application timeout" in text else "lost"


@dataclass(frozen=True, slots=True)
class _Refused:
    error: RuntimeError

    def wait(self, timeout: datetime.timedelta) -> bool:
        """Raise why the message cannot come."""
        raise self.error


@dataclass(frozen=True, slots=True)
class _Channel:
    """Messages of a `GlooTransport` with an order of their own: those of another tag."""

    transport: GlooTransport
    group: Any
    waits: OpenWait
    tag: int

    def keep(self, data: Bytes) -> Kept:
        """Return what `send` and `receive` take in place of `data`; see `Links`."""
        return self.transport.keep(data)

    def send(self, peer: int, data: Bytes | Kept) -> _Message:
        """Start sending; see `Links`."""
        return self.transport._send(self.group, self.waits, self.tag, peer, data)

    def receive(self, peer: int, into: Bytes | Kept) -> _Message:
        """Start receiving; see `Links`."""
        return self.transport._receive(self.group, self.waits, self.tag, peer, into)


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
