"""What torch does around a backend works with ours: hooks, the flight recorder, splitting, what is asked of works."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import urllib.request
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402

from ringside.errors import UnsupportedError  # noqa: E402
from ringside.pytorch import carried  # noqa: E402
from ringside.pytorch.process_group.backend import RingsideBackend, RingsideGroup  # noqa: E402
from ringside.pytorch.process_group.carrier import carrier_of  # noqa: E402
from ringside.pytorch.process_group.creation import IS_BACKEND  # noqa: E402

from .process_groups import on_both, on_ours  # noqa: E402

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(not IS_BACKEND, reason="backends in Python are for torch 2.14 and newer"),
]


FOUND = """
import sys, torch, torch.distributed as dist
print(sorted(name for name in sys.modules if name.partition(".")[0] == "ringside"))
dist.init_process_group("ringside", store=dist.HashStore(), rank=0, world_size=1)
print(dist.get_backend())
"""


def test_import_torch_loads_nothing_of_ours_and_the_backend_is_found_by_its_name():
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RINGSIDE")}
    for asked in ({}, {"RINGSIDE_AS_GLOO": "0"}):
        command, environ = [sys.executable, "-W", "ignore", "-c", FOUND], {**plain, **asked}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)
        assert done.stdout.splitlines() == ["[]", "ringside"]


def hooks_and_records(rank: int) -> dict[str, Any]:
    """Issue three collectives and a message under a hook, two of them by other ways than the plain one."""
    group: Any = dist.group.WORLD
    heard: list[str] = []
    assert [type(dist.group.WORLD), type(carrier_of(group))] == [dist.ProcessGroup, RingsideBackend]
    group.register_pre_hook(1, lambda args: heard.append(args.name.name))
    dist.all_reduce(torch.ones(2))
    assert functional.all_reduce(torch.ones(2), "sum", group).tolist() == [2.0, 2.0]
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(3), 1)
    else:
        assert dist.recv(torch.zeros(3)) == 0, "the source of a message from anybody"
    group.unregister_pre_hook(1)
    heard = [name for name in heard if not name.startswith(("SEND", "RECV"))]
    recorded: list[str] = []
    if "backend" in (torch._C._distributed_c10d._dump_fr_trace_json.__doc__ or ""):  # torch 2.15
        dump = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(backend="ringside"))
        recorded = [entry["profiling_name"] for entry in dump["entries"]]
    return {"heard": heard, "recorded": recorded, "carried": carried()}


def test_hooks_and_the_flight_recorder_see_what_we_carry():
    for told in on_ours(2, hooks_and_records):
        assert told["heard"] == ["ALLREDUCE", "ALLREDUCE", "BARRIER"]
        assert told["carried"]["ringside"] == {"all_reduce": 2, "barrier": 1}
        assert sum(told["carried"]["gloo"].values()) == 1
        if told["recorded"]:
            assert told["recorded"].count("ringside:all_reduce") == 2


def completed_later(rank: int) -> list[Any]:
    """Rank 0 issues, and asks; rank 1 issues when told by a message that rank 0 has asked."""
    x, told = torch.ones(2), torch.zeros(1)
    if rank == 0:
        work = dist.all_reduce(x, async_op=True)
        early = work.is_completed()
        dist.send(told, 1)
    else:
        dist.recv(told, 0)
        work = dist.all_reduce(x, async_op=True)
        early = False
    work.wait()
    message = dist.isend(told, 1) if rank == 0 else dist.irecv(told, 0)
    message.wait()
    return [
        early,
        work.is_completed(),
        work.is_success(),
        work.exception(),
        work.result()[0].tolist(),
        message.is_completed(),
    ]


def test_a_work_tells_whether_it_is_over_and_what_came_of_it():
    assert on_ours(2, completed_later) == [[False, True, True, None, [2.0, 2.0], True]] * 2


def health(rank: int) -> list[Any]:
    """Ask torch's health check of a group while a rank is missing, after the timeout of that and after the abort."""
    group: Any = dist.new_group(timeout=datetime.timedelta(seconds=1))
    backend = group._get_backend(torch.device("cpu"))
    server = torch._C._distributed_c10d._WorkerServer("127.0.0.1", 0)
    told: list[Any] = []

    def ask() -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{server.port}/handler/c10d_health_check", method="POST")
        with urllib.request.urlopen(request, timeout=20) as answer:
            told.append((json.load(answer), backend.get_error().name, group.supports_abort_hooks))

    dist.all_reduce(torch.ones(2), group=group)
    ask()
    if rank == 0:
        work = dist.all_reduce(torch.ones(2), group=group, async_op=True)
        ask()
        with pytest.raises(RuntimeError, match="Timed out waiting 1000ms"):
            work.wait()
        ask()
    dist.barrier()
    backend.abort()
    ask()
    server.shutdown()
    return told


@pytest.mark.skipif(
    IS_BACKEND and "c10d_health_check" not in torch._C._distributed_c10d._get_handler_names(),
    reason="the health check of torch 2.14 is of torchcomms alone",
)
def test_torchs_health_check_is_answered_as_for_gloo():
    """It is told by abort hooks, which torch asks neither Gloo nor a backend in Python for."""
    ours, theirs = on_both(2, health)
    assert ours == theirs
    assert ours[0] == [({"healthy": True, "unhealthy_backends": []}, "SUCCESS", False)] * 4


def of_another_backend(rank: int) -> list[Any]:
    """Works of stock Gloo are asked as before."""
    work = dist.all_reduce(torch.ones(2), group=dist.new_group(backend="gloo"), async_op=True)
    work.wait()
    return [work.is_completed(), work.is_success(), work.result()[0].tolist()]


def test_works_of_other_backends_answer_for_themselves():
    assert on_ours(2, of_another_backend) == [[True, True, [2.0, 2.0]]] * 2


def split(rank: int) -> dict[str, Any]:
    """Split the group in two, and each half goes on by itself."""
    half = dist.split_group(split_ranks=[[0], [1, 2]], timeout=datetime.timedelta(seconds=30))
    x = torch.ones(1)
    dist.all_reduce(x, group=half)
    backend = carrier_of(half)
    told = {"sum": x.item(), "name": dist.get_backend(half), "size": half.size(), "ours": carried(half)["ringside"]}
    assert isinstance(backend, RingsideBackend)
    assert backend.options._timeout == datetime.timedelta(seconds=30)
    dist.destroy_process_group(half)
    dist.all_reduce(x)
    return {**told, "after": x.item()}


@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch 2.14 splits groups of devices alone")
def test_split_group_gives_groups_of_ours():
    alone, *pair = on_ours(3, split)
    assert alone == {"sum": 1.0, "name": "ringside", "size": 1, "ours": {"all_reduce": 1}, "after": 5.0}
    assert pair == [{"sum": 2.0, "name": "ringside", "size": 2, "ours": {"all_reduce": 1}, "after": 5.0}] * 2


def abilities(rank: int) -> dict[str, bool]:
    backend: Any = carrier_of(dist.group.WORLD)
    names = [name for name in dir(torch._C._distributed_c10d.Backend) if name.lstrip("_").startswith("supports_")]
    return {name: getattr(backend, name) for name in names if name != "supports_tensor_alloc"}  # a method, of a device


def test_whatever_torch_asks_whether_a_backend_can_do_it_has_an_answer():
    """Where Python has none, torch's C++ asks itself until the stack is full."""
    (can,) = on_ours(1, abilities)
    assert {name for name, answer in can.items() if answer} == {"supports_splitting"}
    assert {"supports_reconfigure", "supports_shrinking"} <= can.keys()


def in_detail(rank: int) -> list[Any]:
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    dist.set_debug_level_from_env()
    group = dist.new_group(backend="ringside")
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    with pytest.raises((UnsupportedError, RuntimeError), match=r"use new_group|not safe to split"):  # torch 2.14's own
        dist.split_group(group, split_ranks=[[0, 1]])
    return [isinstance(group, RingsideGroup), x.tolist()]


def test_under_torchs_detailed_checks_it_is_a_group():
    assert on_ours(2, in_detail) == [[True, [2.0, 2.0]]] * 2


def on_a_device(rank: int) -> str:
    with pytest.raises((UnsupportedError, RuntimeError, NotImplementedError)) as caught:
        carrier_of(dist.group.WORLD).allreduce([torch.empty(2, device="meta")], dist.AllreduceOptions())
    return str(caught.value)


def test_a_tensor_that_is_not_on_the_cpu_is_refused_with_what_to_do():
    for said in on_ours(2, on_a_device):
        assert "cpu:ringside,cuda:nccl" in said
