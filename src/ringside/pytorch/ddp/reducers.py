"""What averages gradient buckets: Ringside's engine, the process group's own collective, or a hook of the user's.

A reducer is given buckets while backward is still computing, is waited for when backward has no work left, and then
reports what the synchronisation took.
"""

from __future__ import annotations

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
from torch.futures import Future
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
from ringside.pytorch.communicator.communicator import GroupCommunicator
from ringside.pytorch.ddp.bucket_memory import share_buckets
from ringside.pytorch.ddp.bucket_pipeline import SPANS_KEPT, BucketAllReduce, BucketPipeline, DeferredErrors
from ringside.pytorch.shared_storage import SharedStorages
from ringside.pytorch.store import OwnTimeout

_REFUSAL = "the model's gradients are no longer carried on this rank (or this is a forked child of it)"
_NAMES = tuple(f"ringside/{path}" for path in PATHS)
UserHook = Callable[[Any, GradBucket], "Future[torch.Tensor]"]


class BucketReducer(Protocol):
    """Synchronises the gradients of one model.

    Attributes:
        counters: Collectives by what reduced them, such as `ringside/push` or `gloo`.
        will_wait: Whether `wait` is going to be called for the bucket that comes next, and raises what goes wrong.
    """

    counters: Counter[str]
    will_wait: bool

    def reduce(self, bucket: GradBucket, share: float | None = None) -> Future[torch.Tensor]:
        """Start averaging a bucket over the ranks; or with a share, summing what is multiplied by each rank's."""

    def defer_wait(self) -> bool:
        """Let DDP wait for one bucket after the other, and copy each while others are under way; `wait` comes after.

        What goes wrong meanwhile does not reach DDP, but is raised by `wait`. False: `wait` has to come first.
        """

    def wait(self) -> None:
        """Wait for every bucket of this backward; raise what went wrong."""

    def ended(self) -> float:
        """Return when the newest bucket was done, on the performance counter."""

    def pop_timings(self) -> Told:
        """Set apart what this backward's synchronisation took; the result works it out, on any thread and later."""

    def abort(self) -> bool:
        """After an error, end all that is under way, so that DDP waits for none; False: the group reports it again."""

    def close(self, *, at_once: bool = False) -> None:
        """Release what the reducer holds, after or (at once) before what is under way is done."""


class NativeReducer:
    """The process group's own all-reduce, only watched.

    Attributes:
        marks: Time collectives by events on the model's device; None: by the host's clock.
    """

    _defers = True  # DDP may wait for what it reduces

    def __init__(self, group: dist.ProcessGroup, counters: Counter[str] | None = None) -> None:
        self.will_wait = False
        self._group, self._scale = group, 1.0 / dist.get_world_size(group)
        self._name = str(dist.get_backend(group))
        self._under_way: list[Future[Any]] = []
        self._latest: dist.Work | None = None
        self.marks: DeviceEvents | None = None
        self._spans: deque[CollectiveSpan] = deque(maxlen=SPANS_KEPT)
        self._meter = CollectiveMeter()
        self._errors = DeferredErrors()
        self._ended = 0.0
        self.counters: Counter[str] = Counter() if counters is None else counters

    def reduce(self, bucket: GradBucket, share: float | None = None) -> Future[torch.Tensor]:
        """Start the group's all-reduce, to the bit as DDP would without a hook (it multiplies by 1/size)."""
        buffer = bucket.buffer().mul_(self._scale if share is None else share)
        began = self._begin(bucket)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None  # every member of the group gets a Work when it asks for one
        if not buffer.is_cpu:
            self._latest = work
        return self._observe(buffer, began, work.get_future())

    def _begin(self, bucket: GradBucket) -> Any:
        """Count a bucket that is about to be reduced; return the time, or a mark on the device."""
        if bucket.index() == 0:
            self._under_way = [future for future in self._under_way if not future.done()]
            self._errors.clear()
        self._errors.will_wait = self.will_wait and bucket.buffer().is_cpu
        self.counters[self._name] += 1
        return time.perf_counter() if self.marks is None else self.marks.mark()

    def _observe(self, buffer: torch.Tensor, began: Any, future: Future[Any]) -> Future[torch.Tensor]:
        """Record when a collective ends and defer its error; return the future that DDP is given."""
        now = time.perf_counter if self.marks is None else self.marks.mark
        size_bytes = buffer.numel() * buffer.element_size()

        # A thread of Gloo releases the callback after all ranks have gone on. If that kept the group alive, the thread
        # would destroy the group there, waiting for itself.
        weak = weakref.ref(self)

        def done(future: Future[Any]) -> torch.Tensor:
            reducer, ended = weak(), now()
            if reducer is not None:
                reducer._ended = time.perf_counter()
            try:
                value = future.value()
            except Exception as error:
                if reducer is not None and reducer._defers and reducer._errors.defer(error):
                    return buffer
                raise
            if reducer is not None:
                reducer._spans.append(CollectiveSpan(began, ended, size_bytes))
            tensor: torch.Tensor = value[0] if isinstance(value, list) else value
            return tensor

        observed = future.then(done)
        if buffer.is_cpu:  # on a GPU, waiting here would stop the host from running ahead
            self._under_way.append(observed)
        return observed

    def defer_wait(self) -> bool:
        """Let DDP wait, as it would without a hook."""
        return self._defers and self.has_buckets and self._errors.will_wait and self._errors.is_empty

    @property
    def has_buckets(self) -> bool:
        """Whether it has reduced buckets of this backward, not on a device."""
        return bool(self._under_way)

    def begin(self) -> None:
        """A backward begins; the one before it may have been broken off."""
        self._errors.clear()

    def wait(self) -> None:
        """Wait for the group."""
        futures, self._under_way = self._under_way, []
        for future in futures:
            future.wait()
        self._errors.raise_first()

    def ended(self) -> float:
        """Return when it was done with the newest bucket, on the performance counter."""
        return self._ended

    @property
    def idle(self) -> bool:
        """Whether it has reduced nothing since its timings were read."""
        return not self._spans

    def pending(self) -> bool:
        """Tell whether the newest collective of a device is not done; for the hang watch, as nobody waits for it."""
        return self._latest is not None and not self._latest.is_completed()

    def pop_timings(self) -> Told:
        """Set apart what it took; who was late is found later, by comparing ranks."""
        spans, self._spans = self._spans, deque(maxlen=SPANS_KEPT)
        return functools.partial(self._sync_times, spans, self.marks)

    def _sync_times(self, spans: Collection[CollectiveSpan], marks: DeviceEvents | None) -> SyncTimes:
        if marks is not None:
            spans = marks.timed(spans)
        return SyncTimes(
            sync_seconds=sum(span.ended - span.began for span in spans),
            wait_seconds=math.nan,  # the group keeps no record of arrivals
            payload_bytes=sum(span.size_bytes for span in spans),
            collectives=len(spans),
            busy_seconds=self._meter.add(spans),
            latency_seconds=self._meter.latency_seconds,
        )

    def abort(self) -> bool:
        """Leave it to the group, which is as broken as it is without us."""
        return False

    def close(self, *, at_once: bool = False) -> None:
        """Nothing is held."""


class UserHookReducer(NativeReducer):
    """A communication hook of the user's own, only watched."""

    _defers = False  # what the hook returns may be anything, and is for DDP

    def __init__(self, group: dist.ProcessGroup, state: Any, hook: UserHook, counters: Counter[str]) -> None:
        super().__init__(group, counters)
        self._state, self._hook = state, hook
        self._name = f"hook:{getattr(hook, '__qualname__', type(hook).__name__)}"

    def reduce(self, bucket: GradBucket, share: float | None = None) -> Future[torch.Tensor]:
        """Call the user's hook, which divides by whatever it chooses."""
        buffer, began = bucket.buffer(), self._begin(bucket)
        return self._observe(buffer, began, self._hook(self._state, bucket))


class RingsideReducer:
    """Ringside's engine; the host's ranks map each other's buckets where those lie in shared memory.

    DDP's first buckets are private: it rebuilds them after the first backward, and then they are shared.

    A thread reduces buckets while backward computes. On one host the last one is left to the thread that waits for it,
    which is the one that computed: another thread would run it on another processor, where the rank that it wakes has
    slept, and a scheduler that looks no further lets the two share that one while the first lies idle. Between hosts,
    where the last one takes longer, the computing thread copies meanwhile what the others have brought.

    Attributes:
        communicator: As given.
        memory: How many buckets, and bytes, are shared and copied; {} before the first backward.
        on_memory: Called with that after the first backward, and whenever it has changed.
        patience_s: How long the last bucket on one host is left to the thread that waits for it, seconds.
    """

    patience_s = PATIENCE_S

    def __init__(self, communicator: HostCommunicator | GroupCommunicator, group: dist.ProcessGroup) -> None:
        self.communicator = communicator
        self._timeout = OwnTimeout(group)
        self._native = NativeReducer(group)
        self._scale = 1.0 / communicator.size
        self._interruptible: interruptible | None = None
        if isinstance(communicator, GroupCommunicator):
            self._storages = SharedStorages(communicator.local)
            self._interruptible = communicator.interruptible()
        else:
            self._storages = SharedStorages(communicator)
        self.will_wait = self._is_aborted = False
        self._errors = DeferredErrors()
        self._pipeline = BucketPipeline()
        self._queue = CollectiveQueue(f"ringside-{communicator.rank}-buckets", _REFUSAL)
        self._under_way: list[QueuedCollective] = []
        self._buckets: list[BucketAllReduce] = []  # of the backward under way
        self._meter = CollectiveMeter()
        self.counters = self._native.counters
        self.memory: dict[str, int] = {}
        self.on_memory: Callable[[dict[str, int]], None] = lambda memory: None
        # The model may be garbage collected without a word: the queue's thread must not outlive it.
        weakref.finalize(self, _close_queue, self._queue, communicator, self._interruptible).atexit = False

    def reduce(self, bucket: GradBucket, share: float | None = None) -> Future[torch.Tensor]:
        """Queue the bucket's all-reduce; a dtype that the engine does not support goes to the group."""
        stamp_ns = time.monotonic_ns()  # the rank's arrival, before anything that could take time
        buffer = bucket.buffer()
        self._errors.will_wait = self._native.will_wait = self.will_wait
        if self._is_aborted:  # in the middle of this backward, at whose end the error is raised
            future: Future[torch.Tensor] = Future()
            future.set_result(buffer)
            return future
        try:
            flat = flatten(buffer)
        except UnsupportedError:
            return self._native.reduce(bucket, share)
        if share is not None:
            buffer.mul_(share)
        scale = self._scale if share is None else 1.0
        storage = self._storages.storage_of(bucket.index(), buffer)

        # A backward begins: nothing is left of the one before, which may have been broken off.
        if bucket.index() == 0:
            self._stop_listening()
            if self._timeout.has_changed():
                timeout_s = Settings.of_environment(timeout=self._timeout.seconds()).timeout_s
                self.communicator.set_timeout(timeout_s)
            self._errors.clear()
            self._native.begin()
            self._buckets.clear()
            # Nobody waits for the buckets of a rank that has joined (DDP's Join).
            self._under_way = [queued for queued in self._under_way if not queued.is_completed()]
        is_last = bucket.is_last()
        if is_last:
            self._storages.keep(bucket.index() + 1)

        # Hand it to the queue, whose thread takes it at once, but for the last one on a host.
        all_reduce = BucketAllReduce(
            self._pipeline, self.communicator, flat, storage, scale, stamp_ns, buffer, self._errors, is_last
        )
        result = all_reduce.result()
        if self.will_wait:
            self._buckets.append(all_reduce)
        patience_s = self.patience_s if is_last and self._interruptible is None else 0.0
        self._under_way.append(self._queue.start(all_reduce.run, patience_s))
        return result

    def defer_wait(self) -> bool:
        """Between hosts, let DDP wait, where Ctrl-C still ends what it waits for."""
        errors = self._errors
        if self._interruptible is None or self._native.has_buckets or not (errors.will_wait and errors.is_empty):
            return False
        self._interruptible.start()
        return True

    def share_buckets(self, model: DistributedDataParallel, backwards: Callable[[], int]) -> None:
        """Have the model's buckets made in memory that the host's ranks can map, if there are several."""
        if self._storages.are_shared:
            share_buckets(model, backwards)

    def _stop_listening(self) -> None:
        """Stop listening for Ctrl-C: DDP waits no longer, or has given up."""
        if self._interruptible is not None:
            self._interruptible.stop()

    def wait(self) -> None:
        """Wait for the engine, and for the group where it reduced something."""
        under_way, self._under_way = self._under_way, []
        self._stop_listening()
        first: Exception | None = None
        for queued in under_way:  # one that fails lets those after it fail, too: then all futures are done
            try:
                queued.wait()
            except Exception as error:
                if error is not queued.error:  # a signal's handler raised it
                    raise
                first = first or error
        self._native.wait()
        self._errors.raise_first()
        if first is not None:
            raise first
        self._buckets.clear()
        news = self._storages.news()
        if news:
            self.memory = news
            self.on_memory(news)

    def ended(self) -> float:
        """Return when the newest bucket was done, on the performance counter."""
        return self._pipeline.ended

    def pop_timings(self) -> Told:
        """Read from the engine's log who arrived when."""
        native = None if self._native.idle else self._native.pop_timings()
        spans, self._pipeline.spans = self._pipeline.spans, deque(maxlen=SPANS_KEPT)
        totals = self.communicator.log.totals()
        for name, count in zip(_NAMES, totals.by_path, strict=True):
            if count:
                self.counters[name] += count
        for name, count in totals.by_name.items():
            self.counters[f"ringside/{name}"] += count
        return functools.partial(self._sync_times, spans, totals, native)

    def _sync_times(self, spans: Collection[CollectiveSpan], totals: Totals, native_times: Told | None) -> SyncTimes:
        native = SyncTimes(wait_seconds=math.nan) if native_times is None else native_times()
        busy = self._meter.add(spans)
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

    def abort(self) -> bool:
        """Tell the other ranks, and let nobody write into this rank's buckets any more."""
        self._is_aborted = True
        self.close(at_once=True)
        buckets, self._buckets = self._buckets, []
        for bucket in buckets:  # those of a thread that does not end in time
            bucket.release()
        return True

    def close(self, *, at_once: bool = False) -> None:
        """Close the communicator, after what is queued, or (at once) while it is under way."""
        self._stop_listening()
        if at_once:
            self._queue.close(self.communicator.abort, 0.0)
        else:
            self._queue.close(self.communicator.close, FINISH_S)


def _close_queue(
    queue: CollectiveQueue, communicator: HostCommunicator | GroupCommunicator, listening: interruptible | None
) -> None:
    """Close the communicator of a reducer that is garbage: a finalizer, so it must not hold the reducer."""
    if listening is not None:
        listening.stop()
    queue.close(communicator.close, FINISH_S)
