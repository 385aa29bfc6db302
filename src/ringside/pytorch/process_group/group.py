"""The process group that `init_process_group("ringside")` makes: CPU tensors are ours, all others the native one's.

torch calls a process group by two names for one thing (since 2.13 `all_gather_single`, before `_allgather_base`), from
Python by attribute and from C++ through a trampoline that knows some of the methods only. So every method that torch
has is overridden here, under all its names; what C++ calls past us is counted (`counters.py`).
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside.engine.shm.memory import Storage
from ringside.pytorch.process_group import collectives
from ringside.pytorch.process_group.arguments import first_tensor, limit_of, normalize
from ringside.pytorch.process_group.collectives import MOST_RANKS
from ringside.pytorch.process_group.counters import GroupCounters
from ringside.pytorch.process_group.engine import Engine, SharedBuckets
from ringside.pytorch.process_group.work import Coalesced, RingsideWork

CPU = torch.device("cpu")


class RingsideGroup(dist.ProcessGroup):
    """A process group whose collectives of CPU tensors are run by Ringside's engine.

    Collectives with `async_op=True` run in the order of their calls on a thread of the group's own; all others run on
    the thread that calls, after those. Messages between two ranks (`send`, `recv`) are Gloo's, and tensors on GPUs are
    NCCL's. Making a group is a collective of its ranks. (It has a method for each that torch calls by name, so many.)

    Args:
        store: A part of the job's store that only groups of this name use.
        rank: This rank.
        size: Number of ranks.
        timeout: Longest wait for other ranks in one collective; torch's default lets RINGSIDE_TIMEOUT_S decide.

    Attributes:
        counters: Which engine ran which collectives.
        engine: Runs those of CPU tensors.
        limit_s: The longest wait that `set_timeout` has set since, seconds; None: none was.
        native: The same ranks as torch's own process group: Gloo and, where there are GPUs, NCCL.

    Raises:
        DeadlineError: A rank did not come.
        MismatchError: Ranks run different versions or have different settings; names who differs.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # with a store torch cannot make a subclass
        self._store, self._rank = store, rank
        # A group may be made again under its old name: numbered in the store, it never meets what the old one left.
        store = PrefixStore(str(store.add(f"ringside/made/{rank}", 1)), store)
        self.native = dist.ProcessGroup(store, rank, size)
        self._gloo: Any = dist.ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout=timeout)
        for group in (self, self.native):
            group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, nccl_options)
            for group in (self, self.native):
                group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
        self.counters = GroupCounters(self._gloo)
        self._coalesced: list[Any] | None = None
        self.limit_s: float | None = None if timeout else 0.0
        _alive.add(self)
        limit_s = timeout.total_seconds() if timeout and timeout != c10d.default_pg_timeout else None
        self.engine = Engine(PrefixStore("engine", store), rank, size, limit_s)
        self._posts = self.engine.inside is not None and size <= MOST_RANKS
        self._buckets = SharedBuckets(self.engine.inside) if self.engine.inside is not None and size > 1 else None

    # -------------------------------------------------------------------------------------------- collectives

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

    def _post(self, tensors: list[torch.Tensor], opts: Any) -> RingsideWork | None:
        """Start a small all-reduce that the waiting thread finishes, or this call; None: it is not that, or not now.

        Tensor parallelism waits for each of these, in code that leaves the caches cold: every line here shows.
        """
        engine = self.engine
        if not self._posts or engine.is_here or limit_of(opts, self.limit_s) is not None:
            return None
        small = collectives.small(engine.inside, tensors, opts)
        turn = None if small is None else engine.post(*small)
        if turn is None:
            return None
        self.counters.add("all_reduce", "ringside")
        work = RingsideWork("all_reduce", engine, tensors, turn)
        if not opts.asyncOp:
            turn.wait()
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    @property
    def shares_buckets(self) -> bool:
        """Whether there are other ranks, all on this host, that could map a bucket."""
        return self._buckets is not None

    def reduce_scatter_shared(
        self, output: torch.Tensor, tensor: torch.Tensor, storage: Storage, op: Any, *, async_op: bool = False
    ) -> RingsideWork:
        """Reduce a tensor that other ranks can map, and give each rank its part.

        Args:
            output: This rank's part, [numel / size].
            tensor: [numel]; not changed.
            storage: The storage it lies in (`ringside.pytorch.shared_storage.storage_of`).
            op: A `ReduceOp`.
            async_op: Carry it out in the background.
        """
        options = c10d.ReduceScatterOptions()
        options.reduceOp, options.asyncOp = op, async_op
        return self.execute(collectives.reduce_scatter_shared, (output, tensor, storage, options))

    def all_gather_shared(
        self, output: torch.Tensor, tensor: torch.Tensor, storage: Storage, *, async_op: bool = False
    ) -> RingsideWork:
        """Give every rank the tensors of all ranks, into one that other ranks can map.

        Args:
            output: [numel * size].
            tensor: [numel]; may be this rank's part of the output.
            storage: The storage that the output lies in.
            async_op: Carry it out in the background.
        """
        options = AllgatherOptions()
        options.asyncOp = async_op
        return self.execute(collectives.all_gather_shared, (output, tensor, storage, options))

    def send(self, tensors: list[torch.Tensor], dst_rank: int, tag: int) -> Any:
        """Send a tensor to one rank (Gloo, NCCL)."""
        return self._between_two("send", tensors, dst_rank, tag)

    def recv(self, tensors: list[torch.Tensor], src_rank: int, tag: int) -> Any:
        """Receive a tensor of one rank (Gloo, NCCL)."""
        return self._between_two("recv", tensors, src_rank, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> Any:
        """Receive a tensor of any rank (Gloo)."""
        return self._between_two("recv_anysource", tensors, tag)

    def _between_two(self, name: str, tensors: list[torch.Tensor], *where: int) -> Any:
        call = getattr(self.native, name)
        if tensors[0].device.type == "cpu":
            return self.counters.through_gloo(name, call, tensors, *where)
        self.counters.add(name, "native")
        return call(tensors, *where)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; rank 0 raises an error that names those that did not come (Gloo)."""
        limit = c10d.default_pg_timeout if timeout is None else timeout
        self.counters.through_gloo("monitored_barrier", self._gloo.monitored_barrier, limit, wait_all_ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        if device.type == "cpu":
            self._coalesced = []
        else:
            self.native._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> Any:
        if device.type != "cpu":
            return self.native._end_coalescing(device)
        works, self._coalesced = self._coalesced or [], None
        return Coalesced(works)

    # -------------------------------------------------------------------------------------------- life

    def shutdown(self) -> None:
        """Finish what is under way, within seconds, and close; called by `destroy_process_group`."""
        self.engine.close()
        self.native.shutdown()

    def abort(self) -> None:
        """Close at once: what is under way fails here and at the peers."""
        self.engine.abort()
        self.native.abort()

    def set_timeout(self, timeout: timedelta) -> None:
        """Have collectives from now on raise `DeadlineError` after that time; the one that was waited for goes on.

        Waits that were longer than what the group was made with would end with that all the same.
        """
        self.limit_s = timeout.total_seconds()
        self.native.set_timeout(timeout)

    def get_group_store(self) -> Store:
        """Return the part of the job's store that this group was made with."""
        return self._store

    def _get_sequence_number_for_group(self) -> int:
        return self.counters.total()

    def getBackendName(self) -> str:
        """Return `ringside`."""
        return "ringside"

    def __repr__(self) -> str:
        return f"<ringside process group, rank {self.rank()} of {self.size()}, carried {self.counters.table()}>"


_alive: weakref.WeakSet[RingsideGroup] = weakref.WeakSet()
_inherited: list[RingsideGroup] = []


# In a forked child Gloo's destructor would wait for threads that only the parent has: kept alive, it never runs there.
os.register_at_fork(after_in_child=functools.partial(_inherited.extend, _alive))


def _method(name: str, collective: collectives.Collective, options: Any) -> Callable[..., Any]:
    """Return what a process group does when torch calls it by `name`: its own collective, or the native group's."""

    # The one collective that tensor parallelism waits for at small sizes has a path of its own.
    posts = collective is collectives.all_reduce

    def method(self: RingsideGroup, *args: Any, **named: Any) -> Any:
        if posts and len(args) == 2 and args[1].__class__ is options:
            work = self._post(*args)
            if work is not None:
                return work
        args = normalize(options, args, named)
        if _is_ours(args):
            return self.execute(collective, args)
        self.counters.add(collective.__name__, "native")
        return getattr(self.native, name)(*args)

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
        setattr(RingsideGroup, _name, _method(_name, _collective, _options))
