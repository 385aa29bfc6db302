"""DDP's buckets, reduced where they lie: the ranks of a host map each other's after the second step.

`ringside.attach` knows the buckets, because DDP hands them to its hook. A process group sees nothing but tensors, and
moving just any tensor into shared memory would break whoever keeps its address (a NumPy array, for one). DDP's buckets
are told from others by how they come: from C++ inside of backward, a large tensor that fills its storage, the same
storage step after step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ringside.engine import Communicator
from ringside.engine.dtypes import FLOATING
from ringside.engine.regions import Storage
from ringside.engine.tensors import flatten
from ringside.sync.storage import share

LARGE_BYTES = 256 << 10
STEPS = 2  # DDP makes new buckets after the first one


class _Seen:
    """A storage that came as a bucket's."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        reference: Any = StorageWeakRef
        self.alive = reference(storage)
        self.times = 0
        self.shared: Storage | None = None


class SharedBuckets:
    """Finds buckets among the tensors that are to be summed.

    Args:
        communicator: The ranks of this host, who are all there are.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._seen: dict[int, _Seen] = {}

    def job(self, tensor: torch.Tensor, caller: FrameType | None) -> Callable[[], None] | None:
        """Return what sums a bucket over all ranks in shared memory; None where it is none, or not known long enough.

        Args:
            tensor: What is to be summed.
            caller: The Python frame that led to the call.
        """
        if not _is_autograd(caller) or not _is_bucket(tensor):
            return None
        storage = self._storage_of(tensor.untyped_storage())
        if storage is None:
            return None
        flat, stamp_ns = flatten(tensor.detach()), time.monotonic_ns()
        return lambda: self._communicator.all_reduce_storage(flat, storage, scale=1.0, stamp_ns=stamp_ns)

    def _storage_of(self, storage: torch.UntypedStorage) -> Storage | None:
        seen = self._seen.get(storage._cdata)
        if seen is None or seen.alive.expired():
            self._forget()
            seen = self._seen[storage._cdata] = _Seen(storage)
        seen.times += 1
        if seen.times == STEPS + 1:  # where there is no room it is not tried again
            seen.shared = share(storage)
        return seen.shared

    def _forget(self) -> None:
        """Let go of storages that are gone."""
        for key in [key for key, seen in self._seen.items() if seen.alive.expired()]:
            shared = self._seen.pop(key).shared
            if shared is not None:
                self._communicator.memory.retire(shared.inode)


def _is_bucket(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is a large one of floating numbers that fills its storage."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout != torch.strided or dtype not in FLOATING or tensor.nbytes < LARGE_BYTES:
        return False
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes


def _is_autograd(frame: FrameType | None) -> bool:
    """Tell whether a call came straight from the engine of autograd, and from no Python in between."""
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"
