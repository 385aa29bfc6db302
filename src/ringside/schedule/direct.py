"""Direct."""

from __future__ import annotations

import numpy as np

from ringside.schedule.collective import ALL_GATHER, REDUCE_SCATTER
from ringside.schedule.schedule import Round, Schedule


def direct(n: int) -> Schedule:
    """Direct: every owner reduces its slice straight from all peers, then hands it to all of them.

    The two-shot pattern of NVLink systems and of shared memory; "direct spread" in R. Thakur, R. Rabenseifner, W.
    Gropp: "Optimization of collective communication operations in MPICH", IJHPCA 19 (2005).

    Return the direct all-reduce of `n` ranks.

    Round 0: everybody sends chunk k to its owner, rank k, which adds all of them in rank order. Round 1: owner k sends
    the result to everybody. n chunks, 2 rounds (0 for one rank), 2(n-1)/n of the tensor sent and received per rank,
    n-1 ports. The result is the canonical ((x0+x1)+x2)+... of every chunk, so it does not depend on the number of
    chunks.

    Raises:
        UsageError: n < 1.
    """
    return Schedule("direct", n, n, 2 if n > 1 else 0, _direct_round, (n,), rotational=True)


def direct_reduce_scatter(n: int) -> Schedule:
    """Return the first round of `direct`: rank r ends with the canonical sum of chunk r; raise `UsageError`: n < 1."""
    rounds = min(n - 1, 1)
    return Schedule(
        "direct_reduce_scatter", n, n, rounds, _direct_round, (n,), collective=REDUCE_SCATTER, rotational=True
    )


def direct_all_gather(n: int) -> Schedule:
    """Return the second round of `direct`: everybody hands its chunk to all others; raise `UsageError`: n < 1."""
    return Schedule(
        "direct_all_gather", n, n, min(n - 1, 1), _gather_round, (n,), collective=ALL_GATHER, rotational=True
    )


def _direct_round(n: int, k: int) -> Round:
    # Each rank begins with its right neighbour, so that not all of them call on rank 0 first.
    dst = np.arange(1, n, dtype=np.int32)
    reducing = k == 0
    return Round(np.zeros_like(dst), dst, dst if reducing else np.zeros_like(dst), np.full(n - 1, reducing))


def _gather_round(n: int, k: int) -> Round:
    return _direct_round(n, 1)
