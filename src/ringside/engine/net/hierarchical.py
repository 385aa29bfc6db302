"""Collectives among ranks on several hosts: a schedule over messages, shared memory inside a host.

An all-reduce goes one of three ways (`ringside.engine.algorithm`): over all ranks as if every one were alone; over
hosts, where the ranks of a host first add up in shared memory so that each sends one slice between hosts, and share the
result afterwards; over leaders, the same with one sender per host. Large tensors go over hosts in pieces, so that a
piece is added up inside the host while the one before it is between hosts.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import numpy as np

from ringside._core.enums import DType
from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.buffers import address_of
from ringside.engine.dtypes import ITEM_BYTES
from ringside.engine.net import attribution
from ringside.engine.net.blocks import exchange_once, reduce_in_blocks, steps_of
from ringside.engine.net.context import EngineContext, HostSlices, NativeAllReduce
from ringside.engine.net.exchange.exchange import Channels, Exchange, ExchangeRequest, Fold
from ringside.engine.net.exchange.in_flight import PLACES_EACH, InFlight, places_allowed
from ringside.engine.net.exchange.pipeline import SegmentPipeline
from ringside.engine.net.exchange.plan import plan_messages
from ringside.engine.net.exchange.run import ExchangeRun
from ringside.engine.net.exchange.signature import CollectiveSignature, Operation
from ringside.engine.net.exchange.wire import Wire
from ringside.engine.net.persistent import MOST_BYTES, PersistentLarge, PersistentSmall
from ringside.engine.net.rank_map import RankMap
from ringside.engine.net.reduction import Reduction, make_fold, safe_mean, signature_of
from ringside.engine.runtime.interrupts import interruptible
from ringside.engine.runtime.worker import Work
from ringside.engine.transports.base import NOBODY, Bytes, LinkFailure
from ringside.errors import ClosedError, SyncError
from ringside.schedule import Schedule

_FLOAT32 = int(DType.float32)
_MAX_SMALL = 256  # keys of small all-reduces that are kept ready
_LAST_JOBS_S = 5.0  # after a failure, for each job that still works in the caller's memory
_WORKERS_END_S = 1.0

SmallKey = tuple[int, int, "Reduction | str", "AlgorithmSpec | Schedule | str | None", int]
"""What tells small all-reduces apart: elements, code of the dtype, what is done with them, algorithm, version.

The engine's own keys have a `Reduction` and an `AlgorithmSpec`. Callers add keys of what they are given themselves: the
name of the operation, the requested algorithm, the version of the tuner's choices.
"""


class PendingAllReduce:
    """An all-reduce that was started.

    Args:
        engine: Which one started it.
        spec: How it is done.
        operation: What peers are told of it when it fails.
        size_bytes: Of the tensor.
        began: When it was started, on the performance counter.

    Attributes:
        spec, operation, size_bytes: As given.
        label: The collective, for messages to the user.
        number: Which of the engine's collectives it is, from 1, where its messages move on.
        channel: Which of the exchanges moves its messages: one that is started before another is finished uses the
            other channel.
        is_done: Whether nothing is left to be waited for.
        took_s: How long it took, from its start or from the end of the one before it, if that was later; seconds.
        record: Called with it when it was waited for, and may call other collectives; None: nobody is told.
        stamp_ns: For `record`: when the tensor was ready, on the monotonic clock.
    """

    number = 0
    channel = 0
    is_done = True
    took_s = 0.0
    record: Callable[[PendingAllReduce], object] | None = None
    stamp_ns = 0

    def __init__(
        self, engine: HierarchicalEngine, spec: AlgorithmSpec, operation: Operation, size_bytes: int, began: float
    ) -> None:
        self.spec, self.operation, self.size_bytes = spec, operation, size_bytes
        self.label = f"all_reduce by {operation.algorithm}"
        self._engine, self._began = engine, began

    def messages_under_way(self, large: PersistentLarge, pipeline: SegmentPipeline, work: Work, channel: int) -> None:
        """Its messages move on a thread of their own; what is left is to share the results as they come."""
        self._large, self._pipeline, self._work, self.channel = large, pipeline, work, channel
        self.is_done, self.number = False, self._engine.begun
        self._engine.pending.append(self)

    def wait(self) -> None:
        """Return when the result is there, and have it recorded, once; raise what `all_reduce` of the engine raises."""
        record, self.record = self.record, None
        self.finish()
        if record is not None:
            record(self)

    def finish(self) -> None:
        """Return when the result is there: what the engine calls in place of `wait`, as recording may call it."""
        # In the order in which they were started: sharing is a collective of the host.
        pending = self._engine.pending
        while not self.is_done and pending and pending[0] is not self:
            pending[0].finish()
        if self.is_done:
            return
        with self._engine.attributing_errors(self.label):
            self.is_done = True
            try:
                self._large.finish(self._pipeline, self._work)
            finally:
                pending.popleft()
                del self._large, self._pipeline, self._work
        self.ended()

    def ended(self) -> None:
        """Take the time: it queued behind the one before it."""
        ended = time.perf_counter()
        self.took_s = ended - max(self._began, self._engine.last_ended)
        self._engine.last_ended = ended


class HierarchicalEngine:
    """One rank's part in collectives between hosts. Not thread-safe: one collective at a time.

    Args:
        rank_map: Which ranks are on which host.
        exchange: Messages to every rank of the group.
        host_slices: Shared memory among the ranks of this host; None for a rank alone on its host.
        native: The group's own all-reduce.
        timeout_s: The transport's longest wait, seconds, for messages to the user.
        block_bytes: Tensors larger than this go over hosts in blocks of this size.

    Attributes:
        rank_map, exchange, host_slices, native, block_bytes: As given.
        channels: Exchanges that run beside each other, and their threads.
        on_timeout: Called with another timeout, seconds: the waits below.
        small: Small all-reduces that are kept ready, by what is called; None: it cannot be.
        pending: All-reduces under way, in the order in which they were started.
        begun: How many collectives this rank has begun: by it peers know which of two calls came first.
        last_ended: When the newest all-reduce that was started was done, on the performance counter.
        max_large: For how many large tensors, such as gradient buckets, all is kept ready.
    """

    max_large = 256

    def __init__(
        self,
        rank_map: RankMap,
        exchange: Exchange,
        host_slices: HostSlices | None,
        native: NativeAllReduce,
        *,
        timeout_s: float,
        block_bytes: int = 8 << 20,
    ) -> None:
        self.rank_map, self.exchange, self.host_slices, self.native = rank_map, exchange, host_slices, native
        self.block_bytes = block_bytes
        self.channels = Channels(exchange, f"ringside-carrier-{rank_map.rank}")
        self._context = EngineContext(rank_map, exchange, host_slices, native, self.channels, block_bytes)
        self.pending: deque[PendingAllReduce] = deque()
        self.begun, self.last_ended = 0, 0.0
        self._timeout_s = timeout_s
        self._broken: SyncError | None = None  # what every later call raises
        self.small: dict[SmallKey, PersistentSmall | None] = {}
        self._large: dict[tuple[int, int, Reduction, AlgorithmSpec, float | None, int], PersistentLarge] = {}
        self._interruptible = self.interruptible()
        exchange.transport.waits_inside = self._absent_rank
        exchange.transport.on_failure = self._abort_others
        self.on_timeout: tuple[Callable[[float], object], ...] = ()

    def set_timeout(self, timeout_s: float) -> None:
        """Wait no longer than that for other ranks from now on, seconds."""
        self._timeout_s = timeout_s
        for set_timeout in self.on_timeout:
            set_timeout(timeout_s)

    def interruptible(self) -> interruptible:
        """Return what makes Ctrl-C end the collectives under way, for a main thread that waits for them in torch."""
        transport, left = self.exchange.transport, LinkFailure("left", self.rank_map.rank)
        return interruptible(functools.partial(transport.fail, left))

    # -------------------------------------------------------------------------------------------- all-reduces

    def all_reduce(self, address: int, elements: int, reduction: Reduction, spec: AlgorithmSpec) -> None:
        """Reduce the elements at an address over all ranks of the group, in place.

        Args:
            address: Of the first element.
            elements: Their number, equal on all ranks.
            reduction: The reduction, equal on all ranks.
            spec: How; equal on all ranks.

        Raises:
            UsageError, UnsupportedError: It cannot be done that way; nothing was sent.
            PeerLostError, DeadlineError, MismatchError, ClosedError: The content is undefined and this is unusable.
        """
        small = self.prepare(elements, reduction, spec)
        if small is None:
            self.start(address, elements, reduction, spec).wait()
        else:
            self.run_prepared(small, address)

    def prepare(self, elements: int, reduction: Reduction, spec: AlgorithmSpec) -> PersistentSmall | None:
        """Return what is ready for a small all-reduce; None: it is too large, or cannot be made ready.

        Arguments and errors as for `all_reduce`.
        """
        if elements > MOST_BYTES or reduction.scales or reduction.storage is not None:
            return None
        key = elements, reduction.dtype, reduction, spec, 0
        if key in self.small:
            return self.small[key]
        context = self._context
        reduction = context.checked(reduction, spec)
        fits = PersistentSmall.fits(context, elements, reduction, spec)
        small = PersistentSmall(context, elements, reduction, spec) if fits else None
        self.keep_small(key, small)
        return small

    def keep_small(self, key: SmallKey, small: PersistentSmall | None) -> None:
        """Keep what `prepare` returned ready by one more key."""
        if len(self.small) >= _MAX_SMALL:
            for other in {other for other in self.small.values() if other is not None and other is not small}:
                other.close()
            self.small.clear()
        self.small[key] = small

    def run_prepared(self, small: PersistentSmall, address: int) -> None:
        """Reduce the elements at an address by what `prepare` returned; raises as `all_reduce` does."""
        # The hot path of small all-reduces: what `attributing_errors` does, without a generator.
        if self.pending:
            self.wait_all()
        if self._broken is not None:
            raise type(self._broken)(str(self._broken), self._broken.ranks) from self._broken
        transport = self.exchange.transport
        self.begun += 1
        transport.doing, transport.number = small.operation, self.begun
        try:
            with self._interruptible:
                small.run(address)
            transport.doing = ""
        except BaseException as error:
            self._fail(small.label, error)

    def start(self, address: int, elements: int, reduction: Reduction, spec: AlgorithmSpec) -> PendingAllReduce:
        """Start an all-reduce; arguments and errors as for `all_reduce`.

        A large tensor is between hosts when this returns, and the next one may be started before `wait` of this one,
        which must be called in the same order on all ranks. The messages of two travel beside each other, so links are
        busy where one of them fills or drains. Anything else that is called meanwhile finishes it first.
        """
        size_bytes = elements * ITEM_BYTES[reduction.dtype]
        large = self._prepare_large(address, elements, reduction, spec)
        if large is not None:
            channel = 1 - self.pending[-1].channel if self.pending else 0
            with self.attributing_errors(large.label, large.operation):
                pending = PendingAllReduce(self, spec, large.operation, size_bytes, time.perf_counter())
                pipeline, work = large.start(self.channels, channel, alone=not self.pending)
                pending.messages_under_way(large, pipeline, work, channel)
            return pending
        # Everything else is done when this returns.
        context = self._context
        reduction = context.checked(reduction, spec)
        call = signature_of(reduction, elements)
        pending = PendingAllReduce(self, spec, Operation(call, str(spec)), size_bytes, time.perf_counter())
        self.wait_all()
        with self.attributing_errors(pending.label, pending.operation):
            reduce_in_blocks(context, spec, address, elements, reduction, call)
        pending.ended()
        return pending

    def _prepare_large(
        self, address: int, elements: int, reduction: Reduction, spec: AlgorithmSpec
    ) -> PersistentLarge | None:
        """Return what is ready for a large all-reduce over hosts; None: it goes another way.

        Arguments and errors as for `all_reduce`.
        """
        if spec.over == "ranks" or spec.algorithm == NATIVE:
            return None
        # The rate of links decides the size of messages (`size_of`), and their number on the way their order: where
        # these are others it is another all-reduce.
        key = (address, elements, reduction, spec, self.exchange.bytes_per_s, self.exchange.window)
        large = self._large.pop(key, None) or self._make_large(address, elements, reduction, spec)
        if large is None:
            return None
        if not reduction.scales:  # these differ from call to call
            # As the last one of a dict in the order of use: the first is the one that was not used for longest.
            self._large[key] = large
            if len(self._large) > self.max_large:
                del self._large[next(iter(self._large))]
        return large

    def _make_large(
        self, address: int, elements: int, reduction: Reduction, spec: AlgorithmSpec
    ) -> PersistentLarge | None:
        context = self._context
        reduction = context.checked(reduction, spec)
        operation = Operation(signature_of(reduction, elements), str(spec))
        reduction = safe_mean(reduction, self.rank_map.size)
        layout = context.layout(spec, elements, reduction)
        if layout is None:
            return None
        size = context.message_size(spec, elements, reduction)
        return PersistentLarge(context, layout, address, reduction, spec, size, operation)

    def wait_all(self) -> None:
        """Finish what was started before something else is done with messages or shared memory."""
        while self.pending:
            self.pending[0].finish()

    def rehearse(self, elements: int, reduction: Reduction, spec: AlgorithmSpec) -> None:
        """Work out here what the first all-reduce of its kind would: to be timed, it should be like those that follow.

        Sends nothing; arguments as for `all_reduce`.
        """
        context = self._context
        if spec.algorithm == NATIVE or (spec.over != "ranks" and not context.has_lane(spec)):
            return
        reduction = context.checked(reduction, spec)
        memory = np.empty(elements * ITEM_BYTES[reduction.dtype], dtype=np.uint8)  # nobody reads or writes it
        large = self._make_large(address_of(memory), elements, reduction, spec)
        if large is not None:
            large.rehearse(self.exchange)
            return
        # In one go over ranks, or block by block over hosts: the first one, as `reduce_in_blocks` does it.
        count = elements if spec.over == "ranks" else min(elements, context.block_elements(reduction.dtype))
        exchanging = functools.partial(exchange_once, context)
        steps_of(context, spec, address_of(memory), count, reduction, signature_of(reduction, count), exchanging)

    def widen(self, needed: InFlight) -> None:
        """Have more on its way on each link from now on, never less. A collective.

        Args:
            needed: What long links are to have on their way, as all ranks have agreed.
        """
        exchange = self.exchange
        most = places_allowed(exchange.transport.size - 1, exchange.largest.place_bytes)
        places = max(min(needed.places, most), exchange.window)
        # Of many peers each has few places: more connections would never carry anything at once.
        connections = max(min(needed.connections, places // PLACES_EACH), exchange.connections)
        if (places, connections) == (exchange.window, exchange.connections):
            return
        if exchange.transport.size > self.rank_map.size:
            return  # a reducer at the switch has not timed the links, and would not take part
        self.wait_all()
        with self.attributing_errors("connecting", "connecting"):
            self.channels.widen(places, connections)

    def pieces_from_bytes(self, wire: Wire | None) -> int:
        """Return from how many bytes on float32 goes over hosts in pieces, by most schedules; over leaders it is less.

        Args:
            wire: How elements travel, where not as they are.
        """
        return 2 * self.rank_map.lanes * self.exchange.segment_of(ITEM_BYTES[_FLOAT32], wire)

    # -------------------------------------------------------------------------------------------- anything else

    def run(
        self, schedule: Schedule, chunks: Sequence[Bytes | None], call: CollectiveSignature, fold: Fold | None = None
    ) -> None:
        """Run any schedule over all ranks on the given chunks; see `ExchangeRun` and `all_reduce`.

        Args:
            schedule: A verified one.
            chunks: Their memory, by number.
            call: What is called.
            fold: The reduction; None: that of the call.
        """
        plan = plan_messages(schedule, self.rank_map.rank)
        self.wait_all()
        with self.attributing_errors(schedule.name, Operation(call, schedule.name)):
            request = ExchangeRequest(plan, ITEM_BYTES[call.dtype], fold or make_fold(call.dtype, call.op), call)
            ExchangeRun(self.exchange, request, chunks).run()

    def close(self, *, patience_s: float = 5.0) -> None:
        """Leave; peers that need this rank find out. What is on its way to peers that have not left yet, arrives."""
        if self._broken is None:
            self._broken = ClosedError("the communicator is closed on this rank")
        self.exchange.transport.close(patience_s=patience_s)
        self.native.close()
        # Neither may refer to this any longer: it is freed without waiting for the garbage collector.
        self.exchange.transport.waits_inside = lambda: NOBODY
        self.exchange.transport.on_failure = int  # does nothing
        self.channels.close(_WORKERS_END_S)

    # -------------------------------------------------------------------------------------------- failures

    @contextmanager
    def attributing_errors(self, label: str, begins: object = None) -> Iterator[None]:
        """Turn what goes wrong in a collective into the error that names the culprit, and inform the other ranks.

        Args:
            label: The collective, for messages to the user.
            begins: What peers are told of it, where it begins here; None: it was begun before, and is pending.
        """
        if self._broken is not None:
            raise type(self._broken)(str(self._broken), self._broken.ranks) from self._broken
        transport = self.exchange.transport
        if begins is not None:
            self.begun += 1
            if not self.pending:
                transport.doing, transport.number = begins, self.begun
        try:
            with self._interruptible:
                yield
            first = self.pending[0] if self.pending else None
            transport.doing = first.operation if first is not None else ""
            transport.number = first.number if first is not None else self.begun
        except BaseException as error:
            self._fail(label, error)

    def _fail(self, label: str, error: BaseException) -> NoReturn:
        """Inform the other ranks, end what is under way, and raise the error that names the culprit."""
        first = self.exchange.transport.fail(attribution.cause_of(error, self.rank_map))
        self.channels.drain(_LAST_JOBS_S)
        explained = attribution.explain(label, first, error, self.rank_map, self._timeout_s)
        self._broken = explained
        if self._interruptible.interrupted and isinstance(
            error, Exception
        ):  # Python's own KeyboardInterrupt was dropped
            raise KeyboardInterrupt from explained
        if explained is error or not isinstance(error, Exception):
            raise error
        raise explained from error

    def _absent_rank(self) -> int:
        """Return the rank of this host that has not arrived where this one waits for it."""
        absent = self.host_slices.communicator.absent() if self.host_slices is not None else []
        return self.rank_map.hosts[self.rank_map.host][absent[0]] if absent else NOBODY

    def _abort_others(self) -> None:
        """End what is under way beside messages, so that nobody waits there for ranks that have given up."""
        self.native.abort()
        if self.host_slices is not None:
            self.host_slices.communicator.abort()
