"""Where the ranks of a host meet that know nothing of each other but a key, and where no other user can come between.

A Unix socket in a directory with an unpredictable name that belongs to this user and that nobody else can enter: rank 0
makes it, the others search the directories of that kind. Nobody can make one that belongs to us, so there is no name to
be taken beforehand. Ranks that see another /tmp (containers that share the network) meet at an abstract name instead.
Any user can hold that one, so both ends ask the kernel whose socket it is, and go on without it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ringside.errors import UsageError
from ringside.processes import namespace_id

ROOTS = ("/tmp", "/dev/shm", "/var/tmp")
"""Where directories may be made, in order: rank 0 takes the first that it can write, the others search all."""
_STALE_S = 60.0  # a directory this old in which nobody listens was left by a rank 0 that was killed


@contextlib.contextmanager
def listening(key: str, ranks: int) -> Iterator[dict[int, socket.socket]]:
    """Listen as rank 0 inside the `with` statement, and leave nothing behind; yield the sockets, by descriptor.

    Args:
        key: Names the communicator.
        ranks: How many may connect at the same time.

    Raises:
        UsageError: A process of this user already listens for the same key.
    """
    servers: dict[int, socket.socket] = {}
    _remove_stale()
    with contextlib.ExitStack() as made:

        def listen(address: str) -> None:
            server = made.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            server.bind(address)
            server.listen(ranks)
            servers[server.fileno()] = server

        try:
            listen(address_of(key))
        except OSError:
            _refuse_a_second(key)  # that another user holds the name changes nothing
        for root in ROOTS:
            with contextlib.suppress(OSError):
                directory = tempfile.mkdtemp(prefix=_prefix(), dir=root)
                made.callback(shutil.rmtree, directory, ignore_errors=True)
                listen(f"{directory}/{_hash(key)}")
                break
        if not servers:
            raise UsageError(f"ranks cannot meet: none of {', '.join(ROOTS)} can be written, and the name is taken")
        yield servers


def connect(key: str) -> socket.socket | None:
    """Return a connection to this user's process that listens for a key; None: there is none yet."""
    for address in [*(f"{directory}/{_hash(key)}" for directory in _directories()), address_of(key)]:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)  # another user's may never answer
            sock.connect(address)
            if credentials(sock)[1] == os.getuid():
                return sock
        except OSError:
            pass
        sock.close()
    return None


def address_of(key: str) -> str:
    """Return the abstract address for a key; a hash, since addresses are short and visible to all users."""
    return f"\0ringside-{_hash(key)}"


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """Return (process, user, group) at the other end of a connected Unix socket, or listening there."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", data)
    return pid, uid, gid


def _refuse_a_second(key: str) -> None:
    """Raise `UsageError` where a process of this user listens for the key."""
    for _ in range(10):
        found = connect(key)
        if found is not None:
            found.close()
            raise UsageError(
                f"another rank 0 already listens for {key!r}: two jobs share MASTER_ADDR and MASTER_PORT, "
                "or two processes both have RANK=0"
            )
        time.sleep(0.01)  # it may have the name and not listen yet


def _hash(key: str) -> str:
    # Keys such as 127.0.0.1/29500 mean something within one network only, and containers may share a directory.
    return hashlib.sha256(f"{os.getuid()}/{namespace_id('net')}/{key}".encode()).hexdigest()[:32]


def _prefix() -> str:
    return f"ringside-{os.getuid()}-"


def _directories() -> Iterator[str]:
    """Yield the directories of this kind that belong to this user and that nobody else can enter."""
    for root in ROOTS:
        with contextlib.suppress(OSError), os.scandir(root) as entries:
            for entry in entries:
                if entry.name.startswith(_prefix()):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
                        yield entry.path


def _remove_stale() -> None:
    """Remove old directories in which nobody listens."""
    for directory in _directories():
        with contextlib.suppress(OSError):
            if time.time() - os.stat(directory).st_mtime <= _STALE_S:
                continue
            for path in Path(directory).iterdir():
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                    sock.setblocking(False)
                    if sock.connect_ex(str(path)) in (0, errno.EAGAIN):  # EAGAIN: it listens, and its queue is full
                        break
            else:
                shutil.rmtree(directory)
