"""Gradient buckets reduced by Ringside's engine.

The walk of a bucket: `GradientHook.run` (hook.py) → `RingsideReducer.reduce` → `CollectiveQueue.enqueue`, and on the
thread whose turn it is `BucketAllReduce.execute` → `HostCommunicator.all_reduce_storage` (one host) or
`BetweenHosts.start_storage` (several) → `BucketAllReduce.complete`, which completes the future that DDP was given.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ringside.engine.buffers import Flat, flatten
from ringside.engine.net.exchange.block_scaling import ErrorFeedback
from ringside.engine.net.hierarchical import PendingAllReduce
from ringside.engine.runtime.interrupts import interruptible
from ringside.engine.runtime.queue import PATIENCE_S, CollectiveQueue, QueuedCollective
from ringside.engine.runtime.worker import FINISH_S
from ringside.engine.settings import Settings
from ringside.engine.shm.communicator import HostCommunicator
from ringside.engine.shm.log import PATHS, Totals
from ringside.engine.shm.memory import Storage
from ringside.errors import SyncError, UnsupportedError
from ringside.monitor.job.collectives import CollectiveMeter, CollectiveSpan
from ringside.monitor.step_clock import SyncTimes, Told
from ringside.pytorch.communicator.between_hosts import BetweenHosts
from ringside.pytorch.communicator.communicator import GroupCommunicator
from ringside.pytorch.ddp.bucket_memory import share_buckets
from ringside.pytorch.ddp.error_feedback import BucketErrorFeedback
from ringside.pytorch.ddp.reducers import BucketOutcomes, NativeReducer
from ringside.pytorch.shared_storage import SharedStorages
from ringside.pytorch.store import OwnTimeout

_REFUSAL = "the model's gradients are no longer carried on this rank (or this is a forked child of it)"
_NAMES = tuple(f"ringside/{path}" for path in PATHS)


class BucketAllReduce(QueuedCollective):
    """The all-reduce of one bucket, from DDP's call to the result.

    It holds what it needs of the bucket, since DDP's `GradBucket` is gone when its turn comes, and nothing of the
    reducer, which may be garbage by then.

    Args:
        communicator: All-reduces it, on one host or between several.
        flat: The bucket's elements.
        storage: The shareable storage that they lie in; None: private memory.
        scale: Multiplies each rank's contribution.
        stamp_ns: When DDP handed the bucket over, on the monotonic clock.
        buffer: DDP's tensor.
        outcomes: Where its span goes, and an error.
        is_last: Of its backward.
        before: The bucket before it, which may be open when this one's turn comes; None: there is none.
        feedback: What was rounded away of it in the step before; None: nothing is fed back.

    Attributes:
        result: The future for DDP.
        is_complete: Whether `complete` was called.
    """

    def __init__(
        self,
        communicator: HostCommunicator | BetweenHosts,
        flat: Flat,
        storage: Storage | None,
        scale: float,
        stamp_ns: int,
        buffer: torch.Tensor,
        outcomes: BucketOutcomes,
        is_last: bool,
        before: BucketAllReduce | None,
        feedback: ErrorFeedback | None = None,
    ) -> None:
        self._communicator, self._flat, self._storage = communicator, flat, storage
        self._scale, self._stamp_ns = scale, stamp_ns
        self._buffer, self._outcomes, self._is_last, self._before = buffer, outcomes, is_last, before
        self._feedback = feedback
        self._pending: PendingAllReduce | None = None  # what is left to be waited for, between hosts
        self._failures: list[Exception] = []  # the error, where nobody waits: then DDP's future has to fail
        self._future: Future[torch.Tensor] = Future()
        # DDP learns of an error by a callback that raises; a future that is failed in any other way ends the process
        # inside backward. The callback holds the list alone: torch keeps it, unseen by Python's garbage collector.
        self.result = self._future.then(functools.partial(_value_or_raise, self._failures))
        self.is_complete = False

    def execute(self) -> None:
        """Start it, then end the bucket before it; end this one, too, if it is the last or done already.

        Between hosts one bucket is thus added up inside the host while the one before it is under way. Which is started
        or ended when depends on nothing but the order of the buckets, so all ranks do the same. A backward that was
        broken off leaves one open, which the next backward's first bucket ends.

        Raises:
            BaseException: What either of the two raised; both are completed with it, with Ctrl-C as a `SyncError`.
        """
        communicator, before = self._communicator, self._before
        try:
            if isinstance(communicator, HostCommunicator):
                communicator.all_reduce_storage(self._flat, self._storage, scale=self._scale, stamp_ns=self._stamp_ns)
            else:
                self._pending = communicator.start_storage(
                    self._flat, self._storage, scale=self._scale, stamp_ns=self._stamp_ns, feedback=self._feedback
                )
            if before is not None and not before.is_complete:
                before.end()
            if self._pending is None:
                self.complete(None)
            elif self._is_last:
                self.end()
        except BaseException as error:
            failure = _as_exception(error)
            if before is not None:
                before.complete(failure)
            self.complete(failure)
            raise

    def forget(self) -> None:
        """Drop the bucket before it, or each would keep all of its backward."""
        self._before = None

    def end(self) -> None:
        """Wait for the result of what was started, and complete it either way."""
        if self.is_complete:
            return
        try:
            if self._pending is not None:
                self._pending.wait()
        except BaseException as error:
            self.complete(_as_exception(error))
            raise
        self.complete(None)

    def complete(self, error: Exception | None) -> None:
        """Record when it ended and how, and hand the buffer back to DDP; once."""
        if self.is_complete:
            return
        self.is_complete = True
        outcomes, size_bytes = self._outcomes, self._buffer.numel() * self._buffer.element_size()
        outcomes.spans.append(CollectiveSpan(self._stamp_ns * 1e-9, time.monotonic(), size_bytes))
        outcomes.ended = time.perf_counter()
        if error is not None and not outcomes.defer(error):
            self._failures.append(error)
        self.release()

    def release(self) -> None:
        """Complete the future, unless that was done when the bucket was aborted: DDP waits no longer."""
        with contextlib.suppress(RuntimeError):  # the thread that runs it and the one that aborts it may meet here
            if not self._future.done():
                self._future.set_result(self._buffer)


class RingsideReducer:
    """Ringside's engine; the host's ranks map each other's buckets where those lie in shared memory.

    DDP's first buckets are private: it rebuilds them after the first backward, and then they are shared.

    A thread reduces buckets while backward computes. On one host the last one is left to the thread that waits for it,
    which is the one that computed: another thread would run it on another processor, where the rank that it wakes has
    slept, and a scheduler that looks no further lets the two share that one while the first lies idle. Between hosts,
    where the last one takes longer, the computing thread copies meanwhile what the others have brought.

    Attributes:
        communicator: As given.
        feedback: What is kept of what is rounded away of buckets; None: nothing is.
        on_memory: Called with how many buckets, and bytes, are shared and copied, after the first backward and whenever
            that has changed.
        patience_s: How long the last bucket on one host is left to the thread that waits for it, seconds.
    """

    patience_s = PATIENCE_S

    def __init__(self, communicator: HostCommunicator | GroupCommunicator, group: dist.ProcessGroup) -> None:
        self.communicator = communicator
        self._timeout = OwnTimeout(group)
        self._native = NativeReducer(group)
        self._scale = 1.0 / communicator.size
        self._interruptible: interruptible | None = None
        self._engine: HostCommunicator | BetweenHosts
        if isinstance(communicator, GroupCommunicator):
            self._storages, self._engine = SharedStorages(communicator.local), communicator.buckets
            self._interruptible = communicator.interruptible()
        else:
            self._storages, self._engine = SharedStorages(communicator), communicator
        scaling = self._engine.fed_back if isinstance(self._engine, BetweenHosts) else None
        self.feedback = None if scaling is None else BucketErrorFeedback(scaling)
        self.will_wait = self._is_aborted = False
        self.outcomes = BucketOutcomes()
        self._queue = CollectiveQueue(f"ringside-{communicator.rank}-buckets", _REFUSAL)
        self._under_way: list[QueuedCollective] = []
        self._open: BucketAllReduce | None = None  # the newest bucket, unless it was the last of its backward
        self._meter = CollectiveMeter()
        self.counters = self._native.counters
        self.on_memory: Callable[[dict[str, int]], None] = lambda memory: None
        # The model may be garbage collected without a word: the queue's thread must not outlive it.
        weakref.finalize(self, _close_queue, self._queue, communicator, self._interruptible).atexit = False

    def reduce(self, bucket: GradBucket, share: float | None = None) -> Future[torch.Tensor]:
        """Queue the bucket's all-reduce; a dtype that the engine does not support goes to the group."""
        stamp_ns = time.monotonic_ns()  # the rank's arrival, before anything that could take time
        buffer = bucket.buffer()
        self.outcomes.will_wait = self._native.will_wait = self.will_wait
        if self._is_aborted:  # in the middle of this backward, at whose end the error is raised
            future: Future[torch.Tensor] = Future()
            future.set_result(buffer)
            return future
        try:
            flat = flatten(buffer)
        except UnsupportedError:
            if bucket.is_last() and self._open is not None:
                # No bucket of ours comes after the open one, which would end it.
                self._under_way.append(self._queue.start(self._open.end, 0.0))
                self._open = None
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
            self.outcomes.clear()
            self._native.outcomes.clear()
            # Nobody waits for the buckets of a rank that has joined (DDP's Join).
            self._under_way = [queued for queued in self._under_way if not queued.is_completed()]
        is_last = bucket.is_last()
        if is_last:
            self._storages.keep(bucket.index() + 1)

        # Hand it to the queue, whose thread takes it at once, but for the last one on a host.
        feedback = None
        if self.feedback is not None and buffer.dtype == torch.float32:
            feedback = self.feedback.of(bucket, flat)
        queued = BucketAllReduce(
            self._engine, flat, storage, scale, stamp_ns, buffer, self.outcomes, is_last, self._open, feedback
        )
        self._queue.enqueue(queued, self.patience_s if is_last and self._interruptible is None else 0.0)
        self._under_way.append(queued)
        self._open = None if is_last else queued
        return queued.result

    def defer_wait(self) -> bool:
        """Between hosts, let DDP wait, where Ctrl-C still ends what it waits for."""
        outcomes = self.outcomes
        if self._interruptible is None or self._native.has_buckets or not (outcomes.will_wait and outcomes.is_empty):
            return False
        self._interruptible.start()
        return True

    def share_buckets(self, model: DistributedDataParallel, backwards: Callable[[], int]) -> None:
        """Have the model's buckets made in memory that the host's ranks can map, if there are several.

        What is fed back follows the model, too.
        """
        if self.feedback is not None:
            self.feedback.follow(model)
        if self._storages.are_shared:
            share_buckets(model, backwards)

    def _stop_listening(self) -> None:
        """Stop listening for Ctrl-C: DDP waits no longer, or has given up."""
        if self._interruptible is not None:
            self._interruptible.stop()

    def wait(self) -> None:
        """Wait for the engine, and for the group where it reduced something."""
        self._stop_listening()
        first: Exception | None = None
        for queued in self._under_way:  # one that fails lets those after it fail, too: then all futures are done
            try:
                queued.wait()
            except Exception as error:
                if error is not queued.error:  # a signal's handler raised it
                    raise
                first = first or error
        self._native.wait()
        self.outcomes.raise_first()
        if first is not None:
            raise first
        self._under_way.clear()
        news = self._storages.news()
        if news:
            self.on_memory(news)

    def pop_timings(self) -> Told:
        """Read from the engine's log who arrived when."""
        native = self._native.pop_timings() if self._native.outcomes.spans else None
        totals = self.communicator.log.totals()
        for name, count in zip(_NAMES, totals.by_path, strict=True):
            if count:
                self.counters[name] += count
        for name, count in totals.by_name.items():
            self.counters[f"ringside/{name}"] += count
        return functools.partial(self._sync_times, self.outcomes.pop_spans(), totals, native)

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
        under_way, self._under_way = self._under_way, []
        for queued in under_way:  # those of a thread that does not end in time
            if isinstance(queued, BucketAllReduce):
                queued.release()
        return True

    def close(self, *, at_once: bool = False) -> None:
        """Close the communicator, after what is queued, or (at once) while it is under way."""
        self._stop_listening()
        if at_once:
            self._queue.close(self.communicator.abort, 0.0)
        else:
            self._queue.close(self.communicator.close, FINISH_S)


BucketReducer = NativeReducer | RingsideReducer
"""What averages the gradient buckets of one model."""


def _close_queue(
    queue: CollectiveQueue, communicator: HostCommunicator | GroupCommunicator, listening: interruptible | None
) -> None:
    """Close the communicator of a reducer that is garbage: a finalizer, so it must not hold the reducer."""
    if listening is not None:
        listening.stop()
    queue.close(communicator.close, FINISH_S)


def _as_exception(error: BaseException) -> Exception:
    """Return an error as the other threads may see it: Ctrl-C is for the thread that it came to alone."""
    if isinstance(error, Exception):
        return error
    return SyncError(f"the gradients' synchronisation was interrupted on this rank ({type(error).__name__})")


def _value_or_raise(failures: list[Exception], future: Future[torch.Tensor]) -> torch.Tensor:
    if failures:
        raise failures[0]
    return future.value()
