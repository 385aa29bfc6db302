"""A large tensor on its way through shared memory, between hosts and back, piece by piece. Pure but for its condition.

The schedule's chunks are contiguous parts of the tensor, and each is cut into pieces; a piece is added up inside the
host lane by lane, each lane's part travels in segments, and as soon as all of it is there again the host's ranks share
it. So messages begin when the first piece is added up, and only the last piece is shared after the last message.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringside.engine.message_plan import MessagePlan
from ringside.errors import ClosedError
from ringside.schedule import chunk_bounds

_PIECES = 16  # of a tensor, unless they would be smaller than a message for each lane


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a chunk.

    Args:
        chunk: The schedule's chunk.
        begin: Its first element in the tensor.
        bounds: Offsets of the local ranks' parts from `begin`, elements, [local ranks + 1].
    """

    chunk: int
    begin: int
    bounds: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How a tensor is cut, and in which order a host goes through it.

    Args:
        pieces: By chunk, ascending.
        fills: The pieces in the order in which their contributions are needed.
        ends: The pieces in the order in which their results come.
    """

    pieces: tuple[Piece, ...]
    fills: tuple[Piece, ...]
    ends: tuple[Piece, ...]


def lane_bounds(count: int, lanes: int, local_ranks: int) -> tuple[int, ...]:
    """Return the offsets of the local ranks' parts, [local ranks + 1]; ranks beyond the lanes have none."""
    per = -(-count // lanes)
    return tuple(min(count, per * min(lane, lanes)) for lane in range(local_ranks + 1))


def lay_out(plan: MessagePlan, elements: int, least: int, most: int, lanes: int, local_ranks: int) -> Layout:
    """Cut a tensor.

    Args:
        plan: The host's part of the schedule between hosts.
        elements: Of the tensor.
        least: Of a piece, unless the chunk is smaller.
        most: Of a piece.
        lanes: Ranks of each host that carry a part.
        local_ranks: Ranks of this host.
    """
    size = min(max(elements // _PIECES, least, 1), max(most, 1))
    bounds = chunk_bounds(elements, plan.chunks)
    by_chunk: list[list[Piece]] = []
    for chunk in range(plan.chunks):
        begin, end = int(bounds[chunk]), int(bounds[chunk + 1])
        count = max(-(-(end - begin) // size), 1)
        edges = np.linspace(begin, end, count + 1).astype(np.int64).tolist()
        by_chunk.append(
            [
                Piece(chunk, edge, lane_bounds(edges[at + 1] - edge, lanes, local_ranks))
                for at, edge in enumerate(edges[:-1])
            ]
        )
    fills, ends = _chunks_needed(plan), _chunks_ended(plan)
    return Layout(
        tuple(piece for pieces in by_chunk for piece in pieces),
        tuple(piece for chunk in fills for piece in by_chunk[chunk]),
        tuple(piece for chunk in ends for piece in by_chunk[chunk]),
    )


def _chunks_needed(plan: MessagePlan) -> list[int]:
    """Return the chunks in the order in which this vertex first sends or adds to them."""
    sends = [send for sends in plan.links.values() for send in sends if send.after < 0]
    sent = [send.chunk for send in sorted(sends, key=lambda send: send.round)]
    received = [receive.chunk for receives in plan.rounds for receive in receives]
    return list(dict.fromkeys([*sent, *received, *range(plan.chunks)]))


def _chunks_ended(plan: MessagePlan) -> list[int]:
    """Return the chunks in the order in which they have their last content."""
    received = [receive.chunk for receives in plan.rounds for receive in receives]
    return [chunk for index, chunk in enumerate(received) if index in plan.finals]


class Stream:
    """Where every piece is: the feed of an exchange (`ringside.engine.exchange.Feed`) on one thread, while another one
    fills pieces and waits for their ends.

    Args:
        layout: The pieces.
        segments: How many messages carry this rank's part of each piece, by piece of `layout.pieces`.
    """

    def __init__(self, layout: Layout, segments: Sequence[int]) -> None:
        self._index = {(piece.chunk, piece.begin): at for at, piece in enumerate(layout.pieces)}
        self._at: dict[int, list[int]] = {}
        for at, (piece, count) in enumerate(zip(layout.pieces, segments, strict=True)):
            self._at.setdefault(piece.chunk, []).extend([at] * count)
        self._left = list(segments)
        self._filled = [False] * len(segments)
        self._changed = threading.Condition()
        self._stopped = False

    def wait(self, chunk: int, segment: int) -> None:
        """Return when this host's contribution is added up there."""
        at = self._at[chunk][segment]
        if not self._filled[at]:
            with self._changed:
                self._changed.wait_for(lambda: self._filled[at] or self._stopped)
            if not self._filled[at]:
                raise ClosedError("the other half of this all-reduce has failed on this rank")

    def ready(self, chunk: int, segment: int) -> None:
        """Take note that a segment has its result."""
        at = self._at[chunk][segment]
        with self._changed:
            self._left[at] -= 1
            if not self._left[at]:
                self._changed.notify_all()

    def filled(self, piece: Piece) -> None:
        """Take note that a piece is added up."""
        with self._changed:
            self._filled[self._index[piece.chunk, piece.begin]] = True
            self._changed.notify_all()

    def ended(self, piece: Piece) -> bool:
        """Wait until a piece has its result, or no more are to come; tell which."""
        at = self._index[piece.chunk, piece.begin]
        with self._changed:
            self._changed.wait_for(lambda: self._left[at] == 0 or self._stopped)
        return self._left[at] == 0

    def stop(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


__all__ = ["Layout", "Piece", "Stream", "lane_bounds", "lay_out"]
