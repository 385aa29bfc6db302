"""The weights of a mean over ranks."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np

from ringside.errors import UsageError


def own_weight(weights: float | Sequence[float], rank: int, size: int) -> tuple[float, int]:
    """Return this rank's weight and a hash of what all ranks must have given alike.

    Args:
        weights: This rank's own weight, or one weight per rank.
        rank: This rank.
        size: Number of ranks.

    Raises:
        UsageError: A weight is negative or not finite, there are not as many as ranks, or they sum to 0.
    """
    try:
        values = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError):
        raise UsageError(f"weights must be a number, or one number per rank, not {weights!r}") from None
    if values.ndim > 1 or (values.ndim == 1 and len(values) != size):
        raise UsageError(f"weights must be a number, or {size} of them, one per rank, not {weights!r}")
    if not (np.isfinite(values) & (values >= 0)).all():
        raise UsageError(f"weights must be finite and not negative, not {weights!r}")
    if values.ndim == 0:
        return float(values), 0
    if not math.fsum(values) > 0:
        raise UsageError("the weights of all ranks sum to 0, so there is no mean")
    return float(values[rank]), zlib.crc32(values.tobytes()) or 1
