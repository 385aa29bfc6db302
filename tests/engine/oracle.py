"""What an all-reduce must give, worked out in NumPy from every rank's input; used inside the ranks."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from ringside._core import numpy_kernels as twins
from ringside.engine.dtypes import DTYPES, FLOATING, OPS, is_allowed
from ringside.schedule import Schedule, by_name
from ringside.schedule.schedule import run

Array = np.ndarray[Any, Any]
ALLOWED = [(d, o) for d in DTYPES for o in OPS if is_allowed(DTYPES.index(d), OPS.index(o))]


class Brain:
    """A bfloat16 tensor for tests without torch: uint16 bits that answer as a torch tensor does."""

    class _Dtype:
        def __str__(self) -> str:
            return "torch.bfloat16"

    dtype = _Dtype()
    is_cpu = True

    def __init__(self, bits: Array) -> None:
        self.bits, self.shape = bits, bits.shape

    def is_contiguous(self) -> bool:
        return self.bits.flags.c_contiguous

    def data_ptr(self) -> int:
        return self.bits.ctypes.data

    def numel(self) -> int:
        return self.bits.size


def stored(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype that holds the elements."""
    return twins.STORED_AS.get(dtype) or np.dtype(dtype)


def as_argument(x: Array, dtype: str) -> Any:
    """Return what to pass to `all_reduce` for elements held in `x`."""
    return Brain(x) if dtype == "bfloat16" else x


def elements(dtype: str, count: int, seed: object) -> Array:
    """Return a rank's input: ordinary numbers of mixed signs and sizes, with a few NaN, Inf, -0.0 and subnormals."""
    rng = np.random.default_rng(zlib.crc32(repr((dtype, count, seed)).encode()))
    if dtype == "bool":
        return rng.integers(0, 2, count).astype(bool)
    if dtype not in FLOATING:
        return rng.integers(0, 256, count * stored(dtype).itemsize, dtype=np.uint8).view(stored(dtype))
    x = rng.standard_normal(count) * 2.0 ** rng.integers(-6, 6, count)
    odd = rng.random(count) < 0.05
    x[odd] = rng.choice([np.nan, np.inf, -np.inf, -0.0, 1e-40, 6e-8, 6e4, 1e38], int(odd.sum()))
    with np.errstate(over="ignore"):
        return twins.narrow(x.astype(np.float32), dtype) if dtype in ("float16", "bfloat16") else x.astype(dtype)


def expected(inputs: list[Array], dtype: str, op: str, algorithm: str | Schedule | None, scale: float = 1.0) -> Array:
    """Return what every rank must hold afterwards."""
    if algorithm in (None, "one_shot", "direct") or len(inputs) == 1:
        return twins.fold(inputs, dtype, op, scale=scale, divisor=len(inputs))
    schedule = algorithm if isinstance(algorithm, Schedule) else by_name(str(algorithm), len(inputs))
    combine = twins.operation(dtype, op)
    with np.errstate(all="ignore"):
        wide = np.stack([twins.widen(x, dtype) for x in inputs])
        if scale != 1.0:
            wide = wide * wide.dtype.type(scale)
        total = run(schedule, wide, combine)[0]
        if op == "avg":
            total = twins.divide(total, len(inputs))
        return twins.narrow(total, dtype)


def difference(got: Array, want: Array, dtype: str) -> str:
    """Return "" where both have the same bits (a NaN is a NaN), else where they first differ."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{got.shape} instead of {want.dtype}{want.shape}"
    unsigned = np.dtype(f"u{got.itemsize}")
    differs = np.ascontiguousarray(got).view(unsigned) != np.ascontiguousarray(want).view(unsigned)
    if dtype in FLOATING:
        differs &= ~(np.isnan(twins.widen(got, dtype)) & np.isnan(twins.widen(want, dtype)))
    if not differs.any():
        return ""
    at = np.unravel_index(np.argmax(differs), got.shape)
    return f"element {at}: {got[at]!r} instead of {want[at]!r}, {int(differs.sum())} of {got.size} differ"


def digest(x: Array) -> int:
    """Return a checksum that is equal only where every bit is."""
    return zlib.crc32(np.ascontiguousarray(x).tobytes())
