"""A schedule in message order: what an interpreter that knows no rounds does, segment by segment. Event by event.

`ringside.predict.simulate` plays rounds. Engines that send a chunk as soon as they have it, whatever its round
(`ringside.engine.net.exchange.run`, and any other that cuts chunks into segments), overlap rounds. Here:

1.  A chunk travels in segments of at most `segment_bytes`. A vertex takes the messages it is sent in one order: round
    by round, in a round segment by segment; or as `orders` says. It waits for the next of them only.
2.  It sends a segment when it has taken what the schedule writes into it before; the messages of a link go one after
    the other, in the order in which their receiver takes them. Small chunks of one round and link share a message.
3.  All links that have something to send do so at once, at rates that are max-min fair in everything they share (D.
    Bertsekas, R. Gallager, "Data Networks", 1992, section 6.5): what TCP flows through a switch tend to.
4.  A link has places for `window` messages that were not taken yet (with `orders`: for those of the receiver's next
    `ahead`); the next waits until one is taken.
5.  A message is there `alpha_s` after it has left. To take it costs its vertex `overhead_s` for each sender, and adding
    up at `reduce_bytes_per_s`.

For small clusters: every message is an event.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf
from typing import Any, NamedTuple, Protocol

import numpy as np
from bench.lab.fair_flows import Flows, Link
from numpy.typing import NDArray

from ringside.errors import UsageError
from ringside.predict.topology.topology import Topology
from ringside.schedule import Schedule

# (round, chunk, segment).
Part = tuple[int, int, int]

MOST_MESSAGES = 1 << 20  # more are refused: each of them is an event


class VertexOrder(Protocol):
    """In which order a vertex takes and sends; what `ringside.engine.net.exchange.ordering` makes is one."""

    @property
    def receives(self) -> Sequence[Any]:
        """What it receives: each has a `part`, (round, chunk, segment)."""

    @property
    def sends(self) -> Mapping[int, Sequence[Part]]:
        """By receiver, what it sends there."""


class _Message(NamedTuple):
    parts: tuple[Part, ...]
    size_bytes: float


class _Take(NamedTuple):
    receive: int
    segment: int
    sources: tuple[int, ...]
    parts: tuple[Part, ...]
    work_s: float


def simulate_messages(
    schedule: Schedule,
    topology: Topology,
    size_bytes: float,
    *,
    segment_bytes: float = 1 << 18,
    window: int = 4,
    shared_bytes: float = 1 << 16,
    orders: Sequence[VertexOrder] | None = None,
    ahead: int = 8,
    late: Mapping[int, float] | None = None,
) -> NDArray[np.float64]:
    """Return when every rank finishes, seconds, float64 [ranks]; the module says by which rules.

    Args:
        schedule: Of as many ranks as the topology.
        topology: What it runs over.
        size_bytes: Of the tensor.
        segment_bytes: What one message carries at most.
        window: Messages of a link that are on their way or not taken yet.
        shared_bytes: Chunks of one round and link share a message if they are not more together.
        orders: In which order every vertex takes and sends; None: in the rounds' order.
        ahead: With `orders`: how many takes ahead messages may come.
        late: By rank, how much later it begins, seconds.

    Raises:
        UsageError: The two do not fit together, or there are more than a million messages.
    """
    play = _Play(schedule, topology, size_bytes, segment_bytes, window, shared_bytes, orders, ahead)
    return play.run(late or {})


class _Play:
    def __init__(
        self,
        schedule: Schedule,
        topology: Topology,
        size_bytes: float,
        segment_bytes: float,
        window: int,
        shared_bytes: float,
        orders: Sequence[VertexOrder] | None,
        ahead: int,
    ) -> None:
        self.schedule, self.topology = schedule, topology
        self.chunk = size_bytes / schedule.chunks
        self.segment = min(self.chunk, segment_bytes)
        self.segments = max(ceil(self.chunk / segment_bytes - 1e-9), 1)
        self.window, self.shared, self.ahead = window, min(shared_bytes, segment_bytes), ahead
        self.ordered = orders is not None
        self.takes: list[list[_Take]] = [[] for _ in range(schedule.vertices)]
        self.sends: defaultdict[Link, deque[_Message]] = defaultdict(deque)
        self.after: dict[tuple[int, int, int], int] = {}  # (vertex, round, chunk) of a send: the receive it waits for
        self.dependents: list[set[Link]] = []
        self._read()
        for vertex, order in enumerate(orders or ()):  # another order of takes and sends; there, no messages are shared
            known = {take.parts[0]: take for take in self.takes[vertex]}
            self.takes[vertex] = [known[take.part] for take in order.receives]
            for dst, parts in order.sends.items():
                self.sends[vertex, dst] = deque(_Message((part,), self._bytes(part[2])) for part in parts)
        self.network = Flows(schedule, topology, list(self.sends))
        self.done = [0] * len(self.dependents)
        self.cursor = [0] * schedule.vertices
        self.busy = [True] * schedule.vertices  # until it begins
        self.arrived: set[tuple[Link, Part]] = set()
        self.left: dict[tuple[Link, Part], list[int]] = {}  # parts of its message not taken yet
        self.posted: defaultdict[Link, deque[_Message]] = defaultdict(deque)
        self.held: defaultdict[Link, int] = defaultdict(int)
        self.now = 0.0
        self.finish = [0.0] * schedule.vertices
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.number = 0
        self.where: dict[tuple[Link, Part], int] = {
            ((src, dst), part): place
            for dst, takes in enumerate(self.takes)
            for place, take in enumerate(takes)
            for src, part in zip(take.sources, take.parts, strict=True)
        }

    # ------------------------------------------------------------------------------------------ what there is to do

    def _read(self) -> None:
        """Read the schedule: what every vertex takes, in order, and what every link carries."""
        written: dict[tuple[int, int], int] = {}
        messages = 0
        reduce = self.topology.reduce_bytes_per_s
        for k in range(self.schedule.rounds):
            rows = list(self.schedule.round(k))
            messages += len(rows) * self.segments
            if messages > MOST_MESSAGES:
                name = self.schedule.name
                raise UsageError(f"{name} in message order has over {MOST_MESSAGES} messages: use simulate()")
            receives: defaultdict[int, dict[int, list[tuple[int, bool]]]] = defaultdict(dict)
            for src, dst, chunk, adding in rows:
                receives[dst].setdefault(chunk, []).append((src, adding))
                waits = written.get((src, chunk), -1)
                self.after[src, k, chunk] = waits
                if waits >= 0:
                    self.dependents[waits].add((src, dst))
            # What every vertex takes, segment by segment. Ranks work for what they add up, switches do not.
            for dst, chunks in receives.items():
                is_rank = dst < self.topology.ranks
                first = len(self.dependents)
                for chunk in chunks:
                    written[dst, chunk] = len(self.dependents)
                    self.dependents.append(set())
                for segment in range(self.segments):
                    for number, (chunk, sources) in enumerate(chunks.items()):
                        adds = sum(adding for _, adding in sources)
                        work = self.topology.overhead_s * len(sources) if is_rank else 0.0
                        work += adds * self._bytes(segment) / reduce if is_rank and reduce is not None else 0.0
                        senders = tuple(sorted(src for src, _ in sources))
                        parts = ((k, chunk, segment),) * len(senders)
                        self.takes[dst].append(_Take(first + number, segment, senders, parts, work))
            # What every link carries: small chunks of one round share a message.
            for dst, chunks in receives.items():
                for src in sorted({src for sources in chunks.values() for src, _ in sources}):
                    own = [chunk for chunk, sources in chunks.items() if src in (sender for sender, _ in sources)]
                    if len(own) > 1 and len(own) * self.chunk <= self.shared:
                        whole = _Message(tuple((k, chunk, 0) for chunk in own), len(own) * self.chunk)
                        self.sends[src, dst].append(whole)
                        continue
                    for segment in range(self.segments):
                        self.sends[src, dst].extend(
                            _Message(((k, chunk, segment),), self._bytes(segment)) for chunk in own
                        )

    def _bytes(self, segment: int) -> float:
        """Return what a segment of a chunk holds; the last one may hold less."""
        return min(self.segment, self.chunk - segment * self.segment)

    # ------------------------------------------------------------------------------------------ events

    def run(self, late: Mapping[int, float]) -> NDArray[np.float64]:
        for vertex in range(self.schedule.vertices):
            self._schedule(late.get(vertex, 0.0), lambda v=vertex: self._begin(v))  # type: ignore[misc]
        while True:
            soon = self.queue[0][0] if self.queue else inf
            ended, link = self.network.next_end(self.now)
            if min(soon, ended) == inf:
                break
            if ended <= soon:
                self.network.advance(self.now, ended)
                self.now = ended
                assert link is not None
                self._sent(link)
            else:
                self.network.advance(self.now, soon)
                self.now = soon
                heapq.heappop(self.queue)[2]()
        return np.array(self.finish[: self.schedule.ranks])

    def _schedule(self, time: float, happen: Callable[[], None]) -> None:
        self.number += 1
        heapq.heappush(self.queue, (time, self.number, happen))

    def _begin(self, vertex: int) -> None:
        self.busy[vertex] = False
        for link in [link for link in self.sends if link[0] == vertex]:
            self._pump(link)
        self._poll(vertex)

    def _pump(self, link: Link) -> None:
        """Post what may be sent over a link."""
        waiting = self.sends[link]
        while waiting:
            for k, chunk, segment in waiting[0].parts:
                after = self.after[link[0], k, chunk]
                if after >= 0 and self.done[after] <= segment:
                    return self._start(link)
            self.posted[link].append(waiting.popleft())
        return self._start(link)

    def _start(self, link: Link) -> None:
        """Put the next message of a link on the wire, if there is a place for it."""
        if link in self.network.left or not self.posted[link]:
            return
        message = self.posted[link][0]
        if self.ordered:
            distance = self.where[link, message.parts[0]] - self.cursor[link[1]]
            if distance >= self.ahead:
                return
        elif self.held[link] >= self.window:
            return
        self.held[link] += 1
        self.network.start(link, message.size_bytes)

    def _sent(self, link: Link) -> None:
        message = self.posted[link].popleft()
        self.network.end(link)
        self._schedule(self.now + self.network.alpha_s[link], lambda: self._arrive(link, message))
        self._start(link)

    def _arrive(self, link: Link, message: _Message) -> None:
        left = [len(message.parts)]
        for part in message.parts:
            self.arrived.add((link, part))
            self.left[link, part] = left
        self._poll(link[1])

    def _poll(self, vertex: int) -> None:
        """Take the next message, if the vertex has time and it is there."""
        if self.busy[vertex]:
            return
        if self.cursor[vertex] == len(self.takes[vertex]):
            self.finish[vertex] = max(self.finish[vertex], self.now)
            return
        take = self.takes[vertex][self.cursor[vertex]]
        if all(((src, vertex), part) in self.arrived for src, part in zip(take.sources, take.parts, strict=True)):
            self.busy[vertex] = True
            self._schedule(self.now + take.work_s, lambda: self._taken(vertex, take))

    def _taken(self, vertex: int, take: _Take) -> None:
        self.busy[vertex] = False
        self.cursor[vertex] += 1
        for src, part in zip(take.sources, take.parts, strict=True):
            left = self.left.pop(((src, vertex), part))
            left[0] -= 1
            if not left[0]:
                self.held[src, vertex] -= 1
        self.done[take.receive] += 1
        for link in sorted(self.dependents[take.receive]):
            self._pump(link)
        for link in [link for link in self.posted if link[1] == vertex]:
            self._start(link)
        self._poll(vertex)
