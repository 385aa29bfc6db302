"""How f32 elements travel when half of the bits shall do: rounded to bfloat16 or float16 by the sender, in place.

Whatever a rank sends it first rounds in its own memory too, so that sender and receiver go on with the same value; at
the end every rank rounds its result once more (which changes nothing where it was sent or received). So all ranks still
end with identical bits. Each value is rounded once per round in which a partial sum of it is sent: with unit roundoff u
(2⁻⁸ for bfloat16, 2⁻¹¹ for float16) and k such rounds the result differs from the f32 sum by at most about
(k+1)·u·Σ|x|; float16 overflows to infinity beyond 65504.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from ringside import _core
from ringside._core import numpy_kernels
from ringside.engine.buffers import address_of
from ringside.engine.transports.base import Bytes

HalfDtype = Literal["bfloat16", "float16"]

_native: Any = _core.native() if _core.available() else None


@dataclass(frozen=True)
class WireCompression:
    """Rounds f32 elements for the wire and back.

    Args:
        dtype: `bfloat16` or `float16`.
        rounds_own: As of `ringside.engine.net.exchange.wire.Wire`, and so are `sums_only` and `block`.
    """

    dtype: HalfDtype
    rounds_own: bool = False

    sums_only: ClassVar[bool] = False
    block: ClassVar[int] = 1

    def wire_bytes(self, elements: int) -> int:
        """Return how many bytes carry that many elements."""
        return 2 * elements

    def elements_in(self, size_bytes: int) -> int:
        """Return how many elements a message of that size carries."""
        return max(size_bytes // 2, 1)

    def narrow(self, data: Bytes, *, first: bool = True) -> Bytes:
        """Return f32 elements (as bytes) in the wire's dtype, and round them where they lie."""
        if _native is not None:
            half = np.empty(len(data) // 2, dtype=np.uint8)
            _native.narrow(
                address_of(data), address_of(half), len(data) // 4, self.dtype == "bfloat16", address_of(data)
            )
            return half
        return self.narrow_by_numpy(data)

    def narrow_by_numpy(self, data: Bytes, *, first: bool = True) -> Bytes:
        """Do what `narrow` does, without the native core."""
        wide = data.view(np.float32)
        with np.errstate(over="ignore"):
            half = numpy_kernels.narrow(wide, self.dtype)
        wide[:] = numpy_kernels.widen(half, self.dtype)
        return half.view(np.uint8)

    def widen(self, data: Bytes) -> Bytes:
        """Return what arrived as f32 elements (as bytes)."""
        if _native is not None:
            wide = np.empty(2 * len(data), dtype=np.uint8)
            _native.widen(address_of(data), address_of(wide), len(data) // 2, self.dtype == "bfloat16")
            return wide
        return self.widen_by_numpy(data)

    def widen_by_numpy(self, data: Bytes) -> Bytes:
        """Do what `widen` does, without the native core."""
        half = data.view(numpy_kernels.STORED_AS.get(self.dtype, np.float16))
        return numpy_kernels.widen(half, self.dtype).view(np.uint8)
