"""DDP's buckets as memory that peers can map.

`UntypedStorage._share_fd_cpu_` moves a storage into shared memory in place, so DDP's own views follow. The file behind
it (its inode) is the storage's identity: DDP rebuilds its buckets after the first iteration, and new ones may land on
the addresses and descriptors of old ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator

import torch

from ringside.engine.communicator import Communicator
from ringside.engine.regions import Storage

_log = logging.getLogger("ringside")


class Buckets:
    """Which storage each bucket of one model lies in.

    Args:
        communicator: The ranks of this host; None for a rank alone on its host, which shares nothing.
    """

    def __init__(self, communicator: Communicator | None) -> None:
        self._communicator = communicator
        self._held: dict[int, tuple[torch.UntypedStorage, Storage]] = {}
        self._hopeless = False

    def storage_of(self, index: int, buffer: torch.Tensor) -> Storage | None:
        """Return the shared storage of bucket `index`, moving it there if need be; None if that cannot be."""
        if self._hopeless or self._communicator is None or self._communicator.size == 1:
            return None
        raw, held = buffer.untyped_storage(), self._held.get(index)
        if held is not None and held[0]._cdata == raw._cdata and held[1].address == raw.data_ptr():
            return held[1]  # what is held is not used again for another one, and has not been moved elsewhere
        storage = share(raw)
        if storage is None:
            self._hopeless = True
            return None
        if held is not None and held[1].inode != storage.inode:
            self._communicator.memory.retire(held[1].inode)
        self._held[index] = raw, storage
        return storage

    def keep(self, count: int) -> None:
        """Forget the storages of buckets that a rebuild did away with: there are `count` now."""
        for index in [index for index in self._held if index >= count]:
            assert self._communicator is not None, "nothing is shared without one"
            self._communicator.memory.retire(self._held.pop(index)[1].inode)


def share(storage: torch.UntypedStorage) -> Storage | None:
    """Move a CPU storage into shared memory in place and say how peers can map it; None if there is no room."""
    if storage.is_shared():
        return _shared(storage)
    with _one_at_a_time():
        if _has_room(storage.nbytes()):
            return _shared(storage)
    _log.warning(
        "/dev/shm has no room for a gradient bucket of %d bytes: buckets are copied instead of shared, which is "
        "slower (in a container, raise --shm-size)",
        storage.nbytes(),
    )
    return None


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Keep the other ranks that see this /dev/shm waiting: room that two have seen, one of them would not get.

    Older torch writes without having asked for the room, and whoever writes where there is none is ended by SIGBUS.
    """
    try:
        directory = os.open("/dev/shm", os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def _shared(storage: torch.UntypedStorage) -> Storage | None:
    files = _own_files()
    try:
        fd, size = storage._share_fd_cpu_()
        status = os.fstat(fd)
    except (RuntimeError, OSError) as error:  # another process took the room in the meantime
        _remove(_own_files() - files)
        _log.warning("a gradient bucket cannot be shared (%s): buckets are copied instead, which is slower", error)
        return None
    if status.st_size < size:
        return None
    return Storage((status.st_dev, status.st_ino), fd, storage.data_ptr(), size)


def _own_files() -> set[str]:
    """Return the names of this process's files in /dev/shm; torch unlinks a file as soon as it has it, or fails."""
    try:
        return {name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")}
    except OSError:
        return set()


def _remove(names: set[str]) -> None:
    """Remove what torch leaves behind where it finds no room."""
    for name in names:
        with contextlib.suppress(OSError):
            os.unlink(f"/dev/shm/{name}")


def _has_room(size_bytes: int) -> bool:
    try:
        free = os.statvfs("/dev/shm")
    except OSError:
        return False
    return free.f_bavail * free.f_frsize > size_bytes + (1 << 20)
