"""Writing files where somebody else may have put something under the same name.

Two rules. *Names that Ringside chooses* (in a run directory, a cache, a registry) are never followed: a whole file is
written under a random name and renamed over whatever stands there, and lines are appended to regular files alone.
*A path that the user gives* (`--html FILE`) is written as the shell's `>` does, through links that are the user's own
or root's; through a link of anybody else it is not. Directories on the way to either are the user's choice.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

MOST_LINKS = 40
"""Of links that lead to links; the kernel's own limit."""


def replace_file(path: Path, data: bytes, *, own_folder: bool = False) -> None:
    """Replace the file at `path` in one step: readers see the old content or the new, never half of it.

    What stood there is replaced, not written through, be it a link or another name of somebody's file. The content is
    not forced to the disk: after a loss of power the file may be the old one, or empty.

    Args:
        path: Of the file.
        data: Its new content.
        own_folder: Whether Ringside chose the name of the directory as well: then that is no link either.

    Raises:
        OSError: It cannot be written; what was there still is.
    """
    with _directory(path, own_folder=own_folder) as directory:
        scratch = f".{path.name[:200]}.{secrets.token_hex(8)}.part"
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666,
                             dir_fd=directory)  # fmt: skip
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            os.replace(scratch, path.name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(scratch, dir_fd=directory)
            raise


def append_to_file(path: Path, data: bytes) -> None:
    """Append to the regular file at `path`, made where it is missing, in one write where the system can.

    Raises:
        OSError: It cannot be written, or is a link, a pipe, a device, or another name of somebody's file.
    """
    with _directory(path) as directory:
        descriptor = _open_here(directory, path.name, os.O_APPEND | os.O_CREAT | os.O_NONBLOCK)
    with os.fdopen(descriptor, "wb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        written = file.write(data)
        if written is not None and written < len(data):
            file.write(data[written:])


@contextlib.contextmanager
def user_file(path: Path) -> Iterator[BinaryIO]:
    """Open the file that the user named, to write it anew; pipes and devices will do.

    Where writing fails, a regular file is left empty, and one that was not there before is removed.

    Raises:
        OSError: It cannot be written, or is somebody else's link, or another name of somebody's file.
    """
    was_there = os.path.lexists(path)
    descriptor = _open_as_named(path, MOST_LINKS)
    try:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        try:
            if regular:
                os.ftruncate(descriptor, 0)
            with os.fdopen(descriptor, "wb", closefd=False) as file:
                yield file
        except BaseException:
            with contextlib.suppress(OSError):
                if regular:
                    os.ftruncate(descriptor, 0)
                if not was_there:
                    os.unlink(path)
            raise
    finally:
        os.close(descriptor)


def write_user_file(path: Path, text: str) -> None:
    """Write a text to the file that the user named, in UTF-8; see `user_file`."""
    with user_file(path) as file:
        file.write(text.encode())


@contextlib.contextmanager
def _directory(path: Path, *, own_folder: bool = False) -> Iterator[int]:
    """The directory of a path, held, so that it stays the same one until what is done in it is done."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC
    directory = os.open(path.parent, flags | os.O_NOFOLLOW if own_folder else flags)
    try:
        yield directory
    finally:
        os.close(directory)


def _open_here(directory: int, name: str, flags: int) -> int:
    """Open a name to write it, without following a link, be it a symbolic or a hard one."""
    descriptor = os.open(name, flags | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666, dir_fd=directory)
    file, folder = os.fstat(descriptor), os.fstat(directory)
    others_write = folder.st_uid != os.geteuid() or folder.st_mode & 0o022
    if stat.S_ISREG(file.st_mode) and file.st_nlink > 1 and others_write:
        os.close(descriptor)
        raise OSError(errno.EMLINK, "it is a file that has other names, in a directory that others can write")
    return descriptor


def _open_as_named(path: Path, most_links: int) -> int:
    """Open a path to write it, following links that belong to this user or to root."""
    with _directory(path) as directory:
        try:
            return _open_here(directory, path.name, os.O_CREAT)
        except OSError as error:
            if error.errno != errno.ELOOP or most_links == 0:
                raise
        link = os.open(path.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            if (owner := os.fstat(link).st_uid) not in (os.geteuid(), 0):
                raise OSError(errno.ELOOP, f"it is a link of another user (uid {owner}), which is not followed")
            if os.fstat(directory).st_dev == os.stat("/proc").st_dev:  # /dev/stdout, >(...): no path leads there
                return os.open(path.name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=directory)
            return _open_as_named(path.parent / os.readlink("", dir_fd=link), most_links - 1)
        finally:
            os.close(link)
