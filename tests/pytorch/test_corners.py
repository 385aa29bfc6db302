"""Corners of the communicator between hosts: what must not depend on how an all-reduce happens to be carried out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import ringside  # noqa: E402
from ringside.pytorch.store import group_store  # noqa: E402

from .training import ddp_outcomes, ddp_ranks, group  # noqa: E402

pytestmark = pytest.mark.native

WAYS = ("ring", "recursive_doubling", "direct", "hosts/ring", "leaders/tree*2", "hosts/direct", "native")


def on_hosts(port: int, machines: str, job: Callable[..., Any], *args: Any) -> Any:
    with group(port) as rank, ringside.communicator(machine=machines[rank], timeout=20.0) as comm:
        return job(comm, *args)


def averages(comm: ringside.GroupCommunicator) -> dict[str, list[float]]:
    """Average halves whose sum is beyond their range, plainly and with weights."""
    found = {}
    for way in WAYS:
        plain = comm.all_reduce(torch.full((3,), 20000.0, dtype=torch.float16), "avg", algorithm=way)
        weighted = torch.full((3,), 200.0 + comm.rank, dtype=torch.float16)
        comm.all_reduce(weighted, "avg", weights=512.0, algorithm=way)
        found[way] = [plain[0].item(), weighted[0].item()]
    return found


def test_an_average_of_halves_does_not_overflow_on_its_way() -> None:
    for found in ddp_ranks(4, on_hosts, "aabb", averages):
        for way, (plain, weighted) in found.items():
            assert plain == pytest.approx(20000, rel=2e-3), way
            assert weighted == pytest.approx(201.5, rel=2e-3), way


def weighted_halves(port: int, machines: str, dtype: str) -> bytes:
    with group(port) as rank:
        how = {"machine": machines[rank], "reproducible": True, "timeout": 20.0}
        with ringside.communicator(**how) as comm:
            x = torch.tensor(np.random.default_rng(rank).standard_normal(4096)).to(getattr(torch, dtype))
            comm.all_reduce(x, "avg", weights=1.0 + rank)
            return x.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_weighted_mean_is_reproducible_too(dtype: str) -> None:
    results = {
        placement: set(ddp_ranks(4, weighted_halves, placement, dtype)) for placement in ("aaaa", "aabb", "abcd")
    }
    assert len(set.union(*results.values())) == 1, {name: len(found) for name, found in results.items()}


def disagreeing(comm: ringside.GroupCommunicator, what: str) -> None:
    if what == "bounds":
        comm.all_gather_(torch.zeros(8), [0, 4, 8] if comm.rank == 0 else [0, 6, 8])
    elif what == "scale":
        comm.all_reduce(torch.ones(8), scale=0.25 if comm.rank == 0 else 0.5, algorithm="hosts/ring")
    elif what == "weights":
        comm.all_reduce(torch.ones(8), "avg", weights=[1.0, 3.0] if comm.rank == 0 else [5.0, 1.0])


@pytest.mark.parametrize("what", ["bounds", "scale", "weights"])
def test_ranks_that_give_different_numbers_are_told(what: str) -> None:
    for outcome in ddp_outcomes(2, on_hosts, "ab", disagreeing, what):
        assert outcome.error == "MismatchError", outcome


def no_switch(comm: ringside.GroupCommunicator) -> float:
    with pytest.raises(ringside.UsageError, match="switch=True"):
        comm.all_reduce(torch.ones(4), algorithm="in_network")
    x = torch.ones(4)
    comm.all_reduce(x, algorithm="ring")
    return x[0].item()


def test_in_network_without_a_reducer_is_refused_before_anything_is_sent() -> None:
    assert ddp_ranks(2, on_hosts, "ab", no_switch) == [2.0, 2.0]


def empty_beside(comm: ringside.GroupCommunicator) -> list[float]:
    x = torch.ones(3 << 20)
    work = comm.all_reduce(x, async_op=True, algorithm="hosts/ring")
    memory = comm.empty(10, torch.float32)
    work.wait()
    return [x[0].item(), memory.sum().item()]


def test_symmetric_memory_is_made_in_its_turn() -> None:
    assert ddp_ranks(4, on_hosts, "aabb", empty_beside) == [[4.0, 0.0]] * 4


def bad_option(port: int) -> None:
    with group(port) as rank:
        if rank == 1:
            os.environ["RINGSIDE_ALGORITHM"] = "rign"
        try:
            ringside.communicator(machine=str(rank), timeout=20.0)
        finally:
            os.environ.pop("RINGSIDE_ALGORITHM", None)


def test_one_rank_with_an_impossible_option_is_an_error_of_all() -> None:
    for outcome in ddp_outcomes(2, bad_option):
        assert outcome.error == "UsageError"
        assert "there is no algorithm 'rign'" in outcome.message


def absent(port: int) -> float:
    with group(port) as rank:
        dist.barrier()  # all connections stand: whoever leaves now leaves a group that is made
        began = time.monotonic()
        if rank == 0:
            with pytest.raises(ringside.DeadlineError, match="rank 1 did not make the communicator"):
                ringside.communicator(machine=str(rank), timeout=0.5)
        else:
            group_store(dist.group.WORLD, "communicator")  # this process goes on to other tests, in step with rank 0
        return time.monotonic() - began


def test_a_rank_that_does_not_make_the_communicator_is_named() -> None:
    ddp_ranks(2, absent)


def forked(comm: ringside.GroupCommunicator) -> int:
    child = os.fork()
    if child == 0:
        try:
            comm.barrier()
        except ringside.ClosedError:
            os._exit(7)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    comm.barrier()
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_has_no_communicator() -> None:
    assert ddp_ranks(2, on_hosts, "ab", forked) == [7, 7]


def moved(port: int, machines: str) -> list[float]:
    """The same calls on one host and on two."""
    with group(port) as rank:
        found = []
        with ringside.communicator(machine=machines[rank], algorithm="hosts/ring", timeout=20.0) as comm:
            for way in (None, "ring", "hosts/ring", "leaders/tree*3", "direct", "one_shot", "ring@1,0"):
                found.append(comm.all_reduce(torch.full((1000,), rank + 1.0), algorithm=way)[999].item())
        return found


@pytest.mark.parametrize("machines", ["aa", "ab"])
def test_a_script_runs_the_same_on_one_host_and_on_several(machines: str) -> None:
    assert ddp_ranks(2, moved, machines) == [[3.0] * 7] * 2
