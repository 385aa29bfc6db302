"""What a rank that gives up tells every other, and how the one at fault is found among what all of them said.

The words travel over a Gloo group of their own, because a group in which a wait has timed out has no connections left.
Their places are posted when the group is made, so that a word arrives while its reader is busy or asleep; reading is
looking at memory, and never waits longer than it is told. An `AbortListener` looks now and then, so that a rank that
waits for one peer hears what another has to say.

A deadline that passed at one rank says only whom that rank waited for, which is itself most likely a victim. So
everybody says whom it waits for, and the chain is followed: to the one that waits for nobody or says nothing (it takes
no part: it is late), to one that knows better (somebody died), or in a circle (they wait for each other).
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

from ringside.engine.failures import name_ranks
from ringside.engine.transports.base import NOBODY, Bytes, Kind, LinkFailure
from ringside.engine.transports.gloo_internals import stands

_TAG = 2
_KINDS = ("lost", "late", "left", "disagreed")
_HEAD = struct.Struct("<iii?dHH")  # kind, vertex, waits for, goodbye, for how long, bytes of doing, of detail
_BYTES = 1024
_TEXT = (_BYTES - _HEAD.size - 1) // 2  # of each of the two; the last byte says that the word is complete
_SENT = datetime.timedelta(milliseconds=300)
_LOOK_S = 0.002
_LISTEN_S = 0.1
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class AbortNotice:
    """Why a rank gave up.

    Args:
        cause: The reason, as far as it knew.
        waits_for: The vertex it waited for, or -1.
        since_s: How long it had been doing what it did, seconds.
        doing: What that was; "": it was in no collective.
        goodbye: It left in good order.
    """

    cause: LinkFailure
    waits_for: int = NOBODY
    since_s: float = 0.0
    doing: str = ""
    goodbye: bool = False


class AbortChannel:
    """One rank's ear for the last words of all others, and its mouth.

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
            with contextlib.suppress(RuntimeError):  # dead already: it says nothing, and is found broken when needed
                self._pending.append(group.recv([torch.from_numpy(place)], peer, _TAG))

    def tell(self, word: AbortNotice) -> None:
        """Send a word to every peer that can be reached; a rank says only one."""
        message = torch.from_numpy(_packed(word))
        told = []
        for peer in self._places:
            with contextlib.suppress(RuntimeError):
                told.append(self._group.send([message], peer, _TAG))
        for work in told:
            with contextlib.suppress(RuntimeError):
                work.wait(_SENT)

    def reaches(self, peer: int) -> bool:
        """Tell whether the connection for words to a peer stands, as far as is known; see `connections.stands`."""
        return stands(self._group, peer)

    def of(self, peer: int, grace_s: float = 0.0) -> AbortNotice | None:
        """Return what a peer said, waiting a moment for it; None: nothing."""
        return self._look(lambda: self._read(peer), grace_s)

    def first(self, grace_s: float = 0.0) -> AbortNotice | None:
        """Return what somebody that gave up said, waiting a moment for it; knowledge goes before guesses."""
        return self._look(self._any, grace_s)

    def silent(self, grace_s: float) -> list[int]:
        """Return the peers that have said nothing when the time is over, ascending."""
        self._look(lambda: all(self._read(peer) for peer in self._places), grace_s)
        return [peer for peer in self._places if self._read(peer) is None]

    def all(self) -> dict[int, AbortNotice]:
        """Return what everybody has said that has said something."""
        return {peer: word for peer in self._places if (word := self._read(peer)) is not None}

    def _look(self, look: Callable[[], _Found], grace_s: float) -> _Found:
        deadline = time.monotonic() + grace_s
        while not (found := look()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return found

    def _any(self) -> AbortNotice | None:
        given_up = [word for word in self.all().values() if not word.goodbye]
        return min(given_up, key=lambda word: word.cause.kind == "late", default=None)

    def _read(self, peer: int) -> AbortNotice | None:
        place = self._places[peer]
        return _unpacked(place) if place[-1] else None


class AbortListener:
    """A thread that tells, once, that somebody has given up.

    Args:
        words: Where to look.
        tell: Called with the cause. Its object is not kept alive.
        attend: Called whenever nobody has given up. Nor is this.
        name: Of the thread.
    """

    def __init__(
        self, words: AbortChannel, tell: Callable[[LinkFailure], object], attend: Callable[[], object], name: str
    ) -> None:
        self._over = threading.Event()
        ears = weakref.WeakMethod(tell), weakref.WeakMethod(attend)
        self._thread = threading.Thread(target=_listen, args=(words, self._over, *ears), name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)


def _listen(
    words: AbortChannel,
    over: threading.Event,
    tell: weakref.WeakMethod[Callable[[LinkFailure], object]],
    attend: weakref.WeakMethod[Callable[[], object]],
) -> None:
    while not over.wait(_LISTEN_S) and (listener := tell()) is not None:
        if (word := words.first()) is not None:
            listener(word.cause)
            return
        if (attends := attend()) is not None:
            attends()
        del listener, attends


def find_late(words: AbortChannel, me: int, own: AbortNotice, grace_s: float) -> LinkFailure:
    """Return who kept everybody waiting, when this vertex's deadline has passed or somebody said that theirs has.

    Args:
        words: What the others say.
        me: This vertex.
        own: What it said itself.
        grace_s: How long one that says nothing may take to say something, seconds.
    """
    at = own.waits_for if own.waits_for != NOBODY else own.cause.vertex
    if at == NOBODY:
        absent = words.silent(grace_s)
        everybody = {me: own, **words.all()}
        absent += [vertex for vertex, word in everybody.items() if not word.doing]
        return LinkFailure("late", min(absent)) if absent else _last_to_come(everybody, own)
    chain = {me: own} if own.doing else {}
    while at not in chain:
        word = words.of(at, grace_s) if at != me else own
        if word is None or not word.doing:
            return LinkFailure("late", at)
        if word.cause.kind != "late":
            return word.cause
        chain[at] = word
        at = word.waits_for if word.waits_for != NOBODY else word.cause.vertex
        if at == NOBODY:
            return word.cause
    return _last_to_come(chain, own)


def _last_to_come(all_wait: dict[int, AbortNotice], own: AbortNotice) -> LinkFailure:
    """They wait for each other: do different things, or one came late, or the network holds their messages back."""
    if len({word.doing for word in all_wait.values()}) > 1:
        return LinkFailure("disagreed", own.waits_for)
    last = min(all_wait, key=lambda vertex: all_wait[vertex].since_s)
    if all_wait[last].since_s < max(word.since_s for word in all_wait.values()) / 2:
        return LinkFailure("late", last)
    return LinkFailure("late", own.waits_for)


def tell_apart(words: AbortChannel, me: int, own: AbortNotice, cause: LinkFailure, grace_s: float) -> LinkFailure:
    """Return who did something else than most, and what everybody did, after somebody found that not all did the same.

    Args:
        words: What the others say.
        me: This vertex.
        own: What it said itself.
        cause: What is known so far.
        grace_s: How long one that says nothing may take to say something, seconds.
    """
    words.silent(grace_s)
    sides: dict[str, list[int]] = {}
    for vertex, word in sorted({me: own, **words.all()}.items()):
        if word.doing:
            sides.setdefault(word.doing, []).append(vertex)
    if len(sides) < 2:
        return cause
    most = max(sides.values(), key=len)  # the first of equals: that of the lowest rank
    other = min(ranks[0] for ranks in sides.values() if ranks is not most)
    return LinkFailure(
        "disagreed", other, "; ".join(f"{name_ranks(ranks)} called {what}" for what, ranks in sides.items())
    )


def _packed(word: AbortNotice) -> Bytes:
    message = np.zeros(_BYTES, dtype=np.uint8)
    doing, detail = (_cut(text) for text in (word.doing, word.cause.detail))
    kind = _KINDS.index(word.cause.kind)
    _HEAD.pack_into(
        message.data, 0, kind, word.cause.vertex, word.waits_for, word.goodbye, word.since_s, len(doing), len(detail)
    )
    text = np.frombuffer(doing + detail, dtype=np.uint8)
    message[_HEAD.size : _HEAD.size + len(text)] = text
    message[-1] = 1  # arrives last: the word is complete
    return message


def _unpacked(message: Bytes) -> AbortNotice:
    kind, vertex, waits_for, goodbye, since_s, doing, detail = _HEAD.unpack_from(message.data)
    text = message[_HEAD.size : _HEAD.size + doing + detail].tobytes()
    cause = LinkFailure(cast(Kind, _KINDS[kind]), vertex, text[doing:].decode(errors="replace"))
    return AbortNotice(cause, waits_for, since_s, text[:doing].decode(errors="replace"), goodbye)


def _cut(text: str) -> bytes:
    return text.encode()[:_TEXT]
