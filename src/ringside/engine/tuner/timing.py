"""Prices the candidates, times the best few of them, and makes the table of choices of it; alike on all ranks."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ringside._core.enums import DType, ReduceOp
from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.cost.model import Cluster, Price
from ringside.engine.net.exchange.signature import CollectiveSignature
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.rank_map import RankMap
from ringside.engine.probe.prober import ONE_ELEMENT, PROBE, Probe, Prober, measure_cluster
from ringside.engine.tuner.table import LADDER, TimingTable, candidates, make_table, predicted_at, priced
from ringside.schedule import binomial_broadcast

# -------------------------------------------------------------------------------------------------
# Which choices are timed at a size, turn by turn, and which of them are dropped. Pure.

MOST_TIMED = 4 << 20
"""Larger tensors go in blocks of this size: their ranking is that of one block."""
HOPELESS = 2.0
"""A choice that takes so many times what the best of a turn does is not timed again."""

_FEWEST = "leaders/parameter_server"  # it has the fewest messages; their price does not tell how busy cores will be


TimingPlan = list[tuple[int, list[str]]]
"""What rank 0 has all ranks time: choices per size."""


@dataclass(eq=False)
class Race:
    """The choices that are timed at one size, turn by turn; the same on all ranks."""

    size: int
    names: list[str]
    keep: frozenset[str]

    def __post_init__(self) -> None:
        self.data = np.zeros(max(self.size // 4, 1), dtype=np.float32)
        self.going = list(range(len(self.names)))
        self.turns: list[np.ndarray[Any, np.dtype[np.float64]]] = []

    def took(self, seconds: np.ndarray[Any, np.dtype[np.float64]]) -> None:
        """Record a turn's times of the slowest rank, -1 where a choice was not timed, and drop the hopeless."""
        self.turns.append(seconds)
        best = min(float(seconds[index]) for index in self.going)
        self.going = [n for n in self.going if self.names[n] in self.keep or seconds[n] <= HOPELESS * best]

    def cost_s(self) -> float:
        """Return what the next turn takes, if it takes what the last one did."""
        return sum(max(float(self.turns[-1][index]), 0.0) for index in self.going)

    def medians(self) -> dict[tuple[str, int], float]:
        """Return the median of each choice's turns."""
        if not self.turns:
            return {}
        took = np.array(self.turns)
        times = zip(self.names, (column[column >= 0] for column in took.T), strict=True)
        return {(name, self.size): float(np.median(seconds)) for name, seconds in times if len(seconds)}


def best_at(prices: Mapping[str, Sequence[Price]], size: int) -> list[str]:
    """Return the choices to time at a size, the most promising first after native, of every way by turns.

    These are the native ones, and the best by price over leaders, hosts and ranks each.
    """
    ways: list[list[str]] = []
    shared = f"hosts/{NATIVE}" in prices
    for over, small, large, block in (("leaders", 3, 1, 0), ("hosts", 2, 2, 1), ("ranks", 1 if shared else 4, 3, 2)):
        count = small if size < 1 << 20 else large if size < MOST_TIMED else block
        if over == "ranks" and shared and size >= 1 << 20:
            count = 0  # every byte would leave a host as often as it has ranks
        if over == "hosts" and size <= LADDER[0]:
            count = 0  # a single element is carried by one rank of a host, as by a leader
        ours = [name for name in prices if not name.endswith(NATIVE) and AlgorithmSpec.parse(name).over == over]
        if size < 1 << 16:  # nothing to cut in pieces
            ours = [name for name in ours if AlgorithmSpec.parse(name).segments == 1]
        ways.append(sorted(ours, key=lambda choice: predicted_at(size, prices[choice]))[:count])
    if size < 1 << 16 and _FEWEST in prices and _FEWEST not in ways[0]:
        ways[0].append(_FEWEST)
    if size >= 1 << 20:
        ways = [ways[1], ways[0], ways[2]]
    found = [name for names in itertools.zip_longest(*ways) for name in names if name is not None]
    return [NATIVE, *found, *([f"hosts/{NATIVE}"] if shared else [])]


# -------------------------------------------------------------------------------------------------
# Decisions of rank 0, given to all ranks byte for byte.


class Rank0Broadcast:
    """This rank's end of broadcasts of bytes from rank 0.

    Args:
        across: The group.

    Attributes:
        is_here: Whether this is rank 0.
    """

    def __init__(self, across: HierarchicalEngine) -> None:
        self._across = across
        self.is_here = across.rank_map.rank == 0

    def broadcast(self, data: bytes) -> bytes:
        """Return the bytes that rank 0 gives; those of other ranks are ignored. A collective."""
        # First their number, then the bytes: the other ranks must know how many to receive.
        size = np.array([len(data)], dtype=np.int64)
        self._run(size.view(np.uint8))
        content = np.zeros(int(size[0]), dtype=np.uint8)
        if not len(content):
            return b""
        if self.is_here:
            content[:] = np.frombuffer(data, dtype=np.uint8)
        self._run(content)
        return content.tobytes()

    def _run(self, data: Any) -> None:
        call = CollectiveSignature(PROBE, int(DType.uint8), int(ReduceOp.sum), len(data))
        self._across.run(binomial_broadcast(self._across.rank_map.size), [data], call)


_TIMED = (4 << 10, 1 << 20, 64 << 10, 4 << 20, 4, 256 << 10)  # in this order, as far as the budget goes
_REPEATS = 3
_FEW = 3  # choices that are timed where there is no time for more
_MOST_PACE = 2.0  # what choices take over what they should, as the smaller sizes tell of larger ones
_MUST, _MUST_S = _TIMED[:3], 0.1  # are timed once even late, unless that is to take so long


class StartupTiming:
    """One rank's part in timing choices.

    Args:
        roster: The ranks of each host.
        rank0: Broadcasts the decisions.
        prober: Times links and choices.
        clock: Seconds.

    Attributes:
        timings: What choices took, seconds, by choice and size; on rank 0.
        prices: What they should take; on rank 0.
        pace: What choices take over what they should, as far as they have been timed; None: none has been.
    """

    def __init__(self, roster: RankMap, rank0: Rank0Broadcast, prober: Prober, clock: Callable[[], float]) -> None:
        self._rank_map, self._rank0, self._prober, self._clock = roster, rank0, prober, clock
        self.timings: dict[tuple[str, int], float] = {}
        self.prices: dict[str, list[Price]] = {}
        self.pace: float | None = None

    def resume(self, table: TimingTable) -> None:
        """Go on from the figures of a table that was kept."""
        self.timings, self.prices = table.timings(), table.prices()

    def make_table(
        self, probe: Probe, budget_s: float, key: dict[str, str], before: TimingTable | None, size_bytes: int
    ) -> bytes:
        """Price, time and decide; return the table as all ranks have it. A collective.

        Args:
            probe: The links as they are.
            budget_s: For how long to time, seconds; rank 0's clock counts.
            key: What the choice depends on.
            before: The table in use; None: there is none, and every size is timed.
            size_bytes: The size that led to this: the one that is timed again.
        """
        deadline = self._clock() + budget_s
        cluster = measure_cluster(self._prober, probe.network)
        # Rank 0 prices the candidates and plans which are timed.
        plan = self._plan(probe, cluster, before, size_bytes) if self._rank0.is_here else []
        plan = msgspec.json.decode(self._rank0.broadcast(msgspec.json.encode(plan)), type=TimingPlan)
        # All time them, in turns, as far as rank 0's clock allows.
        used = {rank.winner for rank in before.ranks} if before is not None else set()
        races = [Race(size, names, frozenset({NATIVE, *used})) for size, names in plan]
        warm: set[str] = set()
        self.pace = None
        for turn in range(_REPEATS):
            for race in races:
                count = self.affordable(race, turn, deadline).to_bytes(2, "little")
                count_of_rank0 = int.from_bytes(self._rank0.broadcast(count), "little")
                if count_of_rank0:
                    self._take_turn(race, count_of_rank0, turn, warm)
        # Rank 0 decides by the medians of the slowest rank.
        if not self._rank0.is_here:
            return self._rank0.broadcast(b"")
        timings = {key: seconds for race in races for key, seconds in race.medians().items()}
        self.timings.update(timings)
        per_host = [len(ranks) for ranks in self._rank_map.hosts]
        topology = cluster.between.to_topology(self._rank_map.names, per_host, "measured by ringside at start-up")
        fresh = {size for _, size in timings}
        table = make_table(self.prices, self.timings, key, topology, before=before, fresh=fresh)
        return self._rank0.broadcast(table.encode())

    def _plan(self, probe: Probe, cluster: Cluster, before: TimingTable | None, size_bytes: int) -> TimingPlan:
        """Price the candidates and return which are to be timed; rank 0 only."""
        prices = priced(candidates(cluster, probe.better_order), cluster)
        if before is None:
            self.prices = prices
            return [(size, best_at(prices, size)) for size in _TIMED]
        # What was timed before is scaled by what its price has changed by.
        used = {rank.winner for rank in before.ranks} - prices.keys()
        prices |= priced((AlgorithmSpec.parse(text) for text in used), cluster)
        self.timings = {
            (choice, size): seconds * predicted_at(size, prices[choice]) / predicted_at(size, self.prices[choice])
            for (choice, size), seconds in self.timings.items()
            if choice in prices and choice in self.prices
        }
        self.prices = prices
        size = min(LADDER[bisect_left(before.bounds(), size_bytes)], MOST_TIMED)
        names = [before.at(size_bytes).winner, *best_at(prices, size)]
        return [(size, list(dict.fromkeys(names)))]

    def affordable(self, race: Race, turn: int, deadline: float) -> int:
        """Return how many choices, the first ones, the budget has room for in one more turn; rank 0 decides."""
        if not self._rank0.is_here or (turn > 0 and not race.turns):
            return 0
        left_s = deadline - self._clock()
        if turn > 0:
            return len(race.names) if race.cost_s() < left_s else 0
        few = min(_FEW, len(race.names))
        costs_s = [(self.pace or 1.0) * predicted_at(race.size, self.prices[name]) for name in race.names]
        cost_s, few_s = sum(costs_s), sum(costs_s[:few])
        if cost_s < left_s:
            return len(race.names)
        must = self.pace is None or (race.size in _MUST and few_s < _MUST_S * self.pace)
        return few if must or few_s < left_s else 0

    def _take_turn(self, race: Race, count: int, turn: int, warm: set[str]) -> None:
        """Time the first `count` choices of a race once each. A collective."""
        # What is not to be timed: the plans of schedules, and connections.
        race.going = [index for index in race.going if index < count]
        for index in race.going:
            if turn == 0:
                self._prober.rehearse(AlgorithmSpec.parse(race.names[index]), race.data.size)
            if race.names[index] not in warm:
                warm.add(race.names[index])
                self._prober.time_once(AlgorithmSpec.parse(race.names[index]), ONE_ELEMENT)
        if turn == 0:
            self._prober.most(np.zeros(1))  # a rank that comes later than others would be charged to the first
        # Each turn begins with another choice.
        took = np.full(len(race.names), -1.0)
        timed = race.going
        for index in np.roll(timed, -turn).tolist():
            took[index] = self._prober.time_once(AlgorithmSpec.parse(race.names[index]), race.data)
        race.took(self._prober.most(took))
        if self._rank0.is_here and turn == 0:
            predicted_s = sum(predicted_at(race.size, self.prices[race.names[index]]) for index in timed)
            self.pace = min(max(float(race.turns[0][timed].sum()) / predicted_s, 1.0), _MOST_PACE)
