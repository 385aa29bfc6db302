"""What a process group of ours carries, whichever class torch knows it by (`backend`).

torch calls a collective by several names (since 2.13 `all_gather_single`, before `_allgather_base`), from Python by
attribute and from C++ through a trampoline. So every method that torch has is here, under all its names.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside.errors import UsageError
from ringside.pytorch.process_group import collectives
from ringside.pytorch.process_group.arguments import first_tensor, limit_of, normalize
from ringside.pytorch.process_group.collectives import MOST_RANKS
from ringside.pytorch.process_group.engine import Engine, SharedBuckets
from ringside.pytorch.process_group.work import RingsideWork


class GroupCounters:
    """Collectives by name and engine: counted, so that nothing falls through to another engine unseen.

    What C++ calls past the process group lands in its inner Gloo group without our knowledge; Gloo's own number of what
    it carried tells of it.

    Args:
        gloo: The inner group.
    """

    def __init__(self, gloo: Any) -> None:
        self._gloo, self._guard = gloo, threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._known: int = gloo._get_sequence_number_for_group()

    def add(self, name: str, engine: str) -> None:
        """Count one collective that `engine` carries."""
        with self._guard:
            self._counts[name, engine] += 1

    def through_gloo(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Count one collective that is given to the inner group on purpose, and give it."""
        with self._guard:
            self._counts[name, "gloo"] += 1
            before = self._gloo._get_sequence_number_for_group()
        try:
            return call(*args)
        finally:
            with self._guard:
                self._known += self._gloo._get_sequence_number_for_group() - before

    def total(self) -> int:
        """Return how many collectives this rank has begun, whoever carried them."""
        with self._guard:
            return sum(self._counts.values())

    def table(self) -> dict[str, dict[str, int]]:
        """Return for every engine how many of which collectives it carried.

        Collectives that came to Gloo past us are counted as `unseen`.
        """
        with self._guard:
            counts = dict(self._counts)
            unseen = self._gloo._get_sequence_number_for_group() - self._known
        table: dict[str, dict[str, int]] = {}
        for (name, engine), count in sorted(counts.items()):
            table.setdefault(engine, {})[name] = count
        if unseen > 0:
            table.setdefault("gloo", {})["unseen"] = unseen
        return table


CPU = torch.device("cpu")


class Carrier:
    """The collectives of CPU tensors of one group, run by Ringside's engine; a base of what torch calls.

    Collectives with `async_op=True` run in the order of their calls on a thread of the group's own; all others run on
    the thread that calls, after those. Messages between two ranks (`send`, `recv`) are Gloo's. Making a group is a
    collective of its ranks.

    Attributes:
        counters: Which engine ran which collectives.
        engine: Runs those of CPU tensors.
        limit_s: The longest wait that `set_timeout` has set since, seconds; None: none was.
        shares_buckets: Whether there are other ranks, all on this host, that could map a bucket.
        native: The same ranks as torch's own: Gloo and, in a group, what carries tensors on GPUs.
        backend_name: What the group is asked for by.
    """

    backend_name = "ringside"

    counters: GroupCounters
    engine: Engine
    limit_s: float | None
    native: Any

    def _open(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        """Make what carries: Gloo's part first, so that ranks meet there.

        Args:
            store: A part of the job's store that only this group, made this once, uses.
            rank: This rank.
            size: Number of ranks.
            timeout: Longest wait for other ranks in one collective; torch's default lets RINGSIDE_TIMEOUT_S decide.

        Raises:
            DeadlineError: A rank did not come.
            MismatchError: Ranks run different versions or have different settings; names who differs.
        """
        self._rank = rank
        self._gloo: Any = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout=timeout)
        self.counters = GroupCounters(self._gloo)
        self._coalesced: list[Any] | None = None
        self.limit_s = None if timeout else 0.0
        _alive.add(self)
        self.engine = Engine(PrefixStore("engine", store), rank, size, engine_limit_s(timeout))
        self._posts = self.engine.inside is not None and size <= MOST_RANKS
        self._buckets = SharedBuckets(self.engine.inside) if self.engine.inside is not None and size > 1 else None
        self.shares_buckets = self._buckets is not None

    def execute(self, collective: collectives.Collective, args: tuple[Any, ...]) -> RingsideWork:
        """Run a collective of CPU tensors, here and now, or (`asyncOp`) where it is waited for or in background.

        Args:
            collective: Which one.
            args: Tensors, then options, as torch's process groups take them.
        """
        engine, name = self.engine, collective.__name__
        now = engine.is_here or not getattr(args[-1], "asyncOp", True)
        plan = collective(engine.inside or engine.communicator, *args)
        outputs, job = next(plan), functools.partial(next, plan, None)
        self.counters.add(name, "ringside")
        limit_s = limit_of(args[-1], self.limit_s) if engine.size > 1 else None
        if engine.is_here or (now and limit_s is None):
            engine.run(job)
            work = RingsideWork(name, engine, outputs)
        else:
            # A bucket of DDP's is summed where it lies.
            bucket = None
            if not now and collective is collectives.all_reduce and self._buckets is not None and len(args[0]) == 1:
                bucket = self._buckets.job(args[0][0]) if args[-1].reduceOp == dist.ReduceOp.SUM else None
            turn = engine.start(bucket or job, sum(out.numel() * out.element_size() for out in outputs))
            work = RingsideWork(name, engine, outputs, turn, limit_s)
            if now:
                work.wait()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _post(self, collective: collectives.Collective, args: tuple[Any, ...]) -> RingsideWork | None:
        """Run a small collective, or start one that the waiting thread finishes; None: it is not that, or not now.

        Tensor parallelism and serving wait for each of these, in code that leaves the caches cold: every line shows.
        """
        engine, opts = self.engine, args[-1]
        if not self._posts or limit_of(opts, self.limit_s) is not None:
            return None
        small = collectives.SMALL[collective](engine.inside, *args)
        if small is None:
            return None
        turn = None
        if not getattr(opts, "asyncOp", True):  # there is none up to torch 2.7: there all are waited for
            if not engine.run_begun(*small):
                return None
        else:
            turn = engine.post(*small)
            if turn is None:
                return None
        name, outputs = collective.__name__, args[0] if isinstance(args[0], list) else [args[0]]
        self.counters.add(name, "ringside")
        work = RingsideWork(name, engine, outputs, turn)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def carry_elsewhere(self, collective: str, name: str, args: tuple[Any, ...]) -> Any:
        """Carry out a collective whose tensors are not in the memory of the host, or refuse it.

        Args:
            collective: Its name.
            name: What torch calls it by.
            args: Tensors, then options.
        """
        raise NotImplementedError

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int) -> Any:
        """Send a tensor to one rank (Gloo; in a group of ours, NCCL on GPUs)."""
        return self._between_two("send", tensors, dst_rank, tag)

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int) -> Any:
        """Receive a tensor of one rank (likewise)."""
        return self._between_two("recv", tensors, src_rank, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        """Receive a tensor of any rank (Gloo)."""
        return self._between_two("recv_anysource", tensors, tag)

    def _between_two(self, name: str, tensors: list[torch.Tensor], *where: int) -> Any:
        raise NotImplementedError

    def _get_sequence_number_for_group(self) -> int:
        return self.counters.total()

    def getBackendName(self) -> str:
        """Return what the group is asked for by."""
        return self.backend_name

    def shutdown(self) -> None:
        """Finish what is under way, within seconds, and close; called by `destroy_process_group`."""
        self.engine.close()
        self.native.shutdown()

    def abort(self) -> None:
        """Close at once: what is under way fails here and at the peers."""
        self.engine.abort()
        self.native.abort()


def engine_limit_s(timeout: timedelta) -> float | None:
    """Return the longest wait of a group's engine, seconds; None: the environment's.

    Args:
        timeout: Of the group: torch's default says nothing, and of 0 only its calls know, as in Gloo.
    """
    return timeout.total_seconds() if timeout and timeout != c10d.default_pg_timeout else None


def own_part(store: Store, rank: int) -> Store:
    """Return a part of a group's store that only this making of it uses, so that it never meets what an old one left.

    A group may be made again under its old name, on all ranks equally often.
    """
    return PrefixStore(str(store.add(f"ringside/made/{rank}", 1)), store)


_alive: weakref.WeakSet[Carrier] = weakref.WeakSet()
_inherited: list[Carrier] = []


# In a forked child Gloo's destructor would wait for threads that only the parent has: kept alive, it never runs there.
os.register_at_fork(after_in_child=functools.partial(_inherited.extend, _alive))


def _method(name: str, collective: collectives.Collective, options: Any) -> Callable[..., Any]:
    """Return what a process group does when torch calls it by `name`: its own collective, or the native group's."""

    posts = collective in collectives.SMALL  # those have a path of their own

    def method(self: Carrier, *args: Any, **named: Any) -> Any:
        if posts and args and args[-1].__class__ is options and not named:
            work = self._post(collective, args)
            if work is not None:
                return work
        args = normalize(options, args, named)
        if _is_ours(args):
            return self.execute(collective, args)
        return self.carry_elsewhere(collective.__name__, name, args)

    method.__name__, method.__doc__ = name, collective.__doc__
    return method


def _is_ours(args: Any) -> bool:
    """Tell whether the tensors of a call are in the memory of the host (a barrier has none: its options say)."""
    tensor = first_tensor(args[0])
    if tensor is not None:
        return tensor.is_cpu
    return _is_ours(args[1:]) if len(args) > 1 else getattr(args[0], "device", None) in (None, CPU)


for _collective, (_options, *_names) in collectives.TABLE.items():
    for _name in _names:
        setattr(Carrier, _name, _method(_name, _collective, _options))


def carrier_of(group: Any) -> Carrier | None:
    """Return what carries the CPU tensors of a process group; None: it is none of ours."""
    if isinstance(group, Carrier):
        return group
    if CPU not in getattr(group, "_device_types", ()):
        return None
    backend = group._get_backend(CPU)
    return backend if isinstance(backend, Carrier) else None


def carried(group: dist.ProcessGroup | None = None) -> dict[str, dict[str, int]]:
    """Return which engine carried how many of which collectives of a `ringside` process group, on this rank.

    Args:
        group: The process group; None: the default group.

    Returns:
        Such as `{"ringside": {"all_reduce": 12}, "gloo": {"send": 3}}`.

    Raises:
        UsageError: It is a group of another backend.
    """
    group = group if group is not None else dist.distributed_c10d._get_default_group()
    carrier = carrier_of(group)
    if carrier is None:
        raise UsageError(
            f"a group of the backend {dist.get_backend(group)!r} does not count; make it with "
            'init_process_group("ringside") or new_group(backend="ringside")'
        )
    return carrier.counters.table()
