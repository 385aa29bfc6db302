"""Links between workers of different hosts, each a group of two: a transport of them, and knocking before one joins.

A Gloo group connects every member with every other, so it cannot be made where one link is broken, and when it fails
its members hear that somebody is lost, not which link was. A group of two stands for its link: it can be made wherever
that link carries, and when it fails it is that link which failed, or the peer.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ringside.engine.runtime.worker import Work, Worker
from ringside.engine.transports.base import Bytes, Kept, LinkError, LinkFailure, Pending, Transport
from ringside.survive.cluster.rendezvous import Knock, Rendezvous
from ringside.survive.protocol.decision import MemberId
from ringside.text import name_ranks

OpenTransport = Callable[[str, int, Callable[[], bool]], Transport]
"""(a name that only this group of two uses, own number in it, whether it is still wanted) → the group's transport.

It waits for the other to come while it is wanted; then they are connected in a few seconds, or `RuntimeError` is
raised.
"""


class PairwiseTransport:
    """One vertex's links to its neighbours: of a `Transport` as much as an exchange needs.

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
        self._pairs: dict[int, Transport] = {}
        for low, high in links:
            peer = high if rank == low else low
            try:
                self._pairs[peer] = open_pair(f"{name}/{low}-{high}", int(rank > peer), wanted)
            except (LinkError, RuntimeError) as error:
                self.fail(LinkFailure("lost", peer))
                raise LinkError(LinkFailure("lost", peer), str(error).partition("\n")[0]) from None

    def keep(self, data: Bytes) -> Kept:
        """Return what `send` and `receive` take in place of `data`; see `Transport`."""
        return next(iter(self._pairs.values())).keep(data)

    def send(self, peer: int, data: Bytes | Kept) -> Pending:
        """Start sending to a neighbour; see `Transport`."""
        with _naming(peer):
            pending = self._pairs[peer].send(int(peer > self.rank), data)
        return _Message(peer, pending)

    def receive(self, peer: int, into: Bytes | Kept) -> Pending:
        """Start receiving from a neighbour; see `Transport`."""
        with _naming(peer):
            pending = self._pairs[peer].receive(int(peer > self.rank), into)
        return _Message(peer, pending)

    def fail(self, cause: LinkFailure) -> LinkFailure:
        """Tell the neighbours that this vertex leaves, and end all that is under way; return the cause."""
        for peer, pair in self._pairs.items():
            pair.fail(LinkFailure("left", int(self.rank > peer)))
            pair.close(patience_s=0.0)  # its thread ends here, not with the interpreter, which would abort
        return cause


@dataclass(frozen=True, slots=True)
class _Message:
    peer: int
    pending: Pending

    def wait(self) -> None:
        """Wait for it; see `Pending`."""
        with _naming(self.peer):
            self.pending.wait()


@contextlib.contextmanager
def _naming(peer: int) -> Iterator[None]:
    """Within it a pair's error names the vertex at its other end, which it is always about, by its number among all."""
    try:
        yield
    except LinkError as error:
        raise LinkError(LinkFailure(error.cause.kind, peer, error.cause.detail), error.detail) from None


FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0
PATIENCE_S = 5.0
"""How long one end waits for the other to come, seconds."""
_CLOSE_S = 1.0
_ANSWERED, _KNOCKED = 0, 1

_log = logging.getLogger(__name__)


# -------------------------------------------------------------------------------------------------
# Before a process asks to be a member it knocks: whoever cannot be reached would keep the others from every step.
#
# It opens a connection to a member, which answers on a thread beside its training; if none comes about, to the next.
# If nobody can be reached, the process says so in one line and knocks again later, each time after twice as long, and
# the members lose nothing by it.


class Reachability:
    """Knocks at members, one after the other, until one of them answers; and answers those who knock at this process.

    Args:
        seat: Who knocks, and answers.
        incarnation: In which incarnation.
        rendezvous: Where it is said that it knocks.
        open_transport: Makes a group of two; None: there is one host, and everybody is reached.
        clock: Seconds.

    Attributes:
        unreached: The members that it got no connection to.
    """

    def __init__(
        self,
        seat: MemberId,
        incarnation: int,
        rendezvous: Rendezvous,
        open_transport: OpenTransport | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seat, self._incarnation, self._rendezvous = seat, incarnation, rendezvous
        self._open, self._clock = open_transport, clock
        self._threads: set[Worker] = set()
        self._under_way: Work | None = None
        self._number = 0
        self._begin_anew(())

    def may_ask(self, members: Sequence[MemberId]) -> bool:
        """Tell whether one of some members can be reached; knock, if that is not known. It is not waited for."""
        if self._open is None:
            return True
        if tuple(members) != self._members:
            self._begin_anew(tuple(members))
        if self._under_way is not None and self._under_way.is_completed():
            self._finish_knock(self._under_way)
        if not self._reached_one and self._under_way is None and self._clock() >= self._not_before:
            # Knock at the next one: a message for it, and one end of a connection, which it opens the other end of.
            member = self._members[self._tried % len(self._members)]
            self._number += 1
            knock = Knock(self._seat, self._number)
            self._rendezvous.send(self._incarnation, member, knock)
            self._under_way = self._open_and_close(self._open, knock_name(self._incarnation, knock, member), _KNOCKED)
        return self._reached_one

    def answer(self, knock: Knock) -> None:
        """Open the connection that a process asks for; it is not waited for."""
        if self._open is not None:
            self._open_and_close(self._open, knock_name(self._incarnation, knock, self._seat), _ANSWERED)

    def close(self) -> None:
        """Wait a moment for knocks that are under way."""
        for thread in list(self._threads):
            thread.join(_CLOSE_S)

    def _begin_anew(self, members: tuple[MemberId, ...]) -> None:
        """Begin anew: others are there now."""
        self._members, self._reached_one, self._under_way, self._tried = members, False, None, 0
        self._pause_s, self._not_before = FIRST_PAUSE_S, 0.0
        self.unreached: set[MemberId] = set()

    def _finish_knock(self, work: Work) -> None:
        member = self._members[self._tried % len(self._members)]
        self._under_way, self._reached_one = None, work.exception() is None
        if self._reached_one:
            self.unreached.discard(member)
            return
        self.unreached.add(member)
        self._tried += 1
        # All were tried in vain: pause, each time for twice as long.
        if self._tried % len(self._members) == 0:
            whom = name_ranks(seat.rank for seat in self._members)
            _log.warning(
                "rank %d gets no connection to %s: it asks to join again in %g s", self._seat.rank, whom, self._pause_s
            )
            self._not_before = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _open_and_close(self, open_transport: OpenTransport, name: str, end: int) -> Work:
        """Return the work of a thread of its own, which opens a connection and closes it again."""
        until = time.monotonic() + PATIENCE_S
        thread = Worker("ringside-survive-knock")
        work = thread.submit(lambda: open_transport(name, end, lambda: time.monotonic() < until).close())
        thread.stop(timeout_s=0.0)  # when that is done
        # In place: who knocks and who answers are two threads.
        self._threads.difference_update([other for other in list(self._threads) if other.idle])
        self._threads.add(thread)
        return work


def knock_name(incarnation: int, knock: Knock, member: MemberId) -> str:
    """Return what a knock's connection is called: no two have one name."""
    seat = knock.seat
    return f"{incarnation}/knock/{seat.rank}.{seat.epoch}/{member.rank}.{member.epoch}/{knock.number}"
