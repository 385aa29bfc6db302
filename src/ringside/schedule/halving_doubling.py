"""Rabenseifner's algorithm."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringside.schedule.powers import fold_in, fold_out, folded_rounds, largest_power, workers
from ringside.schedule.schedule import Round, Schedule


def halving_doubling(n: int) -> Schedule:
    """Rabenseifner's algorithm: halve the vector while reducing, double it while gathering. Few rounds and few bytes.

    R. Rabenseifner: "Optimization of collective reduction operations", ICCS 2004.

    Return the halving-doubling all-reduce of `n` ranks.

    With p the largest power of two ≤ n: p chunks; partners at distance p/2, p/4, ..., 1 exchange halves of what they
    still work on, until rank r has the sum of chunk r; then the same way back. 2 log2(p) rounds, 2(p-1)/p of the tensor
    sent and received, one port: for powers of two the least bytes in few rounds. Off powers of two the extra ranks are
    folded in (`ringside.schedule.powers`): 2 rounds and one tensor more.

    Raises:
        UsageError: n < 1.
    """
    p = largest_power(n)
    rounds = folded_rounds(n, 2 * (p.bit_length() - 1))
    return Schedule("halving_doubling", n, p, rounds, _halving_round, (n,))


def _halving_round(n: int, k: int) -> Round:
    p = largest_power(n)
    levels = p.bit_length() - 1
    if n > p:
        if k == 0:
            return fold_in(n, p)
        k -= 1
        if k == 2 * levels:
            return fold_out(n, p)
    if k < levels:
        return _exchange(n, distance=p >> (k + 1), reducing=True)
    return _exchange(n, distance=1 << (k - levels), reducing=False)


def _exchange(n: int, distance: int, reducing: bool) -> Round:
    """Return the round of partners `distance` apart; each works on chunks that share its bits above the distance."""
    p = largest_power(n)
    number = np.arange(p, dtype=np.int32)
    # Blocks of 2*distance chunks are worked on together; a half of one goes to the partner: its when reducing.
    keeper = number ^ distance if reducing else number
    first = keeper // distance * distance
    chunk: NDArray[np.int32] = (first[:, None] + np.arange(distance, dtype=np.int32)).ravel().astype(np.int32)
    rank = workers(n)
    src = np.repeat(rank, distance)
    dst = np.repeat(rank[number ^ distance], distance)
    return Round(src, dst, chunk, np.full(len(chunk), reducing))
