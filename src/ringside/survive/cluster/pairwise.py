"""A transport between neighbours only: a group of two for every link that is used.

A Gloo group connects every member with every other, so it cannot be made where one link is broken, and when it fails
its members hear that somebody is lost, not which link was. A group of two stands for its link: it can be made wherever
that link carries, and when it fails it is that link which failed, or the peer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ringside.engine.transports.base import NOBODY, Bytes, Kept, LinkError, LinkFailure, Pending, Transport

OpenTransport = Callable[[str, int, int, Callable[[], bool]], Transport]
"""(a name that only this group uses, own number, how many, whether it is still wanted) → the group's transport.

It waits for all to come while it is wanted; then they are connected in a few seconds, or `RuntimeError` is raised.
"""


class PairwiseTransport:
    """One vertex's links to its neighbours.

    Args:
        open_pair: Makes a group of two.
        name: A name that only these links use.
        rank: This vertex.
        size: Number of vertices.
        links: Its links as (lower, higher), in an order in which all vertices can open theirs.
        wanted: Tells whether they are still wanted.

    Raises:
        LinkError: A link could not be made; its cause names the vertex at the other end.
    """

    def __init__(
        self,
        open_pair: OpenTransport,
        name: str,
        rank: int,
        size: int,
        links: Sequence[tuple[int, int]],
        wanted: Callable[[], bool],
    ) -> None:
        self.rank, self.size = rank, size
        self.doing: object = ""
        self.waits_inside: Callable[[], int] = lambda: NOBODY
        self.on_failure: Callable[[], object] = int
        self._pairs: dict[int, Transport] = {}
        for low, high in links:
            peer = high if rank == low else low
            self._pairs[peer] = self._opened(open_pair, f"{name}/{low}-{high}", peer, wanted)

    def keep(self, data: Bytes) -> Kept:
        """Return what `send` and `receive` take in place of `data`; see `Transport`."""
        return next(iter(self._pairs.values())).keep(data)

    def send(self, peer: int, data: Bytes | Kept) -> Pending:
        """Start sending to a neighbour; see `Transport`."""
        return _Message(self, peer, self._on(peer, lambda pair, number: pair.send(number, data)))

    def receive(self, peer: int, into: Bytes | Kept) -> Pending:
        """Start receiving from a neighbour; see `Transport`."""
        return _Message(self, peer, self._on(peer, lambda pair, number: pair.receive(number, into)))

    def fail(self, cause: LinkFailure) -> LinkFailure:
        """Tell the neighbours that this vertex leaves, and end all that is under way; return the cause."""
        for peer, pair in self._pairs.items():
            pair.fail(LinkFailure("left", int(self.rank > peer)))
            pair.close(patience_s=0.0)  # its thread ends here, not with the interpreter, which would abort
        return cause

    def close(self, *, patience_s: float = 5.0) -> None:
        """Leave; see `Transport`."""
        for pair in self._pairs.values():
            pair.close(patience_s=patience_s)

    def describe(self) -> dict[str, Any]:
        """Return its name."""
        return {"transport": "pairs of neighbours"}

    def _opened(self, open_pair: OpenTransport, name: str, peer: int, wanted: Callable[[], bool]) -> Transport:
        try:
            return open_pair(name, int(self.rank > peer), 2, wanted)
        except (LinkError, RuntimeError) as error:
            self.fail(LinkFailure("lost", peer))
            raise LinkError(LinkFailure("lost", peer), str(error).partition("\n")[0]) from None

    def _on(self, peer: int, act: Callable[[Transport, int], Pending]) -> Pending:
        try:
            return act(self._pairs[peer], int(peer > self.rank))
        except LinkError as error:
            raise self.blamed(peer, error) from None

    def blamed(self, peer: int, error: LinkError) -> LinkError:
        """Return a pair's error in the numbers of all: it is always about the vertex at the other end."""
        return LinkError(LinkFailure(error.cause.kind, peer, error.cause.detail), error.detail)


@dataclass(frozen=True, slots=True)
class _Message:
    neighbours: PairwiseTransport
    peer: int
    pending: Pending

    def wait(self) -> None:
        """Wait for it; see `Pending`."""
        try:
            self.pending.wait()
        except LinkError as error:
            raise self.neighbours.blamed(self.peer, error) from None


__all__ = ["OpenTransport", "PairwiseTransport"]
