"""A reducer at the switch: a process of its own, beside ranks that pretend to be on several hosts."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.pytorch.groups import meeting_point, process_group  # noqa: E402
from tests.support.ranks import on_ranks, outcomes_of, place  # noqa: E402

import ringside  # noqa: E402
from ringside.engine.net.rank_map import RankInfo, make_rank_map  # noqa: E402
from ringside.errors import UsageError  # noqa: E402
from ringside.pytorch import in_network_reducer as reducer  # noqa: E402
from ringside.pytorch.communicator import communicator as communicators  # noqa: E402
from ringside.pytorch.in_network_reducer import SwitchPlan, join_switch, meet_ranks  # noqa: E402

from .training import free_port  # noqa: E402

pytestmark = pytest.mark.native

COUNTS = (1, 5, 100_003)


def abandon(comm: ringside.GroupCommunicator) -> None:
    """Leave it; the reducer hears of that at once, and not some seconds later."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communicators, "ABANDON_S", 0.1)
        comm.abort()


@contextlib.contextmanager
def switched(path: str, hosts: Sequence[int], **options: Any) -> Iterator[ringside.GroupCommunicator]:
    """A communicator with a reducer."""
    with process_group(path, len(hosts)):
        comm = ringside.communicator(machine=f"host {hosts[place().rank]}", switch=True, timeout=30.0, **options)
        yield comm
        abandon(comm)


def contribution(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) % 251 + rank


def reduced(path: str, hosts: Sequence[int]) -> Any:
    """Reduce at the switch, over ranks and over hosts; the last process is the reducer."""
    if place().rank == len(hosts):
        return reducer.serve(dist.FileStore(path, -1), timeout_s=30.0)
    found: list[Any] = []
    with switched(path, hosts, algorithm="in_network") as comm:
        own = contribution(place().rank, 100_003)
        for algorithm in ("in_network", "leaders/in_network"):
            for count in COUNTS:
                found.append(comm.all_reduce(own[:count].clone(), algorithm=algorithm))
        found.append(comm.all_reduce(own[:7].clone(), "max", algorithm="in_network"))
        found.append(comm.all_reduce(own[:7].clone(), "avg", algorithm="in_network"))
        found.append(comm.all_reduce(own[:7].clone(), "sum", scale=0.5, algorithm="in_network"))
        found.append(comm.all_reduce(own[:7].double(), algorithm="in_network"))
        found.append(comm.all_reduce(own[:7].clone(), "avg", weights=1.0 + place().rank, algorithm="in_network"))
        found.append(comm.all_reduce(torch.full((5,), 20000.0, dtype=torch.float16), "avg", algorithm="in_network"))
        found.append(comm.all_reduce(torch.full((5,), place().rank, dtype=torch.int32), algorithm="in_network"))
    return [x.numpy() for x in found]


def test_what_the_switch_adds_up_is_the_sum_whatever_the_kind() -> None:
    hosts = [0, 0, 1]
    with meeting_point() as path:
        *ranks, served = on_ranks(len(hosts) + 1, reduced, path, hosts)
    total = sum(contribution(rank, 100_003) for rank in range(3)).numpy()
    weighted = sum((1 + rank) * contribution(rank, 7) for rank in range(3)).numpy() / 6
    expected = [total[:count] for _ in range(2) for count in COUNTS]
    expected += [
        contribution(2, 7).numpy(),
        total[:7] / 3,
        total[:7] / 2,
        total[:7],
        weighted,
        np.full(5, 20000.0),
        np.full(5, 3),
    ]
    for found in ranks:
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    assert served >= len(expected)


def narrow(path: str, hosts: Sequence[int], wire: str) -> Any:
    if place().rank == len(hosts):
        return reducer.serve(dist.FileStore(path, -1), timeout_s=30.0)
    with switched(path, hosts, algorithm="in_network", wire_dtype=wire) as comm:
        return comm.all_reduce(torch.full((9,), 1.001)).tolist()


@pytest.mark.parametrize(("wire", "sum_of_two"), [("bfloat16", 2.0), ("float16", 2.001953125)])
def test_a_narrow_wire_is_narrow_at_the_switch_too(wire: str, sum_of_two: float) -> None:
    with meeting_point() as path:
        one, other, served = on_ranks(3, narrow, path, [0, 1], wire)
    assert one == other == [sum_of_two] * 9
    assert served == 1


def dies(path: str, hosts: Sequence[int]) -> Any:
    if place().rank == len(hosts):
        return reducer.serve(dist.FileStore(path, -1), timeout_s=30.0)
    with switched(path, hosts, algorithm="in_network") as comm:
        comm.all_reduce(torch.ones(4))  # everybody is connected to everybody
        if place().rank == 1:
            os._exit(7)
        return comm.all_reduce(torch.ones(4))


def test_a_rank_that_dies_ends_the_reducer_with_an_error() -> None:
    with meeting_point() as path:
        alive, died, served = outcomes_of(3, dies, path, [0, 1])
    assert died.exit_status == 7
    assert alive.error == "PeerLostError", alive.trace
    assert served.error == "LinkError"


def test_ranks_tell_the_reducer_who_they_are_and_only_once() -> None:
    root = dist.HashStore()
    store = dist.PrefixStore("b", dist.PrefixStore("a", root))
    offers = [RankInfo(f"machine {host}", f"node-{host}", {}, "", "") for host in (0, 0, 1)]
    for rank in (2, 1, 0):
        messages = join_switch(store, make_rank_map(rank, offers), 4096)
        messages.set(f"from {rank}", "hello")
    plan, messages = meet_ranks(root)
    assert plan == SwitchPlan(3, [0, 2], 4096)
    assert [messages.get(f"from {rank}") for rank in range(3)] == [b"hello"] * 3
    for rank in (0, 1):
        with pytest.raises(UsageError, match="serves one communicator"):
            join_switch(store, make_rank_map(rank, offers), 4096)


def a_whole_job(port: int) -> Any:
    """As `python -m ringside.pytorch.in_network_reducer` runs, beside two ranks over the job's own store."""
    os.environ["MASTER_PORT"] = str(port)
    rank = place().rank
    if rank == 2:
        return reducer.main(["--timeout", "30"])
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    comm = ringside.communicator(machine=f"host {rank}", switch=True, timeout=30.0, algorithm="in_network")
    found = comm.all_reduce(torch.ones(3)).tolist()
    dist.barrier()
    abandon(comm)
    return found


def test_the_program_serves_the_job_that_its_environment_names(capfd: pytest.CaptureFixture[str]) -> None:
    assert on_ranks(3, a_whole_job, free_port()) == [[2.0] * 3, [2.0] * 3, 0]


def test_without_a_job_the_program_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UsageError, match="MASTER_ADDR and MASTER_PORT"):
        reducer.main([])
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "none")
    with pytest.raises(UsageError, match="MASTER_ADDR and MASTER_PORT"):
        reducer.main([])


def test_a_job_that_never_comes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer, "TRY", datetime.timedelta(milliseconds=50))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(RuntimeError):
        reducer.main(["--timeout", "0.01"])
