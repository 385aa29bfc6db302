"""A rank that is stopped in a collective and goes on after the others have given it up.

`tests/native` stops one at every point of every path; here real processes are stopped by the kernel.
"""

from __future__ import annotations

import itertools
import random
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import Team, communicator, hear, on_ranks, say

from ringside.errors import ClosedError, DeadlineError, RingsideError

pytestmark = pytest.mark.native


def reduces(way: str, elements: int) -> tuple[str, bool]:
    """All-reduce; whoever fails writes into its tensor. Return what came of it, and whether all still stands there."""
    comm = communicator(timeout_s=0.6)
    x = comm.empty(elements, np.float16)
    x[:] = 1
    comm.barrier()
    say("ready")
    try:
        if way == "reduce_scatter":
            comm.reduce_scatter(x)
        else:
            comm.all_reduce(x, algorithm=way)
    except RingsideError as error:
        came = type(error).__name__
        comm.close()
        x[:] = 7
    else:
        came, comm = "", comm
    say("over")
    hear()
    return came, came == "" or bool((x == 7).all())


@pytest.mark.core
@pytest.mark.parametrize("way", ["direct", "ring", "reduce_scatter"])
def test_all_finish_or_all_raise_and_nobody_writes_into_what_is_somebody_elses_again(way: str) -> None:
    rng, given_up, attempts = random.Random(way), 0, 0
    while given_up == 0 and attempts < 40:
        attempts += 1
        with Team(2) as team:
            team.start(reduces, way, 24 << 20)
            team.await_word()
            time.sleep(rng.random() * 0.02)  # a random moment, not a condition
            team.kill(1, signal.SIGSTOP)
            try:
                assert team.hear(0) == "over"
            finally:
                team.kill(1, signal.SIGCONT)
            assert team.hear(1) == "over"
            for rank in (0, 1):
                team.tell(rank, "look")
            outcomes = team.finish()
            assert all(outcome.ok for outcome in outcomes), outcomes
            (first, first_own), (second, second_own) = (outcome.value for outcome in outcomes)
            assert bool(first) == bool(second), (first, second)
            assert first_own
            assert second_own
            given_up += bool(first)
    assert given_up, "no moment was within the collective"


def interrupted() -> tuple[str, list[float]]:
    """Rank 0's signal handler dawdles, and rank 1 comes meanwhile."""
    comm = communicator()
    x = np.ones(4, np.float32)
    comm.barrier()
    if comm.rank == 0:

        def handler(*_: object) -> None:
            say("ready")
            hear()
            raise KeyboardInterrupt

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    else:
        say("ready")
        hear()
    came = ""
    try:
        comm.all_reduce(x)
    except (KeyboardInterrupt, RingsideError) as error:
        came = type(error).__name__
    if comm.rank == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
    sums = list(map(float, x))
    if sums[0] == 2:
        comm.all_reduce(x)  # the interrupt came too late to end the collective: all goes on
        sums = list(map(float, x))
    comm.close()
    return came, sums


def test_an_interrupt_while_the_others_come_ends_the_collective_for_all_or_for_nobody() -> None:
    with Team(2) as team:
        team.start(interrupted)
        team.await_word()
        team.tell(1, "go")
        time.sleep(0.1)  # it arrives; should it be later, both give up
        team.tell(0, "go")
        first, second = (outcome.value for outcome in team.finish())
    assert first[0] == "KeyboardInterrupt"
    assert first[1] == second[1]
    assert (second[0] == "") == (second[1][0] == 4.0)


def shared_again() -> list[float]:
    """A bucket that a failed communicator made private is not shared by the next one."""
    import torch

    from ringside.engine.buffers import flatten
    from ringside.pytorch.shared_storage import empty_shared, storage_of

    x = empty_shared(50_000, torch.float32).fill_(1.0)
    storage = storage_of(x)
    assert storage is not None
    sums = []
    for name, timeout_s in (("first", 20.0), ("second", 0.5), ("third", 20.0)):
        comm = communicator(name, timeout_s=timeout_s)
        comm.all_reduce_storage(flatten(x), storage, scale=1.0, stamp_ns=0)
        sums.append(float(x.sum()))
        if name == "second":
            if comm.rank == 0:
                with pytest.raises(DeadlineError):
                    comm.all_reduce_storage(flatten(x), storage, scale=1.0, stamp_ns=0)
                say("ready")
                hear()
            else:
                hear()
                with pytest.raises((DeadlineError, ClosedError)):
                    comm.all_reduce_storage(flatten(x), storage, scale=1.0, stamp_ns=0)
            x.fill_(1.0)
        comm.close()
    return sums


def test_memory_that_was_made_private_is_not_taken_for_shared_again() -> None:
    with Team(2) as team:
        team.start(shared_again)
        assert team.hear(0) == "ready"
        for rank in (0, 1):
            team.tell(rank, "go")
        outcomes = team.finish()
    for outcome in outcomes:
        assert outcome.value == [100_000.0, 200_000.0, 100_000.0], outcome


def one_fails_beside_another() -> tuple[str, str, list[float]]:
    """Two communicators reduce a half each of the same memory; one fails while the other waits for rank 1."""
    import torch

    from ringside.engine.buffers import flatten
    from ringside.pytorch.shared_storage import empty_shared, storage_of

    x = empty_shared(100_000, torch.float32).fill_(1.0)
    mine, beside = x[:50_000], x[50_000:]
    storage = storage_of(x)
    assert storage is not None
    failing, other = communicator("failing", timeout_s=0.3), communicator("other")
    for comm, half in ((failing, mine), (other, beside)):
        comm.all_reduce_storage(flatten(half), storage, scale=1.0, stamp_ns=0)
    came: dict[str, str] = {}

    def reduce(name: str, comm: Any, half: Any) -> None:
        try:
            comm.all_reduce_storage(flatten(half), storage, scale=1.0, stamp_ns=0)
            came[name] = ""
        except RingsideError as error:
            came[name] = type(error).__name__

    if comm.rank == 0:
        thread = threading.Thread(target=reduce, args=("other", other, beside))
        thread.start()
        while other.absent() != [1]:
            time.sleep(0.001)
        reduce("failing", failing, mine)
        say("failed")
        hear()
        thread.join()
    else:
        hear()
        reduce("other", other, beside)
        reduce("failing", failing, mine)
    sums = [float(beside.min()), float(beside.max())]
    for comm in (failing, other):
        comm.close()
    return came["failing"], came["other"], sums


def test_a_collective_whose_memory_another_communicator_makes_private_does_not_lose_what_peers_write() -> None:
    with Team(2) as team:
        team.start(one_fails_beside_another)
        assert team.hear(0) == "failed"
        for rank in (0, 1):
            team.tell(rank, "go")
        outcomes = team.finish()
    assert all(outcome.ok for outcome in outcomes), outcomes
    first, second = (outcome.value for outcome in outcomes)
    assert first[0] == "DeadlineError"
    assert bool(first[1]) == bool(second[1]), (first, second)
    assert first[1] or (first[2] == second[2] == [4.0, 4.0]), (first, second)


def descriptors() -> list[int]:
    """Return how many descriptors are open with each of some groups more."""
    import os

    with communicator("first") as comm:
        found = [len(os.listdir("/proc/self/fd"))]
        groups = []
        for _ in range(4):
            groups.append(comm.split(0))
            found.append(len(os.listdir("/proc/self/fd")))
        for group in groups:
            assert group is not None
            group.close()
    return found


def test_processes_are_watched_once_however_many_groups_there_are() -> None:
    for rank, found in enumerate(on_ranks(4, descriptors)):
        # A connection to each other rank, or to rank 0.
        assert {after - before for before, after in itertools.pairwise(found)} == {3 if rank == 0 else 1}, found
