"""The binomial tree: in every round, everybody who has the tensor hands it to one who has not.

R. Thakur, R. Rabenseifner, W. Gropp, IJHPCA 19 (2005), on broadcast.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ringside.schedule.collective import rooted
from ringside.schedule.combine import reverse
from ringside.schedule.schedule import Round, Schedule


def binomial_broadcast(n: int, root: int = 0) -> Schedule:
    """Return the broadcast of rank `root`'s tensor among `n` ranks.

    One chunk, ceil(log2(n)) rounds (the fewest there can be), at most as many tensors sent, one received, one port.

    Raises:
        UsageError: n < 1, or there is no such root.
    """
    rounds = max(n - 1, 0).bit_length()
    collective = rooted("broadcast", n, root)
    return Schedule("binomial_broadcast", n, 1, rounds, _broadcast_round, (n, root), collective=collective)


def binomial_reduce(n: int, root: int = 0) -> Schedule:
    """Return the reduce of `n` ranks' tensors to rank `root`: the broadcast backwards; raise `UsageError` alike."""
    return replace(reverse(binomial_broadcast(n, root)), name="binomial_reduce")


def _broadcast_round(n: int, root: int, k: int) -> Round:
    having = np.arange(min(1 << k, n - (1 << k)), dtype=np.int32)
    src, dst = (root + having) % n, (root + having + (1 << k)) % n
    return Round(src, dst, np.zeros_like(src), np.zeros(len(src), dtype=np.bool_))
