"""What the interpreter requires of a transport: ordered messages between pairs of vertices, several in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Kept = list[Any]
"""Memory that is sent, or received into, again and again: a list of one, which `Transport.keep` makes."""
Kind = Literal["lost", "late", "left", "disagreed"]

NOBODY = -1
"""No vertex, or one that is not known."""


@dataclass(frozen=True, slots=True)
class LinkFailure:
    """Why a group of vertices can no longer exchange messages.

    Args:
        kind: `lost`: the vertex died or cannot be reached. `late`: it did not send in time. `left`: it aborted by
            itself (an error of its own, Ctrl-C, a closed communicator). `disagreed`: it found that others called
            something else than it did.
        vertex: The one it is about; -1: not known.
        detail: What is known besides, for the message.
    """

    kind: Kind
    vertex: int
    detail: str = field(default="", compare=False)


class LinkError(Exception):
    """A message could not be delivered; the group is unusable from now on.

    Args:
        cause: Why, as far as this end knows.
        detail: The transport's own message.
    """

    def __init__(self, cause: LinkFailure, detail: str = "") -> None:
        super().__init__(f"{cause.kind} {cause.vertex}: {detail}")
        self.cause = cause
        self.detail = detail


class Pending(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Return when it has left (its memory may be used again) or has arrived; raise `LinkError`."""


class Links(Protocol):
    """Messages between vertices, of which this is one.

    Between two vertices messages arrive in the order in which they were sent, into the memory given to `receive` in
    the order of those calls; a message may be shorter than that memory. `receive` should be called ahead of time: a
    message whose receive is posted travels without a handshake.
    """

    def keep(self, data: Bytes) -> Kept:
        """Return what `send` and `receive` take in place of `data`, with less to do each time."""

    def send(self, peer: int, data: Bytes | Kept) -> Pending:
        """Start sending `data` (uint8 [n], n ≥ 1); it must not change until the message has left."""

    def receive(self, peer: int, into: Bytes | Kept) -> Pending:
        """Start receiving the next message from `peer` into `into` (uint8 [m], m ≥ the message's length)."""


class Transport(Links, Protocol):
    """Links to the other ones of the vertices 0 to size - 1, and what is done when they fail.

    Attributes:
        rank: This vertex.
        size: Number of vertices.
        doing: The collective that this vertex is in, for the others when it aborts; "": none.
        number: How many it has begun, that one included.
        waits_inside: Returns which vertex it waits for in its host's shared memory; `NOBODY`: for none.
        on_failure: Called when it aborts, as soon as the notices are sent; it may be on any thread.
    """

    rank: int
    size: int
    doing: object
    number: int
    waits_inside: Callable[[], int]
    on_failure: Callable[[], object]

    def open_channel(self, connection: int = 0) -> Links:
        """Return links to the same vertices whose messages have an order of their own: those of another thread.

        All vertices call this alike. What fails there, fails here, and the other way round.

        Args:
            connection: Over which of the connections between two vertices they travel; it is made if there is none.
        """

    def fail(self, cause: LinkFailure) -> LinkFailure:
        """Send all others why this vertex aborts, and end all that is under way; return the first known cause."""

    def close(self, *, patience_s: float = 5.0) -> None:
        """Leave, when all others have left too or after that many seconds."""

    def describe(self) -> dict[str, Any]:
        """Return what is to be shown of it, such as its name."""
