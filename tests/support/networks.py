"""Networks for tests of what is worked out from links."""

from __future__ import annotations

import numpy as np

from ringside.engine.cost.network import CostNetwork


def uniform(
    n: int,
    latency_s: float,
    seconds_per_byte: float,
    *,
    shared: bool = False,
    reduce: float = 0.0,
    overhead_s: float = 0.0,
) -> CostNetwork:
    """Return a network of n vertices with equal links; `shared`: a vertex's links share one interface as fast."""
    nic = np.full(n, seconds_per_byte) if shared else None
    links = np.full((n, n), seconds_per_byte)
    return CostNetwork(np.full((n, n), latency_s), links, nic, nic, reduce, overhead_s)
