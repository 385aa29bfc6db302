"""How f32 elements travel in a quarter of their bits: blocks of 32 codes of 8 bits with one scale, rounded in place.

A block is one of the OCP's Microscaling Formats (v1.0): its scale is a power of two in one byte, the smallest by which
the block's largest magnitude fits the codes. So 33 bytes carry what were 128, and what a block is worth is what it is
worth again when that is encoded. Sums are f32: only what is sent is rounded, and the sender keeps what it sent.

Error. Every code is rounded to nearest: by half a step of its block at most. The step is the scale s for `int8`; for
`fp8_e4m3` it is 32 s for the largest codes and less for smaller ones (2^-3 of an element's power of two). With m the
largest magnitude of the block, half a step is at most m / 127, and m / 14 (2^-4 of the element itself, where that is
not below 2^-6 s). A result differs from the f32 sum by at most half a step for each partial sum of it that is sent, and
once more at the end, where the finished sum is; each of the steps is of the block as it was sent then. What is sent in
one round are sums of different ranks: together their steps are at most one of m, the sum of all ranks' largest
magnitudes in the block. A block that has a NaN or an infinity, or something beyond what the codes can be worth (3.3e38;
2.9e38 for `fp8_e4m3`), is NaN throughout.

Error feedback (Seide and others 2014; Karimireddy and others 2019). What a rank rounds away of a tensor it keeps, and
adds to what it encodes of the same elements in the next all-reduce. It does so where it encodes an element for the
first time in an all-reduce: that holds a contribution which nobody else has, so all ranks still end with the same bits,
whatever each has kept. In rings, trees and halving-doubling there is no second time: sums over steps then differ from
those of f32 by what is kept of the last one, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from ringside import _core
from ringside._core.numpy_kernels import CODE_BLOCK, decode_blocks, encode_blocks
from ringside.engine.buffers import address_of
from ringside.engine.transports.base import Bytes

BlockDtype = Literal["int8", "fp8_e4m3"]
_BLOCK_BYTES = CODE_BLOCK + 1

_native: Any = _core.native() if _core.available() else None


@dataclass(frozen=True)
class BlockScaling:
    """Encodes f32 elements for the wire and back.

    Args:
        dtype: `int8` or `fp8_e4m3`.
        rounds_own: As of `ringside.engine.net.exchange.wire.Wire`, and so are `sums_only` and `block`.
    """

    dtype: BlockDtype
    rounds_own: bool = False

    sums_only: ClassVar[bool] = True
    block: ClassVar[int] = CODE_BLOCK

    def wire_bytes(self, elements: int) -> int:
        """Return how many bytes carry that many elements."""
        return elements + -(-elements // CODE_BLOCK)

    def elements_in(self, size_bytes: int) -> int:
        """Return how many elements a message of that size carries: whole blocks, and a block less than there is room.

        The one that is less makes room for parts of the tensor that share a message, each with a last block of its own.
        """
        return max((size_bytes // _BLOCK_BYTES - 1) * CODE_BLOCK, min(size_bytes // 2, CODE_BLOCK), 1)

    def narrow(self, data: Bytes, *, first: bool = True) -> Bytes:
        """Return f32 elements (as bytes) as codes and their blocks' scales, and round them where they lie."""
        return self.encode(data, None)

    def encode(self, data: Bytes, residual: NDArray[np.float32] | None) -> Bytes:
        """Do what `narrow` does, with a residual: it is added to the elements, and is what was rounded away afterwards.

        Args:
            data: f32 [n], as bytes.
            residual: f32 [n]; None: nothing is added.
        """
        if _native is None:
            return self.encode_by_numpy(data, residual)
        count = len(data) // 4
        message = np.empty(self.wire_bytes(count), dtype=np.uint8)
        codes, kept = address_of(message), 0 if residual is None else address_of(residual)
        _native.encode_blocks(address_of(data), codes, codes + count, count, self.dtype != "int8", kept)
        return message

    def encode_by_numpy(self, data: Bytes, residual: NDArray[np.float32] | None) -> Bytes:
        """Do what `encode` does, without the native core."""
        wide = data.view(np.float32)
        with np.errstate(all="ignore"):
            x = wide if residual is None else wide + residual
            codes, scales = encode_blocks(x, self.dtype)
            worth = decode_blocks(codes, scales, self.dtype)
            if residual is not None:
                residual[:] = np.where(np.isnan(worth), 0.0, x - worth)
        wide[:] = worth
        return np.concatenate([codes, scales])

    def widen(self, data: Bytes) -> Bytes:
        """Return what arrived as f32 elements (as bytes)."""
        if _native is None:
            return self.widen_by_numpy(data)
        count = self._elements_of(data)
        wide = np.empty(4 * count, dtype=np.uint8)
        codes = address_of(data)
        _native.decode_blocks(codes, codes + count, address_of(wide), count, self.dtype != "int8")
        return wide

    def widen_by_numpy(self, data: Bytes) -> Bytes:
        """Do what `widen` does, without the native core."""
        count = self._elements_of(data)
        return decode_blocks(data[:count], data[count:], self.dtype).view(np.uint8)

    @staticmethod
    def _elements_of(data: Bytes) -> int:
        return len(data) - -(-len(data) // _BLOCK_BYTES)


class ErrorFeedback:
    """A tensor's `BlockScaling`, which adds to what it encodes what was rounded away in the all-reduce before.

    Nothing of it needs to be equal on all ranks, nor to be there at all. What is kept ready for a tensor
    (`ringside.engine.net.persistent`) is kept for one of these: it is equal to itself alone.

    Args:
        scaling: How the elements travel.
        address: Of the tensor's first element.
        elements: Of the tensor.

    Attributes:
        dtype, rounds_own, sums_only, block: As of `scaling`.
        address: As given.
        residual: What was rounded away, f32 [elements]; 0 where this rank encodes nothing. What is never written of
            it takes no memory.
    """

    def __init__(self, scaling: BlockScaling, address: int, elements: int) -> None:
        self.dtype, self.rounds_own = scaling.dtype, scaling.rounds_own
        self.sums_only, self.block = scaling.sums_only, scaling.block
        self.wire_bytes, self.elements_in, self.widen = scaling.wire_bytes, scaling.elements_in, scaling.widen
        self._scaling, self.address, self._elements = scaling, address, elements
        self.clear()

    def clear(self) -> None:
        """Keep nothing; memory that was written is given back."""
        self.residual = np.zeros(self._elements, dtype=np.float32)

    def narrow(self, data: Bytes, *, first: bool) -> Bytes:
        """Do what `BlockScaling.narrow` does, with what was rounded away before; a part of the tensor."""
        if not first:
            return self._scaling.encode(data, None)
        begin = (address_of(data) - self.address) // 4
        return self._scaling.encode(data, self.residual[begin : begin + len(data) // 4])
