"""DDP's backward watched from outside: no communication hook, so DDP divides, copies and reduces as without Ringside.

What is told, and by whom:

1. The gradient of the model's first parameter is about to be accumulated (a hook on its autograd node). DDP's own hook
   on the same node comes after: so what is queued here runs before DDP's callback, which waits for the buckets.
2. That callback of ours: backward has no work left. It queues another one, which runs after DDP's:
3. The gradients are synchronised.

The first parameter's gradient comes last in most models. That matters where backward runs backwards of its own inside
(reentrant checkpoints): DDP waits at the end of the one in which the last gradient came. With `find_unused_parameters`,
and in the first backward with `static_graph`, any parameter may be unused or DDP's callback is queued first. Then the
outputs of the model tell, as they tell DDP itself.
"""

from __future__ import annotations

import functools
import logging
import math
import time
import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _find_tensors

from ringside.engine.runtime.interrupts import ctrl_c
from ringside.monitor.device_marks import DeviceEvents
from ringside.monitor.step_clock import StepClock, SyncTimes, Told
from ringside.pytorch.ddp.backward import FollowedBackward, queue_callback
from ringside.pytorch.recording.parameter_digests import shared_parameters

_log = logging.getLogger(__name__)


class BackwardWatch(FollowedBackward):
    """Watches one model's backward; see the module.

    Args:
        model: The model; not kept alive.
        clock: Informed when backward and synchronisation end.

    Attributes:
        counters: Collectives by what reduced them: the group's backend, or `hook:` and the name of the user's hook.
        marks: Set marks in the queue of the model's device; None: the host's clock is enough.
        sync_marks: Those before and behind the newest synchronisation.
    """

    def __init__(self, model: DistributedDataParallel, clock: StepClock) -> None:
        super().__init__(clock)
        self.marks: DeviceEvents | None = None
        self._model = weakref.ref(model)
        self._group_name = str(model.process_group.group_name)
        self.counters: Counter[str] = Counter()
        user = user_hook_name(model)
        self._name = f"hook:{user}" if user else str(dist.get_backend(model.process_group))
        # Whether DDP reduces in the next backward: it has been told so by a forward pass.
        self._is_armed = False
        self._callback: weakref.ref[Any] | None = None
        self._waits_since = 0.0
        self.sync_marks: tuple[Any, Any] | None = None
        self._issued_before = 0
        self._bucket_bytes: list[int] = []
        self._are_buckets_final = False
        self._handle: Any = None
        self.guard.run(self._read_buckets, model)
        self.guard.run(self._watch_first_parameter, model)

    @property
    def has_user_hook(self) -> bool:
        """Whether a hook of the user's own reduces the buckets."""
        return self._name.startswith("hook:")

    def use_user_hook(self, name: str) -> None:
        """A hook of the user's own reduces the buckets from now on."""
        self._name = f"hook:{name}"

    def stop(self, group: dist.ProcessGroup, clock: StepClock) -> None:
        """Watch no longer, and leave the model as it was."""
        super().stop(group, clock)
        self._is_armed = False
        self.marks = self.sync_marks = None
        if self._handle is not None:
            self._handle.remove()
        if self._expects and not self._begun:
            self._end_backward()  # no backward of this model will

    def is_pending(self) -> bool:
        """Return whether the model's device has come to the newest synchronisation, and not past it.

        For the hang watch, on its thread: nobody waits for a device on the host.
        """
        marks, ends = self.marks, self.sync_marks
        return marks is not None and ends is not None and marks.reached(ends[:1]) and not marks.reached(ends[1:])

    def forward_ends(self, output: Any, syncs: bool) -> None:
        """From now on backward may begin."""
        super().forward_ends(output, syncs)
        model = self._model()
        if not (syncs and torch.is_grad_enabled()) or model is None:
            return
        if not self._is_armed:
            self._is_armed = True
            groups = self.clock.groups
            self._issued_before = 0 if groups is None else groups.counts[self._group_name]
        if (model.static_graph and not self.backwards) or (model.find_unused_parameters and not model.static_graph):
            self.guard.run(self._watch_outputs, output)

    def _watch_first_parameter(self, model: DistributedDataParallel) -> None:
        first = next((each for _, each in shared_parameters(model) if each.requires_grad), None)
        if first is not None:  # its node lives as long as DDP's reducer
            self._handle = torch.autograd.graph.get_gradient_edge(first).node.register_prehook(self._on_gradient())

    def _watch_outputs(self, output: Any) -> None:
        for node in {tensor.grad_fn for tensor in _find_tensors(output)}:  # type: ignore[no-untyped-call]
            if node is not None:
                node.register_prehook(self._on_gradient())

    # -------------------------------------------------------------------------------------------- in backward

    def _on_gradient(self) -> Any:
        return functools.partial(_on_gradient, weakref.ref(self))  # the graph must not keep what keeps the graph

    def backward_begins(self) -> None:
        """The first gradient that is watched comes: be called before DDP waits."""
        if not self._is_armed:
            return
        self._is_armed = False
        self._begin_backward()
        if not queue_callback(self._no_work_left):
            self._end_backward()

    def _no_work_left(self) -> None:
        """Before DDP's callback: from here on this rank waits for the others."""
        self.guard.run(self.clock.backward_ends)
        self._waits_since = time.perf_counter()
        self._board_guard.run(self._wait_begins)
        mark = None if self.marks is None else self.marks.mark()
        synchronised = functools.partial(self._synchronised, mark)
        # Where DDP raises, what is queued behind it is not called, but let go of.
        self._callback = weakref.ref(synchronised, functools.partial(_broken_off, weakref.ref(self)))
        queue_callback(synchronised)

    def _wait_begins(self) -> None:
        self.board.entered(sum(self._bucket_bytes), int(self.has_user_hook))
        self.board.waiting()

    def _synchronised(self, mark: Any) -> None:
        """After DDP's callback: the gradients are synchronised, unless an outer backward is yet to do it."""
        self._callback = None
        self._board_guard.run(self.board.resumed)
        if self.marks is not None:
            self.sync_marks = (mark, self.marks.mark())
        self.guard.run(self._count)
        if self._end_backward():
            raise KeyboardInterrupt

    def _count(self) -> None:
        model = self._model()
        if model is None:
            return
        try:
            model.reducer._check_reducer_finalized()
        except RuntimeError:
            # DDP waits at the end of another backward, unseen. The step is one all the same.
            if not self.clock.always_synced:
                self.clock.always_synced = True
                _log.log(
                    logging.WARNING if dist.get_rank() == 0 else logging.DEBUG,
                    "how long ranks wait for gradients is not seen: the first parameter's gradient comes in a backward "
                    "inside of backward (a reentrant checkpoint), and another one after it; use_reentrant=False helps",
                )
            return
        self.backwards += 1
        if not self._are_buckets_final:
            self._read_buckets(model)
        self.counters[self._name] += len(self._bucket_bytes)
        self.clock.sync_ends(self.set_apart)

    def broken_off(self) -> None:
        """DDP has raised an error: this rank waits no longer."""
        self._board_guard.run(self.board.failed, RuntimeError("DistributedDataParallel raised an error in backward"))

    def set_apart(self) -> Told:
        """Return how to get what the synchronisation took; when single buckets came and went is not known."""
        groups, buckets = self.clock.groups, self._bucket_bytes
        wait = (self._waits_since, time.perf_counter()) if self.sync_marks is None else self.sync_marks
        if groups is not None and groups.synchronised(self._group_name, self._issued_before, *wait):
            buckets = []  # they are counted among what the group did
        return functools.partial(_sync_times, buckets)

    def _read_buckets(self, model: DistributedDataParallel) -> None:
        """Read the buckets' bytes from DDP, which makes them anew once and tells of that some steps later."""
        data = model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        rebuilt = data.get("rebuilt_bucket_sizes")
        sizes = (rebuilt or data.get("bucket_sizes", "")).split(",")
        self._bucket_bytes = [int(size) for size in sizes if size.strip()]
        self._are_buckets_final = bool(rebuilt) or (model.find_unused_parameters and not model.static_graph)


def user_hook_name(model: DistributedDataParallel) -> str:
    """Return the name of the communication hook that the script has registered; "": none."""
    return str(model._get_ddp_logging_data().get("comm_hook") or "")  # type: ignore[no-untyped-call]


def _sync_times(buckets: list[int]) -> SyncTimes:
    return SyncTimes(
        sync_seconds=math.nan,
        wire_seconds=math.nan,
        wait_seconds=math.nan,
        payload_bytes=sum(buckets),
        collectives=len(buckets),
        busy_seconds=math.nan,
    )


def _on_gradient(of_watch: weakref.ref[BackwardWatch], *_: Any) -> None:
    watch = of_watch()
    if watch is not None:
        watch.backward_begins()


def _broken_off(of_watch: weakref.ref[BackwardWatch], callback: weakref.ref[Any]) -> None:
    watch = of_watch()
    if watch is not None and watch._callback is callback:
        watch.broken_off()


# Ctrl-C must not break these off, and all ranks with them: it is kept, and raised by `_synchronised`.
ctrl_c.spares(_on_gradient, BackwardWatch.backward_begins, BackwardWatch._no_work_left, BackwardWatch._synchronised)
