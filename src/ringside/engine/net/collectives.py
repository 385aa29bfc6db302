"""The collectives besides all-reduce, between hosts: each is a schedule and a list of where its chunks lie.

Chunks of a schedule are numbered as `ringside.schedule.collective` says: chunk r belongs to rank r, an all-to-all has
chunk i*n+j for what rank i has for rank j. The same chunk may lie at different places on different ranks. Where all
hosts have several ranks, most go through shared memory instead (`ringside.engine.net.hierarchical_collectives`).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net import hierarchical_collectives as moves_hosts
from ringside.engine.net.exchange.signature import CollectiveSignature as Told
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.hierarchical_collectives import SMALL_BYTES
from ringside.engine.net.reduction import AVG, bytes_at
from ringside.engine.request import KINDS, CoreRequest
from ringside.engine.transports.base import Bytes
from ringside.errors import UnsupportedError
from ringside.schedule import (
    Schedule,
    binomial_broadcast,
    chain_broadcast,
    chunk_bounds,
    direct_all_gather,
    direct_all_to_all,
    direct_gather,
    direct_reduce_scatter,
    direct_scatter,
    dissemination_barrier,
    ring_all_gather,
)

Chunks = list[Bytes | None]


def run_collective(across: HierarchicalEngine, call: CoreRequest, *, canonical: bool = False) -> None:
    """Carry out a collective that is not an all-reduce, over all ranks.

    Args:
        across: The ranks.
        call: The collective, as the shared-memory core would take it.
        canonical: Add up in rank order, whatever that costs.

    Raises:
        SyncError: As `HierarchicalEngine.all_reduce`.
    """
    if call.own_scale:
        raise UnsupportedError("between hosts reduce_scatter_ has one scale for all ranks")
    through_hosts = moves_hosts.BY_KIND.get(call.kind) if across.roster.in_rows else None
    if through_hosts is None or (canonical and "reduce" in call.kind):
        _MOVES[call.kind](across, call)
    else:
        through_hosts(across, call, _told(call, call.scale))


def _barrier(across: HierarchicalEngine, call: CoreRequest) -> None:
    _run(across, call, dissemination_barrier(across.roster.size), [np.zeros(1, dtype=np.uint8)], item_bytes=1)


def _reduce_scatter(across: HierarchicalEngine, call: CoreRequest) -> None:
    """Work on a copy, whose own lane is the result; every lane is added up at once, in rank order."""
    item, me = ITEM_BYTES[call.flat.dtype], across.roster.rank
    work = bytes_at(call.flat.address, call.flat.numel * item).copy()
    lanes = _lanes(work, call.bounds, item)
    divisor = across.roster.size if call.op == AVG else 1.0
    _run(across, call, direct_reduce_scatter(across.roster.size), lanes, scale=call.scale, divisor=divisor)
    target = call.out or call.flat.address + call.bounds[me] * item
    mine = lanes[me]
    if mine is not None:
        bytes_at(target, len(mine))[:] = mine


def _all_gather(across: HierarchicalEngine, call: CoreRequest) -> None:
    item, roster = ITEM_BYTES[call.flat.dtype], across.roster
    everything = bytes_at(call.out or call.flat.address, call.numel * item)
    lanes = _lanes(everything, call.bounds, item)
    if call.out:
        mine = lanes[roster.rank]
        assert mine is not None
        mine[:] = bytes_at(call.flat.address, len(mine))
    small = len(everything) <= SMALL_BYTES
    _run(across, call, (direct_all_gather if small else ring_all_gather)(roster.size), lanes)


def _broadcast(across: HierarchicalEngine, call: CoreRequest) -> None:
    """Hand it on along a line, segment by segment; little of it in the fewest rounds."""
    data = bytes_at(call.flat.address, call.flat.numel * ITEM_BYTES[call.flat.dtype])
    make = binomial_broadcast if len(data) <= SMALL_BYTES else chain_broadcast
    _run(across, call, _broadcast_from(make, across.roster.size, call.root), [data])


@functools.lru_cache(maxsize=64)
def _broadcast_from(make: Callable[[int, int], Schedule], ranks: int, root: int) -> Schedule:
    return make(ranks, root)


def _reduce(across: HierarchicalEngine, call: CoreRequest) -> None:
    """Fold everybody's lanes straight where they belong, then gather the lanes at the root: each byte moves twice."""
    item, roster = ITEM_BYTES[call.flat.dtype], across.roster
    data = bytes_at(call.flat.address, call.flat.numel * item)
    work = data if roster.rank == call.root else data.copy()
    bounds = chunk_bounds(call.flat.numel, roster.size).tolist()
    lanes = _lanes(work, bounds, item)
    divisor = roster.size if call.op == AVG else 1.0
    _run(across, call, direct_reduce_scatter(roster.size), lanes, divisor=divisor)
    _run(across, call, direct_gather(roster.size, call.root), lanes)


def _gather(across: HierarchicalEngine, call: CoreRequest) -> None:
    item, roster = ITEM_BYTES[call.flat.dtype], across.roster
    own = bytes_at(call.flat.address, call.flat.numel * item)
    lanes: Chunks = [None] * roster.size
    if roster.rank == call.root:
        lanes = _lanes(bytes_at(call.out, call.numel * item), call.bounds, item)
        mine = lanes[roster.rank]
        assert mine is not None
        mine[:] = own
    else:
        lanes[roster.rank] = own
    _run(across, call, direct_gather(roster.size, call.root), lanes)


def _scatter(across: HierarchicalEngine, call: CoreRequest) -> None:
    item, roster = ITEM_BYTES[call.flat.dtype], across.roster
    size = call.bounds[1] * item
    own = bytes_at(call.out, size)
    lanes: Chunks = [None] * roster.size
    if roster.rank == call.root:
        lanes = _lanes(bytes_at(call.flat.address, call.numel * item), call.bounds, item)
        mine = lanes[roster.rank]
        assert mine is not None
        own[:] = mine
    else:
        lanes[roster.rank] = own
    _run(across, call, direct_scatter(roster.size, call.root), lanes)


def _all_to_all(across: HierarchicalEngine, call: CoreRequest) -> None:
    item, me, n = ITEM_BYTES[call.flat.dtype], across.roster.rank, across.roster.size
    given = _lanes(bytes_at(call.flat.address, call.numel * item), call.bounds, item)
    got = _lanes(bytes_at(call.out, call.numel * item), call.bounds, item)
    chunks: Chunks = [None] * (n * n)
    for peer in range(n):
        chunks[peer * n + me] = got[peer]
        chunks[me * n + peer] = given[peer]
    mine, place = given[me], got[me]
    assert mine is not None
    assert place is not None
    place[:] = mine
    _run(across, call, direct_all_to_all(n), chunks)


def _lanes(data: Bytes, bounds: Sequence[int], item: int) -> Chunks:
    return [data[bounds[r] * item : bounds[r + 1] * item] for r in range(len(bounds) - 1)]


def _run(
    across: HierarchicalEngine,
    call: CoreRequest,
    schedule: Schedule,
    chunks: Chunks,
    *,
    item_bytes: int = 0,
    scale: float = 1.0,
    divisor: float = 1.0,
) -> None:
    told = _told(call, scale)
    across.run(schedule, chunks, item_bytes or ITEM_BYTES[call.flat.dtype], told, scale=scale, divisor=divisor)


def _told(call: CoreRequest, scale: float) -> Told:
    tag = zlib.crc32(f"{list(call.bounds)}/{call.tag}/{scale}".encode())
    return Told(KINDS.index(call.kind), call.flat.dtype, call.op, call.numel, float(call.root), tag)


_MOVES = {
    "barrier": _barrier,
    "reduce_scatter_": _reduce_scatter,
    "reduce_scatter": _reduce_scatter,
    "all_gather_": _all_gather,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_to_all": _all_to_all,
}
