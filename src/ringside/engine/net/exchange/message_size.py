"""How large the messages of a collective are. Pure, and equal on all vertices.

A message costs its two ends a third of a millisecond of processor time together, whatever it carries, so large ones are
cheaper; a ring, in which every vertex hears from one other only, loses nothing by them. Where several flows share a
link and what comes is handed on, it is otherwise: a message waits until all of the one before it has come, and what a
vertex needs next comes beside what it needs later. There messages are a quarter as large, with as many bytes on their
way, unless links are so fast that the processor would be what they wait for; and an eighth where links are known to be
slow (docs/design/0011-orders-and-flows.md).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.exchange.ordering import MOST_EFFORT
from ringside.schedule import Schedule

# -------------------------------------------------------------------------------------------------
# Whether a schedule's rounds are kept apart: nobody sends anything of a round before all earlier ones have come. Pure.
#
# Rounds have no barrier between them, and mostly that is good: off powers of two, in trees and in chains links would
# be idle (`ringside.engine.net.exchange.ordering`). Where every round fills the same links by itself, with one partner
# each, and the next round has other partners, as in halving-doubling and recursive doubling of a power of two, nothing
# is gained by sending beforehand, and much is lost: what comes early shares the receiver's link with what is waited
# for, flows do not share a link fairly, and ranks drift apart.

_LEAST_MESSAGES = 4
"""Per round and busiest link on the average. With fewer the pause between two rounds, a message's way, would show."""
_NO_LONGER = 1.01
"""Rounds one after the other may take that many times what the busiest link carries."""
_MOST_ROUNDS = 64


@functools.lru_cache(maxsize=64)
def rounds_apart(schedule: Schedule, segments: tuple[int, ...]) -> bool:
    """Tell whether rounds are kept apart; the same for all vertices, though nothing would break if it were not.

    Args:
        schedule: A verified one.
        segments: How many messages each chunk has, [chunks].
    """
    if not 1 < schedule.rounds <= _MOST_ROUNDS:
        return False
    messages = np.array(segments)
    carried = np.zeros((2, schedule.vertices))  # messages by direction (out, in) and vertex, in all rounds
    sum_of_rounds = 0.0  # of the busiest link of each round: how long they take one after the other
    pairs: set[frozenset[tuple[int, int]]] = set()
    for k in range(schedule.rounds):
        step = schedule.round(k)
        ends = (step.src, step.dst)
        of_round = np.stack([np.bincount(v, messages[step.chunk], schedule.vertices) for v in ends])
        carried += of_round
        sum_of_rounds += of_round.max(initial=0.0)
        partners = frozenset(zip(*(end.tolist() for end in ends), strict=True))
        if any(len({pair[side] for pair in partners}) < len(partners) for side in (0, 1)):
            return False  # flows share links within a round
        pairs.add(partners)
    if len(pairs) == 1:  # as in a ring: a link has one flow throughout
        return False
    return bool(_LEAST_MESSAGES * schedule.rounds <= sum_of_rounds <= _NO_LONGER * carried.max())


LEAST_ORDERED_BYTES = 1 << 16
"""Of a chunk: smaller ones are a matter of latency, and of few messages."""
_PARTS, _MORE_PARTS = 4, 8  # of a large message; so many on slow links
_PLACES_AHEAD = 8
_MESSAGE_S = 0.5e-3  # on a link that is not faster than messages can be handled
_SLOW_S = 1e-3  # a smaller one takes at least that long on a slow one
_LARGEST_ITEM = max(ITEM_BYTES)


class MessageSize(NamedTuple):
    """How large messages are, and how many of them may be on their way.

    Args:
        segment_bytes: Payload, bytes on the wire: at most, unless it is cut evenly (`messages_of`).
        window: Messages per link whose places are posted ahead, where their order was worked out.
        ahead: Receives of such an order whose messages may be on their way before it is their turn.
        parts: How many of them make a large one.
    """

    segment_bytes: int
    window: int
    ahead: int = _PLACES_AHEAD
    parts: int = 1

    def smaller(self, parts: int = _PARTS) -> MessageSize:
        """Return smaller ones, of which as many bytes are expected ahead.

        Args:
            parts: How many of them make a large one.
        """
        segment = max(self.segment_bytes // parts, _LARGEST_ITEM)
        return MessageSize(segment, self.window * _PARTS, self.ahead * parts, parts)

    def messages_of(self, length: int, most: int) -> int:
        """Return in how many messages a part of a tensor travels that is cut evenly.

        Large ones have up to half as much more, where the next number of them would make each a lot smaller.

        Args:
            length: Of the part, bytes or elements.
            most: As much as a message of this size carries, the same.
        """
        if self.parts > 1:
            return -(-length // most)
        return max((2 * length + most - 1) // (2 * most), min(length, 1))

    @property
    def place_bytes(self) -> int:
        """Of a place that takes any of these, cut evenly or not."""
        return self.segment_bytes + self.segment_bytes // 2

    @property
    def small_place_bytes(self) -> int:
        """Of a place that takes any of the smaller ones, whatever links carry: that may become known meanwhile."""
        return max(self.segment_bytes // _PARTS, _LARGEST_ITEM)

    def places(self, *, ordered: bool) -> int:
        """Return for how many messages of a link there are places, by whether their order was worked out.

        In the rounds' order every sender that is ahead takes a share of the link from the one that is waited for, so
        half as many bytes do better (of the smallest ones, all the places); in an order that was worked out links would
        run dry.
        """
        if ordered or self.parts == 1:
            return self.window
        return min(self.window * self.parts // _MORE_PARTS, self.window)


def size_of(schedule: Schedule, size_bytes: int, large: MessageSize, bytes_per_s: float | None = None) -> MessageSize:
    """Return how large the messages are that a tensor travels in.

    Args:
        schedule: A verified one, which carries it.
        size_bytes: Of the tensor, on the wire.
        large: How large they are where that is best.
        bytes_per_s: What a link carries; None: not known.
    """
    chunk, small = size_bytes // schedule.chunks, large.smaller()
    if chunk <= max(small.segment_bytes, LEAST_ORDERED_BYTES):
        return large
    if bytes_per_s is not None and small.segment_bytes < _MESSAGE_S * bytes_per_s:
        return large
    # Smaller ones are worth their processor time only where flows share links.
    segments = (-(-chunk // large.segment_bytes),) * schedule.chunks
    if schedule.switches or not _flows_share(schedule) or rounds_apart(schedule, segments):
        return large
    least = large.smaller(_MORE_PARTS)
    return least if bytes_per_s is not None and least.segment_bytes >= _SLOW_S * bytes_per_s else small


@functools.lru_cache(maxsize=256)
def _flows_share(schedule: Schedule) -> bool:
    """Tell whether some vertex that hands on what it gets hears from several others, or sends to several."""
    if schedule.rounds <= 2 or schedule.rounds * schedule.vertices > MOST_EFFORT // 16:
        return False
    steps = [schedule.round(k) for k in range(schedule.rounds)]
    links = np.unique(np.concatenate([step.src.astype(np.int64) * schedule.vertices + step.dst for step in steps]))
    ends = links // schedule.vertices, links % schedule.vertices
    return any(bool((np.bincount(end) > 1).any()) for end in ends)
