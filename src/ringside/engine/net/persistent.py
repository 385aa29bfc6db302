"""A small all-reduce between hosts that is called again and again: all but the work itself is done beforehand.

At a few bytes what counts is how much the processor has to do, on every rank, and how often somebody has to be woken.
So the elements are taken to a place of their own, for which everything is ready: the calls into shared memory, the
script of messages between hosts (`ringside.engine.exchange_script`), what peers are told.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.buffers import address_of
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.exchange.exchange import Exchange
from ringside.engine.net.exchange.message_size import MessageSize
from ringside.engine.net.exchange.persistent import PersistentExchange
from ringside.engine.net.exchange.pipeline import SegmentLayout, SegmentPipeline, SegmentPlan, lane_bounds
from ringside.engine.net.exchange.plan import plan_messages
from ringside.engine.net.exchange.signature import CollectiveSignature, Operation
from ringside.engine.net.host_slices import HostSlices
from ringside.engine.net.reduction import AVG, SUM, Reduction, ReductionPlan, fold, bytes_at, plan_reduction, safe_mean, signature_of
from ringside.engine.transports.base import Bytes

if TYPE_CHECKING:
    from ringside.engine.net.hierarchical import HierarchicalEngine

__all__ = ["MOST_BYTES", "PersistentLarge", "PersistentSmall", "lane_lengths"]

MOST_BYTES = 64 << 10  # copying more to its place and back takes longer than what is saved

Step = Callable[[], object]


class PersistentSmall:
    """All-reduces of one size, dtype and reduction by one choice. Not thread-safe.

    Args:
        across: Who carries them out.
        elements: Of the tensor, at most `MOST_BYTES`.
        what: The reduction; without own scales per rank, wire dtype and storage.
        choice: How: `native`, or a schedule that `PersistentExchange` can carry out.
    """

    def __init__(self, across: HierarchicalEngine, elements: int, what: Reduction, choice: AlgorithmSpec) -> None:
        roster, item = across.roster, ITEM_BYTES[what.dtype]
        self.way, self.doing = f"all_reduce by {choice}", Operation(signature_of(what, elements), str(choice))
        self._place = np.zeros(elements * item, dtype=np.uint8)
        self._at = address_of(self._place)
        self._script: PersistentExchange | None = None
        call = self.doing.call
        if choice.over == "ranks":
            self._first, self._rest = self._between(across, choice, None, 0, elements, what, call)
            return
        what = safe_mean(what, roster.size)
        lanes = 1 if choice.over == "leaders" else roster.lanes
        bounds = lane_bounds(elements, lanes, roster.local_size)
        begin, end = bounds[roster.local_rank : roster.local_rank + 2]
        between: tuple[list[Step], list[Step]] = [], []
        if begin < end:
            inside = Reduction(what.dtype, what.op, divisor=what.divisor)
            members = roster.lane(roster.local_rank)
            between = self._between(
                across, choice, members, begin, end - begin, inside, call._replace(elements=end - begin)
            )
        if across.local is not None:
            step = SUM if what.op == AVG else what.op
            add, spread = across.local.prepared(self._at, bounds, what.dtype, step, what.scale)
            self._first, self._rest = [], [add, *between[0], *between[1], spread]
        else:
            scaled = self._scaled(what.scale, 0, elements, what.dtype)
            self._first, self._rest = [*scaled, *between[0]], between[1]

    @staticmethod
    def fits(across: HierarchicalEngine, elements: int, what: Reduction, choice: AlgorithmSpec) -> bool:
        """Tell whether an all-reduce can be carried out this way; arguments as for the constructor."""
        size_bytes = elements * ITEM_BYTES[what.dtype]
        if not 0 < size_bytes <= MOST_BYTES or what.scales or what.wire is not None:
            return False
        if choice.algorithm == NATIVE:
            return True
        vertices, me = len(across.roster.hosts), across.roster.host
        if choice.over == "ranks":
            vertices, me = across.roster.size, across.roster.rank
        return PersistentExchange.fits(across.exchange, plan_messages(choice.schedule(vertices), me), size_bytes)

    def go(self, address: int) -> None:
        """Reduce the elements at an address, in place; on failure they are what they were."""
        self.begin(address)
        self.finish(address)

    def begin(self, address: int) -> None:
        """Take the elements, and begin as far as that waits for nobody."""
        ctypes.memmove(self._at, address, len(self._place))
        for step in self._first:
            step()

    def finish(self, address: int) -> None:
        """Do the rest of what was begun, and leave the result where the elements were."""
        for step in self._rest:
            step()
        ctypes.memmove(address, self._at, len(self._place))
        if self._script is not None:
            self._script.rest()

    def end(self) -> None:
        """Wait for what is still on its way: this is not used any more."""
        if self._script is not None:
            self._script.end()

    # -------------------------------------------------------------------------------------------- worked out

    def _between(
        self,
        across: HierarchicalEngine,
        choice: AlgorithmSpec,
        members: Sequence[int] | None,
        begin: int,
        count: int,
        what: Reduction,
        call: CollectiveSignature,
    ) -> tuple[list[Step], list[Step]]:
        """Return what this rank does between hosts with `count` elements from `begin` on: at first, and then."""
        part = plan_reduction(choice, members, what, call, across.roster)
        item = ITEM_BYTES[what.dtype]
        mine = self._place[begin * item : (begin + count) * item]
        first = self._scaled(part.first, begin, count, what.dtype)
        divided = self._divided(part, address_of(mine), count)
        if part.plan is None:
            native = _Native(across.native.prepare(mine, what.dtype, part.native_op, members))
            return [*first, native.begin], [native.finish, *divided]
        self._script = PersistentExchange(
            across.exchange, part.plan, mine, item, part.fold, part.last_fold, part.call, members
        )
        return [*first, self._script.begin], [self._script.finish, *divided]

    def _scaled(self, scale: float, begin: int, count: int, dtype: int) -> list[Step]:
        if scale == 1.0:
            return []
        at = self._at + begin * ITEM_BYTES[dtype]
        return [functools.partial(fold, [at], at, count, dtype, SUM, scale=scale)]

    def _divided(self, part: ReductionPlan, at: int, count: int) -> list[Step]:
        if not part.divisor:
            return []
        return [functools.partial(fold, [at], at, count, part.what.dtype, AVG, divisor=part.divisor)]


class _Native:
    """The group's own all-reduce in two parts, for a place that stays.

    Args:
        prepared: Begins it, and returns what waits for its end.
    """

    def __init__(self, prepared: Callable[[], Step]) -> None:
        self._prepared = prepared
        self._end: Step = _nothing

    def begin(self) -> None:
        self._end = self._prepared()

    def finish(self) -> None:
        end, self._end = self._end, _nothing
        end()


def _nothing() -> None:
    """Nothing is under way, or a rank alone on its host shares with nobody."""


# -------------------------------------------------------------------------------------------------
# A large all-reduce over hosts that is called again and again: all but the work itself is done beforehand.
#
# A gradient bucket lies where it lay, and goes the same way, in every step. What that makes the same every time (the
# pieces, the segments of this rank's lane, the calls into shared memory, what peers are told) is worked out once; what
# is left to do in Python for each piece is to enter shared memory. `ringside.engine.small` is the same for small ones.


class PersistentLarge:
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
        across: HierarchicalEngine,
        layout: SegmentLayout,
        address: int,
        what: Reduction,
        choice: AlgorithmSpec,
        size: MessageSize,
        doing: Operation,
    ) -> None:
        self._size, self.doing = size, doing
        self.way = f"all_reduce by {choice}"
        self._item = ITEM_BYTES[what.dtype]
        self._chunks: list[list[Bytes]] = [[] for _ in range(layout.pieces[-1].chunk + 1)]
        counts, mine = [], across.carries(choice)
        for piece in layout.pieces:
            begin, end = piece.bounds[across.roster.local_rank : across.roster.local_rank + 2]
            lane = bytes_at(address + (piece.begin + begin) * self._item, (end - begin) * self._item)
            segments = across.exchange.cut(lane, self._item, what.wire, size) if mine else []
            self._chunks[piece.chunk] += segments
            counts.append(len(segments))
        self._course = SegmentPlan(layout, counts)
        self._carry = self._messages(across, choice, what, doing.call) if any(counts) else None
        self._add, self._spread = self._inside(across.local, layout, address, what)

    def begin(self, across: HierarchicalEngine, side: int, *, alone: bool) -> Callable[[], None]:
        """Add the tensor up piece by piece with messages under way, and return what shares the results.

        Args:
            across: As given; it keeps this, not the other way round.
            side: Whose exchange and thread carry the messages.
            alone: Nothing is under way beside it; else it is to be ready when what is before it is through.
        """
        stream, add = SegmentPipeline(self._course), self._add
        work = across.start(functools.partial(self._go, stream, across.exchange_of(side)), side)
        stream.fill(None if add is None else lambda piece: add[piece](), paced=alone)
        spread = self._spread

        def finish() -> None:
            stream.drain(lambda piece: spread[piece]())
            work.wait()

        return finish

    def _go(self, stream: SegmentPipeline, exchange: Exchange) -> None:
        try:
            if self._carry is not None:
                self._carry(stream, exchange)
        finally:
            stream.stop()

    # -------------------------------------------------------------------------------------------- worked out

    def _messages(
        self, across: HierarchicalEngine, choice: AlgorithmSpec, what: Reduction, call: CollectiveSignature
    ) -> Callable[[SegmentPipeline, Exchange], None]:
        """Return what carries this rank's lane between hosts."""
        item, chunks, size = self._item, self._chunks, self._size
        elements = sum(len(segment) for chunk in chunks for segment in chunk) // item
        lane = across.roster.lane(across.roster.local_rank)
        inside = replace(what, scale=1.0, scales=())
        part = plan_reduction(choice, lane, inside, call._replace(elements=elements), across.roster)
        plan = part.plan
        assert plan is not None, "native is not fed in pieces"

        def carry(stream: SegmentPipeline, exchange: Exchange) -> None:
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
        self, local: HostSlices | None, layout: SegmentLayout, address: int, what: Reduction
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


def lane_lengths(layout: SegmentLayout, local_rank: int, item_bytes: int) -> list[list[int]]:
    """Return how long a local rank's part of each piece is, bytes, by chunk."""
    lengths: list[list[int]] = [[] for _ in range(layout.pieces[-1].chunk + 1)]
    for piece in layout.pieces:
        lengths[piece.chunk].append((piece.bounds[local_rank + 1] - piece.bounds[local_rank]) * item_bytes)
    return lengths
