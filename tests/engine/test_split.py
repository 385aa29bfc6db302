"""Sub-groups: who is in them, that they work side by side, and what happens when somebody dies."""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import numpy as np
import pytest
from tests.support.collective_log import drain
from tests.support.ranks import Team, communicator, on_ranks, say

from ringside.engine.request import KINDS
from ringside.engine.shm.communicator import HostCommunicator
from ringside.errors import ClosedError, PeerLostError, UsageError

pytestmark = pytest.mark.native


def groups() -> list[tuple[int, ...]]:
    seen = []
    with communicator() as comm:
        n, rank = comm.size, comm.rank
        for color, key, want in (
            (rank % 2, None, tuple(range(rank % 2, n, 2))),
            (0, -rank, tuple(range(n - 1, -1, -1))),
            (-(1 << 63), 5, tuple(range(n))),
            (rank, None, (rank,)),
            (None if rank == 0 else 7, rank // 2, tuple(range(1, n))),
            (True if rank == 1 else rank > 0, None, (0,) if rank == 0 else tuple(range(1, n))),
        ):
            group = comm.split(color, key)
            if color is None:
                assert group is None
                continue
            assert group is not None
            with group:
                assert (group.size, group.members) == (len(want), want)
                assert group.members[group.rank] == rank
                for count in (3, 30_000):
                    x = np.full(count, rank, np.int64)
                    assert (group.all_reduce(x) == sum(want)).all()
                memory = group.empty(9000, np.int32)
                memory[:] = rank
                group.broadcast(memory, group.size - 1)
                assert (memory == want[-1]).all()
                assert group.all_gather(np.int64(rank)[None]).tolist() == list(want)
                seen.append(group.members)
        x = np.ones(3)
        comm.all_reduce(x)
        assert (x == n).all()
        assert {KINDS[call.kind] for call in drain(comm.log.core)} == {"split", "all_reduce"}
    return seen


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_groups_by_color_ordered_by_key(size: int) -> None:
    on_ranks(size, groups)


def side_by_side() -> None:
    """Groups do different numbers of different things at the same time, beside their parent and inside each other."""
    with communicator() as comm:
        half = comm.split(comm.rank // 2)
        across = comm.split(comm.rank % 2)
        assert half is not None
        assert across is not None
        with half, across:
            own = random.Random(comm.rank // 2)
            for i in range(own.randrange(30, 60)):
                count = own.choice([1, 100, 20_000])
                x = np.full(count, comm.rank + i, np.int64)
                work = half.all_reduce(x, async_op=True)
                work.wait()
                assert (x == sum(half.members) + len(half.members) * i).all()
            works = [across.all_reduce(np.full(5000, comm.rank), async_op=True) for _ in range(5)]
            y = np.full(5000, comm.rank)
            comm.all_reduce(y)
            assert (y == sum(range(comm.size))).all()
            for work in works:
                assert (work.result() == sum(across.members)).all()
            single = half.split(half.rank)
            assert single is not None
            with single:
                assert (single.size, single.members) == (1, (half.rank,))
                assert single.all_reduce(np.ones(2)).tolist() == [1, 1]
            # A mean over all, by the means of rows and columns: both halves have equally many ranks.
            z = np.array([float(comm.rank)])
            across.all_reduce(half.all_reduce(z, "avg"), "avg")
            assert z[0] == (comm.size - 1) / 2


@pytest.mark.parametrize("size", [4, 8])
def test_disjoint_groups_work_at_the_same_time(size: int) -> None:
    on_ranks(size, side_by_side)


def refusals() -> None:
    with communicator() as comm:
        for color, key in ((1.5, None), ("red", None), (1 << 63, None), (0, "first"), (0, 1 << 64)):
            with pytest.raises(UsageError, match="must be an integer of 64 bits or None"):
                comm.split(color, key)
        group = comm.split(np.int32(3), np.int64(0))
        assert group is not None
        group.close()
        with pytest.raises(ClosedError):
            group.all_reduce(np.ones(3))
        comm.barrier()
    with pytest.raises(ClosedError):
        comm.split(0)


@pytest.mark.parametrize("size", [1, 2])
def test_what_cannot_be_is_refused(size: int) -> None:
    on_ranks(size, refusals)


def descriptors() -> tuple[int, int]:
    with communicator() as comm:
        comm.split(0).close()
        before = len(os.listdir("/proc/self/fd"))
        for color in (0, comm.rank, comm.rank % 2):
            comm.split(color).close()
        return before, len(os.listdir("/proc/self/fd"))


def test_groups_give_back_every_descriptor() -> None:
    for before, after in on_ranks(3, descriptors):
        assert before == after


def forever(group: Any, x: np.ndarray) -> None:
    while True:
        group.all_reduce(x, "max")


def member_dies() -> str:
    with communicator() as comm:
        group = comm.split(comm.rank % 2)
        assert group is not None
        group.barrier()
        say("ready")
        x = np.ones(20_000)
        if comm.rank % 2 == 0:
            for _ in range(200):  # the other group is not touched by it
                group.all_reduce(x, "max")
            group.close()
            return ""
        with pytest.raises(PeerLostError) as caught:
            forever(group, x)
        assert caught.value.ranks == (1,)
        group.close()
        return str(caught.value)


def test_a_death_is_told_in_the_ranks_of_the_group() -> None:
    with Team(4) as team:
        team.start(member_dies)
        team.await_word()
        team.kill(3)
        outcomes = team.finish()
    assert outcomes[3].exit_status == -signal.SIGKILL
    assert outcomes[0].ok, outcomes[0]
    assert outcomes[2].ok, outcomes[2]
    assert "on rank 0 of a sub-group (of ranks 1 and 3): Connection closed by peer: rank 1 died" in outcomes[1].value


def test_errors_of_a_sub_group_say_whose_ranks_they_count() -> None:
    for members, words in ((None, "on rank 0: the"), ((3,), r"on rank 0 of a sub-group \(of rank 3\): the")):
        group = HostCommunicator("test of words", 0, 1, members=members)
        group.close()
        with pytest.raises(ClosedError, match=words):
            group.all_reduce(np.ones(3))
