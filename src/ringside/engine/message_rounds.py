"""Whether a schedule's rounds are kept apart: nobody sends anything of a round before all earlier ones have come. Pure.

Rounds have no barrier between them, and mostly that is good: off powers of two, in trees and in chains links would be
idle (`ringside.engine.message_order`). Where every round fills the same links by itself with one partner each, and the
next round has other partners, as in halving-doubling and recursive doubling of a power of two, nothing is gained by
sending beforehand, and much is lost: what comes early shares the receiver's link with what is waited for, flows do not
share a link fairly, and ranks drift apart.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from ringside.schedule import Schedule

_LEAST_MESSAGES = 4
"""Per round and busiest link on the average. With fewer the pause between two rounds, a message's way, would show."""
_NO_LONGER = 1.01
"""Rounds one after the other may take that many times what the busiest link carries."""
_MOST_ROUNDS = 64


def rounds_apart(schedule: Schedule, segments: Sequence[int]) -> bool:
    """Tell whether rounds are kept apart; the same for all vertices, though nothing would break if it were not.

    Args:
        schedule: A verified one.
        segments: How many messages each chunk has, [chunks].
    """
    return _rounds_apart(schedule, tuple(segments))


@functools.lru_cache(maxsize=64)
def _rounds_apart(schedule: Schedule, segments: tuple[int, ...]) -> bool:
    if not 1 < schedule.rounds <= _MOST_ROUNDS:
        return False
    messages = np.array(segments)
    carried = np.zeros((2, schedule.vertices))  # by direction and vertex, in all rounds
    one_by_one = 0.0
    pairs: set[frozenset[tuple[int, int]]] = set()
    for k in range(schedule.rounds):
        step = schedule.round(k)
        ends = (step.src, step.dst)
        here = np.stack([np.bincount(v, messages[step.chunk], schedule.vertices) for v in ends])
        carried += here
        one_by_one += here.max(initial=0.0)
        partners = frozenset(zip(*(end.tolist() for end in ends), strict=True))
        if any(len({pair[side] for pair in partners}) < len(partners) for side in (0, 1)):
            return False  # flows share links within a round
        pairs.add(partners)
    if len(pairs) == 1:  # as in a ring: a link has one flow throughout
        return False
    return bool(_LEAST_MESSAGES * schedule.rounds <= one_by_one <= _NO_LONGER * carried.max())


__all__ = ["rounds_apart"]
