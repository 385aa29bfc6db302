"""The way of sums between hosts: a ring that no broken link is part of, or a line where there is no such ring."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ringside.schedule import Schedule, chain, relabel, ring
from ringside.schedule.algorithms.ring import ring_all_gather
from ringside.survive.protocol.decision import MemberId
from ringside.survive.protocol.generation import Generation, Link


@dataclass(frozen=True)
class RingOrder:
    """The members of a generation, by number, in the order in which sums pass by.

    Args:
        order: All of them.
        closed: The last one is joined to the first: a ring.
    """

    order: tuple[int, ...]
    closed: bool

    def links_of(self, vertex: int) -> list[tuple[int, int]]:
        """Return a member's links as (lower, higher), ascending, so that opening them one by one cannot deadlock."""
        joined = itertools.pairwise([*self.order, self.order[0]] if self.closed else self.order)
        return sorted({(min(pair), max(pair)) for pair in joined if vertex in pair and len(set(pair)) == 2})

    def joins(self, ranks: Sequence[int]) -> list[Link]:
        """Return all links that are used, by rank as (lower, higher)."""
        links = {link for vertex in self.order for link in self.links_of(vertex)}
        return [(ranks[low], ranks[high]) for low, high in sorted(links)]

    def all_reduce(self) -> Schedule:
        """Return the all-reduce: in as many parts as there are members around a ring, whole along a line."""
        size = len(self.order)
        return relabel(ring(size) if self.closed else chain(size), self.order)

    def all_gather(self) -> Schedule | None:
        """Return the all-gather; None: along a line there is none, and zeros are added up instead."""
        return relabel(ring_all_gather(len(self.order)), self.order) if self.closed else None


def way_around(generation: Generation) -> RingOrder:
    """Return a way over all members without a broken link; where there is none, the ring in ascending order.

    Depth first, which is quick while few links are broken.
    """
    size, broken = len(generation.members), set(generation.broken)
    ranks = generation.ranks

    def joined(a: int, b: int) -> bool:
        low, high = sorted((ranks[a], ranks[b]))
        return (low, high) not in broken

    def extended(path: Sequence[int], closed: bool) -> RingOrder | None:
        if len(path) == size:
            return RingOrder(tuple(path), closed) if not closed or joined(path[-1], path[0]) else None
        steps = (at for at in range(size) if at not in path and joined(path[-1], at))
        return next((whole for at in steps if (whole := extended([*path, at], closed))), None)

    lines = (line for first in range(size) if (line := extended([first], closed=False)))
    return extended([0], closed=True) or next(lines, None) or RingOrder(tuple(range(size)), closed=True)


def cut_off(generation: Generation) -> tuple[MemberId, ...]:
    """Return who has to go because of broken links; nobody, where there is a way over all members.

    Those go whom the first member that brought state cannot reach over any other members: what a leader has to fetch
    may lie beyond the broken link. If it can reach all, though not on one way that passes by everybody once, then the
    highest rank that misses a link, one without state if there is any.
    """
    broken, ranks = set(generation.broken), generation.ranks
    if broken.isdisjoint(way_around(generation).joins(ranks)):
        return ()
    root = (*generation.holders, *generation.members)[0].rank
    reached, fresh = {root}, [root]
    while fresh:
        at = fresh.pop()
        near = [rank for rank in ranks if rank not in reached and (min(at, rank), max(at, rank)) not in broken]
        reached.update(near)
        fresh += near
    away = tuple(seat for seat in generation.members if seat.rank not in reached)
    missing = {rank for link in broken for rank in link}
    last = max(missing, key=lambda rank: (rank in generation.joining, rank))
    return away or tuple(seat for seat in generation.members if seat.rank == last)


def blamed(generation: Generation, own: MemberId, peer: MemberId) -> tuple[tuple[MemberId, ...], Link]:
    """Return whom to go on without, and the link to go around, where the link to a live peer carries nothing.

    Args:
        generation: Whose sums passed by that link.
        own: Who found out; if it is cut off itself, it leaves it to the others to say so.
        peer: Who is at the other end.
    """
    low, high = sorted((own.rank, peer.rank))
    broken = tuple(sorted({*generation.broken, (low, high)}))
    gone = cut_off(msgspec.structs.replace(generation, broken=broken))
    return () if own in gone else gone, (low, high)


__all__ = ["RingOrder", "blamed", "cut_off", "way_around"]
