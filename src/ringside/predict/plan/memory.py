"""Whether a model's state fits in a rank's memory, plain or sharded, with the arithmetic.

Per parameter, mixed precision with Adam: 2 bytes of weights, 2 of gradients, 12 of optimizer (float32 weights,
momentum, variance): 16. In float32 it is 4 + 4 + 8: 16 too. Sharding divides the optimizer (stage 1), the gradients too
(stage 2), the weights too (stage 3, fully sharded) by the ranks. S. Rajbhandari, J. Rasley, O. Ruwase, Y. He: "ZeRO:
Memory optimizations toward training trillion parameter models", SC 2020, section 3 and figure 1. Activations, buffers
and fragmentation are not counted: they need room beside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ringside.errors import UsageError
from ringside.predict.laws.calibrate import Band
from ringside.predict.plan.options import collective
from ringside.predict.topology.topology import Topology

# Of one rank's device from its datasheet, in decimal GB, by preset: NVIDIA's A100, DGX H100, DGX H200, DGX B200
# (1,440 GB in 8) and GB200 NVL72 (13.4 TB in 72) datasheets, Amazon's EC2 P4 and P5 pages.
DEVICE_BYTES = {
    "dgx-a100": 80e9,
    "dgx-h100": 80e9,
    "dgx-h200": 141e9,
    "dgx-b200": 180e9,
    "gb200-nvl72": 186e9,
    "p4de": 80e9,
    "p5": 80e9,
}
WEIGHT_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
STAGE_WORDS = (
    "plain data parallel",
    "sharded optimizer (ZeRO stage 1)",
    "sharded optimizer and gradients (ZeRO stage 2)",
    "fully sharded (ZeRO stage 3, FSDP)",
)


@dataclass(frozen=True)
class MemoryState:
    """What one rank holds of a model's state.

    Args:
        stage: 0: everything on every rank; 1, 2, 3: sharded as in `STAGE_WORDS`.
        weights_bytes: Of weights.
        gradients_bytes: Of gradients.
        optimizer_bytes: Of optimizer state.
    """

    stage: int
    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float

    @property
    def total_bytes(self) -> float:
        """Of all three."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class Fit:
    """Whether a model's state fits.

    Args:
        parameters: Of the model.
        memory_bytes: Of one rank; None: not known, nothing is refused.
        states: By stage, 0 to 3.
        stage: The least that fits; None: none does, or the memory is not known.
        least_ranks: With how many ranks stage 3 fits; None: memory not known.
    """

    parameters: float
    memory_bytes: float | None
    states: tuple[MemoryState, ...]
    stage: int | None
    least_ranks: int | None

    @property
    def refused(self) -> bool:
        """Whether plain data parallel is known not to fit."""
        return self.memory_bytes is not None and self.stage != 0


def state(parameters: float, ranks: int, stage: int = 0, dtype: str = "bf16") -> MemoryState:
    """Return what one rank holds.

    Args:
        parameters: Of the model, more than 0.
        ranks: That share it, at least 1.
        stage: 0 to 3.
        dtype: Of weights and gradients: bf16, fp16, fp32.

    Raises:
        UsageError: A figure cannot be.
    """
    if not (math.isfinite(parameters) and parameters > 0) or ranks < 1 or stage not in range(4):
        raise UsageError(f"{parameters:g} parameters on {ranks} ranks at stage {stage}: more than 0, 1, and 0 to 3")
    if dtype not in WEIGHT_BYTES:
        raise UsageError(f"--dtype {dtype}: there are {', '.join(WEIGHT_BYTES)}")
    width = WEIGHT_BYTES[dtype]
    weights, gradients, optimizer = width * parameters, width * parameters, (16 - 2 * width) * parameters
    shares = [ranks if stage >= least else 1 for least in (3, 2, 1)]
    return MemoryState(stage, weights / shares[0], gradients / shares[1], optimizer / shares[2])


def fit(parameters: float, ranks: int, memory_bytes: float | None, dtype: str = "bf16") -> Fit:
    """Return whether a model's state fits in ranks of `memory_bytes`, and from which stage on; errors as of `state`."""
    states = tuple(state(parameters, ranks, stage, dtype) for stage in range(4))
    if memory_bytes is None:
        return Fit(parameters, None, states, None, None)
    if not (math.isfinite(memory_bytes) and memory_bytes > 0):
        raise UsageError(f"a rank's memory is more than 0 bytes, not {memory_bytes:g}")
    stages = [state.stage for state in states if state.total_bytes <= memory_bytes]
    least = states[0].total_bytes / memory_bytes
    if not math.isfinite(least):
        raise UsageError(f"{parameters:g} parameters in ranks of {memory_bytes:g} bytes: no number of ranks is enough")
    return Fit(parameters, memory_bytes, states, stages[0] if stages else None, math.ceil(least))


# -------------------------------------------------------------------------------------------------
# What sharded data parallel costs per step, where plain data parallel does not fit.
#
# Stages 1 and 2 reduce-scatter gradients and all-gather weights: together what an all-reduce moves. Stage 3 gathers
# weights in forward and again in backward: half as much more (S. Rajbhandari et al., SC 2020, section 7).

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
        option = collective(topology, name)
        times += option.predict([size]).bands
        reasons.append(option.why_extrapolated(size))
    gather, scatter = times
    count = GATHERS[memory.stage]
    total = gather.map(lambda seconds: count * seconds) + scatter
    exposed = None if compute_s is None else total.map(lambda seconds: max(0.0, seconds - compute_s))
    return Sharded(memory.stage, gather, count, scatter, total, exposed, next(filter(None, reasons), ""))


# -------------------------------------------------------------------------------------------------
# The batch that data parallelism makes, and what is usually done to the learning rate then, and whose rule that is.

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
