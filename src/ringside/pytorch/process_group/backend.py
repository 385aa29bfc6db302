"""What torch knows `"ringside"` by: up to 2.13 a process group, from 2.14 on a backend of one of torch's own.

Up to 2.13 a backend cannot be written in Python, a whole `ProcessGroup` can: what torch calls it by, from Python or
C++, are its own methods; CPU tensors are ours, others NCCL's. What C++ calls past them is counted (`GroupCounters`).

From 2.14 on the group itself is torch's own, so all that torch does around a backend works with ours: hooks of groups,
the flight recorder, `split_group`, NCCL beside it for tensors on GPUs. torch's C++ gives out a work of its own for each
of a Python backend, of which it passes on `wait` and `get_future` alone; `answer_for_works` has the rest answered as
well.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside.errors import UnsupportedError
from ringside.pytorch.process_group.carrier import CPU, Carrier, own_part
from ringside.pytorch.process_group.work import Coalesced, OwnWork


class RingsideGroup(Carrier, dist.ProcessGroup):
    """A process group whose collectives of CPU tensors are run by Ringside's engine; tensors on GPUs are NCCL's.

    Args:
        store: A part of the job's store that only groups of this name use.
        rank: This rank.
        size: Number of ranks.
        timeout: Longest wait for other ranks in one collective; torch's default lets RINGSIDE_TIMEOUT_S decide.
        gpus: What carries tensors on GPUs: `nccl`, `gloo`, or "" for nothing.

    Raises:
        DeadlineError, MismatchError: As `Carrier`.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, gpus: str = "nccl") -> None:
        dist.ProcessGroup.__init__(self, rank, size)  # type: ignore[call-arg]  # torch makes no subclass with a store
        self._store, self._gpus = store, gpus
        store = own_part(store, rank)
        self.native = dist.ProcessGroup(store, rank, size)
        self._open(store, rank, size, timeout)
        for group in (self, self.native):
            group._register_backend(CPU, dist.ProcessGroup.BackendType.GLOO, self._gloo)
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        cuda = torch.device("cuda")
        if gpus == "gloo":
            for group in (self, self.native):
                group._register_backend(cuda, dist.ProcessGroup.BackendType.GLOO, self._gloo)
        elif gpus and torch.cuda.is_available() and dist.is_nccl_available():
            nccl_options = dist.ProcessGroupNCCL.Options()
            nccl_options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, nccl_options)
            for group in (self, self.native):
                group._register_backend(cuda, dist.ProcessGroup.BackendType.NCCL, nccl)

    def carry_elsewhere(self, collective: str, name: str, args: tuple[Any, ...]) -> Any:
        """Give a collective of tensors on GPUs to NCCL, or Gloo."""
        call = getattr(self.native, name)
        if self._gpus == "gloo":
            return self.counters.through_gloo(collective, call, *args)
        self.counters.add(collective, "native")
        return call(*args)

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

    def split_group(self, *args: Any, **named: Any) -> Any:
        """Refuse to be split: torch's C++ would ask for backends that there are not."""
        raise UnsupportedError(f"split_group is not served here (torch {torch.__version__}): use new_group")

    def set_timeout(self, timeout: timedelta) -> None:
        """Have collectives from now on raise `DeadlineError` after that time; the one that was waited for goes on.

        Waits that were longer than what the group was made with would end with that all the same.
        """
        self.limit_s = timeout.total_seconds()
        if hasattr(self.native, "set_timeout"):  # where it is not, torch has told the backends
            self.native.set_timeout(timeout)

    def get_group_store(self) -> Store:
        """Return the part of the job's store that this group was made with."""
        return self._store

    def __repr__(self) -> str:
        return f"<ringside process group, rank {self.rank()} of {self.size()}, carried {self.counters.table()}>"


class RingsideBackend(Carrier, Backend):
    """A backend whose collectives of CPU tensors are run by Ringside's engine.

    Args:
        store: A part of the job's store that only groups of this name use.
        rank: This rank.
        size: Number of ranks.
        options: torch's `Backend.Options` of it; its timeout is the longest wait for other ranks in one collective.

    Raises:
        DeadlineError, MismatchError: As `Carrier`.
    """

    def __init__(self, store: Store, rank: int, size: int, options: Any) -> None:
        Backend.__init__(self, rank, size)
        self._options = options
        self._open(own_part(store, rank), rank, size, options._timeout)
        self.native = self._gloo

    @classmethod
    def made_for(cls, options: Any) -> RingsideBackend:
        """Return the backend of a group that torch makes.

        Args:
            options: torch's: `store`, `group_rank`, `group_size`, `timeout`, ...
        """
        own = Backend.Options(cls.backend_name, timeout=options.timeout)
        own.global_ranks_in_group, own.group_name = options.global_ranks_in_group, options.group_id
        return cls(options.store, options.group_rank, options.group_size, own)

    @property
    def options(self) -> Any:
        """What torch gives to the backends of groups that are split off."""
        return self._options

    def carry_elsewhere(self, collective: str, name: str, args: tuple[Any, ...]) -> Any:
        """Refuse tensors that are not in the memory of the host: on GPUs the group has NCCL for them."""
        raise UnsupportedError(
            f"{collective}: the backend ringside carries tensors on CPUs; "
            'for those on GPUs make the group with "cpu:ringside,cuda:nccl"'
        )

    def _between_two(self, name: str, tensors: list[torch.Tensor], *where: int) -> Any:
        return GlooWork(self.counters.through_gloo(name, getattr(self._gloo, name), tensors, *where))

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks; rank 0 raises an error that names those that did not come (Gloo)."""
        limit = opts if isinstance(opts, timedelta) else opts.timeout
        self.counters.through_gloo("monitored_barrier", self._gloo.monitored_barrier, limit, wait_all_ranks)

    def start_coalescing(self) -> None:
        """Several collectives follow, whose works `end_coalescing` gives out as one."""
        self._coalesced = []

    def end_coalescing(self) -> Coalesced:
        """Return the works since `start_coalescing` as one."""
        works, self._coalesced = self._coalesced or [], None
        return Coalesced(works)

    # What torch asks whether a backend can do it. Where Python has no answer, its C++ asks itself for ever.
    supports_splitting = True
    supports_coalescing = supports_shrinking = supports_reconfigure = supports_window = False
    supports_time_estimate = _supports_time_estimate = False  # its name in torch 2.14, and since

    # -------------------------------------------------------------------------------------------- life

    def split(self, store: Store, ranks: Sequence[int], opts: Any) -> RingsideBackend | None:
        """Return the backend of a group of some of these ranks; None: this one is not among them.

        Args:
            store: Of the new group.
            ranks: Its members, as ranks of this group.
            opts: Its options; None: a copy of ours.
        """
        ranks = list(ranks)
        if self._rank not in ranks:
            return None
        options = opts or Backend.Options(self.backend_name, timeout=self._options._timeout)
        return type(self)(store, ranks.index(self._rank), len(ranks), options)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Take part in making a group without this rank: nothing is to be done."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Connect: this is done when the backend is made."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Have collectives from now on raise `DeadlineError` after that time; the one that was waited for goes on.

        Waits that were longer than what the group was made with would end with that all the same.
        """
        self.limit_s = timeout.total_seconds()
        self._options._timeout = timeout
        self._gloo.set_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        """Agree on a first number of a collective: all ranks count from 0."""

    def __repr__(self) -> str:
        return f"<ringside backend, rank {self._rank} of {self.size()}, carried {self.counters.table()}>"


# -------------------------------------------------------------------------------------------------
# Works: what torch's C++ makes of those of a Python backend.


class GlooWork(OwnWork):
    """A message that Gloo carries for us.

    Args:
        work: Gloo's.

    Attributes:
        work: Gloo's.
    """

    def __init__(self, work: Any) -> None:
        super().__init__()
        self.work = work

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for it, as Gloo does."""
        if self.watched is not None:
            watched, self.watched = self.watched, None
            return bool(watched.timed(self.wait, timeout))
        return bool(self.work.wait(timeout))

    def future(self) -> Any:
        """Return Gloo's future of it."""
        return self.work.get_future()


_ANSWERED = ("is_completed", "is_success", "exception", "result", "source_rank", "_source_rank")
_UNKNOWN = 100
"""c10d's type of what a work is one of, where nobody has said it: of every Python backend's."""


@functools.cache
def answer_for_works() -> None:
    """Have the methods of a work that C++ does not pass on asked of the one of ours behind it, if there is one."""
    for name in _ANSWERED:
        setattr(dist.Work, name, _answered(name, getattr(dist.Work, name)))


def _answered(name: str, stock: Any) -> Any:
    @functools.wraps(stock)
    def answer(work: Any) -> Any:
        if isinstance(work, GlooWork):
            return getattr(work.work, name)()
        is_pythons = type(work) is dist.Work and work._get_op_type() == _UNKNOWN  # type: ignore[attr-defined]
        own = OwnWork.behind(work) if is_pythons else None
        return stock(work) if own is None else getattr(own, name)()

    return answer
