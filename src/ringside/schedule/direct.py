"""Direct: every owner reduces its slice straight from all peers, then hands it to all of them.

The two-shot pattern of NVLink systems and of shared memory; "direct spread" in R. Thakur, R. Rabenseifner, W. Gropp:
"Optimization of collective communication operations in MPICH", IJHPCA 19 (2005).
"""

from __future__ import annotations

import numpy as np

from ringside.schedule.schedule import Round, Schedule


def direct(n: int) -> Schedule:
    """Return the direct all-reduce of `n` ranks.

    Round 0: everybody sends chunk k to its owner, rank k, which adds all of them in rank order. Round 1: owner k sends
    the result to everybody. n chunks, 2 rounds (0 for one rank), 2(n-1)/n of the tensor sent and received per rank,
    n-1 ports. The result is the canonical ((x0+x1)+x2)+... of every chunk, so it does not depend on the number of
    chunks.

    Raises:
        UsageError: n < 1.
    """
    return Schedule("direct", ranks=n, chunks=n, rounds=2 if n > 1 else 0, generate=_direct_round, parameters=(n,))


def _direct_round(n: int, k: int) -> Round:
    # By source, so that every owner takes its messages in rank order, the order in which it adds them; each source
    # begins with its right neighbour, so that not all of them call on rank 0 first.
    src = np.repeat(np.arange(n, dtype=np.int32), n - 1)
    dst = (src + np.tile(np.arange(1, n, dtype=np.int32), n)) % n
    reducing = k == 0
    return Round(src, dst, dst if reducing else src, np.full(len(src), reducing))
