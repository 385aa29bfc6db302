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
from ringside.monitor.step_clock.clock import StepClock
from ringside.monitor.step_clock.device_events import DeviceEvents
from ringside.pytorch.ddp.reducers import BucketReducer, NativeReducer, UserHook, UserHookReducer
from ringside.pytorch.hang_watch.board import NoBoard, ProgressPage
from ringside.pytorch.isolation import Guard


class GradientHook:
    """Gives buckets to a carrier and waits for them when backward has no work left.

    The waiting begins in a callback of the autograd engine that runs before DDP's own: what it takes is the exposed
    part of the synchronisation. Where the carrier leaves the waiting to DDP, which copies each bucket while others are
    under way, a callback after DDP's says what it took. What went wrong is raised in a callback after DDP's, too, so it
    reaches the caller of `backward()` with its own type, and DDP can go on. Ctrl-C is raised there as well (`ctrl_c`).

    Args:
        carrier: Who carries the buckets.
        clock: Told when backward and synchronisation end.
        delayed: DDP hands over all buckets of the first backward at its end and waits for them at once, before any
            callback of ours could (`static_graph=True`): so the last one handed over is where to wait.
        leaves: Waiting may be left to DDP: in its callback there is nothing but buckets that it waits for. With
            `find_unused_parameters=True`, and in a first delayed backward, there is a collective of its own, which
            nobody here could end: then an error is raised before, and DDP has to be reset (`is_unfinished`).

    Attributes:
        board: Told what is handed over and waited for, for the hang watch.
        marks: Set marks on the device that the model is on; None: the host's clock tells enough.
        fuse: Keeps what breaks in the clock away from training; the session's, where there is one.
        going_on: Told by the ranks that go on (DDP's Join) how many they are; None: nobody asked.
        backwards: Backward passes whose buckets were all handed over: the same number on all ranks.
        given_up: Why this model's gradients are carried no more; "": they are.
        is_unfinished: DDP has not ended a backward that failed.
    """

    def __init__(self, carrier: BucketReducer, clock: StepClock, *, delayed: bool = False, leaves: bool = True) -> None:
        self.carrier = carrier
        self.clock = clock
        self.board: ProgressPage | NoBoard = NoBoard()
        self.marks: DeviceEvents | None = None
        self.going_on: Future[list[torch.Tensor]] | None = None
        self.backwards = 0
        self.given_up, self.is_unfinished = "", False
        self.fuse = Guard("timing the steps of this rank")
        self._boards = Guard("the hang watch of this rank")
        self._delayed, self._leaves = delayed, leaves
        self._queued = self._expects = self._begun = self._is_handed_over = False
        self._problem: BaseException | None = None

    def forward_begins(self, syncs: bool) -> None:
        """Refuse a forward pass whose backward could not be.

        Args:
            syncs: Gradients are synchronised in its backward (not inside `no_sync`).

        Raises:
            ClosedError: The gradients are carried no more.
            KeyboardInterrupt: Ctrl-C came in a backward that something else has broken off.
        """
        if self._begun and self._end():
            raise KeyboardInterrupt
        if self.given_up and syncs and torch.is_grad_enabled():
            raise ClosedError(
                "this model's gradients are no longer carried. To train on, all ranks call detach() of what "
                "ringside.attach(model) returned, and the process group carries them, or ringside.attach(model) again. "
                f"What was raised in backward: {self.given_up}"
            )

    def forward_ends(self) -> None:
        """From now on Ctrl-C may come in backward."""
        if not self._expects and torch.is_grad_enabled():
            self._expects = True
            ctrl_c.expect()

    def run(self, model: weakref.ref[DistributedDataParallel], bucket: GradBucket) -> Future[torch.Tensor]:
        """Carry one bucket."""
        if bucket.index() == 0:  # the backward before may have been broken off
            self._queued, self._problem = False, None
        self._is_handed_over = bucket.is_last()
        if not self._queued and not self._delayed:
            self._queued = _queue(self._finish)
        if not self._begun and (self._queued or self._delayed):
            self._begun = True
            if not self._expects:  # its forward was called before Ringside was attached, or it has two backwards
                self._expects = True
                ctrl_c.expect()
            ctrl_c.begin()
        self.carrier.is_heard = self._begun
        buffer = bucket.buffer()
        self._boards.run(self.board.enters, buffer.numel() * buffer.element_size(), 0 if self.user is None else 1)
        future = self.carrier.carry(bucket, self._share(model()))
        self.backwards += bucket.is_last()
        if self._delayed and bucket.is_last():
            self._delayed = False
            self._finish(is_delayed=True)
        return future

    def _share(self, model: DistributedDataParallel | None) -> float | None:
        """Return 1/n where n ranks of `model.join(divide_by_initial_world_size=False)` go on; None: 1/size.

        All ranks know that it is so. What a rank that has joined takes for n does not matter: its gradients are zeros.
        """
        if model is None or not model._join_config.enable or model._divide_by_initial_world_size:
            return None
        if self.going_on is None:
            return 1.0 / dist.get_world_size(model.process_group)
        return 1.0 / float(self.going_on.wait()[0])

    @property
    def user(self) -> UserHookReducer | None:
        """The user's own hook, where that carries the buckets."""
        return self.carrier if isinstance(self.carrier, UserHookReducer) else None

    def yield_to(self, group: dist.ProcessGroup, state: Any, hook: UserHook) -> None:
        """Let a hook of the user's own carry the buckets from now on, and only watch it."""
        self.given_up = ""
        self.carrier.close()
        self.carrier = UserHookReducer(group, state, hook, self.carrier.counters)
        self.carrier.marks = self.marks

    def rest(self, group: dist.ProcessGroup, clock: StepClock) -> None:
        """Let the process group carry the buckets (or the user's hook, where there is one), and watch no longer."""
        self.clock, self.board, self.marks = clock, NoBoard(), None
        self.given_up = ""
        if self.user is None:
            self.carrier.close()
            self.carrier = NativeReducer(group, self.carrier.counters)

    def pending(self) -> bool:
        """Tell whether the group is still at work on what was handed over last (never known of a user's hook)."""
        return isinstance(self.carrier, NativeReducer) and self.carrier.pending()

    def _finish(self, *, is_delayed: bool = False) -> None:
        self._queued = False
        self.fuse.run(self.clock.backward_ends)
        self._boards.run(self.board.waits)
        carrier = self.carrier  # another one may take its place before what is queued now comes: after DDP's callback
        leaves = self._leaves and not is_delayed
        left = leaves and carrier.leave()
        if not (left and _queue(functools.partial(self._wait, carrier, leaves, left=True))):
            self._wait(carrier, leaves)

    def _wait(self, carrier: BucketReducer, leaves: bool, *, left: bool = False) -> None:
        try:
            ctrl_c.ends_wait = True
            carrier.wait()
            ctrl_c.ends_wait = False
        except BaseException as error:
            ctrl_c.ends_wait = False
            self._problem = self._problem or error
            self._boards.run(self.board.fails, error)
            if carrier.give_up():
                self.given_up = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                self.is_unfinished = not leaves
        else:
            self._boards.run(self.board.goes_on)
            ended = functools.partial(self._ended, carrier)
            # A device waits where DDP tells it to, in a callback of DDP's own.
            if self.marks is None or not _queue(ended):
                ended(time.perf_counter() - carrier.ended() if left else 0.0)
        if left or self.is_unfinished or not _queue(self._over):
            self._over()

    def _over(self) -> None:
        """After DDP's own callback, raise what is to be raised."""
        if not self._is_handed_over:
            return  # a backward inside of this one is over (a reentrant checkpoint's)
        problem, self._problem = self._problem, None
        came = self._end()
        try:
            if came and (problem is None or isinstance(problem, Exception)):
                raise KeyboardInterrupt from problem
            if problem is not None:
                raise problem
        finally:
            del problem  # or it would keep this frame, and the frame it

    def _end(self) -> bool:
        """Backward is over; return whether `KeyboardInterrupt` is to be raised."""
        begun, self._begun, self._expects = self._begun, False, False
        return ctrl_c.end(begun=begun)

    def _ended(self, carrier: BucketReducer, ago: float = 0.0) -> None:
        self.fuse.run(self.clock.sync_ends, carrier.take, ago)


def _queue(callback: Callable[[], None]) -> bool:
    """Have the autograd engine call back when backward has no work left."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False  # DDP marks unused parameters before backward begins: a later bucket will queue it
    return True


ctrl_c.spares(
    GradientHook.run,
    GradientHook._finish,
    GradientHook._wait,
    GradientHook._ended,
    GradientHook._over,
)
