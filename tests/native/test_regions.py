"""Memory that ranks share: what is taken as such, what is still there, and what a failure makes private."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from tests.support.waiting import until

from ringside.engine.shm.memory import Storage, SymmetricMemory
from ringside.errors import DeadlineError, PeerLostError

from .cores import (
    CLOSED,
    DEADLINE,
    EXCHANGE,
    INTERRUPTED,
    OK,
    PAGE,
    PEER_LOST,
    WAIT_S,
    WITHDRAWN,
    Memory,
    address,
    all_reduce,
    libc,
    map_pages,
    opened,
    paths,
    share,
    together,
)

pytestmark = pytest.mark.native

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.fixture
def memories() -> Iterator[list[Memory]]:
    made = [Memory() for _ in range(2)]
    for rank, memory in enumerate(made):
        memory.x[:] = rank + 1
    yield made
    for memory in made:
        memory.close()


@pytest.mark.parametrize(
    ("seals", "file_bytes", "taken"),
    [
        (SIZE_SEALS, 2 * PAGE, True),
        (SIZE_SEALS, PAGE, True),
        (SIZE_SEALS, PAGE - 1, False),
        (SIZE_SEALS | fcntl.F_SEAL_SEAL, PAGE, True),
        (fcntl.F_SEAL_SHRINK, PAGE, False),
        (fcntl.F_SEAL_GROW, PAGE, False),
        (0, PAGE, False),
    ],
)
def test_memory_that_could_shrink_or_is_too_small_is_not_taken(seals: int, file_bytes: int, taken: bool) -> None:
    fd = os.memfd_create("test-of-ringside", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, file_bytes)
        if seals:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        with opened(2) as (core, _):
            assert core.map_region(1, 0, fd, PAGE) == taken
    finally:
        os.close(fd)


def test_a_file_that_cannot_have_seals_is_not_taken_for_a_sealed_one(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file, opened(2) as (core, _):
        file.truncate(PAGE)
        assert not core.map_region(1, 0, file.fileno(), PAGE)


def test_new_memory_is_whole_pages_of_zeros_whose_size_stays() -> None:
    with opened(1) as (core,):
        sizes = {}
        for number, asked in enumerate((0, 1, PAGE - 1, PAGE, PAGE + 1)):
            fd, region, raw = core.new_region(asked)
            sizes[asked] = raw.size
            assert region == number
            assert not raw.any()
            assert os.fstat(fd).st_size == raw.size
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            assert seals & SIZE_SEALS == SIZE_SEALS
            assert seals & fcntl.F_SEAL_SEAL
            del raw
        assert sizes == {0: PAGE, 1: PAGE, PAGE - 1: PAGE, PAGE: PAGE, PAGE + 1: 2 * PAGE}
        assert core.take_dead_regions() == [0, 1, 2, 3, 4]
        assert core.take_dead_regions() == []


def over_new_memory(begin: int, count: int) -> list[list[str]]:
    """All-reduce elements that begin so far behind the begin of a piece of new memory; return the ways it went.

    The piece lies right before another one, so that there are elements behind its end.
    """
    with opened(2, segment_bytes=64) as cores:
        pieces: list[list[np.ndarray]] = [[], []]
        xs = []
        made = []
        for rank, core in enumerate(cores):
            pair = None
            while pair is None:
                made.append(core.new_region(PAGE))
                pieces[rank].append(made[-1][2])
                ends = {address(piece) for piece in pieces[rank]}
                pair = next((at for at in ends if at + PAGE in ends), None)
                assert len(pieces[rank]) < 100, "the kernel lays nothing side by side"
            for fd, region, _ in made:
                assert cores[1 - rank].map_region(rank, region, fd, PAGE)
            made.clear()
            both = np.ctypeslib.as_array(ctypes.cast(pair, ctypes.POINTER(ctypes.c_float)), (PAGE // 2,))
            xs.append(both[begin : begin + count])
            xs[rank][:] = rank + 1
        assert together([partial(all_reduce, core, x) for core, x in zip(cores, xs, strict=True)]) == [OK, OK]
        assert all((x == 3).all() for x in xs)
        ways = [paths(core) for core in cores]
        del xs, both, pieces
    return ways


def test_a_tensor_is_found_by_its_address_where_all_of_it_is_in_one_piece_of_memory() -> None:
    whole = PAGE // 4
    for begin, count in ((0, whole), (0, 1), (1, whole - 1), (whole - 8, 8), (whole, 8)):
        assert over_new_memory(begin, count) == [["push"]] * 2, (begin, count)
    for begin, count in ((0, whole + 1), (whole - 7, 8)):
        assert over_new_memory(begin, count) == [["staged"]] * 2, (begin, count)


def sum_of(
    cores: Any, memories: list[Memory], regions: list[int], offsets: tuple[int, int], bytes_each: int
) -> list[str]:
    """All-reduce a piece of each rank's memory; return which way it went."""
    xs = [memory.x[at // 4 : (at + bytes_each) // 4] for memory, at in zip(memories, offsets, strict=True)]
    for rank, x in enumerate(xs):
        x[:] = rank + 1
    calls = [
        partial(all_reduce, core, x, region=region, offset=at)
        for core, x, region, at in zip(cores, xs, regions, offsets, strict=True)
    ]
    assert together(calls) == [OK, OK]
    assert all((x == 3).all() for x in xs)
    ways = [paths(core) for core in cores]
    assert ways[0] == ways[1]
    return ways[0]


def test_what_a_peer_says_is_believed_as_far_as_its_memory_reaches(memories: list[Memory]) -> None:
    with opened(2) as cores:
        regions = share(cores, memories)
        assert sum_of(cores, memories, regions, (0, 0), PAGE) == ["push"]
        assert sum_of(cores, memories, regions, (64, 128), PAGE - 128) == ["push"]
    with opened(2) as cores:  # only half of it is shared
        regions = [core.adopt_region(address(m.x), PAGE // 2, m.fd) for core, m in zip(cores, memories, strict=True)]
        for rank, core in enumerate(cores):
            other = 1 - rank
            assert core.map_region(other, regions[other], memories[other].fd, PAGE // 2)
        assert sum_of(cores, memories, regions, (0, 0), PAGE // 2) == ["push"]
        assert sum_of(cores, memories, regions, (PAGE // 2 - 64, 0), 64) == ["push"]
        assert sum_of(cores, memories, regions, (PAGE // 2 - 64, 0), 128) == ["staged"]
        assert sum_of(cores, memories, regions, (PAGE // 2 + 64, 0), 64) == ["staged"]


def test_regions_keep_their_numbers_and_those_that_are_gone_are_used_no_more(memories: list[Memory]) -> None:
    with opened(2) as cores:
        for core, memory in zip(cores, memories, strict=True):
            assert core.adopt_region(address(memory.x), PAGE, memory.fd) == 0
            core.retire_region(0)
            assert core.take_dead_regions() == [0]
            assert core.take_dead_regions() == []
        regions = share(cores, memories)
        assert regions == [1, 1]
        assert sum_of(cores, memories, regions, (0, 0), PAGE) == ["push"]
        cores[0].drop_region(1, 1)
        cores[1].drop_region(0, 1)
        cores[1].drop_region(0, 7)  # there is none
        xs = [np.full(9, rank, np.float32) for rank in (1, 2)]
        assert together([partial(all_reduce, core, x, region=1) for core, x in zip(cores, xs, strict=True)]) == [OK, OK]
        assert [paths(core) for core in cores] == [["staged"]] * 2


def test_new_memory_is_told_of_before_a_collective_uses_it(memories: list[Memory]) -> None:
    with opened(2) as cores:
        xs = [memory.x for memory in memories]
        core, other = cores
        region = core.adopt_region(address(xs[0]), PAGE, memories[0].fd)
        calls = [partial(all_reduce, core, xs[0], region=region, fresh=True), partial(all_reduce, other, xs[1])]
        assert together(calls) == [EXCHANGE, EXCHANGE]
        assert other.map_region(0, region, memories[0].fd, PAGE)
        assert together([core.resume, other.resume]) == [OK, OK]
        assert all((x == 3).all() for x in xs)
        assert core.seq() == other.seq() == 1


# ------------------------------------------------------------------------------------------------ made private


def test_a_failure_makes_memory_private_for_everybody_who_knows_it(memories: list[Memory]) -> None:
    """Two groups share the same memory; the first one fails."""
    with opened(2) as first, opened(2) as second:
        for cores in (first, second):
            assert share(cores, memories) == [0, 0]
        assert sum_of(second, memories, [0, 0], (0, 0), PAGE) == ["push"]
        memories[0].x[:] = 7
        assert memories[0].is_shared()
        first[0].give_up(PEER_LOST, [1])
        assert not memories[0].is_shared()
        assert memories[1].is_shared()
        assert (memories[0].x == 7).all(), "what was there is there"
        assert sum_of(second, memories, [0, 0], (0, 0), PAGE) == ["staged"]
        assert second[0].take_dead_regions() == [0]
        assert second[1].take_dead_regions() == []
        for core in (*second, *first):
            shared_again = core.adopt_region(address(memories[0].x), PAGE, memories[0].fd)
            assert shared_again == -1, "not even anew"
        assert all_reduce(first[0], np.zeros(1, np.float32)) == PEER_LOST
        assert first[0].failure()["ranks"] == [1]


def test_memory_is_not_made_private_while_another_group_s_peers_write_it(memories: list[Memory]) -> None:
    with opened(2) as first, opened(2) as second:
        for cores in (first, second):
            share(cores, memories)
        begun = threading.Thread(target=all_reduce, args=(second[0], memories[0].x), kwargs={"region": 0})
        begun.start()
        until(lambda: second[1].absent() == [] and second[0].seq() == 1)
        failing = threading.Thread(target=first[0].give_up, args=(PEER_LOST, [1]))
        failing.start()
        until(lambda: first[0].failure()["status"] == PEER_LOST)
        assert all_reduce(second[1], memories[1].x, region=0) == OK
        begun.join(WAIT_S)
        failing.join(WAIT_S)
        assert (memories[0].x == 3).all()
        assert paths(second[0]) == ["push"]
        assert not memories[0].is_shared()


def test_what_waits_too_long_in_memory_that_is_to_be_made_private_is_given_up(memories: list[Memory]) -> None:
    """Rank 0 of one group waits for a rank that does not come, that of another is still to go on after an exchange."""
    with opened(2) as failing, opened(2, timeouts_s=[5.0, 5.0]) as waiting, opened(2) as between:
        for cores in (failing, waiting, between):
            share(cores, memories)
        new = zip(between, memories, strict=True)
        calls = [partial(all_reduce, core, memory.x, region=0, fresh=True) for core, memory in new]
        assert together(calls) == [EXCHANGE, EXCHANGE]
        found: list[int] = []
        begun = threading.Thread(target=lambda: found.append(all_reduce(waiting[0], memories[0].x, region=0)))
        begun.start()
        until(lambda: waiting[0].seq() == 1)
        failing[0].give_up(PEER_LOST, [1])
        assert not memories[0].is_shared()
        begun.join(WAIT_S)
        assert found == [WITHDRAWN]
        assert between[0].resume() == WITHDRAWN
        assert between[1].resume() == PEER_LOST
        assert all_reduce(waiting[1], memories[1].x, region=0) == PEER_LOST
        assert [cores[1].failure()["ranks"] for cores in (waiting, between)] == [[0], [0]]


@pytest.mark.parametrize("descriptor", ["there", "closed", "of another file"])
def test_memory_is_made_private_whatever_became_of_its_descriptor(descriptor: str, memories: list[Memory]) -> None:
    memory, other = memories
    kept = os.dup(memory.fd)
    with opened(2) as cores:
        share(cores, memories)
        if descriptor == "closed":
            os.close(memory.fd)
        elif descriptor == "of another file":
            os.dup2(other.fd, memory.fd)
        cores[0].give_up(PEER_LOST, [1])
        if descriptor == "closed":
            memory.fd = os.dup(kept)
        elif descriptor == "of another file":
            os.dup2(kept, memory.fd)
        assert (memory.x == 1).all()
        assert not memory.is_shared()
    os.close(kept)


def test_memory_that_shows_a_file_in_two_mappings_is_made_private() -> None:
    memory = Memory(3 * PAGE)
    assert libc.madvise(address(memory.x) + PAGE, PAGE, mmap.MADV_DONTFORK) == 0  # the kernel keeps three now
    memory.x[:] = 5
    with opened(1) as (core,):
        core.adopt_region(address(memory.x), memory.size_bytes, memory.fd)
        open_before = len(os.listdir("/proc/self/fd"))
        core.give_up(PEER_LOST, [0])
        assert (memory.x == 5).all()
        assert not memory.is_shared()
        assert len(os.listdir("/proc/self/fd")) == open_before, "what was read to find that out is closed again"
    memory.close()


@pytest.mark.parametrize("page", [0, 1])
def test_what_others_have_put_where_memory_was_is_left_alone(page: int) -> None:
    """Its owner has freed a page of it, and somebody else has got that one."""
    memory = Memory(2 * PAGE)
    memory.x[:] = 5
    with opened(1) as (core,):
        core.adopt_region(address(memory.x), memory.size_bytes, memory.fd)
        there = address(memory.x) + page * PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
        assert map_pages(there, PAGE, flags) == there
        part = memory.x[page * PAGE // 4 : (page + 1) * PAGE // 4]
        part[:] = 7
        core.give_up(PEER_LOST, [0])
        assert (part == 7).all()
        rest = memory.x[(1 - page) * PAGE // 4 : (2 - page) * PAGE // 4]
        assert (rest == 5).all()
        os.pwrite(memory.fd, np.float32(9).tobytes(), (1 - page) * PAGE)
        assert rest[0] == 9, "it is the file's still"
    memory.close()


def test_retired_memory_stays_as_it_is_when_a_collective_fails(memories: list[Memory]) -> None:
    with opened(2) as cores:
        share(cores, memories)
        cores[0].retire_region(0)
        cores[0].give_up(PEER_LOST, [1])
        assert memories[0].is_shared(), "it was not for this group any more"


def test_closing_makes_private_what_peers_may_be_writing_only(memories: list[Memory]) -> None:
    with opened(2) as cores:
        share(cores, memories)
        assert sum_of(cores, memories, [0, 0], (0, 0), PAGE) == ["push"]
        cores[0].close()
        assert memories[0].is_shared()
        cores[0].close()
        assert all_reduce(cores[0], memories[0].x, region=0) == CLOSED
    with opened(2) as cores:
        share(cores, memories)
        calls = [partial(all_reduce, core, m.x, region=0, fresh=True) for core, m in zip(cores, memories, strict=True)]
        assert together(calls) == [EXCHANGE, EXCHANGE]
        cores[0].close()
        assert not memories[0].is_shared(), "it had begun"
        assert memories[1].is_shared()


class SilentHub:
    """Where ranks tell each other of their memory, and one does not answer."""

    rank, ranks = 0, 2

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def exchange(self, *_: object, **__: object) -> NoReturn:
        raise self.error


@pytest.mark.parametrize(
    ("error", "status", "ranks"),
    [
        (DeadlineError("", [1]), DEADLINE, [1]),
        (PeerLostError("", [1]), PEER_LOST, [1]),
        (KeyboardInterrupt(), INTERRUPTED, []),
    ],
)
def test_ranks_that_cannot_tell_each_other_of_memory_go_on_together_no_more(
    error: BaseException, status: int, ranks: list[int], memories: list[Memory]
) -> None:
    with opened(2) as cores:
        hub: Any = SilentHub(error)
        symmetric = SymmetricMemory(cores[0], hub, 1.0)
        mine = Storage((0, memories[0].fd), memories[0].fd, address(memories[0].x), PAGE)
        assert symmetric.register(mine, mine.address + 8) == symmetric.register(mine, mine.address + 8) == (0, 8, True)
        with pytest.raises(type(error)):
            symmetric.exchange()
        assert all_reduce(cores[0], memories[0].x) == status
        assert cores[0].failure()["ranks"] == ranks
        assert not memories[0].is_shared()
        again = Storage((0, -1), memories[0].fd, address(memories[0].x), PAGE)
        assert symmetric.register(again, again.address) == (-1, 0, False), "it is private"


def test_memory_that_is_gone_is_announced_anew_if_it_comes_again(memories: list[Memory]) -> None:
    with opened(2) as cores:
        hub: Any = SilentHub(RuntimeError())
        symmetric = SymmetricMemory(cores[0], hub, 1.0)
        first, second = (Storage((1, at), m.fd, address(m.x), PAGE) for at, m in enumerate(memories))
        found = [symmetric.register(one, one.address) for one in (first, second, first)]
        assert found == [(0, 0, True), (1, 0, True), (0, 0, True)]
        symmetric.unregister(first.inode)
        symmetric.unregister((1, 7))  # it is not known
        assert symmetric.register(first, first.address) == (2, 0, True)
        assert cores[0].take_dead_regions() == [0]
