"""What is decoded of a Kineto event, and nothing else: the rest of its bytes is skipped without becoming objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ringside.decoding import UNDECODABLE


class Event(msgspec.Struct, gc=False):
    """One event of a trace; `ts` and `dur` in microseconds, as integers or with a fraction."""

    ph: str
    cat: str | None = None
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    args: msgspec.Raw = msgspec.Raw(b"")


class CollectiveArguments(msgspec.Struct, gc=False):
    """What profilers say of a collective: since 2.3 on the device kernel as well, before only shapes and types."""

    name: Any = msgspec.field(name="Collective name", default=None)
    elements_in: Any = msgspec.field(name="In msg nelems", default=None)
    elements_out: Any = msgspec.field(name="Out msg nelems", default=None)
    dtype: Any = msgspec.field(name="dtype", default=None)
    group: Any = msgspec.field(name="Process Group Name", default=None)
    ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    seq: Any = msgspec.field(name="Seq", default=None)
    rank: Any = msgspec.field(name="Rank", default=None)
    group_size: Any = msgspec.field(name="Group size", default=None)
    dims: Any = msgspec.field(name="Input Dims", default=None)
    types: Any = msgspec.field(name="Input type", default=None)
    correlation: Any = None


class Correlation(msgspec.Struct, gc=False):
    """What ties a device's activity to the call that launched it."""

    correlation: int = -1


MOST_RANKS = 1 << 20

decode_collective = msgspec.json.Decoder(CollectiveArguments).decode
decode_correlations = msgspec.json.Decoder(list[Correlation], strict=False).decode


def collective_arguments(raw: msgspec.Raw) -> CollectiveArguments:
    """Return the arguments of a collective; empty ones where they are not what they should be."""
    try:
        return decode_collective(raw)
    except UNDECODABLE:
        return CollectiveArguments()


def correlations(raws: Sequence[msgspec.Raw]) -> list[int]:
    """Return the correlations of many events, decoded at one go; -1 for those without one."""
    try:
        return [
            one.correlation for one in decode_correlations(b"[" + b",".join(bytes(raw) or b"{}" for raw in raws) + b"]")
        ]
    except UNDECODABLE:
        half = len(raws) // 2
        return [*correlations(raws[:half]), *correlations(raws[half:])] if half else [-1] * len(raws)


def plain_count(value: object) -> int:
    """Return a rank or a number of ranks as it stands in an untrusted file; -1 for what cannot be one."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 8 and int(text) < MOST_RANKS else -1
