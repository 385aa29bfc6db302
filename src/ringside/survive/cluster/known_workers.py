"""The other workers of a job as processes: each looked up once, and which ranks do not come any more."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace

from ringside.errors import MismatchError, RingsideError
from ringside.survive.cluster.peers import BEATS_S, Peer, PeerPlace, comes_again, own_place
from ringside.survive.cluster.rendezvous import Rendezvous
from ringside.survive.protocol.decision import MemberId
from ringside.survive.protocol.generation import Generation
from ringside.text import name_ranks

_SIGN_S = 0.02


class KnownWorkers:
    """The workers of an incarnation as this one knows them.

    Args:
        rendezvous: Where workers publish where they run.
        incarnation: Which.
        silent_s: Returns for how long a worker of another host has given no sign of life, seconds.
    """

    def __init__(self, rendezvous: Rendezvous, incarnation: int, silent_s: Callable[[MemberId], float]) -> None:
        self._rendezvous, self._incarnation, self._silent_s = rendezvous, incarnation, silent_s
        self._machine = own_place().machine
        self._peers: dict[MemberId, Peer] = {}

    def claim(self, rank: int, place: PeerPlace) -> MemberId:
        """Return the id that this process has claimed: its rank, with an epoch that no process had before.

        Args:
            rank: Of which rank.
            place: Where it runs.

        Raises:
            MismatchError: Another living process is the same rank of this job.
        """
        rendezvous, incarnation = self._rendezvous, self._incarnation
        seat = rendezvous.claim(incarnation, rank, place)
        earlier = {MemberId(rank, epoch) for epoch in range(1, seat.epoch)}
        others = {other: peer for other in earlier if not (peer := self.peer(other)).is_this_process}
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

    def peer(self, seat: MemberId) -> Peer:
        """Return a worker.

        Raises:
            RingsideError: It never reported where it runs.
        """
        if seat not in self._peers:
            place = self._rendezvous.place(self._incarnation, seat)
            if place is None:
                raise RingsideError(f"{seat} never reported where it runs: is the store shared by two jobs?")
            self._peers[seat] = Peer(place, self._machine, lambda: self._silent_s(seat))
        return self._peers[seat]

    def ensure_dead(self, seat: MemberId) -> None:
        """Make sure that a worker of this host that was left out is dead.

        Raises:
            RingsideError: It does not die.
        """
        peer = self.peer(seat)
        if not peer.is_this_process and peer.here and not peer.put_to_death():
            raise RingsideError(f"{seat} was suspected and does not die (process {peer.place.pid}): end it by hand")

    def is_gone(self, rank: int) -> bool:
        """Tell whether a rank has no process any more and gets none, as far as this host can know."""
        refused, place = self._refused_and_newest(rank)
        if place is None or refused is None:
            return refused is not None or (place is not None and not comes_again(place, self._machine))
        if _is_same_process(refused, place):
            return True
        # The rank's own process is dead, and the next one of its keeper was refused: so would be the one after.
        alone = replace(place, keeper=(0, 0))
        stranger = refused.keeper == place.keeper and not comes_again(alone, self._machine)
        return stranger or not comes_again(place, self._machine)

    def refuse_to_be_left_alone(self, record: Generation, own_rank: int) -> None:
        """Raise `MismatchError` where all the other ranks were refused and none had been trained with, so that of two
        that differ nobody knows which one is right.

        Those that had been, and came back as others, are no reason to end what they were refused for.
        """
        if len(record.members) != 1:
            return
        others = [rank for rank in range(self._rendezvous.ranks) if rank != own_rank]
        for rank in others:
            refused, place = self._refused_and_newest(rank)
            # Refused before it took part, or for what it drew when it did: it was never known to be right.
            if refused is None or (place is not None and not _is_same_process(refused, place)):
                return
        if others:
            raise MismatchError(
                f"rank {own_rank} is the only one left, every other one was refused ({name_ranks(others)}): "
                "which of them is right is unknown. Their logs show what differs: make them alike, and start the "
                "job again"
            )

    def close(self) -> None:
        """Close the handles of all processes."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    def _refused_and_newest(self, rank: int) -> tuple[PeerPlace | None, PeerPlace | None]:
        """Return where a process of a rank ran that was refused, and where its newest member runs; None: none."""
        seat = self._rendezvous.newest(self._incarnation, rank)
        place = None if seat is None else self._rendezvous.place(self._incarnation, seat)
        return self._rendezvous.refused(rank), place


def _is_same_process(a: PeerPlace, b: PeerPlace) -> bool:
    return (a.machine, a.pid, a.started) == (b.machine, b.pid, b.started)
