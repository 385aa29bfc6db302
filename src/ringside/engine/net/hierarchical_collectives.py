"""Collectives besides all-reduce on hosts of several ranks: shared memory inside, a lane per local rank between hosts.

What the ranks of a host have in common crosses the network once: a reduce-scatter adds up inside the host first, an
all-gather fetches each part for one local rank, which shares it; in a broadcast and a reduce each local rank carries a
slice. Gather, scatter and all-to-all have nothing of the kind: every byte is one rank's for one other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from ringside.engine.buffers import address_of
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.context import HostSlices
from ringside.engine.net.exchange.exchange import ExchangeRequest
from ringside.engine.net.exchange.pipeline import (
    Piece,
    SegmentLayout,
    as_needed,
    chunks_ended,
    lay_out,
)
from ringside.engine.net.exchange.plan import MessagePlan, plan_messages
from ringside.engine.net.exchange.run import ExchangeRun
from ringside.engine.net.exchange.signature import CollectiveSignature, Operation
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.persistent import PipelinedExchange
from ringside.engine.net.rank_map import RankMap
from ringside.engine.net.reduction import AVG, SUM, Reduction, bytes_at, fold, make_fold, safe_mean
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
# A schedule over hosts with shared memory before and after its messages, each local rank moving its lane of it.

Step = Callable[[Piece], None]


def _run_through_hosts(
    engine: HierarchicalEngine,
    request: ExchangeRequest,
    layout: SegmentLayout,
    lanes: Sequence[Bytes],
    *,
    at_once: bool,
    fill: Step | None = None,
    end: Step | None = None,
    kept: Collection[int] = (),
    segment_bytes: int = 0,
) -> None:
    """Do this rank's part of a collective that goes through its host's shared memory.

    Args:
        engine: The ranks.
        request: The host's part of the schedule, and what was called, equal on all ranks.
        layout: The pieces of its chunks, and the orders in which they are filled and end.
        lanes: Where this rank's lane of each piece lies, by piece of `layout.pieces`.
        at_once: Everything is filled before the first message, and ended after the last: it is little, and handing it
            to another thread would take longer. Each chunk is one piece then.
        fill: Leaves what is to be sent of a piece in the ranks' lanes; None: it is there.
        end: What is to be done with a piece that is complete; None: nothing, `layout` has no ends.
        kept: Chunks of which nothing arrives here: they are complete when they are filled.
        segment_bytes: Largest message, bytes, equal on all ranks; 0: as large as the exchange takes them.

    Raises:
        SyncError: As `HierarchicalEngine.all_reduce`.
    """
    rank_map, item_bytes, name = engine.rank_map, request.item_bytes, request.plan.schedule.name
    request = request._replace(members=rank_map.lane(rank_map.local_rank))
    engine.wait_all()
    with engine.attributing_errors(name, Operation(request.call, f"hosts/{name}")):
        if at_once:
            if fill is not None:
                for piece in layout.fills:
                    fill(piece)
            ExchangeRun(engine.exchange, request, lanes).run()
            if end is not None:
                for piece in layout.ends:
                    end(piece)
            return
        # Messages go on a thread of their own, while this one works in shared memory, piece by piece.
        most = engine.exchange.segment_of(item_bytes, None)
        length = min(segment_bytes // item_bytes * item_bytes or most, most)
        segments = [[lane[begin : begin + length] for begin in range(0, len(lane), length)] for lane in lanes]
        fills, ends = (step and [functools.partial(step, piece) for piece in layout.pieces] for step in (fill, end))
        exchange_run = functools.partial(ExchangeRun, request=request)
        pipelined = PipelinedExchange(layout, segments, exchange_run, fills, ends, kept)
        pipelined.finish(*pipelined.start(engine.channels))


SMALL_BYTES = 256 << 10  # up to here the fewest rounds, in one go; beyond, neighbours only, piece by piece
_LINE_BYTES = 64 << 10, 256 << 10  # least and most of a message along a line, where each host waits for all of it
_LINE_MESSAGES = 16  # per lane, within those

_copy = make_fold(0, SUM)  # never called: for schedules that only copy


@functools.lru_cache(maxsize=64)
def cached_schedule(make: Callable[..., Schedule], *args: int) -> Schedule:
    """Return `make(*args)`; the same schedule, which plans are cached by, is made only once."""
    return make(*args)


def reduce_scatter(engine: HierarchicalEngine, request: CoreRequest, call: CollectiveSignature) -> None:
    """Every host adds up each other host's lanes and its own; rank l of a host moves those of the ranks l."""
    rank_map, item = engine.rank_map, ITEM_BYTES[request.flat.dtype]
    host_slices = _host_slices(engine)
    reduction = safe_mean(Reduction(request.flat.dtype, request.op, request.scale), rank_map.size)
    small = request.numel * item <= SMALL_BYTES
    schedule = cached_schedule(direct_reduce_scatter if small else ring_reduce_scatter, len(rank_map.hosts))
    plan = plan_messages(schedule, rank_map.host)
    layout = replace(_lanes_by_host(rank_map, request, plan), ends=())  # a sum lies where it belongs
    local = rank_map.local_rank
    own_bytes = [(piece.bounds[local + 1] - piece.bounds[local]) * item for piece in layout.pieces]
    target = bytes_at(
        request.out or request.flat.address + request.bounds[rank_map.rank] * item, own_bytes[rank_map.host]
    )
    sums = [target if h == rank_map.host else np.empty(size, dtype=np.uint8) for h, size in enumerate(own_bytes)]

    def add_up(piece: Piece) -> None:
        source = request.flat.address + piece.begin * item
        host_slices.reduce_lanes_into(address_of(sums[piece.chunk]), source, piece.bounds, reduction)

    exchange = ExchangeRequest(plan, item, make_fold(reduction.dtype, reduction.fold_op), call)
    _run_through_hosts(engine, exchange, layout, sums, at_once=small, fill=add_up)
    if reduction.op == AVG and len(target):
        start = address_of(target)
        fold([start], start, len(target) // item, reduction.dtype, AVG, divisor=rank_map.size)


def all_gather(engine: HierarchicalEngine, request: CoreRequest, call: CollectiveSignature) -> None:
    """Rank l of a host fetches what the ranks l of the others have, and shares it."""
    rank_map, item = engine.rank_map, ITEM_BYTES[request.flat.dtype]
    host_slices = _host_slices(engine)
    base = request.out or request.flat.address
    small = request.numel * item <= SMALL_BYTES
    schedule = cached_schedule(direct_all_gather if small else ring_all_gather, len(rank_map.hosts))
    plan = plan_messages(schedule, rank_map.host)
    layout = _lanes_by_host(rank_map, request, plan)
    lanes = [_lane_of(rank_map, base, piece, item) for piece in layout.pieces]
    own = rank_map.host
    if request.out:
        lanes[own][:] = bytes_at(request.flat.address, len(lanes[own]))

    def share(piece: Piece) -> None:
        host_slices.gather_lanes(base + piece.begin * item, piece.bounds, request.flat.dtype)

    # Nothing arrives for the host's own piece, so it can be shared first.
    layout = replace(layout, ends=(layout.pieces[own], *layout.ends))
    exchange = ExchangeRequest(plan, item, _copy, call)
    _run_through_hosts(engine, exchange, layout, lanes, at_once=small, end=share, kept=(own,))


def broadcast(engine: HierarchicalEngine, request: CoreRequest, call: CollectiveSignature) -> None:
    """The root's host gets it in shared memory, and each of its ranks sends a slice on; others share them."""
    rank_map, dtype = engine.rank_map, request.flat.dtype
    host_slices = _host_slices(engine)
    root_host = rank_map.host_of(request.root)
    item, at_root = ITEM_BYTES[dtype], rank_map.host == root_host
    local_root = rank_map.hosts[root_host].index(request.root)
    layout, plan, segment_bytes = _sliced(rank_map, request, binomial_broadcast, chain_broadcast)
    lanes = [_lane_of(rank_map, request.flat.address, piece, item) for piece in layout.pieces]

    def spread(piece: Piece) -> None:
        # All of the piece is one rank's lane: gathering it gives the whole of it to every rank.
        bounds = bounds_of_one(local_root, rank_map.local_size, piece.bounds[-1])
        host_slices.gather_lanes(request.flat.address + piece.begin * item, bounds, dtype)

    def share(piece: Piece) -> None:
        host_slices.gather_lanes(request.flat.address + piece.begin * item, piece.bounds, dtype)

    _run_through_hosts(
        engine,
        ExchangeRequest(plan, item, _copy, call),
        replace(layout, ends=() if at_root else layout.pieces),
        lanes,
        at_once=not segment_bytes,
        fill=spread if at_root else None,
        end=share,
        segment_bytes=segment_bytes,
    )


def reduce(engine: HierarchicalEngine, request: CoreRequest, call: CollectiveSignature) -> None:
    """Hosts add up lane by lane, the lanes travel to the root's host, which puts them together on the root."""
    rank_map, item = engine.rank_map, ITEM_BYTES[request.flat.dtype]
    host_slices = _host_slices(engine)
    at_root = rank_map.host == rank_map.host_of(request.root)
    reduction = safe_mean(Reduction(request.flat.dtype, request.op), rank_map.size)
    dtype = reduction.dtype
    data = bytes_at(request.flat.address, request.flat.numel * item)
    work = data if rank_map.rank == request.root else np.empty_like(data)  # only the root's tensor may change
    base = address_of(work)
    layout, plan, segment_bytes = _sliced(rank_map, request, binomial_reduce, chain_reduce)
    lanes = [_lane_of(rank_map, base, piece, item) for piece in layout.pieces]

    def add_up(piece: Piece) -> None:
        source = request.flat.address + piece.begin * item
        target = base + (piece.begin + piece.bounds[rank_map.local_rank]) * item
        host_slices.reduce_lanes_into(target, source, piece.bounds, reduction)

    def put_together(piece: Piece) -> None:
        host_slices.gather_lanes(base + piece.begin * item, piece.bounds, dtype)

    # The root's host adds up last, so it divides.
    by = make_fold(dtype, reduction.fold_op)
    last = make_fold(dtype, AVG, divisor=rank_map.size) if reduction.op == AVG and at_root else by
    _run_through_hosts(
        engine,
        ExchangeRequest(plan, item, by, call, last),
        replace(layout, ends=layout.pieces if at_root else ()),
        lanes,
        at_once=not segment_bytes,
        fill=add_up,
        end=put_together,
        segment_bytes=segment_bytes,
    )


def barrier(engine: HierarchicalEngine, request: CoreRequest, call: CollectiveSignature) -> None:
    """The ranks of a host meet, their first ranks meet, and the ranks of a host meet again."""
    rank_map, token = engine.rank_map, np.zeros(1, dtype=np.uint8)
    host_slices = _host_slices(engine)
    schedule = cached_schedule(dissemination_barrier, len(rank_map.hosts))
    plan = plan_messages(schedule, rank_map.host)
    engine.wait_all()
    with engine.attributing_errors(schedule.name, Operation(call, f"leaders/{schedule.name}")):
        host_slices.communicator.barrier()
        if rank_map.local_rank == 0:
            ExchangeRun(engine.exchange, ExchangeRequest(plan, 1, _copy, call, members=rank_map.lane(0)), [token]).run()
        host_slices.communicator.barrier()


# ------------------------------------------------------------------------------------------------ layouts


def _lanes_by_host(rank_map: RankMap, request: CoreRequest, plan: MessagePlan) -> SegmentLayout:
    """Return a piece per host, of the lanes of its ranks; the schedule's chunk h is host h's."""
    size = rank_map.local_size
    pieces = []
    for host in range(plan.chunks):
        bounds = request.bounds[host * size : (host + 1) * size + 1]
        pieces.append(Piece(host, bounds[0], tuple(bound - bounds[0] for bound in bounds)))
    fills = as_needed(plan, [[piece] for piece in pieces], 0)
    return SegmentLayout(tuple(pieces), tuple(fills), tuple(pieces[chunk] for chunk in chunks_ended(plan)))


def _sliced(
    rank_map: RankMap,
    request: CoreRequest,
    small: Callable[[int, int], Schedule],
    large: Callable[[int, int], Schedule],
) -> tuple[SegmentLayout, MessagePlan, int]:
    """Return a tensor's pieces, the plan of one chunk from or to the root's host, and a message's bytes (0: any)."""
    item, numel = ITEM_BYTES[request.flat.dtype], request.flat.numel
    lanes, size_bytes = rank_map.local_size, numel * item
    at_once = size_bytes <= SMALL_BYTES
    schedule = cached_schedule(small if at_once else large, len(rank_map.hosts), rank_map.host_of(request.root))
    plan = plan_messages(schedule, rank_map.host)
    segment_bytes = min(max(size_bytes // (lanes * _LINE_MESSAGES), _LINE_BYTES[0]), _LINE_BYTES[1])
    least = numel if at_once else lanes * segment_bytes // item
    layout = lay_out(plan, numel, least, max(numel, 1), lanes, lanes)
    return layout, plan, 0 if at_once else segment_bytes


def _lane_of(rank_map: RankMap, base: int, piece: Piece, item: int) -> Bytes:
    """Return this rank's lane of a piece of the tensor at an address."""
    begin, end = piece.bounds[rank_map.local_rank : rank_map.local_rank + 2]
    return bytes_at(base + (piece.begin + begin) * item, (end - begin) * item)


def _host_slices(engine: HierarchicalEngine) -> HostSlices:
    assert engine.host_slices is not None, "hosts of several ranks share memory"
    return engine.host_slices


BY_KIND = {
    "barrier": barrier,
    "reduce_scatter_": reduce_scatter,
    "reduce_scatter": reduce_scatter,
    "all_gather_": all_gather,
    "all_gather": all_gather,
    "broadcast": broadcast,
    "reduce": reduce,
}
