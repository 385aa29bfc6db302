"""Collectives besides all-reduce on hosts of several ranks: shared memory inside, a lane per local rank between hosts.

What the ranks of a host have in common crosses the network once: a reduce-scatter adds up inside the host first, an
all-gather fetches each part for one local rank, which shares it; in a broadcast and a reduce each local rank carries a
slice. Gather, scatter and all-to-all have nothing of the kind: every byte is one rank's for one other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ringside.engine.buffers import address_of
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.exchange.pipeline import (
    Piece,
    SegmentLayout,
    SegmentPipeline,
    SegmentPlan,
    as_needed,
    chunks_ended,
    lay_out,
)
from ringside.engine.net.exchange.plan import MessagePlan, plan_messages
from ringside.engine.net.exchange.run import Fold
from ringside.engine.net.exchange.signature import CollectiveSignature as Told
from ringside.engine.net.exchange.signature import Operation
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.host_slices import HostSlices
from ringside.engine.net.reduction import AVG, SUM, Reduction, fold, make_fold, bytes_at, safe_mean
from ringside.engine.request import CoreRequest, bounds_of_one
from ringside.engine.transports.base import Bytes
from ringside.schedule import (
    Schedule,
    binomial_broadcast,
    binomial_reduce,
    chain_broadcast,
    chain_reduce,
    direct_all_gather,
    direct_reduce_scatter,
    dissemination_barrier,
    ring_all_gather,
    ring_reduce_scatter,
)

# -------------------------------------------------------------------------------------------------
# A schedule over hosts with shared memory before and after its messages, each local rank carrying its lane of it.

Step = Callable[[Piece], None]


@dataclass(frozen=True)
class HierarchicalPipeline:
    """What one rank does in a collective that goes through its host's shared memory.

    Args:
        plan: The host's part of the schedule.
        layout: The pieces of its chunks, and the orders in which they are filled and end.
        lanes: Where this rank's lane of each piece lies, by piece of `layout.pieces`.
        item_bytes: Size of an element, bytes.
        fold: The reduction of what arrives.
        last_fold: The same, after which a chunk is complete; None: no other.
        fill: Leaves what is to be sent of a piece in the ranks' lanes; None: it is there.
        end: What is to be done with a piece that is complete.
        kept: Chunks of which nothing arrives here: they are complete when they are filled.
        segment_bytes: Largest message, bytes, equal on all ranks; 0: as large as the exchange takes them.
    """

    plan: MessagePlan
    layout: SegmentLayout
    lanes: Sequence[Bytes]
    item_bytes: int
    fold: Fold
    last_fold: Fold | None
    fill: Step | None
    end: Step
    kept: Collection[int] = ()
    segment_bytes: int = 0

    def carry_out(self, across: HierarchicalEngine, call: Told, *, at_once: bool) -> None:
        """Carry it out.

        Args:
            across: The ranks.
            call: What was called, equal on all ranks.
            at_once: Everything is filled before the first message, and ended after the last: it is little, and
                handing it to another thread would take longer. Each chunk is one piece then.

        Raises:
            SyncError: As `HierarchicalEngine.all_reduce`.
        """
        across.finish_all()
        with across.explained(self.plan.name, Operation(call, f"hosts/{self.plan.name}")):
            if at_once:
                self._step_by_step(across, call)
            else:
                self._stream(across, call)

    def _step_by_step(self, across: HierarchicalEngine, call: Told) -> None:
        if self.fill is not None:
            for piece in self.layout.fills:
                self.fill(piece)
        self._exchange(across, call, self.lanes, None)
        for piece in self.layout.ends:
            self.end(piece)

    def _stream(self, across: HierarchicalEngine, call: Told) -> None:
        """Let messages go on a thread of their own, while this one works in shared memory, piece by piece."""
        most = across.exchange.segment_of(self.item_bytes, None)
        length = min(self.segment_bytes // self.item_bytes * self.item_bytes or most, most)
        cut = [[lane[at : at + length] for at in range(0, len(lane), length)] for lane in self.lanes]
        pieces = self.layout.pieces
        stream = SegmentPipeline(SegmentPlan(self.layout, [len(segments) for segments in cut], self.kept))
        chunks: list[list[Bytes]] = [[] for _ in range(self.plan.chunks)]
        for piece, segments in zip(pieces, cut, strict=True):
            chunks[piece.chunk] += segments

        def carry() -> None:
            try:
                self._exchange(across, call, chunks, stream)
            finally:
                stream.stop()

        work = across.start(carry)
        fill = self.fill
        stream.fill(None if fill is None else lambda at: fill(pieces[at]))
        stream.drain(lambda at: self.end(pieces[at]))
        work.wait()

    def _exchange(
        self,
        across: HierarchicalEngine,
        call: Told,
        chunks: Sequence[Bytes] | Sequence[list[Bytes]],
        stream: SegmentPipeline | None,
    ) -> None:
        across.exchange.run(
            self.plan,
            chunks,
            self.item_bytes,
            self.fold,
            call,
            last_fold=self.last_fold,
            members=across.roster.lane(across.roster.local_rank),
            feed=stream,
        )


SMALL_BYTES = 256 << 10  # up to here the fewest rounds, in one go; beyond, neighbours only, piece by piece
_LINE_BYTES = 64 << 10, 256 << 10  # least and most of a message along a line, where each host waits for all of it
_LINE_MESSAGES = 16  # per lane, within those

_keep = make_fold(0, SUM)  # for schedules that only copy


@functools.lru_cache(maxsize=64)
def _schedule(make: Callable[..., Schedule], *where: int) -> Schedule:
    return make(*where)


def reduce_scatter(across: HierarchicalEngine, call: CoreRequest, told: Told) -> None:
    """Every host adds up each other host's lanes and its own; rank l of a host carries those of the ranks l."""
    roster, item = across.roster, ITEM_BYTES[call.flat.dtype]
    what = safe_mean(Reduction(call.flat.dtype, call.op, call.scale), roster.size)
    small = call.numel * item <= SMALL_BYTES
    schedule = _schedule(direct_reduce_scatter if small else ring_reduce_scatter, len(roster.hosts))
    plan = plan_messages(schedule, roster.host)
    layout = replace(_lanes_by_host(across, call, plan), ends=())
    mine = [(piece.bounds[roster.local_rank + 1] - piece.bounds[roster.local_rank]) * item for piece in layout.pieces]
    target = bytes_at(call.out or call.flat.address + call.bounds[roster.rank] * item, mine[roster.host])
    sums = [target if host == roster.host else np.empty(size, dtype=np.uint8) for host, size in enumerate(mine)]
    step = SUM if what.op == AVG else what.op

    def add_up(piece: Piece) -> None:
        at, to = call.flat.address + piece.begin * item, address_of(sums[piece.chunk])
        _local(across).reduce_lanes_into(to, at, piece.bounds, what.dtype, step, what.scale)

    by = make_fold(what.dtype, step)
    HierarchicalPipeline(plan, layout, sums, item, by, None, add_up, _nothing).carry_out(across, told, at_once=small)
    if what.op == AVG and len(target):
        fold([address_of(target)], address_of(target), len(target) // item, what.dtype, AVG, divisor=roster.size)


def all_gather(across: HierarchicalEngine, call: CoreRequest, told: Told) -> None:
    """Rank l of a host fetches what the ranks l of the others have, and shares it."""
    roster, item = across.roster, ITEM_BYTES[call.flat.dtype]
    base = call.out or call.flat.address
    small = call.numel * item <= SMALL_BYTES
    plan = plan_messages(_schedule(direct_all_gather if small else ring_all_gather, len(roster.hosts)), roster.host)
    layout = _lanes_by_host(across, call, plan)
    lanes = [_lane_of(across, base, piece, item) for piece in layout.pieces]
    if call.out:
        lanes[roster.host][:] = bytes_at(call.flat.address, len(lanes[roster.host]))

    def share(piece: Piece) -> None:
        _local(across).gather_lanes(base + piece.begin * item, piece.bounds, call.flat.dtype, None)

    layout = replace(layout, ends=(layout.pieces[roster.host], *layout.ends))
    one = HierarchicalPipeline(plan, layout, lanes, item, _keep, None, None, share, kept=(roster.host,))
    one.carry_out(across, told, at_once=small)


def broadcast(across: HierarchicalEngine, call: CoreRequest, told: Told) -> None:
    """The root's host gets it in shared memory, and each of its ranks hands a slice on; others share them."""
    roster, dtype = across.roster, call.flat.dtype
    item, here = ITEM_BYTES[dtype], roster.host == roster.host_of(call.root)
    giver = roster.hosts[roster.host_of(call.root)].index(call.root)
    layout, plan, segment = _sliced(across, call, binomial_broadcast, chain_broadcast)
    lanes = [_lane_of(across, call.flat.address, piece, item) for piece in layout.pieces]

    def spread(piece: Piece) -> None:
        bounds = bounds_of_one(giver, roster.local_size, piece.bounds[-1])
        _local(across).gather_lanes(call.flat.address + piece.begin * item, bounds, dtype, None)

    def share(piece: Piece) -> None:
        _local(across).gather_lanes(call.flat.address + piece.begin * item, piece.bounds, dtype, None)

    layout = replace(layout, ends=() if here else layout.pieces)
    one = HierarchicalPipeline(
        plan, layout, lanes, item, _keep, None, spread if here else None, share, segment_bytes=segment
    )
    one.carry_out(across, told, at_once=not segment)


def reduce(across: HierarchicalEngine, call: CoreRequest, told: Told) -> None:
    """Hosts add up lane by lane, the lanes travel to the root's host, which puts them together on the root."""
    roster, item = across.roster, ITEM_BYTES[call.flat.dtype]
    here = roster.host == roster.host_of(call.root)
    what = safe_mean(Reduction(call.flat.dtype, call.op), roster.size)
    step = SUM if what.op == AVG else what.op
    data = bytes_at(call.flat.address, call.flat.numel * item)
    work = data if roster.rank == call.root else np.empty_like(data)
    base = address_of(work)
    layout, plan, segment = _sliced(across, call, binomial_reduce, chain_reduce)
    lanes = [_lane_of(across, base, piece, item) for piece in layout.pieces]

    def add_up(piece: Piece) -> None:
        at, to = call.flat.address + piece.begin * item, base + (piece.begin + piece.bounds[roster.local_rank]) * item
        _local(across).reduce_lanes_into(to, at, piece.bounds, what.dtype, step, what.scale)

    def put_together(piece: Piece) -> None:
        _local(across).gather_lanes(base + piece.begin * item, piece.bounds, what.dtype, None)

    layout = replace(layout, ends=layout.pieces if here else ())
    by = make_fold(what.dtype, step)
    last = make_fold(what.dtype, AVG, divisor=roster.size) if what.op == AVG and here else by
    one = HierarchicalPipeline(plan, layout, lanes, item, by, last, add_up, put_together, segment_bytes=segment)
    one.carry_out(across, told, at_once=not segment)


def barrier(across: HierarchicalEngine, call: CoreRequest, told: Told) -> None:
    """The ranks of a host meet, their first ranks meet, and the host hears of it."""
    roster, token = across.roster, np.zeros(1, dtype=np.uint8)
    plan = plan_messages(_schedule(dissemination_barrier, len(roster.hosts)), roster.host)
    across.finish_all()
    with across.explained(plan.name, Operation(told, f"leaders/{plan.name}")):
        _local(across).meet()
        if roster.local_rank == 0:
            across.exchange.run(plan, [token], 1, _keep, told, members=roster.lane(0))
        _local(across).meet()


# ------------------------------------------------------------------------------------------------ layouts


def _lanes_by_host(across: HierarchicalEngine, call: CoreRequest, plan: MessagePlan) -> SegmentLayout:
    """Return a piece per host, of the lanes of its ranks; the schedule's chunk h is host h's."""
    size = across.roster.local_size
    pieces = []
    for host in range(plan.chunks):
        bounds = call.bounds[host * size : (host + 1) * size + 1]
        pieces.append(Piece(host, bounds[0], tuple(bound - bounds[0] for bound in bounds)))
    fills = as_needed(plan, [[piece] for piece in pieces], 0)
    return SegmentLayout(tuple(pieces), tuple(fills), tuple(pieces[chunk] for chunk in chunks_ended(plan)))


def _sliced(
    across: HierarchicalEngine,
    call: CoreRequest,
    small: Callable[[int, int], Schedule],
    large: Callable[[int, int], Schedule],
) -> tuple[SegmentLayout, MessagePlan, int]:
    """Return a tensor's pieces, the plan of one chunk from or to the root's host, and a message's bytes (0: any)."""
    roster, item = across.roster, ITEM_BYTES[call.flat.dtype]
    lanes, size_bytes = roster.local_size, call.flat.numel * item
    few = size_bytes <= SMALL_BYTES
    schedule = _schedule(small if few else large, len(roster.hosts), roster.host_of(call.root))
    plan = plan_messages(schedule, roster.host)
    segment = min(max(size_bytes // (lanes * _LINE_MESSAGES), _LINE_BYTES[0]), _LINE_BYTES[1])
    least = call.flat.numel if few else lanes * segment // item
    layout = lay_out(plan, call.flat.numel, least, max(call.flat.numel, 1), lanes, lanes)
    return layout, plan, 0 if few else segment


def _lane_of(across: HierarchicalEngine, base: int, piece: Piece, item: int) -> Bytes:
    """Return this rank's lane of a piece of the tensor at an address."""
    begin, end = piece.bounds[across.roster.local_rank : across.roster.local_rank + 2]
    return bytes_at(base + (piece.begin + begin) * item, (end - begin) * item)


def _local(across: HierarchicalEngine) -> HostSlices:
    assert across.local is not None, "hosts of several ranks share memory"
    return across.local


def _nothing(piece: Piece) -> None:
    """Do nothing: what ends lies where it belongs."""


BY_KIND = {
    "barrier": barrier,
    "reduce_scatter_": reduce_scatter,
    "reduce_scatter": reduce_scatter,
    "all_gather_": all_gather,
    "all_gather": all_gather,
    "broadcast": broadcast,
    "reduce": reduce,
}
