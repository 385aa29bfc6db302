"""A large tensor on its way through shared memory, between hosts and back, piece by piece. Pure but for its wake-ups.

The schedule's chunks are contiguous parts of the tensor, and each is cut into pieces; a piece is added up inside the
host lane by lane, each lane's part travels in segments, and as soon as all of it is there again the host's ranks share
it. So messages begin when the first piece is added up, and only the last piece is shared after the last message. Adding
up stays a few pieces ahead of the messages: it would else take the processor from them when they begin.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np

from ringside.engine.net.exchange.plan import MessagePlan
from ringside.errors import ClosedError
from ringside.schedule import chunk_bounds

_PIECES = 16  # of a tensor, unless they would be smaller than a message for each lane
_READY = 3  # pieces that are added up before messages need them
PATIENCE_S = 0.02  # messages that are held up elsewhere hold up no adding up
AHEAD = 3
"""Segments of this vertex's own that are sent before the one is received that comes at the same time, unless links are
long: what is fed in piece by piece is added up when messages need it, and no sooner."""


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
class SegmentLayout:
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
    return tuple(min(count, per * lane) for lane in range(local_ranks + 1))


@functools.lru_cache(maxsize=64)
def lay_out(
    plan: MessagePlan, elements: int, least: int, most: int, lanes: int, local_ranks: int, ahead: int = AHEAD
) -> SegmentLayout:
    """Cut a tensor; the same one is cut only once.

    Args:
        plan: The host's part of the schedule between hosts.
        elements: Of the tensor.
        least: Of a piece, or from three quarters of it to half as much more, as that divides the chunk.
        most: Of a piece.
        lanes: Ranks of each host that carry a part.
        local_ranks: Ranks of this host.
        ahead: Segments of this vertex's own that are sent before the one is received that comes at the same time.
    """
    size = min(max(elements // _PIECES, least, 1), max(most, 1))
    bounds = chunk_bounds(elements, plan.chunks)
    by_chunk: list[list[Piece]] = []
    for chunk in range(plan.chunks):
        begin, end = int(bounds[chunk]), int(bounds[chunk + 1])
        count = max((end - begin + size // 2) // size, -(-(end - begin) // max(most, 1)), 1)
        edges = np.linspace(begin, end, count + 1).astype(np.int64).tolist()
        by_chunk.append([Piece(chunk, a, lane_bounds(b - a, lanes, local_ranks)) for a, b in itertools.pairwise(edges)])
    return SegmentLayout(
        tuple(piece for pieces in by_chunk for piece in pieces),
        tuple(as_needed(plan, by_chunk, -(-ahead * least // max(size, least, 1)))),
        tuple(piece for chunk in chunks_ended(plan) for piece in by_chunk[chunk]),
    )


def as_needed(plan: MessagePlan, by_chunk: Sequence[Sequence[Piece]], ahead: int) -> list[Piece]:
    """Return all pieces in the order in which this vertex first sends or adds to them.

    Args:
        plan: The vertex's part of the schedule.
        by_chunk: The pieces of each chunk.
        ahead: What it sends of its own is on its way while it takes what comes in the same round, so many pieces ahead.
    """
    # When a chunk is first needed: (round, pieces later than that), whichever of these comes first.
    received = ((k, ahead, receive.chunk) for k, receives in enumerate(plan.rounds) for receive in receives)
    sent = ((send.round, 0, send.chunk) for sends in plan.links.values() for send in sends if send.after < 0)
    never = ((len(plan.rounds), ahead, chunk) for chunk in range(plan.chunks))
    first: dict[int, tuple[int, int]] = {}
    for k, later, chunk in sorted([*received, *sent, *never]):
        first.setdefault(chunk, (k, later))
    most = max(map(len, by_chunk))
    # The chunks of a round are gone through side by side, piece by piece.
    turns = [
        (k * most + index + later, later, piece)
        for chunk, (k, later) in first.items()
        for index, piece in enumerate(by_chunk[chunk])
    ]
    return [piece for _, _, piece in sorted(turns, key=lambda turn: turn[:2])]


def chunks_ended(plan: MessagePlan) -> list[int]:
    """Return the chunks that something arrives for, in the order in which they have their last content."""
    received = [receive.chunk for receives in plan.rounds for receive in receives]
    return [chunk for index, chunk in enumerate(received) if index in plan.finals]


class SegmentPlan:
    """What a pipeline knows beforehand: which piece each segment is part of, and the order in which pieces are needed.

    Args:
        layout: The pieces.
        segments: How many messages carry this rank's part of each piece, by piece of `layout.pieces`.
        kept: Chunks whose content nothing changes that arrives: their pieces have ended when they are filled.

    Attributes:
        fills: The numbers of the pieces in the order in which their contributions are needed.
        ends: The same in the order in which their results come.
        piece_of: The numbers of the pieces that a chunk's segments are part of, by chunk.
        left: How many messages are to come for a piece, by its number.
        turn: A piece's place in `fills`, by its number.
    """

    def __init__(self, layout: SegmentLayout, segments: Sequence[int], kept: Collection[int] = ()) -> None:
        number_of = {(piece.chunk, piece.begin): number for number, piece in enumerate(layout.pieces)}
        self.fills = tuple(number_of[piece.chunk, piece.begin] for piece in layout.fills)
        self.ends = tuple(number_of[piece.chunk, piece.begin] for piece in layout.ends)
        self.piece_of: dict[int, list[int]] = {}
        self.left: list[int] = []
        for number, (piece, count) in enumerate(zip(layout.pieces, segments, strict=True)):
            self.piece_of.setdefault(piece.chunk, []).extend([number] * count)
            self.left.append(0 if piece.chunk in kept else count)
        turn_of = {number: turn for turn, number in enumerate(self.fills)}
        self.turn = [turn_of[number] for number in range(len(turn_of))]


class SegmentPipeline:
    """Where every piece is: one thread exchanges segments, while another one fills pieces and waits for their ends.

    Pieces go by their number in `SegmentLayout.pieces`.

    Args:
        plan: What is known beforehand.
        patience_s: How long the thread that is ahead of the messages waits for them to move on.
    """

    def __init__(self, plan: SegmentPlan, patience_s: float = PATIENCE_S) -> None:
        self._plan, self._patience_s = plan, patience_s
        self._left = plan.left.copy()
        self._filled = [False] * len(plan.left)
        self._needed = 0  # the latest turn that messages have come to
        self._stopped = False
        # One for the thread that walks messages, one for the thread that fills and drains.
        self._messages, self._memory = WakeUp(), WakeUp()

    def fill(self, by: Sequence[Callable[[], object]] | None, *, paced: bool = True) -> None:
        """Fill all pieces in the order in which messages need them; if that fails, nobody waits for them any longer.

        Args:
            by: What leaves a piece's contributions added up in this rank's part of it, by piece; None: they are all
                there.
            paced: Stay only a few pieces ahead of the messages.
        """
        try:
            for piece in self._plan.fills:
                if by is not None:
                    if paced:
                        self.pace(piece)
                    by[piece]()
                self.filled(piece)
        except BaseException:
            self.stop()
            raise

    def drain(self, by: Sequence[Callable[[], object]]) -> None:
        """Call what is for each piece as soon as it has its result, in the order in which these come."""
        for piece in self._plan.ends:
            if not self.ended(piece):
                return
            by[piece]()

    def wait(self, chunk: int, segment: int) -> None:
        """Return when this host's contribution is added up there."""
        piece = self._plan.piece_of[chunk][segment]
        turn = self._plan.turn[piece]
        if turn > self._needed:
            self._needed = turn
            self._memory.ring()
        if not self._filled[piece]:
            self._messages.wait_for(lambda: self._filled[piece] or self._stopped)
            if not self._filled[piece]:
                raise ClosedError("the other half of this all-reduce has failed on this rank")

    def ready(self, chunk: int, segment: int) -> None:
        """Take note that a segment has its result, and is only read from now on."""
        piece = self._plan.piece_of[chunk][segment]
        self._left[piece] -= 1
        if not self._left[piece]:
            self._memory.ring()

    def pace(self, piece: int) -> None:
        """Return when messages will soon need a piece, or have not moved on for a while."""
        turn = self._plan.turn[piece] - _READY
        if turn > self._needed:
            self._memory.wait_for(lambda: self._needed >= turn or self._stopped, self._patience_s)

    def filled(self, piece: int) -> None:
        """Take note that a piece is added up."""
        self._filled[piece] = True
        self._messages.ring()

    def ended(self, piece: int) -> bool:
        """Wait until a piece has its result, or no more are to come; return which."""
        if self._left[piece]:
            self._memory.wait_for(lambda: self._left[piece] == 0 or self._stopped)
        return self._left[piece] == 0

    def stop(self) -> None:
        """Let nobody wait any longer."""
        self._stopped = True
        self._messages.ring()
        self._memory.ring()


class WakeUp:
    """Lets one thread sleep until what another has changed is what it waits for.

    A thread that changes something does so first and then rings; the sleeper sets `_sleeps` first and then checks once
    more. So one of the two always sees the other. A condition does the same with a lock that every check acquires: four
    calls, and one thread held up by the other. This needs an interpreter whose lock keeps one thread's writes and reads
    in order for the other.
    """

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()
        self._sleeps = False

    def ring(self) -> None:
        """Have the sleeper check, if there is one."""
        if self._sleeps:
            self._sleeps = False
            self._rings.put(None)

    def wait_for(self, holds: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Return when something holds, or after a time without a ring, seconds; for one thread at a time."""
        while not holds():
            self._sleeps = True
            if holds():
                return  # the next sleep may find a ring that was meant for this one, and checks
            try:
                self._rings.get(timeout=timeout_s)
            except Empty:
                return
