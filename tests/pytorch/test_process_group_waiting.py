"""Asynchronous collectives of the process group: carried out by whoever waits, and all the same when nobody does.

Each on one host, where a small collective is told at the call, and between two, where it is not.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.support.ranks import Team, hear, on_ranks, place, say  # noqa: E402
from tests.support.waiting import until  # noqa: E402

from ringside.engine.runtime.queue import QueuedJob  # noqa: E402
from ringside.errors import ClosedError  # noqa: E402

from .groups import meeting_point  # noqa: E402
from .process_groups import LIMIT_S, backend, under  # noqa: E402
from .ways_to_wait import caught, interrupted, patient_in_group  # noqa: E402

pytestmark = pytest.mark.native

WHERE = pytest.mark.parametrize("hosts", [1, 2], ids=["one_host", "two_hosts"])
SMALL, LARGE = 3, 1 << 19  # elements: whoever waits carries it out; the thread begins it at once


def placed(hosts: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function on this rank, of two on one host or on one each."""
    os.environ["RINGSIDE_MACHINE"] = f"host {place().rank % hosts}"
    try:
        return function(*args)
    finally:
        del os.environ["RINGSIDE_MACHINE"]


def on_hosts(hosts: int, function: Callable[[int], Any]) -> list[Any]:
    with meeting_point() as path:
        results: list[Any] = on_ranks(2, placed, hosts, under, path, "ringside", function, limit_s=LIMIT_S)
        return results


def later(numel: int, group: Any = None) -> tuple[Any, torch.Tensor]:
    """Begin an all-reduce of ones; return what to wait for, and the tensor."""
    x = torch.ones(numel)
    return dist.all_reduce(x, group=group, async_op=True), x


# ------------------------------------------------------------------------------------------------ who waits


def small_gathers(rank: int) -> list[str]:
    """Gather few elements of each dtype, of which those of rank 1 are strided and so not told at the call."""
    wrong = []
    for dtype in (torch.int64, torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int32):
        for numel in (0, 1, SMALL, 200):
            rows = [torch.arange(2 * numel).add(1 + r).remainder(3).to(dtype)[::2] for r in (0, 1)]
            own = rows[rank] if rank == 1 else rows[rank].contiguous()
            outs = [torch.full((2 * numel,), 0, dtype=dtype) for _ in range(3)]
            works = [gather(out, own, async_op=True) for out in outs[:2]]
            gather(outs[2], own)  # after those, whoever waits
            for work in reversed(works):
                work.wait()
            if not all(torch.equal(out, torch.cat(rows)) for out in outs):
                wrong.append(f"{numel} of {dtype}: {outs}")
    own = torch.ones(SMALL)
    gather(torch.empty(2 * SMALL), own, async_op=True)  # nobody keeps work or output
    return wrong


def gather(out: torch.Tensor, x: torch.Tensor, async_op: bool = False) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its newer name is not there in all versions
        return dist.all_gather_into_tensor(out, x, async_op=async_op)


@WHERE
def test_small_gathers_some_told_at_the_call(hosts):
    assert on_hosts(hosts, small_gathers) == [[], []]


def gathers_of_different_sizes(rank: int) -> tuple[str, str]:
    error = caught(lambda: gather(torch.empty(2 * (SMALL + rank)), torch.ones(SMALL + rank)))
    dist.barrier()
    return error


def test_small_gathers_of_different_sizes_are_refused_on_both():
    calls = "; ".join(f"rank {r} called all_gather(float32, shape ({SMALL + r},))" for r in (0, 1))
    for kind, message in on_hosts(1, gathers_of_different_sizes):
        assert kind == "MismatchError"
        assert message.endswith(calls)


def mixed(rank: int) -> list[Any]:
    """Wait in several threads, out of order, for small and large ones, with collectives at once in between."""
    works = [later(numel) for numel in (SMALL, LARGE, SMALL, SMALL, LARGE, SMALL)]
    dist.all_reduce(at_once := torch.ones(SMALL))
    waited: list[Any] = []
    threads = [threading.Thread(target=lambda w=work: waited.append(w.wait())) for work, _ in reversed(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S / 3)
    assert all(work.is_completed() and work.is_success() for work, _ in works)
    return [*waited, at_once.sum().item(), *(bool((x == 2).all()) for _, x in works)]


@WHERE
def test_several_threads_wait(hosts):
    assert on_hosts(hosts, mixed) == [[*[True] * 6, 6.0, *[True] * 6]] * 2


def called_back(rank: int) -> list[float]:
    """Call and wait for more in callbacks: of what is waited for, and of what comes after it."""
    sums: list[float] = []
    for numel in (SMALL, LARGE):
        first, x = later(numel)
        second, y = later(numel)

        def more(future: Any, y: torch.Tensor = y, second: Any = second) -> float:
            second.wait()  # it was called after the one that calls back
            dist.all_reduce(z := future.value()[0].clone())
            work = dist.all_reduce(z, async_op=True)
            work.wait()
            return (z[0] + y[0]).item()

        called = first.get_future().then(more)
        first.wait()
        sums += [called.wait(), x[0].item()]
    return sums


@WHERE
def test_callbacks_call_and_wait_for_more(hosts):
    assert on_hosts(hosts, called_back) == [[10.0, 2.0, 10.0, 2.0]] * 2


def nobody_waits(rank: int) -> list[float]:
    """Have it done by a future's callback, by asking again and again, and by nothing at all."""
    sums = []
    for numel in (SMALL, LARGE):
        work, x = later(numel)
        told = threading.Event()
        work.get_future().then(lambda _, told=told: told.set())
        assert told.wait(LIMIT_S / 3)
        polled, y = later(numel)
        until(polled.is_completed)
        sums += [x[0].item(), y[0].item()]
    return sums


@WHERE
def test_what_nobody_waits_for_is_done(hosts):
    assert on_hosts(hosts, nobody_waits) == [[2.0] * 4] * 2


def goes_on_without_a_wait(path: str) -> float:
    """Rank 0 calls and turns to something else, until it hears that rank 1 is done."""
    with backend(path) as rank:
        dist.barrier()
        if rank == 1:
            dist.all_reduce(x := torch.ones(SMALL))
            dist.broadcast(x, 0)
            say("done")
            return x[0].item()
        work, x = later(SMALL)
        after = dist.broadcast(x, 0, async_op=True)
        hear()
        work.wait()
        after.wait()
        return x[0].item()


@WHERE
def test_others_do_not_have_to_wait_until_this_rank_waits(hosts):
    with meeting_point() as path, Team(2) as team:
        team.start(placed, hosts, goes_on_without_a_wait, path)
        assert team.hear(1) == "done"
        team.tell(0, "go")
        assert [outcome.value for outcome in team.finish()] == [2.0, 2.0]


def several_groups(rank: int) -> list[float]:
    """Begin and wait for collectives of several groups, in another order on each rank."""
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    sums = []
    for turn in range(10):
        order = groups if rank == turn % 2 else groups[::-1]
        works = [later(SMALL, group) for group in order]
        for work, x in works:
            work.wait()
            sums.append(x[0].item())
    return sums


@WHERE
def test_groups_are_begun_and_waited_for_in_any_order(hosts):
    assert on_hosts(hosts, several_groups) == [[2.0] * 30] * 2


# ------------------------------------------------------------------------------------------------ what goes wrong


@WHERE
def test_a_short_wait_costs_nothing(hosts):
    with meeting_point() as path, Team(2) as team:
        team.start(placed, hosts, patient_in_group, path)
        assert team.hear(0) == "ready"
        team.tell(1, "go")
        assert all(outcome.ok for outcome in team.finish())


def abort_when_begun(group: Any, begun: threading.Event) -> None:
    assert begun.wait(LIMIT_S / 3)
    group.abort()


def aborted_in_a_wait(rank: int) -> list[str]:
    """Abort groups from another thread, while this one carries out what rank 1 never calls."""
    heard, begun, carry = [], threading.Event(), QueuedJob.execute

    def noted(turn: QueuedJob) -> None:
        begun.set()
        carry(turn)

    pytest.MonkeyPatch().setattr(QueuedJob, "execute", noted)  # for as long as the process lives
    for numel in (SMALL, LARGE):
        group = dist.new_group([0, 1])
        if rank == 0:
            begun.clear()
            work, _ = later(numel, group)
            closer = threading.Thread(target=abort_when_begun, args=(group, begun))
            closer.start()
            heard.append(caught(work.wait)[0])
            closer.join(LIMIT_S / 3)
            assert caught(work.wait)[0] == heard[-1]
        dist.barrier()
    return heard


@WHERE
def test_an_abort_ends_a_wait(hosts):
    assert on_hosts(hosts, aborted_in_a_wait) == [["ClosedError", "ClosedError"], []]


def destroyed_with_work_pending(rank: int) -> list[float]:
    """Destroy groups with collectives that nobody has waited for: they are finished first."""
    sums = []
    for numel in (SMALL, LARGE):
        group = dist.new_group([0, 1])
        pending = [later(numel, group) for _ in range(3)]
        dist.destroy_process_group(group)
        assert all(work.wait() for work, _ in pending)
        sums += [x[0].item() for _, x in pending]
        with pytest.raises(ClosedError):
            group.allreduce([torch.ones(SMALL)])
    return sums


@WHERE
def test_what_is_pending_is_finished_when_the_group_is_destroyed(hosts):
    assert on_hosts(hosts, destroyed_with_work_pending) == [[2.0] * 6] * 2


def forked_with_work_pending(rank: int) -> float:
    """Fork while a collective is lined up: the child may neither wait for it nor carry it out."""
    group = dist.new_group([0, 1])
    if rank == 1:
        dist.barrier()  # nothing of the group before the child has ended
    work, x = later(SMALL, group)
    if rank == 0:
        child = os.fork()
        if child == 0:
            ways = (work.wait, work.get_future, lambda: later(SMALL, group))
            fine = [caught(way)[0] == "ClosedError" for way in ways]
            os._exit(0 if all(fine) and not work.is_completed() else 1)
        assert os.waitpid(child, 0)[1] == 0
        dist.barrier()
    work.wait()
    return x[0].item()


@WHERE
def test_a_forked_child_does_not_carry_out_what_is_its_parents(hosts):
    assert on_hosts(hosts, forked_with_work_pending) == [2.0, 2.0]


def test_ctrl_c_ends_a_wait_for_another_host():
    with meeting_point() as path, Team(2) as team:
        team.start(placed, 2, interrupted, path)
        for _ in range(4):
            assert team.hear(0) == "ready"
            team.kill(0, signal.SIGINT)
        first = team.finish_one(0)
        team.tell(1, "go")
        team.finish_one(1)
    assert first.value == "went on", first
