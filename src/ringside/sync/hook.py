"""The communication hook that DDP calls for every bucket."""

from __future__ import annotations

import contextlib
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

from ringside.engine.interrupts import held_back
from ringside.monitor.marks import Marks
from ringside.monitor.step_clock import StepClock
from ringside.sync.carriers import Carrier, HookCarrier, NativeCarrier, UserHook
from ringside.sync.fuse import Fuse
from ringside.sync.watch_board import Board, NoBoard

INTERRUPT_S = 3.0
"""How long Ctrl-C waits for other ranks, which would fail without this one; DDP by itself waits for the timeout."""


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
        going_on: Told by the ranks that go on (DDP's Join) how many they are; None: nobody asked.
        interrupt_s: How long Ctrl-C waits for other ranks.
        backwards: Backward passes whose buckets were all handed over: the same number on all ranks.
    """

    interrupt_s = INTERRUPT_S

    def __init__(self, carrier: Carrier, clock: StepClock, *, delayed: bool = False, leaves: bool = True) -> None:
        self.carrier = carrier
        self.clock = clock
        self.board: Board | NoBoard = NoBoard()
        self.marks: Marks | None = None
        self.going_on: Future[list[torch.Tensor]] | None = None
        self.backwards = 0
        self.fuse = Fuse("timing the steps of this rank")
        self._boards = Fuse("the hang watch of this rank")
        self._delayed, self._leaves = delayed, leaves
        self._queued = False

    def run(self, model: weakref.ref[DistributedDataParallel], bucket: GradBucket) -> Future[torch.Tensor]:
        """Carry one bucket."""
        if not self._queued and not self._delayed:
            self._queued = _queue(self._finish)
        buffer = bucket.buffer()
        self._boards.run(self.board.enters, buffer.numel() * buffer.element_size(), 0 if self.user is None else 1)
        future = self.carrier.carry(bucket, self._share(model()))
        self.backwards += bucket.is_last()
        if self._delayed and bucket.is_last():
            self._delayed = False
            self._finish(leaves=False)
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
        held = held_back(self.interrupt_s)
        try:
            with held if carrier.holds_ctrl_c else contextlib.nullcontext():
                carrier.wait()
        except BaseException as error:
            self._boards.run(self.board.fails, error)
            if carrier.holds_ctrl_c and not isinstance(error, Exception):  # a thread may be in an earlier bucket
                carrier.close(at_once=True)  # tells the others, and nobody writes into this rank's buckets any more
            raise
        self._boards.run(self.board.goes_on)
        ended = functools.partial(self._ended, carrier)
        # A device waits where DDP tells it to, in a callback of DDP's own.
        if self.marks is None or not _queue(ended):
            ended(time.perf_counter() - carrier.ended() if left else 0.0)
        if held.came and not _queue(_interrupt):  # after DDP's callback, or DDP would not be ready for the next forward
            _interrupt()

    def _ended(self, carrier: Carrier, ago: float = 0.0) -> None:
        self.fuse.run(self.clock.sync_ends, carrier.take, ago)


def _interrupt() -> None:
    raise KeyboardInterrupt


def _queue(callback: Callable[[], None]) -> bool:
    """Have the autograd engine call back when backward has no work left."""
    try:
        torch.autograd.Variable._execution_engine.queue_callback(callback)
    except RuntimeError:
        return False  # DDP marks unused parameters before backward begins: a later bucket will queue it
    return True
