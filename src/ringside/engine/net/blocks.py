"""All-reduces for which nothing is kept ready: over all ranks in one go, over hosts block by block."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.context import EngineContext
from ringside.engine.net.exchange.pipeline import lane_bounds
from ringside.engine.net.exchange.run import ExchangeRun
from ringside.engine.net.exchange.signature import CollectiveSignature
from ringside.engine.net.reduction import AVG, SUM, Reduction, ReductionPlan, bytes_at, fold, plan_reduction
from ringside.engine.runtime.worker import Work
from ringside.engine.transports.base import Bytes
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
    dtype, rank_map, host_slices = reduction.dtype, context.rank_map, context.host_slices
    item, block = ITEM_BYTES[dtype], context.block_elements(dtype)
    op = SUM if reduction.op == AVG else reduction.op
    members = rank_map.lane(rank_map.local_rank) if context.has_lane(spec) else ()
    between = replace(reduction, scale=1.0, scales=())  # scaled inside the host
    before: tuple[Work | None, Callable[[], None] | None] | None = None  # the block that is between hosts
    for start in range(0, max(elements, 1), block):
        count = min(block, elements - start)
        begin, bounds = address + start * item, lane_bounds(count, context.lanes(spec), rank_map.local_size)
        # Add the block up inside the host, each rank its lane.
        share = None
        if host_slices is not None:
            scale, own_scale = reduction.scale, bool(reduction.scales)
            add, share = host_slices.prepared(begin, bounds, dtype, op, scale, own_scale, reduction.storage)
            add()
        elif reduction.scale != 1.0:
            fold([begin], begin, bounds[-1], dtype, SUM, scale=reduction.scale)
        # Let this rank's lane, if it has one, go between hosts: right here where there is one block, else beside the
        # next one.
        first, end = bounds[rank_map.local_rank : rank_map.local_rank + 2]
        part = first * item + begin, end - first, between, call._replace(elements=end - first)
        work = None
        if members and elements <= block:
            reduce_over_messages(context, spec, members, *part)
        elif members:
            work = context.channels.submit(functools.partial(reduce_over_messages, context, spec, members, *part))
        if before is not None:
            _end_block(*before)
        before = work, share
    assert before is not None
    _end_block(*before)


def _end_block(work: Work | None, share: Callable[[], None] | None) -> None:
    """Give every rank of the host all lanes of a block, when they have come."""
    if work is not None:
        work.wait()
    if share is not None:
        share()


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
    part, dtype = plan_reduction(spec, members, reduction, call, context.rank_map), reduction.dtype
    data = bytes_at(address, elements * ITEM_BYTES[dtype])
    if part.pre_scale != 1.0:
        fold([address], address, elements, dtype, SUM, scale=part.pre_scale)
    if part.plan is None:
        context.native.all_reduce(data, dtype, part.native_op, members)
    else:
        exchange_run(context, part, members, data).run()
    if part.divisor:
        fold([address], address, elements, dtype, AVG, divisor=part.divisor)


def exchange_run(
    context: EngineContext, part: ReductionPlan, members: Sequence[int] | None, data: Bytes
) -> ExchangeRun:
    """Return this rank's part of a reduction by a schedule over all ranks, or over the given ones, ready to be run."""
    exchange, plan, wire, item = context.exchange, part.plan, part.reduction.wire, ITEM_BYTES[part.reduction.dtype]
    assert plan is not None, "native is no schedule"
    bounds = (chunk_bounds(len(data) // item, plan.chunks) * item).tolist()
    # Vertices beyond the ranks are switches, and belong to every selection of ranks.
    switches = range(context.rank_map.size, exchange.transport.size)
    return ExchangeRun(
        exchange,
        plan,
        [data[begin:end] for begin, end in itertools.pairwise(bounds)],
        item,
        part.fold,
        part.call,
        last_fold=part.last_fold,
        members=None if members is None else (*members, *switches),
        wire=wire,
        ordered=True,
        size=exchange.size_of(plan.schedule, len(data), item, wire),
    )
