"""Links between two ranks that carry nothing any more, as the model checker sees them.

A link falls silent once and for good: nobody is told, both ends may live and go on, and the registers are reached as
before. What was on its way over it is lost, so of an exchange that all had come to, some members still get their result
and others never will, one end of the link among them; a later one over that link gives nobody a result. Only an end
that waits finds out. An acknowledgement that is sent first goes over the link as well, and so does state.

A link matters only to what is sent over it. So it need not fall silent before somebody is about to.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from ringside.survive.all_reduce.between_hosts import cut_off, way_around
from ringside.survive.protocol.decision import MemberId, Tag
from ringside.survive.protocol.generation import Generation, Link

Waiting = Sequence[tuple[Tag, MemberId, Generation, bool]]
"""Whose exchange is under way: the attempt, who, its generation, and whether all members have come to it."""


class Links(NamedTuple):
    """What has become of the links.

    Args:
        silent: Those that carry nothing, ascending.
        passed: Attempts to which all had come before a link that they use fell silent.
        starved: (attempt, who never gets its result) of those.
    """

    silent: tuple[Link, ...] = ()
    passed: frozenset[Tag] = frozenset()
    starved: frozenset[tuple[Tag, MemberId]] = frozenset()

    def connect(self, a: MemberId, b: MemberId) -> bool:
        """Tell whether there is a connection between two processes."""
        return link_of(a, b) not in self.silent

    def give(self, tag: Tag, seat: MemberId, generation: Generation) -> bool:
        """Tell whether the exchange of an attempt that all have come to ends for a member."""
        if cut_off(generation) if generation.broken else ():
            return False
        whole = not self.silent or used_by(generation).isdisjoint(self.silent)
        return whole or (tag in self.passed and (tag, seat) not in self.starved)

    def fates(self, link: Link, waiting: Waiting) -> Iterator[Links]:
        """Yield what can become of the links when another one falls silent."""
        on_it = [each for each in waiting if link in used_by(each[2])]
        passing = [(tag, seat) for tag, seat, record, all_there in on_it if all_there and self.give(tag, seat, record)]
        tags = sorted({tag for tag, _ in passing})
        silent, passed = tuple(sorted((*self.silent, link))), self.passed.union(tags)
        choices = [_starving([seat for of, seat in passing if of == tag], link) for tag in tags]
        for chosen in itertools.product(*choices):
            lost = {(tag, seat) for tag, seats in zip(tags, chosen, strict=True) for seat in seats}
            yield Links(silent, passed, self.starved | lost)


def link_of(a: MemberId, b: MemberId) -> Link:
    """Return the link between the ranks of two processes."""
    low, high = sorted((a.rank, b.rank))
    return low, high


@cache
def used_by(generation: Generation) -> frozenset[Link]:
    """Return the links that a generation's sums pass by."""
    return frozenset(way_around(generation).joins(generation.ranks))


def _starving(seats: Sequence[MemberId], link: Link) -> list[tuple[MemberId, ...]]:
    """Return who may be left without a result: nobody, or some of them, an end of the link among them."""
    sizes = range(1, len(seats) + 1)
    some = itertools.chain.from_iterable(itertools.combinations(seats, size) for size in sizes)
    return [(), *(chosen for chosen in some if any(seat.rank in link for seat in chosen))]


__all__ = ["Links", "link_of", "used_by"]
