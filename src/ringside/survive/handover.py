"""State changes hands: a member offers it to those who join, and a joiner takes it over, checked by its digest."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ringside.engine.background import Work
from ringside.errors import RingsideError
from ringside.survive import events as e
from ringside.survive import instructions as i
from ringside.survive.acquaintances import Acquaintances
from ringside.survive.decision import Seat, Tag
from ringside.survive.generation import Generation
from ringside.survive.giving import Giver
from ringside.survive.job import Job
from ringside.survive.meeting import Offered
from ringside.survive.memory import Address, read_only
from ringside.survive.net_state import gift_name, receive
from ringside.survive.state import take_over
from ringside.survive.waiting import Lookout, Superseded

Addresses = Mapping[tuple[str, Seat], Address | None]
"""(tag as a string, who offers) → where the state lies; None: its owner sends it."""

_log = logging.getLogger("ringside")


class Handover:
    """One worker's part in that.

    Args:
        job: Whose state.

    Attributes:
        unreached: Members whose state could not be fetched.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.unreached: set[Seat] = set()
        self._giver: Giver | None = None

    def offer(self, tag: Tag, seat: Seat, takers: Sequence[Seat], known: Acquaintances) -> None:
        """Tell some who join where they find the state; what is given stays as it is until it is taken back.

        Args:
            tag: The attempt that the state begins.
            seat: Who offers.
            takers: Who joins.
            known: Whom this worker knows.
        """
        if self._giver is None or self._giver.tag != tag:
            self.take_back()
            self._giver = Giver(self._job.state, tag, seat, self._job.open_transport)
        said = e.Offer(tag, seat, f"{self._job.state.digest():016x}")
        for taker in takers:
            address = self._giver.address_for(taker, known.peer(taker, tag.incarnation).here)
            self._job.meeting.send(tag.incarnation, taker, Offered(said, address))

    def take_back(self) -> None:
        """End what was offered."""
        if self._giver is not None:
            self._giver.close()
        self._giver = None

    def fetch(self, fetch: i.FetchState, seat: Seat, addresses: Addresses, lookout: Lookout | None) -> e.Event | None:
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
        self, fetch: i.FetchState, seat: Seat, address: Address | None, lookout: Lookout | None
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


def giver_for(taker: Seat, record: Generation, unreached: Collection[Seat]) -> Seat:
    """Return who gives a joiner the state: the first that has brought it, or gets it here, and can be reached.

    Args:
        taker: Who joins.
        record: The generation that it joins.
        unreached: The members that it gets no connection to.
    """
    others = (seat for seat in record.members if seat not in record.holders and seat != taker)
    choice = (*record.holders, *others)
    return next((seat for seat in choice if seat not in unreached), choice[0])


__all__ = ["Handover", "giver_for"]
