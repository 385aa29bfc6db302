"""Records in registers: MessagePack, bounded, and refused with one clear line where they are anything else."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from ringside.decoding import UNDECODABLE
from ringside.errors import RingsideError

MOST_BYTES = 1 << 20
"""A generation of 24,576 members takes a quarter of it."""
T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Digest = Annotated[str, msgspec.Meta(max_length=128)]

encode = msgspec.msgpack.Encoder().encode


def decode(data: bytes, decoder: msgspec.msgpack.Decoder[T], what: str) -> T:
    """Return the record that bytes stand for.

    Raises:
        RingsideError: They are too many, or no such record.
    """
    if len(data) > MOST_BYTES:
        raise RingsideError(f"{what} of {len(data)} bytes is not one of ours: is the store shared with another job?")
    try:
        return decoder.decode(data)
    except UNDECODABLE as error:
        raise RingsideError(
            f"{what} cannot be read ({error}): another job, or another version of ringside, uses this store"
        ) from None


__all__ = ["Count", "Digest", "decode", "encode"]
