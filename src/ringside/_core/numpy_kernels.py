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


CODE_BLOCK = 32
"""Elements that share a scale in `encode_blocks`."""
_CODE_NAN = 255
# By name: the exponent of the largest code, and what carries a magnitude beyond its mantissa into the next exponent.
_CODES = {"int8": (6, 0x1FFFF), "fp8_e4m3": (8, 0x1FFFFF)}


def encode_blocks(x: Array, code: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return float32 elements in 8 bits each, and one scale per block, as the OCP's Microscaling Formats have them.

    Args:
        x: float32 [n].
        code: `int8` (-127 to 127) or `fp8_e4m3` (torch's float8_e4m3fn, -448 to 448).

    Returns:
        (codes, uint8 [n]; scales, uint8 [n / 32, rounded up]): an element is worth code * 2**(scale - 127). A scale is
        the smallest by which its block fits, and at least 1; 255 says that the block is NaN throughout, as one is that
        has anything which is not finite or beyond what the codes can be worth.
    """
    exponent, above = _CODES[code]
    count = -(-len(x) // CODE_BLOCK)
    blocks = np.zeros((count, CODE_BLOCK), dtype=np.float32)
    blocks.reshape(-1)[: len(x)] = x
    most = (blocks.view(np.uint32) & 0x7FFFFFFF).max(axis=1, initial=0).astype(np.int64) + above
    is_nan = most >= 0x7F800000
    scales = np.where(is_nan, _CODE_NAN, np.maximum((most >> 23) - exponent, 1)).astype(np.uint8)
    with np.errstate(all="ignore"):
        scaled = np.ldexp(blocks, 127 - scales.astype(np.int32)[:, None])
        scaled[is_nan] = 0.0
        codes = np.rint(scaled).astype(np.int8).view(np.uint8) if code == "int8" else _e4m3(scaled)
    return codes.reshape(-1)[: len(x)].copy(), scales


def decode_blocks(codes: NDArray[np.uint8], scales: NDArray[np.uint8], code: str) -> NDArray[np.float32]:
    """Return what the codes of `encode_blocks` are worth, float32 [n]."""
    worth = codes.view(np.int8).astype(np.float32) if code == "int8" else _E4M3_VALUES[codes]
    by_element = np.repeat(scales.astype(np.int32), CODE_BLOCK)[: len(codes)]
    decoded = np.ldexp(worth, by_element - 127)
    decoded[by_element == _CODE_NAN] = np.nan
    return decoded.astype(np.float32, copy=False)


def _e4m3(x: Array) -> NDArray[np.uint8]:
    """Return float32 elements up to 448 as bits of float8_e4m3fn, rounded to nearest even."""
    # The exponent of the last bit: of three behind the leading one, and -9 at least.
    _, exponent = np.frexp(x)
    last = np.maximum(exponent - 4, -9)
    magnitude = np.ldexp(np.rint(np.ldexp(np.abs(x), -last)), last)
    codes: NDArray[np.uint8] = np.searchsorted(_E4M3_VALUES[:127], magnitude.astype(np.float32)).astype(np.uint8)
    codes |= np.signbit(x).astype(np.uint8) << 7
    return codes


def _e4m3_values() -> NDArray[np.float32]:
    """Return what the 256 codes of float8_e4m3fn are worth."""
    body = np.arange(128)
    exponent, mantissa = body >> 3, body & 7
    magnitudes = np.ldexp(np.where(exponent > 0, 8.0 + mantissa, mantissa), np.maximum(exponent, 1) - 10)
    magnitudes[127] = np.nan
    return np.concatenate([magnitudes, -magnitudes]).astype(np.float32)


_E4M3_VALUES = _e4m3_values()


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
