"""The batch that data parallelism makes, and what is usually done to the learning rate then, and whose rule that is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ringside.errors import UsageError

LINEAR = 'P. Goyal et al., "Accurate, large minibatch SGD", 2017: SGD, with warm-up; held up to 8,192 images'
SQUARE_ROOT = 'S. Malladi et al., "On the SDEs and scaling rules for adaptive gradient algorithms", 2022: Adam, RMSprop'


@dataclass(frozen=True)
class Batch:
    """A batch over all ranks, and the factors on the learning rate beside that of the base batch.

    Args:
        per_rank: Samples per rank and micro-step.
        accumulated: Micro-steps per synchronisation.
        ranks: That average their gradients.
        effective: Samples per step.
        times: `effective` by the base batch.
        linear: Factor of the learning rate by the linear rule (`LINEAR`).
        square_root: Factor by the square-root rule (`SQUARE_ROOT`).
    """

    per_rank: int
    accumulated: int
    ranks: int
    effective: int
    times: float
    linear: float
    square_root: float


def batch(ranks: int, per_rank: int = 1, accumulated: int = 1, base: int | None = None) -> Batch:
    """Return the effective batch.

    Args:
        ranks: At least 1.
        per_rank: Samples per rank and micro-step.
        accumulated: Micro-steps per synchronisation.
        base: The batch that the learning rate was found with; None: that of one rank.

    Raises:
        UsageError: A figure is below 1.
    """
    base = per_rank * accumulated if base is None else base
    if min(ranks, per_rank, accumulated, base) < 1:
        raise UsageError("ranks, batch per rank, accumulated micro-steps and base batch are at least 1 each")
    effective = ranks * per_rank * accumulated
    times = effective / base
    return Batch(per_rank, accumulated, ranks, effective, times, times, math.sqrt(times))
