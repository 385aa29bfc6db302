"""Memory with a single writer: an arena that its owner maps writable and then seals, and that peers can only read.

A peer that was stopped and wakes up still holds its mappings and may store into them; here it has none to store into
but its own. `F_SEAL_FUTURE_WRITE` (Linux 5.1) refuses every later writable mapping and every write, also through
/proc, and the size is sealed too, so that whoever reads is never hit by SIGBUS. Reductions pull.

The memory is anonymous: it goes away with the last process that maps it, however that ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

import msgspec
import numpy as np

from ringside.engine.transports.base import Bytes
from ringside.errors import RingsideError, UnsupportedError

F_SEAL_FUTURE_WRITE = 0x0010
"""<linux/fcntl.h>; Python names it from 3.13 on."""
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL


class Address(msgspec.Struct, frozen=True):
    """Where a peer on the same host finds an arena.

    Args:
        pid: The owner's process.
        fd: The owner's descriptor.
        inode: The memory's own number, so that a descriptor used again is not taken for it.
        size_bytes: Its size.
    """

    pid: int
    fd: int
    inode: int
    size_bytes: int


class OwnArena:
    """An arena of this process: it alone can write it.

    Args:
        size_bytes: How much; pages come into being when they are written.

    Raises:
        UnsupportedError: The kernel cannot seal memory against later writers.
    """

    def __init__(self, size_bytes: int) -> None:
        self._fd = os.memfd_create("ringside-survive", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size_bytes)
            self.bytes: Bytes = np.frombuffer(mmap.mmap(self._fd, size_bytes), dtype=np.uint8)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            self.close()
            raise UnsupportedError(
                f"no {size_bytes} bytes of sealed memory ({error.strerror}): exactly-once training needs Linux 5.1 or "
                "newer, and room for the gradients in memory"
            ) from None
        self.address = Address(os.getpid(), self._fd, os.fstat(self._fd).st_ino, size_bytes)

    def close(self) -> None:
        """Close it; the memory goes when no array and no peer uses it any more."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self.bytes = np.empty(0, dtype=np.uint8)


def read_only(address: Address) -> Bytes:
    """Map a peer's arena for reading and return its bytes, uint8 [size].

    Raises:
        RingsideError: It is gone, or is not what its address says: the peer died, or is nobody of ours.
    """
    try:
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise RingsideError(f"the memory of process {address.pid} is gone ({error.strerror})") from None
    try:
        status = os.fstat(fd)
        sealed = False
        with contextlib.suppress(OSError):  # a file that knows no seals
            sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        # Without the seals a peer could still write, or shrink the file: readers would be hit by SIGBUS.
        if (status.st_ino, status.st_size) != (address.inode, address.size_bytes) or not sealed:
            raise RingsideError(
                f"process {address.pid} shows other memory than it announced: it has died or is a stranger"
            )
        return np.frombuffer(mmap.mmap(fd, address.size_bytes, prot=mmap.PROT_READ), dtype=np.uint8)
    finally:
        os.close(fd)
