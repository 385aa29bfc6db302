"""What the native core has noted of every collective, one by one; the package itself only sums it up."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class LoggedCollective(NamedTuple):
    """One finished collective; times in ns on the host's monotonic clock, which all its ranks share.

    Args:
        seq: Number of the collective, from 1.
        kind: Index into `ringside.engine.request.KINDS`.
        path: Index into `PATHS`.
        payload_bytes: Size of the tensor.
        submitted: When this rank was ready.
        entered: When it started waiting for the others.
        ready: When it saw that the last rank had arrived.
        done: When its result was there.
        arrivals: When each rank was ready, by rank.
    """

    seq: int
    kind: int
    path: int
    payload_bytes: int
    submitted: int
    entered: int
    ready: int
    done: int
    arrivals: tuple[int, ...]

    @property
    def wait_seconds(self) -> float:
        """Time from this rank's arrival until the last rank's."""
        return max(max(self.arrivals) - self.submitted, 0) * 1e-9


def drain(core: Any) -> list[LoggedCollective]:
    """Return what finished since the last call, in order."""
    rows = np.frombuffer(core.drain(), np.int64).reshape(-1, core.log_width()).tolist()
    return [LoggedCollective._make([*row[:8], tuple(row[8:])]) for row in rows]
