"""What a schedule takes by the engine's own order where flows share links: the interpreter on paper. Pure.

    python -m bench.lab.ordered_play            # by the busiest link's bytes, 16 MB, n = 2 to 8

A vertex takes messages in the order in which the engine does, has as many places posted (at first those that the
collective before left), and sends what it may, of later rounds nothing where rounds are kept apart. A link's rate, in
and out of a vertex, is shared by the flows that use it (max-min fair: D. Bertsekas, R. Gallager, Data Networks, section
6.5.2), one flow per pair and direction, whose messages follow each other. Nothing else takes time.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench.lab.expected import LARGE, busiest, messages_of, schedule_of

from ringside.engine.net.exchange.message_size import MessageSize, rounds_apart
from ringside.engine.net.exchange.ordering import order_messages
from ringside.engine.net.exchange.plan import plan_messages
from ringside.schedule import Schedule

Link = tuple[int, int]
_SIZE = 16 << 20
_NAMES = (
    "ring",
    "halving_doubling",
    "recursive_doubling",
    "tree",
    "two_tree*32",
    "chain*32",
    "direct",
    "parameter_server",
)
_NEARLY = 1e-9  # of a message: what is missing of a whole one by rounding alone


@dataclass(frozen=True)
class _Take:
    """A segment of a receive: the receive's number, its segment, and which message of each sender's link it is."""

    receive: int
    segment: int
    places: tuple[tuple[int, int], ...]


@dataclass
class _Flow:
    """Messages from one vertex to another: how many may be sent, have a place, have arrived, were taken."""

    waiting: deque[tuple[int, int, int]]  # (the receive they wait for, segment, round), in the order they are sent
    sent: int = 0
    posted: int = LARGE.window  # since the collective before
    arrived: int = 0
    taken: int = 0
    part: float = 0.0  # of the message under way

    @property
    def busy(self) -> bool:
        return self.arrived < min(self.sent, self.posted)


@dataclass
class _Vertex:
    """Where one vertex is in its program; `rounds`: of its takes, where rounds are kept apart."""

    takes: list[_Take]
    paced: bool
    done: list[int]
    rounds: list[int] | None
    at: int = 0

    @property
    def round(self) -> int:
        """Of which, and of those before it, messages are sent."""
        if self.rounds is None or self.at == len(self.rounds):
            return sys.maxsize
        return self.rounds[self.at]


@dataclass
class _Play:
    schedule: Schedule
    segments: int
    size: MessageSize
    flows: dict[Link, _Flow] = field(default_factory=dict)
    vertices: list[_Vertex] = field(default_factory=list)
    now: float = 0.0

    def __post_init__(self) -> None:
        for number in range(self.schedule.vertices):
            self._enter(number)

    def _enter(self, number: int) -> None:
        schedule, segments = self.schedule, self.segments
        plan = plan_messages(schedule, number)
        order = order_messages(schedule, number, [segments] * schedule.chunks, self.size.window)
        for dst, sends in plan.links.items():
            if order is None:
                groups = plan.outgoing[dst]
                parts = [(send.after, s, send.round) for group in groups for s in range(segments) for send in group]
            else:
                after = {(send.round, send.chunk): send.after for send in sends}
                parts = [(after[k, chunk], s, k) for k, chunk, s in order.sends.get(dst, ())]
            self.flows[number, dst] = _Flow(deque(parts))
        takes: list[_Take] = []
        rounds: list[int] = []
        if order is None:
            counts: defaultdict[int, int] = defaultdict(int)
            first = 0
            for k, receives in enumerate(plan.rounds):
                rounds += [k] * (segments * len(receives))
                for s in range(segments):
                    for at, receive in enumerate(receives):
                        takes.append(_Take(first + at, s, tuple((src, counts[src]) for src in receive.sources)))
                        for src in receive.sources:
                            counts[src] += 1
                first += len(receives)
        else:
            flat = [receive for receives in plan.rounds for receive in receives]
            for (k, chunk, s), places in order.receives:
                number_of = plan.receives[k, chunk]
                takes.append(_Take(number_of, s, tuple(zip(flat[number_of].sources, places, strict=True))))
        apart = order is None and rounds_apart(schedule, (segments,) * schedule.chunks)
        done = [0] * len(plan.dependents)
        self.vertices.append(_Vertex(takes, order is not None, done, rounds if apart else None))

    def run(self) -> float:
        """Return when everybody has everything, in times of a segment on a link."""
        while True:
            for number in range(len(self.vertices)):
                self._advance(number)
            busy = [link for link, flow in self.flows.items() if flow.busy]
            if not busy:
                break
            # Until the first message under way has arrived: so long, rates stay as they are.
            rates = fair(busy)
            step = min((1 - self.flows[link].part) / rate for link, rate in rates.items())
            self.now += step
            for link, rate in rates.items():
                flow = self.flows[link]
                flow.part += rate * step
                if flow.part >= 1 - _NEARLY:
                    flow.part, flow.arrived = 0.0, flow.arrived + 1
        assert all(vertex.at == len(vertex.takes) for vertex in self.vertices), "somebody waits for ever"
        return self.now

    def _advance(self, number: int) -> None:
        vertex = self.vertices[number]
        self._post(number)
        # Take what has arrived, in the vertex's own order.
        while vertex.at < len(vertex.takes):
            take = vertex.takes[vertex.at]
            if any(self.flows[src, number].arrived <= place for src, place in take.places):
                break
            for src, _ in take.places:
                self.flows[src, number].taken += 1
            vertex.done[take.receive] += 1
            vertex.at += 1
            self._post(number)
        # Send what waits for nothing more, of later rounds nothing where rounds are kept apart.
        for (src, _), flow in self.flows.items():
            while src == number and flow.waiting:
                after, segment, k = flow.waiting[0]
                if k > vertex.round or (after >= 0 and vertex.done[after] <= segment):
                    break
                flow.waiting.popleft()
                flow.sent += 1

    def _post(self, number: int) -> None:
        """Post places for what a vertex takes next: some per link, or those of its next takes."""
        vertex = self.vertices[number]
        if not vertex.paced:
            for (_, dst), flow in self.flows.items():
                if dst == number:
                    flow.posted = flow.taken + self.size.places(ordered=False)
            return
        for take in vertex.takes[vertex.at : vertex.at + self.size.ahead]:
            for src, place in take.places:
                flow = self.flows[src, number]
                flow.posted = max(flow.posted, min(place + 1, flow.taken + self.size.window))


def fair(links: Iterable[Link]) -> dict[Link, float]:
    """Return each flow's share of what enters and leaves a vertex, of which either has 1: max-min fair."""
    left, rates = set(links), dict[Link, float]()
    room = {(side, link[side]): 1.0 for link in left for side in (0, 1)}
    while left:
        counts: defaultdict[tuple[int, int], int] = defaultdict(int)
        for link in left:
            for side in (0, 1):
                counts[side, link[side]] += 1
        side, vertex = min(counts, key=lambda end: (room[end] / counts[end], end))
        share = room[side, vertex] / counts[side, vertex]
        for link in sorted(link for link in left if link[side] == vertex):
            rates[link] = share
            for end in (0, 1):
                room[end, link[end]] -= share
            left.discard(link)
    return rates


def shared_bytes(schedule: Schedule, size_bytes: int) -> float:
    """Return what a link would carry in the time that a schedule takes where flows share links; see the module.

    Args:
        schedule: Without switches, one vertex per host.
        size_bytes: Of the tensor.
    """
    per_chunk, size = size_bytes / schedule.chunks, messages_of(schedule, size_bytes)
    segments = int(max(-(-per_chunk // size.segment_bytes), 1))
    return _Play(schedule, segments, size).run() * per_chunk / segments


def main(names: Sequence[str]) -> None:
    """Print the table."""
    print("n".ljust(20), *(f"{n:6d}" for n in range(2, 9)))
    for name in names or _NAMES:
        schedules = [schedule_of(name, n) for n in range(2, 9)]
        shares = [shared_bytes(s, _SIZE) / busiest(s, _SIZE).total_bytes for s in schedules]
        print(name.ljust(20), *(f"{share:6.3f}" for share in shares), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
