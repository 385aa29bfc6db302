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

# Of one rank's device as its datasheet says, in decimal GB, by preset: NVIDIA's A100, DGX H100, DGX H200, DGX B200
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
class State:
    """What one rank holds of a model's state.

    Args:
        stage: 0: everything on every rank; 1, 2, 3: sharded as `STAGE_WORDS` says.
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
    states: tuple[State, ...]
    stage: int | None
    least_ranks: int | None

    @property
    def refused(self) -> bool:
        """Whether plain data parallel is known not to fit."""
        return self.memory_bytes is not None and self.stage != 0


def state(parameters: float, ranks: int, stage: int = 0, dtype: str = "bf16") -> State:
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
    return State(stage, weights / shares[0], gradients / shares[1], optimizer / shares[2])


def fit(parameters: float, ranks: int, memory_bytes: float | None, dtype: str = "bf16") -> Fit:
    """Return whether a model's state fits in ranks of `memory_bytes`, and from which stage on; errors as of `state`."""
    states = tuple(state(parameters, ranks, stage, dtype) for stage in range(4))
    if memory_bytes is None:
        return Fit(parameters, None, states, None, None)
    if not (math.isfinite(memory_bytes) and memory_bytes > 0):
        raise UsageError(f"a rank's memory is more than 0 bytes, not {memory_bytes:g}")
    stages = [one.stage for one in states if one.total_bytes <= memory_bytes]
    least = states[0].total_bytes / memory_bytes
    if not math.isfinite(least):
        raise UsageError(f"{parameters:g} parameters in ranks of {memory_bytes:g} bytes: no number of ranks is enough")
    return Fit(parameters, memory_bytes, states, stages[0] if stages else None, math.ceil(least))
