"""DDP's buckets, reduced where they lie: the ranks of a host map each other's after the first step.

A process group sees nothing but tensors. Those that lie in memory which peers can map are known by it
(`ringside.pytorch.shared_storage`), and DDP's buckets are made there when DDP is made over a group of ours
(`ringside.pytorch.ddp.bucket_memory`). No other tensor is ever moved there: what keeps its address would be left
behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ringside.engine import HostCommunicator
from ringside.engine.buffers import flatten
from ringside.engine.dtypes import FLOATING
from ringside.pytorch.shared_storage import storage_of

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
        if tensor.layout != torch.strided or dtype not in FLOATING or tensor.nbytes < LARGE_BYTES:
            return None
        if not tensor.is_contiguous():
            return None
        storage = storage_of(tensor)
        if storage is None:
            return None
        if storage.inode not in self._alive:
            # Storages that are gone need no mapping any more.
            for inode in [inode for inode, weak in self._alive.items() if weak.expired()]:
                del self._alive[inode]
                self._communicator.memory.unregister(inode)
            weak: Any = StorageWeakRef
            self._alive[storage.inode] = weak(tensor.untyped_storage())
        flat, stamp_ns = flatten(tensor.detach()), time.monotonic_ns()
        return lambda: self._communicator.all_reduce_storage(flat, storage, scale=1.0, stamp_ns=stamp_ns)
