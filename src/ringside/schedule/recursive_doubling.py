"""Recursive doubling."""

from __future__ import annotations

import numpy as np

from ringside.schedule.powers import fold_in, fold_out, folded_rounds, largest_power, workers
from ringside.schedule.schedule import Round, Schedule


def recursive_doubling(n: int) -> Schedule:
    """Recursive doubling: partners exchange everything, at distance 1, 2, 4, ... The fewest rounds there can be.

    R. Thakur, R. Rabenseifner, W. Gropp: "Optimization of collective communication operations in MPICH", IJHPCA 19
    (2005).

    Return the recursive-doubling all-reduce of `n` ranks.

    In round k the ranks whose numbers differ in bit k exchange the whole tensor and both add. One chunk, log2(n) rounds
    and as many tensors sent and received per rank, one port. Off powers of two the extra ranks are folded in
    (`ringside.schedule.powers`): floor(log2(n)) + 2 rounds, one tensor more.

    Raises:
        UsageError: n < 1.
    """
    rounds = folded_rounds(n, largest_power(n).bit_length() - 1)
    return Schedule("recursive_doubling", n, 1, rounds, _doubling_round, (n,))


def _doubling_round(n: int, k: int) -> Round:
    p = largest_power(n)
    bit = k
    if n > p:
        if k == 0:
            return fold_in(n, 1)
        bit = k - 1
        if 1 << bit == p:
            return fold_out(n, 1)
    rank = workers(n)
    partner = rank[np.arange(p) ^ (1 << bit)]
    return Round(rank, partner, np.zeros_like(rank), np.ones(p, dtype=np.bool_))
