"""What schedules say that a measurement in the lab must show: bytes per host, the busiest link, rounds. Pure.

All of it is read off a `ringside.schedule.Schedule`; nothing here is measured or fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.net.exchange.message_size import MessageSize, size_of
from ringside.engine.net.exchange.ordering import find_order
from ringside.engine.settings import Settings
from ringside.schedule import Schedule, traffic

# The largest messages between hosts, and on a link how many of them have a place that is posted ahead
# (`ringside.engine.net.exchange.exchange.Exchange`).
LARGE = MessageSize(Settings().message_bytes, 4)

# What one of them carries: a chunk may be on its next way when its first segment has come.
SEGMENT_BYTES = LARGE.segment_bytes

# Ethernet, IPv4 and TCP with timestamps: what the kernel counts of every frame beside TCP's payload.
FRAME_HEADER_BYTES = 14 + 20 + 32

Interval = tuple[float, float]


def schedule_of(algorithm: str, vertices: int) -> Schedule:
    """Return the schedule of a name as `Communicator.all_reduce(algorithm=...)` takes it, over ranks or hosts.

    Gloo (`gloo`, `native`) has no schedule of ours; for large tensors it runs a ring.
    """
    choice = AlgorithmSpec.parse(NATIVE if algorithm == "gloo" else algorithm)
    return (AlgorithmSpec("ring") if choice.algorithm == NATIVE else choice).schedule(vertices)


def host_bytes(algorithm: str, size_bytes: int, ranks_per_host: Sequence[int]) -> list[tuple[float, float]]:
    """Return what every host (received, sent) over its link in one all-reduce, bytes, without any header.

    Args:
        algorithm: As `all_reduce` takes it: over ranks, `hosts/...` or `leaders/...`.
        size_bytes: Of the tensor.
        ranks_per_host: Ranks of each host, numbered host by host.
    """
    over_ranks = algorithm == "gloo" or AlgorithmSpec.parse(algorithm).over == "ranks"
    sizes = list(ranks_per_host) if over_ranks else [1] * len(ranks_per_host)
    schedule = schedule_of(algorithm, sum(sizes))
    # A switch is no host: what goes there leaves a host and enters none.
    host = np.concatenate([np.repeat(np.arange(len(sizes)), sizes), np.full(schedule.switches, -1)])
    chunks = traffic(schedule).matrix() * (host[:, None] != host[None, :])
    per_chunk = size_bytes / schedule.chunks
    received, sent = chunks.sum(axis=0) * per_chunk, chunks.sum(axis=1) * per_chunk
    return [(float(received[host == h].sum()), float(sent[host == h].sum())) for h in range(len(sizes))]


@dataclass(frozen=True)
class Busiest:
    """The direction of a host's link that bounds an all-reduce with one rank per host in a star.

    Args:
        vertex: Whose link.
        receives: Whether it is what comes in, not what goes out.
        size_bytes: What passes there.
        fill_hops: Segments that must travel before its first one can come, and after its last one has: the time in
            which the pipeline fills and empties.
        fill_bytes: The same in bytes over a link.
    """

    vertex: int
    receives: bool
    size_bytes: float
    fill_hops: int
    fill_bytes: float

    @property
    def total_bytes(self) -> float:
        """What the time is to be proportional to."""
        return self.size_bytes + self.fill_bytes


def messages_of(schedule: Schedule, size_bytes: int, bytes_per_s: float | None = None) -> MessageSize:
    """Return how large the messages are in which the engine sends a tensor, and how many have a place.

    Args:
        schedule: One vertex per host.
        size_bytes: Of the tensor.
        bytes_per_s: What the engine has found a link to carry; None: it has timed none.
    """
    return size_of(schedule, size_bytes, LARGE, bytes_per_s)


def busiest(schedule: Schedule, size_bytes: int, *, bytes_per_s: float | None = None) -> Busiest:
    """Return the direction of a host's link that takes longest, its pipeline's fill included; a switch has no link.

    Args:
        schedule: One vertex per host.
        size_bytes: Of the tensor.
        bytes_per_s: See `messages_of`.
    """
    per_chunk = size_bytes / schedule.chunks
    segment = min(per_chunk, messages_of(schedule, size_bytes, bytes_per_s).segment_bytes)
    counted = traffic(schedule)
    before, after = _hops(schedule)
    found = [
        Busiest(v, receives, int(count[v]) * per_chunk, hops, hops * segment)
        for receives, count in ((False, counted.sent), (True, counted.received))
        for v in range(schedule.ranks)
        for hops in [int(before[int(receives), v] + after[int(receives), v])]
    ]
    return max(found, key=lambda one: one.total_bytes)


def played_bytes(schedule: Schedule, size_bytes: int, bytes_per_s: float | None = None) -> float | None:
    """Return what a link would carry in the time that the schedule takes if nothing counted but its messages' order.

    The engine's own play on paper: a vertex sends one segment and receives one at a time, stores each before it hands
    it on, and has as many places on a link as it has in truth. So it is the busiest link's bytes, and what it idles.
    It is no bound: where several flows share a link in truth, none waits for another one's turn (`direct`).

    Args:
        schedule: One vertex per host.
        size_bytes: Of the tensor.
        bytes_per_s: See `messages_of`.
    """
    per_chunk, size = size_bytes / schedule.chunks, messages_of(schedule, size_bytes, bytes_per_s)
    segments = max(-(-per_chunk // size.segment_bytes), 1)
    found = find_order(schedule, (int(segments),) * schedule.chunks, size.window)
    return None if found is None else found[1] * per_chunk / segments


def chain(schedule: Schedule) -> int:
    """Return how many messages the longest chain has in which each waits for the one before it.

    Rounds have no barrier between them, so it may be shorter than the rounds: recursive doubling off a power of two
    takes in what the ranks too many send while others exchange already.
    """
    return int(_chains(schedule, backward=False)[1].max(initial=0))


@lru_cache(maxsize=256)
def _hops(schedule: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return per direction (0 out, 1 in) and vertex the least hops before what passes there, and after, [2, vertices].

    The content of a chunk at a vertex depends on a chain of messages: those before a message, and those after it that
    carry it on.
    """
    return _chains(schedule, backward=False)[0], _chains(schedule, backward=True)[0]


def _chains(schedule: Schedule, *, backward: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the least hops by direction and vertex as of `_hops`, and how long the chain of each chunk is in the end.

    Args:
        schedule: Whose messages.
        backward: Count those that carry a chunk on, in place of those that it waited for.
    """
    least = np.full((2, schedule.vertices), np.iinfo(np.int64).max)
    depth = np.zeros((schedule.vertices, schedule.chunks), dtype=np.int64)
    rounds = range(schedule.rounds)
    for step in map(schedule.round, reversed(rounds) if backward else rounds):
        near, far = (step.dst, step.src) if backward else (step.src, step.dst)
        hops, copies = depth[near, step.chunk], ~step.reduce
        for side, vertex in enumerate((step.src, step.dst)):
            np.minimum.at(least[side], vertex, hops)
        depth[step.dst[copies], step.chunk[copies]] = 0
        np.maximum.at(depth, (far, step.chunk), hops + 1)
    least[least == np.iinfo(np.int64).max] = 0
    return least, depth


def last_bucket_s(buckets: Sequence[float], compute_s: float, bytes_per_second: float) -> float:
    """Return when a step's last gradient bucket is through if its bytes alone count, seconds from the step's beginning.

    Forward is a third of what is computed; then layers of equal work leave their gradients, and a bucket is handed over
    with its last one. A link carries one bucket after the other.

    Args:
        buckets: Bytes that a host's link carries for each, in the order in which they are handed over.
        compute_s: Forward and backward, seconds.
        bytes_per_second: Of the link.
    """
    over_s, sent = 0.0, 0.0
    for size in buckets:
        sent += size
        ready_s = compute_s * (1 + 2 * sent / sum(buckets)) / 3
        over_s = max(over_s, ready_s) + size / bytes_per_second
    return over_s


def leaves(n: int) -> list[int]:
    """Return the ranks that send in only one round of the single tree of `n` ranks: its leaves."""
    sent = traffic(schedule_of("tree", n)).sent
    return [rank for rank in range(n) if sent[rank] == 1 and rank > 0]


def overlap(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Return for how long an interval of both kinds is open at once, seconds."""
    a, b = merged(first), merged(second)
    return sum(max(min(x[1], y[1]) - max(x[0], y[0]), 0.0) for x in a for y in b)


def length(intervals: Iterable[Interval]) -> float:
    """Return for how long at least one interval is open, seconds."""
    return sum(end - begin for begin, end in merged(intervals))


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same times as intervals that do not touch, ascending."""
    result: list[Interval] = []
    for begin, end in sorted(intervals):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result
