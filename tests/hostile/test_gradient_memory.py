"""Gradient buckets take nothing of /dev/shm, wait for no lock, and leave what a script sees of them where it is."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.pytorch import namespaces  # noqa: E402
from tests.pytorch.training import ddp_ranks, free_port, group, run_directory  # noqa: E402
from tests.support.ranks import ROOT, Team, communicator, on_ranks  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside.pytorch.shared_storage import SharedStorages, empty_shared  # noqa: E402

pytestmark = pytest.mark.native

WIDTH = 512
BYTES = 3 * WIDTH * WIDTH * 4


def model(**options: Any) -> DistributedDataParallel:
    """Three buckets of a MB each."""
    torch.manual_seed(3)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)]
    return DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1, **options)


def step(ddp: DistributedDataParallel, rank: int, number: int) -> None:
    """Forward and backward; gradients stay where they are."""
    ddp.zero_grad(set_to_none=False)
    ddp(torch.full((2, WIDTH), 0.01 * (rank + 1) * (number + 1))).sum().backward()


# ------------------------------------------------------------------------------------------------ /dev/shm


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Four samples of 2 MB."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((512, 1024), float(index))


def loads_beside_training(port: int) -> tuple[float, int, int, dict[str, int]]:
    """Train, then load with a worker, where the host's /dev/shm has 14 MB; gradients of both ranks are 24 MB."""
    with group(port) as rank:
        store = dist.distributed_c10d._get_default_store()
        if rank == 0:
            namespaces.enter_own()
            namespaces.mount_small("/dev/shm", 14 << 20)
            store.set("mounted", str(os.getpid()))
        else:
            namespaces.enter_that_of(int(store.get("mounted")))
        dist.barrier()
        free = os.statvfs("/dev/shm").f_bavail
        torch.manual_seed(3)
        ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3))))
        attachment = ringside.attach(ddp, monitor=False)
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.ones(2, 1024)).sum().backward()
        taken = free - os.statvfs("/dev/shm").f_bavail
        dist.barrier()
        loader = torch.utils.data.DataLoader(Samples(), batch_size=1, num_workers=1)
        total = sum(float(sample.mean()) for sample in loader)
        counters = attachment.counters
        attachment.detach()
        del loader
        dist.barrier()  # what the other rank's worker has under way is there, too
        return total, taken, len(os.listdir("/dev/shm")), counters


def test_workers_of_a_loader_have_dev_shm_to_themselves() -> None:
    if not namespaces.possible():
        pytest.skip("needs the privilege to make a mount namespace")
    with Team(2) as team:
        for total, taken, files, counters in team.run(loads_beside_training, free_port()):
            assert total == 0 + 1 + 2 + 3
            assert (taken, files) == (0, 0)
            assert counters["ringside/push"] > 0, "and buckets are shared all the same"


# ------------------------------------------------------------------------------------------------ views


def by_numpy(gradient: torch.Tensor) -> Callable[[], float]:
    array = gradient.detach().numpy()
    return lambda: float(array[1, 1])


def by_dlpack(gradient: torch.Tensor) -> Callable[[], float]:
    array = np.from_dlpack(gradient.detach())
    return lambda: float(array[1, 1])


def by_address(gradient: torch.Tensor) -> Callable[[], float]:
    numbers = (ctypes.c_float * gradient.numel()).from_address(gradient.data_ptr())
    return lambda: float(numbers[WIDTH + 1])


def views(rank: int, attached: bool, options: dict[str, Any], look: int, attach: int) -> list[tuple[float, ...]]:
    """Look at gradients after step `look`, attach before step `attach`; return what is seen after each later step."""
    ddp, seen, holders = model(**options), [], list[Callable[[], float]]()
    attachment = None
    for number in range(6):
        if attached and number == attach:
            attachment = ringside.attach(ddp, monitor=False)
        step(ddp, rank, number)
        gradient = ddp.module[0].weight.grad
        if number == look:
            ways = [by_numpy, by_dlpack]
            # An address keeps nothing alive: in stock DDP, too, it is gone when buckets are rebuilt.
            holders = [way(gradient) for way in (ways if look == 0 else [*ways, by_address])]
        if number >= look:
            seen.append((*(holder() for holder in holders), float(gradient[1, 1])))
    if attachment is not None:
        attachment.detach()
    return seen


VIEWS = {
    f"{name}, seen after step {look}, attached before step {attach}": (options, look, attach)
    for name, options in (
        ("gradients are views", {"gradient_as_bucket_view": True}),
        ("gradients are apart", {}),
        ("unused are looked for", {"gradient_as_bucket_view": True, "find_unused_parameters": True}),
        ("graph is static", {"gradient_as_bucket_view": True, "static_graph": True}),
    )
    for look, attach in ((2, 3), (0, 0), (0, 1), (2, 0))
}


def all_views(port: int) -> dict[str, tuple[Any, Any]]:
    with group(port) as rank:
        return {name: (views(rank, False, *case), views(rank, True, *case)) for name, case in VIEWS.items()}


@pytest.mark.filterwarnings("ignore")
def test_arrays_and_addresses_of_gradients_see_what_they_see_in_stock_ddp() -> None:
    for rank in ddp_ranks(2, all_views):
        for name, (stock, ours) in rank.items():
            assert ours == stock, name


# ------------------------------------------------------------------------------------------------ how long it lives


def _memory() -> list[tuple[int, int]]:
    """Return (descriptor, bytes) of this rank's own gradient memory."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "ringside-gradients" in os.readlink(f"/proc/self/fd/{fd}"):
                found.append((int(fd), os.fstat(int(fd)).st_size))
        except OSError:
            continue
    return found


def _mapped() -> int:
    """Return how many pieces of gradient memory are mapped, peers' among them."""
    return Path("/proc/self/maps").read_text().count("ringside-gradients")


def lifetimes(port: int) -> list[Any]:
    """Return the bytes and mappings there are while models come, train, and go in several ways."""
    rows = []
    gc.collect()  # what earlier tests left in these processes
    with group(port) as rank:
        for round_ in range(12):
            ddp = model(gradient_as_bucket_view=round_ % 2 == 0, find_unused_parameters=round_ % 4 == 3)
            attachment = ringside.attach(ddp, monitor=False)
            for number in range(4):
                step(ddp, rank, number)
            rows.append((sum(size for _, size in _memory()), _mapped()))
            if round_ % 3:
                attachment.detach()
            if round_ % 3 == 2:  # and again, over buckets that are there
                attachment = ringside.attach(ddp, monitor=False)
                step(ddp, rank, 4)
                rows.append((sum(size for _, size in _memory()), attachment.counters == {"ringside/push": 3}))
                attachment.detach()
            del ddp, attachment
            gc.collect()
            dist.barrier()
        rows.append((len(_memory()), _mapped()))
    return rows


@pytest.mark.filterwarnings("ignore")
def test_there_is_one_copy_of_the_buckets_and_none_of_models_that_are_gone() -> None:
    for rows in ddp_ranks(2, lifetimes):
        *during, after = rows
        for size_bytes, told in during:
            assert size_bytes == BYTES, "neither the first buckets nor earlier models' are kept"
            assert told is True or told == 6, "three of this rank's, three of its peer's"
        assert after == (0, 0)


def freed_too_early() -> tuple[int, int]:
    """Free a bucket that is announced, then retire it; return how many are mapped after each."""
    with communicator() as comm:
        buckets = SharedStorages(comm)
        bucket = empty_shared(1000, torch.float32)
        storage = buckets.storage_of(0, bucket)
        assert storage is not None
        assert comm.memory.register(storage, storage.address)[0] >= 0
        before = _mapped()
        del bucket, storage
        gc.collect()
        freed = _mapped() - before
        buckets.keep(0)
        return freed, _mapped() - before


def test_a_bucket_stays_mapped_until_no_failing_communicator_can_be_about_to_make_it_private() -> None:
    assert on_ranks(2, freed_too_early) == [(0, -1)] * 2


# ------------------------------------------------------------------------------------------------ attached late


class Fails(nn.Module):
    """A layer that fails if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fails = nn.Linear(64, 64), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("a bad batch")
        return self.layer(x)


def attached_between(port: int) -> list[float]:
    """Attach between a forward and its backward, with a forward that fails before that; return the gradients' sums."""
    with group(port) as rank:
        ddp, batch, sums = DistributedDataParallel(Fails()), torch.full((2, 64), rank + 1.0), []
        ddp(batch).sum().backward()
        for number in range(4):
            ddp.zero_grad()
            output = ddp(batch)
            if number == 1:
                attachment = ringside.attach(ddp, monitor=False, engine="ringside")
                ddp.module.fails = True
                with pytest.raises(ValueError, match="bad batch"):
                    ddp(batch)
                ddp.module.fails = False
            output.sum().backward()
            sums.append(float(ddp.module.layer.weight.grad.sum()))
        assert attachment.counters["ringside/staged"] > 0
        attachment.detach()
        return sums


def test_a_backward_whose_forward_came_before_attach_is_reduced() -> None:
    assert ddp_ranks(2, attached_between) == [[2 * 1.5 * 64 * 64] * 4] * 2


def trained(rank: int, attached: bool, before: int, uneven: bool, options: dict[str, Any]) -> tuple[bytes, Any]:
    """Train `before` steps, attach, train on (rank 1 has no batch left if `uneven`); return the parameters' bytes."""
    ddp = model(**options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    attachment = None
    for number in range(before):
        step(ddp, rank, number)
        optimizer.step()
    if attached:
        attachment = ringside.attach(ddp, monitor=False)
    with ddp.join(enable=uneven):
        for number in range(before, before + (1 if uneven and rank == 1 else 5)):
            step(ddp, rank, number)
            optimizer.step()
    counters = attachment.counters if attachment is not None else {}
    if attachment is not None:
        attachment.detach()
    return b"".join(p.detach().numpy().tobytes() for p in ddp.parameters()), counters


LATE = [
    (before, uneven, options)
    for before in (0, 1, 3)
    for uneven in (False, True)
    for options in (
        {},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True},
        {"static_graph": True},
    )
    if not (uneven and options.get("static_graph"))  # DDP itself refuses it in places
]


def late(port: int) -> list[Any]:
    rows = []
    with group(port) as rank:
        for case in LATE:
            stock, _ = trained(rank, False, *case)
            ours, counters = trained(rank, True, *case)
            rows.append((case, stock == ours, counters))
    return rows


@pytest.mark.filterwarnings("ignore")
def test_models_that_are_attached_at_any_time_train_as_in_stock_ddp() -> None:
    for rows in ddp_ranks(2, late):
        for (before, uneven, options), same, counters in rows:
            assert same, (before, uneven, options)
            assert all(name.startswith("ringside/") for name in counters)
            if uneven:
                continue  # a rank that has joined gives zeros of its own, which are copied
            seen = before == 3 and (options.get("gradient_as_bucket_view") or options.get("static_graph"))
            if not (seen or (options.get("find_unused_parameters") and before)):
                assert counters.get("ringside/push", 0) >= 3, (before, uneven, options, counters)


def reported(port: int) -> dict[str, Any]:
    """Return what the run of two models says, of which one came too late to share what a script may have seen."""
    with group(port) as rank, run_directory() as path:
        early, late = model(), model(gradient_as_bucket_view=True)
        for number in range(3):
            step(late, rank, number)
        attachments = [ringside.attach(ddp, run_dir=path) for ddp in (early, late)]
        for number in range(3):
            step(early, rank, number)
            step(late, rank, number)
        attachments[0].detach()
        attachments[0] = ringside.attach(early, run_dir=path)
        step(early, rank, 3)
        session = attachments[0].session
        assert session is not None
        session.end()
        for attachment in attachments:
            attachment.detach()
        if rank:
            return {}
        told = json.loads((session.path / "summary.json").read_text())["sync"]["memory"]
        page = (session.path / "report.html").read_text()
        return {**told, "page": "3 shared (3.15 MB), 3 copied (3.15 MB)" in page}


def test_the_report_says_what_was_shared_and_what_was_copied() -> None:
    first, _ = ddp_ranks(2, reported)
    assert first == {
        "shared_buckets": 3,
        "shared_bytes": BYTES,
        "copied_buckets": 3,
        "copied_bytes": BYTES,
        "page": True,
    }


# ------------------------------------------------------------------------------------------------ locks


@contextmanager
def locked(path: str) -> Iterator[None]:
    """Hold a lock as anybody can who may read the path."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def three_steps(port: int) -> dict[str, int]:
    with group(port) as rank:
        ddp = model()
        attachment = ringside.attach(ddp, monitor=False)
        for number in range(3):
            step(ddp, rank, number)
        counters = attachment.counters
        attachment.detach()
        return counters


def test_nobodys_lock_is_waited_for() -> None:
    with locked("/dev/shm"):
        for counters in ddp_ranks(2, three_steps):
            assert counters["ringside/push"] > 0


def test_the_package_takes_no_file_locks() -> None:
    """A file's lock can be held by anybody who may open it, and goes on in children that were forked meanwhile."""
    taken = re.compile(r"\b(flock|lockf|F_SETLKW?|F_OFD_SETLKW?)\b")
    sources = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".cpp", ".hpp")]
    assert len(sources) > 100
    assert not [path.name for path in sources if taken.search(path.read_text())]
