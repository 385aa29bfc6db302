"""The notice that a rank that aborts sends to every other, and how the culprit is found among all notices.

Notices travel over a Gloo group of their own, because a group in which a wait has timed out has no connections left.
Their receives are posted when the group is made, so that a notice arrives while its reader is busy or asleep; to read
one is to look at memory, and never waits longer than its grace. An `AbortListener` polls, so that a rank that waits for
one peer receives the notice of another.

A deadline that passed at one rank shows only which peer that rank waited for, and that peer is itself most likely a
victim. So every notice names the peer that its rank waits for, and the chain is followed: to the one that waits for
nobody or sent no notice (it takes no part: it is late), to one that knows better (a rank died), or in a circle (they
wait for each other).
"""

from __future__ import annotations

import contextlib
import datetime
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch

from ringside.engine.transports.base import NOBODY, Bytes, Kind, LinkFailure
from ringside.engine.transports.gloo_internals import stands
from ringside.text import name_ranks

_TAG = 2
_KINDS = ("lost", "late", "left", "disagreed")
# kind, vertex, waits for, goodbye, for how long, number, bytes of operation, of detail
_HEAD = struct.Struct("<iii?dIHH")
_BYTES = 1024
_TEXT = (_BYTES - _HEAD.size - 1) // 2  # of each of the two; the last byte marks the notice as complete
_SENT = datetime.timedelta(milliseconds=300)
_POLL_S = 0.002
_LISTEN_S = 0.1
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class AbortNotice:
    """Why a rank aborted.

    Args:
        cause: The reason, as far as it knew.
        waits_for: The vertex it waited for, or -1.
        since_s: How long it had been in its collective, seconds.
        operation: Which collective that was; "": it was in none.
        goodbye: It left in good order.
        number: How many collectives it had begun, that one included, modulo 2^32.
    """

    cause: LinkFailure
    waits_for: int = NOBODY
    since_s: float = 0.0
    operation: str = ""
    goodbye: bool = False
    number: int = 0

    def encode(self) -> Bytes:
        """Return the message of a notice, uint8 [1024]; long texts are cut."""
        message = np.zeros(_BYTES, dtype=np.uint8)
        operation, detail = self.operation.encode()[:_TEXT], self.cause.detail.encode()[:_TEXT]
        kind = _KINDS.index(self.cause.kind)
        figures = (kind, self.cause.vertex, self.waits_for, self.goodbye, self.since_s, self.number % 2**32)
        _HEAD.pack_into(message.data, 0, *figures, len(operation), len(detail))
        text = np.frombuffer(operation + detail, dtype=np.uint8)
        message[_HEAD.size : _HEAD.size + len(text)] = text
        message[-1] = 1  # arrives last: the notice is complete
        return message

    @staticmethod
    def decode(message: Bytes) -> AbortNotice:
        """Return the notice that `encode` wrote."""
        kind, vertex, waits_for, goodbye, since_s, number, cut, detail = _HEAD.unpack_from(message.data)
        text = message[_HEAD.size : _HEAD.size + cut + detail].tobytes()
        cause = LinkFailure(cast(Kind, _KINDS[kind]), vertex, text[cut:].decode(errors="replace"))
        return AbortNotice(cause, waits_for, since_s, text[:cut].decode(errors="replace"), goodbye, number)


class AbortChannel:
    """One rank's notices to and from all others.

    Args:
        group: A Gloo group that nothing else uses.
        rank: This vertex.
        size: Number of vertices.
    """

    def __init__(self, group: Any, rank: int, size: int) -> None:
        self._group = group
        self._places = {peer: np.zeros(_BYTES, dtype=np.uint8) for peer in range(size) if peer != rank}
        self._pending = []
        for peer, place in self._places.items():
            with contextlib.suppress(RuntimeError):  # dead already: it sends nothing, and is found broken when needed
                self._pending.append(group.recv([torch.from_numpy(place)], peer, _TAG))

    def send(self, notice: AbortNotice) -> None:
        """Send a notice to every peer that can be reached; a rank sends only one."""
        message = torch.from_numpy(notice.encode())
        under_way = []
        for peer in self._places:
            with contextlib.suppress(RuntimeError):
                under_way.append(self._group.send([message], peer, _TAG))
        for work in under_way:
            with contextlib.suppress(RuntimeError):
                work.wait(_SENT)

    def reaches(self, peer: int) -> bool:
        """Return whether the connection for notices to a peer stands, as far as is known; see `stands`."""
        return stands(self._group, peer)

    def of(self, peer: int, grace_s: float = 0.0) -> AbortNotice | None:
        """Return the notice of a peer, waiting a moment for it; None: it has sent none."""
        return self._poll(lambda: self._read(peer), grace_s)

    def first(self, grace_s: float = 0.0) -> AbortNotice | None:
        """Return the notice of a peer that aborted, waiting a moment for it; knowledge goes before guesses."""
        return self._poll(self._best, grace_s)

    def silent(self, grace_s: float) -> list[int]:
        """Return the peers that have sent no notice when the time is over, ascending."""
        self._poll(lambda: all(self._read(peer) for peer in self._places), grace_s)
        return [peer for peer in self._places if self._read(peer) is None]

    def all(self) -> dict[int, AbortNotice]:
        """Return the notices that have come, by peer."""
        return {peer: notice for peer in self._places if (notice := self._read(peer)) is not None}

    def _poll(self, read: Callable[[], _Found], grace_s: float) -> _Found:
        deadline = time.monotonic() + grace_s
        while not (found := read()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return found

    def _best(self) -> AbortNotice | None:
        # That a peer is late is a guess of the rank that waited for it; the other kinds were seen.
        aborted = [notice for notice in self.all().values() if not notice.goodbye]
        return min(aborted, key=lambda notice: notice.cause.kind == "late", default=None)

    def _read(self, peer: int) -> AbortNotice | None:
        place = self._places[peer]
        return AbortNotice.decode(place) if place[-1] else None


class AbortListener:
    """A thread that reports, once, that a peer has aborted.

    Args:
        channel: Where notices arrive.
        on_abort: Called with the cause. Its object is not kept alive.
        on_idle: Called at every poll that finds no notice. Nor is this.
        name: Of the thread.
    """

    def __init__(
        self, channel: AbortChannel, on_abort: Callable[[LinkFailure], object], on_idle: Callable[[], object], name: str
    ) -> None:
        self._over, self._channel = threading.Event(), channel
        self._on_abort, self._on_idle = weakref.WeakMethod(on_abort), weakref.WeakMethod(on_idle)
        self._thread = threading.Thread(target=self._listen, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _listen(self) -> None:
        # The thread holds its owner only while it calls it, so that an owner that nobody needs any more can go.
        while not self._over.wait(_LISTEN_S) and (report := self._on_abort()) is not None:
            if (notice := self._channel.first()) is not None:
                report(notice.cause)
                return
            if (attend := self._on_idle()) is not None:
                attend()
            del report, attend


def find_late(channel: AbortChannel, me: int, own: AbortNotice, grace_s: float) -> LinkFailure:
    """Return which vertex kept all waiting, when this vertex's deadline has passed or a notice says that theirs has.

    Args:
        channel: The others' notices.
        me: This vertex.
        own: Its own notice.
        grace_s: How long a silent peer may take to send its notice, seconds.
    """
    vertex = own.waits_for if own.waits_for != NOBODY else own.cause.vertex
    # This vertex waits for no particular one: late is whoever takes no part.
    if vertex == NOBODY:
        absent = channel.silent(grace_s)
        notices = {me: own, **channel.all()}
        absent += [vertex for vertex, notice in notices.items() if not notice.operation]
        return LinkFailure("late", min(absent)) if absent else _find_last(notices, own)
    # Follow the chain of waits until it ends, or closes.
    chain = {me: own} if own.operation else {}
    while vertex not in chain:
        notice = channel.of(vertex, grace_s) if vertex != me else own
        if notice is None or not notice.operation:
            return LinkFailure("late", vertex)
        if notice.cause.kind != "late":
            return notice.cause
        chain[vertex] = notice
        vertex = notice.waits_for if notice.waits_for != NOBODY else notice.cause.vertex
        if vertex == NOBODY:
            return notice.cause
    return _find_last(chain, own)


def _find_last(notices: dict[int, AbortNotice], own: AbortNotice) -> LinkFailure:
    """They wait for each other: do different things, or one came late, or the network holds their messages back."""
    if len({notice.operation for notice in notices.values()}) > 1:
        return LinkFailure("disagreed", own.waits_for)
    last = min(notices, key=lambda vertex: notices[vertex].since_s)
    if notices[last].since_s < max(notice.since_s for notice in notices.values()) / 2:
        return LinkFailure("late", last)
    return LinkFailure("late", own.waits_for)


def find_disagreement(
    channel: AbortChannel, me: int, own: AbortNotice, cause: LinkFailure, grace_s: float
) -> LinkFailure:
    """Return which vertex called something else than most, and what each called, after one found a disagreement.

    Args:
        channel: The others' notices.
        me: This vertex.
        own: Its own notice.
        cause: What is known so far.
        grace_s: How long a silent peer may take to send its notice, seconds.
    """
    channel.silent(grace_s)
    busy = {vertex: notice for vertex, notice in {me: own, **channel.all()}.items() if notice.operation}
    # Whoever is still in the collective before has not called this one: it is on no side.
    newest = max((notice.number for notice in busy.values()), default=0)
    sides: dict[str, list[int]] = {}
    for vertex, notice in sorted(busy.items()):
        if notice.number == newest:
            sides.setdefault(notice.operation, []).append(vertex)
    if len(sides) < 2:
        return cause
    most = max(sides.values(), key=len)  # the first of equals: that of the lowest rank
    other = min(ranks[0] for ranks in sides.values() if ranks is not most)
    calls = "; ".join(f"{name_ranks(ranks)} called {operation}" for operation, ranks in sides.items())
    return LinkFailure("disagreed", other, calls)
