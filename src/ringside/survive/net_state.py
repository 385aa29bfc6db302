"""A state given to a process on another host: over a group of two that only this gift uses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from threading import Event

import numpy as np
from numpy.typing import NDArray

from ringside.engine.background import Background, Work
from ringside.engine.transports.transport import Cause, LinkError, Transport
from ringside.errors import RingsideError
from ringside.survive.decision import Seat, Tag
from ringside.survive.neighbours import OpenTransport

Bytes = NDArray[np.uint8]
PIECE_BYTES = 1 << 22
MOST_BYTES = 1 << 44
_GIVER, _TAKER = 0, 1


class Gift:
    """A state on its way, carried by a thread.

    Args:
        open_transport: Makes the group.
        name: The gift's, see `gift_name`.
        memory: The state, uint8 [n]; it must not change.
    """

    def __init__(self, open_transport: OpenTransport, name: str, memory: Bytes) -> None:
        self._thread = Background("ringside-survive-gift")
        self._transport: Transport | None = None
        self._wanted = True
        self._work = self._thread.submit(lambda: self._give(open_transport, name, memory))

    def close(self) -> None:
        """Give up, if it has not arrived."""
        self._wanted = False
        if self._transport is not None:
            self._transport.fail(Cause("left", _GIVER))
            self._transport.close(patience_s=0.0)
        self._thread.stop(timeout_s=0.0)

    def _give(self, open_transport: OpenTransport, name: str, memory: Bytes) -> None:
        self._transport = open_transport(name, _GIVER, 2, lambda: self._wanted)
        length = np.array([len(memory)], dtype=np.int64).view(np.uint8)
        for piece in (length, *_pieces(memory)):
            self._transport.send(_TAKER, piece).wait()


def receive(open_transport: OpenTransport, name: str, wait: Callable[[Work], object]) -> Bytes:
    """Take a gift and return it, uint8 [n].

    Args:
        open_transport: Makes the group.
        name: The gift's.
        wait: Returns when work is done, or raises to give up.

    Raises:
        RingsideError: It did not arrive.
    """
    thread, opened, over = Background("ringside-survive-gift"), list[Transport](), Event()
    try:
        work = thread.submit(lambda: _take(open_transport, name, opened, lambda: not over.is_set()))
        wait(work)
        taken: Bytes = work.wait(0)
        return taken
    except (LinkError, RuntimeError) as error:
        raise RingsideError(f"the connection broke ({error})") from None
    finally:
        over.set()
        for transport in opened:
            transport.fail(Cause("left", _TAKER))
            transport.close(patience_s=0.0)
        thread.stop(timeout_s=0.0)


def gift_name(tag: Tag, giver: Seat, taker: Seat) -> str:
    """Return what a gift is called: no two have one name."""
    return f"{tag.incarnation}/gift/{tag.generation}/{giver.rank}.{giver.epoch}/{taker.rank}.{taker.epoch}"


def _take(open_transport: OpenTransport, name: str, opened: list[Transport], wanted: Callable[[], bool]) -> Bytes:
    transport = open_transport(name, _TAKER, 2, wanted)
    opened.append(transport)
    length = np.zeros(8, dtype=np.uint8)
    transport.receive(_GIVER, length).wait()
    size = int(length.view(np.int64)[0])
    if not 0 < size < MOST_BYTES:
        raise RingsideError(f"a state of {size} bytes was announced")
    memory = np.empty(size, dtype=np.uint8)
    for piece in _pieces(memory):
        transport.receive(_GIVER, piece).wait()
    return memory


def _pieces(memory: Bytes) -> list[Bytes]:
    bounds = [*range(0, len(memory), PIECE_BYTES), len(memory)]
    return [memory[first:last] for first, last in itertools.pairwise(bounds)]


__all__ = ["Gift", "gift_name", "receive"]
