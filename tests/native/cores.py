"""The core by itself: its ranks are threads of one process, so every setting can be odd and every rank its own."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from tests.support import threads
from tests.support.collective_log import drain

from ringside import _core
from ringside._core.enums import Algorithm, Status
from ringside.engine.dtypes import DTYPES, OPS
from ringside.engine.request import KINDS
from ringside.engine.shm.log import PATHS

Array = np.ndarray[Any, Any]

OK, MISMATCH, PEER_LOST, DEADLINE, INTERRUPTED, CLOSED, EXCHANGE, NO_WEIGHT, WITHDRAWN, UNSUITED = Status
AUTOMATIC, ONE_SHOT, DIRECT, PROGRAM = Algorithm
WAIT_S = 20.0
PAGE = mmap.PAGESIZE


@contextmanager
def opened(
    ranks: int,
    *,
    stage_bytes: int = 3 * 4096,
    segment_bytes: int = 4096,
    one_shot_bytes: int = 0,
    stream_bytes: int = 1 << 40,
    timeouts_s: Sequence[float] = (),
    pidfds: Sequence[int] = (),
) -> Iterator[list[Any]]:
    """Open every rank's communicator over one arena.

    Args:
        timeouts_s: By rank; empty: longer than any test.
        pidfds: By rank; empty: nobody is watched. They are taken over.
    """
    native = _core.native()
    fd = native.create_arena(ranks, stage_bytes)
    cores = [
        native.open_communicator(
            arena_fd=fd,
            stage_bytes=stage_bytes,
            rank=rank,
            ranks=ranks,
            pidfds=list(pidfds) or [-1] * ranks,
            patience=(0, 1),
            background=(0, 1),
            timeout_s=timeouts_s[rank] if timeouts_s else 10 * WAIT_S,
            one_shot_bytes=one_shot_bytes,
            segment_bytes=segment_bytes,
            stream_bytes=stream_bytes,
        )
        for rank in range(ranks)
    ]
    os.close(fd)
    try:
        yield cores
    finally:
        for core in cores:
            core.close()
        cores.clear()


def together(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run every rank's job, each on a thread; return what each returned, or raise what the first one raised."""
    found = threads.together(jobs)
    for value in found:
        if isinstance(value, BaseException):
            raise value
    return found


def address(x: Array) -> int:
    return int(x.ctypes.data)


def all_reduce(
    core: Any,
    x: Array,
    *,
    op: str = "sum",
    way: int = DIRECT,
    scale: float = 1.0,
    stamp_ns: int = 0,
    region: int = -1,
    offset: int = 0,
    fresh: bool = False,
    program: int = -1,
) -> int:
    """Call it as the engine does; return the status."""
    code = DTYPES.index(str(x.dtype))
    status: int = core.all_reduce(
        address(x), x.size, code, OPS.index(op), way, scale, x.shape, stamp_ns, region, offset, fresh, program, False
    )
    return status


def collective(
    core: Any,
    kind: str,
    x: Array,
    bounds: Sequence[int],
    *,
    out: Array | None = None,
    op: str = "sum",
    scale: float = 1.0,
    own_scale: bool = False,
    root: int = -1,
    count: int = -1,
    region: int = -1,
    offset: int = 0,
) -> int:
    """Call a collective over lanes as the engine does; return the status.

    Args:
        x: The whole tensor, or the own lane where that is all that the caller has.
        count: Elements of the whole tensor; -1: those of `x`.
    """
    code = DTYPES.index(str(x.dtype))
    status: int = core.collective(
        KINDS.index(kind),
        address(x),
        0 if out is None else address(out),
        x.size if count < 0 else count,
        code,
        OPS.index(op),
        AUTOMATIC,
        scale,
        own_scale,
        root,
        0,
        list(bounds),
        (x.size if count < 0 else count,),
        0,
        region,
        offset,
        False,
        -1,
        False,
    )
    return status


def paths(core: Any) -> list[str]:
    """Return which ways the collectives since the last call went."""
    return [PATHS[one.path] for one in drain(core)]


libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def map_pages(at: int | None, size_bytes: int, flags: int, fd: int = -1) -> int:
    """Map a file, or memory of nobody's, where Python's own `mmap` keeps a second descriptor; return where."""
    there: int = libc.mmap(at, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    assert there != ctypes.c_void_p(-1).value
    return there


class Memory:
    """A piece of memory as `sync` shares it: a file without a name, and where its owner has it mapped.

    Attributes:
        x: Its elements, float32.
    """

    def __init__(self, size_bytes: int = PAGE) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("test-of-ringside", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, size_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        self._at = map_pages(None, size_bytes, mmap.MAP_SHARED, self.fd)
        self.x = np.ctypeslib.as_array(ctypes.cast(self._at, ctypes.POINTER(ctypes.c_float)), (size_bytes // 4,))

    def is_shared(self) -> bool:
        """Tell whether what others store into the file is seen by its owner."""
        (before,) = self.x[:1].tolist()
        os.pwrite(self.fd, np.float32(before + 1).tobytes(), 0)
        (after,) = self.x[:1].tolist()
        os.pwrite(self.fd, np.float32(before).tobytes(), 0)
        return bool(after != before)

    def close(self) -> None:
        libc.munmap(self._at, self.size_bytes)
        os.close(self.fd)


def share(cores: Sequence[Any], memories: Sequence[Memory]) -> list[int]:
    """Make every rank's memory known to all ranks; return its region, by rank."""
    regions = [
        core.adopt_region(address(memory.x), memory.size_bytes, memory.fd)
        for core, memory in zip(cores, memories, strict=True)
    ]
    for rank, core in enumerate(cores):
        for peer, memory in enumerate(memories):
            if peer != rank:
                assert core.map_region(peer, regions[peer], memory.fd, memory.size_bytes)
    return regions
