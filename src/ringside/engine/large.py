"""A large all-reduce over hosts that is called again and again: all but the work itself is done beforehand.

A gradient bucket lies where it lay, and goes the same way, in every step. What that makes the same every time (the
pieces, the segments of this rank's lane, the calls into shared memory, what peers are told) is worked out once; what is
left to do in Python for each piece is to enter shared memory. `ringside.engine.small` is the same for small ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ringside.engine.choice import Choice
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.exchange import Exchange
from ringside.engine.flow import Course, Layout, Stream
from ringside.engine.local_lanes import LocalLanes
from ringside.engine.message_size import MessageSize
from ringside.engine.part import Reduction, part_of
from ringside.engine.reduction import AVG, SUM, fold, memory
from ringside.engine.told import Call, Doing
from ringside.engine.transports.transport import Bytes

if TYPE_CHECKING:
    from ringside.engine.across import Across

Step = Callable[[], object]


class Large:
    """All-reduces of one tensor over hosts by one choice, in pieces.

    Args:
        across: Who carries them out.
        layout: The pieces.
        address: Of the tensor's first element.
        what: The reduction, as it is carried out.
        choice: How: over hosts or leaders, by a schedule that needs no switch.
        size: Of the messages.
        doing: What peers are told; its call is of the whole tensor.

    Attributes:
        way: How, in words.
        doing: As given.
    """

    def __init__(
        self,
        across: Across,
        layout: Layout,
        address: int,
        what: Reduction,
        choice: Choice,
        size: MessageSize,
        doing: Doing,
    ) -> None:
        self._size, self.doing = size, doing
        self.way = f"all_reduce by {choice}"
        self._item = ITEM_BYTES[what.dtype]
        self._chunks: list[list[Bytes]] = [[] for _ in range(layout.pieces[-1].chunk + 1)]
        counts, mine = [], across.carries(choice)
        for piece in layout.pieces:
            begin, end = piece.bounds[across.roster.local_rank : across.roster.local_rank + 2]
            lane = memory(address + (piece.begin + begin) * self._item, (end - begin) * self._item)
            segments = across.exchange.cut(lane, self._item, what.wire, size) if mine else []
            self._chunks[piece.chunk] += segments
            counts.append(len(segments))
        self._course = Course(layout, counts)
        self._carry = self._messages(across, choice, what, doing.call) if any(counts) else None
        self._add, self._spread = self._inside(across.local, layout, address, what)

    def begin(self, across: Across, side: int, *, alone: bool) -> Callable[[], None]:
        """Add the tensor up piece by piece with messages under way, and return what shares the results.

        Args:
            across: As given; it keeps this, not the other way round.
            side: Whose exchange and thread carry the messages.
            alone: Nothing is under way beside it; else it is to be ready when what is before it is through.
        """
        stream, add = Stream(self._course), self._add
        work = across.start(functools.partial(self._go, stream, across.exchange_of(side)), side)
        stream.fill(None if add is None else lambda piece: add[piece](), paced=alone)
        spread = self._spread

        def finish() -> None:
            stream.drain(lambda piece: spread[piece]())
            work.wait()

        return finish

    def _go(self, stream: Stream, exchange: Exchange) -> None:
        try:
            if self._carry is not None:
                self._carry(stream, exchange)
        finally:
            stream.stop()

    # -------------------------------------------------------------------------------------------- worked out

    def _messages(
        self, across: Across, choice: Choice, what: Reduction, call: Call
    ) -> Callable[[Stream, Exchange], None]:
        """Return what carries this rank's lane between hosts."""
        item, chunks, size = self._item, self._chunks, self._size
        elements = sum(len(segment) for chunk in chunks for segment in chunk) // item
        lane = across.roster.lane(across.roster.local_rank)
        inside = replace(what, scale=1.0, scales=())
        part = part_of(choice, lane, inside, call._replace(elements=elements), across.roster)
        plan = part.plan
        assert plan is not None, "native is not fed in pieces"

        def carry(stream: Stream, exchange: Exchange) -> None:
            exchange.run(
                plan,
                chunks,
                item,
                part.fold,
                part.call,
                last_fold=part.last_fold,
                members=lane,
                wire=what.wire,
                ordered=True,
                feed=stream,
                size=size,
            )

        return carry

    def _inside(
        self, local: LocalLanes | None, layout: Layout, address: int, what: Reduction
    ) -> tuple[Sequence[Step] | None, Sequence[Step]]:
        """Return what adds up each piece among the ranks of the host (None: nothing is to be done), and shares it."""
        item, dtype = self._item, what.dtype
        places = [(address + piece.begin * item, piece.bounds) for piece in layout.pieces]
        if local is not None:
            step, own = SUM if what.op == AVG else what.op, bool(what.scales)
            pairs = [local.prepared(at, bounds, dtype, step, what.scale, own, what.storage) for at, bounds in places]
            return [add for add, _ in pairs], [spread for _, spread in pairs]
        nothing = [_nothing] * len(places)
        if what.scale == 1.0:
            return None, nothing
        scaled = functools.partial(fold, dtype=dtype, op=SUM, scale=what.scale)
        return [functools.partial(scaled, [at], at, bounds[-1]) for at, bounds in places], nothing


def lane_lengths(layout: Layout, local_rank: int, item_bytes: int) -> list[list[int]]:
    """Return how long a local rank's part of each piece is, bytes, by chunk."""
    lengths: list[list[int]] = [[] for _ in range(layout.pieces[-1].chunk + 1)]
    for piece in layout.pieces:
        lengths[piece.chunk].append((piece.bounds[local_rank + 1] - piece.bounds[local_rank]) * item_bytes)
    return lengths


def _nothing() -> None:
    """A rank alone on its host shares with nobody."""


__all__ = ["Large", "lane_lengths"]
