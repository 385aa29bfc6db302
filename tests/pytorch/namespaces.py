"""Small file systems for one process, in a mount namespace of its own (needs privilege)."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)
_NEWNS, _FS = 0x00020000, 0x00000200
_READ_ONLY, _REMOUNT, _BIND, _MOVE, _PRIVATE, _REC = 1, 1 << 5, 1 << 12, 1 << 13, 1 << 18, 1 << 14


def possible() -> bool:
    """Tell whether this user may make mount namespaces and mount a tmpfs in one."""
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "none", "/dev/shm"]
    try:
        return subprocess.run(command, capture_output=True, timeout=20).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def enter_own() -> None:
    """Give the calling thread, and threads it starts later, a mount namespace that nobody else sees."""
    _check(_libc.unshare(_NEWNS))
    _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_REC | _PRIVATE), None))


def enter_that_of(pid: int) -> None:
    """Move the calling thread into another process's mount namespace."""
    _check(_libc.unshare(_FS))
    fd = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    try:
        _check(_libc.setns(fd, _NEWNS))
    finally:
        os.close(fd)


def mount_small(path: str, size_bytes: int) -> None:
    """Put an empty file system of that size at `path`."""
    options = f"size={size_bytes}".encode()
    _check(_libc.mount(b"none", path.encode(), b"tmpfs", ctypes.c_ulong(0), options))


def make_read_only(path: str) -> None:
    """Forbid writing below `path`; what is there, the package itself maybe, can still be read."""
    place = path.encode()
    _check(_libc.mount(place, place, None, ctypes.c_ulong(_BIND), None))
    _check(_libc.mount(None, place, None, ctypes.c_ulong(_BIND | _REMOUNT | _READ_ONLY), None))


def mount_without_shm() -> None:
    """Put a /dev in place that has the usual devices and no /dev/shm."""
    with tempfile.TemporaryDirectory() as place:
        mount_small(place, 64 << 10)
        for name in ("null", "zero", "full", "random", "urandom"):
            Path(place, name).touch()
            _check(_libc.mount(f"/dev/{name}".encode(), f"{place}/{name}".encode(), None, ctypes.c_ulong(_BIND), None))
        _check(_libc.mount(place.encode(), b"/dev", None, ctypes.c_ulong(_MOVE), None))


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
