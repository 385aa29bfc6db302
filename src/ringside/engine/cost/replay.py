"""A schedule replayed as a max-plus clock: when every chunk is where, given a network. Vectorised over sizes.

What is replayed is what `ringside.engine.net.exchange.run` does, and no more:

-   A vertex takes the messages of a round before those of the next; it sends a chunk as soon as it has it, whatever
    round that belongs to.
-   A chunk travels in segments: its first one may be on its next way before its last has come.
-   A link carries one message after the other; messages that share a site's interface share its rate.

All times are arrays [..., sizes], so that one replay prices a whole ladder of sizes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ringside.engine.cost.network import CostNetwork, Floats
from ringside.schedule import Schedule

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RoundMessages:
    """The messages of one round, ready for the replay; arrays are [transfers].

    Args:
        src: Sender.
        dst: Receiver.
        reads: The cell (vertex * chunks + chunk) that is sent.
        writes: The cell that it goes into.
        reduces: 1.0 where it is added, 0.0 where it overwrites.
        sent: How many messages its sender sent before it in this round, plus one.
        arrivals: Messages that each vertex takes in this round, [vertices].
        folds: Those of them that are added up, [vertices].
        distinct: Whether every vertex sends and receives at most one message, so that no two meet.
        link: The link between sites that it takes, a number.
        place: Its place among the messages of the round on that link, from 0.
        out: Messages of the round that leave its sender's site.
        into: Messages of the round that enter its receiver's site.
        away: 1.0 where it leaves its site, 0.0 where not.
    """

    src: Ints
    dst: Ints
    reads: Ints
    writes: Ints
    reduces: Floats
    sent: Floats
    arrivals: Floats
    folds: Floats
    distinct: bool
    link: Ints
    place: Floats
    out: Floats
    into: Floats
    away: Floats


@dataclass(frozen=True, eq=False)
class Clock:
    """What a replay ends with.

    Args:
        seconds: When the last vertex has everything, float64 [sizes].
        busy: How long the messages of each link take by themselves, float64 [links, sizes]; link src * ranks + dst, and
            of a schedule replayed by symmetry those of rank 0.
    """

    seconds: Floats
    busy: Floats


def replay(schedule: Schedule, sizes: Floats, network: CostNetwork, *, segment_bytes: float) -> Clock:
    """Replay a schedule for several sizes at once.

    Args:
        schedule: Any without switches, of as many ranks as the network has vertices.
        sizes: Bytes, float64 [sizes].
        network: Of its ranks.
        segment_bytes: What a message carries at most.
    """
    folded = schedule.rotational and network.even
    chunk = sizes / schedule.chunks
    state = _State(1 if folded else schedule.ranks, schedule.chunks, chunk, np.minimum(chunk, segment_bytes), network)
    sites = None if network.site is None else tuple(network.sites.tolist())
    for k in range(schedule.rounds):
        state.advance_round(_messages(schedule, k, folded, sites))
    return Clock(state.clock.max(axis=0), state.busy)


class _State:
    """When what is where, as far as the replay has come; seconds, a column per size."""

    def __init__(self, vertices: int, chunks: int, chunk: Floats, segment: Floats, network: CostNetwork) -> None:
        self.network, self.chunk, self.segment = network, chunk, segment
        self.rest = 1.0 - np.divide(segment, chunk, out=np.ones_like(chunk), where=chunk > 0)
        self.messages = np.maximum(np.ceil(chunk / np.maximum(segment, 1.0)), 1.0)
        width = len(chunk)
        links = network.size**2 if vertices > 1 else network.size
        # Of each cell: when its first segment is there, and when its last; of each vertex: until when it works; of each
        # link: when it is free, and how long its messages take; of each site: when its interface is free.
        self.head, self.tail = np.zeros((vertices * chunks, width)), np.zeros((vertices * chunks, width))
        self.clock = np.zeros((vertices, width))
        self.free, self.busy = np.zeros((links, width)), np.zeros((links, width))
        self.out, self.into = np.zeros((network.size, width)), np.zeros((network.size, width))

    def advance_round(self, step: RoundMessages) -> None:
        """Replay one round."""
        network = self.network
        dst = (step.dst if len(self.clock) > 1 else step.link) % network.size  # by symmetry src and dst are rank 0
        per_byte = network.seconds_per_byte[step.src, dst][:, None]
        latency = network.latency_s[step.src, dst][:, None]
        overhead = network.overhead_s * self.messages
        head, tail = self.head[step.reads], self.tail[step.reads]
        # A message starts when its chunk, its sender and its link are ready, and is through when its last segment is.
        start = np.maximum(head + step.sent[:, None] * overhead, self.free[step.link])
        took = per_byte * self.chunk
        begun, start = start, start + step.place[:, None] * took
        done = np.maximum(start + took, tail + per_byte * self.segment)
        np.maximum.at(self.free, step.link, done)
        np.add.at(self.busy, step.link, took)
        done = self._hold_back(step, begun, done)
        first = done - (done - start) * self.rest  # its first segment
        self._fold(step, first + latency, done + latency)

    def _hold_back(self, step: RoundMessages, start: Floats, done: Floats) -> Floats:
        """Return when messages are through, given what the interfaces of their sites carry."""
        network = self.network
        for per_byte, free, vertex, count in (
            (network.out, self.out, step.src, step.out),
            (network.into, self.into, step.dst, step.into),
        ):
            if per_byte is None:
                continue
            site = network.sites[vertex] if len(self.clock) > 1 else np.zeros_like(vertex)
            took = (per_byte[site] * count)[:, None] * self.chunk
            through = (np.maximum(start, free[site]) + took) * step.away[:, None]
            np.maximum.at(free, site, through)
            done = np.maximum(done, through)
        return done

    def _fold(self, step: RoundMessages, head: Floats, tail: Floats) -> None:
        """Have the receivers store or add what has arrived, one message after the other."""
        network = self.network
        clock = self.clock[step.dst]
        work = (network.reduce * step.reduces)[:, None] * self.segment + network.overhead_s
        head, tail = np.maximum(head, clock) + work, np.maximum(tail, clock) + work
        if step.distinct:
            self.head[step.writes], self.tail[step.writes] = head, tail
        else:
            np.maximum.at(self.head, step.writes, head)
            np.maximum.at(self.tail, step.writes, tail)
        self.clock += (network.reduce * step.folds)[:, None] * self.chunk
        self.clock += (network.overhead_s * step.arrivals)[:, None] * self.messages
        np.maximum.at(self.clock, step.dst, tail)


@functools.lru_cache(maxsize=1 << 12)
def _messages(schedule: Schedule, k: int, folded: bool, sites: tuple[int, ...] | None) -> RoundMessages:
    """Return the messages of round k.

    Args:
        schedule: Of all ranks.
        k: The round.
        folded: Those of one vertex, by symmetry.
        sites: The site of each vertex; None: its own.
    """
    n, chunks = schedule.ranks, schedule.chunks
    step = schedule.representatives(k) if folded else schedule.round(k)
    src, dst, chunk = (array.astype(np.int64) for array in (step.src, step.dst, step.chunk))
    reduces = step.reduce.astype(np.float64)
    if folded:  # rank 0 sends chunk c to rank d, so rank 0 gets the chunk that is c seen from rank d
        reads, writes, vertices = chunk, (chunk - dst * (chunks // n)) % chunks, 1
        link, away = dst, np.ones(len(dst))
        out = into = np.full(len(dst), float(len(dst)))
        src = dst = np.zeros_like(dst)
    else:
        reads, writes, vertices = src * chunks + chunk, dst * chunks + chunk, n
        site = np.arange(n) if sites is None else np.array(sites, dtype=np.int64)
        a, b = site[src], site[dst]
        leaves = a != b
        first = np.unique(site, return_index=True)[1]  # a site's first vertex stands for all of them
        link, away = np.where(leaves, first[a] * n + first[b], src * n + dst), leaves.astype(np.float64)
        out, into = (np.bincount(side[leaves], minlength=n).astype(np.float64)[side] for side in (a, b))
    return RoundMessages(
        src,
        dst,
        reads,
        writes,
        reduces,
        sent=places(src) + 1.0,
        arrivals=np.bincount(dst, minlength=vertices).astype(np.float64),
        folds=np.bincount(dst, weights=reduces, minlength=vertices).astype(np.float64),
        distinct=len(np.unique(writes)) == len(writes),
        link=link,
        place=places(link),
        out=out,
        into=into,
        away=away,
    )


def places(keys: Ints) -> Floats:
    """Return for each element how many equal ones come before it, float64."""
    result = np.empty(len(keys), dtype=np.float64)
    if not len(keys):
        return result
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    index = np.arange(len(keys))
    result[order] = index - np.maximum.accumulate(np.where(first, index, 0))
    return result
