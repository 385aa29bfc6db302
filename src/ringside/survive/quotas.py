"""How many micro-batches each rank computes: whole numbers from their own times, the sum always the same.

A step lasts as long as the rank that finishes last. With `t[r]` seconds per micro-batch the least possible longest time
is found greedily: every micro-batch goes to the rank that would finish it first, which is optimal for equal parts
(Graham 1969 bounds the general case). The gradient is a sum over micro-batches, so it does not change.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from ringside.errors import UsageError

GAIN_WORTH = 0.05
"""A step must become shorter by at least this share before quotas change."""


def even_quotas(ranks: int, micro_batches: int) -> tuple[int, ...]:
    """Return equal quotas; the first ranks take what does not divide."""
    share, rest = divmod(micro_batches, ranks)
    return tuple(share + (rank < rest) for rank in range(ranks))


def fair_quotas(seconds: Sequence[float], micro_batches: int) -> tuple[int, ...]:
    """Return the quotas with which the rank that finishes last finishes earliest.

    Args:
        seconds: Own time of every rank for one micro-batch, more than 0.
        micro_batches: How many there are.

    Returns:
        One whole number per rank; their sum is `micro_batches`. Of equal choices the lower rank gets more.

    Raises:
        UsageError: A time is not a number above 0.
    """
    if not seconds or not all(0 < s < math.inf for s in seconds):
        raise UsageError(f"quotas need a time above 0 seconds of every rank, not {list(seconds)}")
    quotas = [0] * len(seconds)
    next_end = [(own, rank) for rank, own in enumerate(seconds)]
    heapq.heapify(next_end)
    for _ in range(micro_batches):
        end, rank = heapq.heappop(next_end)
        quotas[rank] += 1
        heapq.heappush(next_end, (end + seconds[rank], rank))
    return tuple(quotas)


def step_seconds(seconds: Sequence[float], quotas: Sequence[int]) -> float:
    """Return how long the ranks compute with such quotas: as long as the last."""
    return max(own * quota for own, quota in zip(seconds, quotas, strict=True))


def gain(seconds: Sequence[float], before: Sequence[int], after: Sequence[int]) -> float:
    """Return how much shorter the ranks' computation becomes, as a share of what it was: 0.25 is a quarter less."""
    was = step_seconds(seconds, before)
    return 1.0 - step_seconds(seconds, after) / was if was > 0 else 0.0
