"""What averages gradient buckets: Ringside's engine, the process group's own collective, or a hook of the user's.

A reducer is given buckets while backward is still computing, is waited for when backward has no work left, and then
reports what the synchronisation took. Ringside's own is in `ringside_reducer.py`, with the same methods.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from ringside.monitor.job.collectives import CollectiveMeter, CollectiveSpan
from ringside.monitor.step_clock import SyncTimes, Told

_SPANS_KEPT = 4096
UserHook = Callable[[Any, GradBucket], "Future[torch.Tensor]"]


class BucketOutcomes:
    """What became of a reducer's buckets: when they were under way, and errors, kept until DDP is done with them.

    When a bucket's future fails, `backward` raises a `RuntimeError` whatever went wrong; and an error that is raised
    before DDP has waited for its buckets leaves DDP unusable. So no future fails, and the error is raised afterwards.

    Spans and errors come on whichever thread reduced a bucket; all else is called where backward runs.

    Attributes:
        will_wait: `raise_first` is going to be called; else only a bucket's future can report what went wrong with it.
        ended: When the newest bucket was done, on the performance counter.
        spans: When buckets were under way, since `pop_spans`.
    """

    def __init__(self) -> None:
        self.will_wait = False
        self.ended = 0.0
        self.spans: deque[CollectiveSpan] = deque(maxlen=_SPANS_KEPT)
        self._errors: list[Exception] = []

    def pop_spans(self) -> deque[CollectiveSpan]:
        """Return the spans; others are kept from now on."""
        spans, self.spans = self.spans, deque(maxlen=_SPANS_KEPT)
        return spans

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
        errors, self._errors = self._errors, []
        if errors:
            try:
                raise errors[0]
            finally:
                errors.clear()  # or they would keep this frame, and the frame them


class NativeReducer:
    """The process group's own all-reduce: for what the engine does not take, and once Ringside is detached.

    Attributes:
        counters: Collectives by what reduced them, such as `ringside/push` or `gloo`.
        outcomes: What became of the buckets.
        will_wait: Whether `wait` is going to be called for the bucket that comes next, and raises what goes wrong.
    """

    _defers = True  # DDP may wait for what it reduces

    def __init__(self, group: dist.ProcessGroup, counters: Counter[str] | None = None) -> None:
        self.will_wait = False
        self._group, self._scale = group, 1.0 / dist.get_world_size(group)
        self._name = str(dist.get_backend(group))
        self._under_way: list[Future[Any]] = []
        self.outcomes = BucketOutcomes()
        self._meter = CollectiveMeter()
        self.counters: Counter[str] = Counter() if counters is None else counters

    def reduce(self, bucket: GradBucket, share: float | None = None) -> Future[torch.Tensor]:
        """Start averaging a bucket over the ranks, to the bit as DDP would without a hook (it multiplies by 1/size).

        With a share, what is multiplied by each rank's is summed.
        """
        buffer = bucket.buffer().mul_(self._scale if share is None else share)
        began = self._begin(bucket)
        work = dist.all_reduce(buffer, group=self._group, async_op=True)
        assert work is not None  # every member of the group gets a Work when it asks for one
        return self._observe(buffer, began, work.get_future())

    def _begin(self, bucket: GradBucket) -> float:
        """Count a bucket that is about to be reduced; return the time."""
        if bucket.index() == 0:
            self._under_way = [future for future in self._under_way if not future.done()]
            self.outcomes.clear()
        self.outcomes.will_wait = self.will_wait
        self.counters[self._name] += 1
        return time.perf_counter()

    def _observe(self, buffer: torch.Tensor, began: float, future: Future[Any]) -> Future[torch.Tensor]:
        """Record when a collective ends and defer its error; return the future that DDP is given."""
        size_bytes = buffer.numel() * buffer.element_size()

        # A thread of Gloo releases the callback after all ranks have gone on. If that kept the group alive, the thread
        # would destroy the group there, waiting for itself.
        weak = weakref.ref(self)

        def done(future: Future[Any]) -> torch.Tensor:
            reducer, ended = weak(), time.perf_counter()
            if reducer is not None:
                reducer.outcomes.ended = ended
            try:
                value = future.value()
            except Exception as error:
                if reducer is not None and reducer._defers and reducer.outcomes.defer(error):
                    return buffer
                raise
            if reducer is not None:
                reducer.outcomes.spans.append(CollectiveSpan(began, ended, size_bytes))
            tensor: torch.Tensor = value[0] if isinstance(value, list) else value
            return tensor

        observed = future.then(done)
        self._under_way.append(observed)
        return observed

    def defer_wait(self) -> bool:
        """Let DDP wait for one bucket after the other, as without a hook, and copy each while others are under way.

        What goes wrong meanwhile does not reach DDP, but is raised by `wait`, which comes after. False: `wait` has to
        come first.
        """
        return self._defers and self.has_buckets and self.outcomes.will_wait and self.outcomes.is_empty

    @property
    def has_buckets(self) -> bool:
        """Whether it has reduced buckets of this backward."""
        return bool(self._under_way)

    def wait(self) -> None:
        """Wait for every bucket of this backward; raise what went wrong."""
        futures, self._under_way = self._under_way, []
        for future in futures:
            future.wait()
        self.outcomes.raise_first()

    def pop_timings(self) -> Told:
        """Set apart what this backward's synchronisation took; the result works it out, on any thread and later.

        Who was late is found by comparing ranks.
        """
        return functools.partial(self._sync_times, self.outcomes.pop_spans())

    def _sync_times(self, spans: Collection[CollectiveSpan]) -> SyncTimes:
        return SyncTimes(
            sync_seconds=sum(span.ended - span.began for span in spans),
            wait_seconds=math.nan,  # the group keeps no record of arrivals
            payload_bytes=sum(span.size_bytes for span in spans),
            collectives=len(spans),
            busy_seconds=self._meter.add(spans),
            latency_seconds=self._meter.latency_seconds,
        )

    def abort(self) -> bool:
        """After an error, end all that is under way, so that DDP waits for none; False: the group reports it again."""
        return False

    def close(self, *, at_once: bool = False) -> None:
        """Release what is held, after or (at once) before what is under way is done: here nothing is."""


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
