"""Times the links between hosts (or ranks): latency, rate, and what a host's links carry together.

A probe is a schedule like any other and runs over the same `HierarchicalEngine`: a *ping* goes to and fro between two
vertices on one message, a *bulk* goes one way in many segments, a *flood* goes from everybody to everybody. Pairs take
turns as in a round-robin tournament, disjoint pairs at once, so that no link or interface is used twice in one turn.
Every rank times what it receives on its own clock; the sums of what all have found are the same matrix on all ranks.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ringside._core.enums import DType, ReduceOp
from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.buffers import address_of
from ringside.engine.cost.model import Cluster
from ringside.engine.cost.network import CostNetwork, Floats
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.exchange.exchange import USUAL_WINDOW, HopTiming
from ringside.engine.net.exchange.in_flight import LONG_S, InFlight
from ringside.engine.net.exchange.signature import CollectiveSignature
from ringside.engine.net.exchange.wire import Wire
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.reduction import Reduction, fold
from ringside.engine.probe.links import (
    SLOW,
    MeasuredSlowLink,
    best_ring_order,
    carried_together,
    links_beside,
    median_beside,
    plainly_slow,
    round_robin,
    slow_links,
    slowest_of_ring,
    suspect_links,
)
from ringside.engine.topology import usable_cores
from ringside.processes import boot_id, namespace_id
from ringside.schedule import Round, from_rounds

# -------------------------------------------------------------------------------------------------
# Links that look slow are timed again before they are reported, or avoided.

_LEAST_AGAIN = 3  # turns, however long they take: links so slow are timed for long each time


def remeasure_slow_links(prober: Prober, upper: Floats, known: Floats) -> Floats:
    """Time links that look slow again, and return the rates to go by: only what is plainly slow stays so.

    Before that a link has three timings, on a busy machine one.

    Args:
        prober: Times links; every rank of the group calls this alike.
        upper: Bytes per second of each link, as it looked, float64 [n, n].
        known: A first idea of the same.
    """
    suspects = suspect_links(upper) if prober.effort.again else []
    if not suspects:
        return upper
    # Each suspect is timed in turn with links beside it, so that both meet the machine in the same state.
    n, began = len(prober.vertices), prober.clock()
    rows = [[link, *links_beside(link, suspects, n)] for link in suspects]
    turns: list[list[list[float]]] = []
    for turn in range(prober.effort.again):
        if turn >= _LEAST_AGAIN and prober.late(began, prober.effort.again_s):
            break
        turns.append([[prober.bulk_rate(link, float(known[link])) for link in row] for row in rows])
    width = max(map(len, rows))
    padded = np.array([[row + [0.0] * (width - len(row)) for row in turn] for turn in turns])
    times = prober.total(padded)
    sure: Floats = upper.copy()
    for index, row in enumerate(rows):
        own, others = times[:, index, 0], times[:, index, 1 : len(row)].ravel()
        if not plainly_slow(own.tolist(), others.tolist()):
            sure[row[0]] = max(float(np.percentile(own, 75)), SLOW * median_beside(upper, row[0]))
    return sure


PROBE = 100  # code of the collective, for messages about ranks that call different things
PING_BYTES = 64
_U8, _F32, _F64 = int(DType.uint8), int(DType.float32), int(DType.float64)
_SUM, _MAX = int(ReduceOp.sum), int(ReduceOp.max)
_SHARE = AlgorithmSpec("recursive_doubling")
ONE_ELEMENT = np.zeros(1, dtype=np.float32)
"""What a choice is run on so that its connections are made before it is timed."""
_LOCAL_BYTES = 1 << 20
_TRAIN = 16  # segments that a long link is timed by, the later half: a window that doubles has room for several then
_TRAIN_AGAIN, _MOST_AGAIN = 4, 8  # segments of links that look slow at a first look alone, and how many such links
_ROUND_TRIPS = 40  # that they may take, by a first idea of the rate that may be one segment in one round trip, or two

Messages = Sequence[tuple[int, int, int]]
"""What goes in one round: (sender, receiver, chunk) of each, by numbers of vertices."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How thoroughly links are timed.

    Args:
        pings: Round trips per pair.
        bulk_s: How long one bulk should take, seconds.
        repeats: Bulks per direction; the median counts.
        most_bytes: Largest bulk.
        alone: Time every pair once more with nothing else under way.
        flood: Find out what a vertex's links carry together.
        again: Turns in which links that look slow are timed again, beside others; 0: what was seen counts.
        again_s: When these are over on rank 0's clock, a few such turns must do, seconds.
        budget_s: When this is over on rank 0's clock, what is only there to be more exact is left out, seconds.
    """

    pings: int = 8
    bulk_s: float = 0.006
    repeats: int = 3
    most_bytes: int = 8 << 20
    alone: bool = False
    flood: bool = True
    again: int = 8
    again_s: float = 0.4
    budget_s: float = math.inf


QUICK = Effort()
THOROUGH = Effort(pings=30, bulk_s=0.03, repeats=5, most_bytes=64 << 20, alone=True)


@dataclass(frozen=True, eq=False)
class Probe:
    """What a probe found; equal on all ranks.

    Args:
        network: The links between the vertices.
        upper: Bytes per second of each link, the upper quartile, float64 [n, n]: what else the machine does makes a
            link look slow now and then, nothing makes a slow one look fast. But the median where most links are long.
        rate_spread: Of the bulks of each link, (90th - 10th percentile) / median, float64 [n, n].
        alone: Bytes per second of each link with nothing else under way, float64 [n, n]; None: not timed.
        shortest_s: The shortest of each link's latencies that were timed, seconds, float64 [n, n]: a busy machine makes
            links look longer, but never shorter. None: not known.
    """

    network: CostNetwork
    upper: Floats
    rate_spread: Floats
    alone: Floats | None = None
    shortest_s: Floats | None = None

    @property
    def rates(self) -> Floats:
        """Bytes per second of each link, the better one of alone and beside others, float64 [n, n]."""
        return self.network.rates if self.alone is None else np.maximum(self.network.rates, self.alone)

    @property
    def usual_rate(self) -> float | None:
        """Bytes per second of most links, the median; None where there are none."""
        links = self.rates[~np.eye(len(self.rates), dtype=np.bool_)]
        return float(np.median(links)) if len(links) else None

    @property
    def round_trip_bytes(self) -> float:
        """Rate x round trip of the long link that holds most, bytes; 0: none is long.

        But no more than the usual rate of the long ones x their longest round trip: the fastest of many is one that was
        timed wrong, and no collective is faster than what is usual.
        """
        if self.shortest_s is None or not (long := self.shortest_s >= LONG_S).any():
            return 0.0
        round_trips_s, rates = 2 * self.shortest_s[long], self.rates[long]
        usual = np.percentile(rates, 50, method="lower")  # of two, the mean of both would count the wrong one
        return float(min(round_trips_s.max() * usual, (round_trips_s * rates).max()))

    @property
    def better_order(self) -> tuple[int, ...]:
        """An order of a ring whose slowest link is at least a tenth faster than as they are; empty if there is none."""
        order = best_ring_order(self.upper)
        gain = slowest_of_ring(self.upper, order) / max(slowest_of_ring(self.upper, range(len(order))), 1e-9)
        return order if gain > 1.1 else ()

    @property
    def slow(self) -> list[MeasuredSlowLink]:
        """The slow links, slowest first."""
        return slow_links(self.upper)


@dataclass(eq=False)
class Prober:
    """Times links over the messages of an `HierarchicalEngine`. Every rank of the group makes one and calls it alike.

    Args:
        across: The group.
        vertices: The ranks to time links between; default: the first of every host.
        effort: How thoroughly.
        wire: How float32 elements travel in the all-reduces that are timed; None: as they are.
    """

    across: HierarchicalEngine
    vertices: tuple[int, ...] = ()
    effort: Effort = QUICK
    clock: Callable[[], float] = field(default=time.perf_counter)
    wire: Wire | None = None

    def __post_init__(self) -> None:
        self.vertices = self.vertices or tuple(ranks[0] for ranks in self.across.rank_map.hosts)
        rank = self.across.rank_map.rank
        self._me = self.vertices.index(rank) if rank in self.vertices else -1
        self._began = self.clock()

    def probe(self) -> Probe:
        """Time everything. A collective; a link that breaks meanwhile raises as any collective does."""
        self._began = self.clock()
        turns = round_robin(len(self.vertices))
        # Latency and a first idea of the rate, from which follows how much to send for an exact one.
        latency, rates, shortest = self._time_pings(turns)
        segment = self.across.exchange.segment_bytes
        segments = np.clip(np.ceil(rates * self.effort.bulk_s / segment) + 1, 3, self.effort.most_bytes // segment)
        sizes: NDArray[np.int64] = (segments * segment).astype(np.int64)
        long = len(turns) > 0 and float(np.median(shortest[~np.eye(len(shortest), dtype=np.bool_)])) >= LONG_S

        def timed(turns: Sequence[Sequence[tuple[int, int]]]) -> tuple[Floats, Floats, Floats]:
            return self._trains(turns, rates, shortest) if long else self._bulks(turns, sizes, rates)

        _, upper, rate_spread = timed(turns)
        alone = None
        if self.effort.alone:
            alone, above, _ = timed([[pair] for turn in turns for pair in turn])
            upper = np.maximum(upper, above)
        if not long:  # where it is, most rates are those of many timings already, and a few more would take seconds
            upper = remeasure_slow_links(self, upper, rates)
        # A machine that is busy elsewhere takes from the rate of the moment, not from the link.
        return Probe(self._network(latency, upper), upper, rate_spread, alone, shortest)

    # -------------------------------------------------------------------------------------------- turns

    def _time_pings(self, turns: Sequence[Sequence[tuple[int, int]]]) -> tuple[Floats, Floats, Floats]:
        """Return latency, a first idea of the rate, and the shortest latency of each link."""
        n = len(self.vertices)
        found = np.zeros((3, n, n))
        for turn, pairs in enumerate(turns):
            late = turn > 0 and not self._in_time(0.5)
            back = [(b, a) for a, b in pairs]
            times = 3 if late else self.effort.pings
            hops = self._run([_one_way(pairs), _one_way(back)] * times, [PING_BYTES])
            trips = np.diff([hop.last for hop in hops])
            for a, b in pairs:
                if self._me == a and len(trips):
                    found[0, a, b] = found[0, b, a] = np.median(trips) / 2
                    found[2, a, b] = found[2, b, a] = np.min(trips) / 2
            for direction in (pairs, back):
                for src, rates in self._train(direction, 2).items():
                    found[1, src, self._me] = rates[0]
        latency, known, shortest = self.total(found)
        return latency, known, shortest

    def _bulks(
        self, turns: Sequence[Sequence[tuple[int, int]]], sizes: NDArray[np.int64], known: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return the rate of each link, the upper quartile of it, and its spread."""
        segment = self.across.exchange.segment_bytes
        # Of a link so slow that even three segments take long, the first idea is as good.
        is_quick = known * max(0.1, 10 * self.effort.bulk_s) > 3 * segment
        seen: defaultdict[int, list[float]] = defaultdict(list)
        for number, pairs in enumerate([*turns] * self.effort.repeats):
            if number % len(turns) == 0 and not self._in_time(0.75):
                break
            self._gather()
            for direction in (pairs, [(b, a) for a, b in pairs]):
                quick = [(a, b) for a, b in direction if is_quick[a, b]]
                mine = [pair for pair in quick if self._me in pair]
                size = int(sizes[mine[0]]) if mine else 0
                for hop in self._run([_one_way(quick)], [size]) if quick else []:
                    seen[self.vertices.index(hop.src)].append(arrival_rate([hop], segment))
        return self._quartiles(seen, known)

    def _trains(
        self, turns: Sequence[Sequence[tuple[int, int]]], known: Floats, latency: Floats
    ) -> tuple[Floats, Floats, Floats]:
        """Return the rate of each long link, the same again, and its spread.

        A new connection sends little in its first round trips, and so does one that was idle for a while. So segments
        follow each other without a pause, and each of the later half is timed by the one before. Between some of them
        the opening window ends, and these come late; behind one that was lost and sent again some come together, as if
        the link were infinitely fast. The median is right where either is rare, or both are as frequent.

        Links that are too slow for so many segments keep the first idea. If that was of a busy moment they would be
        called slow: those that look so are timed by a few more.
        """
        segment, connections = self.across.exchange.segment_bytes, self.across.exchange.connections
        self.across.widen(InFlight(USUAL_WINDOW * connections, connections))  # see `_train`
        is_quick = known * (max(0.1, 10 * self.effort.bulk_s) + _ROUND_TRIPS * 2 * latency) > _TRAIN * segment
        seen: defaultdict[int, list[float]] = defaultdict(list)
        for pairs in turns:
            for direction in (pairs, [(b, a) for a, b in pairs]):
                self._gather()
                if quick := [(a, b) for a, b in direction if is_quick[a, b]]:
                    for src, rates in self._train(quick, _TRAIN).items():
                        seen[src] += rates[_TRAIN // 2 - 1 :]
        middle, _, spread = self._quartiles(seen, known)
        if self.effort.again and (doubted := [link for link in suspect_links(middle) if not is_quick[link]]):
            again = np.zeros_like(known)
            for link in doubted[:_MOST_AGAIN]:
                self._gather()
                for src, rates in self._train([link], _TRAIN_AGAIN).items():
                    again[src, self._me] = np.median(rates)
            middle = np.maximum(middle, self.total(again))
        return middle, middle, spread

    def _train(self, pairs: Sequence[tuple[int, int]], count: int) -> dict[int, list[float]]:
        """Send so many segments one way, on one connection; return bytes per second of each but the first, by sender.

        On several they would share the link and arrive together: the others' turns are filled with small messages.
        """
        segment = self.across.exchange.segment_bytes
        fill = [[(a, b, 1) for a, b in pairs]] * (self.across.exchange.connections - 1)
        hops = self._run([_one_way(pairs), *fill] * count, [segment, PING_BYTES])
        came_s = [hop.last for hop in hops if hop.size_bytes == segment]
        rates = [segment / max(took_s, 1e-7) for took_s in np.diff(came_s).tolist()]
        return {self.vertices.index(hops[0].src): rates} if hops else {}

    def _gather(self) -> None:
        """Have those that have nothing to do wait here, and so for no longer than one turn, if there are such turns."""
        if self.effort.alone:
            self.most(np.zeros(1))

    def _quartiles(self, seen: Mapping[int, Sequence[float]], known: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the median of what the ranks have seen of each link, the upper quartile of it, and its spread.

        Args:
            seen: Bytes per second of links to this vertex, by sender.
            known: A first idea of the rates, for links of which nobody has seen anything.
        """
        found = np.zeros((3, *known.shape))
        for src, got in seen.items():
            low, middle, upper, high = np.percentile(got, (10, 50, 75, 90))
            found[:, src, self._me] = middle, upper, (high - low) / middle
        rates, uppers, spread = self.total(found)
        best, above = (np.where(figures > 0, figures, known) for figures in (rates, uppers))
        return best, above, spread

    def bulk_rate(self, link: tuple[int, int], known: float) -> float:
        """Send one bulk along a link, (sender, receiver), and return bytes per second at the receiver, 0.0 elsewhere.

        A collective.

        Args:
            link: Numbers of vertices.
            known: A first idea of its rate, which says how much is sent.
        """
        segment = self.across.exchange.segment_bytes
        quick = known * max(0.1, 10 * self.effort.bulk_s) > 3 * segment
        hops = self._run([_one_way([link])], [(3 if quick else 2) * segment])
        return arrival_rate(hops[-1:], segment)

    def _network(self, latency: Floats, rates: Floats) -> CostNetwork:
        """Return the network of these links, with what a vertex carries together and the cost of adding up."""
        n = len(self.vertices)
        off = ~np.eye(n, dtype=np.bool_)
        with np.errstate(divide="ignore"):
            per_byte = np.where(off, 1.0 / np.where(rates > 0, rates, 1.0), 0.0)
        # Seconds per byte of adding up, of the slowest rank.
        a, b = np.zeros(_LOCAL_BYTES // 4, dtype=np.float32), np.zeros(_LOCAL_BYTES // 4, dtype=np.float32)
        sources = [address_of(a), address_of(b)]
        took = [self.timed(lambda: fold(sources, sources[0], a.size, _F32, _SUM)) for _ in range(5)]
        reduce = float(self.most(np.array([np.median(took)]))[0]) / _LOCAL_BYTES
        if n < 3 or not self.effort.flood:
            return CostNetwork(latency, per_byte, reduce=reduce)
        together, overhead_s = self._flood(rates, latency)
        nic = 1.0 / together
        return CostNetwork(np.maximum(latency - 2 * overhead_s, 0.1 * latency), per_byte, nic, nic, reduce, overhead_s)

    def _flood(self, rates: Floats, latency: Floats) -> tuple[Floats, float]:
        """Return what enters each vertex while all send, bytes/s, and what a vertex does for each message, seconds.

        An interface is taken to be as fast outwards as inwards. Slow links take no part: they would only hold up.
        """
        n, segment = len(self.vertices), self.across.exchange.segment_bytes
        off = ~np.eye(n, dtype=np.bool_)
        found = np.zeros((2, n))
        # Small messages from all to all: the time of a turn, by the last that came.
        everybody = [(v, w, v) for v in range(n) for w in range(n) if v != w]  # to all others chunk v, its own
        hops = self._run([everybody] * (self.effort.pings if self._in_time(0.8) else 2), [PING_BYTES] * n)
        ends = [max(hop.last for hop in hops if hop.round == k) for k in sorted({hop.round for hop in hops})]
        if len(ends) > 1:
            found[1, self._me] = float(np.median(np.diff(ends))) / n
        # Segments along all links that are not slow.
        fast = rates >= 0.5 * float(np.median(rates[off]))
        turn = [(v, w, v) for v, w, _ in everybody if fast[v, w]]
        found[0, self._me] = arrival_rate(self._run([turn], [3 * segment] * n), segment) if self._me >= 0 else 0.0
        together, per_message = self.total(found)
        # Per message of a turn in which every vertex sends and takes n - 1, beyond those of a ping.
        turn_s, ping_s = float(per_message.sum()), float(np.median(latency[off]))
        overhead_s = min(max(turn_s - ping_s, 0.0) / (2 * (n - 1)), 0.45 * ping_s)
        return carried_together(together, rates), overhead_s

    # -------------------------------------------------------------------------------------------- shared by all

    def most(self, values: Floats) -> Floats:
        """Return the largest of all ranks' values, elementwise. A collective."""
        return _reduced(self.across, values, _MAX)

    def rehearse(self, choice: AlgorithmSpec, count: int) -> None:
        """Work out how the messages of so many elements are ordered, so that this is not timed. Local."""
        self.across.rehearse(count, Reduction(_F32, _SUM, wire=self.wire), choice)

    def time_once(self, choice: AlgorithmSpec, data: NDArray[np.float32]) -> float:
        """Return what an all-reduce by a choice takes on this rank, seconds. A collective."""
        reduction = Reduction(_F32, _SUM, wire=self.wire)
        return self.timed(lambda: self.across.all_reduce(address_of(data), data.size, reduction, choice))

    def time_choice(self, choice: AlgorithmSpec, size_bytes: int, repeats: int) -> list[float]:
        """Return what all-reduces by a choice take on the slowest rank, each of `repeats`, seconds. A collective."""
        data = np.zeros(max(size_bytes // 4, 1), dtype=np.float32)
        self.rehearse(choice, data.size)
        self.time_once(choice, ONE_ELEMENT)
        took = [self.time_once(choice, data) for _ in range(repeats)]
        slowest: list[float] = self.most(np.array(took)).tolist()
        return slowest

    def total(self, values: Floats) -> Floats:
        """Return the sum of all ranks' values, elementwise. A collective."""
        return _reduced(self.across, values, _SUM)

    def _in_time(self, share: float) -> bool:
        """Return whether rank 0's clock is within a share of the budget. A collective, unless there is no budget."""
        if math.isinf(self.effort.budget_s):
            return True
        return not self.late(self._began, share * self.effort.budget_s)

    def late(self, began: float, budget_s: float) -> bool:
        """Return whether a budget is over on rank 0's clock. A collective."""
        late = self.across.rank_map.rank == 0 and self.clock() - began > budget_s
        return bool(self.most(np.array([float(late)]))[0])

    def timed(self, job: Callable[[], object]) -> float:
        """Return how long a job takes here, seconds."""
        began = self.clock()
        job()
        return self.clock() - began

    def _run(self, rounds: Sequence[Messages], sizes: Sequence[int]) -> list[HopTiming]:
        """Run rounds among the vertices, of chunks of so many bytes; return what this rank received, in order."""
        if self._me < 0:
            return []
        v = self.vertices
        made = [Round.of([(v[a], v[b], chunk, False) for a, b, chunk in messages]) for messages in rounds]
        schedule = from_rounds("probe", self.across.rank_map.size, len(sizes), made)
        chunks = [np.zeros(size, dtype=np.uint8) for size in sizes]
        began = time.perf_counter()
        self.across.run(schedule, chunks, CollectiveSignature(PROBE, _U8, _SUM, len(sizes)))
        # The log of hops is a ring of the last ones: those of this run are its end.
        mine: list[HopTiming] = []
        for hop in reversed(self.across.exchange.hops):
            if hop.waited < began:
                break
            mine.append(hop)
        return mine[::-1]


def measure_cluster(prober: Prober, network: CostNetwork) -> Cluster:
    """Return all that pricing needs. A collective.

    Args:
        prober: Of the first rank of every host.
        network: The links between the hosts.
    """
    across, roster = prober.across, prober.across.rank_map
    latency = network.latency_s[~np.eye(network.size, dtype=np.bool_)]
    inside = 0.7 * float(np.median(latency)), 1e-9
    # What passing a tensor through the hosts' shared memory takes: one of few elements, and one of many.
    took = np.zeros(2)
    if across.host_slices is not None:
        for index, elements in enumerate((1024, _LOCAL_BYTES // 4)):
            data = np.zeros(elements, dtype=np.float32)
            per = -(-elements // roster.lanes)
            bounds = [min(elements, per * min(lane, roster.lanes)) for lane in range(roster.local_size + 1)]
            add, share = across.host_slices.prepared(address_of(data), bounds, Reduction(_F32, _SUM))
            add()
            share()
            took[index] = np.median([prober.timed(add) + prober.timed(share) for _ in range(3)])
    small, large = prober.most(took).tolist()
    # The machine of each host and the cores there, as each host's first rank sees them.
    found = np.zeros((2, len(roster.hosts)))
    if roster.local_rank == 0:
        found[:, roster.host] = _shared_cores(), usable_cores()
    marks, cores = prober.total(found)
    _, machines = np.unique(marks, return_inverse=True)
    return Cluster(
        network,
        roster.hosts,
        small,
        max(large - small, 0.0) / _LOCAL_BYTES,
        inside,
        across.exchange.segment_bytes,
        across.block_bytes,
        1.0 if prober.wire is None else prober.wire.wire_bytes(1 << 20) / (ITEM_BYTES[_F32] << 20),
        tuple(machines.tolist()),
        tuple(int(count) for count in cores),
    )


def arrival_rate(hops: Sequence[HopTiming], segment: int) -> float:
    """Return bytes per second of messages, from the first segment's arrival to the last's; 0: there are none.

    Those that arrive beside each other are waited for one after the other, so of a later one alone only that it had
    come by then is known.
    """
    if not hops:
        return 0.0
    size, took = sum(hop.size_bytes for hop in hops), max(hop.last for hop in hops) - min(hop.first for hop in hops)
    return (size - segment) / max(took, 1e-7)


def _reduced(across: HierarchicalEngine, values: Floats, op: int) -> Floats:
    data: Floats = np.ascontiguousarray(values, dtype=np.float64).copy()
    across.all_reduce(address_of(data), data.size, Reduction(_F64, op), _SHARE)
    return data


def _one_way(pairs: Sequence[tuple[int, int]]) -> Messages:
    """Return the round in which the first of each pair sends to the second, all at once."""
    return [(a, b, 0) for a, b in pairs]


def _shared_cores() -> float:
    """Return a number that is equal for processes which share cores, exact as float64."""
    try:
        group = namespace_id("cgroup")  # containers have one each, network namespaces do not
    except OSError:
        group = 0
    text = f"{boot_id()}/{group}/{sorted(os.sched_getaffinity(0))}"
    return float(int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))
