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
        total = reduce(_operation(dtype, op), wide)
        if op == "avg":
            total = _divide(total, divisor)
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


def _operation(dtype: str, op: str) -> Callable[[Array, Array], Array]:
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


def _divide(total: Array, divisor: float) -> Array:
    """Divide; integers truncate towards zero, as C does."""
    if total.dtype.kind == "f":
        quotient: Array = total / total.dtype.type(divisor)
        return quotient
    whole = total.astype(np.int64)
    floor, rest = np.divmod(whole, np.int64(divisor))
    truncated: Array = (floor + ((rest != 0) & (whole < 0))).astype(total.dtype)
    return truncated
