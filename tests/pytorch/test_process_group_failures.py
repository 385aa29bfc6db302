"""Every way a Work or a Future of the process group can fail is a Python exception with rank and collective."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from tests.support.ranks import Team, hear, on_ranks, place, run_script, say  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import ringside  # noqa: E402
from ringside.errors import ClosedError, MismatchError  # noqa: E402

from .groups import meeting_point  # noqa: E402
from .process_groups import backend, on_ours  # noqa: E402
from .training import Said  # noqa: E402
from .ways_to_wait import INTERRUPTED, WAYS, at_once, caught, interrupted, later, patient_in_group  # noqa: E402

pytestmark = pytest.mark.native


def left_alone(path: str, name: str, gone: Callable[[], None]) -> tuple[str, str]:
    """Join the group; rank 1 goes, rank 0 tells what it hears of it."""
    with backend(path):
        dist.barrier()
        if place().rank == 1:
            gone()
            return "", ""
        return caught(WAYS[name])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    """Leave the group by the door (what `backend` does)."""


@pytest.mark.parametrize("name", ["functionally", "ddp", "fsdp"])
def test_a_rank_that_dies_is_an_exception_wherever_the_others_wait_in_cpp(name):
    with meeting_point() as path, Team(2) as team:
        team.start(left_alone, path, name, die)
        first, second = team.finish()
    assert second.exit_status == -signal.SIGKILL
    kind, text = first.value
    assert kind == "PeerLostError", text
    assert "rank 1 died or left" in text


def every_way_left_alone(rank: int) -> dict[str, tuple[str, str]]:
    """Lose the peer of one group after the other, in every way to wait."""
    heard = {}
    for name, way in WAYS.items():
        group = dist.new_group([0, 1])
        if rank == 1:
            dist.destroy_process_group(group)
            continue
        world, dist.group.WORLD = dist.group.WORLD, group
        try:
            heard[name] = caught(way)
        finally:
            dist.group.WORLD = world
            dist.destroy_process_group(group)
    return heard


def test_a_rank_that_left_is_an_exception_in_every_way_to_wait():
    heard = on_ours(2, every_way_left_alone)[0]
    assert set(heard) == set(WAYS)
    for name, (_, text) in heard.items():
        assert "rank 1 died or left" in text, name
        assert "on rank 0" in text, name


# ------------------------------------------------------------------------------------------------ other reasons


def different_things(rank: int) -> list[str]:
    """Call different things at once and in the background; the group goes on afterwards."""
    wrong = torch.ones(3 + rank)
    with pytest.raises(MismatchError) as at_the_call:
        dist.all_reduce(wrong)
    work = dist.all_reduce(wrong, async_op=True)
    with pytest.raises(MismatchError) as at_the_wait:
        work.wait()
    assert (work.exception(), work.is_completed(), work.is_success()) == (at_the_wait.value, True, False)
    with pytest.raises(RuntimeError, match="rank 1 called"):
        work.get_future().wait()
    dist.all_reduce(x := torch.ones(1))
    assert x.item() == 2
    return [str(at_the_call.value), str(at_the_wait.value)]


def test_different_calls_are_named_and_the_group_goes_on():
    for said in on_ours(2, different_things):
        assert all("rank 0 called all_reduce(sum, float32, shape (3,)" in text for text in said)


def another_version(path: str, of: str) -> tuple[str, list[str], list[float]]:
    """Rank 1 has another version; return the error, if there is one, what is said, and what an all-reduce gave."""
    others = mock.patch(of, "9.9") if place().rank == 1 else contextlib.nullcontext()
    x = torch.ones(2)
    try:
        with Said() as said, others, backend(path):
            dist.all_reduce(x)
    except MismatchError as error:
        return str(error), said.lines, x.tolist()
    return "", said.lines, x.tolist()


def test_a_rank_with_another_version_of_ringside_is_named_and_refused():
    with meeting_point() as path:
        outcomes = on_ranks(2, another_version, path, "ringside.pytorch.communicator.options.__version__")
    for error, _, x in outcomes:
        assert error.startswith("rank 1 on host ")
        assert f"version of ringside = 9.9 (rank 0: {ringside.__version__})" in error
        assert x == [1.0, 1.0]


def test_a_rank_with_another_torch_is_named():
    with meeting_point() as path:
        first, second = on_ranks(2, another_version, path, "torch.__version__")
    assert first == ("", [f"rank 1 has torch 9.9, where rank 0 has {torch.__version__}: give all the same"], [2.0, 2.0])
    assert second == ("", [], [2.0, 2.0])


def callbacks(rank: int) -> list[Any]:
    """Chain callbacks to futures that succeed: one raises, one returns no tensor, one waits for more."""
    said: list[Any] = []

    def breaks(future: Any) -> None:
        raise KeyError("of the callback")

    with pytest.raises(RuntimeError, match="of the callback"):
        dist.all_reduce(torch.ones(3), async_op=True).get_future().then(breaks).wait()
    said.append(dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda future: None).wait())

    def waits(future: Any) -> float:  # as PowerSGD does
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0][0].item()

    said.append(dist.all_reduce(torch.ones(3), async_op=True).get_future().then(waits).wait())
    return said


def test_callbacks_may_raise_return_anything_and_wait_for_more():
    assert on_ours(2, callbacks) == [[None, 4.0], [None, 4.0]]


def called_back_where_it_is_waited_for(rank: int) -> list[float]:
    """Wait for works whose futures have callbacks that call more collectives, on this thread or the group's."""
    sums = []
    for numel in (3, 1 << 16):
        for _ in range(10):
            work = dist.all_reduce(torch.ones(numel), async_op=True)
            more = work.get_future().then(lambda future: dist.all_reduce(x := future.value()[0]) or x)
            work.wait()
            sums.append(more.wait()[0].item())
    return sums


def test_a_callback_may_call_more_while_the_work_is_waited_for():
    assert on_ours(2, called_back_where_it_is_waited_for) == [[4.0] * 20] * 2


def broken_hooks(rank: int) -> list[str]:
    """Train with a hook that raises in a callback, and with one that raises at once."""

    def broken(future: Any) -> torch.Tensor:
        raise RuntimeError("of the hook")

    def late(state, bucket):
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(broken)

    def early(state, bucket):
        return broken(dist.all_reduce(bucket.buffer(), async_op=True).get_future())

    heard = []
    for hook in (late, early):
        model = DistributedDataParallel(nn.Linear(4, 4))
        model.register_comm_hook(None, hook)
        heard.append(caught(lambda model=model: model(torch.ones(2, 4)).sum().backward())[1])
    return heard


def test_a_hook_that_raises_is_an_exception_of_backward():
    for said in on_ours(2, broken_hooks):
        assert all("of the hook" in text for text in said)


def too_late(path: str) -> tuple[str, str]:
    """Wait for rank 1, which stays away until it is told to go."""
    with backend(path, timeout_s=1.0) as rank:
        if rank == 1:
            hear()
            return "", ""
        heard = caught(later)
        say("ready")
        return heard


def test_who_is_late_is_named_and_a_short_wait_costs_nothing():
    with meeting_point() as path, Team(2) as team:
        team.start(patient_in_group, path)
        assert team.hear(0) == "ready"
        team.tell(1, "go")
        assert all(outcome.ok for outcome in team.finish())
        team.start(too_late, path)
        assert team.hear(0) == "ready"
        team.tell(1, "go")
        first, _ = team.finish()
    assert first.value[0] == "DeadlineError"
    assert "Timed out waiting 1000ms: rank 1 did not arrive" in first.value[1]


def missing_from_a_barrier(rank: int) -> tuple[str, str]:
    """Have rank 1 miss a monitored barrier of one group; others go on."""
    group, heard = dist.new_group([0, 1]), ("", "")
    if rank == 0:
        heard = caught(lambda: dist.monitored_barrier(group, datetime.timedelta(milliseconds=100)))
    dist.barrier()
    dist.all_reduce(x := torch.ones(1), group=group)
    assert x.item() == 2
    return heard


def test_who_misses_a_monitored_barrier_is_named():
    (kind, text), _ = on_ours(2, missing_from_a_barrier)
    assert kind == "RuntimeError"
    assert "1" in text.partition("ailed to pass monitoredBarrier")[0], text


def test_ctrl_c_ends_a_wait():
    with meeting_point() as path, Team(2) as team:
        team.start(interrupted, path)
        for _ in INTERRUPTED:
            assert team.hear(0) == "ready"
            team.kill(0, signal.SIGINT)
        first = team.finish_one(0)
        team.tell(1, "go")
        team.finish_one(1)
    assert first.value == "went on", first


def aborted_under_way(rank: int) -> list[str]:
    """Abort a group whose collectives rank 1 never calls: one that was posted, and one on the group's thread."""
    heard = []
    for numel in (3, 1 << 18):
        group = dist.new_group([0, 1])
        if rank == 0:
            work = dist.all_reduce(torch.ones(numel), group=group, async_op=True)
            group.abort()
            heard.append(caught(work.wait)[0])
        dist.barrier()
    return heard


def test_what_is_under_way_when_a_group_is_aborted_is_an_exception():
    assert on_ours(2, aborted_under_way) == [["ClosedError", "ClosedError"], []]


def abort_and_again(path: str) -> int:
    """Abort from another thread; then make, use and destroy groups in turn; then fork."""
    for turn in range(3):
        with backend(path) as rank:
            if turn == 0 and rank == 0:
                group = dist.new_group([0])
                closer = threading.Thread(target=group.abort)
                closer.start()
                closer.join()
                with pytest.raises(ClosedError, match="rank 0"):
                    dist.all_reduce(torch.ones(2), group=group)
            elif turn == 0:
                dist.new_group([0])
            x = torch.ones(4)
            dist.all_reduce(x)
            child = os.fork()
            if child == 0:  # no use of the parent's group, and no harm to it
                os._exit(0 if caught(at_once)[0] == "ClosedError" and caught(later)[0] == "ClosedError" else 1)
            assert os.waitpid(child, 0)[1] == 0
            dist.all_reduce(x)
            assert x[0].item() == 4
    return 1


def test_groups_are_aborted_made_again_and_not_a_forked_childs():
    with meeting_point() as path, Team(2) as team:
        assert team.run(abort_and_again, path) == [1, 1]


def test_a_script_may_end_without_a_word():
    with meeting_point() as path:
        for ended in run_script(2, Path(__file__).parent / "scripts" / "ends_without_a_word.py", path):
            assert (ended.status, ended.out) == (0, "end of script\n"), ended.err
            assert "Traceback" not in ended.err
