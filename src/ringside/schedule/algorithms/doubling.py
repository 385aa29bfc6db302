"""Recursive doubling."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ringside.schedule.schedule import Round, Schedule

# -------------------------------------------------------------------------------------------------
# Algorithms for powers of two on any number of ranks: the extra ranks fold themselves in first.
#
# With p the largest power of two ≤ n and e = n - p extra ranks, each of the first e even ranks hands its tensor to the
# odd rank above it and waits; p ranks do the work; at the end the e odd ranks hand the result back (R. Thakur,
# R. Rabenseifner, W. Gropp, IJHPCA 19 (2005), on reduce and all-reduce).


def largest_power(n: int) -> int:
    """Return the largest power of two ≤ n, 1 for n < 1."""
    return 1 << max(n.bit_length() - 1, 0) if n > 0 else 1


def folded_rounds(n: int, inner: int) -> int:
    """Return how many rounds `inner` rounds of the p working ranks take when the extra ranks are folded in."""
    return inner + (2 if n > largest_power(n) else 0)


def workers(n: int) -> NDArray[np.int32]:
    """Return which rank plays number v of the p working ones, int32 [p], ascending."""
    extra = n - largest_power(n)
    number = np.arange(largest_power(n), dtype=np.int32)
    return np.where(number < extra, 2 * number + 1, number + extra).astype(np.int32)


def fold_in(n: int, chunks: int) -> Round:
    """Return the round in which the extra ranks hand all chunks over."""
    extra = n - largest_power(n)
    src = np.repeat(2 * np.arange(extra, dtype=np.int32), chunks)
    chunk = np.tile(np.arange(chunks, dtype=np.int32), extra)
    return Round(src, src + 1, chunk, np.ones(len(src), dtype=np.bool_))


def fold_out(n: int, chunks: int) -> Round:
    """Return the round in which they get the result."""
    step = fold_in(n, chunks)
    return Round(step.dst, step.src, step.chunk, ~step.reduce)


def recursive_doubling(n: int) -> Schedule:
    """Recursive doubling: partners exchange everything, at distance 1, 2, 4, ... The fewest rounds there can be.

    R. Thakur, R. Rabenseifner, W. Gropp: "Optimization of collective communication operations in MPICH", IJHPCA 19
    (2005).

    Return the recursive-doubling all-reduce of `n` ranks.

    In round k the ranks whose numbers differ in bit k exchange the whole tensor and both add. One chunk, log2(n) rounds
    and as many tensors sent and received per rank, one port. Off powers of two the extra ranks are folded in
    (`ringside.schedule.algorithms.doubling`): floor(log2(n)) + 2 rounds, one tensor more.

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


# -------------------------------------------------------------------------------------------------
# Rabenseifner's algorithm.


def halving_doubling(n: int) -> Schedule:
    """Rabenseifner's algorithm: halve the vector while reducing, double it while gathering. Few rounds and few bytes.

    R. Rabenseifner: "Optimization of collective reduction operations", ICCS 2004.

    Return the halving-doubling all-reduce of `n` ranks.

    With p the largest power of two ≤ n: p chunks; partners at distance p/2, p/4, ..., 1 exchange halves of what they
    still work on, until rank r has the sum of chunk r; then the same way back. 2 log2(p) rounds, 2(p-1)/p of the tensor
    sent and received, one port: for powers of two the least bytes in few rounds. Off powers of two the extra ranks are
    folded in (`ringside.schedule.algorithms.doubling`): 2 rounds and one tensor more.

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
