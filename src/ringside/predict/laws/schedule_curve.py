"""A schedule's exact price as a curve with a band: what is latency in it, what is wire, and how sure either is."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ringside.predict.laws.curve import BASE, PIPELINE, RATE
from ringside.predict.laws.fabric import SPREAD
from ringside.predict.simulation.simulate import prices
from ringside.predict.topology.topology import Topology
from ringside.schedule import Schedule

Floats = NDArray[np.float64]

SPREADS = np.array([SPREAD[BASE], SPREAD[RATE]])  # of a cluster's latency and rate beside its topology's
SEGMENTS = (1, 8, 64)
MOST_MESSAGES = 1 << 19  # ranks times segments that are simulated


class Scheduled:
    """The price of a schedule as a backbone for `calibrate.expect`: factors of its latency and of its time on wires.

    A tree that is not cut into segments takes its whole tensor over every level, one after the other; nobody runs it
    so. With `pipelined`, every size takes the best of `SEGMENTS`.

    Args:
        schedule: Of as many ranks as the topology.
        topology: What it runs over.
        fixed_s: What is spent beside it, seconds.
        pipelined: Whether chunks may be cut.
    """

    def __init__(
        self, schedule: Schedule, topology: Topology, fixed_s: float = 0.0, *, pipelined: bool = False
    ) -> None:
        self.schedule, self.topology, self.fixed_s = schedule, topology, fixed_s
        most = MOST_MESSAGES // max(schedule.ranks, 1) if pipelined else 1
        self.segments = tuple(one for one in SEGMENTS if one <= max(most, 1))
        self._known: dict[float, tuple[float, float]] = {}

    @property
    def drift(self) -> Floats:
        """As of a cluster's latency and rate."""
        return PIPELINE.drift[[BASE, RATE]]

    def log_slopes(self, theta: Floats, sizes: ArrayLike) -> tuple[Floats, Floats]:
        """Return the logarithm of the time and its derivatives by the logarithms of the two factors."""
        parts = self.terms(np.asarray(sizes, dtype=np.float64)) * np.exp(theta)
        total = parts.sum(axis=1)
        return np.log(total), parts / total[:, None]

    def terms(self, sizes: Floats) -> Floats:
        """Return latency and time on wires in seconds, float64 [n, 2]."""
        new = sorted({float(size) for size in sizes} - set(self._known))
        best = np.full((len(new), 2), np.inf)
        for segments in self.segments if new else ():
            # The price of an empty tensor is the latency; what a size takes beyond it is time on wires.
            found = prices(self.schedule, self.topology, [0.0, *new], segments=segments)
            latency, total = found[0] + self.fixed_s, found[1:] + self.fixed_s
            better = total < best.sum(axis=1)
            best[better] = np.stack([np.full(len(new), latency), total - latency], axis=1)[better]
        floor = 1e-12  # links without latency and tensors of a byte: a logarithm needs a number
        for size, (latency, wire) in zip(new, np.maximum(best, floor), strict=True):
            self._known[size] = (float(latency), float(wire))
        return np.array([self._known[float(size)] for size in sizes]).reshape(-1, 2)
