"""The time of an all-reduce, predicted from its schedule and what is known of the links. Pure NumPy.

`price_sizes` replays a schedule over a `CostNetwork` (R. W. Hockney, "The communication challenge for MPP", 1994: every
message costs a latency and a time per byte; what overlaps stands below). `price_choice` prices
an `AlgorithmSpec`: shared memory inside the hosts and the schedule between them, in the blocks in which it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.cost.network import CostNetwork, Floats
from ringside.errors import UsageError
from ringside.schedule import Schedule
from ringside.text import percent

Ints = NDArray[np.int64]

# -------------------------------------------------------------------------------------------------
# A schedule replayed as a max-plus clock: when every chunk is where, given a network. Vectorised over sizes.
#
# What is replayed is what `ringside.engine.net.exchange.run` does, and no more:
#
# - A vertex takes the messages of a round before those of the next; it sends a chunk as soon as it has it, whatever
#   round that belongs to.
# - A chunk travels in segments: its first one may be on its next way before its last has come.
# - A link carries one message after the other; messages that share a site's interface share its rate.
#
# All times are arrays [..., sizes], so that one replay prices a whole ladder of sizes.


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


class _State:
    """When what is where, as far as the replay has come; seconds, a column per size. By symmetry: on rank 0 alone."""

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


# -------------------------------------------------------------------------------------------------
# What an all-reduce takes, by such a clock.

SEGMENT_BYTES = 1 << 18
BLOCK_BYTES = 4 << 20
PIECES = 16  # in which a large tensor passes through shared memory (`ringside.engine.net.exchange.pipeline`)
LEAST_OVERHEAD_S = 5e-5  # of a message between processes that share cores: a switch from one to another


@dataclass(frozen=True, slots=True)
class Price:
    """What a schedule takes, and what dominates it.

    Args:
        seconds: Until the last vertex has everything.
        latency_s: What it takes with no bytes at all: rounds and messages.
        link: (src, dst) of the link whose messages take longest by themselves; None if nothing is sent. Of a schedule
            priced by symmetry rank 0's, and all others are the same.
        link_s: How long they take, seconds.
    """

    seconds: float
    latency_s: float
    link: tuple[int, int] | None
    link_s: float

    def why(self) -> str:
        """Return what dominates."""
        if self.seconds <= 0 or self.link is None:
            return "nothing is sent"
        if self.latency_s >= 0.5 * self.seconds:
            return f"{percent(self.latency_s / self.seconds)} is latency of rounds and messages"
        share = min(self.link_s / self.seconds, 1.0)
        return f"link {self.link[0]}>{self.link[1]} carries data {percent(share)} of the time"


def price_sizes(
    schedule: Schedule, sizes: Sequence[float], network: CostNetwork, *, segment_bytes: int = SEGMENT_BYTES
) -> list[Price]:
    """Return what an all-reduce (or any collective) takes for each of several sizes; one replay prices all.

    Args:
        schedule: Without switches, of as many ranks as the network has vertices.
        sizes: Of the tensor, bytes.
        network: The links.
        segment_bytes: What one message carries at most.

    Raises:
        UsageError: The schedule and the network do not fit together.
    """
    if schedule.switches or schedule.ranks != network.size:
        raise UsageError(
            f"{schedule.name} of {schedule.ranks} ranks and {schedule.switches} switches cannot be priced on a network "
            f"of {network.size} vertices"
        )
    if not schedule.rounds:
        return [Price(0.0, 0.0, None, 0.0)] * len(sizes)
    chunk = np.array([*sizes, 0.0]) / schedule.chunks  # the last column is that of no bytes
    folded = schedule.rotational and network.even
    state = _State(1 if folded else schedule.ranks, schedule.chunks, chunk, np.minimum(chunk, segment_bytes), network)
    sites = None if network.site is None else tuple(network.sites.tolist())
    for k in range(schedule.rounds):
        state.advance_round(_messages(schedule, k, folded, sites))
    *ends_s, latency_s = state.clock.max(axis=0).tolist()
    found = []
    for seconds, busy in zip(ends_s, state.busy.T, strict=False):
        link = int(busy.argmax())
        found.append(Price(seconds, latency_s, divmod(link, network.size), float(busy[link])))
    return found


@dataclass(frozen=True, eq=False)
class Cluster:
    """What all-reduces between hosts depend on.

    Args:
        between: The hosts' links.
        hosts: The ranks of each host.
        local_s: What passing a tensor through shared memory takes at least, seconds (adding up and sharing).
        local_seconds_per_byte: What it takes per byte more.
        inside: (latency in seconds, seconds per byte) of a *message* between two ranks of one host.
        segment_bytes: What one message carries at most.
        block_bytes: `native` goes over hosts in blocks of this size.
        wire_share: Bytes of a message of ours per byte of tensor; less than 1 with a narrow wire dtype. `native` always
            sends all.
        machines: The machine that each host's processes run on, by host; hosts that share one (containers, network
            namespaces) share its cores. Empty: each host is a machine.
        cores: Cores that the processes of each host may use, by host; empty: enough.
    """

    between: CostNetwork
    hosts: tuple[tuple[int, ...], ...]
    local_s: float = 0.0
    local_seconds_per_byte: float = 0.0
    inside: tuple[float, float] = (5e-5, 5e-10)
    segment_bytes: int = SEGMENT_BYTES
    block_bytes: int = BLOCK_BYTES
    wire_share: float = 1.0
    machines: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()

    @cached_property
    def ranks(self) -> CostNetwork:
        """The network of all ranks."""
        return self.between.expanded(self.hosts, *self.inside)

    def crowding(self, over: str) -> float:
        """Return how many processes share a core where most do, of those that exchange messages; at least 1.

        Args:
            over: `ranks`, `hosts` or `leaders`.
        """
        if not self.cores:
            return 1.0
        talkers = [len(ranks) if over == "ranks" else self.lanes if over == "hosts" else 1 for ranks in self.hosts]
        machines = self.machines or tuple(range(len(talkers)))
        together = np.bincount(machines, weights=talkers)[list(machines)]
        return max(1.0, float((together / self.cores).max()))

    @property
    def lanes(self) -> int:
        """How many ranks of every host carry a slice."""
        return min(map(len, self.hosts))

    @property
    def shared(self) -> bool:
        """Whether some host has several ranks."""
        return max(map(len, self.hosts)) > 1


def price_choice(choice: AlgorithmSpec, sizes: Sequence[int], cluster: Cluster) -> list[Price]:
    """Return what an all-reduce by a choice takes for each of several sizes, in bytes.

    Links were timed while one rank per host talked. Where more do than there are cores, every message waits for its
    turn on a core, at its sender and its receiver, in proportion (`Cluster.crowding`).

    Between hosts the lanes together send what one carrier would: 1/lanes of the bytes each, on one link. `native` is
    priced as a ring, which is what Gloo runs; its real share is measured anyway.

    Raises:
        UsageError: The choice needs a switch, or an order of other vertices.
    """
    share, native = cluster.wire_share, choice.algorithm == NATIVE
    if native:
        choice, share = AlgorithmSpec("ring", choice.over), 1.0
    segment = cluster.segment_bytes
    network = _as_felt(cluster.ranks if choice.over == "ranks" else cluster.between, share, choice.over, cluster)
    schedule = choice.schedule(network.size)
    if choice.over == "ranks":
        return price_sizes(schedule, [size * share for size in sizes], network, segment_bytes=segment)
    # Through shared memory: native in blocks, each passed while another is between hosts; ours whole, and large ones
    # piece by piece beside the messages.
    segment *= cluster.lanes if choice.over == "hosts" else 1
    blocks = [min(size, cluster.block_bytes) if native else size for size in sizes]
    prices = price_sizes(schedule, [block * share for block in blocks], network, segment_bytes=segment)
    found = []
    for between, size, block in zip(prices, sizes, blocks, strict=True):
        local_s = _local(cluster, block)
        if native:
            # Several blocks, each passed through shared memory while another is between hosts.
            count = max(size / max(block, 1), 1.0)
            seconds = local_s + between.seconds + (count - 1) * max(local_s, between.seconds)
            latency_s = count * between.latency_s + local_s
            found.append(replace(between, seconds=seconds, latency_s=latency_s, link_s=count * between.link_s))
            continue
        piece_s = _local(cluster, min(size, max(size // PIECES, segment)))
        large = size >= 2 * segment
        seconds = piece_s + max(between.seconds, local_s) if large else between.seconds + local_s
        found.append(replace(between, seconds=seconds, latency_s=between.latency_s + piece_s))
    return found


def _local(cluster: Cluster, size: float) -> float:
    """Return what adding up and sharing a part of a tensor inside the hosts takes, seconds."""
    return cluster.local_s + cluster.local_seconds_per_byte * size if cluster.shared else 0.0


def _as_felt(network: CostNetwork, share: float, over: str, cluster: Cluster) -> CostNetwork:
    """Return the network as messages of a choice find it: more of them per core, and narrow while elements are not."""
    crowding = cluster.crowding(over) / cluster.crowding("leaders")  # the links were timed by leaders alone
    reduce, overhead_s = network.reduce / share, network.overhead_s
    if crowding > 1.0:
        overhead_s = crowding * max(overhead_s, LEAST_OVERHEAD_S)
    if (reduce, overhead_s) == (network.reduce, network.overhead_s):
        return network
    return replace(network, reduce=reduce, overhead_s=overhead_s)
