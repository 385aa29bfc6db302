"""What an all-reduce is made of on one rank; and those for which nothing is kept ready, block by block over hosts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.context import EngineContext, Step
from ringside.engine.net.exchange.exchange import ExchangeRequest
from ringside.engine.net.exchange.pipeline import lane_bounds
from ringside.engine.net.exchange.run import ExchangeRun
from ringside.engine.net.exchange.signature import CollectiveSignature
from ringside.engine.net.reduction import AVG, SUM, Reduction, bytes_at, fold, plan_reduction, safe_mean
from ringside.engine.runtime.worker import Work
from ringside.engine.transports.base import Bytes
from ringside.schedule import chunk_bounds

Exchanging = Callable[[ExchangeRequest, Bytes], "list[Step]"]
"""Makes of a rank's part in a schedule and of its elements what moves the messages."""


def steps_inside(
    context: EngineContext, address: int, bounds: Sequence[int], reduction: Reduction
) -> tuple[list[Step], list[Step]]:
    """Return what adds elements up among the ranks of the host, lane by lane, and what gives every rank all lanes.

    Args:
        context: What it runs over.
        address: Of the first element.
        bounds: Element offsets of the local ranks' lanes.
        reduction: The reduction, which scales here.
    """
    if context.host_slices is None:
        return _scaling(address, bounds[-1], reduction.dtype, reduction.scale), []
    add, share = context.host_slices.prepared(address, bounds, reduction)
    return [add], [share]


def steps_of(
    context: EngineContext,
    spec: AlgorithmSpec,
    address: int,
    elements: int,
    reduction: Reduction,
    call: CollectiveSignature,
    exchanging: Exchanging,
) -> tuple[list[Step], list[Step], list[Step]]:
    """Return what adds elements up inside the host, what this rank does with its part between hosts, and what shares.

    Over all ranks it is as if each were a host of its own: all is done between hosts.

    Args:
        context: What it runs over.
        spec: How.
        address: Of the first element.
        elements: Their number.
        reduction: The reduction.
        call: What was called.
        exchanging: Makes what moves the messages of a schedule.
    """
    rank_map, dtype = context.rank_map, reduction.dtype
    begin, end, members = 0, elements, None
    add, between, share = list[Step](), list[Step](), list[Step]()
    if spec.over != "ranks":
        reduction = safe_mean(reduction, rank_map.size)
        bounds = lane_bounds(elements, context.lanes(spec), rank_map.local_size)
        begin, end = bounds[rank_map.local_rank : rank_map.local_rank + 2]
        add, share = steps_inside(context, address, bounds, reduction)
        # Of no elements at all the ranks with a lane exchange headers: they compare what was called.
        if begin == end and (elements or not context.has_lane(spec)):
            return add, between, share
        members = rank_map.lane(rank_map.local_rank)
        reduction = replace(reduction, scale=1.0, scales=())  # scaled inside the host
    # Between hosts: this rank's lane, or all of it.
    part = plan_reduction(spec, members, reduction, call._replace(elements=end - begin), rank_map)
    address, count = address + begin * ITEM_BYTES[dtype], end - begin
    data = bytes_at(address, count * ITEM_BYTES[dtype])
    between += _scaling(address, count, dtype, part.pre_scale)
    if part.request is not None:
        between += exchanging(part.request, data)
    elif count:
        between.append(context.native.prepare(data, dtype, part.reduction.fold_op, members))
    if part.divisor:
        between.append(functools.partial(fold, [address], address, count, dtype, AVG, divisor=part.divisor))
    return add, between, share


def reduce_in_blocks(
    context: EngineContext,
    spec: AlgorithmSpec,
    address: int,
    elements: int,
    reduction: Reduction,
    call: CollectiveSignature,
) -> None:
    """Reduce over hosts, block by block: each is between hosts while the next is added up inside the host.

    Over all ranks it is one block. Arguments as for `steps_of`.
    """
    item, block = ITEM_BYTES[reduction.dtype], context.block_elements(reduction.dtype)
    block = max(elements, 1) if spec.over == "ranks" else block
    exchanging = functools.partial(exchange_once, context)
    before: tuple[Work | None, list[Step]] = None, []  # the block that is between hosts, and what shares it
    for start in range(0, max(elements, 1), block):
        count = min(block, elements - start)
        add, between, share = steps_of(context, spec, address + start * item, count, reduction, call, exchanging)
        _run_steps(add)
        # Right here where there is one block, else beside the next one.
        work = None
        if elements <= block:
            _run_steps(between)
        elif between:
            work = context.channels.submit(functools.partial(_run_steps, between))
        _end_block(*before)
        before = work, share
    _end_block(*before)


def _end_block(work: Work | None, share: Sequence[Step]) -> None:
    """Give every rank of the host all lanes of a block, when they have come."""
    if work is not None:
        work.wait()
    _run_steps(share)


def exchange_once(context: EngineContext, request: ExchangeRequest, data: Bytes) -> list[Step]:
    """Return this rank's part of a reduction by a schedule, ready to be run, once."""
    exchange, plan, item, wire = context.exchange, request.plan, request.item_bytes, request.wire
    # Where elements are encoded block by block, the blocks are those of the tensor, whatever cuts it.
    count, block = len(data) // item, 1 if wire is None else wire.block
    bounds = (np.minimum(chunk_bounds(-(-count // block), plan.chunks) * block, count) * item).tolist()
    chunks = [data[begin:end] for begin, end in itertools.pairwise(bounds)]
    size = exchange.size_of(plan.schedule, len(data), item, wire)
    return [ExchangeRun(exchange, request, chunks, ordered=True, size=size).run]


def _scaling(address: int, count: int, dtype: int, scale: float) -> list[Step]:
    """Return what multiplies elements; nothing for a scale of 1."""
    if scale == 1.0:
        return []
    return [functools.partial(fold, [address], address, count, dtype, SUM, scale=scale)]


def _run_steps(steps: Sequence[Step]) -> None:
    for step in steps:
        step()
