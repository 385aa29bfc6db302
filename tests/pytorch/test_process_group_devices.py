"""Which tensors are whose: CPU tensors are ours, all others go to the native group; how torch finds the backend."""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

from ringside.autoload import ringside_backend  # noqa: E402
from ringside.errors import UsageError  # noqa: E402
from ringside.pytorch import carried  # noqa: E402
from ringside.pytorch.process_group import creation as process_group_making  # noqa: E402
from ringside.pytorch.process_group.backend import RingsideGroup  # noqa: E402
from ringside.pytorch.process_group.carrier import carrier_of  # noqa: E402
from ringside.pytorch.process_group.collectives import TABLE  # noqa: E402
from ringside.pytorch.process_group.creation import IS_BACKEND  # noqa: E402

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        not hasattr(dist.ProcessGroup, "_set_default_backend"),
        reason="refused in one line: the process group needs torch 2.7",
    ),
]


class Recorder:
    """Stands in for the native group and notes what it is asked to carry."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> None:
            self.calls.append(name)

        return call


@contextlib.contextmanager
def alone(backend: str) -> Iterator[Any]:
    """A default group of this process only."""
    limit = datetime.timedelta(seconds=20)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def everything(x: torch.Tensor) -> None:
    """Call every collective with tensors like `x`, which are alone in their group."""
    y = torch.empty_like(x)
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.reduce(x, 0)
    dist.all_gather([y], x)
    dist.all_gather_single(y, x)
    dist.reduce_scatter(y, [x])
    dist.reduce_scatter_single(y, x)
    dist.gather(x, [y], 0)
    dist.scatter(y, [x], 0)
    dist.all_to_all([y], [x])
    dist.all_to_all_single(y, x)
    with dist._coalescing_manager(async_ops=True):
        dist.all_reduce(x)


NATIVE = ["allreduce", "broadcast", "reduce", "allgather", "all_gather_single", "reduce_scatter"]
NATIVE += ["reduce_scatter_single", "gather", "scatter", "alltoall", "all_to_all_single", "allreduce_coalesced"]


OLDER = pytest.mark.skipif(IS_BACKEND, reason="from torch 2.14 on the group is torch's own, and NCCL a backend of it")


@OLDER
@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="names of torch 2.13")
def test_tensors_that_are_not_on_the_cpu_go_to_the_native_group():
    with alone("cpu:ringside,cuda:nccl") as group:
        real, group.native = group.native, Recorder()
        recorder = group.native
        everything(torch.empty(4, device="meta"))
        group.send([torch.empty(4, device="meta")], 0, 0)
        group._start_coalescing(torch.device("cuda", 0))
        group._end_coalescing(torch.device("cuda", 0))
        group.native = real
        assert recorder.calls == [*NATIVE, "send", "_start_coalescing", "_end_coalescing"]
        assert set(carried()) == {"native"}
        everything(torch.ones(4))
        assert set(carried()) == {"native", "ringside"}
        assert sum(carried()["ringside"].values()) == len(NATIVE)


@OLDER
def test_a_barrier_follows_its_device():
    with alone("ringside") as group:
        real, group.native = group.native, Recorder()
        recorder, options = group.native, c10d.BarrierOptions()
        options.device = torch.device("cuda", 0)
        group.barrier(options)
        dist.barrier()
        group.native = real
        assert recorder.calls == ["barrier"]
        assert carried() == {"native": {"barrier": 1}, "ringside": {"barrier": 1}}


@OLDER
def test_where_gloo_is_asked_for_tensors_on_gpus_torch_finds_it_for_them():
    group = RingsideGroup(dist.HashStore(), 0, 1, datetime.timedelta(seconds=20), "gloo")
    for one in (group, group.native):
        assert {device.type for device in one._device_types} == {"cpu", "cuda"}
        assert isinstance(one._get_backend(torch.device("cuda")), dist.ProcessGroupGloo)


@pytest.mark.skipif(not IS_BACKEND, reason="backends in Python are for torch 2.14 and newer")
@pytest.mark.parametrize(("asked", "made"), [("ringside", ["cpu"]), ("cpu:ringside,cuda:gloo", [])])
def test_nccl_stands_beside_ours_where_there_is_a_gpu_and_nobody_else_named_it(monkeypatch, asked, made):
    calls = []

    def stand_in(options: Any, _: Any) -> Any:
        calls.append(options.group_size)
        return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options.timeout)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setitem(c10d.Backend._plugins, "NCCL", c10d.Backend._BackendPlugin(stand_in, True))
    with alone(asked) as group:
        assert len(calls) == len(made)
        assert {device.type for device in group._device_types} == {"cpu", "cuda"}
        assert carrier_of(group) is not None
        assert isinstance(group._get_backend(torch.device("cuda")), dist.ProcessGroupGloo)


def test_every_method_of_torch_that_moves_data_is_ours():
    ours = {name for _, *names in TABLE.values() for name in names} | {"send", "recv", "recv_anysource"}
    words = ("gather", "reduce", "scatter", "alltoall", "all_to_all", "broadcast", "barrier", "send", "recv")
    theirs = {
        name
        for name in dir(torch._C._distributed_c10d.Backend if IS_BACKEND else dist.ProcessGroup)
        if any(word in name for word in words) and "__" not in name
    }
    assert theirs <= ours | {"monitored_barrier", "allreduce_sparse"}  # which torch calls for NCCL's alone


def test_torch_finds_the_backend_by_its_entry_point():
    ringside_backend.register()  # again does no harm
    assert dist.Backend.backend_capability["ringside"] == (["cpu"] if IS_BACKEND else ["cpu", "cuda"])


LOADED = "import sys, torch; print(*(name for name in sys.modules if name.partition('.')[0] == 'ringside'))"


def test_torch_alone_loads_nothing_of_ours_where_it_looks_backends_up_itself():
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RINGSIDE_")}
    done = subprocess.run([sys.executable, "-c", LOADED], env=environ, capture_output=True, text=True, check=True)
    assert ("ringside" in done.stdout.split()) is not IS_BACKEND
    environ["RINGSIDE_AS_GLOO"] = "1"
    done = subprocess.run([sys.executable, "-c", LOADED], env=environ, capture_output=True, text=True, check=True)
    assert "ringside" in done.stdout.split()


def test_a_torch_that_is_too_old_is_named_in_one_line(monkeypatch):
    monkeypatch.setattr(process_group_making, "NEEDED", ("no_such_method",))
    with pytest.raises(UsageError, match=r"a newer torch than .* no no_such_method"), alone("ringside"):
        pass


def test_only_groups_of_ours_count():
    with alone("gloo"), pytest.raises(UsageError, match="'gloo' does not count"):
        carried()
