"""What an all-reduce must give, computed without any engine, and how many elements differ from it.

Every rank's tensor repeats `PERIOD` random numbers of its own. The period is prime, so that an element taken from a
wrong slice, segment or rank is seen. The numbers are small integers: every order of summation gives the same bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringside.bench.plan import storage_dtype

PERIOD = 65521
_CHUNK_ROWS = 64
# The largest integer up to which every integer is exact; sums are kept below it.
_EXACT = {"float16": 2048, "bfloat16": 256, "int8": 127, "uint8": 255}
_BITWISE = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
_FOLDS = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum, **_BITWISE}

Array = NDArray[Any]


def contribution(rank: int, ranks: int, dtype: str, op: str) -> Array:
    """Return one period of a rank's tensor, shape [PERIOD], in the dtype it is stored as."""
    return to_storage(_numbers(rank, ranks, dtype, op), dtype)


def expected(ranks: int, dtype: str, op: str) -> Array:
    """Return one period of the result on every rank, shape [PERIOD], in the dtype it is stored as."""
    wide = "int64" if "int" in dtype else "float64"
    stack = np.stack([_numbers(rank, ranks, dtype, op).astype(wide) for rank in range(ranks)])
    with np.errstate(over="ignore"):
        result: Array = _FOLDS[op].reduce(stack, axis=0)
    if op == "avg":
        result = np.trunc(result / ranks) if wide == "int64" else result / ranks
    return to_storage(result, dtype)


def to_storage(values: Array, dtype: str) -> Array:
    """Convert numbers to a dtype's storage; bfloat16 is rounded to nearest, ties to even."""
    with np.errstate(over="ignore"):
        if dtype != "bfloat16":
            return values.astype(storage_dtype(dtype))
        bits = values.astype(np.float32).view(np.uint32)
        rounded: Array = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        return rounded.astype(np.uint16).view(np.int16)


def fill(array: Array, period: Array) -> None:
    """Write a period again and again into a one-dimensional array."""
    rows = len(array) // PERIOD
    array[: rows * PERIOD].reshape(rows, PERIOD)[...] = period
    array[rows * PERIOD :] = period[: len(array) - rows * PERIOD]


def count_wrong(array: Array, period: Array) -> int:
    """Return how many elements of a one-dimensional array differ from the repeated period."""
    rows = len(array) // PERIOD
    table = array[: rows * PERIOD].reshape(rows, PERIOD)
    wrong = int(np.count_nonzero(array[rows * PERIOD :] != period[: len(array) - rows * PERIOD]))
    for at in range(0, rows, _CHUNK_ROWS):  # in pieces: the comparison of 256 MB needs memory of its own
        wrong += int(np.count_nonzero(table[at : at + _CHUNK_ROWS] != period))
    return wrong


def _numbers(rank: int, ranks: int, dtype: str, op: str) -> Array:
    random = np.random.default_rng((rank, 20260101))
    if op == "prod":  # powers of two, few enough to stay finite in float16 for up to 64 ranks
        return np.where(random.integers(0, 8, PERIOD) == 0, 2, 1)
    top = 16
    if op in ("sum", "avg"):
        top = max(1, min(top, _EXACT.get(dtype, 1 << 20) // ranks))
    return random.integers(1, top + 1, PERIOD)
