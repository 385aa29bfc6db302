"""Gather, scatter, all-to-all and barrier among n ranks: everybody's own piece, straight to where it belongs.

The barrier is the dissemination barrier of D. Hensgen, R. Finkel, U. Manber: "Two algorithms for barrier
synchronization", Int. J. Parallel Programming 17 (1988).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ringside.schedule.collective import ALL_TO_ALL, BARRIER, rooted
from ringside.schedule.combine import reverse
from ringside.schedule.schedule import Round, Schedule


def direct_gather(n: int, root: int = 0) -> Schedule:
    """Return the gather in one round: everybody sends its chunk (rank r owns chunk r) to rank `root`.

    n chunks; the root receives (n-1)/n of the tensor over n-1 ports, in rank order.

    Raises:
        UsageError: n < 1, or there is no such root.
    """
    collective = rooted("gather", n, root)
    return Schedule("direct_gather", n, n, min(n - 1, 1), _gather_round, (n, root), collective=collective)


def direct_scatter(n: int, root: int = 0) -> Schedule:
    """Return the scatter in one round: rank `root` sends chunk r to rank r; raise `UsageError` as `direct_gather`."""
    return replace(reverse(direct_gather(n, root)), name="direct_scatter")


def direct_all_to_all(n: int) -> Schedule:
    """Return the all-to-all in one round: rank i sends chunk i*n+j to rank j, beginning with its right neighbour.

    n*n chunks; every rank sends and receives (n-1)/n² of the tensor (the tensor is all ranks' data together) over n-1
    ports.

    Raises:
        UsageError: n < 1.
    """
    return Schedule("direct_all_to_all", n, n * n, min(n - 1, 1), _all_to_all_round, (n,), collective=ALL_TO_ALL)


def dissemination_barrier(n: int) -> Schedule:
    """Return the barrier: in round k rank r tells rank r + 2^k mod n whom it has heard of.

    ceil(log2(n)) rounds, the fewest there can be, one port. Its one chunk carries nothing; a contribution in it stands
    for "has arrived", and may arrive twice.

    Raises:
        UsageError: n < 1.
    """
    rounds = max(n - 1, 0).bit_length()
    return Schedule("dissemination_barrier", n, 1, rounds, _barrier_round, (n,), collective=BARRIER)


def _gather_round(n: int, root: int, k: int) -> Round:
    src = np.delete(np.arange(n, dtype=np.int32), root)
    return Round(src, np.full_like(src, root), src, np.zeros(len(src), dtype=np.bool_))


def _all_to_all_round(n: int, k: int) -> Round:
    src = np.repeat(np.arange(n, dtype=np.int32), n - 1)
    dst = (src + np.tile(np.arange(1, n, dtype=np.int32), n)) % n
    return Round(src, dst, src * n + dst, np.zeros(len(src), dtype=np.bool_))


def _barrier_round(n: int, k: int) -> Round:
    src = np.arange(n, dtype=np.int32)
    return Round(src, (src + (1 << k)) % n, np.zeros_like(src), np.ones(n, dtype=np.bool_))
