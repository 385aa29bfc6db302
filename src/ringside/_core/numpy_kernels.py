"""NumPy twins of the native kernels: the same meaning, written to be read, and the oracle of their tests.

A twin takes and gives arrays of the dtype as it lies in memory, except that bfloat16, which NumPy has not, is uint16
bits. Signs and payloads of NaNs are left open; everything else agrees bit for bit with `kernels.hpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

STORED_AS = {"bfloat16": np.dtype(np.uint16)}
"""Dtypes whose elements NumPy holds as bits of another."""


def fold(
    sources: Sequence[Array],
    dtype: str,
    op: str,
    *,
    scale: float = 1.0,
    divisor: float = 1.0,
    scales: Sequence[float] | None = None,
) -> Array:
    """Return the reduction of `sources`, folded left to right.

    Args:
        sources: One or more arrays of equal shape, elements of `dtype`.
        dtype: A name of `ringside.engine.dtypes.DTYPES`.
        op: A name of `ringside.engine.dtypes.OPS` that `dtype` allows.
        scale: Multiplies each contribution first (floating dtypes, sum and avg).
        scales: One for each source, in place of `scale`.
        divisor: What avg divides the finished sum by.

    Returns:
        An array of the same shape and dtype. float16 and bfloat16 are folded in float32 and rounded once.
    """
    with np.errstate(all="ignore"):
        wide = [widen(source, dtype) for source in sources]
        if scales is not None or scale != 1.0:
            factors = [scale] * len(wide) if scales is None else scales
            wide = [source * source.dtype.type(factor) for source, factor in zip(wide, factors, strict=True)]
        total = reduce(operation(dtype, op), wide)
        if op == "avg":
            total = divide(total, divisor)
        return narrow(total, dtype)


def widen(x: Array, dtype: str) -> Array:
    """Return elements of `dtype` in the dtype they are folded in; exact."""
    if dtype == "float16":
        return x.astype(np.float32)
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x


def narrow(x: Array, dtype: str) -> Array:
    """Return folded elements as `dtype`, rounded to nearest even; a NaN stays one."""
    if dtype == "float16":
        return x.astype(np.float16)
    if dtype == "bfloat16":
        bits = x.view(np.uint32)
        rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)
    return x


def operation(dtype: str, op: str) -> Callable[[Array, Array], Array]:
    """Return how two elements of a dtype are combined."""
    if dtype == "bool":
        return {"bxor": np.logical_xor, "prod": np.logical_and, "min": np.logical_and, "band": np.logical_and}.get(
            op, np.logical_or
        )
    operations: dict[str, Callable[[Array, Array], Array]] = {
        "sum": np.add,
        "avg": np.add,
        "prod": np.multiply,
        "min": lambda a, b: np.where((a < b) | (a != a), a, b),
        "max": lambda a, b: np.where((a > b) | (a != a), a, b),
        "band": np.bitwise_and,
        "bor": np.bitwise_or,
        "bxor": np.bitwise_xor,
    }
    return operations[op]


def divide(total: Array, divisor: float) -> Array:
    """Divide; integers truncate towards zero, as C does."""
    if total.dtype.kind == "f":
        quotient: Array = total / total.dtype.type(divisor)
        return quotient
    whole = total.astype(np.int64)
    floor, rest = np.divmod(whole, np.int64(divisor))
    truncated: Array = (floor + ((rest != 0) & (whole < 0))).astype(total.dtype)
    return truncated


DIGEST_BLOCK = 1024
DIGEST_BASE = 0xD6E8FEB86659FD93
_WRAP = (1 << 64) - 1
_ROWS = 32  # blocks at a time: what is worked on stays in the cache


def digest_weights() -> NDArray[np.uint64]:
    """Return the odd weights of a block's words, from SplitMix64 (Steele, Lea, Flood 2014): uint64 [DIGEST_BLOCK]."""
    with np.errstate(over="ignore"):
        z = np.arange(1, DIGEST_BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    weights: NDArray[np.uint64] = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return weights


_weights = digest_weights()


def digest(data: NDArray[np.uint8], start: int = 0) -> int:
    """Return the digest of bytes as they lie in memory, an integer of 64 bits (see `digest.hpp`).

    Args:
        data: Contiguous bytes.
        start: What the digest begins with.
    """
    whole = len(data) // 8
    words = data[: 8 * whole].view(np.uint64)
    if len(data) > 8 * whole:
        last = int.from_bytes(data[8 * whole :].tobytes(), "little")
        words = np.append(words, np.uint64(last))
    value = start
    for first in range(0, len(words), _ROWS * DIGEST_BLOCK):
        part = words[first : first + _ROWS * DIGEST_BLOCK]
        products = part ^ (part >> np.uint64(31))
        products *= np.resize(_weights, len(part))
        for total in np.add.reduceat(products, np.arange(0, len(part), DIGEST_BLOCK)):
            value = (value * DIGEST_BASE + int(total)) & _WRAP
    return value
