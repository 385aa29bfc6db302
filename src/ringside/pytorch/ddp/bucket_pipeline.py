"""A DDP bucket's all-reduce in the engine: what the queue runs, one bucket started before the one before it is done.

The walk of a bucket: `GradientHook.run` (hook.py) → `RingsideReducer.reduce` (reducers.py) → `CollectiveQueue.start` →
`BucketAllReduce.run` here, on the thread whose turn it is → the communicator's `all_reduce_storage` (one host) or
`start_storage` (several) → `BucketAllReduce.complete`, which completes the future that DDP was given.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque

import torch
from torch.futures import Future

from ringside.engine import HostCommunicator
from ringside.engine.buffers import Flat
from ringside.engine.shm.memory import Storage
from ringside.errors import SyncError
from ringside.monitor.job.collectives import CollectiveSpan
from ringside.pytorch.communicator.between_hosts import PendingBucket
from ringside.pytorch.communicator.communicator import GroupCommunicator

SPANS_KEPT = 4096


class DeferredErrors:
    """Errors of one backward's buckets, kept until DDP is done with them.

    When a bucket's future fails, `backward` raises a `RuntimeError` whatever went wrong; and an error that is raised
    before DDP has waited for its buckets leaves DDP unusable. So no future fails, and the error is raised afterwards.

    Errors come on whichever thread reduced a bucket; all else is called where backward runs.

    Attributes:
        will_wait: `raise_first` is going to be called; else only a bucket's future can report what went wrong with it.
    """

    def __init__(self) -> None:
        self.will_wait = False
        self._errors: list[Exception] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing has gone wrong so far."""
        return not self._errors

    def defer(self, error: Exception) -> bool:
        """Keep a bucket's error for `raise_first`; False: the bucket's future has to report it."""
        self._errors.append(error)
        return self.will_wait

    def clear(self) -> None:
        """A backward begins; the one before it may have been broken off."""
        self._errors = []

    def raise_first(self) -> None:
        """DDP waits no longer: raise what went wrong first, once."""
        error = self._errors[0] if self._errors else None
        self._errors = []
        if error is not None:
            try:
                raise error
            finally:
                del error  # or it would keep this frame, and the frame it


class BucketAllReduce:
    """The all-reduce of one bucket, from DDP's call to the result.

    It holds what it needs of the bucket, since DDP's `GradBucket` is gone when it runs, and nothing of the reducer,
    which may be garbage by then. One is made per bucket and backward, in place of four closures.

    Args:
        pipeline: In which its turn comes.
        communicator: Of one host or several.
        flat: The bucket's elements.
        storage: The shareable storage that they lie in; None: private memory.
        scale: Multiplies each rank's contribution.
        stamp_ns: When DDP handed the bucket over, on the monotonic clock.
        buffer: DDP's tensor.
        errors: Where an error goes.
        is_last: Of its backward.

    Attributes:
        future: Completed with `buffer`, also after an error.
        failures: The error, where nobody waits for `errors`: then DDP's future has to fail.
        pending: What is left to be waited for, between hosts.
    """

    __slots__ = (
        "_communicator",
        "_errors",
        "_flat",
        "_pipeline",
        "_scale",
        "_stamp_ns",
        "_storage",
        "buffer",
        "failures",
        "future",
        "is_last",
        "pending",
    )

    def __init__(
        self,
        pipeline: BucketPipeline,
        communicator: HostCommunicator | GroupCommunicator,
        flat: Flat,
        storage: Storage | None,
        scale: float,
        stamp_ns: int,
        buffer: torch.Tensor,
        errors: DeferredErrors,
        is_last: bool,
    ) -> None:
        self._pipeline, self._communicator, self._errors = pipeline, communicator, errors
        self._flat, self._storage, self._scale, self._stamp_ns = flat, storage, scale, stamp_ns
        self.buffer, self.is_last = buffer, is_last
        self.future: Future[torch.Tensor] = Future()
        self.failures: list[Exception] = []
        self.pending: PendingBucket | None = None

    def result(self) -> Future[torch.Tensor]:
        """Return the future for DDP."""
        # DDP learns of an error by a callback that raises; a future that is failed in any other way ends the process
        # inside backward. The callback holds the list alone: torch keeps it, unseen by Python's garbage collector.
        return self.future.then(functools.partial(_value_or_raise, self.failures))

    def run(self) -> None:
        """Run it in its turn; the queue's job."""
        self._pipeline.add(self)

    def start(self) -> None:
        """Start it; on one host it is done when this returns, between hosts when `pending` is."""
        communicator = self._communicator
        if isinstance(communicator, HostCommunicator):
            communicator.all_reduce_storage(self._flat, self._storage, scale=self._scale, stamp_ns=self._stamp_ns)
        else:
            self.pending = communicator.start_storage(
                self._flat, self._storage, scale=self._scale, stamp_ns=self._stamp_ns
            )

    def wait(self) -> None:
        """Wait for what `start` has left pending, and complete the future either way."""
        try:
            if self.pending is not None:
                self.pending.wait()
        except BaseException as error:
            self.complete(as_exception(error))
            raise
        self.complete(None)

    def complete(self, error: Exception | None) -> None:
        """Record when it ended and how, and hand the buffer back to DDP; once."""
        pipeline = self._pipeline
        pipeline.spans.append(
            CollectiveSpan(self._stamp_ns * 1e-9, time.monotonic(), self.buffer.numel() * self.buffer.element_size())
        )
        pipeline.ended = time.perf_counter()
        if error is not None and not self._errors.defer(error):
            self.failures.append(error)
        self.release()

    def release(self) -> None:
        """Complete the future, unless that was done when the bucket was aborted: DDP waits no longer."""
        with contextlib.suppress(RuntimeError):  # the thread that runs it and the one that aborts it may meet here
            if not self.future.done():
                self.future.set_result(self.buffer)


class BucketPipeline:
    """Waits for a bucket when the next one has been started, or when it is the last of its backward.

    Which one is started or waited for when depends on nothing but the order of the buckets, so all ranks do the same. A
    backward that was broken off leaves one open; the next backward's first bucket completes it.

    Attributes:
        spans: When buckets were under way; whoever reads them puts an empty deque in their place.
        ended: When the newest bucket was done, on the performance counter.
    """

    def __init__(self) -> None:
        self.spans: deque[CollectiveSpan] = deque(maxlen=SPANS_KEPT)
        self.ended = 0.0
        self._open: BucketAllReduce | None = None

    def add(self, bucket: BucketAllReduce) -> None:
        """Start a bucket, then wait for the one before it; for this one, too, if it is the last or done already.

        Raises:
            BaseException: What either of the two raised; both are completed with it, with Ctrl-C as a `SyncError`.
        """
        try:
            bucket.start()
        except BaseException as error:
            failure = as_exception(error)
            bucket.complete(failure)
            self._abort(failure)
            raise
        before, self._open = self._open, bucket
        try:
            if before is not None:
                before.wait()
            if bucket.is_last or bucket.pending is None:
                self._open = None
                bucket.wait()
        except BaseException as error:
            self._abort(as_exception(error))
            raise

    def _abort(self, error: Exception) -> None:
        """Complete the open bucket with an error: nobody is going to wait for it."""
        bucket, self._open = self._open, None
        if bucket is not None:
            bucket.complete(error)


def as_exception(error: BaseException) -> Exception:
    """Return an error as the other threads may see it: Ctrl-C is for the thread that it came to alone."""
    if isinstance(error, Exception):
        return error
    return SyncError(f"the gradients' synchronisation was interrupted on this rank ({type(error).__name__})")


def _value_or_raise(failures: list[Exception], future: Future[torch.Tensor]) -> torch.Tensor:
    if failures:
        raise failures[0]
    return future.value()
