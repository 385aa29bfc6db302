"""The communication hook that DDP calls for every bucket."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ringside.engine.runtime.interrupts import ctrl_c
from ringside.errors import ClosedError
from ringside.isolation import Guard
from ringside.monitor.step_clock import DeviceEvents, StepClock
from ringside.pytorch.ddp.reducers import BucketReducer, NativeReducer, UserHook, UserHookReducer
from ringside.pytorch.hang_watch.board import NoBoard, ProgressPage


class GradientHook:
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
        board: Where the hang watch reads what is handed over and waited for.
        marks: Record events on the device that the model is on; None: the host's clock is enough.
        guard: Keeps what breaks in the clock away from training; the session's, where there is one.
        ranks_left: Resolves to the number of ranks that go on (DDP's Join); None: nobody asked.
        backwards: Backward passes whose buckets were all handed over: the same number on all ranks.
        abort_reason: Why this model's gradients are reduced no more; "": they are.
        is_unfinished: DDP has not ended a backward that failed.
    """

    def __init__(self, reducer: BucketReducer, clock: StepClock, *, delayed: bool = False, defers: bool = True) -> None:
        self.reducer = reducer
        self.clock = clock
        self.board: ProgressPage | NoBoard = NoBoard()
        self.marks: DeviceEvents | None = None
        self.ranks_left: Future[list[torch.Tensor]] | None = None
        self.backwards = 0
        self.abort_reason, self.is_unfinished = "", False
        self.guard = Guard("timing the steps of this rank")
        self._board_guard = Guard("the hang watch of this rank")
        self._delayed, self._defers = delayed, defers
        # Of the backward under way: whether `_finish` is queued, `ctrl_c` expects it and has seen it begin, and DDP has
        # handed its last bucket over.
        self._is_queued = self._expects = self._begun = self._is_handed_over = False
        self._error: BaseException | None = None

    def forward_begins(self, syncs: bool) -> None:
        """Refuse a forward pass whose backward could not be.

        Args:
            syncs: Gradients are synchronised in its backward (not inside `no_sync`).

        Raises:
            ClosedError: The gradients are reduced no more.
            KeyboardInterrupt: Ctrl-C came in a backward that something else has broken off.
        """
        if self._begun and self._end_backward():
            raise KeyboardInterrupt
        if self.abort_reason and syncs and torch.is_grad_enabled():
            raise ClosedError(
                "this model's gradients are no longer carried. To train on, all ranks call detach() of what "
                "ringside.attach(model) returned, and the process group carries them, or ringside.attach(model) again. "
                f"What was raised in backward: {self.abort_reason}"
            )

    def forward_ends(self) -> None:
        """From now on Ctrl-C may come in backward."""
        if not self._expects and torch.is_grad_enabled():
            self._expects = True
            ctrl_c.expect()

    def run(self, model: weakref.ref[DistributedDataParallel], bucket: GradBucket) -> Future[torch.Tensor]:
        """Start reducing one bucket; DDP calls this while backward computes."""
        # 1. With the first bucket, have `_finish` called when backward has no work left.
        if bucket.index() == 0:  # the backward before may have been broken off
            self._is_queued, self._error = False, None
        self._is_handed_over = bucket.is_last()
        if not self._is_queued and not self._delayed:
            self._is_queued = _queue_callback(self._finish)
        if not self._begun and (self._is_queued or self._delayed):
            self._begun = True
            if not self._expects:  # its forward was called before Ringside was attached, or it has two backwards
                self._expects = True
                ctrl_c.expect()
            ctrl_c.begin()
        # A bucket of a joined rank (DDP's Join) comes outside of a backward: nobody waits for it.
        self.reducer.will_wait = self._begun

        # 2. Start it.
        buffer = bucket.buffer()
        is_hooked = isinstance(self.reducer, UserHookReducer)
        self._board_guard.run(self.board.entered, buffer.numel() * buffer.element_size(), int(is_hooked))
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
    def user(self) -> UserHookReducer | None:
        """The user's own hook, where that reduces the buckets."""
        return self.reducer if isinstance(self.reducer, UserHookReducer) else None

    def use_user_hook(self, group: dist.ProcessGroup, state: Any, hook: UserHook) -> None:
        """Let a hook of the user's own reduce the buckets from now on, and only watch it."""
        self.abort_reason = ""
        self.reducer.close()
        self.reducer = UserHookReducer(group, state, hook, self.reducer.counters)
        self.reducer.marks = self.marks

    def stop(self, group: dist.ProcessGroup, clock: StepClock) -> None:
        """Let the process group reduce the buckets (or the user's hook, where there is one), and watch no longer."""
        self.clock, self.board, self.marks = clock, NoBoard(), None
        self.abort_reason = ""
        if self.user is None:
            self.reducer.close()
            self.reducer = NativeReducer(group, self.reducer.counters)

    def pending(self) -> bool:
        """Tell whether the group is still at work on what was handed over last (never known of a user's hook)."""
        return isinstance(self.reducer, NativeReducer) and self.reducer.pending()

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
        if not (is_deferred and _queue_callback(functools.partial(self._wait, reducer, defers, is_deferred=True))):
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
            sync_ended = functools.partial(self._sync_ended, reducer)
            # A device waits where DDP makes it wait, in a callback of DDP's own.
            if self.marks is None or not _queue_callback(sync_ended):
                sync_ended(time.perf_counter() - reducer.ended() if is_deferred else 0.0)
        if is_deferred or self.is_unfinished or not _queue_callback(self._raise_error):
            self._raise_error()

    def _sync_ended(self, reducer: BucketReducer, ago: float = 0.0) -> None:
        self.guard.run(self.clock.sync_ends, reducer.pop_timings, ago)

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

    def _end_backward(self) -> bool:
        """Hold Ctrl-C back no longer; return whether `KeyboardInterrupt` has to be raised."""
        begun, self._begun, self._expects = self._begun, False, False
        return ctrl_c.end(begun=begun)


def _queue_callback(callback: Callable[[], None]) -> bool:
    """Have the autograd engine call back when backward has no work left."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False  # DDP marks unused parameters before backward begins: a later bucket will queue it
    return True


# Ctrl-C must not break these off, and all ranks with them: it is kept, and raised by `_raise_error`.
ctrl_c.spares(
    GradientHook.run, GradientHook._finish, GradientHook._wait, GradientHook._sync_ended, GradientHook._raise_error
)
