"""Messages over several connections in turn: what one connection cannot hold of a long link, several can. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from ringside.engine.transports.base import Bytes, Kept, Links, Pending


class StripedLinks:
    """One order of messages whose messages take connections in turn.

    Both ends of a link count its messages alike, so they agree on the connection of each without a word: a message
    stays whole, and whoever waits for messages in order needs nothing to put them in order.

    Args:
        connections: Links to the same vertices, by connection.
        before: What carried these messages until now; None: this is new.
        posted: By peer, for how many messages a receive was posted before: these still go as those before them did.
    """

    def __init__(
        self, connections: Sequence[Links], before: Links | None = None, posted: Mapping[int, int] | None = None
    ) -> None:
        self._connections, self._before, self._posted = connections, before, posted or {}
        self._sends: dict[int, Iterator[Links]] = {}
        self._receives: dict[int, Iterator[Links]] = {}

    def keep(self, data: Bytes) -> Kept:
        """Return what `send` and `receive` take in place of `data`; see `Links`."""
        return self._connections[0].keep(data)

    def send(self, peer: int, data: Bytes | Kept) -> Pending:
        """Start sending; see `Links`."""
        turns = self._sends.get(peer)
        if turns is None:
            before = itertools.repeat(self._before, self._posted.get(peer, 0)) if self._before is not None else ()
            turns = self._sends[peer] = itertools.chain(before, itertools.cycle(self._connections))
        return next(turns).send(peer, data)

    def receive(self, peer: int, into: Bytes | Kept) -> Pending:
        """Start receiving; see `Links`."""
        turns = self._receives.get(peer)
        if turns is None:
            turns = self._receives[peer] = itertools.cycle(self._connections)
        return next(turns).receive(peer, into)
