"""How f32 elements travel between hosts where not as they are: what each way has to do, and which there are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

from ringside.engine.net.exchange.block_scaling import BlockScaling
from ringside.engine.net.exchange.compression import WireCompression
from ringside.engine.transports.base import Bytes
from ringside.errors import UsageError


class Wire(Protocol):
    """Encodes f32 elements for the wire and back; equal ones encode alike, on every rank.

    Encoding what was decoded must give the same values again.
    """

    @property
    def dtype(self) -> str:
        """Its name."""

    @property
    def rounds_own(self) -> bool:
        """Whether a rank rounds its own contribution where it adds it up, too, as if it had been sent.

        So that a sum does not depend on who adds it up.
        """

    @property
    def sums_only(self) -> bool:
        """Whether other reductions than sums and means travel as they are."""

    @property
    def block(self) -> int:
        """How many elements are encoded together: parts of a tensor begin at multiples of it, where that is free."""

    def wire_bytes(self, elements: int) -> int:
        """Return how many bytes carry that many elements of one part of a tensor."""

    def elements_in(self, size_bytes: int) -> int:
        """Return how many elements of a tensor a message of that size carries, at least 1."""

    def narrow(self, data: Bytes, *, first: bool) -> Bytes:
        """Return f32 elements (as bytes) as they travel, and round them where they lie.

        Args:
            data: The elements.
            first: They were not encoded before in this all-reduce, on this rank.
        """

    def widen(self, data: Bytes) -> Bytes:
        """Return what arrived as f32 elements (as bytes)."""


def make_wire(dtype: str, *, rounds_own: bool = False) -> WireCompression | BlockScaling:
    """Return the wire of that name.

    Args:
        dtype: `bfloat16`, `float16`, `int8` or `fp8_e4m3`.
        rounds_own: As of `Wire`.

    Raises:
        UsageError: There is none of that name.
    """
    if dtype not in _WIRES:
        *most, last = _WIRES
        raise UsageError(f"gradients cannot travel as {dtype!r}; there are {', '.join(most)} and {last}")
    return _WIRES[dtype](rounds_own)


_WIRES: dict[str, Callable[[bool], WireCompression | BlockScaling]] = {
    "bfloat16": functools.partial(WireCompression, "bfloat16"),
    "float16": functools.partial(WireCompression, "float16"),
    "int8": functools.partial(BlockScaling, "int8"),
    "fp8_e4m3": functools.partial(BlockScaling, "fp8_e4m3"),
}
