"""The header that vertices send before a collective's first element: what each of them called.

As PyTorch's CollectiveFingerPrint: ranks that call different things find out instead of waiting for each other.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from ringside.engine.dtypes import DTYPES, OPS
from ringside.engine.request import KINDS
from ringside.engine.transports.base import Bytes

OWN_SCALE, WHOLE_FOLD = 1, 2  # flags: bits
WIRE_FLAGS = {"bfloat16": 4, "float16": 8, "int8": 16, "fp8_e4m3": 32}
"""The flags of how elements travel."""
# Little-endian, not padded, 40 of HEADER_BYTES: seq, plan, segment, then the signature: elements, extra, tag, kind,
# dtype, op, flags.
_HEADER = struct.Struct("<QIIQdIBBBB")


class CollectiveSignature(NamedTuple):
    """What a rank called, as its peers compare it.

    Args:
        kind: Code of the collective.
        dtype: Code of the element type.
        op: Code of the reduction.
        elements: Elements of the tensor.
        extra: A number that must be equal, such as the root or the scale.
        tag: Hash of whatever else must be equal, such as bounds.
        flags: How it is done, where a vertex that was not called itself must know: `OWN_SCALE`, `WHOLE_FOLD`,
            one of `WIRE_FLAGS`.
    """

    kind: int
    dtype: int
    op: int
    elements: int
    extra: float = 0.0
    tag: int = 0
    flags: int = 0

    @property
    def wire(self) -> str:
        """How float32 elements travel, by name; "": as they are."""
        return next((dtype for dtype, flag in WIRE_FLAGS.items() if self.flags & flag), "")

    def __str__(self) -> str:
        name = KINDS[self.kind] if self.kind < len(KINDS) else f"collective {self.kind}"
        extra = "" if self.extra in (0.0, 1.0) or math.isnan(self.extra) else f", {self.extra:g}"
        extra += f", of hash {self.tag:08x}" if self.tag else ""
        extra += ", weighted" if self.flags & OWN_SCALE else ""
        extra += f", as {self.wire}" if self.wire else ""
        op = f"{OPS[self.op]}, " if "reduce" in name else ""
        return f"{name}({op}{DTYPES[self.dtype]}, {self.elements} elements{extra})"


class Operation(NamedTuple):
    """What a rank is doing, as it reports it to the others when something goes wrong.

    Args:
        call: What it called.
        algorithm: How that is done.
    """

    call: CollectiveSignature
    algorithm: str

    def __str__(self) -> str:
        return f"{self.call} by {self.algorithm}"


class MessageHeader(NamedTuple):
    """What the first message of a link in each collective begins with; equal at both ends, or they disagree.

    Args:
        seq: Number of the collective on this link.
        plan: Hash of the schedule.
        segment: Bytes of a tensor that one message carries at most.
        call: What was called.
    """

    seq: int
    plan: int
    segment: int
    call: CollectiveSignature

    def write(self, message: Bytes) -> None:
        """Put it at the beginning of a message."""
        call = self.call
        fields = (call.elements, call.extra, call.tag, call.kind, call.dtype, call.op, call.flags)
        _HEADER.pack_into(message.data, 0, self.seq, self.plan, self.segment, *fields)

    @staticmethod
    def read(message: Bytes) -> MessageHeader:
        """Return the header that a message begins with."""
        seq, plan, segment, elements, extra, tag, *codes = _HEADER.unpack_from(message.data)
        kind, dtype, op, flags = codes
        return MessageHeader(seq, plan, segment, CollectiveSignature(kind, dtype, op, elements, extra, tag, flags))


class SignatureMismatch(Exception):
    """A peer called something else.

    Args:
        peer: The vertex.
        theirs: The header that came.
        ours: The one this vertex expected.
    """

    def __init__(self, peer: int, theirs: MessageHeader, ours: MessageHeader) -> None:
        super().__init__(f"vertex {peer} called {theirs}, this one {ours}")
        self.peer, self.theirs, self.ours = peer, theirs, ours
