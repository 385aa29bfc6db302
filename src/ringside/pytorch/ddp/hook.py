"""The communication hook that DDP calls for every bucket."""

from __future__ import annotations

import functools
import time
import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ringside.engine.runtime.interrupts import ctrl_c
from ringside.errors import ClosedError
from ringside.monitor.step_clock import StepClock
from ringside.pytorch.ddp.backward import FollowedBackward, queue_callback
from ringside.pytorch.ddp.reducers import NativeReducer, UserHook, UserHookReducer
from ringside.pytorch.ddp.ringside_reducer import BucketReducer


class GradientHook(FollowedBackward):
    """Gives buckets to a reducer and waits for them when backward has no work left.

    The wait begins in a callback of the autograd engine that runs before DDP's own: its length is the exposed part of
    the synchronisation. Where the reducer leaves the waiting to DDP, which copies each bucket while others are under
    way, a callback after DDP's measures it. What went wrong is raised in a callback after DDP's, too, so it reaches the
    caller of `backward()` with its own type, and DDP can go on. Ctrl-C is raised there as well (`ctrl_c`).

    Args:
        reducer: Averages the buckets.
        clock: Informed when backward and synchronisation end.
        delayed: DDP hands over all buckets of the first backward at its end and waits for them at once, before any
            callback of ours could (`static_graph=True`): so the last one handed over is where to wait.
        defers: Waiting may be left to DDP: in its callback there is nothing but buckets that it waits for. With
            `find_unused_parameters=True`, and in a first delayed backward, there is a collective of its own, which
            nobody here could end: then an error is raised before, and DDP has to be reset (`is_unfinished`).

    Attributes:
        ranks_left: Resolves to the number of ranks that go on (DDP's Join); None: nobody asked.
    """

    def __init__(self, reducer: BucketReducer, clock: StepClock, *, delayed: bool = False, defers: bool = True) -> None:
        super().__init__(clock)
        self.reducer = reducer
        self.ranks_left: Future[list[torch.Tensor]] | None = None
        self._delayed, self._defers = delayed, defers
        # Of the backward under way: whether `_finish` is queued, and DDP has handed its last bucket over.
        self._is_queued = self._is_handed_over = False
        self._error: BaseException | None = None

    @property
    def counters(self) -> Counter[str]:
        """Collectives by what reduced them."""
        return self.reducer.counters

    def forward_begins(self, syncs: bool) -> None:
        """Refuse a forward pass whose backward could not be.

        Args:
            syncs: Gradients are synchronised in its backward (not inside `no_sync`).

        Raises:
            ClosedError: The gradients are reduced no more.
            KeyboardInterrupt: Ctrl-C came in a backward that something else has broken off.
        """
        super().forward_begins(syncs)
        if self.abort_reason and syncs and torch.is_grad_enabled():
            raise ClosedError(
                "this model's gradients are no longer carried. To train on, all ranks call detach() of what "
                "ringside.attach(model) returned, and the process group carries them, or ringside.attach(model) again. "
                f"What was raised in backward: {self.abort_reason}"
            )

    def run(self, model: weakref.ref[DistributedDataParallel], bucket: GradBucket) -> Future[torch.Tensor]:
        """Start reducing one bucket; DDP calls this while backward computes."""
        # 1. With the first bucket, have `_finish` called when backward has no work left.
        if bucket.index() == 0:  # the backward before may have been broken off
            self._is_queued, self._error = False, None
        self._is_handed_over = bucket.is_last()
        if not self._is_queued and not self._delayed:
            self._is_queued = queue_callback(self._finish)
        if self._is_queued or self._delayed:
            self._begin_backward()
        # A bucket of a joined rank (DDP's Join) comes outside of a backward: nobody waits for it.
        self.reducer.will_wait = self._begun

        # 2. Start it.
        buffer = bucket.buffer()
        self._board_guard.run(self.board.entered, buffer.numel() * buffer.element_size(), int(self.has_user_hook))
        ddp, share = model(), None
        if ddp is not None and ddp._join_config.enable and not ddp._divide_by_initial_world_size:
            # Of n ranks that go on, each has a share of 1/n; all ranks agree on whether they ask. The n of a rank that
            # has joined does not matter: its gradients are zeros.
            left = self.ranks_left
            share = 1.0 / (dist.get_world_size(ddp.process_group) if left is None else float(left.wait()[0]))
        groups = self.clock.groups
        if groups is not None:
            groups.is_muted = True  # what this backward waits for is timed here
        try:
            future = self.reducer.reduce(bucket, share)
        finally:
            if groups is not None:
                groups.is_muted = False

        # 3. In a first delayed backward, wait here: DDP would before any callback.
        self.backwards += bucket.is_last()
        if self._delayed and bucket.is_last():
            self._delayed = False
            self._finish(is_delayed=True)
        return future

    @property
    def has_user_hook(self) -> bool:
        """Whether a hook of the user's own reduces the buckets, inside ours."""
        return isinstance(self.reducer, UserHookReducer)

    def use_user_hook(self, group: dist.ProcessGroup, state: Any, hook: UserHook) -> None:
        """Let a hook of the user's own reduce the buckets from now on, and only watch it."""
        self.abort_reason = ""
        self.reducer.close()
        self.reducer = UserHookReducer(group, state, hook, self.reducer.counters)

    def stop(self, group: dist.ProcessGroup, clock: StepClock) -> None:
        """Let the process group reduce the buckets (or the user's hook, where there is one), and watch no longer."""
        super().stop(group, clock)
        self.abort_reason = ""
        if not self.has_user_hook:
            self.reducer.close()
            self.reducer = NativeReducer(group, self.reducer.counters)

    # Backward's end: up to three callbacks of the autograd engine. `_finish` (before DDP's own) waits, or leaves that
    # to DDP and queues `_wait` behind it; `_wait` queues `_raise_error`. One that is queued from a callback runs after
    # DDP's; where none can be queued (a delayed backward), the next step runs at once.

    def _finish(self, *, is_delayed: bool = False) -> None:
        """Backward has no work left: wait for the buckets, or let DDP do that first."""
        self._is_queued = False
        self.guard.run(self.clock.backward_ends)
        self._board_guard.run(self.board.waiting)
        reducer = self.reducer  # another one may take its place before what is queued now runs: after DDP's callback
        defers = self._defers and not is_delayed
        is_deferred = defers and reducer.defer_wait()
        if not (is_deferred and queue_callback(functools.partial(self._wait, reducer, defers, is_deferred=True))):
            self._wait(reducer, defers)

    def _wait(self, reducer: BucketReducer, defers: bool, *, is_deferred: bool = False) -> None:
        """Wait for the buckets, which DDP has done already where that was left to it; keep what went wrong."""
        try:
            ctrl_c.ends_wait = True
            reducer.wait()
            ctrl_c.ends_wait = False
        except BaseException as error:
            ctrl_c.ends_wait = False
            self._error = self._error or error
            self._board_guard.run(self.board.failed, error)
            if reducer.abort():
                self.abort_reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                self.is_unfinished = not defers
        else:
            self._board_guard.run(self.board.resumed)
            ago = time.perf_counter() - reducer.outcomes.ended if is_deferred else 0.0
            self.guard.run(self.clock.sync_ends, reducer.pop_timings, ago)
        if is_deferred or self.is_unfinished or not queue_callback(self._raise_error):
            self._raise_error()

    def _raise_error(self) -> None:
        """After DDP's own callback, raise what went wrong, or Ctrl-C."""
        if not self._is_handed_over:
            return  # a backward inside of this one is over (a reentrant checkpoint's)
        error, self._error = self._error, None
        was_interrupted = self._end_backward()
        try:
            if was_interrupted and (error is None or isinstance(error, Exception)):
                raise KeyboardInterrupt from error
            if error is not None:
                raise error
        finally:
            del error  # or it would keep this frame, and the frame it


# Ctrl-C must not break these off, and all ranks with them: it is kept, and raised by `_raise_error`.
ctrl_c.spares(GradientHook.run, GradientHook._finish, GradientHook._wait, GradientHook._raise_error)
