"""What a simulation found: when every rank finished, every round's times, and the critical path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isqrt
from typing import NamedTuple

import numpy as np

from ringside.predict.simulation.rounds import PreparedRounds, stretches
from ringside.predict.topology.topology import Topology
from ringside.predict.topology.wires import Floats, Ints, wires_for
from ringside.schedule import Schedule
from ringside.text import duration, giga, size

# -------------------------------------------------------------------------------------------------
# The critical path: what each of its pieces is, and whose fault it is.

WORTH_NAMING = 0.02
"""Of the whole time: a rank or link that costs less is not called a bottleneck."""


class PathHop(NamedTuple):
    """One piece of the critical path.

    Args:
        round: Its round; -1: before the first.
        src: Where it begins: a vertex.
        dst: Where it ends; `src` itself: that vertex was busy sending, or worked, or had nothing to do.
        peer: To whom the message went; -1: there was none.
        begin_s: When the vertex `src` was ready for it, seconds.
        end_s: When the vertex `dst` was done with it.
        wire_s: Of that, bytes on the wire.
        alpha_s: Of that, latency.
        shared_s: What `wire_s` would be at least, whatever the link: for what the message shares with others.
    """

    round: int
    src: int
    dst: int
    peer: int
    begin_s: float
    end_s: float
    wire_s: float
    alpha_s: float
    shared_s: float = 0.0


class Culprit(NamedTuple):
    """Who is to blame for most of the time that would not have been needed.

    Args:
        kind: `late rank`, `slow link`, `narrow host` or `nobody`.
        ranks: The rank, or the link's two ranks; of a narrow host its number.
        seconds: What it costs on the critical path.
    """

    kind: str
    ranks: tuple[int, ...]
    seconds: float

    def __str__(self) -> str:
        """Say it in words."""
        if self.kind == "nobody":
            return "none"
        who = " → ".join(map(str, self.ranks))
        return f"{self.kind} {who} costs {duration(self.seconds)}"


class SentMessages(NamedTuple):
    """Messages of one round; arrays are [messages], times in seconds.

    Args:
        round: Its number.
        src: Senders, int64.
        dst: Receivers, int64.
        size_bytes: Of each, float64.
        begin_s: When it began, float64.
        leave_s: When it had left, float64.
        arrive_s: When it was there, float64.
    """

    round: int
    src: Ints
    dst: Ints
    size_bytes: Floats
    begin_s: Floats
    leave_s: Floats
    arrive_s: Floats


def _hop_before(k: int, vertex: int, end_s: float, ready: Floats, round_: PreparedRounds, size_bytes: float) -> PathHop:
    """Return the piece of the critical path that ends when `vertex` was done with round k."""
    begin = float(ready[vertex])
    best, hop = (begin + float(round_.before[vertex]), 0), PathHop(k, vertex, vertex, -1, begin, end_s, 0.0, 0.0)
    for part in round_.costs():
        for number in part.of(vertex):
            src, dst = int(part.messages.src[number]), int(part.messages.dst[number])
            wire = float(part.wire[number]) * size_bytes
            own, alpha = src == vertex, float(part.alpha_s[number])
            begin = float(ready[src])
            found = (begin + float(round_.before[src]) + wire + (0.0 if own else alpha), 1 if own else 2)
            if found > best:
                shared = float(part.shared[number]) * size_bytes
                best, hop = found, PathHop(k, src, vertex, dst, begin, end_s, wire, 0.0 if own else alpha, shared)
    return hop


def _find_culprits(
    path: Sequence[PathHop], schedule: Schedule, topology: Topology, seconds: float
) -> tuple[Culprit, ...]:
    """Return the ranks and links that put off the end by what is worth naming, the worst first; or nobody.

    Args:
        path: The critical path.
        schedule: What was played.
        topology: Over what.
        seconds: How long it took.
    """
    found = [Culprit("late rank", (path[0].src,), path[0].end_s)] if path and path[0].round < 0 else []
    # By link and host, how much less the path would take were they as their class.
    hops = [hop for hop in path if hop.peer >= 0]
    src, dst = (np.array(ends, dtype=np.int64) for ends in ([hop.src for hop in hops], [hop.peer for hop in hops]))
    both = topology, replace(topology, overrides=())
    (alpha, per_byte), (plain_alpha, plain) = (wires_for(schedule, links).costs(src, dst) for links in both)
    class_share, later = np.minimum(plain / per_byte, 1.0), np.maximum(alpha - plain_alpha, 0.0)
    lost: defaultdict[tuple[str, tuple[int, ...]], float] = defaultdict(float)
    best_rate = max((max(pair) for pair in topology.host_rates), default=0.0)
    for number, hop in enumerate(hops):
        more = hop.wire_s - max(hop.wire_s * float(class_share[number]), hop.shared_s)
        lost["slow link", (hop.src, hop.peer)] += more + (float(later[number]) if hop.src != hop.dst else 0.0)
        # A host that carries less than the best one, where it was what held the message up.
        if topology.host_rates and max(hop.src, hop.peer) < topology.ranks and hop.shared_s >= hop.wire_s:
            out, into = (int(topology.host_of[end]) for end in (hop.src, hop.peer))
            if out != into:
                rate, host = min((topology.host_rates[out][0], out), (topology.host_rates[into][1], into))
                lost["narrow host", (host,)] += hop.wire_s * (1.0 - rate / best_rate)
    found += [Culprit(*culprit, excess) for culprit, excess in lost.items() if excess > 0]
    worth = [culprit for culprit in found if culprit.seconds >= WORTH_NAMING * seconds]
    return tuple(sorted(worth, key=lambda culprit: -culprit.seconds)) or (Culprit("nobody", (), 0.0),)


# -------------------------------------------------------------------------------------------------
# The timeline.

KEPT = 1 << 22
"""Times (rounds x vertices) that are all kept, 32 MB; of larger simulations some are, and the rest is played again."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """A schedule played over a topology.

    Args:
        schedule: What was played, pipelined if that was requested.
        topology: Over what.
        size_bytes: Of the tensor.
        late: By rank, how much later it began, seconds.
        final: When every vertex had finished, float64 [vertices].
        checkpoints: When every vertex was ready for rounds 0, `every`, 2 `every` ..., float64 [checkpoints, vertices].
        every: Rounds between them; 1: all are kept.
    """

    schedule: Schedule
    topology: Topology
    size_bytes: float
    late: dict[int, float]
    final: Floats = field(repr=False)
    checkpoints: Floats = field(repr=False)
    every: int = 1

    @property
    def finish_seconds(self) -> Floats:
        """When every rank has finished, seconds, float64 [ranks]."""
        return self.final[: self.schedule.ranks]

    @property
    def seconds(self) -> float:
        """When the last rank has finished."""
        return float(self.finish_seconds.max())

    @property
    def algbw(self) -> float:
        """Bytes of the tensor per second; 0 where nothing takes any time."""
        return self.size_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def busbw(self) -> float:
        """The algorithm's bandwidth times what its collective moves at least per rank, as nccl-tests defines it."""
        return self.algbw * float(self.schedule.collective.lower_bound_bytes(self.schedule.ranks))

    def ready_for(self, k: int) -> Floats:
        """Return when every vertex was ready for round `k` (k = rounds: finished), float64 [vertices]."""
        return next(iter(self._states(k, k + 1)))

    def sent(self, first: int = 0, last: int | None = None) -> Iterator[SentMessages]:
        """Yield the messages of rounds `first` to `last` (not included; None: to the end)."""
        end = self.schedule.rounds if last is None else min(last, self.schedule.rounds)
        for k, ready, round_ in zip(range(first, end), self._states(first, end), self._rounds(first, end), strict=True):
            start = ready + round_.before
            for part in round_.costs():
                begin = start[part.messages.src]
                leave = begin + part.wire * self.size_bytes
                carried = np.asarray(part.messages.chunks * (self.size_bytes / self.schedule.chunks), dtype=np.float64)
                arrive: Floats = leave + part.alpha_s
                yield SentMessages(k, part.messages.src, part.messages.dst, carried, begin, leave, arrive)

    # ---------------------------------------------------------------------------------------------- why

    @cached_property
    def critical_path(self) -> tuple[PathHop, ...]:
        """What the last rank waited for, and what that waited for, back to the start; from the start on.

        Consecutive pieces touch: together they last from 0 to `seconds`. Where two things ended at once, the path goes
        along the message. Rounds in which a vertex is busy with messages to the same peer are one piece.
        """
        path: list[PathHop] = []
        vertex = int(self.finish_seconds.argmax())
        end_s, top = self.seconds, self.schedule.rounds
        while top > 0:
            bottom = (top - 1) // max(self.every, 64) * max(self.every, 64)
            played = list(zip(self._states(bottom, top), self._rounds(bottom, top), strict=True))
            for k in range(top - 1, bottom - 1, -1):
                hop = _hop_before(k, vertex, end_s, *played[k - bottom], self.size_bytes)
                vertex, end_s = hop.src, hop.begin_s
                last = path[-1] if path else None
                if last is not None and (hop.src, hop.dst, hop.peer) == (last.src, last.src, last.peer) == last[1:4]:
                    path.pop()
                    wire_s, shared_s = hop.wire_s + last.wire_s, hop.shared_s + last.shared_s
                    hop = hop._replace(end_s=last.end_s, wire_s=wire_s, shared_s=shared_s)
                if hop.end_s > hop.begin_s or hop.src != hop.dst:
                    path.append(hop)
            top = bottom
        if end_s > 0:
            path.append(PathHop(-1, vertex, vertex, -1, 0.0, end_s, 0.0, 0.0))
        return tuple(reversed(path))

    @property
    def guilty(self) -> Culprit:
        """The rank or link that puts off the end by most, by the critical path."""
        return self.blamed[0]

    @cached_property
    def blamed(self) -> tuple[Culprit, ...]:
        """All ranks and links on the critical path that put off its end, the worst first; or nobody."""
        return _find_culprits(self.critical_path, self.schedule, self.topology, self.seconds)

    @property
    def shares(self) -> dict[str, float]:
        """Of the critical path: seconds of `late`, `alpha`, `wire` and `work` (adding up, messages), by kind of link.

        Keys are such as `alpha nvswitch` and `wire infiniband`, and `late`, `work`.
        """
        found: defaultdict[str, float] = defaultdict(float)
        for hop in self.critical_path:
            if hop.round < 0:
                found["late"] += hop.end_s
                continue
            kind = self.topology.class_of(hop.src, hop.peer) if hop.peer >= 0 else ""
            work = hop.end_s - hop.begin_s - hop.wire_s - hop.alpha_s
            for key, seconds in ((f"alpha {kind}", hop.alpha_s), (f"wire {kind}", hop.wire_s), ("work", work)):
                if seconds > 1e-12 * self.seconds:
                    found[key] += seconds
        return dict(found)

    # ---------------------------------------------------------------------------------------------- playing again

    def _states(self, first: int, end: int) -> Iterator[Floats]:
        """Yield when everybody was ready for rounds `first` to `end` - 1."""
        if self.every == 1:
            yield from self.checkpoints[first:end]
            return
        at = first // self.every * self.every
        ready = self.checkpoints[at // self.every]
        for round_ in self._rounds(at, end):
            if at >= first:
                yield ready
            at += 1
            if at < end:
                ready = round_.play(ready, self.size_bytes, 1)
        if at < end:
            yield self.final

    def _rounds(self, first: int, end: int) -> Iterator[PreparedRounds]:
        for round_ in self._prepared if self.schedule.stretches else self._made(first, end):
            begun, rounds = round_.stretch.first, round_.stretch.rounds
            yield from (round_,) * (min(end, begun + rounds) - max(first, begun))

    @cached_property
    def _prepared(self) -> tuple[PreparedRounds, ...]:
        return tuple(self._made(0, self.schedule.rounds))

    def _made(self, first: int, end: int) -> Iterator[PreparedRounds]:
        wires = wires_for(self.schedule, self.topology)
        for stretch in stretches(self.schedule):
            if stretch.first < end and stretch.first + stretch.rounds > first:
                yield PreparedRounds(stretch, wires)

    # ---------------------------------------------------------------------------------------------- words

    def describe(self) -> str:
        """Return in two lines what it takes and why."""
        what = f"{self.schedule.name} of {size(self.size_bytes)} over {self.topology.describe()}"
        took = f"{duration(self.seconds)}, busbw {giga(self.busbw)} GB/s"
        return f"{what}: {took}\nbottleneck: {self.guilty}"


def checkpoint_every(schedule: Schedule) -> int:
    """Return after how many rounds the times are kept: 1, or for large simulations the root of the rounds."""
    cells = (schedule.rounds + 1) * schedule.vertices
    return 1 if cells <= KEPT else max(isqrt(schedule.rounds), 1)
