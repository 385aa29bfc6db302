"""What ranks in several domains ask of a machine: push beside two levels, counted from their schedules and priced.

A domain is a NUMA node, or the cores of one last-level cache. In *push* the owner of a slice reads it in all tensors
and writes it into all: most of that crosses domains. In *two levels* (`algorithm="hierarchical"` on bound ranks) a
slice crosses once per domain. Per byte of tensor: what crosses into the busiest domain, and what all ranks read and
write.

A time is the largest of three: a rank's bytes at its core's rate, a domain's at its memory's, and what crosses at the
link's. Nothing is added for synchronisation, so it is for large tensors; the rates are assumed, not measured.

    python -m bench.allreduce.contention
    ringside bench -n 16 --pin --algorithm auto,hierarchical     (the same, measured where there are so many cores)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from bench.common import make_parser, markdown_table

from ringside.schedule import Schedule, direct, traffic
from ringside.schedule.algorithms.hierarchical import over_groups


@dataclass(frozen=True)
class Machine:
    """Rates in GB/s.

    Args:
        name: In words.
        core: What a core reads and writes together.
        memory: What a domain's memory (or, of tensors that fit there, its cache) gives, reads and writes together.
        link: What comes into a domain from the others.
    """

    name: str
    core: float
    memory: float
    link: float


@dataclass(frozen=True)
class Demand:
    """Bytes per byte of tensor.

    Args:
        crossing: Into the domain that most comes into, reads and writes.
        moved: Read and written by all ranks together.
    """

    crossing: float
    moved: float


MACHINES = [
    Machine("two sockets of today", core=12.0, memory=200.0, link=60.0),
    Machine("two sockets, an old link", core=10.0, memory=80.0, link=16.0),
    Machine("caches of 8 cores, tensors in them", core=30.0, memory=240.0, link=40.0),
]


def push(groups: list[list[int]]) -> Demand:
    """Return what push asks: it reads and writes every tensor once, as `direct` sends it."""
    ranks = sum(map(len, groups))
    return Demand(_crossing(direct(ranks), groups), 2.0 * ranks)


def two_levels(groups: list[list[int]]) -> Demand:
    """Return what two levels ask, executed in the tensors: sources are read, and each destination is written once."""
    schedule, moved = over_groups(groups), 0
    for k in range(schedule.rounds):
        step = schedule.round(k)
        stores = {(dst, chunk): reduce for _, dst, chunk, reduce in step}
        moved += len(step.src) + sum(stores.values()) + len(stores)  # what is reduced into is read as well
    return Demand(_crossing(schedule, groups), moved / schedule.chunks)


def _crossing(schedule: Schedule, groups: list[list[int]]) -> float:
    of = {rank: number for number, ranks in enumerate(groups) for rank in ranks}
    into = [0.0] * len(groups)
    for src, dst, share in traffic(schedule).links():
        into[of[dst]] += float(share) if of[src] != of[dst] else 0.0
    return max(into)


def seconds_per_gb(demand: Demand, machine: Machine, groups: list[list[int]]) -> float:
    """Return how long a GB of tensor takes at least, whichever the machine has least of."""
    ranks = sum(map(len, groups))
    busiest = max(map(len, groups)) / ranks
    return max(
        demand.moved / ranks / machine.core,
        demand.moved * busiest / machine.memory,
        demand.crossing / machine.link,
    )


def main() -> int:
    """Print the table."""
    make_parser("bench.allreduce.contention", __doc__).parse_args()
    rows = []
    for domains, each in ((2, 2), (2, 4), (2, 8), (2, 16), (2, 32), (4, 4), (8, 8)):
        groups = [list(range(d * each, (d + 1) * each)) for d in range(domains)]
        one, two = push(groups), two_levels(groups)
        ratios = (seconds_per_gb(one, m, groups) / seconds_per_gb(two, m, groups) for m in MACHINES)
        crossing, moved = (f"{a:.1f}, {b:.1f}" for a, b in ((one.crossing, two.crossing), (one.moved, two.moved)))
        rows.append([f"{domains} × {each}", crossing, moved, *(f"{ratio:.2f}" for ratio in ratios)])
    print(markdown_table(["domains × ranks", "crossing", "moved", *(m.name for m in MACHINES)], rows))
    print("\nCrossing and moved: push, two levels. Under a machine: how many times as fast two levels are.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
