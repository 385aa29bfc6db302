"""The time of an all-reduce, predicted from its schedule and what is known of the links. Pure NumPy.

`price_sizes` replays a schedule over a `CostNetwork` (R. W. Hockney, "The communication challenge for MPP", 1994: every
message costs a latency and a time per byte; what overlaps is in `ringside.engine.cost.replay`). `price_choice` prices
an `AlgorithmSpec`: shared memory inside the hosts and the schedule between them, in the blocks in which it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.cost.network import CostNetwork
from ringside.engine.cost.replay import replay
from ringside.errors import UsageError
from ringside.schedule import Schedule
from ringside.text import percent

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
    clock = replay(schedule, np.array([*sizes, 0.0]), network, segment_bytes=segment_bytes)
    if not schedule.rounds:
        return [Price(0.0, 0.0, None, 0.0)] * len(sizes)
    latency_s = float(clock.seconds[-1])  # the last column is that of no bytes
    found = []
    for seconds, busy in zip(clock.seconds[:-1].tolist(), clock.busy.T, strict=False):
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
