"""The process group that `init_process_group("ringside")` makes up to torch 2.13: CPU tensors are ours, others NCCL's.

There a backend cannot be written in Python, a whole `ProcessGroup` can: what torch calls it by, from Python or C++,
are its own methods. What C++ calls past them is counted (`counters.py`).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore, Store

from ringside.errors import UnsupportedError
from ringside.pytorch.process_group.carrier import CPU, Carrier, own_part
from ringside.pytorch.process_group.work import Coalesced


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
