"""State changes hands: a member offers it to those who join, and a joiner takes it over, checked by its digest."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Event

import numpy as np
from numpy.typing import NDArray

from ringside.engine.runtime.worker import Work, Worker
from ringside.engine.transports.base import LinkError, LinkFailure, Transport
from ringside.errors import RingsideError
from ringside.survive.cluster.known_workers import KnownWorkers
from ringside.survive.cluster.pairwise import OpenTransport
from ringside.survive.cluster.rendezvous import Offered
from ringside.survive.cluster.shared_memory import Address, read_only
from ringside.survive.cluster.waiting import PeerWait, Superseded
from ringside.survive.job import SurviveJob
from ringside.survive.protocol import events as e
from ringside.survive.protocol import instructions as i
from ringside.survive.protocol.decision import MemberId, Tag
from ringside.survive.protocol.generation import Generation
from ringside.survive.state.state import Given, JobState, take_over

__all__ = ["Handover", "StateSender", "StateServer", "gift_name", "giver_for", "receive"]


# -------------------------------------------------------------------------------------------------
# A state given to a process on another host: over a group of two that only this gift uses.

Bytes = NDArray[np.uint8]
PIECE_BYTES = 1 << 22
MOST_BYTES = 1 << 44
_GIVER, _TAKER = 0, 1


class StateSender:
    """A state on its way, carried by a thread.

    Args:
        open_transport: Makes the group.
        name: The gift's, see `gift_name`.
        memory: The state, uint8 [n]; it must not change.
    """

    def __init__(self, open_transport: OpenTransport, name: str, memory: Bytes) -> None:
        self._thread = Worker("ringside-survive-gift")
        self._transport: Transport | None = None
        self._wanted = True
        self._work = self._thread.submit(lambda: self._give(open_transport, name, memory))

    def close(self) -> None:
        """Give up, if it has not arrived."""
        self._wanted = False
        if self._transport is not None:
            self._transport.fail(LinkFailure("left", _GIVER))
            self._transport.close(patience_s=0.0)
        self._thread.stop(timeout_s=0.0)

    def _give(self, open_transport: OpenTransport, name: str, memory: Bytes) -> None:
        self._transport = open_transport(name, _GIVER, 2, lambda: self._wanted)
        length = np.array([len(memory)], dtype=np.int64).view(np.uint8)
        for piece in (length, *_pieces(memory)):
            self._transport.send(_TAKER, piece).wait()


def receive(open_transport: OpenTransport, name: str, wait: Callable[[Work], object]) -> Bytes:
    """Take a gift and return it, uint8 [n].

    Args:
        open_transport: Makes the group.
        name: The gift's.
        wait: Returns when work is done, or raises to give up.

    Raises:
        RingsideError: It did not arrive.
    """
    thread, opened, over = Worker("ringside-survive-gift"), list[Transport](), Event()
    try:
        work = thread.submit(lambda: _take(open_transport, name, opened, lambda: not over.is_set()))
        wait(work)
        taken: Bytes = work.wait(0)
        return taken
    except (LinkError, RuntimeError) as error:
        raise RingsideError(f"the connection broke ({error})") from None
    finally:
        over.set()
        for transport in opened:
            transport.fail(LinkFailure("left", _TAKER))
            transport.close(patience_s=0.0)
        thread.stop(timeout_s=0.0)


def gift_name(tag: Tag, giver: MemberId, taker: MemberId) -> str:
    """Return what a gift is called: no two have one name."""
    return f"{tag.incarnation}/gift/{tag.generation}/{giver.rank}.{giver.epoch}/{taker.rank}.{taker.epoch}"


def _take(open_transport: OpenTransport, name: str, opened: list[Transport], wanted: Callable[[], bool]) -> Bytes:
    transport = open_transport(name, _TAKER, 2, wanted)
    opened.append(transport)
    length = np.zeros(8, dtype=np.uint8)
    transport.receive(_GIVER, length).wait()
    size = int(length.view(np.int64)[0])
    if not 0 < size < MOST_BYTES:
        raise RingsideError(f"a state of {size} bytes was announced")
    memory = np.empty(size, dtype=np.uint8)
    for piece in _pieces(memory):
        transport.receive(_GIVER, piece).wait()
    return memory


def _pieces(memory: Bytes) -> list[Bytes]:
    bounds = [*range(0, len(memory), PIECE_BYTES), len(memory)]
    return [memory[first:last] for first, last in itertools.pairwise(bounds)]


# -------------------------------------------------------------------------------------------------
# Giving the own state away: a packed copy in sealed memory for who can see it, sent to who cannot.


class StateServer:
    """What one member gives to those who join; it stays as it is until they have it.

    Args:
        state: The state; it is copied when the first one asks.
        tag: Names the generation and the step that the state begins.
        seat: Who gives.
        carry: Makes groups between hosts; None: there is one host.
    """

    def __init__(self, state: JobState, tag: Tag, seat: MemberId, carry: OpenTransport | None) -> None:
        self.tag = tag
        self._seat, self._carry, self._given = seat, carry, Given(state)
        self._gifts: dict[MemberId, StateSender] = {}

    def address_for(self, taker: MemberId, here: bool) -> Address | None:
        """Return where a process finds the state; None: it is being sent.

        Args:
            taker: Who joins.
            here: Whether it is on this host.
        """
        if here or self._carry is None:
            return self._given.address
        if taker not in self._gifts:
            self._gifts[taker] = StateSender(self._carry, gift_name(self.tag, self._seat, taker), self._given.bytes)
        return None

    def close(self) -> None:
        """Let go of the copy, and of what is under way."""
        for gift in self._gifts.values():
            gift.close()
        self._given.close()


Addresses = Mapping[tuple[str, MemberId], Address | None]
"""(tag as a string, who offers) → where the state lies; None: its owner sends it."""

_log = logging.getLogger("ringside")


class Handover:
    """One worker's part in that.

    Args:
        job: Whose state.

    Attributes:
        unreached: Members whose state could not be fetched.
    """

    def __init__(self, job: SurviveJob) -> None:
        self._job = job
        self.unreached: set[MemberId] = set()
        self._giver: StateServer | None = None

    def offer(self, tag: Tag, seat: MemberId, takers: Sequence[MemberId], known: KnownWorkers) -> None:
        """Tell some who join where they find the state; what is given stays as it is until it is taken back.

        Args:
            tag: The attempt that the state begins.
            seat: Who offers.
            takers: Who joins.
            known: Whom this worker knows.
        """
        if self._giver is None or self._giver.tag != tag:
            self.take_back()
            self._giver = StateServer(self._job.state, tag, seat, self._job.open_transport)
        said = e.RankOffered(tag, seat, f"{self._job.state.digest():016x}")
        for taker in takers:
            address = self._giver.address_for(taker, known.peer(taker, tag.incarnation).here)
            self._job.meeting.send(tag.incarnation, taker, Offered(said, address))

    def take_back(self) -> None:
        """End what was offered."""
        if self._giver is not None:
            self._giver.close()
        self._giver = None

    def fetch(
        self, fetch: i.FetchState, seat: MemberId, addresses: Addresses, lookout: PeerWait | None
    ) -> e.Event | None:
        """Take the state over that was offered; return what has become of it, None: it is not wanted any more.

        Args:
            fetch: Which.
            seat: Who takes it.
            addresses: Where states lie, by offer.
            lookout: Waits for the owner meanwhile.
        """
        try:
            given = self._given(fetch, seat, addresses[str(fetch.tag), fetch.source], lookout)
            take_over(self._job.state, given, int(fetch.digest, 16))
        except Superseded:
            return None
        except (RingsideError, KeyError) as error:
            self.unreached.add(fetch.source)
            _log.warning("the state of %s cannot be fetched (%s): it is asked for again", fetch.source, error)
            return e.FetchFailed(fetch.tag)
        return e.StateFetched(fetch.tag, f"{self._job.state.digest():016x}")

    def _given(
        self, fetch: i.FetchState, seat: MemberId, address: Address | None, lookout: PeerWait | None
    ) -> NDArray[np.uint8]:
        """Return the packed state: from the owner's memory, or sent by it."""
        carry = self._job.open_transport
        if address is not None:
            return read_only(address)
        if carry is None or lookout is None:
            raise RingsideError("there is no connection between hosts")

        def wait(work: Work) -> None:
            lookout.wait(lambda: [] if work.is_completed() else [fetch.source])

        return receive(carry, gift_name(fetch.tag, fetch.source, seat), wait)


def giver_for(taker: MemberId, record: Generation, unreached: Collection[MemberId]) -> MemberId:
    """Return who gives a joiner the state: the first that has brought it, or gets it here, and can be reached.

    Args:
        taker: Who joins.
        record: The generation that it joins.
        unreached: The members that it gets no connection to.
    """
    others = (seat for seat in record.members if seat not in record.holders and seat != taker)
    choice = (*record.holders, *others)
    return next((seat for seat in choice if seat not in unreached), choice[0])
