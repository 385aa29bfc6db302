"""The ring: the fewest bytes per rank there can be, one neighbour at a time.

P. Patarasuk, X. Yuan: "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009), §4.
"""

from __future__ import annotations

import numpy as np

from ringside.schedule.schedule import Round, Schedule


def ring(n: int) -> Schedule:
    """Return the ring all-reduce of `n` ranks: reduce-scatter, then all-gather, each in n-1 rounds.

    Every rank only ever sends to its right neighbour (r+1) mod n. In the first half chunk c travels from rank c+1 once
    around to rank c, each rank adding its own; in the second half the finished chunk travels around from rank c.
    n chunks, 2(n-1) rounds, 2(n-1)/n of the tensor sent and received per rank (the lower bound), one port, right for
    every n ≥ 1.

    Raises:
        UsageError: n < 1.
    """
    return Schedule("ring", ranks=n, chunks=n, rounds=2 * (n - 1), generate=_ring_round, parameters=(n,))


def _ring_round(n: int, k: int) -> Round:
    src = np.arange(n, dtype=np.int32)
    reducing = k < n - 1
    behind = k + 1 if reducing else k - (n - 1)
    return Round(src, (src + 1) % n, (src - behind) % n, np.full(n, reducing))
