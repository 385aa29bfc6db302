"""Which memory a bucket lies in: made once, known again, and anew whenever it is another."""

from __future__ import annotations

import os
import resource
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from tests.support.ranks import on_ranks  # noqa: E402

from ringside.engine.shm.communicator import HostCommunicator  # noqa: E402
from ringside.pytorch.shared_storage import SharedStorages, empty_shared, storage_of  # noqa: E402

from .training import Said  # noqa: E402


class Host:
    """Two ranks of a host, as far as `SharedStorages` asks; notes what was forgotten."""

    size = 2

    def __init__(self) -> None:
        self.retired: list[tuple[int, int]] = []
        self.memory = self

    def unregister(self, inode: tuple[int, int]) -> None:
        self.retired.append(inode)


def buckets() -> tuple[SharedStorages, Host]:
    host = Host()
    return SharedStorages(cast(HostCommunicator, host)), host


def memfds() -> int:
    """Return how many pieces of gradient memory this process has open or mapped."""
    return len([fd for fd in os.listdir("/proc/self/fd") if "ringside-gradients" in _target(fd)])


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_a_bucket_that_stays_is_the_same_storage() -> None:
    found, host = buckets()
    bucket = empty_shared(4096, torch.float32)
    first = found.storage_of(0, bucket)
    assert first is not None
    assert first.address == bucket.data_ptr()
    assert first.size_bytes == bucket.nbytes
    assert found.storage_of(0, bucket) is first
    assert found.storage_of(0, bucket[:2048]) is first, "another view of the same memory"
    assert not host.retired


def test_a_bucket_that_was_built_anew_is_another_wherever_it_lies() -> None:
    found, host = buckets()
    before, inodes = memfds(), list[tuple[int, int]]()
    for _ in range(20):  # freed in between: addresses and descriptors come again
        bucket: Any = empty_shared(4096, torch.float32)
        storage = found.storage_of(0, bucket)
        assert storage is not None
        status = os.fstat(storage.fd)
        assert (status.st_dev, status.st_ino) == storage.inode
        assert storage.address == bucket.data_ptr()
        inodes.append(storage.inode)
        del bucket
        assert memfds() <= before + 1, "when the next one is known, the one before may go"
    assert len(set(inodes)) == len(inodes)
    assert host.retired == inodes[:-1]
    found.keep(0)
    assert host.retired == inodes
    del storage
    assert memfds() == before


def test_private_memory_stays_where_it_is() -> None:
    found, host = buckets()
    bucket = torch.ones(4096)
    address = bucket.data_ptr()
    assert found.storage_of(0, bucket) is None
    assert bucket.data_ptr() == address
    assert not bucket.is_shared()
    shared = empty_shared(4096, torch.float32)
    storage = found.storage_of(0, shared)
    assert storage is not None
    assert found.storage_of(0, bucket) is None
    assert host.retired == [storage.inode]


def test_memory_of_every_element_type() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.complex64):
        tensor = empty_shared(33, dtype)
        tensor.fill_(3)
        assert tensor.tolist() == torch.full((33,), 3, dtype=dtype).tolist()
        assert storage_of(tensor[1:]) is storage_of(tensor) is not None


def test_its_memory_cannot_be_cut_off_and_is_not_inherited() -> None:
    tensor = empty_shared(4096, torch.float32)
    storage = storage_of(tensor)
    assert storage is not None
    for size_bytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(storage.fd, size_bytes)
    assert not os.get_inheritable(storage.fd)


def without_descriptors() -> tuple[list[Any], list[str]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(fd) for fd in os.listdir("/proc/self/fd")) + 1
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(used)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held) + 1, hard))
    try:
        with Said() as said:
            tensors = [empty_shared(4096, torch.float32) for _ in range(3)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)
    return [storage_of(tensor) for tensor in tensors], said.lines


def test_what_peers_wait_for_is_copied_where_no_descriptor_is_left() -> None:
    """In a process of its own: it is said once per process."""
    ((storages, said),) = on_ranks(1, without_descriptors)
    assert storages == [None] * 3
    assert len(said) == 1
    assert "copied instead" in said[0]


def moved() -> bool:
    found, host = buckets()
    bucket = empty_shared(4096, torch.float32)
    first = found.storage_of(0, bucket)
    bucket.untyped_storage()._share_filename_cpu_()
    second = found.storage_of(0, bucket)
    assert first is not None
    return second is None and host.retired == [first.inode]


def test_memory_that_torch_moved_under_a_bucket_is_private_from_then_on() -> None:
    """As multiprocessing with the strategy file_system moves what is sent: the same storage, another file.

    In a process of its own, since torch starts another one for that.
    """
    assert on_ranks(1, moved) == [True]
