"""In which order segments are sent and received, so that every link stays busy. Pure, and equal on all vertices.

Segments of different rounds need not wait for each other where they carry different parts of the tensor: off powers of
two, in trees and in chains a vertex that received all of one round before any of the next would leave links idle for a
third of the time. So the schedule is simulated beforehand: segments of equal length, every vertex sends one and
receives one at a time, and of those that could be sent, the one goes first that a rule prefers (list scheduling: R. L.
Graham, "Bounds for certain multiprocessing anomalies", 1966; one of the rules is the longest chain that follows: T. C.
Hu, "Parallel sequencing and assembly line problems", 1961). A few rules are tried, and the shortest list schedule
counts.

It keeps to what `ringside.engine.net.exchange.run` must keep to: a chunk is written in the order of the schedule's
rounds (so the result does not depend on any of this), a segment is written after its old content has left, and no more
messages are on a link than there are buffers for. What waits in the simulation waits for something earlier in it; a
vertex that receives messages in this order therefore never waits in a circle.
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
"""Of the slots that the rounds' order needs: what saves less does not make up for how networks differ from slots."""
_AS_GOOD = 1.2
"""Slots of other rules count that many times: flows that share a link disturb the order by longest chains least."""
MOST_EFFORT = 400_000
"""Slots x links to simulate: beyond, the rounds' order is used. It is a fraction of a second's work."""

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
"""Each is tried; the first is the rounds' order."""


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
        receives: What it receives.
        sends: By receiver, what it sends there.
    """

    receives: tuple[ReceiveOrder, ...]
    sends: dict[int, tuple[Part, ...]]


def order_messages(schedule: Schedule, vertex: int, segments: Sequence[int], window: int) -> MessageOrder | None:
    """Return the order of one vertex's messages; None where it does not pay, or working it out would take too long.

    Args:
        schedule: A verified one.
        vertex: Whose order.
        segments: How many segments each chunk has, [chunks].
        window: How many messages a link holds that were sent and not yet received.
    """
    found = find_order(schedule, tuple(segments), window)
    return None if found is None or found[0] is None else found[0][vertex]


@functools.lru_cache(maxsize=64)
def find_order(
    schedule: Schedule, segments: tuple[int, ...], window: int
) -> tuple[tuple[MessageOrder, ...] | None, int] | None:
    """Return (every vertex's order, or None for that of the rounds; its slots); None: it would take too long.

    This is the work; what was worked out lately is kept. A slot is the time of a segment: in each, every vertex sends
    one and receives one at most. Arguments as for `order_messages`.
    """
    if schedule.rounds * schedule.vertices > MOST_EFFORT // 16:
        return None
    graph = MessageGraph(schedule)
    slots = sum(segments[chunk] for chunk in graph.chunk)
    if slots * len(set(zip(graph.src, graph.dst, strict=True))) // max(schedule.vertices, 1) > MOST_EFFORT:
        return None
    # With few buffers per link a rule can come to a standstill, as no vertex may receive what has come: such a list
    # schedule is not complete.
    complete = [made for rule in RULES if (made := ListSchedule(graph, segments, window, rule)).complete]
    best = min(complete, key=lambda made: made.slots * (1.0 if made.rule is by_tail else _AS_GOOD), default=None)
    by_rounds = ListSchedule(graph, segments, window, RULES[0], graph.by_rounds(segments))
    if best is None or (by_rounds.complete and best.slots > WORTH_IT * by_rounds.slots):
        return None, by_rounds.slots
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
            step = schedule.round(k)
            rows = list(zip(step.src.tolist(), step.dst.tolist(), step.chunk.tolist(), strict=True))
            # What is sent in a round was there before it: look up the last writes before this round adds its own.
            before = {(src, chunk): self.writes[src, chunk][-1:] for src, _, chunk in rows}
            receives: dict[tuple[int, int], int] = {}
            for src, dst, chunk in sorted(rows):
                receive = receives.setdefault((dst, chunk), len(self.parts))
                if receive == len(self.parts):
                    self.parts.append([])
                    self.then.append([])
                    self.writes[dst, chunk].append(receive)
                message = len(self.src)
                self.src.append(src)
                self.dst.append(dst)
                self.chunk.append(chunk)
                self.round.append(k)
                self.into.append(receive)
                self.parts[receive].append(message)
                waits = before[src, chunk]
                (self.then[waits[0]] if waits else self.at_once).append(message)
        self.tail = self._tails()

    def by_rounds(self, segments: Sequence[int]) -> list[list[tuple[int, int]]]:
        """Return per vertex what it receives, (receive, segment), in the rounds' order."""
        order: list[list[tuple[int, int]]] = [[] for _ in range(self.vertices)]
        numbers = sorted(range(len(self.parts)), key=self._round_and_vertex)
        for (_, vertex), grouped in itertools.groupby(numbers, key=self._round_and_vertex):
            receives = [(receive, segments[self.chunk[self.parts[receive][0]]]) for receive in grouped]
            most = max(count for _, count in receives)
            order[vertex] += [(r, segment) for segment in range(most) for r, count in receives if segment < count]
        return order

    def _round_and_vertex(self, receive: int) -> tuple[int, int]:
        first = self.parts[receive][0]
        return self.round[first], self.dst[first]

    def _tails(self) -> list[int]:
        """Return per message how many follow each other from it on, itself counted (Hu's levels)."""
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
    """A message graph simulated by a rule, slot by slot.

    Args:
        graph: The messages.
        segments: How many segments each chunk has, [chunks].
        window: How many messages a link holds that were sent and not yet received.
        rule: Which of those that could be sent goes first.
        fixed: By vertex, the order in which it receives, (receive, segment); None: as it comes.

    Attributes:
        slots: How many it needed.
        complete: Whether everything was received; else it came to a standstill.
    """

    def __init__(
        self,
        graph: MessageGraph,
        segments: Sequence[int],
        window: int,
        rule: Rule,
        fixed: Sequence[Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        self._graph, self._segments, self._window, self.rule, self._fixed = graph, segments, window, rule, fixed
        # By link, a heap of what could be sent: (the rule's key, message, segment).
        self._ready: defaultdict[tuple[int, int], list[tuple[tuple[int, ...], int, int]]] = defaultdict(list)
        self._on_link: defaultdict[tuple[int, int], int] = defaultdict(int)
        # By (vertex, chunk, segment): sends that still read it, and receives that have written it.
        self._leaving: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._written: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._arrived: defaultdict[tuple[int, int], int] = defaultdict(int)  # messages, by (receive, segment)
        self._sent: defaultdict[tuple[int, int], list[Part]] = defaultdict(list)  # by link
        self._place: dict[tuple[int, int], int] = {}  # by (message, segment), which one of its link it is
        self._received: list[list[tuple[int, int]]] = [[] for _ in range(graph.vertices)]
        self.slots = 0
        for message in graph.at_once:
            for segment in range(segments[graph.chunk[message]]):
                self._offer(message, segment)
        while sent := self._send_slot():
            self.slots += 1
            for message, segment in sent:
                # At the sender the old content has left now; at the receiver something has come.
                self._write(graph.src[message], graph.chunk[message], segment)
                self._write(graph.dst[message], graph.chunk[message], segment)
        total = sum(segments[graph.chunk[parts[0]]] for parts in graph.parts)
        self.complete = sum(map(len, self._received)) == total

    def orders(self) -> tuple[MessageOrder, ...]:
        """Return every vertex's order."""
        graph = self._graph
        sends: list[dict[int, tuple[Part, ...]]] = [{} for _ in range(graph.vertices)]
        for (src, dst), parts in self._sent.items():
            sends[src][dst] = tuple(parts)
        orders = []
        for vertex in range(graph.vertices):
            receives = []
            for receive, segment in self._received[vertex]:
                messages = graph.parts[receive]
                part = (graph.round[messages[0]], graph.chunk[messages[0]], segment)
                receives.append(ReceiveOrder(part, tuple(self._place[message, segment] for message in messages)))
            orders.append(MessageOrder(tuple(receives), sends[vertex]))
        return tuple(orders)

    def _offer(self, message: int, segment: int) -> None:
        """Let a segment be sent from now on."""
        graph = self._graph
        src, dst, chunk = graph.src[message], graph.dst[message], graph.chunk[message]
        key = self.rule(graph.round[message], chunk, segment, graph.tail[message])
        heapq.heappush(self._ready[src, dst], (key, message, segment))
        self._leaving[src, chunk, segment] += 1

    def _send_slot(self) -> list[tuple[int, int]]:
        """Send what goes in one slot, at most one segment from every vertex and to every vertex; return it."""
        graph = self._graph
        first = sorted(
            (heap[0][0], link) for link, heap in self._ready.items() if heap and self._on_link[link] < self._window
        )
        sending: set[int] = set()
        receiving: set[int] = set()
        sent = []
        for _, (src, dst) in first:
            if src in sending or dst in receiving:
                continue
            sending.add(src)
            receiving.add(dst)
            _, message, segment = heapq.heappop(self._ready[src, dst])
            chunk = graph.chunk[message]
            self._on_link[src, dst] += 1
            self._place[message, segment] = len(self._sent[src, dst])
            self._sent[src, dst].append((graph.round[message], chunk, segment))
            self._leaving[src, chunk, segment] -= 1
            self._arrived[graph.into[message], segment] += 1
            sent.append((message, segment))
        return sent

    def _write(self, vertex: int, chunk: int, segment: int) -> None:
        """Receive whatever has arrived for a segment and may be written now."""
        if self._fixed is not None:
            received, order = self._received[vertex], self._fixed[vertex]
            while len(received) < len(order) and self._try_receive(vertex, *order[len(received)]):
                pass
            return
        writes = self._graph.writes.get((vertex, chunk), ())
        cell = (vertex, chunk, segment)
        while self._written[cell] < len(writes) and self._try_receive(vertex, writes[self._written[cell]], segment):
            pass

    def _try_receive(self, vertex: int, receive: int, segment: int) -> bool:
        """Receive a segment, if all of it has arrived and the old content has left."""
        graph = self._graph
        messages = graph.parts[receive]
        cell = (vertex, graph.chunk[messages[0]], segment)
        if self._leaving[cell] or self._arrived[receive, segment] < len(messages):
            return False
        for message in messages:
            self._on_link[graph.src[message], vertex] -= 1
        self._written[cell] += 1
        self._received[vertex].append((receive, segment))
        for message in graph.then[receive]:
            self._offer(message, segment)
        return True
