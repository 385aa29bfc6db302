"""The other workers of a job as processes, each looked up once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ringside.errors import MismatchError, RingsideError
from ringside.survive.cluster.peers import BEATS_S, Peer, PeerMark, PeerPlace, own_place
from ringside.survive.cluster.rendezvous import Rendezvous
from ringside.survive.protocol.decision import MemberId

__all__ = ["KnownWorkers", "take_seat"]


class KnownWorkers:
    """Whom this worker knows; as long as it is open, this process shows that it is a worker.

    Args:
        meeting: Where workers say where they run.
        silent_s: Tells for how long one that is elsewhere has not given a sign of life, seconds.
    """

    def __init__(self, meeting: Rendezvous, silent_s: Callable[[MemberId], float]) -> None:
        self._meeting, self._silent_s = meeting, silent_s
        self._machine = own_place().machine
        self._mark = PeerMark()
        self._peers: dict[MemberId, Peer] = {}

    def peer(self, seat: MemberId, incarnation: int) -> Peer:
        """Return a worker of an incarnation.

        Raises:
            RingsideError: It never said where it runs.
        """
        if seat not in self._peers:
            place = self._meeting.place(incarnation, seat)
            if place is None:
                raise RingsideError(f"{seat} never said where it runs: is the store shared by two jobs?")
            self._peers[seat] = Peer(place, self._machine, lambda: self._silent_s(seat))
        return self._peers[seat]

    def bury(self, seat: MemberId, incarnation: int) -> None:
        """Make sure that a worker of this host that was left out is dead.

        Raises:
            RingsideError: It does not die.
        """
        peer = self.peer(seat, incarnation)
        if not peer.is_this_process and peer.here and not peer.put_to_death():
            raise RingsideError(f"{seat} was suspected and does not die (process {peer.place.pid}): end it by hand")

    def forget(self) -> None:
        """Let go of all of them."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def close(self) -> None:
        """Let go of all of them, and be no worker any more."""
        self.forget()
        self._mark.close()


# -------------------------------------------------------------------------------------------------
# A worker arrives: it takes its rank's next seat, unless another living process is that rank already.

_SIGN_S = 0.02


def take_seat(meeting: Rendezvous, known: KnownWorkers, incarnation: int, rank: int, place: PeerPlace) -> MemberId:
    """Return the seat that this process has taken.

    Args:
        meeting: The job's names in the store.
        known: Whom this worker knows.
        incarnation: In which incarnation.
        rank: Of which rank.
        place: Where it runs.

    Raises:
        MismatchError: Another living process is the same rank of this job.
    """
    seat = meeting.claim(incarnation, rank, place)
    earlier = {MemberId(rank, epoch) for epoch in range(1, seat.epoch)}
    others = {one: peer for one in earlier if not (peer := known.peer(one, incarnation)).is_this_process}
    alive = [one for one, peer in others.items() if peer.here and not peer.ended()]
    away = [one for one, peer in others.items() if not peer.here]
    for one in alive or _giving_signs(meeting, away, incarnation):
        raise MismatchError(
            f"rank {rank} of this job runs already, as process {others[one].place.pid}: two jobs share one "
            "store and name; give this one another MASTER_PORT or --rdzv-id"
        )
    return seat


def _giving_signs(meeting: Rendezvous, seats: Sequence[MemberId], incarnation: int) -> list[MemberId]:
    """Return those of some processes on other hosts that give a new sign of life while it may be awaited."""
    until = time.monotonic() + BEATS_S
    last = {seat: meeting.beat_of(incarnation, seat) for seat in seats}
    while any(last.values()) and time.monotonic() < until:
        if found := [seat for seat in seats if meeting.beat_of(incarnation, seat) != last[seat]]:
            return found
        time.sleep(_SIGN_S)  # signs come through the store, which has nothing to wait on
    return []
