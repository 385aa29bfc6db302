"""Another user of the host can neither serve a job of ours, nor read it, nor keep it from starting."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.support.ranks import on_ranks

from ringside import _core
from ringside.engine import init
from ringside.engine.buffers import flatten
from ringside.engine.shm import meeting_place
from ringside.engine.shm.log import PATHS
from ringside.engine.shm.memory import Storage
from ringside.errors import UsageError

pytestmark = pytest.mark.native
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")

JOB = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "TORCHELASTIC_RUN_ID": "", "TORCHELASTIC_RESTART_COUNT": ""}
KEY = "127.0.0.1/29511///0"

STRANGER = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
servers = []
for address in sys.argv[2:]:
    servers.append(socket.socket(socket.AF_UNIX))
    if address.startswith("/"):
        os.mkdir(os.path.dirname(address), 0o700)
    servers[-1].bind(address.replace("@", "\\0"))
    if sys.argv[1] != "mute":
        servers[-1].listen(0 if sys.argv[1] == "full" else 8)
    servers[-1].setblocking(False)
print("ready", flush=True)
sys.stdin.read()
heard = b""
for server in servers:
    while sys.argv[1] == "serves":
        try:
            knock = server.accept()[0]
        except BlockingIOError:
            break
        knock.settimeout(1)
        try:
            heard += knock.recv(1000)
        except TimeoutError:
            pass
print(heard, flush=True)
"""


@contextlib.contextmanager
def stranger(how: str, *addresses: str) -> Iterator[subprocess.Popen[str]]:
    """Another user's process that holds sockets."""
    process = subprocess.Popen(
        [sys.executable, "-c", STRANGER, how, *addresses], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)


def trains() -> float:
    """In a process of its own: `init` numbers a process's communicators, and KEY is that of the first one."""
    with init(timeout=20, environ={**os.environ, **JOB}) as comm:
        x = np.full(16, comm.rank + 41.5, np.float32)
        comm.all_reduce(x)
        return float(x[0])


@needs_root
@pytest.mark.parametrize("how", ["serves", "mute", "full"])
def test_a_name_held_by_somebody_else_neither_serves_nor_stops_a_job(how: str) -> None:
    digest = hashlib.sha256(f"{os.getuid()}/{KEY}".encode()).hexdigest()[:32]
    with stranger(how, f"@ringside-{digest}") as process:
        assert on_ranks(2, trains) == [84.0, 84.0]
        out, _ = process.communicate("")
    assert out.strip() == "b''"


@needs_root
def test_a_directory_of_somebody_else_is_not_entered() -> None:
    """Nor is one of ours that others can enter, nor a link."""
    prefix = f"/tmp/ringside-{os.getuid()}-test{os.getpid()}"
    name = hashlib.sha256(f"{os.getuid()}/{KEY}".encode()).hexdigest()[:32]
    try:
        with stranger("serves", f"{prefix}-a/{name}", f"/tmp/stranger-{os.getpid()}/{name}") as process:
            os.symlink(f"/tmp/stranger-{os.getpid()}", f"{prefix}-b")
            Path(f"{prefix}-c").mkdir()
            Path(f"{prefix}-c").chmod(0o755)
            with socket.socket(socket.AF_UNIX) as ours:
                ours.bind(f"{prefix}-c/{name}")
                ours.listen()
                assert meeting_place.connect(KEY) is None
            assert on_ranks(2, trains) == [84.0, 84.0]
            out, _ = process.communicate("")
        assert out.strip() == "b''"
    finally:
        with contextlib.suppress(OSError):
            os.unlink(f"{prefix}-b")
        for path in (f"{prefix}-a", f"{prefix}-c", f"/tmp/stranger-{os.getpid()}"):
            shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def short_path() -> Iterator[str]:
    """A directory whose name leaves room for a socket's: 108 bytes are all that a socket's path may have."""
    with tempfile.TemporaryDirectory(prefix="ringside-") as root:
        yield root


def test_meeting_leaves_no_directory_behind_and_removes_what_a_killed_rank_0_left(
    short_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = short_path
    monkeypatch.setattr(meeting_place, "ROOTS", (root,))
    prefix = f"ringside-{os.getuid()}-"
    dead = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(dead / "name"))
    young = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
    os.utime(dead, (0, 0))
    with meeting_place.listening("a key", 2):
        found = meeting_place.connect("a key")
        assert found is not None
        assert meeting_place.credentials(found)[:2] == (os.getpid(), os.getuid())
        found.close()
        assert meeting_place.connect("another key") is None
        with pytest.raises(UsageError, match="another rank 0 already listens"):
            meeting_place.listening("a key", 2).__enter__()
    assert os.listdir(root) == [young.name]
    assert meeting_place.connect("a key") is None


def test_without_any_name_to_be_had_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_place, "ROOTS", ("/nowhere",))
    monkeypatch.setattr(meeting_place, "address_of", lambda key: "/nowhere/at/all")
    with pytest.raises(UsageError, match="ranks cannot meet: none of /nowhere can be written"):
        meeting_place.listening("a key", 2).__enter__()


def test_an_arena_cannot_shrink_and_one_that_could_is_not_mapped() -> None:
    native, stage = _core.native(), 3 * 4096
    fd = native.create_arena(2, stage)
    size_bytes = os.fstat(fd).st_size
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 2 * size_bytes)
    forged = os.memfd_create("forged", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(forged, os.pread(fd, size_bytes, 0))
    arguments = {"stage_bytes": stage, "rank": 1, "ranks": 2, "pidfds": [-1, -1], "patience": (0, 4), "timeout_s": 1.0}
    arguments |= {"background": (0, 4), "one_shot_bytes": 4096, "segment_bytes": 4096, "stream_bytes": 1 << 30}
    native.open_communicator(arena_fd=fd, **arguments)
    with pytest.raises(OSError, match="arena"):
        native.open_communicator(arena_fd=forged, **arguments)
    os.close(fd)
    os.close(forged)


def in_memory_that_could_shrink() -> tuple[list[float], list[int]]:
    """All-reduce a tensor that lies in such memory on rank 0; return the sums, and how many went which way."""
    from tests.support.ranks import communicator

    with communicator() as comm:
        size_bytes = 1 << 20
        fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, size_bytes)
        if comm.rank == 1:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        x = np.frombuffer(mmap.mmap(fd, size_bytes), np.float32)
        x[:] = 1
        inode = os.fstat(fd).st_dev, os.fstat(fd).st_ino
        storage = Storage(inode, fd, x.ctypes.data, size_bytes)
        comm.all_reduce_storage(flatten(x), storage, scale=1.0, stamp_ns=0)
        sums = [float(x.min()), float(x.max())]
        ways = list(comm.log.totals().by_path)
        os.close(fd)
        return sums, ways


def test_memory_that_could_shrink_is_not_mapped_by_peers_and_its_tensor_is_copied() -> None:
    for sums, ways in on_ranks(2, in_memory_that_could_shrink):
        assert sums == [2.0, 2.0]
        assert dict(zip(PATHS, ways, strict=True)) == {**dict.fromkeys(PATHS, 0), "staged": 1}


def forged_offset(offset: int, region: int) -> list[float]:
    from tests.support.ranks import communicator

    with communicator() as comm, pytest.MonkeyPatch.context() as patch:
        x = comm.empty(5000)
        x[:] = 1
        if comm.rank == 1:  # it says that its tensor lies where it has no memory
            lies = Storage((0, 0), -1, x.ctypes.data - offset, x.nbytes)
            patch.setattr(comm.memory, "register", lambda storage, address: (region, address - storage.address, False))
            comm.all_reduce_storage(flatten(x), lies, scale=1.0, stamp_ns=0)
        else:
            comm.all_reduce(x)
        return [float(x.min()), float(x.max())]


@pytest.mark.parametrize("offset", [4096, 1 << 40, (1 << 64) - 64])
def test_an_offset_outside_of_its_region_is_not_followed(offset: int) -> None:
    assert on_ranks(2, forged_offset, offset, 0) == [[2.0, 2.0]] * 2
