"""What each collective took, on this rank, and when every rank arrived at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PATHS = ("local", "barrier", "one_shot", "push", "staged", "program")


@dataclass(frozen=True)
class Collectives:
    """Finished collectives in order; times in ns on the host's monotonic clock, which all its ranks share.

    Args:
        seq: Number of the collective, shape [n], from 1.
        path: Index into `PATHS`, shape [n].
        payload_bytes: Shape [n].
        submitted: When this rank was ready, shape [n].
        entered: When it started waiting for the others, shape [n].
        ready: When the last rank had arrived, shape [n].
        done: When its result was there, shape [n].
        arrivals: When each rank was ready, shape [n, ranks].
    """

    seq: NDArray[np.int64]
    path: NDArray[np.int64]
    payload_bytes: NDArray[np.int64]
    submitted: NDArray[np.int64]
    entered: NDArray[np.int64]
    ready: NDArray[np.int64]
    done: NDArray[np.int64]
    arrivals: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.seq)

    @property
    def wait_seconds(self) -> NDArray[np.float64]:
        """Time from this rank's arrival until the last rank's, shape [n]."""
        late: NDArray[np.float64] = (self.arrivals.max(axis=1, initial=0) - self.submitted) * 1e-9
        return np.maximum(late, 0.0)


class CollectiveLog:
    """Drains the core's log; the core keeps the last 4096 collectives that were not drained."""

    def __init__(self, core: Any) -> None:
        self._core = core
        self._width: int = core.log_width()

    def drain(self) -> Collectives:
        """Return what finished since the last call."""
        rows = np.frombuffer(self._core.drain(), dtype=np.int64).reshape(-1, self._width)
        return Collectives(
            seq=rows[:, 0],
            path=rows[:, 2],
            payload_bytes=rows[:, 3],
            submitted=rows[:, 4],
            entered=rows[:, 5],
            ready=rows[:, 6],
            done=rows[:, 7],
            arrivals=rows[:, 8:],
        )
