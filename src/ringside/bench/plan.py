"""What to measure: sizes, element type, reduction, how often, with which buffers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from ringside.engine import dtypes
from ringside.errors import UsageError

ITEM_BYTES = {name: size for name, size in zip(dtypes.DTYPES, dtypes.ITEM_BYTES, strict=True) if name != "bool"}
NCCL_NAMES = {"float": "float32", "double": "float64", "half": "float16"}
PEERS = ("gloo", "mpi", "openmpi", "openmpi-sm", "mpich", "impi", "vllm", "deepspeed")
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "barrier")
STEPS = ("ddp", "fsdp2", "tensor_parallel")
"""What users call in a training step, as the collectives it consists of: `BenchPlan.parts`."""
FSDP_LAYERS = 4
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes, DDP's defaults
MAX_BUFFERS = 65536
ROTATION = 2  # cold buffers of all ranks together: so many times the last-level cache
_ALIGN = 64
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class BenchPlan(msgspec.Struct, frozen=True):
    """One run of the benchmark; written by the parent, read by every rank.

    Args:
        key: Names this run on this host.
        ranks: Number of ranks.
        sizes_bytes: Tensor sizes, ascending, each a multiple of the item.
        dtype: Of `ITEM_BYTES`.
        op: Reduction.
        algorithms: Of our engine; "auto" lets it choose.
        peers: Of `PEERS` or `MODULE:FUNCTION`, those that can run here; ranks that run take one of them.
        rounds: Rounds in which the engines take turns.
        iterations: All-reduces per engine and round; 0 fits as many into `round_seconds` as they take.
        round_seconds: How long an engine's turn should last.
        cache_bytes: The last-level cache.
        collective: Of `COLLECTIVES` or `STEPS`.
        arrays: What our engine is given: numpy, torch or both.
        pin: Rank r stays on core r, where there are as many cores.
        environments: Where `bench/peers.sh` put the peers.
        hang_s: Ranks that report nothing for so long hang, seconds.
    """

    key: str
    ranks: int
    sizes_bytes: tuple[int, ...]
    dtype: str = "float32"
    op: str = "sum"
    algorithms: tuple[str, ...] = ("auto",)
    peers: tuple[str, ...] = ()
    rounds: int = 5
    iterations: int = 0
    round_seconds: float = 0.05
    cache_bytes: int = 32 << 20
    collective: str = "all_reduce"
    arrays: tuple[str, ...] = ("numpy",)
    pin: bool = False
    environments: str = ""
    hang_s: float = 300.0

    def parts(self, size_bytes: int) -> list[tuple[str, int, int]]:
        """Return (collective, bytes given, bytes of a result that is apart) of each call that makes up one of a size.

        Sizes are nccl-tests': the larger of what a rank gives and gets. A step's is that of the gradients (`ddp`), of
        the parameters (`fsdp2`) or of a layer's activations (`tensor_parallel`).
        """
        if self.collective == "ddp":  # a first bucket of its own size, and the rest
            first = min(size_bytes, FIRST_BUCKET)
            rest = [min(BUCKET, size_bytes - at) for at in range(first, size_bytes, BUCKET)]
            return [("all_reduce", part, 0) for part in (first, *rest)]
        if self.collective == "fsdp2":  # every layer is gathered before forward and backward, its gradients scattered
            layer = size_bytes // FSDP_LAYERS
            gathered = [("all_gather", layer // self.ranks, layer)] * (2 * FSDP_LAYERS)
            return gathered + [("reduce_scatter", layer, layer // self.ranks)] * FSDP_LAYERS
        if self.collective == "tensor_parallel":  # after attention and after the MLP, forward and backward
            return [("all_reduce", size_bytes, 0)] * 4
        given = size_bytes // self.ranks if self.collective == "all_gather" else size_bytes
        apart = {"reduce_scatter": size_bytes // self.ranks, "all_gather": size_bytes, "all_to_all": size_bytes}
        return [(self.collective, given, apart.get(self.collective, 0))]

    def stride(self, size_bytes: int) -> int:
        """Return the bytes on a rank that one call of a size takes: whole cache lines for each tensor."""
        return sum(stride_of(given) + stride_of(apart) for _, given, apart in self.parts(size_bytes))

    def states(self, size_bytes: int) -> list[tuple[str, int]]:
        """Return (cache state, number of buffers to rotate through) to measure for a size.

        "warm" is the same buffer again, "cold" a rotation through more than the cache. A tensor larger than that by
        itself is "any": there is only one case. Sizes too small to fill the cache with `MAX_BUFFERS` have no cold one.
        """
        goal = ROTATION * self.cache_bytes
        if self.collective == "barrier":
            return [("warm", 1)]
        if self.stride(size_bytes) * self.ranks >= goal:
            return [("any", 1)]
        buffers = -(-goal // (self.ranks * self.stride(size_bytes)))
        return [("warm", 1)] + ([("cold", buffers)] if buffers <= MAX_BUFFERS else [])

    @property
    def pool_bytes(self) -> int:
        """Bytes that hold the buffers of any one case on one rank."""
        cases = [(size, buffers) for size in self.sizes_bytes for _, buffers in self.states(size)]
        return max(_ALIGN, *(self.stride(size) * buffers for size, buffers in cases))

    @property
    def limit_bytes(self) -> int:
        """Bytes of each of the four buffers of one rank that measure the streaming limit."""
        return max(4 << 20, ROTATION * self.cache_bytes // self.ranks) // 4096 * 4096

    @property
    def needed_bytes(self) -> int:
        """Memory of all ranks together, with what the peers stage of a tensor of their own (estimated)."""
        peers = 2 * max(self.sizes_bytes) if self.peers else 0
        return self.ranks * (2 * self.pool_bytes + peers + (100 << 20)) + 4 * self.ranks * self.limit_bytes


def stride_of(size_bytes: int) -> int:
    """Return the distance of buffers in a pool: whole cache lines."""
    return -(-size_bytes // _ALIGN) * _ALIGN


def parse_size(text: str) -> int:
    """Return the bytes that `4`, `1K`, `256M` or `1G` (nccl-tests' spelling, powers of two) stand for."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise UsageError(f"{text!r} is not a size: write bytes, or a number with K, M or G such as 64K")
    return int(match[1]) * _UNITS[match[2].upper()]


def sizes_between(first: int, last: int, factor: int) -> list[int]:
    """Return the sizes from `first` to `last` (bytes), each `factor` times the one before."""
    if factor < 2:
        raise UsageError(f"--step-factor {factor}: sizes must grow, so it is 2 or more")
    if first > last:
        raise UsageError(f"--min-bytes {first} is more than --max-bytes {last}")
    sizes = [first]
    while sizes[-1] * factor <= last:
        sizes.append(sizes[-1] * factor)
    return sizes


def whole_items(sizes: Sequence[int], dtype: str, collective: str = "all_reduce", ranks: int = 1) -> tuple[int, ...]:
    """Return the sizes rounded down to whole items of every rank's part, at least one, ascending, each once."""
    if collective == "barrier":
        return (0,)
    parts = {"reduce_scatter": ranks, "all_gather": ranks, "all_to_all": ranks, "fsdp2": ranks * FSDP_LAYERS}
    item = ITEM_BYTES[dtype] * parts.get(collective, 1)
    return tuple(sorted({max(item, size // item * item) for size in sizes}))


def dtype_named(name: str) -> str:
    """Return our name of a dtype; `UsageError` lists what exists."""
    dtype = NCCL_NAMES.get(name, name)
    if dtype not in ITEM_BYTES:
        raise UsageError(f"unknown dtype {name!r}; there are {', '.join(ITEM_BYTES)}")
    return dtype


def storage_dtype(dtype: str) -> np.dtype[np.generic]:
    """Return the NumPy dtype a tensor is stored as; NumPy has no bfloat16, whose bits are kept as int16."""
    return np.dtype("int16" if dtype == "bfloat16" else dtype)


def free_memory_bytes() -> int:
    """Return the memory that can still be taken (the container's limit counts), or a huge number where unknown."""
    free = [1 << 62]
    try:
        text = Path("/proc/meminfo").read_text()
        free.append(int(text.split("MemAvailable:")[1].split()[0]) << 10)
        group = Path("/sys/fs/cgroup")
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError, IndexError):
        pass
    return min(free)
