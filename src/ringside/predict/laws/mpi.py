"""What an all-reduce costs among processes on CPUs, from what a message between two of them costs.

Point-to-point latencies p(S) and bandwidths b of two ranks on two hosts, as osu_latency and osu_bw print them, and the
number of hosts h and of ranks on each g. Three terms, each with a figure that a measured table may move:

- noise: every round waits for the slowest of n ranks. Delays that an operating system causes have so heavy a tail that
  the maximum over n grows like n itself (a Pareto law of index 1), so this is a time per rank. A network whose own
  latencies scatter makes it larger.
- network: the faster of two algorithms. Leaders of hosts exchange all of the tensor in log2(h) rounds; or all ranks do,
  halving and doubling (R. Thakur, R. Rabenseifner and W. Gropp, 2005), 2·log2(h) rounds of p, and the g ranks of a
  host share its interface: 2·g·S/b.
- memory: the leaders' way needs the ranks of a host to add up among themselves, 2·log2(g) passes over the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ringside.errors import UsageError
from ringside.predict.laws.bumps import Floats
from ringside.predict.laws.calibrate import NOISY
from ringside.predict.laws.fabric import Law, TermsLaw
from ringside.predict.tables.table import Table

NOISE_PER_RANK_S = 100e-9  # the geometric mean over published clusters of 1,792 to 6,144 ranks
PASS_BYTES_PER_S = 4.7e9  # two ranks that add up in shared memory (osu_allreduce -np 2)
PASS_S = 1e-6
SPREAD = np.array([0.55, 0.40, 0.45])


@dataclass(frozen=True, eq=False)
class Pairs:
    """What messages between two ranks on two hosts cost.

    Args:
        cluster: What the tables call it.
        hosts: Number of hosts of the cluster it was measured on.
        sizes: Bytes, ascending, float64 [m].
        latency_s: One way, seconds, float64 [m].
        bytes_per_s: Of one pair at its best; None: from the largest latency.
        scatter: How much the latency of small messages varies: largest over median.
    """

    cluster: str
    hosts: int
    sizes: Floats
    latency_s: Floats
    bytes_per_s: float | None = None
    scatter: float = 1.0

    def one_way(self, sizes: ArrayLike) -> Floats:
        """Return the latency of sizes, float64 [n]: interpolated, and by the rate beyond the largest."""
        requested = np.maximum(np.asarray(sizes, dtype=np.float64), 1.0)
        inside = np.exp(np.interp(np.log(requested), np.log(self.sizes), np.log(self.latency_s)))
        extra: Floats = np.maximum(requested - self.sizes[-1], 0.0) / self.rate
        return inside + extra

    @property
    def rate(self) -> float:
        """Bytes per second of one pair."""
        return self.bytes_per_s or float(np.max(self.sizes / self.latency_s))


class Processes(TermsLaw):
    """The three terms as a backbone for `calibrate.fit`; its figures are factors of the terms.

    Args:
        pairs: Point-to-point costs.
        hosts: h.
        ranks: n = g·h.
    """

    drift = np.array([0.55, 0.20, 0.20])  # noise differs most between scales

    def __init__(self, pairs: Pairs, hosts: int, ranks: int) -> None:
        self.pairs, self.hosts, self.ranks = pairs, hosts, ranks

    def terms(self, sizes: Floats) -> Floats:
        """Return noise, network and memory in seconds, float64 [n, 3]."""
        rounds, per = math.ceil(math.log2(max(self.hosts, 1))), self.ranks / self.hosts
        one_way = self.pairs.one_way(sizes)
        passes = 2 * math.log2(per) * (PASS_S + sizes / PASS_BYTES_PER_S)
        leaders = rounds * (one_way + self.pairs.one_way(np.ones(1)))
        shared = 2 * per * sizes * (1 - 1 / self.hosts) / self.pairs.rate
        everyone = 2 * rounds * self.pairs.one_way(sizes / self.ranks) + shared
        by_leaders = leaders + passes < everyone
        noise = np.full(len(sizes), NOISE_PER_RANK_S * self.ranks * self.pairs.scatter)
        return np.stack([noise, np.where(by_leaders, leaders, everyone), np.where(by_leaders, passes, PASS_S)], axis=1)


def process_law(pairs: Pairs, hosts: int, ranks: int) -> Law:
    """Return what an all-reduce is expected to cost among `ranks` processes on `hosts` hosts.

    Raises:
        UsageError: There is only one host (nothing is known of its insides), or fewer ranks than hosts.
    """
    if hosts < 2 or ranks < hosts:
        raise UsageError(f"{ranks} ranks on {hosts} hosts: point-to-point tables are for two hosts and more")
    spread = SPREAD + np.array([0.3, 0.2, 0.0]) * math.log(pairs.scatter)
    small = float(pairs.one_way(np.ones(1))[0])
    words = (
        f"{pairs.cluster or 'point-to-point tables'}: {small * 1e6:.3g} µs and {pairs.rate / 1e9:.3g} GB/s between two "
        f"ranks, {ranks // hosts} ranks share an interface"
    )
    return Law(np.zeros(3), spread, words, backbone=Processes(pairs, hosts, ranks), noise=NOISY)


def pairs_of(tables: Sequence[Table]) -> list[Pairs]:
    """Return the point-to-point costs in tables of `osu_latency` and `osu_bw`, one per cluster and host count."""
    found = []
    latencies = [table for table in tables if table.collective == "p2p_latency"]
    for table in latencies:
        rows = [row for row in table.rows if row.size_bytes > 0]
        if not rows:
            continue
        rates = [
            max(row.size_bytes / row.time_s for row in other.rows)
            for other in tables
            if other.collective == "p2p_bandwidth" and other.rows
            and (other.cluster, other.hosts) == (table.cluster, table.hosts)
        ]  # fmt: skip
        small = [row for row in rows if row.size_bytes <= 64 and row.high_s]
        ratios = [row.high_s / row.time_s for row in small if row.high_s is not None]
        sizes, times = (np.array([getattr(row, name) for row in rows]) for name in ("size_bytes", "time_s"))
        scatter = max(1.0, float(np.median(ratios))) if ratios else 1.0
        found.append(Pairs(table.cluster, table.hosts, sizes, times, rates[0] if rates else None, scatter))
    return found


def pairs_for(table: Table, pairs: Sequence[Pairs]) -> Pairs | None:
    """Return the costs that belong to a table: of its cluster, measured on as many hosts or nearly; None: none do.

    Where only one cluster's costs are known and they do not name it, they are taken to be the table's.
    """
    named = [one for one in pairs if one.cluster == table.cluster]
    if not named and len(pairs) == 1 and not (pairs[0].cluster and table.cluster):
        named = list(pairs)
    return min(
        named, key=lambda one: (abs(math.log2(max(one.hosts, 1) / max(table.hosts, 1))), one.hosts), default=None
    )
