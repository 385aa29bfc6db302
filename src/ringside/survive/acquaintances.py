"""The other workers of a job as processes, each looked up once."""

from __future__ import annotations

from collections.abc import Callable

from ringside.errors import RingsideError
from ringside.survive.decision import Seat
from ringside.survive.meeting import Meeting
from ringside.survive.peers import Peer, own_place


class Acquaintances:
    """Whom this worker knows.

    Args:
        meeting: Where workers say where they run.
        silent_s: Tells for how long one that is elsewhere has not given a sign of life, seconds.
    """

    def __init__(self, meeting: Meeting, silent_s: Callable[[Seat], float]) -> None:
        self._meeting, self._silent_s = meeting, silent_s
        self._machine = own_place().machine
        self._peers: dict[Seat, Peer] = {}

    def peer(self, seat: Seat, incarnation: int) -> Peer:
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

    def bury(self, seat: Seat, incarnation: int) -> None:
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


__all__ = ["Acquaintances"]
