"""Ranks that are not there: which of them do not come any more, and whether one is left alone with a doubt."""

from __future__ import annotations

from msgspec.structs import replace

from ringside.errors import MismatchError
from ringside.survive.cluster.peers import PeerPlace, comes_again, own_place
from ringside.survive.cluster.rendezvous import Rendezvous
from ringside.survive.protocol.generation import Generation
from ringside.text import name_ranks


def is_gone(rendezvous: Rendezvous, incarnation: int, rank: int) -> bool:
    """Tell whether a rank has no process any more and gets none, as far as this host can know."""
    machine = own_place().machine
    refused, place = _refused_and_newest(rendezvous, incarnation, rank)
    if place is None or refused is None:
        return refused is not None or (place is not None and not comes_again(place, machine))
    if _is_same_process(refused, place):
        return True
    # The rank's own process is dead, and the next one of its keeper was refused: so would be the one after.
    stranger = refused.keeper == place.keeper and not comes_again(replace(place, keeper=(0, 0)), machine)
    return stranger or not comes_again(place, machine)


def refuse_to_be_left_alone(rendezvous: Rendezvous, record: Generation, own_rank: int) -> None:
    """Raise `MismatchError` where all the other ranks were refused and none had been trained with, so that of two that
    differ nobody knows which one is right.

    Those that had been, and came back as others, are no reason to end what they were refused for.
    """
    if len(record.members) != 1:
        return
    others = [rank for rank in range(rendezvous.ranks) if rank != own_rank]
    for rank in others:
        refused, place = _refused_and_newest(rendezvous, record.incarnation, rank)
        # Refused before it took part, or for what it drew when it did: it was never known to be right.
        if refused is None or (place is not None and not _is_same_process(refused, place)):
            return
    if others:
        raise MismatchError(
            f"rank {own_rank} is the only one left, every other one was refused ({name_ranks(others)}): "
            "nobody can tell which of them is right. Their logs say what differs: make them alike, and start the "
            "job again"
        )


def _refused_and_newest(
    rendezvous: Rendezvous, incarnation: int, rank: int
) -> tuple[PeerPlace | None, PeerPlace | None]:
    """Return where a process of a rank ran that was refused, and where the rank's newest member runs; None: none."""
    seat = rendezvous.newest(incarnation, rank)
    return rendezvous.refused(rank), None if seat is None else rendezvous.place(incarnation, seat)


def _is_same_process(a: PeerPlace, b: PeerPlace) -> bool:
    return (a.machine, a.pid, a.started) == (b.machine, b.pid, b.started)


__all__ = ["is_gone", "refuse_to_be_left_alone"]
