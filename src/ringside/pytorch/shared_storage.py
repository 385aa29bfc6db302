"""Tensors that the other processes of a host can map: each lies in a memfd from the day it is made.

Nothing is ever moved under a tensor that somebody may hold: a NumPy array, a DLPack capsule or a bare address would be
left with memory that is gone. A memfd needs no room in /dev/shm (64 MB in many containers, and DataLoader workers live
there), no name and no lock, and goes with the last process that maps it. Its inode is a storage's identity: new
buckets may land on the addresses and descriptors of old ones.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import logging
import mmap
import os
from dataclasses import replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ringside.engine.shm.communicator import HostCommunicator
from ringside.engine.shm.memory import Storage

_log = logging.getLogger(__name__)

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_made: dict[int, tuple[Any, Storage]] = {}
"""By the address of torch's storage object, which a weak reference keeps from being used again."""


def empty_shared(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor that peers can map.

    Args:
        numel: Number of elements, at least one.
        dtype: Its element type.

    Returns:
        [numel]; an ordinary tensor where the system gives no such memory, with one warning.
    """
    size_bytes = numel * dtype.itemsize
    try:
        fd = os.memfd_create("ringside-gradients", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)  # nobody who maps it can take a page from under the others
            status = os.fstat(fd)
            raw: Any = torch.UntypedStorage._new_shared_fd_cpu(fd, size_bytes)  # type: ignore[attr-defined]
        finally:
            os.close(fd)  # the storage has its own
        own, _ = raw._share_fd_cpu_()  # it is shared already: this only tells its descriptor
        os.set_inheritable(own, False)
    except (OSError, RuntimeError) as error:  # no descriptor left, memfd_create forbidden, no address space
        warn_copied(str(error))
        return torch.empty(numel, dtype=dtype)
    for key in [key for key, (alive, _) in list(_made.items()) if alive.expired()]:
        del _made[key]
    storage = Storage((status.st_dev, status.st_ino), own, raw.data_ptr(), size_bytes)
    _made[raw._cdata] = StorageWeakRef(raw), storage  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype).set_(raw, 0, (numel,), (1,))


def storage_of(tensor: torch.Tensor) -> Storage | None:
    """Return how peers can map the memory of a tensor; None unless `empty_shared` made it."""
    raw = tensor.untyped_storage()
    made = _made.get(raw._cdata)
    # torch itself moves what a script sends to another process, where its sharing strategy is file_system.
    return made[1] if made is not None and made[1].address == raw.data_ptr() else None


class SharedStorages:
    """Which shared memory each bucket of one model lies in.

    Args:
        communicator: The ranks of this host; None for a rank alone on its host, which shares nothing.

    Attributes:
        are_shared: Whether there is another rank to share them with.
    """

    def __init__(self, communicator: HostCommunicator | None) -> None:
        self._memory = communicator.memory if communicator is not None and communicator.size > 1 else None
        self.are_shared = self._memory is not None
        # As made, and as registered: with its owner, so that it is not freed before it is unregistered.
        self._held: dict[int, tuple[Storage, Storage]] = {}
        self._layout: dict[int, tuple[bool, int]] = {}
        self._reported: dict[int, tuple[bool, int]] = {}

    def storage_of(self, index: int, buffer: torch.Tensor) -> Storage | None:
        """Return the shared storage of bucket `index`; None if it lies in private memory."""
        if self._memory is None:
            return None
        storage, held = storage_of(buffer), self._held.get(index)
        self._layout[index] = storage is not None, buffer.numel() * buffer.element_size()
        if held is not None and held[0] is storage:
            return held[1]
        self._retire(index)
        if storage is None:
            return None
        self._held[index] = storage, replace(storage, owner=buffer.untyped_storage())
        return self._held[index][1]

    def keep(self, count: int) -> None:
        """Forget the storages of buckets that a rebuild did away with: there are `count` now."""
        for index in [index for index in self._layout if index >= count]:
            del self._layout[index]
            self._retire(index)

    def news(self) -> dict[str, int]:
        """Return how many buckets are shared and copied, and their bytes, where that is not what it was; else {}."""
        if self._layout == self._reported:
            return {}
        self._reported = dict(self._layout)
        shared = [size_bytes for is_shared, size_bytes in self._reported.values() if is_shared]
        copied = [size_bytes for is_shared, size_bytes in self._reported.values() if not is_shared]
        return {
            "shared_buckets": len(shared),
            "shared_bytes": sum(shared),
            "copied_buckets": len(copied),
            "copied_bytes": sum(copied),
        }

    def _retire(self, index: int) -> None:
        held = self._held.pop(index, None)
        if held is not None and self._memory is not None:
            self._memory.unregister(held[0].inode)


_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_MAP_FIXED = 0x10


def _keep_writes_to_itself() -> None:
    """In a forked child: what it writes into these tensors is its own, as with all other memory.

    A page that it has not written yet follows the parent's, where other memory would stay as it was: a copy of all
    gradients in every DataLoader worker would cost more than that is worth.
    """
    if not _made:
        return
    # What a failed collective has made private is this process's already, and the file holds something else.
    with open("/proc/self/maps") as file:
        shared = {int(line.split("-")[0], 16) for line in file if line.split()[1].endswith("s")}
    for alive, storage in _made.values():
        if not alive.expired() and storage.address in shared:
            how = (mmap.PROT_READ | mmap.PROT_WRITE, _MAP_FIXED | mmap.MAP_PRIVATE)
            _mmap(storage.address, storage.size_bytes, *how, storage.fd, 0)
    _made.clear()


os.register_at_fork(after_in_child=_keep_writes_to_itself)


@functools.cache
def warn_copied(why: str) -> None:
    """Warn, once per process and reason, that buckets are not shared."""
    _log.warning("gradient buckets cannot lie in shared memory (%s): they are copied instead, which is slower", why)
