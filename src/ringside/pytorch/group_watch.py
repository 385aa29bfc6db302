"""`watch()`: every process group of a job watched, whatever the parallelism and the backend; not a byte is touched.

Two things of torch's are wrapped while it watches: the registration of groups, so that those that are made later are
watched from the start, and `Work.wait`. What is issued is told by the hooks of a group (torch ≥ 2.14), or by our own
process group (any torch). A stock group on an older torch has no hooks: it is not seen, which is said once.

On a GPU a wait is the stream's, not the host's: marks on the stream that training uses tell when it came to what, and
how long it was held up. What is waited for in C++ is asked whether it is over, on a thread of its own.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from ringside.errors import UsageError
from ringside.isolation import Guard
from ringside.monitor.wait_meter import Issued, WaitMeter, WatchedGroup
from ringside.pytorch.ddp.cuda_events import CudaEvents, events_of
from ringside.pytorch.process_group.arguments import first_tensor
from ringside.pytorch.process_group.carrier import Carrier, carrier_of
from ringside.pytorch.process_group.collectives import TABLE
from ringside.pytorch.process_group.work import OwnWork
from ringside.pytorch.recording import session as sessions
from ringside.pytorch.recording.session import Session

HOOK_ID = 0x52494E47
"""Tells our hooks of a group from others'."""
MESSAGES = ("SEND", "RECV")
ALL_TO_ALL = frozenset({"ALLTOALL", "ALLTOALL_BASE", "alltoall", "alltoall_base", "all_to_all", "all_to_all_single"})
"""All-to-alls, by what hooks and our own process group call them."""
LOOK_SECONDS = 0.001
"""How often a collective on a GPU that is waited for in C++ is asked whether it is over."""
OWN_METHODS = [name for _, *names in TABLE.values() for name in names] + ["send", "recv"]
"""What the carrier of our own process group is called by."""

_log = logging.getLogger(__name__)
_current: Watch | None = None


class Watch:
    """What `watch()` returns: Ringside's hold on the process groups of this process.

    Args:
        session: The monitor of this process; None: nothing is watched.

    Attributes:
        session: The monitor of this process; None: RINGSIDE=off, or it has failed.
    """

    def __init__(self, session: Session | None) -> None:
        self.session = session
        self._hooks: _GroupHooks | None = None
        if session is not None:
            self._hooks = _GroupHooks(session)

    def step(self) -> None:
        """A training step ends here: for loops that no optimizer of torch's ends."""
        if self.session is not None:
            self.session.guard.run(self.session.clock.step_ends)

    def off(self) -> None:
        """Watch no longer, and leave torch as it was; the run is ended at exit, or by `session.end()`."""
        global _current
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.remove()
        if _current is self:
            _current = None


def watch(*, run_dir: str | os.PathLike[str] | None = None) -> Watch:
    """Watch every process group of this job: who holds it up, whatever the parallelism (FSDP2, tensor, pipeline, ...).

    Call it on all ranks, after `init_process_group`; groups that are made later are watched, too. A step ends with the
    optimizer's update (or `watch().step()`). A second call returns the same watch.

    Args:
        run_dir: Where rank 0 writes the run (default: RINGSIDE_RUN_DIR, else a new directory under `runs/`).

    Returns:
        The `Watch`. With RINGSIDE=off in the environment it does nothing at all.

    Raises:
        UsageError: There is no process group yet.
    """
    global _current
    if _current is not None and _current.session is not None and _current.session.is_recording:
        return _current
    if os.environ.get("RINGSIDE", "").lower() in ("off", "0"):
        return Watch(None)
    if not dist.is_initialized():
        raise UsageError("watch() needs a process group: call torch.distributed.init_process_group() before")
    if _current is not None:
        _current.off()
    session: Session | None = None
    with Guard("watching this rank"):
        session = sessions.begin(run_dir, str(dist.get_backend()))
    if session is None:
        return Watch(None)
    _current = Watch(session)
    return _current


def watch_unasked(*, run_dir: str | os.PathLike[str] | None = None) -> Watch | None:
    """Watch a job whose script has not asked for it; None where its groups show nothing, or nothing is to be watched.

    A collective, as `watch()`.

    Args:
        run_dir: As of `watch()`.
    """
    if os.environ.get("RINGSIDE", "").lower() in ("off", "0") or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    # Ours tells what is issued in it, and every group of torch ≥ 2.14 does.
    is_seen = hasattr(dist.group.WORLD, "register_pre_hook") or carrier_of(dist.group.WORLD) is not None
    return watch(run_dir=run_dir) if is_seen else None


class _GroupHooks:
    """What is hooked into torch while a session lasts.

    Args:
        session: Told of every wait.
    """

    def __init__(self, session: Session) -> None:
        self.meter = WaitMeter(session.rank, session.clock.waited)
        self._guard = self.meter.guard
        self._session = session
        # Which wait a Work's is. A Work that Python has let go of is forgotten; the newest one is held until the next
        # one is issued, or it would be gone before the caller has it.
        self._works: MutableMapping[Any, Issued] = weakref.WeakKeyDictionary()
        self._newest: Any = None
        self._under_way: Issued | None = None
        # On a device torch may send several messages as one (`batch_isend_irecv`), whose Work nobody tells of: a wait
        # for an unknown work is one for what was issued since the last such wait, or for the same as that.
        self._batched: list[tuple[Issued, bool]] = []  # and whether it is received
        self._message: Issued | None = None
        self._events: CudaEvents | None = None
        self._ends: Ends | None = None
        self._hooked: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_blind_said = False
        self._stock_register = c10d._register_process_group  # type: ignore[attr-defined]
        self._stock_wait = dist.Work.wait
        for group in list(c10d._world.pg_map):
            self._guard.run(self._hook, group)
        self._register, self._wait = self._registers(), self._waits()
        c10d._register_process_group = self._register  # type: ignore[attr-defined]
        dist.Work.wait = self._wait  # type: ignore[method-assign]
        session.clock.groups = self.meter
        if session.watch is not None:
            session.watch.groups = self.meter
        session.hooks.append(self)

    def remove(self) -> None:
        """Leave torch as it was; what somebody else has wrapped since stays, and passes on."""
        if c10d._register_process_group is self._register:  # type: ignore[attr-defined]
            c10d._register_process_group = self._stock_register  # type: ignore[attr-defined]
        if dist.Work.wait is self._wait:
            dist.Work.wait = self._stock_wait  # type: ignore[method-assign]
        self._disconnect()
        self._newest = None
        if self._ends is not None:
            self._ends.close()
        hooked, self._hooked = list(self._hooked), weakref.WeakSet()
        for group in hooked:
            carrier = carrier_of(group)
            if carrier is not None:
                for name in OWN_METHODS:
                    vars(carrier).pop(name, None)
            if _tells_by_hooks(group, carrier):
                self._guard.run(group.unregister_pre_hook, HOOK_ID)
                self._guard.run(group.unregister_post_hook, HOOK_ID)

    def _disconnect(self) -> None:
        """Nothing is told to the session any more."""
        if self._session.clock.groups is self.meter:
            self._session.clock.groups = None
        if self._session.watch is not None:
            self._session.watch.groups = None

    def _issue(self, watched: WatchedGroup, peer: int, tensors: Any, other_side: Any = None) -> Issued | None:
        """Something is issued in a group; None: it does not count.

        Of an all-to-all `other_side` is what comes for what goes, or the other way round: its splits make them differ.
        """
        first, meter = first_tensor(tensors), self.meter
        if first is not None:
            if not first.is_cpu:
                if meter.device is None and not meter.is_muted:
                    self._use_device(first.device)
            elif meter.device is not None:
                meter.issue_on_host(watched.name)
                return None
        size_bytes = max(size_of(tensors), size_of(other_side))
        return meter.issue(watched.name, peer, size_bytes, is_routed=other_side is not None)

    def _use_device(self, device: torch.device) -> None:
        """The first tensor on a device: from now on its clock counts."""
        events = events_of(device)
        if events is None:
            self.meter.is_muted = True
            self._disconnect()
            level = logging.WARNING if self._session.rank == 0 else logging.DEBUG
            _log.log(level, "collectives on %s are not timed: this job is not watched by its groups", device.type)
            return
        self._events = events
        events.stream = torch.cuda.default_stream(device)
        self.meter.use_device(self._session.use_device_events(events))

    def _batch_is_waited_for(self) -> Issued | None:
        """Return what a wait for an unknown work is ascribed to: a message that is received, if there is one."""
        batch, self._batched = self._batched, []
        if batch:
            self._message = max(reversed(batch), key=lambda one: one[1])[0]
            for issued, _ in batch:
                self.meter.count_as_waited(issued)
        return self._message

    def _watch_end(self, work: Any, issued: Issued) -> None:
        """Nobody may wait in Python for what was issued: when it is over is all that is to be learnt of it."""
        if self._events is None:
            with contextlib.suppress(RuntimeError):  # it does not tell
                work.get_future().add_done_callback(issued.ended)
            return
        if self._ends is None:
            self._ends = Ends(self._guard, self._events)
        self._ends.add(work, issued)
        self.meter.unfinished.append(issued)

    # -------------------------------------------------------------------------------------------- what is wrapped

    def _registers(self) -> Callable[..., Any]:
        stock, hook, guard = self._stock_register, self._hook, self._guard

        @functools.wraps(stock)
        def register(name: Any, group: Any) -> Any:
            result = stock(name, group)
            guard.run(hook, group)
            return result

        return register

    def _waits(self) -> Callable[..., Any]:
        stock, works = self._stock_wait, self._works

        @functools.wraps(stock)
        def wait(work: Any, *args: Any, **named: Any) -> Any:
            issued = works.pop(work, None)
            if issued is None:
                issued = self._guard.run(self._batch_is_waited_for)
            if issued is None:
                return stock(work, *args, **named)
            self._newest = None
            return issued.timed(stock, work, *args, **named)

        return wait

    # -------------------------------------------------------------------------------------------- groups

    def _hook(self, group: Any) -> None:
        if group is None or group is dist.GroupMember.NON_GROUP_MEMBER or group in self._hooked:
            return
        of_group = weakref.ref(group)
        watched = WatchedGroup(group.group_name, group.group_desc, lambda: dist.get_process_group_ranks(of_group()))
        carrier = carrier_of(group)
        if carrier is not None:
            # In the place of its methods, of this group alone: one that nobody watches pays nothing.
            for name in OWN_METHODS:
                if hasattr(type(carrier), name):
                    setattr(carrier, name, self._watched_method(weakref.ref(carrier), watched, name))
        if _tells_by_hooks(group, carrier):
            before, after = self._hooks_of(watched, carrier)
            group.register_pre_hook(HOOK_ID, before)
            group.register_post_hook(HOOK_ID, after)
        elif carrier is None:
            if not self._is_blind_said:
                self._is_blind_said = True
                _log.log(
                    logging.WARNING if self._session.rank == 0 else logging.DEBUG,
                    "collectives of %s groups are not seen on torch %s: from 2.14 on they are, and on any torch those "
                    'of init_process_group("ringside") and of DistributedDataParallel models',
                    dist.get_backend(group),
                    torch.__version__,
                )
            return
        self._hooked.add(group)
        self.meter.add(watched)

    def _watched_method(self, of_carrier: Any, watched: WatchedGroup, name: str) -> Callable[..., Any]:
        stock, works, guard = getattr(type(of_carrier()), name), self._works, self._guard
        is_message = name in ("send", "recv")
        meter = self.meter

        def issue(args: tuple[Any, ...]) -> Issued | None:
            other_side = args[1:2] if name in ALL_TO_ALL else None
            return self._issue(watched, watched.ranks[args[1]] if is_message else -1, args[:1], other_side)

        @functools.wraps(stock)
        def method(*args: Any, **named: Any) -> Any:
            carrier = of_carrier()
            issued = guard.run(issue, args)
            if issued is None:
                return stock(carrier, *args, **named)
            if not (is_message or getattr(named.get("opts", args[-1] if args else None), "asyncOp", True)):
                issued.is_inline = True
                return issued.timed(functools.partial(stock, carrier, **named), *args)
            work = stock(carrier, *args, **named)
            if isinstance(work, OwnWork):
                work.watched = issued
            elif is_message and meter.device is not None:
                self._batched.append((issued, name == "recv"))
            elif work is not None:
                works[work] = issued
                if meter.device is not None and not meter.is_seen(issued):
                    guard.run(self._watch_end, work, issued)
            return work

        return method

    def _hooks_of(self, watched: WatchedGroup, carrier: Carrier | None) -> tuple[Callable[[Any], None], ...]:
        meter, guard, works = self.meter, self._guard, self._works

        def issue(args: Any) -> None:
            first = first_tensor(args.input_tensors or args.output_tensors)
            if carrier is not None and (first is None or first.is_cpu):
                return  # the carrier's method tells of it
            peer = watched.ranks[args.root] if args.name.name in MESSAGES else -1
            other_side = args.output_tensors if args.name.name in ALL_TO_ALL else None
            tensors = args.input_tensors or args.output_tensors
            self._under_way = issued = self._issue(watched, peer, tensors, other_side)
            if issued is not None:
                issued.is_inline = not args.async_op

        def issued(args: Any) -> None:
            issued, self._under_way = self._under_way, None
            work = args.work
            if issued is not None and args.name.name in MESSAGES and meter.device is not None:
                self._batched.append((issued, args.name.name == "RECV"))
                return
            if issued is None or work is None:
                return
            works[work] = issued
            self._newest = work
            if not meter.is_seen(issued) and not (meter.device is not None and issued.is_inline):
                self._watch_end(work, issued)

        return functools.partial(guard.run, issue), functools.partial(guard.run, issued)


def _tells_by_hooks(group: Any, carrier: Carrier | None) -> bool:
    """Return whether a group's hooks tell something: not where all that it carries is told of by its carrier."""
    return hasattr(group, "register_pre_hook") and (carrier is None or len(group._device_types) > 1)


class Ends:
    """Asks works on a GPU whether they are over, on a thread of its own: NCCL's stream is not ours to mark.

    Args:
        guard: Keeps what breaks in here away from training.
        events: Of the device.
    """

    def __init__(self, guard: Guard, events: CudaEvents) -> None:
        self._events = events
        self._new: deque[tuple[Any, Issued]] = deque()
        self._is_new, self._is_closed = threading.Event(), False
        threading.Thread(target=guard.run, args=(self._poll,), name="ringside-ends", daemon=True).start()

    def add(self, work: Any, issued: Issued) -> None:
        """Look out for the end of this one."""
        self._new.append((work, issued))
        self._is_new.set()

    def close(self) -> None:
        """Look out no longer."""
        self._is_closed = True
        self._is_new.set()

    def _poll(self) -> None:
        pending: list[tuple[Any, Issued]] = []
        with self._events.beside_captures():
            while not self._is_closed:
                if pending:
                    time.sleep(LOOK_SECONDS)
                else:
                    self._is_new.wait()
                    self._is_new.clear()
                while self._new:
                    pending.append(self._new.popleft())
                # No name here holds a work that is over, and its tensors with it.
                pending = [one for one in pending if not _is_over(*one)]


def _is_over(work: Any, issued: Issued) -> bool:
    """Return whether a work is over, and note when; one that Python has waited for meanwhile has told by itself."""
    if not issued.is_waited_for:
        if not work.is_completed():
            return False
        issued.ended()
    return True


def size_of(tensors: Any) -> int:
    """Return the bytes of a tensor, or of a list of them however nested."""
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(size_of, tensors)) if isinstance(tensors, (list, tuple)) else 0
