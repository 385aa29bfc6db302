"""The communication hook that DDP calls for every bucket."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from ringside.monitor.marks import Marks
from ringside.monitor.step_clock import StepClock
from ringside.sync.carriers import Carrier, HookCarrier, NativeCarrier, UserHook
from ringside.sync.fuse import Fuse
from ringside.sync.watch_board import Board, NoBoard


class GradientHook:
    """Gives buckets to a carrier and waits for them when backward has no work left.

    The waiting begins in a callback of the autograd engine that runs before DDP's own: what it takes is the exposed
    part of the synchronisation, and an error raised there reaches the caller of `backward()` with its own type. Where
    the carrier leaves the waiting to DDP, which copies each bucket while others are under way, a callback after DDP's
    says what it took, and raises the error.

    Args:
        carrier: Who carries the buckets.
        clock: Told when backward and synchronisation end.
        delayed: DDP hands over all buckets of the first backward at its end and waits for them at once, before any
            callback of ours could (`static_graph=True`): so the last one handed over is where to wait.
        leaves: Waiting may be left to DDP: in its callback there is nothing but buckets that it waits for. With
            `find_unused_parameters=True` there is a collective of its own, which nobody here could end.

    Attributes:
        board: Told what is handed over and waited for, for the hang watch.
        marks: Set marks on the device that the model is on; None: the host's clock tells enough.
        fuse: Keeps what breaks in the clock away from training; the session's, where there is one.
        backwards: Backward passes whose buckets were all handed over: the same number on all ranks.
    """

    def __init__(self, carrier: Carrier, clock: StepClock, *, delayed: bool = False, leaves: bool = True) -> None:
        self.carrier = carrier
        self.clock = clock
        self.board: Board | NoBoard = NoBoard()
        self.marks: Marks | None = None
        self.backwards = 0
        self.fuse = Fuse("timing the steps of this rank")
        self._boards = Fuse("the hang watch of this rank")
        self._delayed, self._leaves = delayed, leaves
        self._queued = False

    def run(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Carry one bucket."""
        if not self._queued and not self._delayed:
            self._queued = _queue(self._finish)
        buffer = bucket.buffer()
        self._boards.run(self.board.enters, buffer.numel() * buffer.element_size(), 0 if self.user is None else 1)
        future = self.carrier.carry(bucket)
        self.backwards += bucket.is_last()
        if self._delayed and bucket.is_last():
            self._delayed = False
            self._finish(leaves=False)
        return future

    @property
    def user(self) -> HookCarrier | None:
        """The user's own hook, where that carries the buckets."""
        return self.carrier if isinstance(self.carrier, HookCarrier) else None

    def yield_to(self, group: dist.ProcessGroup, state: Any, hook: UserHook) -> None:
        """Let a hook of the user's own carry the buckets from now on, and only watch it."""
        self.carrier.close()
        self.carrier = HookCarrier(group, state, hook, self.carrier.counters)
        self.carrier.marks = self.marks

    def rest(self, group: dist.ProcessGroup, clock: StepClock) -> None:
        """Let the process group carry the buckets (or the user's hook, where there is one), and watch no longer."""
        self.clock, self.board, self.marks = clock, NoBoard(), None
        if self.user is None:
            self.carrier.close()
            self.carrier = NativeCarrier(group, self.carrier.counters)

    def pending(self) -> bool:
        """Tell whether the group is still at work on what was handed over last (never known of a user's hook)."""
        return isinstance(self.carrier, NativeCarrier) and self.carrier.pending()

    def _finish(self, *, leaves: bool = True) -> None:
        self._queued = False
        self.fuse.run(self.clock.backward_ends)
        self._boards.run(self.board.waits)
        carrier = self.carrier  # another one may take its place before what is queued now comes: after DDP's callback
        left = leaves and self._leaves and carrier.leave()
        if not (left and _queue(functools.partial(self._wait, carrier, left=True))):
            self._wait(carrier)

    def _wait(self, carrier: Carrier, *, left: bool = False) -> None:
        try:
            carrier.wait()
        except BaseException as error:
            self._boards.run(self.board.fails, error)
            raise
        self._boards.run(self.board.goes_on)
        ended = functools.partial(self._ended, carrier)
        # A device waits where DDP tells it to, in a callback of DDP's own.
        if self.marks is None or not _queue(ended):
            ended(time.perf_counter() - carrier.ended() if left else 0.0)

    def _ended(self, carrier: Carrier, ago: float = 0.0) -> None:
        self.fuse.run(self.clock.sync_ends, carrier.take, ago)


def _queue(callback: Callable[[], None]) -> bool:
    """Have the autograd engine call back when backward has no work left."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False  # DDP marks unused parameters before backward begins: a later bucket will queue it
    return True
