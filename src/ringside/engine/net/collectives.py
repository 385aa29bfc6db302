"""The collectives besides all-reduce, between hosts: each is a schedule and a list of where its chunks lie.

Chunks of a schedule are numbered as in `ringside.schedule.collective`: chunk r belongs to rank r, an all-to-all has
chunk i*n+j for what rank i has for rank j. The same chunk may lie at different places on different ranks. Where all
hosts have several ranks, most go through shared memory instead (`ringside.engine.net.hierarchical_collectives`).
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import numpy as np

from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.exchange.signature import CollectiveSignature
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.hierarchical_collectives import BY_KIND, SMALL_BYTES, cached_schedule
from ringside.engine.net.reduction import AVG, bytes_at, make_fold
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


def run_collective(engine: HierarchicalEngine, request: CoreRequest, *, canonical: bool = False) -> None:
    """Run a collective that is not an all-reduce, over all ranks.

    Args:
        engine: The ranks.
        request: The collective, as the shared-memory core would take it.
        canonical: Add up in rank order, whatever that costs.

    Raises:
        SyncError: As `HierarchicalEngine.all_reduce`.
    """
    if request.own_scale:
        raise UnsupportedError("between hosts reduce_scatter_ has one scale for all ranks")
    through_hosts = BY_KIND.get(request.kind) if engine.rank_map.in_rows else None
    # Hosts add up inside first, which is another order than that of ranks.
    if through_hosts is None or (canonical and "reduce" in request.kind):
        _BY_KIND[request.kind](engine, request)
    else:
        through_hosts(engine, request, _signature_of(request, request.scale))


def _barrier(engine: HierarchicalEngine, request: CoreRequest) -> None:
    token = np.zeros(ITEM_BYTES[request.flat.dtype], dtype=np.uint8)
    _run(engine, request, dissemination_barrier(engine.rank_map.size), [token])


def _reduce_scatter(engine: HierarchicalEngine, request: CoreRequest) -> None:
    """Work on a copy, whose own lane is the result; every lane is added up at once, in rank order."""
    item, rank_map = ITEM_BYTES[request.flat.dtype], engine.rank_map
    work = bytes_at(request.flat.address, request.flat.numel * item).copy()
    lanes = _lanes(work, request.bounds, item)
    divisor = rank_map.size if request.op == AVG else 1.0
    schedule = direct_reduce_scatter(rank_map.size)
    _run(engine, request, schedule, lanes, scale=request.scale, divisor=divisor)
    target = request.out or request.flat.address + request.bounds[rank_map.rank] * item
    own = lanes[rank_map.rank]
    bytes_at(target, len(own))[:] = own


def _all_gather(engine: HierarchicalEngine, request: CoreRequest) -> None:
    item, rank_map = ITEM_BYTES[request.flat.dtype], engine.rank_map
    everything = bytes_at(request.out or request.flat.address, request.numel * item)
    lanes = _lanes(everything, request.bounds, item)
    if request.out:
        own = lanes[rank_map.rank]
        own[:] = bytes_at(request.flat.address, len(own))
    # Little in the fewest rounds; much by neighbours only, so that no link has several flows.
    small = len(everything) <= SMALL_BYTES
    _run(engine, request, (direct_all_gather if small else ring_all_gather)(rank_map.size), lanes)


def _broadcast(engine: HierarchicalEngine, request: CoreRequest) -> None:
    """Hand it on along a line, segment by segment; little of it in the fewest rounds."""
    data = bytes_at(request.flat.address, request.flat.numel * ITEM_BYTES[request.flat.dtype])
    make = binomial_broadcast if len(data) <= SMALL_BYTES else chain_broadcast
    _run(engine, request, cached_schedule(make, engine.rank_map.size, request.root), [data])


def _reduce(engine: HierarchicalEngine, request: CoreRequest) -> None:
    """Fold everybody's lanes straight where they belong, then gather the lanes at the root: each byte moves twice."""
    item, rank_map = ITEM_BYTES[request.flat.dtype], engine.rank_map
    data = bytes_at(request.flat.address, request.flat.numel * item)
    work = data if rank_map.rank == request.root else data.copy()  # only the root's tensor may change
    lanes = _lanes(work, chunk_bounds(request.flat.numel, rank_map.size).tolist(), item)
    divisor = rank_map.size if request.op == AVG else 1.0
    _run(engine, request, direct_reduce_scatter(rank_map.size), lanes, divisor=divisor)
    _run(engine, request, direct_gather(rank_map.size, request.root), lanes)


def _gather_or_scatter(engine: HierarchicalEngine, request: CoreRequest) -> None:
    """The root has everybody's lane, and every other rank its own."""
    item, rank_map, gathers = ITEM_BYTES[request.flat.dtype], engine.rank_map, request.kind == "gather"
    at_root, elsewhere = (request.out, request.flat.address) if gathers else (request.flat.address, request.out)
    own = bytes_at(elsewhere, request.bounds[1] * item)
    chunks: Chunks = [None] * rank_map.size
    if rank_map.rank == request.root:
        lanes = _lanes(bytes_at(at_root, request.numel * item), request.bounds, item)
        to, source = (lanes[rank_map.rank], own) if gathers else (own, lanes[rank_map.rank])
        to[:] = source
        chunks = [*lanes]
    else:
        chunks[rank_map.rank] = own
    _run(engine, request, (direct_gather if gathers else direct_scatter)(rank_map.size, request.root), chunks)


def _all_to_all(engine: HierarchicalEngine, request: CoreRequest) -> None:
    item, me, n = ITEM_BYTES[request.flat.dtype], engine.rank_map.rank, engine.rank_map.size
    given = _lanes(bytes_at(request.flat.address, request.numel * item), request.bounds, item)
    received = _lanes(bytes_at(request.out, request.numel * item), request.bounds, item)
    # Chunk i * n + j is what rank i has for rank j: a rank knows a row and a column of them.
    chunks: Chunks = [None] * (n * n)
    for peer in range(n):
        chunks[peer * n + me] = received[peer]
        chunks[me * n + peer] = given[peer]
    received[me][:] = given[me]
    _run(engine, request, direct_all_to_all(n), chunks)


def _lanes(data: Bytes, bounds: Sequence[int], item: int) -> list[Bytes]:
    return [data[begin * item : end * item] for begin, end in itertools.pairwise(bounds)]


def _run(
    engine: HierarchicalEngine,
    request: CoreRequest,
    schedule: Schedule,
    chunks: Sequence[Bytes | None],
    scale: float = 1.0,
    divisor: float = 1.0,
) -> None:
    call = _signature_of(request, scale)
    engine.run(schedule, chunks, call, make_fold(call.dtype, call.op, scale=scale, divisor=divisor))


def _signature_of(request: CoreRequest, scale: float) -> CollectiveSignature:
    """Return what peers compare; whatever else must be equal is in the tag's hash."""
    return CollectiveSignature(
        kind=KINDS.index(request.kind),
        dtype=request.flat.dtype,
        op=request.op,
        elements=request.numel,
        extra=float(request.root),
        tag=zlib.crc32(f"{list(request.bounds)}/{request.tag}/{scale}".encode()),
    )


_BY_KIND = {
    "barrier": _barrier,
    "reduce_scatter_": _reduce_scatter,
    "reduce_scatter": _reduce_scatter,
    "all_gather_": _all_gather,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather_or_scatter,
    "scatter": _gather_or_scatter,
    "all_to_all": _all_to_all,
}
