"""The reference of simulations: one event after the other, in plain Python. Slow and obvious.

It keeps to the rules in `ringside.predict.simulate` and shares no code with it, nor with the closed forms: a schedule's
transfers are read one by one, and a heap of (time, number) says what happens next.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ringside.errors import UsageError
from ringside.predict.topology.topology import Switch, Topology
from ringside.schedule import Schedule

Key = tuple[str, int]


class _Message(NamedTuple):
    src: int
    dst: int
    size_bytes: float
    added_bytes: float
    alpha_s: float
    wire_s: float


def finish_by_events(
    schedule: Schedule, topology: Topology, size_bytes: float, late: Mapping[int, float] | None = None
) -> list[float]:
    """Return when every rank finishes, seconds; arguments as for `ringside.predict.simulate.simulate`."""
    return _Events(schedule, topology, size_bytes).run(late or {})


class _Events:
    def __init__(self, schedule: Schedule, topology: Topology, size_bytes: float) -> None:
        self.schedule, self.topology = schedule, topology
        self.rounds = [self._messages(k, size_bytes) for k in range(schedule.rounds)]
        self.queue: list[tuple[float, int, Callable[[float], None]]] = []
        self.number = 0
        self.round_of = [0] * schedule.vertices
        self.done: list[float] = [0.0] * schedule.vertices
        self.waits: dict[tuple[int, int], int] = {}  # (vertex, round): what has yet to happen there
        for k, messages in enumerate(self.rounds):
            for vertex in range(schedule.vertices):
                busy = [m for m in messages if m.src == vertex] + [m for m in messages if m.dst == vertex]
                self.waits[vertex, k] = 1 + len(busy)  # and that it has begun

    # ------------------------------------------------------------------------------------------ events

    def run(self, late: Mapping[int, float]) -> list[float]:
        for vertex in range(self.schedule.vertices):
            self.at(late.get(vertex, 0.0), lambda now, v=vertex: self.enter(v, now))  # type: ignore[misc]
        while self.queue:
            now, _, happen = heapq.heappop(self.queue)
            happen(now)
        return self.done[: self.schedule.ranks]

    def at(self, time: float, happen: Callable[[float], None]) -> None:
        self.number += 1
        heapq.heappush(self.queue, (time, self.number, happen))

    def enter(self, vertex: int, now: float) -> None:
        """A vertex takes part in its next round: it works for its messages, then all of them begin."""
        k = self.round_of[vertex]
        if k == len(self.rounds):
            self.done[vertex] = now
            return
        mine = [m for m in self.rounds[k] if m.src == vertex]
        start = now + len(mine) * self.overhead(vertex)
        for message in mine:
            self.at(start + message.wire_s, lambda now, m=message: self.left(m, k, now))  # type: ignore[misc]
        self.at(start, lambda now: self.happened(vertex, k, now))

    def left(self, message: _Message, k: int, now: float) -> None:
        self.happened(message.src, k, now)
        self.at(now + message.alpha_s, lambda now: self.happened(message.dst, k, now))

    def happened(self, vertex: int, k: int, now: float) -> None:
        """Something that a vertex needs for a round has happened; with the last of it, it works and goes on."""
        self.waits[vertex, k] -= 1
        if self.waits[vertex, k] > 0:
            return
        taken = [m for m in self.rounds[k] if m.dst == vertex]
        work = len(taken) * self.overhead(vertex)
        if vertex < self.topology.ranks and self.topology.reduce_bytes_per_s is not None:
            work += sum(m.added_bytes for m in taken) / self.topology.reduce_bytes_per_s
        self.round_of[vertex] += 1
        self.at(now + work, lambda now: self.enter(vertex, now))

    def overhead(self, vertex: int) -> float:
        return self.topology.overhead_s if vertex < self.topology.ranks else 0.0

    # ------------------------------------------------------------------------------------------ what messages cost

    def _messages(self, k: int, size_bytes: float) -> list[_Message]:
        chunk = size_bytes / self.schedule.chunks
        carried: dict[tuple[int, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for src, dst, _, reducing in self.schedule.round(k):
            carried[src, dst][0] += chunk
            carried[src, dst][1] += chunk if reducing else 0.0
        busy: dict[Key, float] = defaultdict(float)
        for (src, dst), (size, _) in carried.items():
            for key, rate in self._through(src, dst):
                busy[key] += size / rate
        made = []
        for (src, dst), (size, added) in carried.items():
            alpha, rate = self._link(src, dst)
            wire = max([size / rate, *(busy[key] for key, _ in self._through(src, dst))])
            made.append(_Message(src, dst, size, added, alpha, wire))
        return made

    def _host(self, vertex: int) -> int:
        left = vertex
        for host, ranks in enumerate(self.topology.ranks_per_host):
            if left < ranks:
                return host
            left -= ranks
        return -1

    def _interface(self, rank: int) -> int:
        topology, host = self.topology, self._host(rank)
        if topology.rails == "pooled" or topology.host_rates:
            return host
        local = rank - sum(topology.ranks_per_host[:host])
        return host * topology.nics + local * topology.nics // topology.ranks_per_host[host]

    def _switch(self) -> Switch:
        found = self.topology.nvls if self.topology.hosts == 1 else self.topology.sharp
        if found is None:
            raise UsageError("this topology has no switch that reduces")
        return found

    def _link(self, src: int, dst: int) -> tuple[float, float]:
        """Return latency and rate of a message by itself."""
        topology = self.topology
        pool = topology.nics if topology.rails == "pooled" or topology.host_rates else 1
        if max(src, dst) >= topology.ranks:
            switch = self._switch()
            return switch.alpha_s, switch.bytes_per_s * (1 if topology.hosts == 1 else pool)
        inside = self._host(src) == self._host(dst)
        link = topology.inside if inside else topology.between
        assert link is not None
        alpha, rate = link.alpha_s, link.bytes_per_s * (1 if inside else pool)
        for of, ends in (("hosts", (self._host(src), self._host(dst))), ("ranks", (src, dst))):
            for own in topology.overrides:
                if own.of == of and (own.src, own.dst) == ends and not (of == "hosts" and inside):
                    alpha = alpha if own.alpha_s is None else own.alpha_s
                    rate = rate if own.bytes_per_s is None else own.bytes_per_s
        return alpha, rate

    def _through(self, src: int, dst: int) -> list[tuple[Key, float]]:
        """Return what a message shares with others, and at which rate."""
        topology, ranks = self.topology, self.topology.ranks
        switched = max(src, dst) >= ranks
        found: list[tuple[Key, float]] = []
        if topology.hosts == 1 or (not switched and self._host(src) == self._host(dst)):
            rate = self._switch().bytes_per_s if switched else topology.inside.bytes_per_s  # type: ignore[union-attr]
            found += [(("port out", src), rate)] if src < ranks else []
            found += [(("port in", dst), rate)] if dst < ranks else []
            if not switched and topology.inside is not None and topology.inside.host_bytes_per_s is not None:
                found.append((("bus", self._host(src)), topology.inside.host_bytes_per_s))
            return found
        assert topology.between is not None
        pool = topology.nics if topology.rails == "pooled" else 1
        one = (self._switch().bytes_per_s if switched else topology.between.bytes_per_s) * pool
        for side, vertex in enumerate((src, dst)):
            if vertex < ranks:
                rate = topology.host_rates[self._host(vertex)][side] if topology.host_rates else one
                found.append(((("nic out", "nic in")[side], self._interface(vertex)), rate))
        if topology.oversubscription > 1:
            leaves = [self._host(v) // topology.hosts_per_leaf if v < ranks else -1 for v in (src, dst)]
            for name, leaf in zip(("up", "down"), leaves, strict=True):
                if leaves[0] != leaves[1] and leaf >= 0:
                    under = min(topology.hosts - leaf * topology.hosts_per_leaf, topology.hosts_per_leaf)
                    whole = under * topology.nics * topology.between.bytes_per_s
                    found.append(((name, leaf), whole / topology.oversubscription))
        return found
