"""The engine of one process group: its communicator, the queue of its collectives, and DDP's buckets where they lie."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store
from torch.multiprocessing.reductions import StorageWeakRef

from ringside.engine import HostCommunicator
from ringside.engine.buffers import flatten
from ringside.engine.dtypes import FLOATING
from ringside.engine.runtime.queue import PATIENCE_S, CollectiveQueue, QueuedCollective
from ringside.engine.runtime.worker import AtExit, Closeable
from ringside.engine.settings import Settings
from ringside.errors import ClosedError
from ringside.pytorch.communicator.communicator import GroupCommunicator
from ringside.pytorch.communicator.options import Options
from ringside.pytorch.shared_storage import storage_of

PATIENT_INSIDE_BYTES = 1 << 20
PATIENT_BYTES = 64 << 10
"""Of results, inside a host and between hosts: up to there to change threads takes longer than the patience costs."""

_REFUSAL = (
    "the process group is closed on rank {rank}, or this is a forked child: make a new one with init_process_group"
)


class Engine(Closeable):
    """Runs a group's collectives one after the other, on threads that wait for them or one of its own.

    Making one is a collective of the group.

    Args:
        store: A part of the job's store that only this group uses.
        rank: This rank.
        size: Number of ranks.
        timeout_s: Longest wait for other ranks in one collective, seconds; None: as the environment says.

    Attributes:
        communicator: What runs them; only jobs given to `run` and `start` may use it.
        inside: The host's communicator, where all ranks share memory and no algorithm is requested.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float | None) -> None:
        self.rank, self.size = rank, size
        self.communicator: Any
        if size == 1:
            settings = Settings.of_environment(timeout=timeout_s)
            self.communicator = HostCommunicator(f"alone/{uuid.uuid4()}", 0, 1, settings)
        else:
            self.communicator = GroupCommunicator(store, rank, size, Options(timeout_s))
        self.inside = self.communicator.inside if size > 1 else self.communicator
        self._turns = CollectiveQueue(f"ringside-{rank}", _REFUSAL.format(rank=rank))
        self._patient_bytes = PATIENT_INSIDE_BYTES if self.inside is not None else PATIENT_BYTES
        self._begin()
        _at_exit.add(self)

    @property
    def is_here(self) -> bool:
        """Tell whether the caller is inside a collective, as in a callback of a future: no other thread can run one."""
        return self._turns.is_here

    def absent(self) -> list[int]:
        """Return the ranks that have not arrived where this one waits, as far as that is known: inside a host."""
        return [] if self.inside is None else self.inside.absent()

    def run(self, job: Callable[[], None]) -> None:
        """Run a collective now, after those called before it; raise what goes wrong."""
        if self._closed or self._is_forked():
            raise ClosedError(_REFUSAL.format(rank=self.rank))
        self._turns.run(job)

    def start(self, job: Callable[[], None], size_bytes: int) -> QueuedCollective:
        """Queue a collective for the thread that waits for it, or the engine's; return what can be waited for.

        Args:
            job: Runs it.
            size_bytes: Of its results: large ones the thread starts at once.
        """
        return self._turns.start(job, PATIENCE_S if size_bytes <= self._patient_bytes else 0.0)

    def run_begun(self, begin: Callable[..., Callable[[], None] | None], args: tuple[Any, ...]) -> bool:
        """Run a small collective now, in the two parts of `post`; False where something else is under way."""
        return not self._closed and self._turns.run_if_free(_begin_and_finish, begin, args) is not None

    def post(self, begin: Callable[..., Callable[[], None] | None], args: tuple[Any, ...]) -> QueuedCollective | None:
        """Start a small collective, which waits for nobody, here and now; None where something else is under way.

        Between hosts nothing is begun ahead: it gained nothing.

        Args:
            begin: `post` or `post_all_gather` of the host's communicator.
            args: Of `begin`.
        """
        return None if self._closed else self._turns.post(begin, *args)

    def _release(self, finish_s: float) -> None:
        self._turns.close(self.communicator.close if finish_s else self.communicator.abort, finish_s)


_at_exit = AtExit()


def _begin_and_finish(begin: Callable[..., Callable[[], None] | None], args: tuple[Any, ...]) -> bool | None:
    finish = begin(*args)
    if finish is None:
        return None
    finish()
    return True


# -------------------------------------------------------------------------------------------------
# DDP's buckets, reduced where they lie: the ranks of a host map each other's after the first step.
#
# A process group sees nothing but tensors. Those that lie in memory which peers can map are known by it
# (`ringside.pytorch.shared_storage`), and DDP's buckets are made there when DDP is made over a group of ours
# (`ringside.pytorch.ddp.bucket_memory`). No other tensor is ever moved there: what keeps its address would be left
# behind.

LARGE_BYTES = 256 << 10


class SharedBuckets:
    """Finds buckets among the tensors that are to be summed.

    Args:
        communicator: The ranks of this host, who are all there are.
    """

    def __init__(self, communicator: HostCommunicator) -> None:
        self._communicator = communicator
        self._alive: dict[tuple[int, int], Any] = {}

    def job(self, tensor: torch.Tensor) -> Callable[[], None] | None:
        """Return what sums a large tensor over all ranks in shared memory; None where it does not lie there."""
        dtype = str(tensor.dtype).removeprefix("torch.")
        if tensor.layout != torch.strided or dtype not in FLOATING or not tensor.is_contiguous():
            return None
        storage = storage_of(tensor) if tensor.nbytes >= LARGE_BYTES else None
        if storage is None:
            return None
        if storage.inode not in self._alive:
            # Storages that are gone need no mapping any more.
            for inode in [inode for inode, weak in self._alive.items() if weak.expired()]:
                del self._alive[inode]
                self._communicator.memory.unregister(inode)
            self._alive[storage.inode] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        flat, stamp_ns = flatten(tensor.detach()), time.monotonic_ns()
        return lambda: self._communicator.all_reduce_storage(flat, storage, scale=1.0, stamp_ns=stamp_ns)
