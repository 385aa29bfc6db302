"""Process groups over processes that pretend to be on several hosts."""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.support.ranks import place

import ringside

LIMIT_S = 60.0


@contextlib.contextmanager
def meeting_point() -> Iterator[str]:
    """Yield the path of a file through which ranks can meet."""
    with tempfile.TemporaryDirectory() as directory:
        yield str(Path(directory) / "store")


@contextlib.contextmanager
def process_group(path: str, size: int) -> Iterator[Any]:
    """Inside, the ranks 0 to size - 1 are in a Gloo group of their own."""
    here = place()
    store = dist.PrefixStore(here.job, dist.FileStore(path, -1))
    limit = datetime.timedelta(seconds=LIMIT_S / 2)
    dist.init_process_group("gloo", store=store, rank=here.rank, world_size=size, timeout=limit)
    store.set(f"in/{here.rank}", "")  # torch returns on each rank as soon as its own connections stand
    store.wait([f"in/{rank}" for rank in range(size)], limit)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def communicator(path: str, hosts: Sequence[int], **options: Any) -> Iterator[ringside.GroupCommunicator]:
    """A communicator over as many ranks as `hosts` has entries, each on the host of that number.

    An algorithm is given, so that nothing is measured, unless `algorithm=None` is.
    """
    options = {"timeout": 30.0, "algorithm": "ring", **options}
    with process_group(path, len(hosts)):
        comm = ringside.communicator(machine=f"host {hosts[place().rank]}", **options)
        try:
            yield comm
        finally:
            comm.close()


@contextlib.contextmanager
def own_machines() -> Iterator[None]:
    """Inside, no two ranks can share memory, and all-reduces travel along a ring."""
    names = {"RINGSIDE_MACHINE": f"machine {place().rank}", "RINGSIDE_ALGORITHM": "ring"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
