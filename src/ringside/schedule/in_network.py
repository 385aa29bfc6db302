"""In-network reduction."""

from __future__ import annotations

import numpy as np

from ringside.schedule.schedule import Round, Schedule


def in_network(n: int) -> Schedule:
    """In-network reduction: the switch adds. One round up, one down, whatever the number of ranks.

    R. Graham et al.: "Scalable Hierarchical Aggregation Protocol (SHArP): a hardware architecture for efficient data
    reduction", COM-HPC 2016.

    Return the all-reduce of `n` ranks around one switch, vertex n, that reduces.

    Round 0: everybody sends the tensor up, and the switch adds in rank order; round 1: it sends the sum down to all.
    One chunk, 2 rounds, one tensor sent and received per rank over one port: less than any schedule without such a
    switch can do. Canonical. A single rank needs neither rounds nor a switch.

    Raises:
        UsageError: n < 1.
    """
    alone = n <= 1
    return Schedule("in_network", n, 1, 0 if alone else 2, _switch_round, (n,), switches=0 if alone else 1)


def _switch_round(n: int, k: int) -> Round:
    ranks = np.arange(n, dtype=np.int32)
    switch = np.full(n, n, dtype=np.int32)
    src, dst = (ranks, switch) if k == 0 else (switch, ranks)
    return Round(src, dst, np.zeros_like(ranks), np.full(n, k == 0))
