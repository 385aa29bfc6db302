"""Compile a schedule into what one vertex sends and receives, for transports that carry messages.

The interpreter (`ringside.engine.net.exchange.run`) walks the rounds in order and waits for messages only where it
uses them. What both ends of a link must agree on is the order of its messages: round by round, in a round segment by
segment, in a segment by the chunks' first appearance among the receiver's. The compiler also works out which receives a
message has to wait for: the last one before it that writes its chunk.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ringside.schedule import Round, Schedule


class Receive(NamedTuple):
    """What arrives for one chunk in one round.

    Args:
        chunk: Where it goes.
        overwrite: It replaces the chunk (one source), instead of being reduced into it.
        sources: Senders, ascending.
    """

    chunk: int
    overwrite: bool
    sources: tuple[int, ...]


class Send(NamedTuple):
    """One chunk on its way to one vertex.

    Args:
        dst: The receiver.
        chunk: What is sent.
        after: Index of the receive that it waits for (in order of all receives of this vertex); -1: none.
        round: Its round.
    """

    dst: int
    chunk: int
    after: int
    round: int


@dataclass(frozen=True, eq=False)
class MessagePlan:
    """One vertex's part of a schedule.

    Args:
        chunks: Parts of the tensor.
        hash: Identifies the schedule; ranks compare it.
        rounds: For every round, what is received, in order of first appearance.
        links: By receiver, what is sent to it, in order.
        sources: Who sends anything to this vertex, ascending.
        whole_folds: Every reduction into a chunk adds up the contributions of all ranks at once.
        dependents: By index of a receive, the receivers to whom something can be sent after it.
        finals: Indices of the receives after which a chunk has its last content here.
        schedule: What it is a part of.
        finished: What is copied at the very end was complete at its sender: the rank that adds up last may divide.
    """

    # Compared by identity (eq=False): plans are cached, and are keys of caches of their own.
    chunks: int
    hash: int
    rounds: tuple[tuple[Receive, ...], ...]
    links: dict[int, tuple[Send, ...]]
    sources: tuple[int, ...]
    whole_folds: bool
    dependents: tuple[tuple[int, ...], ...]
    finals: frozenset[int]
    schedule: Schedule
    finished: bool

    @property
    def switches(self) -> int:
        """Number of switches of the schedule."""
        return self.schedule.switches

    @functools.cached_property
    def outgoing(self) -> dict[int, tuple[tuple[Send, ...], ...]]:
        """By receiver, what is sent to it, round by round."""
        return {
            dst: tuple(tuple(group) for _, group in itertools.groupby(sends, key=lambda send: send.round))
            for dst, sends in self.links.items()
        }

    @functools.cached_property
    def incoming(self) -> tuple[dict[int, tuple[int, ...]], ...]:
        """By round and sender, the chunks that come from it, in order, where there are several."""
        by_round: list[dict[int, tuple[int, ...]]] = []
        for receives in self.rounds:
            chunks: defaultdict[int, list[int]] = defaultdict(list)
            for receive in receives:
                for src in receive.sources:
                    chunks[src].append(receive.chunk)
            by_round.append({src: tuple(several) for src, several in chunks.items() if len(several) > 1})
        return tuple(by_round)

    @functools.cached_property
    def receives(self) -> dict[tuple[int, int], int]:
        """Index of a receive, by (round, chunk)."""
        parts = ((k, receive.chunk) for k, receives in enumerate(self.rounds) for receive in receives)
        return {part: index for index, part in enumerate(parts)}


@functools.lru_cache(maxsize=256)
def plan_messages(schedule: Schedule, vertex: int) -> MessagePlan:
    """Return the part of `vertex` in a verified schedule; the same schedule is compiled only once."""
    rounds: list[tuple[Receive, ...]] = []
    links: dict[int, list[Send]] = defaultdict(list)
    dependents: list[set[int]] = []
    written: dict[int, int] = {}  # by chunk, the last receive so far that writes it
    whole = True
    checksum = zlib.crc32(f"{schedule.name}/{schedule.ranks}/{schedule.chunks}".encode())
    for k in range(schedule.rounds):
        step = schedule.round(k)
        checksum = step.checksum(checksum)
        whole = whole and _folds_all(step, schedule)
        # All of a round is sent from what was there before the round, so the sends come first.
        for dst, chunk in _outgoing(step, vertex):
            after = written.get(chunk, -1)
            links[dst].append(Send(dst, chunk, after, k))
            if after >= 0:
                dependents[after].add(dst)
        receives = tuple(
            Receive(chunk, overwrite, tuple(sorted(sources)))
            for chunk, (overwrite, sources) in step.arriving(vertex).items()
        )
        for receive in receives:
            written[receive.chunk] = len(dependents)
            dependents.append(set())
        rounds.append(receives)
    return MessagePlan(
        chunks=schedule.chunks,
        hash=checksum,
        rounds=tuple(rounds),
        links={dst: tuple(sends) for dst, sends in links.items()},
        sources=tuple(sorted({src for receives in rounds for receive in receives for src in receive.sources})),
        whole_folds=whole,
        dependents=tuple(tuple(sorted(dsts)) for dsts in dependents),
        finals=frozenset(written.values()),
        schedule=schedule,
        finished=_copies_are_final(schedule),
    )


@functools.lru_cache(maxsize=256)
def _copies_are_final(schedule: Schedule) -> bool:
    """Tell whether every copy that a chunk ends with was sent after its sender's own last write of that chunk."""
    last = np.full((schedule.vertices, schedule.chunks), -1)  # round of the last write, by vertex and chunk
    for k in range(schedule.rounds):
        step = schedule.round(k)
        last[step.dst, step.chunk] = k
    for k in range(schedule.rounds):
        copies = schedule.round(k).where(~schedule.round(k).reduce)
        ends = last[copies.dst, copies.chunk] == k
        if (last[copies.src, copies.chunk][ends] >= k).any():
            return False
    return True


def _folds_all(step: Round, schedule: Schedule) -> bool:
    """Tell whether every reduction of a round has all ranks' contributions (a switch's: none of its own)."""
    adds = step.where(step.reduce)
    target, counts = np.unique(adds.dst.astype(np.int64) * schedule.chunks + adds.chunk, return_counts=True)
    everybody = np.where(target // schedule.chunks < schedule.ranks, schedule.ranks - 1, schedule.ranks)
    return bool((counts == everybody).all())


def _outgoing(step: Round, vertex: int) -> list[tuple[int, int]]:
    """Return what a vertex sends in a round, (dst, chunk), per receiver in the order in which that one reads chunks."""
    own = step.src == vertex
    sent = list(zip(step.dst[own].tolist(), step.chunk[own].tolist(), strict=True))
    order: dict[tuple[int, int], int] = {}
    for dst, count in Counter(dst for dst, _ in sent).items():
        if count > 1:
            for place, chunk in enumerate(step.arriving(dst)):
                order[dst, chunk] = place
    return sorted(sent, key=lambda pair: order.get(pair, 0))
