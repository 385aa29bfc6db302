"""An all-reduce in the simulation: one rank's walk through a schedule, every chunk in two messages.

It keeps the schedule's contract to the letter (`ringside.schedule.schedule`): a transfer carries what its chunk held
when the round began, and a rank ends a round when everything of the round has arrived.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ringside.schedule import by_name, chunk_bounds
from ringside.schedule.schedule import Transfer
from ringside.survive.protocol.decision import Tag

SEGMENTS = 2  # messages per chunk, so that a fault can strike between them


class Part(NamedTuple):
    """A message: half a chunk.

    Args:
        tag: The attempt it belongs to.
        src: Sending rank.
        dst: Receiving rank.
        bucket: Part of the gradient.
        round: Round of the schedule.
        chunk: Chunk of the bucket.
        segment: Which half.
        values: What it carries.
    """

    tag: Tag
    src: int
    dst: int
    bucket: int
    round: int
    chunk: int
    segment: int
    values: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def rounds_of(algorithm: str, ranks: int) -> tuple[tuple[Transfer, ...], ...]:
    """Return the transfers of every round of an algorithm's schedule."""
    schedule = by_name(algorithm, ranks)
    return tuple(tuple(schedule.round(k)) for k in range(schedule.rounds))


def ring_order(ranks: Sequence[int], broken: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """Return the ranks in an order in which no two neighbours' link is broken; (): there is none."""
    bad = {frozenset(link) for link in broken}
    for order in itertools.permutations(ranks):
        if not any(frozenset(pair) in bad for pair in zip(order, (*order[1:], order[0]), strict=True)):
            return order
    return ()


class Exchange:
    """One rank's part in one attempt.

    Args:
        tag: The attempt.
        order: The ranks in the order of the ring.
        rank: This one.
        buckets: Its own sums, which are reduced in place.
        algorithm: Whose schedule is walked.
    """

    def __init__(
        self, tag: Tag, order: Sequence[int], rank: int, buckets: list[list[int]], algorithm: str = "ring"
    ) -> None:
        self.tag, self.order, self.rank, self.buckets = tag, tuple(order), rank, buckets
        self.rounds_done = [0] * len(buckets)
        self._vertex = self.order.index(rank)
        self._rounds = rounds_of(algorithm, len(order))
        self._chunks = by_name(algorithm, len(order)).chunks
        self._came: dict[tuple[int, int, int, int, int], tuple[int, ...]] = {}

    @property
    def done(self) -> bool:
        """Whether all buckets are through all rounds."""
        return all(rounds_done == len(self._rounds) for rounds_done in self.rounds_done)

    @property
    def result(self) -> tuple[int, ...]:
        """The gradient's sum, once done."""
        return tuple(itertools.chain.from_iterable(self.buckets))

    def sends(self, bucket: int) -> list[tuple[Part, ...]]:
        """Return what is sent in the round that a bucket is in, per chunk its messages in order."""
        k = self.rounds_done[bucket]
        if k == len(self._rounds):
            return []
        sent = []
        for src, dst, chunk, _ in self._rounds[k]:
            if src == self._vertex:
                values = self.buckets[bucket][self._bounds(bucket, chunk)]
                middle = len(values) // SEGMENTS
                halves = (tuple(values[:middle]), tuple(values[middle:]))
                to = self.order[dst]
                sent.append(tuple(Part(self.tag, self.rank, to, bucket, k, chunk, s, h) for s, h in enumerate(halves)))
        return sent

    def receive(self, part: Part) -> None:
        """Keep a message until its round."""
        if part.src in self.order:
            self._came[part.bucket, part.round, part.chunk, part.segment, part.src] = part.values

    def advance(self, bucket: int) -> bool:
        """End the bucket's round if all of it has arrived; return whether it did."""
        if self.rounds_done[bucket] == len(self._rounds) or self.missing(bucket) is not None:
            return False
        for src, dst, chunk, reduce in self._rounds[self.rounds_done[bucket]]:
            if dst != self._vertex:
                continue
            came = [value for key in self._keys(bucket, chunk, self.order[src]) for value in self._came[key]]
            where, into = self._bounds(bucket, chunk), self.buckets[bucket]
            # Another length: of an attempt with other chunks, which comes only where tags are not looked at.
            if len(came) == where.stop - where.start:
                into[where] = [a + b for a, b in zip(into[where], came, strict=True)] if reduce else came
        self.rounds_done[bucket] += 1
        return True

    def missing(self, bucket: int) -> int | None:
        """Return a rank from which something of the bucket's round has not come; None: all has."""
        if self.rounds_done[bucket] == len(self._rounds):
            return None
        for src, dst, chunk, _ in self._rounds[self.rounds_done[bucket]]:
            if dst == self._vertex and any(key not in self._came for key in self._keys(bucket, chunk, self.order[src])):
                return self.order[src]
        return None

    def _keys(self, bucket: int, chunk: int, src: int) -> list[tuple[int, int, int, int, int]]:
        return [(bucket, self.rounds_done[bucket], chunk, segment, src) for segment in range(SEGMENTS)]

    def _bounds(self, bucket: int, chunk: int) -> slice:
        bounds = chunk_offsets(len(self.buckets[bucket]), self._chunks)
        return slice(bounds[chunk], bounds[chunk + 1])


@functools.lru_cache(maxsize=64)
def chunk_offsets(elements: int, chunks: int) -> tuple[int, ...]:
    """Return where the chunks of a bucket begin, and its end."""
    return tuple(chunk_bounds(elements, chunks).tolist())


__all__ = ["SEGMENTS", "Exchange", "Part", "ring_order", "rounds_of"]
