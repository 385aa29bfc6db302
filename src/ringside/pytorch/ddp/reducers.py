"""Who carries gradient buckets between ranks: Ringside's engine, the process group's own collective, a user's hook.

A carrier takes buckets while backward is still computing, is waited for when backward has no work left, and then tells
what the synchronisation took.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from ringside.engine.buffers import flatten
from ringside.engine.runtime.interrupts import interruptible
from ringside.engine.runtime.lifecycle import FINISH_S
from ringside.engine.runtime.queue import PATIENCE_S, CollectiveQueue, QueuedCollective
from ringside.engine.settings import Settings
from ringside.engine.shm.communicator import HostCommunicator
from ringside.engine.shm.log import PATHS, Totals
from ringside.errors import UnsupportedError
from ringside.monitor.job.collectives import CollectiveMeter, CollectiveSpan
from ringside.monitor.step_clock.device_events import DeviceEvents
from ringside.monitor.step_clock.draft import SyncTimes, Told
from ringside.pytorch.communicator.communicator import Communicator as GroupCommunicator
from ringside.pytorch.ddp.bucket_memory import share_buckets
from ringside.pytorch.ddp.bucket_pipeline import BucketPipeline
from ringside.pytorch.shared_storage import SharedStorages
from ringside.pytorch.store import OwnTimeout

__all__ = ["DeferredErrors"]


# -------------------------------------------------------------------------------------------------
# What went wrong with gradient buckets, which backward is to tell of in its own words.
#
# Of a bucket's future that fails `backward` tells in a `RuntimeError`, whatever went wrong; and where an error is
# raised before DDP has waited for its buckets, DDP is of no more use. So no future fails, and the error comes
# afterwards.


class DeferredErrors:
    """What went wrong with the buckets of one backward.

    Errors come on whichever thread carried a bucket, the rest is called where backward runs.

    Attributes:
        is_heard: `end` is going to be called; else only a bucket's future can tell what went wrong with it.
    """

    def __init__(self) -> None:
        self.is_heard = False
        self._problems: list[Exception] = []

    @property
    def is_fine(self) -> bool:
        """Whether nothing has gone wrong so far."""
        return not self._problems

    def takes(self, error: Exception) -> bool:
        """Take a bucket's error, to be raised by `end`; False: the bucket's future is to tell it."""
        self._problems.append(error)
        return self.is_heard

    def begin(self) -> None:
        """A backward begins; the one before it may have been broken off."""
        self._problems = []

    def end(self) -> None:
        """DDP does not wait any longer; raise what went wrong first."""
        error = self._problems[0] if self._problems else None
        self._problems = []
        if error is not None:
            try:
                raise error
            finally:
                del error  # or it would keep this frame, and the frame it


Future = torch.futures.Future
SPANS_KEPT = 4096
_REFUSAL = "the model's gradients are no longer carried on this rank (or this is a forked child of it)"
_NAMES = tuple(f"ringside/{path}" for path in PATHS)
UserHook = Callable[[Any, GradBucket], "Future[torch.Tensor]"]


def _nothing() -> SyncTimes:
    """Say what was not carried took."""
    return SyncTimes(wait_seconds=math.nan)


class BucketReducer(Protocol):
    """Synchronises the gradients of one model.

    Attributes:
        counters: Collectives by who carried them, such as `ringside/push` or `gloo`.
        is_heard: Whether `wait` is going to be called for the bucket that comes next, and tells what goes wrong.
    """

    counters: Counter[str]
    is_heard: bool

    def carry(self, bucket: GradBucket, share: float | None = None) -> Future[torch.Tensor]:
        """Start averaging a bucket over the ranks; or with a share, summing what is multiplied by each rank's."""

    def leave(self) -> bool:
        """Let DDP wait for one bucket after the other, and copy each while others are under way; `wait` comes after.

        What goes wrong meanwhile is not told to DDP, but raised by `wait`. False: `wait` is to come first.
        """

    def wait(self) -> None:
        """Wait for every bucket of this backward; raise what went wrong."""

    def ended(self) -> float:
        """Return when the newest bucket was done, on the performance counter."""

    def take(self) -> Told:
        """Set apart what this backward's synchronisation took, to be told later."""

    def give_up(self) -> bool:
        """After an error, end what is under way, so that DDP waits for none of it; False: the group tells it again."""

    def close(self, *, at_once: bool = False) -> None:
        """Let go of what the carrier holds, after or (at once) before what is under way is done."""


class NativeReducer:
    """The process group's own all-reduce, only watched.

    Attributes:
        marks: Time collectives by marks on the model's device; None: by the host's clock.
    """

    _leaves = True  # DDP may wait for what it carries

    def __init__(self, group: dist.ProcessGroup, counters: Counter[str] | None = None) -> None:
        self.is_heard = False
        self._group, self._scale = group, 1.0 / dist.get_world_size(group)
        self._name = str(dist.get_backend(group))
        self._under_way: list[Future[Any]] = []
        self._latest: dist.Work | None = None
        self.marks: DeviceEvents | None = None
        self._spans: deque[CollectiveSpan] = deque(maxlen=SPANS_KEPT)
        self._meter = CollectiveMeter()
        self._left = DeferredErrors()
        self._ended = 0.0
        self.counters: Counter[str] = Counter() if counters is None else counters

    def carry(self, bucket: GradBucket, share: float | None = None) -> Future[torch.Tensor]:
        """Start the group's all-reduce, to the bit as DDP would without a hook (it multiplies by 1/size)."""
        buffer = bucket.buffer().mul_(self._scale if share is None else share)
        return self._start(bucket, lambda: self._all_reduce(buffer))

    def _all_reduce(self, buffer: torch.Tensor) -> Future[Any]:
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None  # every member of the group gets a Work when it asks for one
        if not buffer.is_cpu:
            self._latest = work
        future: Future[Any] = work.get_future()
        return future

    def _start(self, bucket: GradBucket, launch: Callable[[], Future[Any]]) -> Future[torch.Tensor]:
        buffer, now = bucket.buffer(), time.perf_counter if self.marks is None else self.marks.mark
        began, size_bytes = now(), buffer.numel() * buffer.element_size()
        if bucket.index() == 0:
            self._under_way = [future for future in self._under_way if not future.done()]
            self._left.begin()
        self._left.is_heard = self.is_heard and buffer.is_cpu

        # A thread of Gloo lets go of the callback after everybody has gone on. If that kept the group alive, the thread
        # would end the group there, waiting for itself.
        weak = weakref.ref(self)

        def done(future: Future[Any]) -> torch.Tensor:
            carrier, ended = weak(), now()
            if carrier is not None:
                carrier._ended = time.perf_counter()
            try:
                value = future.value()
            except Exception as error:
                if carrier is not None and carrier._leaves and carrier._left.takes(error):
                    return buffer
                raise
            if carrier is not None:
                carrier._spans.append(CollectiveSpan(began, ended, size_bytes))
            tensor: torch.Tensor = value[0] if isinstance(value, list) else value
            return tensor

        self.counters[self._name] += 1
        future = launch().then(done)
        if buffer.is_cpu:  # on a GPU, waiting here would stop the host from running ahead
            self._under_way.append(future)
        return future

    def leave(self) -> bool:
        """Let DDP wait, as it would without a hook."""
        return self._leaves and self.carries and self._left.is_heard and self._left.is_fine

    @property
    def carries(self) -> bool:
        """Whether it has carried buckets of this backward, not on a device."""
        return bool(self._under_way)

    def begin(self) -> None:
        """A backward begins; the one before it may have been broken off."""
        self._left.begin()

    def wait(self) -> None:
        """Wait for the group."""
        futures, self._under_way = self._under_way, []
        for future in futures:
            future.wait()
        self._left.end()

    def ended(self) -> float:
        """Return when it was done with the newest bucket, on the performance counter."""
        return self._ended

    @property
    def idle(self) -> bool:
        """Whether it has carried nothing since it last told."""
        return not self._spans

    def pending(self) -> bool:
        """Tell whether the newest collective of a device is not done; for the hang watch, as nobody waits for it."""
        return self._latest is not None and not self._latest.is_completed()

    def take(self) -> Told:
        """Set apart what it took; who was late is found later, by comparing ranks."""
        spans, self._spans = self._spans, deque(maxlen=SPANS_KEPT)
        return functools.partial(self._told, spans, self.marks)

    def _told(self, spans: Collection[CollectiveSpan], marks: DeviceEvents | None) -> SyncTimes:
        if marks is not None:
            spans = marks.timed(spans)
        return SyncTimes(
            sync_seconds=sum(span.ended - span.began for span in spans),
            wait_seconds=math.nan,
            payload_bytes=sum(span.size_bytes for span in spans),
            collectives=len(spans),
            busy_seconds=self._meter.add(spans),
            latency_seconds=self._meter.latency_seconds,
        )

    def give_up(self) -> bool:
        """Leave it to the group, which is as broken as it is without us."""
        return False

    def close(self, *, at_once: bool = False) -> None:
        """Nothing is held."""


class UserHookReducer(NativeReducer):
    """A communication hook of the user's own, only watched."""

    _leaves = False

    def __init__(self, group: dist.ProcessGroup, state: Any, hook: UserHook, counters: Counter[str]) -> None:
        super().__init__(group, counters)
        self._state, self._hook = state, hook
        self._name = f"hook:{getattr(hook, '__qualname__', type(hook).__name__)}"

    def carry(self, bucket: GradBucket, share: float | None = None) -> Future[torch.Tensor]:
        """Call the user's hook, which divides by what it wants to."""
        return self._start(bucket, lambda: self._hook(self._state, bucket))


class RingsideReducer:
    """Ringside's engine; the host's ranks map each other's buckets where those lie in shared memory.

    DDP's first buckets are private: it rebuilds them after the first backward, and then they are shared.

    A thread carries buckets while backward computes. On one host the last one is left to whoever waits for it, which is
    the thread that computed: handed to another thread it is carried out on another processor, where the rank it wakes
    has slept, and a scheduler that looks no further lets the two share that one while the first lies idle. Between
    hosts, where the last one takes longer, that thread copies meanwhile what the others have brought.

    Attributes:
        communicator: As given.
        memory: How many buckets, and bytes, are shared and copied; {} before the first backward.
        on_memory: Called with that after the first backward, and whenever it is another.
        patience_s: How long the last bucket on one host is left to whoever waits for it, seconds.
    """

    patience_s = PATIENCE_S

    def __init__(self, communicator: HostCommunicator | GroupCommunicator, group: dist.ProcessGroup) -> None:
        self.communicator = communicator
        self._timeout = OwnTimeout(group)
        self._native = NativeReducer(group)
        self._buckets = SharedStorages(
            communicator.local if isinstance(communicator, GroupCommunicator) else communicator
        )
        self._scale = 1.0 / communicator.size
        self._begin: Callable[..., Callable[[], None] | None] = communicator.all_reduce_storage
        self._interruptible: interruptible | None = None
        if isinstance(communicator, GroupCommunicator):
            self._begin, self._interruptible = communicator.begin_storage, communicator.interruptible()
        self.is_heard = self._is_given_up = False
        self._left, self._ended = DeferredErrors(), 0.0
        self._pipeline = BucketPipeline()
        self._turns = CollectiveQueue(f"ringside-{communicator.rank}-buckets", _REFUSAL)
        self._under_way: list[QueuedCollective] = []
        self._buffers: list[tuple[Future[torch.Tensor], torch.Tensor]] = []  # of the backward under way
        self._spans: deque[CollectiveSpan] = deque(maxlen=SPANS_KEPT)
        self._meter = CollectiveMeter()
        self.counters = self._native.counters
        self.memory: dict[str, int] = {}
        self.on_memory: Callable[[dict[str, int]], None] = lambda memory: None
        # The model may simply be forgotten: the communicator's thread must not outlive it.
        weakref.finalize(self, _leave, self._turns, communicator, self._interruptible).atexit = False

    def carry(self, bucket: GradBucket, share: float | None = None) -> Future[torch.Tensor]:
        """Line the bucket up; a dtype that the engine does not know goes to the group."""
        stamp_ns = time.monotonic_ns()
        buffer = bucket.buffer()
        self._left.is_heard = self._native.is_heard = self.is_heard
        if self._is_given_up:  # in the middle of this backward, whose end tells of it
            base: Future[torch.Tensor] = Future()
            base.set_result(buffer)
            return base
        try:
            flat = flatten(buffer)
        except UnsupportedError:
            return self._native.carry(bucket, share)
        if share is not None:
            buffer.mul_(share)
        scale = self._scale if share is None else 1.0
        storage = self._buckets.storage_of(bucket.index(), buffer)
        if bucket.index() == 0:  # nobody waits for those of a rank that has joined (DDP's Join)
            self._stop_listening()
            if self._timeout.has_changed():
                communicator = self.communicator
                communicator.set_timeout(Settings.of_environment(timeout_s=self._timeout.seconds()).timeout_s)
            self._left.begin()
            self._native.begin()
            self._buffers.clear()
            self._under_way = [turn for turn in self._under_way if not turn.is_completed()]
        if bucket.is_last():
            self._buckets.keep(bucket.index() + 1)
        base = Future()
        size_bytes = buffer.numel() * buffer.element_size()
        problems: list[Exception] = []
        left, last = self._left, bucket.is_last()  # the bucket itself is DDP's, and gone when the job runs

        def begin() -> Callable[[], None] | None:
            return self._begin(flat, storage, scale=scale, stamp_ns=stamp_ns)

        def done(error: Exception | None) -> None:
            self._spans.append(CollectiveSpan(stamp_ns * 1e-9, time.monotonic(), size_bytes))
            self._ended = time.perf_counter()
            if error is not None and not left.takes(error):
                problems.append(error)
            _complete(base, buffer)

        def job() -> None:
            self._pipeline.add(begin, done, last=last)

        def check(future: Future[torch.Tensor]) -> torch.Tensor:
            # DDP must be told by a callback that raises; any other way ends the process inside backward.
            if problems:
                raise problems[0]
            return future.value()

        result = base.then(check)
        if self.is_heard:
            self._buffers.append((base, buffer))
        self._under_way.append(self._turns.start(job, self.patience_s if last and self._interruptible is None else 0.0))
        return result

    def leave(self) -> bool:
        """Between hosts, let DDP wait, where Ctrl-C still ends what it waits for."""
        if self._interruptible is None or self._native.carries or not (self._left.is_heard and self._left.is_fine):
            return False
        self._interruptible.start()
        return True

    def share_buckets(self, model: DistributedDataParallel, backwards: Callable[[], int]) -> None:
        """Have the model's buckets made in memory that the host's ranks can map, if there are several."""
        if self._buckets.are_shared:
            share_buckets(model, backwards)

    def _stop_listening(self) -> None:
        """Stop listening for Ctrl-C: DDP waits no longer, or has given up."""
        if self._interruptible is not None:
            self._interruptible.stop()

    def wait(self) -> None:
        """Wait for the engine, and for the group where it carried something."""
        turns, self._under_way = self._under_way, []
        self._stop_listening()
        first: Exception | None = None
        for turn in turns:  # one that fails lets those after it fail, too: then all futures are done
            try:
                turn.wait()
            except Exception as error:
                if error is not turn.error:  # a signal's handler raised it
                    raise
                first = first or error
        self._native.wait()
        self._left.end()
        if first is not None:
            raise first
        self._buffers.clear()
        news = self._buckets.news()
        if news:
            self.memory = news
            self.on_memory(news)

    def ended(self) -> float:
        """Return when the newest bucket was done, on the performance counter."""
        return self._ended

    def take(self) -> Told:
        """Read from the engine's log who arrived when."""
        native = _nothing if self._native.idle else self._native.take()
        spans, self._spans = self._spans, deque(maxlen=SPANS_KEPT)
        totals = self.communicator.log.totals()
        for name, count in zip(_NAMES, totals.by_path, strict=True):
            if count:
                self.counters[name] += count
        for name, count in totals.by_name.items():
            self.counters[f"ringside/{name}"] += count
        return functools.partial(self._told, spans, totals, native)

    def _told(self, spans: Collection[CollectiveSpan], totals: Totals, told: Told) -> SyncTimes:
        native, busy = told(), self._meter.add(spans)
        if not totals.collectives:
            return native
        return SyncTimes(
            sync_seconds=totals.sync_ns * 1e-9 + native.sync_seconds,
            wire_seconds=totals.wire_ns * 1e-9,
            wait_seconds=totals.last_wait_ns * 1e-9,
            payload_bytes=totals.payload_bytes + native.payload_bytes,
            collectives=totals.collectives + native.collectives,
            busy_seconds=busy + native.busy_seconds,
            latency_seconds=self._meter.latency_seconds or native.latency_seconds,
        )

    def give_up(self) -> bool:
        """Tell the other ranks, and let nobody write into this rank's buckets any more."""
        self._is_given_up = True
        self.close(at_once=True)
        buffers, self._buffers = self._buffers, []
        for base, buffer in buffers:  # those of a thread that does not end in time
            _complete(base, buffer)
        return True

    def close(self, *, at_once: bool = False) -> None:
        """Leave the communicator."""
        self._stop_listening()
        if at_once:
            self._turns.close(self.communicator.abort, 0.0)
        else:
            self._turns.close(self.communicator.close, FINISH_S)


def _complete(future: Future[torch.Tensor], buffer: torch.Tensor) -> None:
    """Tell DDP that a bucket is done, unless it was told when the bucket was given up."""
    with contextlib.suppress(RuntimeError):
        if not future.done():
            future.set_result(buffer)


def _leave(
    turns: CollectiveQueue, communicator: HostCommunicator | GroupCommunicator, listening: interruptible | None
) -> None:
    """Leave the communicator of a carrier that is forgotten."""
    if listening is not None:
        listening.stop()
    turns.close(communicator.close, FINISH_S)
