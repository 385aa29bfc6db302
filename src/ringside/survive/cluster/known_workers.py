"""The other workers of a job as processes, each looked up once."""

from __future__ import annotations

import time
from collections.abc import Callable

from ringside.errors import MismatchError, RingsideError
from ringside.survive.cluster.peers import BEATS_S, Peer, PeerMark, PeerPlace, own_place
from ringside.survive.cluster.rendezvous import Rendezvous
from ringside.survive.protocol.decision import MemberId

__all__ = ["KnownWorkers", "claim_member"]


class KnownWorkers:
    """The workers that this one has looked up; as long as it is open, this process is marked as a worker.

    Args:
        rendezvous: Where workers publish where they run.
        silent_s: Returns for how long a worker of another host has given no sign of life, seconds.
    """

    def __init__(self, rendezvous: Rendezvous, silent_s: Callable[[MemberId], float]) -> None:
        self._rendezvous, self._silent_s = rendezvous, silent_s
        self._machine = own_place().machine
        self._mark = PeerMark()
        self._peers: dict[MemberId, Peer] = {}

    def peer(self, seat: MemberId, incarnation: int) -> Peer:
        """Return a worker of an incarnation.

        Raises:
            RingsideError: It never said where it runs.
        """
        if seat not in self._peers:
            place = self._rendezvous.place(incarnation, seat)
            if place is None:
                raise RingsideError(f"{seat} never said where it runs: is the store shared by two jobs?")
            self._peers[seat] = Peer(place, self._machine, lambda: self._silent_s(seat))
        return self._peers[seat]

    def ensure_dead(self, seat: MemberId, incarnation: int) -> None:
        """Make sure that a worker of this host that was left out is dead.

        Raises:
            RingsideError: It does not die.
        """
        peer = self.peer(seat, incarnation)
        if not peer.is_this_process and peer.here and not peer.put_to_death():
            raise RingsideError(f"{seat} was suspected and does not die (process {peer.place.pid}): end it by hand")

    def close_all(self) -> None:
        """Close the handles of all processes."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def close(self) -> None:
        """Close the handles of all processes, and be no worker any more."""
        self.close_all()
        self._mark.close()


# -------------------------------------------------------------------------------------------------
# A worker arrives: it claims its rank's next epoch, unless another living process is that rank already.

_SIGN_S = 0.02


def claim_member(
    rendezvous: Rendezvous, known: KnownWorkers, incarnation: int, rank: int, place: PeerPlace
) -> MemberId:
    """Return the id that this process has claimed: its rank, with an epoch that no process had before.

    Args:
        rendezvous: The job's names in the store.
        known: Whom this worker knows.
        incarnation: In which incarnation.
        rank: Of which rank.
        place: Where it runs.

    Raises:
        MismatchError: Another living process is the same rank of this job.
    """
    seat = rendezvous.claim(incarnation, rank, place)
    earlier = {MemberId(rank, epoch) for epoch in range(1, seat.epoch)}
    others = {other: peer for other in earlier if not (peer := known.peer(other, incarnation)).is_this_process}
    alive = [other for other, peer in others.items() if peer.here and not peer.ended()]

    # Of processes on other hosts nothing is known but their signs of life: one may be awaited for so long.
    away = [] if alive else [other for other, peer in others.items() if not peer.here]
    last, until = {other: rendezvous.beat_of(incarnation, other) for other in away}, time.monotonic() + BEATS_S
    while not alive and any(last.values()) and time.monotonic() < until:
        alive = [other for other in away if rendezvous.beat_of(incarnation, other) != last[other]]
        if not alive:
            time.sleep(_SIGN_S)  # signs come through the store, which has nothing to wait on
    if alive:
        raise MismatchError(
            f"rank {rank} of this job runs already, as process {others[alive[0]].place.pid}: two jobs share one "
            "store and name; give this one another MASTER_PORT or --rdzv-id"
        )
    return seat
