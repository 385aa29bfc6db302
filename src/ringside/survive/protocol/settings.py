"""What is settled once for a member's state machine: the job's shape and its patience."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringside.errors import UsageError

# -------------------------------------------------------------------------------------------------
# How many micro-batches each rank computes: whole numbers from their own times, the sum always the same.
#
# A step lasts as long as the rank that finishes last. With `t[r]` seconds per micro-batch the least possible longest
# time is found greedily: every micro-batch goes to the rank that would finish it first, which is optimal for equal
# parts (Graham 1969 bounds the general case). The gradient is a sum over micro-batches, so it does not change.

GAIN_WORTH = 0.05
"""A step must become shorter by at least this share before quotas change."""


def equal_quotas(ranks: Sequence[int], micro_batches: int) -> tuple[int, ...]:
    """Return equal quotas, the first ranks taking what does not divide."""
    share, rest = divmod(micro_batches, len(ranks))
    return tuple(share + (k < rest) for k in range(len(ranks)))


def balanced_quotas(seconds: Sequence[float], micro_batches: int) -> tuple[int, ...]:
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
    # When each rank would finish one more micro-batch: the next one goes to the earliest.
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


@dataclass(frozen=True)
class ProtocolSettings:
    """A job's shape and patience; equal on all members.

    Args:
        micro_batches: Parts that every step is cut into.
        samples: Gives which samples a step takes: the position of its first one in the job's sequence, and how many.
        steps: How many steps there are; None: without end.
        mean: The divisor is the number of samples; False: 1, the gradient is a sum.
        checkpoint_every: A checkpoint whenever so many steps are committed; 0: none.
        least_members: With fewer the job halts.
        ranks: How many ranks the job was started with: at its end all are waited for; 0: only the members are.
        most_attempts: How often one step may be begun.
        retry_s: Whatever was not answered is asked again after so long, seconds.
        patience_s: How long a member with a private copy waits for the others before it suspects them, seconds.
        fetch_patience_s: The same in a generation's first step while somebody fetches state, seconds.
        end_patience_s: How long a rank is waited for at the end of which nobody knows whether it comes, seconds.
        store_patience_s: How long registers may not answer before the job halts, seconds.

    Raises:
        UsageError: A number is out of range.
    """

    micro_batches: int
    samples: Callable[[int], tuple[int, int]]
    steps: int | None = None
    mean: bool = True
    checkpoint_every: int = 0
    least_members: int = 1
    ranks: int = 0
    most_attempts: int = 32
    retry_s: float = 0.05
    patience_s: float = 2.0
    fetch_patience_s: float = 60.0
    end_patience_s: float = 300.0
    store_patience_s: float = 30.0

    def __post_init__(self) -> None:
        if min(self.micro_batches, self.least_members, self.most_attempts) < 1:
            raise UsageError("micro_batches, least_members and most_attempts are at least 1")
        if not 0 < self.retry_s <= self.patience_s <= min(self.fetch_patience_s, self.store_patience_s):
            raise UsageError("patience must grow: 0 < retry_s <= patience_s <= fetch_patience_s and store_patience_s")
