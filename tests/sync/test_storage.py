"""Which memory a bucket lies in: looked up once, and anew whenever it is another."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from tests.processes import on_ranks  # noqa: E402

from ringside.engine.communicator import Communicator  # noqa: E402
from ringside.sync.storage import Buckets  # noqa: E402


class Host:
    """Two ranks of a host, as far as `Buckets` asks; notes what was forgotten."""

    size = 2

    def __init__(self) -> None:
        self.retired: list[tuple[int, int]] = []
        self.memory = self

    def retire(self, inode: tuple[int, int]) -> None:
        self.retired.append(inode)


def buckets() -> tuple[Buckets, Host]:
    host = Host()
    return Buckets(cast(Communicator, host)), host


def test_a_bucket_that_stays_is_looked_up_once() -> None:
    found, host = buckets()
    bucket = torch.ones(4096)
    first = found.storage_of(0, bucket)
    assert first is not None
    assert first.address == bucket.data_ptr()
    assert found.storage_of(0, bucket) is first
    assert found.storage_of(0, bucket[:2048]) is first, "another view of the same memory"
    assert not host.retired


def test_a_bucket_that_was_built_anew_is_another_wherever_it_lies() -> None:
    found, host = buckets()
    inodes: list[tuple[int, int]] = []
    for _ in range(20):  # freed in between: addresses and descriptors come again
        bucket: Any = torch.ones(4096)
        storage = found.storage_of(0, bucket)
        assert storage is not None
        status = os.fstat(storage.fd)
        assert (status.st_dev, status.st_ino) == storage.inode
        assert storage.address == bucket.data_ptr()
        inodes.append(storage.inode)
        del bucket
    assert len(set(inodes)) == len(inodes)
    assert host.retired == inodes[:-1]
    found.keep(0)
    assert host.retired == inodes


def moved() -> bool:
    found, host = buckets()
    bucket = torch.ones(4096)
    first = found.storage_of(0, bucket)
    bucket.untyped_storage()._share_filename_cpu_()
    second = found.storage_of(0, bucket)
    assert first is not None
    assert second is not None
    return second.address == bucket.data_ptr() and second is not first and host.retired == [first.inode]


def test_memory_that_was_moved_under_a_bucket_is_looked_up_again() -> None:
    """As multiprocessing with the strategy file_system moves what is sent: the same storage, another file.

    In a process of its own, since torch starts another one for that.
    """
    assert on_ranks(1, moved) == [True]
