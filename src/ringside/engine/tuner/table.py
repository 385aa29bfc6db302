"""Which all-reduce for which size, and why: a table that all ranks hold alike. Pure; no messages, no files."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from ringside.decoding import UNDECODABLE
from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.cost.model import BLOCK_BYTES, Cluster, Price, price_choice
from ringside.errors import UsageError
from ringside.schedule import ALGORITHMS
from ringside.text import percent

SCHEMA = 5
LADDER = (4, *(1024 * 4**k for k in range(9)))  # one element, and 1 KiB to 64 MiB
MOST_SAFE = 0.97  # of native's expected time, where a size was not timed itself
WORTH_IT = 0.9  # of the present choice's expected time, for a change during training
TOLERATED = 1.05  # of native's: beyond, a choice is left even if the gain is small

_CUT = ("chain", "tree", "two_tree")  # are pipelined
_SEGMENTS = (4, 16)
_LEFT_OUT = ("in_network", "hierarchical")  # need a reducer at the switch; is what `hosts/` does
_FLAT = ("ring", "direct", "recursive_doubling", "one_shot")


class TimingRow(msgspec.Struct, frozen=True):
    """One choice at one size.

    Args:
        choice: As `AlgorithmSpec` writes it.
        predicted_s: By pricing, seconds.
        measured_s: Median of all-reduces for real, seconds; None: not timed at this size.
        expected_s: The prediction times what measured and predicted differ by at the sizes that were timed.
        eligible: Whether it was timed beside `native`, at the nearest size that was, and was at least as fast.
    """

    choice: str
    predicted_s: float
    measured_s: float | None
    expected_s: float
    eligible: bool


class Rank(msgspec.Struct, frozen=True):
    """All choices at one size, the fastest expected first.

    Args:
        size_bytes: The size.
        winner: What is chosen.
        why: A sentence.
        rows: The choices.
        turns: How often the promising ones took turns in the job's own all-reduces; 0: not yet.
    """

    size_bytes: int
    winner: str
    why: str
    rows: tuple[TimingRow, ...]
    turns: int = 0


class TimingTable(msgspec.Struct, frozen=True):
    """What was decided, and from what.

    Args:
        key: What it depends on.
        topology: The links, as `Network.to_topology` writes them.
        ranks: By size, ascending.
        schema: Of this form.
    """

    key: dict[str, str]
    topology: dict[str, Any]
    ranks: tuple[Rank, ...]
    schema: int = SCHEMA

    def encode(self) -> bytes:
        """Return it as JSON that people can read."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    @staticmethod
    def decode(data: bytes) -> TimingTable:
        """Return the table that `encode` wrote; `UsageError` for anything else."""
        try:
            table = msgspec.json.decode(data, type=TimingTable)
            for rank in table.ranks:
                AlgorithmSpec.parse(rank.winner)
        except (*UNDECODABLE, UsageError) as error:
            raise UsageError(f"this is no selection table: {error}") from None
        sizes = [0, *(rank.size_bytes for rank in table.ranks), 1 << 63]
        if any(a >= b for a, b in itertools.pairwise(sizes)):
            raise UsageError("this is no selection table: its sizes do not ascend")
        if table.schema != SCHEMA or not table.ranks:
            raise UsageError(f"this is a selection table of schema {table.schema}, not {SCHEMA}, or an empty one")
        return table

    def at(self, size_bytes: int) -> Rank:
        """Return the choices at the size nearest to this one."""
        return self.ranks[bisect_left(self.bounds(), size_bytes)]

    def bounds(self) -> list[float]:
        """Return the sizes at which one rank ends and the next begins, one fewer than ranks."""
        sizes = [rank.size_bytes for rank in self.ranks]
        return [math.sqrt(a * b) for a, b in itertools.pairwise(sizes)]

    def timings(self) -> dict[tuple[str, int], float]:
        """Return what was timed, seconds by (choice, size in bytes)."""
        return {
            (row.choice, rank.size_bytes): row.measured_s
            for rank in self.ranks
            for row in rank.rows
            if row.measured_s is not None
        }

    def prices(self) -> dict[str, list[Price]]:
        """Return what was predicted, of choices that are priced at every size, without what dominates it."""
        found: dict[str, list[Price]] = {}
        for rank in self.ranks:
            for row in rank.rows:
                found.setdefault(row.choice, []).append(Price(row.predicted_s, 0.0, None, 0.0))
        return {choice: prices for choice, prices in found.items() if len(prices) == len(self.ranks)}

    def expected_s(self, size_bytes: int, choice: str) -> float | None:
        """Return what an all-reduce should take; None: this choice is not in the table."""
        known = [(rank.size_bytes, row.expected_s) for rank in self.ranks for row in rank.rows if row.choice == choice]
        if not known:
            return None
        sizes, times = zip(*known, strict=True)
        if size_bytes >= sizes[-1]:  # beyond the largest size: in proportion
            return float(times[-1] * size_bytes / sizes[-1])
        return float(np.interp(size_bytes, sizes, times))


Timings = Mapping[tuple[str, int], float]
"""What all-reduces took that were executed for real: the median in seconds, by (choice, size in bytes)."""


def candidates(cluster: Cluster, order: Sequence[int] = ()) -> list[AlgorithmSpec]:
    """Return the choices that make sense.

    Args:
        cluster: The hosts.
        order: A better order of the hosts for rings; empty: there is none.
    """
    hosts, ranks = cluster.between.size, cluster.ranks.size
    ways = ["ranks"] if not cluster.shared else ["hosts", *(["leaders"] if cluster.lanes > 1 else [])]
    names = [name for name in ALGORITHMS if name not in _LEFT_OUT and (name != "one_shot" or hosts <= 16)]
    found = [AlgorithmSpec(NATIVE)]
    for over in ways:
        found += [AlgorithmSpec(NATIVE, over)] if over == "hosts" else []
        found += [AlgorithmSpec(name, over) for name in names]
        found += [AlgorithmSpec(name, over, segments) for name in _CUT for segments in _SEGMENTS]
        if order:
            found += [
                AlgorithmSpec("ring", over, order=tuple(order)),
                AlgorithmSpec("chain", over, _SEGMENTS[-1], tuple(order)),
            ]
    if cluster.shared and ranks <= 64:
        found += [AlgorithmSpec(name) for name in _FLAT if name != "one_shot" or ranks <= 16]
    return found


def priced(choices: Iterable[AlgorithmSpec], cluster: Cluster) -> dict[str, list[Price]]:
    """Return the price of every choice at every size."""
    return {str(choice): price_choice(choice, LADDER, cluster) for choice in choices}


def make_table(
    prices: Mapping[str, Sequence[Price]],
    timings: Timings,
    key: dict[str, str],
    topology: dict[str, Any],
    *,
    before: TimingTable | None = None,
    fresh: Iterable[int] | None = None,
) -> TimingTable:
    """Return the table that follows from predictions and timings.

    A choice other than `native` wins only where it was timed beside `native` at the nearest size and was at least as
    fast; a table in use is changed only for a gain of a tenth, or to keep that promise, and at sizes far from those
    that were timed anew only where the prices on the links as they are now differ by as much.

    Args:
        prices: By choice, one per size of `LADDER`.
        timings: What was timed.
        key: What the table depends on.
        topology: The links.
        before: The table in use.
        fresh: With `before`, the sizes that were timed anew; None: all.
    """
    anew = None if fresh is None else tuple(fresh)
    timed_sizes = sorted({size for choice, size in timings if choice == NATIVE})  # at which others have a rival
    ranks = []
    for index, size in enumerate(LADDER):
        # Expected is the price times measured / predicted: the choice's own, or the median of those timed nearby.
        nearest = min(timed_sizes, key=lambda timed: abs(math.log(timed / size)), default=None)
        ratios = sorted(
            seconds / predicted_at(timed, prices[choice])
            for (choice, timed), seconds in timings.items()
            if timed == nearest and choice in prices
        )
        median_ratio = ratios[len(ratios) // 2] if ratios else 1.0
        expected = {
            choice: of_size[index].seconds * (_ratio(choice, size, of_size, timings) or median_ratio)
            for choice, of_size in prices.items()
        }
        rows = []
        for choice, seconds in expected.items():
            predicted_s, measured_s = prices[choice][index].seconds, timings.get((choice, size))
            eligible = _eligible(choice, size, nearest, expected, timings)
            rows.append(TimingRow(choice, predicted_s, measured_s, seconds, eligible))
        rows.sort(key=lambda row: (row.expected_s, row.choice))
        winner = next((row.choice for row in rows if row.eligible), NATIVE)
        # A table in use is changed only where that is worth it.
        if before is not None:
            old = before.at(size).winner
            if old in expected and expected[winner] >= WORTH_IT * expected[old]:
                winner = winner if expected[old] > TOLERATED * expected[NATIVE] else old
            # What was timed at a size holds for those near it; beyond a block all sizes rank alike.
            known = anew is None or any(
                max(size, timed) <= 4 * min(size, timed) or min(size, timed) >= BLOCK_BYTES for timed in anew
            )
            if winner != old and old in prices and not known:
                cheaper = prices[winner][index].seconds < WORTH_IT * prices[old][index].seconds
                winner = winner if cheaper else old
        turns = before.at(size).turns if before is not None and winner == before.at(size).winner else 0
        why = _why(winner, prices[winner][index] if winner in prices else None, rows)
        ranks.append(Rank(size, winner, why, tuple(rows), turns))
    return TimingTable(key, topology, tuple(ranks))


def _eligible(choice: str, size: int, nearest: int | None, expected: Mapping[str, float], timings: Timings) -> bool:
    if choice == NATIVE:
        return True
    if nearest is None or (choice, nearest) not in timings:
        return False
    safe = 1.0 if size == nearest else MOST_SAFE  # a promise about a size that was not timed needs a margin
    return timings[choice, nearest] <= timings[NATIVE, nearest] and expected[choice] <= safe * expected[NATIVE]


def _ratio(choice: str, size: int, of_size: Sequence[Price], timings: Timings) -> float | None:
    """Return measured / predicted of a choice at a size: between the sizes that were timed, in log-log."""
    own = sorted((timed, seconds) for (name, timed), seconds in timings.items() if name == choice)
    ratios = [(timed, seconds / predicted_at(timed, of_size)) for timed, seconds in own]
    if not ratios:
        return None
    if size <= ratios[0][0]:
        return ratios[0][1]
    for (low, a), (high, b) in itertools.pairwise(ratios):
        if size <= high:
            share = math.log(size / low) / math.log(high / low)
            return math.exp((1 - share) * math.log(a) + share * math.log(b))
    return ratios[-1][1]


def predicted_at(size: int, of_size: Sequence[Price]) -> float:
    """Return the prediction at a size of the ladder, or at the nearest, seconds; never 0."""
    nearest = min(range(len(of_size)), key=lambda index: abs(math.log(LADDER[index] / size)))
    return max(of_size[nearest].seconds, 1e-9)


def _why(winner: str, price: Price | None, rows: Sequence[TimingRow]) -> str:
    other = next((row for row in rows if row.choice != winner), None)
    own = next((row for row in rows if row.choice == winner), None)
    parts = [f"{winner}: {price.why()}" if price is not None else winner]
    if other is not None and own is not None:
        more = other.expected_s / own.expected_s - 1
        cost = f"{percent(more)} more" if more >= 0 else f"{percent(-more)} less"
        note = "" if other.eligible or more >= 0 else ", but was not measured to be faster than native"
        parts.append(f"{other.choice} would take {cost}{note}")
    return "; ".join(parts)
