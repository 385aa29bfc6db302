"""A worker arrives: it takes its rank's next seat, unless another living process is that rank already."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ringside.errors import MismatchError
from ringside.survive.acquaintances import Acquaintances
from ringside.survive.decision import Seat
from ringside.survive.meeting import Meeting
from ringside.survive.peers import BEATS_S, Place

_SIGN_S = 0.02


def take_seat(meeting: Meeting, known: Acquaintances, incarnation: int, rank: int, place: Place) -> Seat:
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
    earlier = {Seat(rank, epoch) for epoch in range(1, seat.epoch)}
    others = {one: peer for one in earlier if not (peer := known.peer(one, incarnation)).is_this_process}
    alive = [one for one, peer in others.items() if peer.here and not peer.ended()]
    away = [one for one, peer in others.items() if not peer.here]
    for one in alive or _giving_signs(meeting, away, incarnation):
        raise MismatchError(
            f"rank {rank} of this job runs already, as process {others[one].place.pid}: two jobs share one "
            "store and name; give this one another MASTER_PORT or --rdzv-id"
        )
    return seat


def _giving_signs(meeting: Meeting, seats: Sequence[Seat], incarnation: int) -> list[Seat]:
    """Return those of some processes on other hosts that give a new sign of life while it may be awaited."""
    until = time.monotonic() + BEATS_S
    last = {seat: meeting.beat_of(incarnation, seat) for seat in seats}
    while any(last.values()) and time.monotonic() < until:
        if found := [seat for seat in seats if meeting.beat_of(incarnation, seat) != last[seat]]:
            return found
        time.sleep(_SIGN_S)  # signs come through the store, which has nothing to wait on
    return []


__all__ = ["take_seat"]
