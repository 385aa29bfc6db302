"""The critical path of a simulation: what each of its pieces is, and whose fault it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringside.predict.simulation.rounds import PreparedRounds
from ringside.predict.topology.topology import Topology
from ringside.predict.topology.wires import wires_for
from ringside.schedule import Schedule
from ringside.text import duration

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WORTH_NAMING = 0.02
"""Of the whole time: a rank or link that costs less is not called guilty."""


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
            return "nobody: no rank is late and no link slower than its kind on the critical path"
        who = " > ".join(map(str, self.ranks))
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


def hop_before(k: int, vertex: int, end_s: float, ready: Floats, round_: PreparedRounds, size_bytes: float) -> PathHop:
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


def find_culprits(
    path: Sequence[PathHop], schedule: Schedule, topology: Topology, seconds: float
) -> tuple[Culprit, ...]:
    """Return the ranks and links that put off the end by what is worth naming, the worst first; or nobody.

    Args:
        path: The critical path.
        schedule: What was played.
        topology: Over what.
        seconds: How long it took.
    """
    late = path[0].end_s if path and path[0].round < 0 else 0.0
    found = [Culprit("late rank", (path[0].src,), late)] if late > 0 else []
    # By link and host, how much less the path would take were they as their class.
    hops = [hop for hop in path if hop.peer >= 0]
    src, dst = (np.array(ends, dtype=np.int64) for ends in ([hop.src for hop in hops], [hop.peer for hop in hops]))
    (alpha, per_byte), (plain_alpha, plain) = (
        wires_for(schedule, links).costs(src, dst) for links in (topology, replace(topology, overrides=()))
    )
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
