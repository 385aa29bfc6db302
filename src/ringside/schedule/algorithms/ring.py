"""The ring."""

from __future__ import annotations

from ringside.schedule.collective import ALL_GATHER, REDUCE_SCATTER
from ringside.schedule.schedule import Round, Schedule


def ring(n: int) -> Schedule:
    """The ring: the fewest bytes per rank there can be, one neighbour at a time.

    P. Patarasuk, X. Yuan: "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009), §4.

    Return the ring all-reduce of `n` ranks: reduce-scatter, then all-gather, each in n-1 rounds.

    Every rank only ever sends to its right neighbour (r+1) mod n. In the first half chunk c travels from rank c+1 once
    around to rank c, each rank adding its own; in the second half the finished chunk travels around from rank c.
    n chunks, 2(n-1) rounds, 2(n-1)/n of the tensor sent and received per rank (the lower bound), one port, right for
    every n ≥ 1.

    Raises:
        UsageError: n < 1.
    """
    return Schedule(
        "ring",
        n,
        chunks=n,
        rounds=2 * (n - 1),
        generate=_ring_round,
        parameters=(n,),
        rotational=True,
        stretches=(n - 1, n - 1),
    )


def ring_reduce_scatter(n: int) -> Schedule:
    """Return the first half of the ring: after n-1 rounds rank r has the sum of chunk r; raise `UsageError`: n < 1."""
    return Schedule("ring_reduce_scatter", n, n, n - 1, _ring_round, (n,), 0, REDUCE_SCATTER, True, (n - 1,))


def ring_all_gather(n: int) -> Schedule:
    """Return the second half of the ring: chunk r travels from rank r to all; n-1 rounds; raise `UsageError`: n < 1."""
    return Schedule("ring_all_gather", n, n, n - 1, _gather_round, (n,), 0, ALL_GATHER, True, (n - 1,))


def _ring_round(n: int, k: int) -> Round:
    reducing = k < n - 1
    behind = k + 1 if reducing else k - (n - 1)
    return Round.of([(0, 1, -behind % n, reducing)])


def _gather_round(n: int, k: int) -> Round:
    return _ring_round(n, n - 1 + k)
