"""All-reduces for which nothing is kept ready: over all ranks in one go, over hosts block by block."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.context import EngineContext
from ringside.engine.net.exchange.pipeline import lane_bounds
from ringside.engine.net.exchange.run import ExchangeRun
from ringside.engine.net.exchange.signature import CollectiveSignature
from ringside.engine.net.reduction import AVG, SUM, Reduction, bytes_at, fold, plan_reduction
from ringside.engine.runtime.worker import Work
from ringside.schedule import chunk_bounds


def reduce_in_blocks(
    context: EngineContext,
    spec: AlgorithmSpec,
    address: int,
    elements: int,
    reduction: Reduction,
    call: CollectiveSignature,
) -> None:
    """Reduce over hosts, block by block: each is between hosts while the next is added up inside the host.

    Args:
        context: What it runs over.
        spec: How, over hosts or leaders.
        address: Of the first element.
        elements: Their number.
        reduction: The reduction, as it travels (`safe_mean`).
        call: What was called.
    """
    dtype = reduction.dtype
    item, block, host_slices = ITEM_BYTES[dtype], context.block_elements(dtype), context.host_slices
    lanes, local_ranks = context.lanes(spec), context.rank_map.local_size
    before: tuple[int, tuple[int, ...], Work | None] | None = None  # the block that is between hosts
    for start in range(0, max(elements, 1), block):
        count = min(block, elements - start)
        begin, bounds = address + start * item, lane_bounds(count, lanes, local_ranks)
        # Add the block up inside the host, each rank its lane.
        if host_slices is not None:
            step = SUM if reduction.op == AVG else reduction.op
            host_slices.reduce_lanes(
                begin, bounds, dtype, step, reduction.scale, bool(reduction.scales), reduction.storage
            )
        elif reduction.scale != 1.0:
            fold([begin], begin, bounds[-1], dtype, SUM, scale=reduction.scale)
        # Let this rank's lane go between hosts: right here where there is one block, else beside the next one.
        job = functools.partial(_reduce_lane, context, spec, begin, bounds, reduction, call)
        if elements <= block:
            job()
            work = None
        else:
            work = context.channels.submit(job)
        if before is not None:
            _share(context, *before, reduction)
        before = (begin, bounds, work)
    assert before is not None
    _share(context, *before, reduction)


def _reduce_lane(
    context: EngineContext,
    spec: AlgorithmSpec,
    address: int,
    bounds: Sequence[int],
    reduction: Reduction,
    call: CollectiveSignature,
) -> None:
    """Reduce this rank's lane of a block between hosts, if it has one."""
    lane = context.rank_map.local_rank
    if context.has_lane(spec):
        count = bounds[lane + 1] - bounds[lane]
        reduce_over_messages(
            context,
            spec,
            context.rank_map.lane(lane),
            address + bounds[lane] * ITEM_BYTES[reduction.dtype],
            count,
            replace(reduction, scale=1.0, scales=()),  # scaled inside the host
            call._replace(elements=count),
        )


def _share(
    context: EngineContext, address: int, bounds: Sequence[int], work: Work | None, reduction: Reduction
) -> None:
    """Give every rank of the host all lanes of a block, when they have come."""
    if work is not None:
        work.wait()
    if context.host_slices is not None:
        context.host_slices.gather_lanes(address, bounds, reduction.dtype, reduction.storage)


def reduce_over_messages(
    context: EngineContext,
    spec: AlgorithmSpec,
    members: Sequence[int] | None,
    address: int,
    elements: int,
    reduction: Reduction,
    call: CollectiveSignature,
) -> None:
    """Reduce over all ranks, or over the given ones (one per host), as if each were a host of its own.

    Arguments as for `reduce_in_blocks` and `plan_reduction`.
    """
    rank_map, exchange = context.rank_map, context.exchange
    part = plan_reduction(spec, members, reduction, call, rank_map)
    dtype, wire, item = reduction.dtype, part.reduction.wire, ITEM_BYTES[reduction.dtype]
    data = bytes_at(address, elements * item)
    if part.pre_scale != 1.0:
        fold([address], address, elements, dtype, SUM, scale=part.pre_scale)
    plan = part.plan
    if plan is None:
        context.native.all_reduce(data, dtype, part.native_op, members)
    else:
        bounds = (chunk_bounds(elements, plan.chunks) * item).tolist()
        # Vertices beyond the ranks are switches, and belong to every selection of ranks.
        switches = range(rank_map.size, exchange.transport.size)
        ExchangeRun(
            exchange,
            plan,
            [data[bounds[chunk] : bounds[chunk + 1]] for chunk in range(plan.chunks)],
            item,
            part.fold,
            part.call,
            last_fold=part.last_fold,
            members=None if members is None else (*members, *switches),
            wire=wire,
            ordered=True,
            size=exchange.size_of(plan.schedule, elements * item, item, wire),
        ).run()
    if part.divisor:
        fold([address], address, elements, dtype, AVG, divisor=part.divisor)


__all__ = ["reduce_in_blocks", "reduce_over_messages"]
