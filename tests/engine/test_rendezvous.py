"""How ranks find each other, what they are told where they cannot, and memory that one of them cannot give."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import Team, communicator, hear, on_ranks, outcomes_of, place, say

from ringside.engine import HostCommunicator, Settings, init
from ringside.engine.shm.meeting_place import address_of
from ringside.errors import DeadlineError, MismatchError, RingsideError, SyncError, UnsupportedError, UsageError

from .exchanges import before_its_exchange

pytestmark = pytest.mark.native

FAR_S = 600.0  # a deadline that no test lives to see


# ------------------------------------------------------------------------------- the environment


@pytest.mark.parametrize(
    ("environ", "error", "words"),
    [
        ({"RANK": "0"}, UsageError, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, UsageError, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, UsageError, "rank 2 is not in 0 to 1"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, UsageError, "rank -1"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, UsageError, "RANK='one'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, UsageError, "0 ranks"),
        ({"RANK": "0", "WORLD_SIZE": "257"}, UsageError, "1 to 256"),
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, UnsupportedError, "one host"),
        ({"RINGSIDE_TIMEOUT_S": "soon"}, UsageError, "RINGSIDE_TIMEOUT_S"),
        ({"RINGSIDE_TIMEOUT_S": "-1"}, UsageError, "impossible"),
        ({"RINGSIDE_TIMEOUT_S": "inf"}, UsageError, "impossible"),
        ({"RINGSIDE_TIMEOUT_S": "nan"}, UsageError, "impossible"),
    ],
)
def test_what_the_environment_cannot_mean_is_refused(environ: dict[str, str], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        init(environ=environ)


def test_without_a_launcher_it_is_a_world_of_one() -> None:
    with init(environ={}) as comm:
        x = comm.empty(10)
        x += 3
        comm.all_reduce(x, "avg", scale=2.0)
        comm.barrier()
        assert (comm.rank, comm.size, x.tolist()) == (0, 1, [6.0] * 10)
    assert "closed" in repr(comm)


def by_init() -> tuple[int, int]:
    with init(timeout=20) as comm, init() as other:
        x = np.ones(3)
        comm.all_reduce(x)
        other.all_reduce(x)
        return int(x[0]), int(comm.settings.timeout_s)


def test_init_reads_what_torchrun_sets() -> None:
    assert on_ranks(3, by_init) == [(9, 20)] * 3


# ------------------------------------------------------------------------------- ranks that do not fit


def missing(absent: int) -> str:
    if place().rank == absent:
        return ""
    with pytest.raises(DeadlineError) as caught:
        communicator(timeout_s=1.0)
    assert caught.value.ranks == (absent,)
    return str(caught.value)


@pytest.mark.parametrize("absent", [0, 1, 2])
def test_a_missing_rank_is_named_on_every_rank(absent: int) -> None:
    told = on_ranks(3, missing, absent)
    assert all(f"rank {absent} did not come" in text for rank, text in enumerate(told) if rank != absent)


def open_as(rank: list[int], size: list[int], segments: list[int], timeout_s: float = 2.0) -> None:
    me = place().rank
    HostCommunicator(place().job, rank[me], size[me], Settings(timeout_s=timeout_s, segment_bytes=segments[me])).close()


@pytest.mark.parametrize(
    ("ranks", "sizes", "segments", "words"),
    [
        ([0, 1, 2], [3, 3, 3], [4096, 8192, 4096], "rank 1 has other RINGSIDE_"),
        ([0, 1, 2], [3, 3, 4], [4096] * 3, "rank 2 thinks there are 4 ranks, rank 0 thinks 3"),
        ([0, 1, 1], [3, 3, 3], [4096] * 3, "two processes claim to be rank 1"),
    ],
)
def test_ranks_that_do_not_fit_are_refused_and_named(ranks: Any, sizes: Any, segments: Any, words: str) -> None:
    for outcome in outcomes_of(3, open_as, ranks, sizes, segments):
        assert outcome.error == "MismatchError", outcome
        assert words in outcome.message
        assert outcome.ranks == (int(words.split("rank ")[1][0]),)


def test_two_rank_0_with_one_key() -> None:
    """As two jobs on one MASTER_PORT: the second is told, the first goes on with whoever belongs to it."""
    outcomes = outcomes_of(2, open_as, [0, 0], [2, 2], [4096] * 2, 0.5)
    assert sorted(o.error for o in outcomes) == ["DeadlineError", "UsageError"]
    told = next(o.message for o in outcomes if o.error == "UsageError")
    assert "two jobs share MASTER_ADDR and MASTER_PORT" in told


def strangers_knock() -> None:
    """Connections that say nothing, nonsense, or go away do not keep the ranks apart."""
    knocks = []
    if place().rank == 2:
        for word in (b"", b"\0\0\0\5hello", b"\xff" * 40, None):
            knock = socket.socket(socket.AF_UNIX)
            deadline = time.monotonic() + 10
            while True:
                try:
                    knock.connect(address_of(f"{place().job}/"))
                    break
                except ConnectionRefusedError:
                    assert time.monotonic() < deadline
                    time.sleep(0.001)  # rank 0 does not listen yet
            if word is None:
                knock.close()
            else:
                knock.sendall(word)
            knocks.append(knock)
    with communicator() as comm:
        comm.barrier()
    for knock in knocks:
        knock.close()


def test_strangers_who_knock_are_sent_away() -> None:
    on_ranks(3, strangers_knock)


def die_waiting() -> None:
    if place().rank == 2:
        hear()
        return
    if place().rank == 1:
        say("ready")
    communicator(timeout_s=FAR_S)


def test_a_rank_that_dies_at_the_rendezvous_is_named() -> None:
    with Team(3) as team:
        team.start(die_waiting)
        assert team.hear(1) == "ready"
        time.sleep(0.3)  # it says hello and waits; should it not have come so far, rank 2 is told and all fails
        team.kill(1)
        outcome = team.finish_one(0)
        assert (outcome.error, outcome.ranks) == ("PeerLostError", (1,)), outcome
        team.tell(2, "go")
        assert team.finish_one(1).exit_status == -signal.SIGKILL
        assert team.finish_one(2).ok


# ------------------------------------------------------------------------------- memory one rank cannot give


def refused_memory(limit: str) -> tuple[str, str]:
    with communicator() as comm:
        comm.all_reduce(comm.empty(1000))
        kind = {"space": resource.RLIMIT_AS, "files": resource.RLIMIT_NOFILE}[limit]
        soft, hard = resource.getrlimit(kind)
        if comm.rank == 1:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
            few = len(os.listdir("/proc/self/fd"))
            resource.setrlimit(kind, (used + (8 << 20) if limit == "space" else few + 1, hard))
        try:
            with pytest.raises(RingsideError) as caught:
                comm.empty(16 << 20, np.uint8)
        finally:
            resource.setrlimit(kind, (soft, hard))
        assert not isinstance(caught.value, SyncError)
        for _ in range(3):  # all is well again
            x = comm.empty(5000)
            x += 1
            comm.all_reduce(x)
            assert (x == comm.size).all()
        return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize("limit", ["space", "files"])
def test_memory_that_one_rank_has_not_is_the_same_error_on_all(limit: str) -> None:
    told = on_ranks(3, refused_memory, limit)
    assert len(set(told)) == 1, told
    if limit == "space":
        assert "rank 1 has no memory for it" in told[0][1]


def too_much() -> list[str]:
    told = []
    with communicator() as comm:
        for n in (1 << 45, 1 << 50):
            with pytest.raises(RingsideError, match="memory") as caught:
                comm.empty(n, np.uint8)
            told.append(str(caught.value))
        with pytest.raises(UsageError, match="no memory is large enough"):
            comm.empty((1 << 40, 1 << 40))
        comm.barrier()
    return told


@pytest.mark.parametrize("size", [1, 2])
def test_more_memory_than_there_is_is_refused(size: int) -> None:
    told = on_ranks(size, too_much)
    assert all(text == told[0] for text in told)


def stopped_in_exchange() -> tuple[str, tuple[int, ...]]:
    """Rank 2 calls `empty` but does not take part in handing the memory around."""
    comm = communicator(timeout_s=1.0)
    try:
        if comm.rank == 2:
            with before_its_exchange(comm, hear):
                comm.empty(10)
        comm.empty(10)
    except (DeadlineError, MismatchError, SyncError) as error:
        with pytest.raises(SyncError):
            comm.barrier()
        return type(error).__name__, error.ranks
    finally:
        comm.close()
    return "", ()


def test_an_exchange_has_a_deadline_that_names_who_is_missing() -> None:
    with Team(3) as team:
        team.start(stopped_in_exchange)
        for rank in (0, 1):
            assert team.finish_one(rank).value == ("DeadlineError", (2,))
        team.tell(2, "go")
        assert team.finish_one(2).value[0] != ""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in_exchange() -> tuple[str, tuple[int, ...]]:
    comm = communicator()
    try:
        with before_its_exchange(comm, die if comm.rank == 1 else lambda: None):
            comm.empty(10)
    except SyncError as error:
        return type(error).__name__, error.ranks
    finally:
        comm.close()
    return "", ()


def test_a_death_in_an_exchange_is_named() -> None:
    outcomes = outcomes_of(3, dies_in_exchange)
    assert outcomes[1].exit_status == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].value == ("PeerLostError", (1,)), outcomes[rank]
