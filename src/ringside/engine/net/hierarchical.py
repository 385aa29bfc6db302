"""Collectives among ranks on several hosts: a schedule over messages, shared memory inside a host.

An all-reduce goes one of three ways (`ringside.engine.choice`): over all ranks as if every one were alone; over hosts,
where the ranks of a host first add up in shared memory so that each carries one slice between hosts, and share the
result afterwards; over leaders, the same with one carrier per host. Large tensors go over hosts in blocks, so that a
block is added up inside the host while the one before it is between hosts.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NoReturn, Protocol

import numpy as np

from ringside.engine.algorithm import NATIVE, AlgorithmSpec
from ringside.engine.dtypes import DTYPES, ITEM_BYTES
from ringside.engine.net import attribution as blame
from ringside.engine.net.exchange.compression import WireCompression
from ringside.engine.net.exchange.exchange import Exchange
from ringside.engine.net.exchange.message_size import MessageSize
from ringside.engine.net.exchange.pipeline import SegmentLayout, lane_bounds, lay_out
from ringside.engine.net.exchange.plan import MessagePlan, plan_messages
from ringside.engine.net.exchange.signature import CollectiveSignature, Operation
from ringside.engine.net.host_slices import HostSlices
from ringside.engine.net.persistent import MOST_BYTES, PersistentLarge, PersistentSmall, lane_lengths
from ringside.engine.net.rank_map import RankMap
from ringside.engine.net.reduction import (
    ALL_REDUCE,
    AVG,
    SUM,
    Reduction,
    ReductionPlan,
    fold,
    folder,
    memory,
    part_of,
    safe_mean,
    told_of,
)
from ringside.engine.runtime.interrupts import interruptible
from ringside.engine.runtime.worker import Work, Worker
from ringside.engine.transports.base import NOBODY, Bytes, LinkFailure
from ringside.errors import ClosedError, SyncError, UsageError
from ringside.schedule import Schedule, chunk_bounds

__all__ = ["ALL_REDUCE", "Channels", "HierarchicalEngine", "NativeAllReduce", "PendingAllReduce", "Reduction"]


# -------------------------------------------------------------------------------------------------
# All-reduces that were begun and not finished, two of them beside each other, and what carries each.


class PendingAllReduce:
    """An all-reduce that was begun.

    Args:
        across: Who carries it out.
        way: How, in words.
        doing: What peers are told.
        rest: What is left to do; None: nothing.
        side: Which of the exchanges carries it: one that is begun before another is finished takes the other one.
    """

    def __init__(
        self,
        across: HierarchicalEngine,
        way: str,
        doing: Operation,
        rest: Callable[[], None] | None = None,
        side: int = 0,
    ) -> None:
        self.doing, self.side = doing, side
        self._across, self._way, self._rest = across, way, rest

    def finish(self) -> None:
        """Return when the result is there; raise what `HierarchicalEngine.all_reduce` raises."""
        while self._rest is not None and self._across._open and self._across._open[0] is not self:
            self._across._open[0].finish()
        if self._rest is None:
            return
        with self._across.explained(self._way, self.doing):
            rest, self._rest = self._rest, None
            try:
                rest()
            finally:
                self._across._open.popleft()


class Channels:
    """Exchanges whose collectives are under way at the same time, each on a thread of its own, made when needed.

    Which side carries what must follow from the order of the calls alone, so that all ranks take the same.

    Args:
        exchange: The first side's.
        name: Of the threads.
    """

    def __init__(self, exchange: Exchange, name: str) -> None:
        self._exchanges = [exchange]
        self._carriers: list[Worker] = []
        self._name = name

    def exchange(self, side: int) -> Exchange:
        """Return a side's exchange."""
        while len(self._exchanges) <= side:
            self._exchanges.append(self._exchanges[0].beside())
        return self._exchanges[side]

    def submit(self, side: int, job: Callable[[], None]) -> Work:
        """Carry a job out on a side's thread, after those before it."""
        while len(self._carriers) <= side:
            self._carriers.append(Worker(self._name))
        return self._carriers[side].submit(job)

    def stop(self, timeout_s: float) -> None:
        """End the threads; wait for each as long as told."""
        for carrier in self._carriers:
            carrier.stop(timeout_s)


_FLOAT32 = DTYPES.index("float32")
_MOST_PREPARED = 128  # kinds of small all-reduces that are kept ready
_LAST_JOBS_S = 5.0


class NativeAllReduce(Protocol):
    """The process group's own all-reduce."""

    def check(self, dtype: int, op: int) -> None:
        """Raise `UnsupportedError` for what it cannot reduce."""

    def all_reduce(self, data: Bytes, dtype: int, op: int, members: Sequence[int] | None) -> None:
        """Reduce in place over all ranks, or over the given ones (one per host); raise `LinkError`."""

    def prepare(
        self, data: Bytes, dtype: int, op: int, members: Sequence[int] | None
    ) -> Callable[[], Callable[[], object]]:
        """Return what begins `all_reduce` of data that are not empty and stay where they are, and returns its end."""

    def close(self) -> None:
        """Leave: nothing is under way here; peers that still need this rank hear of it."""

    def abort(self) -> None:
        """End what is under way, here and at the peers, as far as it can be ended; it may be on any thread."""


class HierarchicalEngine:
    """One rank's part in collectives between hosts. Not thread-safe: one collective at a time.

    Args:
        roster: Who is where.
        exchange: Messages to every rank of the group.
        local: Shared memory among the ranks of this host; None for a rank alone on its host.
        native: The group's own all-reduce.
        timeout_s: The transport's longest wait, seconds, for messages to the user.
        block_bytes: Tensors larger than this go over hosts in blocks of this size.

    Attributes:
        on_timeout: Called with another timeout, seconds: those who wait below.
        most_large: For how many large tensors, such as gradient buckets, all is kept ready.
    """

    most_large = 256

    def __init__(
        self,
        roster: RankMap,
        exchange: Exchange,
        local: HostSlices | None,
        native: NativeAllReduce,
        *,
        timeout_s: float,
        block_bytes: int = 8 << 20,
    ) -> None:
        self.roster, self.exchange, self.local = roster, exchange, local
        self.native = native
        self._timeout_s = timeout_s
        self._block_bytes = block_bytes
        self._sides = Channels(exchange, f"ringside-carrier-{roster.rank}")
        self._under_way: deque[Work] = deque(maxlen=4)
        self._broken: SyncError | None = None
        self._open: deque[PendingAllReduce] = deque()
        self._small: dict[tuple[int, Reduction, AlgorithmSpec], PersistentSmall | None] = {}
        self._large: dict[tuple[int, int, Reduction, AlgorithmSpec, float | None], PersistentLarge] = {}
        self._interruptible = self.interruptible()
        exchange.transport.waits_inside = self._waits_inside
        exchange.transport.on_failure = self._end_the_rest
        self.on_timeout: tuple[Callable[[float], object], ...] = ()

    def set_timeout(self, timeout_s: float) -> None:
        """Wait no longer than that for other ranks from now on, seconds."""
        self._timeout_s = timeout_s
        for tell in self.on_timeout:
            tell(timeout_s)

    def interruptible(self) -> interruptible:
        """Return what makes Ctrl-C end the collectives under way, for a main thread that waits for them in torch."""
        transport, left = self.exchange.transport, LinkFailure("left", self.roster.rank)
        return interruptible(functools.partial(transport.fail, left))

    def all_reduce(self, address: int, elements: int, what: Reduction, choice: AlgorithmSpec) -> None:
        """Reduce the elements at an address over all ranks of the group, in place.

        Args:
            address: Of the first element.
            elements: Their number, equal on all ranks.
            what: The reduction, equal on all ranks.
            choice: How; equal on all ranks.

        Raises:
            UsageError, UnsupportedError: It cannot be done that way; nothing was sent.
            PeerLostError, DeadlineError, MismatchError, ClosedError: The content is undefined and this is unusable.
        """
        small = self.prepared(elements, what, choice)
        if small is None:
            self.begin(address, elements, what, choice).finish()
        else:
            self.carry_out(small, address)

    def carry_out(self, small: PersistentSmall, address: int) -> None:
        """Reduce the elements at an address by what `prepared` returned; raises as `all_reduce` does."""
        self.finish_all()
        self._check_usable()
        transport = self.exchange.transport
        transport.doing = small.doing
        try:
            with self._interruptible:
                small.go(address)
            transport.doing = ""
        except BaseException as error:
            self._failed(small.way, error)

    def prepared(self, elements: int, what: Reduction, choice: AlgorithmSpec) -> PersistentSmall | None:
        """Return what is ready for a small all-reduce; None: it is too large, or cannot be made ready.

        Arguments and errors as for `all_reduce`.
        """
        if elements > MOST_BYTES or what.scales or what.storage is not None:
            return None
        key = (elements, what, choice)
        if key in self._small:
            return self._small[key]
        if len(self._small) >= _MOST_PREPARED:
            for small in filter(None, self._small.values()):
                small.end()
            self._small.clear()
        what = self._checked(what, choice)
        fits = PersistentSmall.fits(self, elements, what, choice)
        self._small[key] = PersistentSmall(self, elements, what, choice) if fits else None
        return self._small[key]

    def begin(self, address: int, elements: int, what: Reduction, choice: AlgorithmSpec) -> PendingAllReduce:
        """Begin an all-reduce; arguments and errors as for `all_reduce`.

        A large tensor is between hosts when this returns, and the next one may be begun before `finish` of this one,
        which must be called in the same order on all ranks. The messages of two travel beside each other, so links are
        busy where one of them fills or drains. Anything else that is called meanwhile finishes it first.
        """
        large = self._kept_large(address, elements, what, choice)
        if large is not None:
            side = 1 - self._open[-1].side if self._open else 0
            with self.explained(large.way, large.doing):
                one = PendingAllReduce(
                    self, large.way, large.doing, large.begin(self, side, alone=not self._open), side
                )
                self._open.append(one)
            return one
        what = self._checked(what, choice)
        call = told_of(what, elements)
        way, doing = f"all_reduce by {choice}", Operation(call, str(choice))
        self.finish_all()
        with self.explained(way, doing):
            if choice.over == "ranks":
                self._carry(choice, None, address, elements, what, call)
            else:
                self._in_blocks(choice, address, elements, safe_mean(what, self.roster.size), call)
        return PendingAllReduce(self, way, doing)

    def finish_all(self) -> None:
        """Finish what was begun before something else is done with messages or shared memory."""
        while self._open:
            self._open[0].finish()

    def _checked(self, what: Reduction, choice: AlgorithmSpec) -> Reduction:
        """Return the reduction as it travels; refuse what cannot be, before anything is sent."""
        if what.wire is not None and (what.dtype != _FLOAT32 or choice.algorithm == NATIVE):
            what = replace(what, wire=None)
        if choice.algorithm == NATIVE:
            self.native.check(what.dtype, what.op)
            return what
        schedule = choice.schedule(self.roster.size if choice.over == "ranks" else len(self.roster.hosts))
        if schedule.switches and self.exchange.transport.size == self.roster.size:
            raise UsageError(
                f"{choice} needs a reducer at the switch: start `python -m ringside.pytorch.in_network_reducer` there "
                "and make the communicator with switch=True"
            )
        if choice.over == "hosts" and schedule.switches:
            raise UsageError(f"the reducer at the switch takes one slice at a time: leaders/{choice.algorithm}")
        return what

    def run(
        self,
        schedule: Schedule,
        chunks: Sequence[Bytes | None],
        item_bytes: int,
        call: CollectiveSignature,
        *,
        scale: float = 1.0,
        divisor: float = 1.0,
    ) -> None:
        """Carry out any schedule over all ranks on the given chunks; see `Exchange.run` and `all_reduce`."""
        plan = plan_messages(schedule, self.roster.rank)
        self.finish_all()
        with self.explained(plan.name, Operation(call, plan.name)):
            fold_by = folder(call.dtype, call.op, scale=scale, divisor=divisor)
            self.exchange.run(plan, chunks, item_bytes, fold_by, call)

    def close(self, *, patience_s: float = 5.0) -> None:
        """Leave; peers that need this rank hear of it. What is on its way to peers that have not left yet, arrives."""
        if self._broken is None:
            self._broken = ClosedError("the communicator is closed on this rank")
        self.exchange.transport.close(patience_s=patience_s)
        self.native.close()
        self.exchange.transport.waits_inside = lambda: NOBODY
        self.exchange.transport.on_failure = int  # nothing; neither refers to this
        self._sides.stop(1.0)

    # -------------------------------------------------------------------------------------------- over hosts

    def pieces_from_bytes(self, wire: WireCompression | None) -> int:
        """Return from how many bytes on float32 goes over hosts in pieces, by most schedules; over leaders it is less.

        Args:
            wire: How elements travel, where not as they are.
        """
        return 2 * self.roster.lanes * self.exchange.segment_of(ITEM_BYTES[_FLOAT32], wire)

    def _layout(self, choice: AlgorithmSpec, elements: int, what: Reduction) -> SegmentLayout | None:
        """Return the pieces in which a tensor goes over hosts; None: it is small, or cannot be fed in pieces."""
        if choice.over == "ranks" or choice.algorithm == NATIVE:
            return None
        item, lanes = ITEM_BYTES[what.dtype], self._lanes(choice)
        least = lanes * self.exchange.segment_of(item, what.wire) // item
        plan = plan_messages(choice.schedule(len(self.roster.hosts)), self.roster.host)
        if plan.switches or not plan.finished or elements < 2 * least:
            return None
        return lay_out(plan, elements, least, self._block(what), lanes, self.roster.local_size)

    def _message_size(self, choice: AlgorithmSpec, elements: int, what: Reduction) -> MessageSize:
        """Return how large the messages are in which a tensor goes over hosts in pieces."""
        item = ITEM_BYTES[what.dtype]
        schedule = choice.schedule(len(self.roster.hosts))
        return self.exchange.size_of(schedule, elements // self._lanes(choice) * item, item, what.wire)

    def _kept_large(
        self, address: int, elements: int, what: Reduction, choice: AlgorithmSpec
    ) -> PersistentLarge | None:
        """Return what is ready for a large all-reduce over hosts; None: it goes another way.

        Arguments and errors as for `all_reduce`.
        """
        if choice.over == "ranks" or choice.algorithm == NATIVE:
            return None
        key = (address, elements, what, choice, self.exchange.bytes_per_s)
        large = self._large.pop(key, None)
        if large is None:
            what = self._checked(what, choice)
            doing, what = Operation(told_of(what, elements), str(choice)), safe_mean(what, self.roster.size)
            layout = self._layout(choice, elements, what)
            if layout is None:
                return None
            size = self._message_size(choice, elements, what)
            large = PersistentLarge(self, layout, address, what, choice, size, doing)
        if not what.scales:  # these differ from call to call
            self._large[key] = large  # as the last one: the first is the one that was not used for longest
            if len(self._large) > self.most_large:
                del self._large[next(iter(self._large))]
        return large

    def rehearse(self, elements: int, what: Reduction, choice: AlgorithmSpec) -> None:
        """Work out here what the first all-reduce of its kind would: to be timed, it should be like those that follow.

        Sends nothing; arguments as for `all_reduce`.
        """
        lane, item = self.roster.local_rank, ITEM_BYTES[what.dtype]
        if choice.algorithm == NATIVE or (choice.over != "ranks" and not self.carries(choice)):
            return
        if choice.over == "ranks":
            vertices, me, count = self.roster.size, self.roster.rank, elements
        else:
            vertices, me = len(self.roster.hosts), self.roster.host
            bounds = lane_bounds(min(elements, self._block(what)), self._lanes(choice), self.roster.local_size)
            count = bounds[lane + 1] - bounds[lane]
        plan, layout = plan_messages(choice.schedule(vertices), me), self._layout(choice, elements, what)
        if layout is None:
            size = self.exchange.size_of(plan.schedule, count * item, item, what.wire)
            chunks = [[int(part)] for part in np.diff(chunk_bounds(count, plan.chunks)) * item]
        else:
            size, chunks = self._message_size(choice, elements, what), lane_lengths(layout, lane, item)
        self.exchange.rehearse(plan, me, chunks, item, what.wire, size, evenly=layout is not None)

    def carries(self, choice: AlgorithmSpec) -> bool:
        """Tell whether this rank has a part of what goes between hosts."""
        lane = self.roster.local_rank
        return lane < self.roster.lanes and (lane == 0 or choice.over == "hosts")

    def _lanes(self, choice: AlgorithmSpec) -> int:
        return 1 if choice.over == "leaders" else self.roster.lanes

    def _block(self, what: Reduction) -> int:
        return max(self._block_bytes // ITEM_BYTES[what.dtype], 1)

    def _in_blocks(
        self, choice: AlgorithmSpec, address: int, elements: int, what: Reduction, call: CollectiveSignature
    ) -> None:
        """Go through the tensor block by block: each is between hosts while the next is added up."""
        item, block = ITEM_BYTES[what.dtype], self._block(what)
        between: tuple[int, tuple[int, ...], Work | None] | None = None
        for start in range(0, max(elements, 1), block):
            count = min(block, elements - start)
            at, bounds = address + start * item, lane_bounds(count, self._lanes(choice), self.roster.local_size)
            self._gather_up(at, bounds, what)
            job = functools.partial(self._between_hosts, choice, at, bounds, what, call)
            if elements <= block:
                job()
                work = None
            else:
                work = self.start(job)
            before, between = between, (at, bounds, work)
            if before is not None:
                self._share(*before, what)
        assert between is not None
        self._share(*between, what)

    def _gather_up(self, at: int, bounds: Sequence[int], what: Reduction) -> None:
        if self.local is not None:
            step = SUM if what.op == AVG else what.op
            self.local.reduce_lanes(at, bounds, what.dtype, step, what.scale, bool(what.scales), what.storage)
        elif what.scale != 1.0:
            fold([at], at, bounds[-1], what.dtype, SUM, scale=what.scale)

    def start(self, job: Callable[[], None], side: int = 0) -> Work:
        """Let this rank's slice go between hosts, beside what comes next."""
        work = self._sides.submit(side, job)
        self._under_way.append(work)
        return work

    def exchange_of(self, side: int) -> Exchange:
        """Return the exchange whose messages travel beside those of the other side."""
        return self._sides.exchange(side)

    def _between_hosts(
        self, choice: AlgorithmSpec, at: int, bounds: Sequence[int], what: Reduction, call: CollectiveSignature
    ) -> None:
        lane = self.roster.local_rank
        begin, count = bounds[lane], bounds[lane + 1] - bounds[lane]
        if self.carries(choice):
            mine = at + begin * ITEM_BYTES[what.dtype]
            inside = replace(what, scale=1.0, scales=())
            self._carry(choice, self.roster.lane(lane), mine, count, inside, call._replace(elements=count))

    def _share(self, at: int, bounds: Sequence[int], work: Work | None, what: Reduction) -> None:
        if work is not None:
            work.wait()
        if self.local is not None:
            self.local.gather_lanes(at, bounds, what.dtype, what.storage)

    # -------------------------------------------------------------------------------------------- messages

    def _carry(
        self,
        choice: AlgorithmSpec,
        members: Sequence[int] | None,
        address: int,
        elements: int,
        what: Reduction,
        call: CollectiveSignature,
    ) -> None:
        """Reduce over all ranks, or over the given ones, as if each were a host of its own."""
        part = part_of(choice, members, what, call, self.roster)
        if part.first != 1.0:
            fold([address], address, elements, what.dtype, SUM, scale=part.first)
        if part.plan is None:
            data = memory(address, elements * ITEM_BYTES[what.dtype])
            self.native.all_reduce(data, what.dtype, part.native_op, members)
        else:
            self._exchange(part, part.plan, members, address, elements)
        if part.divisor:
            fold([address], address, elements, what.dtype, AVG, divisor=part.divisor)

    def _exchange(
        self, part: ReductionPlan, plan: MessagePlan, members: Sequence[int] | None, address: int, elements: int
    ) -> None:
        item = ITEM_BYTES[part.what.dtype]
        bounds, data = (chunk_bounds(elements, plan.chunks) * item).tolist(), memory(address, elements * item)
        self.exchange.run(
            plan,
            [data[bounds[c] : bounds[c + 1]] for c in range(plan.chunks)],
            item,
            part.fold,
            part.call,
            last_fold=part.last_fold,
            members=None if members is None else (*members, *range(self.roster.size, self.exchange.transport.size)),
            wire=part.what.wire,
            ordered=True,
            size=self.exchange.size_of(plan.schedule, elements * item, item, part.what.wire),
        )

    # -------------------------------------------------------------------------------------------- failures

    @contextlib.contextmanager
    def explained(self, what: str, doing: Operation) -> Iterator[None]:
        """Turn what goes wrong in a collective into the error that says who, and tell the other ranks."""
        self._check_usable()
        if not self._open:
            self.exchange.transport.doing = doing
        try:
            with self._interruptible:
                yield
            self.exchange.transport.doing = self._open[0].doing if self._open else ""
        except BaseException as error:
            self._failed(what, error)

    def _check_usable(self) -> None:
        if self._broken is not None:
            raise type(self._broken)(str(self._broken), self._broken.ranks) from self._broken

    def _failed(self, what: str, error: BaseException) -> NoReturn:
        """Tell the other ranks, end what is under way, and raise the error that says who."""
        first = self.exchange.transport.fail(blame.cause_of(error, self.roster))
        for work in self._under_way:  # they work in the caller's memory
            with contextlib.suppress(BaseException):
                work.wait(_LAST_JOBS_S)
        explained = blame.explain(what, first, error, self.roster, self._timeout_s)
        self._broken = explained
        if self._interruptible.interrupted and isinstance(
            error, Exception
        ):  # Python's own KeyboardInterrupt was dropped
            raise KeyboardInterrupt from explained
        if explained is error or not isinstance(error, Exception):
            raise error
        raise explained from error

    def _waits_inside(self) -> int:
        """Return the rank of this host that has not arrived where this one waits for it."""
        absent = self.local.absent() if self.local is not None else []
        return self.roster.hosts[self.roster.host][absent[0]] if absent else NOBODY

    def _end_the_rest(self) -> None:
        """End what is under way beside messages, so that nobody waits there for ranks that have given up."""
        self.native.abort()
        if self.local is not None:
            self.local.abort()
