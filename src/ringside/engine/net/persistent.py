"""All-reduces between hosts that are called again and again: all but the work itself is done beforehand.

They are MPI-4's persistent collectives, made by `ringside.engine.net.hierarchical` when one of their kind is called.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.buffers import address_of
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.context import EngineContext
from ringside.engine.net.exchange.exchange import Channels, Exchange
from ringside.engine.net.exchange.message_size import MessageSize
from ringside.engine.net.exchange.persistent import PersistentExchange
from ringside.engine.net.exchange.pipeline import SegmentLayout, SegmentPipeline, SegmentPlan, lane_bounds
from ringside.engine.net.exchange.plan import plan_messages
from ringside.engine.net.exchange.run import ExchangeRun
from ringside.engine.net.exchange.signature import CollectiveSignature, Operation
from ringside.engine.net.reduction import AVG, SUM, Reduction, bytes_at, fold, plan_reduction, safe_mean, signature_of
from ringside.engine.runtime.worker import Work
from ringside.engine.transports.base import Bytes

MOST_BYTES = 64 << 10  # copying more to the buffer and back takes longer than what is saved

Step = Callable[[], object]


class PersistentSmall:
    """Small all-reduces of one size, dtype and reduction by one spec. Not thread-safe.

    At a few bytes what counts is how much the processor has to do, on every rank, and how often somebody has to be
    woken. So the elements are copied to a buffer for which everything is ready: the calls into shared memory, the
    messages between hosts and their headers. What is left is a list of steps.

    Args:
        context: What they run over.
        elements: Of the tensor, at most `MOST_BYTES`.
        reduction: The reduction; without own scales per rank, wire dtype and storage.
        spec: How: `native`, or a schedule that `PersistentExchange` can run.

    Attributes:
        label: The collective, for messages to the user.
        operation: What peers are told of it when it fails.
        spec: As given.
        size_bytes: Of the tensor.
        size_class: The tuner's, of that size; set by whoever asks the tuner.
    """

    size_class = 0

    def __init__(self, context: EngineContext, elements: int, reduction: Reduction, spec: AlgorithmSpec) -> None:
        rank_map, item = context.rank_map, ITEM_BYTES[reduction.dtype]
        call = signature_of(reduction, elements)
        self.label, self.operation = f"all_reduce by {spec}", Operation(call, str(spec))
        self._buffer = np.zeros(elements * item, dtype=np.uint8)
        self._address, self.size_bytes, self.spec = address_of(self._buffer), len(self._buffer), spec
        self._exchange: PersistentExchange | None = None
        self._steps: list[Step] = []
        if spec.over == "ranks":
            self._steps = self._between_hosts(context, spec, None, 0, elements, reduction, call)
            return
        # Add up inside the host, reduce this rank's lane between hosts, share.
        reduction = safe_mean(reduction, rank_map.size)
        bounds = lane_bounds(elements, context.lanes(spec), rank_map.local_size)
        begin, end = bounds[rank_map.local_rank : rank_map.local_rank + 2]
        between: list[Step] = []
        if begin < end:
            between = self._between_hosts(
                context,
                spec,
                rank_map.lane(rank_map.local_rank),
                begin,
                end - begin,
                Reduction(reduction.dtype, reduction.op, divisor=reduction.divisor),  # scaled inside the host
                call._replace(elements=end - begin),
            )
        if context.host_slices is not None:
            op = SUM if reduction.op == AVG else reduction.op
            add, share = context.host_slices.prepared(self._address, bounds, reduction.dtype, op, reduction.scale)
            self._steps = [add, *between, share]
        else:
            self._steps = [*self._scaling(reduction.scale, 0, elements, reduction.dtype), *between]

    @staticmethod
    def fits(context: EngineContext, elements: int, reduction: Reduction, spec: AlgorithmSpec) -> bool:
        """Tell whether an all-reduce can be run this way; arguments as for the constructor."""
        size_bytes = elements * ITEM_BYTES[reduction.dtype]
        if not 0 < size_bytes <= MOST_BYTES or reduction.scales or reduction.wire is not None:
            return False
        if spec.algorithm == NATIVE:
            return True
        vertices, me = context.vertex(spec)
        return PersistentExchange.fits(context.exchange, plan_messages(spec.schedule(vertices), me), size_bytes)

    def run(self, address: int) -> None:
        """Reduce the elements at an address, in place; on failure they are what they were."""
        ctypes.memmove(self._address, address, self.size_bytes)
        for step in self._steps:
            step()
        ctypes.memmove(address, self._address, self.size_bytes)
        if self._exchange is not None:
            self._exchange.release_buffers()  # the result is there: now there is time

    def close(self) -> None:
        """Wait for what is still on its way: this is not used any more."""
        if self._exchange is not None:
            self._exchange.close()

    def _between_hosts(
        self,
        context: EngineContext,
        spec: AlgorithmSpec,
        members: Sequence[int] | None,
        begin: int,
        count: int,
        reduction: Reduction,
        call: CollectiveSignature,
    ) -> list[Step]:
        """Return what this rank does between hosts with `count` elements of the buffer from `begin` on."""
        part = plan_reduction(spec, members, reduction, call, context.rank_map)
        dtype, item = reduction.dtype, ITEM_BYTES[reduction.dtype]
        lane = self._buffer[begin * item : (begin + count) * item]
        steps = self._scaling(part.pre_scale, begin, count, dtype)
        if part.plan is None:
            steps.append(context.native.prepare(lane, dtype, part.native_op, members))
        else:
            self._exchange = PersistentExchange(
                context.exchange, part.plan, lane, item, part.fold, part.last_fold, part.call, members
            )
            steps += [self._exchange.start, self._exchange.wait]
        if part.divisor:
            at_lane = address_of(lane)
            steps.append(functools.partial(fold, [at_lane], at_lane, count, dtype, AVG, divisor=part.divisor))
        return steps

    def _scaling(self, scale: float, begin: int, count: int, dtype: int) -> list[Step]:
        """Return what multiplies `count` elements of the buffer from `begin` on; nothing for a scale of 1."""
        if scale == 1.0:
            return []
        address = self._address + begin * ITEM_BYTES[dtype]
        return [functools.partial(fold, [address], address, count, dtype, SUM, scale=scale)]


class PersistentLarge:
    """All-reduces of one tensor over hosts by one spec, in pieces.

    A gradient bucket lies where it lay, and goes the same way, in every step. What that makes the same every time (the
    pieces, the segments of this rank's lane, the calls into shared memory, the header) is worked out once; what is left
    to do in Python for each piece is to enter shared memory.

    Args:
        context: What they run over; not kept.
        layout: The pieces.
        address: Of the tensor's first element.
        reduction: The reduction, as it travels.
        spec: How: over hosts or leaders, by a schedule that needs no switch.
        size: Of the messages.
        operation: What peers are told of it when it fails; its call is of the whole tensor.

    Attributes:
        label: The collective, for messages to the user.
        operation: As given.
    """

    def __init__(
        self,
        context: EngineContext,
        layout: SegmentLayout,
        address: int,
        reduction: Reduction,
        spec: AlgorithmSpec,
        size: MessageSize,
        operation: Operation,
    ) -> None:
        self.label, self.operation = f"all_reduce by {spec}", operation
        rank_map, dtype = context.rank_map, reduction.dtype
        item = ITEM_BYTES[dtype]
        # Cut this rank's lane of each piece into segments: a chunk's are those of its pieces, in order.
        chunks: list[list[Bytes]] = [[] for _ in range(layout.pieces[-1].chunk + 1)]
        counts, has_lane = [], context.has_lane(spec)
        for piece in layout.pieces:
            begin, end = piece.bounds[rank_map.local_rank : rank_map.local_rank + 2]
            lane = bytes_at(address + (piece.begin + begin) * item, (end - begin) * item)
            segments = context.exchange.cut(lane, item, reduction.wire, size) if has_lane else []
            chunks[piece.chunk] += segments
            counts.append(len(segments))
        self._segment_plan = SegmentPlan(layout, counts)
        # This rank's part between hosts; None: it has no lane.
        self._exchange_run: Callable[..., ExchangeRun] | None = None
        if any(counts):
            elements = sum(len(segment) for chunk in chunks for segment in chunk) // item
            inside = replace(reduction, scale=1.0, scales=())  # scaled inside the host
            members = rank_map.lane(rank_map.local_rank)
            part = plan_reduction(spec, members, inside, operation.call._replace(elements=elements), rank_map)
            assert part.plan is not None, "native is not fed in pieces"
            self._exchange_run = functools.partial(
                ExchangeRun,
                plan=part.plan,
                chunks=chunks,
                item_bytes=item,
                fold=part.fold,
                call=part.call,
                last_fold=part.last_fold,
                members=members,
                wire=reduction.wire,
                ordered=True,
                size=size,
            )
        # What adds up each piece among the ranks of the host (None: nothing does), and what shares it.
        starts = [address + piece.begin * item for piece in layout.pieces]
        self._add: Sequence[Step] | None = None
        self._share: Sequence[Step] | None = None
        if context.host_slices is not None:
            op, own_scale = SUM if reduction.op == AVG else reduction.op, bool(reduction.scales)
            pairs = [
                context.host_slices.prepared(
                    start, piece.bounds, dtype, op, reduction.scale, own_scale, reduction.storage
                )
                for start, piece in zip(starts, layout.pieces, strict=True)
            ]
            self._add, self._share = [add for add, _ in pairs], [share for _, share in pairs]
        elif reduction.scale != 1.0:
            scale = functools.partial(fold, dtype=dtype, op=SUM, scale=reduction.scale)
            self._add = [
                functools.partial(scale, [start], start, piece.bounds[-1])
                for start, piece in zip(starts, layout.pieces, strict=True)
            ]

    def rehearse(self, exchange: Exchange) -> None:
        """Work out the order of its messages, which is kept, and send none."""
        if self._exchange_run is not None:
            self._exchange_run(exchange)

    def start(self, channels: Channels, channel: int, *, alone: bool) -> tuple[SegmentPipeline, Work]:
        """Add the tensor up piece by piece with messages under way, and return what `finish` needs.

        Args:
            channels: Exchanges and their threads.
            channel: Which of them moves the messages.
            alone: Nothing is under way beside it; else it is to be ready when what is before it is through.
        """
        pipeline = SegmentPipeline(self._segment_plan)
        work = channels.submit(functools.partial(self._exchange, pipeline, channels.exchange(channel)), channel)
        pipeline.fill(self._add, paced=alone)
        return pipeline, work

    def _exchange(self, pipeline: SegmentPipeline, exchange: Exchange) -> None:
        """Move this rank's lane between hosts: on the channel's thread, beside `fill` and `drain`."""
        try:
            if self._exchange_run is not None:
                self._exchange_run(exchange, feed=pipeline).run()
        finally:
            pipeline.stop()

    def finish(self, pipeline: SegmentPipeline, work: Work) -> None:
        """Share each piece inside the host as soon as it has its result; return when all have."""
        if self._share is not None:  # a rank alone on its host shares with nobody
            pipeline.drain(self._share)
        work.wait()
