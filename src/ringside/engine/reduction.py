"""Elementwise reduction of memory by address: the native kernels where they are built, their NumPy twins elsewhere."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringside import _core
from ringside._core import numpy_kernels as twins
from ringside.engine.dtypes import DTYPES, ITEM_BYTES, OP_CODES, OPS

_native: Any = _core.native() if _core.available() else None
SUM, AVG = OP_CODES["sum"], OP_CODES["avg"]


def fold(
    sources: Sequence[int],
    target: int,
    elements: int,
    dtype: int,
    op: int,
    *,
    scale: float = 1.0,
    scales: Sequence[float] = (),
    divisor: float = 1.0,
) -> None:
    """Fold arrays left to right into one that may be one of them.

    Args:
        sources: Addresses of the arrays, in order.
        target: Address of the result.
        elements: Length of each.
        dtype: Code of the element type.
        op: Code of the reduction.
        scale: Multiplies each contribution first (floating dtypes, sum and avg).
        scales: One for each source, in place of `scale`.
        divisor: What avg divides the finished sum by.
    """
    if _native is not None:
        _native.fold(list(sources), [target], elements, dtype, op, scale, divisor, False, "", list(scales))
        return
    name = DTYPES[dtype]
    arrays = [_array(address, elements, dtype) for address in sources]
    _array(target, elements, dtype)[...] = twins.fold(
        arrays, name, OPS[op], scale=scale, scales=scales or None, divisor=divisor
    )


def folder(
    dtype: int, op: int, *, scale: float = 1.0, scales: Sequence[float] = (), divisor: float = 1.0
) -> Callable[[Sequence[int], int, int], None]:
    """Return `fold` for one dtype and reduction; without a divisor an average is only summed."""
    step = SUM if op == AVG and divisor == 1.0 else op

    def run(sources: Sequence[int], target: int, elements: int) -> None:
        fold(sources, target, elements, dtype, step, scale=scale, scales=scales, divisor=divisor)

    return run


def memory(address: int, size_bytes: int) -> NDArray[np.uint8]:
    """Return the bytes at an address as a writable array; it does not keep them alive."""
    if size_bytes == 0:
        return np.empty(0, dtype=np.uint8)
    raw: Any = (ctypes.c_uint8 * size_bytes).from_address(address)
    array: NDArray[np.uint8] = np.frombuffer(raw, dtype=np.uint8)
    return array


def _array(address: int, elements: int, dtype: int) -> NDArray[Any]:
    name = DTYPES[dtype]
    return memory(address, elements * ITEM_BYTES[dtype]).view(twins.STORED_AS.get(name, np.dtype(name)))
