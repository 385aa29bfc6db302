"""All-reduces between hosts that are called again and again: all but the work itself is done beforehand.

They are MPI-4's persistent collectives, made by `ringside.engine.net.hierarchical` when one of their kind is called.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.buffers import address_of
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net.blocks import steps_inside, steps_of
from ringside.engine.net.context import EngineContext, Step
from ringside.engine.net.exchange.exchange import Channels, Exchange, ExchangeRequest
from ringside.engine.net.exchange.message_size import MessageSize
from ringside.engine.net.exchange.persistent import PersistentExchange
from ringside.engine.net.exchange.pipeline import SegmentLayout, SegmentPipeline, SegmentPlan
from ringside.engine.net.exchange.plan import plan_messages
from ringside.engine.net.exchange.run import ExchangeRun
from ringside.engine.net.exchange.signature import Operation
from ringside.engine.net.reduction import Reduction, bytes_at, plan_reduction, signature_of
from ringside.engine.runtime.worker import Work
from ringside.engine.transports.base import Bytes

MOST_BYTES = 64 << 10  # copying more to the buffer and back takes longer than what is saved


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
        call = signature_of(reduction, elements)
        self.label, self.operation = f"all_reduce by {spec}", Operation(call, str(spec))
        self._buffer = np.zeros(elements * ITEM_BYTES[reduction.dtype], dtype=np.uint8)
        self._address, self.size_bytes, self.spec = address_of(self._buffer), len(self._buffer), spec
        self._exchange: PersistentExchange | None = None
        exchanging = functools.partial(self._keep_exchange, context)
        parts = steps_of(context, spec, self._address, elements, reduction, call, exchanging)
        self._steps = [step for steps in parts for step in steps]

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

    def _keep_exchange(self, context: EngineContext, request: ExchangeRequest, lane: Bytes) -> list[Step]:
        self._exchange = PersistentExchange(context.exchange, request, lane)
        return [self._exchange.start, self._exchange.wait]


class PipelinedExchange:
    """This rank's lane of a tensor between hosts, while pieces are filled before their messages and ended after them.

    Args:
        layout: The pieces of the schedule's chunks.
        segments: What travels of each piece, message by message, by piece of `layout.pieces`.
        exchange_run: Makes an `ExchangeRun` of an exchange and `chunks`; None: this rank has no lane.
        fill: Leaves what is to be sent of a piece in the ranks' lanes, by piece; None: it is there.
        end: What is to be done with a piece that is complete, by piece; None: nothing, or `layout` has no ends.
        kept: Chunks of which nothing arrives here: they are complete when they are filled.
    """

    def __init__(
        self,
        layout: SegmentLayout,
        segments: Sequence[Sequence[Bytes]],
        exchange_run: Callable[..., ExchangeRun] | None,
        fill: Sequence[Step] | None,
        end: Sequence[Step] | None,
        kept: Collection[int] = (),
    ) -> None:
        self._segment_plan = SegmentPlan(layout, list(map(len, segments)), kept)
        self._fill, self._end = fill, end
        self._exchange_run: Callable[..., ExchangeRun] | None = None
        if exchange_run is not None:
            # A chunk's segments are those of its pieces, in order.
            chunks: list[list[Bytes]] = [[] for _ in range(layout.pieces[-1].chunk + 1)]
            for piece, parts in zip(layout.pieces, segments, strict=True):
                chunks[piece.chunk] += parts
            self._exchange_run = functools.partial(exchange_run, chunks=chunks)

    def rehearse(self, exchange: Exchange) -> None:
        """Work out the order of its messages, which is kept, and send none."""
        if self._exchange_run is not None:
            self._exchange_run(exchange)

    def start(self, channels: Channels, channel: int = 0, *, alone: bool = True) -> tuple[SegmentPipeline, Work]:
        """Fill the tensor piece by piece with messages under way, and return what `finish` needs.

        Args:
            channels: Exchanges and their threads.
            channel: Which of them moves the messages.
            alone: Nothing is under way beside it; else it is to be ready when what is before it is through.
        """
        pipeline = SegmentPipeline(self._segment_plan)
        work = channels.submit(functools.partial(self._exchange, pipeline, channels.exchange(channel)), channel)
        pipeline.fill(self._fill, paced=alone)
        return pipeline, work

    def _exchange(self, pipeline: SegmentPipeline, exchange: Exchange) -> None:
        """Move this rank's lane between hosts: on the channel's thread, beside `fill` and `drain`."""
        try:
            if self._exchange_run is not None:
                self._exchange_run(exchange, feed=pipeline).run()
        finally:
            pipeline.stop()

    def finish(self, pipeline: SegmentPipeline, work: Work) -> None:
        """End each piece as soon as it has its result; return when all have."""
        if self._end is not None:
            pipeline.drain(self._end)
        work.wait()


class PersistentLarge(PipelinedExchange):
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
        has_lane = context.has_lane(spec)
        # This rank's lane of each piece, cut into segments.
        segments: list[list[Bytes]] = []
        for piece in layout.pieces:
            begin, end = piece.bounds[rank_map.local_rank : rank_map.local_rank + 2]
            lane = bytes_at(address + (piece.begin + begin) * item, (end - begin) * item)
            segments.append(context.exchange.cut(lane, item, reduction.wire, size) if has_lane else [])
        # Its part between hosts.
        exchange_run: Callable[..., ExchangeRun] | None = None
        if any(segments):
            elements = sum(len(segment) for cut in segments for segment in cut) // item
            inside = replace(reduction, scale=1.0, scales=())  # scaled inside the host
            members = rank_map.lane(rank_map.local_rank)
            part = plan_reduction(spec, members, inside, operation.call._replace(elements=elements), rank_map)
            assert part.request is not None, "native is not fed in pieces"
            exchange_run = functools.partial(ExchangeRun, request=part.request, ordered=True, size=size)
        # What adds up each piece among the ranks of the host, and what shares it; nothing does on a rank that is alone.
        adds, shares = [], []
        for piece in layout.pieces:
            add, share = steps_inside(context, address + piece.begin * item, piece.bounds, reduction)
            adds += add
            shares += share
        super().__init__(layout, segments, exchange_run, adds or None, shares or None)
