"""What sharded data parallel costs per step, where plain data parallel does not fit.

Stages 1 and 2 reduce-scatter gradients and all-gather weights: together what an all-reduce moves. Stage 3 gathers
weights in forward and again in backward: half as much more (S. Rajbhandari et al., SC 2020, section 7).
"""

from __future__ import annotations

from dataclasses import dataclass

from ringside.predict.band import Band
from ringside.predict.memory import WEIGHT_BYTES, Fit
from ringside.predict.options import collective
from ringside.predict.topology import Topology

GATHERS = {1: 1, 2: 1, 3: 2}


@dataclass(frozen=True)
class Sharded:
    """One step of sharded data parallel.

    Args:
        stage: Of ZeRO.
        gather: One all-gather of all weights, in one piece.
        gathers: How many of them a step has.
        scatter: One reduce-scatter of all gradients, in one piece.
        total: Of a step; the bands are wrong together, so their ends add up.
        exposed: At best, hidden behind all computation; None: computation is not known.
        extrapolated: Why; empty where tables support it.
    """

    stage: int
    gather: Band
    gathers: int
    scatter: Band
    total: Band
    exposed: Band | None
    extrapolated: str


def sharded(topology: Topology, memory: Fit, dtype: str = "bf16", compute_s: float | None = None) -> Sharded | None:
    """Return what the least stage that fits costs; None: none fits.

    Args:
        topology: What it runs over, two ranks or more.
        memory: Of `memory.fit`.
        dtype: Of weights and gradients.
        compute_s: Forward and backward of a step, seconds.
    """
    if not memory.stage:
        return None
    size = memory.parameters * WEIGHT_BYTES[dtype]
    times, reasons = [], []
    for name in ("all_gather", "reduce_scatter"):
        one = collective(topology, name)
        told = one.predict([size])
        times.append(Band(float(told.times_s[0]), float(told.low_s[0]), float(told.high_s[0])))
        reasons.append(one.why_extrapolated(size))
    gather, scatter = times
    count = GATHERS[memory.stage]
    total = Band(*(count * g + s for g, s in zip(gather.ends, scatter.ends, strict=True)))
    exposed = None if compute_s is None else Band(*(max(0.0, one - compute_s) for one in total.ends))
    return Sharded(memory.stage, gather, count, scatter, total, exposed, next(filter(None, reasons), ""))
