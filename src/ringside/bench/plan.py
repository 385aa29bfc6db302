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
PEERS = ("gloo", "mpi")
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
        peers: Of `PEERS`, those that can run here.
        rounds: Rounds in which the engines take turns.
        iterations: All-reduces per engine and round; 0 fits as many into `round_seconds` as they take.
        round_seconds: How long an engine's turn should last.
        cache_bytes: The last-level cache.
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

    def states(self, size_bytes: int) -> list[tuple[str, int]]:
        """Return (cache state, number of buffers to rotate through) to measure for a size.

        "warm" is the same buffer again, "cold" a rotation through more than the cache. A tensor larger than that by
        itself is "any": there is only one case. Sizes too small to fill the cache with `MAX_BUFFERS` have no cold one.
        """
        goal = ROTATION * self.cache_bytes
        if size_bytes * self.ranks >= goal:
            return [("any", 1)]
        buffers = -(-goal // (self.ranks * stride_of(size_bytes)))
        return [("warm", 1)] + ([("cold", buffers)] if buffers <= MAX_BUFFERS else [])

    @property
    def pool_bytes(self) -> int:
        """Bytes that hold the buffers of any one case on one rank."""
        cases = [(size, buffers) for size in self.sizes_bytes for _, buffers in self.states(size)]
        return max(stride_of(size) * buffers for size, buffers in cases)

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


def whole_items(sizes: Sequence[int], dtype: str) -> tuple[int, ...]:
    """Return the sizes rounded down to whole items (at least one), ascending, each once."""
    item = ITEM_BYTES[dtype]
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
