"""In which order segments are sent and taken, so that every link stays busy. Pure, and equal on all vertices.

Segments of different rounds need not wait for each other where they carry different parts of the tensor: off powers of
two, in trees and in chains a vertex that took all of one round before any of the next would leave links idle for a
third of the time. So the schedule is played through beforehand: segments of equal length, every vertex sends one and
receives one at a time, and of those that could be sent, the one goes first that a rule prefers (list scheduling: R. L.
Graham, "Bounds for certain multiprocessing anomalies", 1966; one of the rules is the longest chain that follows: T. C.
Hu, "Parallel sequencing and assembly line problems", 1961). There is a play for each of a few rules, and the shortest
counts.

The play keeps to what `ringside.engine.net.exchange.exchange` must keep to: a chunk is written in the order of the
schedule's rounds (so the result does not depend on any of this), a segment is written after its old content has left,
and no more messages are on a link than there are places for. Whatever waits in the play waits for something earlier in
it; a vertex that takes messages in this order therefore never waits in a circle.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ringside.schedule import Schedule

WORTH_IT = 0.9
"""Of the slots that the rounds' order takes: what saves less does not make up for how networks differ from plays."""
_AS_GOOD = 1.2
"""Slots of other rules count that many times: flows that share a link disturb the order by longest chains least."""
MOST_EFFORT = 400_000
"""Slots x links of a play: beyond, the rounds' order is taken. It is a fraction of a second's work."""

Part = tuple[int, int, int]
"""(round, chunk, segment)."""
Rule = Callable[[int, int, int, int], tuple[int, ...]]
"""(round, chunk, segment, messages in the longest chain from here on) -> what goes first is smaller."""


def _by_round(round: int, chunk: int, segment: int, tail: int) -> tuple[int, ...]:
    return round, segment, chunk


def by_tail(round: int, chunk: int, segment: int, tail: int) -> tuple[int, ...]:
    """Prefer what most has to follow: flows that share a link disturb that order least."""
    return segment - tail, round, chunk


def _by_segment(round: int, chunk: int, segment: int, tail: int) -> tuple[int, ...]:
    return segment, round, chunk


RULES: tuple[Rule, ...] = (_by_round, by_tail, _by_segment)
"""There is a play by each; the first is the rounds' order."""


class ReceiveOrder(NamedTuple):
    """One segment of one receive.

    Args:
        part: Its round, chunk and segment.
        places: By sender, ascending: which message of that link it is, counted from 0.
    """

    part: Part
    places: tuple[int, ...]


class MessageOrder(NamedTuple):
    """What one vertex does, in order.

    Args:
        takes: What it receives.
        sends: By receiver, what it sends there.
    """

    takes: tuple[ReceiveOrder, ...]
    sends: dict[int, tuple[Part, ...]]


def order_messages(schedule: Schedule, vertex: int, segments: Sequence[int], window: int) -> MessageOrder | None:
    """Return the order of one vertex's messages; None where it does not pay, or working it out would take too long.

    Args:
        schedule: A verified one.
        vertex: Whose order.
        segments: How many segments each chunk has, [chunks].
        window: How many messages a link holds that were sent and not yet taken.
    """
    orders = _orders(schedule, tuple(segments), window)
    return None if orders is None else orders[vertex]


def slots_of(schedule: Schedule, segments: Sequence[int], window: int) -> int | None:
    """Return how many slots a play takes in the order that is used; None where none is worked out.

    A slot is the time of a segment: in each, every vertex sends one and receives one at most. Arguments as for
    `order_messages`.
    """
    played = find_order(schedule, tuple(segments), window)
    return None if played is None else played[1]


def _orders(schedule: Schedule, segments: tuple[int, ...], window: int) -> tuple[MessageOrder, ...] | None:
    played = find_order(schedule, segments, window)
    return None if played is None else played[0]


@functools.lru_cache(maxsize=64)
def find_order(
    schedule: Schedule, segments: tuple[int, ...], window: int
) -> tuple[tuple[MessageOrder, ...] | None, int] | None:
    """Return (every vertex's order, or None for that of the rounds; its slots); None: it would take too long.

    This is the work; what was worked out lately is kept.
    """
    if schedule.rounds * schedule.vertices > MOST_EFFORT // 16:
        return None
    game = MessageGraph(schedule)
    slots = sum(segments[chunk] for chunk in game.chunk)
    if slots * len(set(zip(game.src, game.dst, strict=True))) // max(schedule.vertices, 1) > MOST_EFFORT:
        return None
    plays = [play for rule in RULES if (play := ListSchedule(game, segments, window, rule)).complete]
    best = min(plays, key=lambda play: play.slots * (1.0 if play.rule is by_tail else _AS_GOOD), default=None)
    usual = ListSchedule(game, segments, window, RULES[0], game.by_rounds(segments))
    if best is None or (usual.complete and best.slots > WORTH_IT * usual.slots):
        return None, usual.slots
    return best.orders(), best.slots


class MessageGraph:
    """A schedule as messages that wait for receives. All lists go by the message's or the receive's number."""

    def __init__(self, schedule: Schedule) -> None:
        self.vertices = schedule.vertices
        self.src: list[int] = []
        self.dst: list[int] = []
        self.chunk: list[int] = []
        self.round: list[int] = []
        self.into: list[int] = []  # the receive that a message is part of
        self.parts: list[list[int]] = []  # a receive's messages, by sender
        self.then: list[list[int]] = []  # what may be sent after a receive
        self.at_once: list[int] = []  # what waits for nothing
        self.writes: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # receives, by (vertex, chunk)
        for k in range(schedule.rounds):
            self._add_round(schedule, k)
        self.tail = self._tails()

    def _add_round(self, schedule: Schedule, k: int) -> None:
        step = schedule.round(k)
        rows = list(zip(step.src.tolist(), step.dst.tolist(), step.chunk.tolist(), strict=True))
        before = {(src, chunk): self.writes[src, chunk][-1:] for src, _, chunk in rows}
        receives: dict[tuple[int, int], int] = {}
        for src, dst, chunk in sorted(rows):
            receive = receives.setdefault((dst, chunk), len(self.parts))
            if receive == len(self.parts):
                self.parts.append([])
                self.then.append([])
                self.writes[dst, chunk].append(receive)
            message = len(self.src)
            for column, value in zip((self.src, self.dst, self.chunk, self.round), (src, dst, chunk, k), strict=True):
                column.append(value)
            self.into.append(receive)
            self.parts[receive].append(message)
            waits = before[src, chunk]
            (self.then[waits[0]] if waits else self.at_once).append(message)

    def by_rounds(self, segments: Sequence[int]) -> list[list[tuple[int, int]]]:
        """Return per vertex what it takes, (receive, segment), in the rounds' order."""
        found: list[list[tuple[int, int]]] = [[] for _ in range(self.vertices)]
        numbers = sorted(range(len(self.parts)), key=lambda receive: self.round[self.parts[receive][0]])
        for (_, vertex), grouped in itertools.groupby(
            sorted(numbers, key=lambda r: (self.round[self.parts[r][0]], self.dst[self.parts[r][0]])),
            key=lambda r: (self.round[self.parts[r][0]], self.dst[self.parts[r][0]]),
        ):
            receives = [(receive, segments[self.chunk[self.parts[receive][0]]]) for receive in grouped]
            most = max(count for _, count in receives)
            found[vertex] += [(r, segment) for segment in range(most) for r, count in receives if segment < count]
        return found

    def _tails(self) -> list[int]:
        """Return per message how many follow each other from it on, itself counted."""
        tail = [0] * len(self.src)
        later = [0] * len(self.parts)  # of what follows a receive or a later one of the same chunk there
        after = {a: b for chain in self.writes.values() for a, b in itertools.pairwise(chain)}
        for receive in reversed(range(len(self.parts))):
            follows = [tail[message] for message in self.then[receive]]
            later[receive] = max(follows, default=0)
            if receive in after:
                later[receive] = max(later[receive], later[after[receive]])
            for message in self.parts[receive]:
                tail[message] = 1 + later[receive]
        return tail


class ListSchedule:
    """One play of a game by a rule; with `fixed`, every vertex takes segments in that order only."""

    def __init__(
        self,
        game: MessageGraph,
        segments: Sequence[int],
        window: int,
        rule: Rule,
        fixed: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        self._fixed = fixed
        self._game, self._segments, self._window, self.rule = game, segments, window, rule
        self._ready: defaultdict[tuple[int, int], list[tuple[tuple[int, ...], int, int]]] = defaultdict(list)
        self._on_link: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._leaving: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._arrived: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._written: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._sent: defaultdict[tuple[int, int], list[Part]] = defaultdict(list)
        self._place: dict[tuple[int, int], int] = {}
        self._takes: list[list[tuple[int, int]]] = [[] for _ in range(game.vertices)]
        left = sum(segments[game.chunk[parts[0]]] for parts in game.parts)
        self.slots = 0
        for message in game.at_once:
            for segment in range(segments[game.chunk[message]]):
                self._offer(message, segment)
        while sent := self._slot():
            self.slots += 1
            for message, segment in sent:
                self._write(game.src[message], game.chunk[message], segment)
                self._write(game.dst[message], game.chunk[message], segment)
        self.complete = sum(map(len, self._takes)) == left

    def orders(self) -> tuple[MessageOrder, ...]:
        """Return every vertex's order."""
        game = self._game
        sends: list[dict[int, tuple[Part, ...]]] = [{} for _ in range(game.vertices)]
        for (src, dst), parts in self._sent.items():
            sends[src][dst] = tuple(parts)
        return tuple(
            MessageOrder(tuple(self._take(receive, segment) for receive, segment in self._takes[vertex]), sends[vertex])
            for vertex in range(game.vertices)
        )

    def _take(self, receive: int, segment: int) -> ReceiveOrder:
        messages = self._game.parts[receive]
        first = messages[0]
        part = (self._game.round[first], self._game.chunk[first], segment)
        return ReceiveOrder(part, tuple(self._place[message, segment] for message in messages))

    def _offer(self, message: int, segment: int) -> None:
        game = self._game
        src, dst, chunk = game.src[message], game.dst[message], game.chunk[message]
        key = self.rule(game.round[message], chunk, segment, game.tail[message])
        heapq.heappush(self._ready[src, dst], (key, message, segment))
        self._leaving[src, chunk, segment] += 1

    def _slot(self) -> list[tuple[int, int]]:
        """Send what goes in one slot, at most one segment from every vertex and to every vertex."""
        first = sorted(
            (heap[0][0], link) for link, heap in self._ready.items() if heap and self._on_link[link] < self._window
        )
        sending: set[int] = set()
        receiving: set[int] = set()
        sent = []
        for _, (src, dst) in first:
            if src not in sending and dst not in receiving:
                sending.add(src)
                receiving.add(dst)
                sent.append(self._send((src, dst)))
        return sent

    def _send(self, link: tuple[int, int]) -> tuple[int, int]:
        game = self._game
        _, message, segment = heapq.heappop(self._ready[link])
        chunk = game.chunk[message]
        self._on_link[link] += 1
        self._place[message, segment] = len(self._sent[link])
        self._sent[link].append((game.round[message], chunk, segment))
        self._leaving[link[0], chunk, segment] -= 1
        self._arrived[game.into[message], segment] += 1
        return message, segment

    def _write(self, vertex: int, chunk: int, segment: int) -> None:
        """Take whatever has arrived for a segment and may be written now."""
        if self._fixed is not None:
            takes, order = self._takes[vertex], self._fixed[vertex]
            while len(takes) < len(order) and self._take_one(vertex, *order[len(takes)]):
                pass
            return
        writes = self._game.writes.get((vertex, chunk), ())
        cell = (vertex, chunk, segment)
        while self._written[cell] < len(writes) and self._take_one(vertex, writes[self._written[cell]], segment):
            pass

    def _take_one(self, vertex: int, receive: int, segment: int) -> bool:
        """Take a segment of a receive, if all of it has arrived and the old content has left."""
        game = self._game
        cell = (vertex, game.chunk[game.parts[receive][0]], segment)
        if self._leaving[cell] or self._arrived[receive, segment] < len(game.parts[receive]):
            return False
        for message in game.parts[receive]:
            self._on_link[game.src[message], vertex] -= 1
        self._written[cell] += 1
        self._takes[vertex].append((receive, segment))
        for message in game.then[receive]:
            self._offer(message, segment)
        return True


__all__ = ["MessageOrder", "Part", "ReceiveOrder", "order_messages", "slots_of"]
