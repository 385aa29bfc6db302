"""Every schedule there is, run by the native interpreter and compared with the reference, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from tests.support.ranks import communicator, on_ranks

from ringside import schedule
from ringside.errors import UnsupportedError, UsageError
from ringside.schedule import ALGORITHMS, by_name
from ringside.schedule.algorithms.tree import tree
from ringside.schedule.combine import pipelined

from .oracle import ALLOWED, as_argument, difference, digest, elements, expected

pytestmark = pytest.mark.native

SIZES = (2, pytest.param(3, marks=pytest.mark.core), 4, 5, 8)


def names(ranks: int) -> list[str]:
    """The algorithms that need no switch."""
    return [name for name in sorted(ALGORITHMS) if not by_name(name, ranks).switches]


def check(comm: Any, dtype: str, op: str, count: int, algorithm: str, scale: float = 1.0) -> int:
    """All-reduce once; return a digest, the same on all ranks, of which one compares the result with the oracle."""
    x = elements(dtype, count, (comm.rank, op))
    comm.all_reduce(as_argument(x, dtype), op, algorithm=algorithm, scale=scale)
    if comm.rank == count % comm.size:
        inputs = [elements(dtype, count, (rank, op)) for rank in range(comm.size)]
        wrong = difference(x, expected(inputs, dtype, op, algorithm, scale), dtype)
        assert not wrong, f"{algorithm} of {comm.size}: {dtype} {op} {count} scale {scale}: {wrong}"
    return digest(x)


def every_schedule() -> list[int]:
    digests = []
    with communicator(segment_bytes=4096) as comm:
        rng = random.Random(1)
        room = comm.settings.stage_bytes // 8
        for algorithm in names(comm.size):
            chunks = by_name(algorithm, comm.size).chunks
            for count in (0, 1, comm.size, chunks - 1, chunks + 1, 1001, room, room + 1, 3 * room + 5):
                digests.append(check(comm, "float64", "sum", count, algorithm))
            for dtype, op in rng.sample(ALLOWED, 12):
                digests.append(check(comm, dtype, op, 777, algorithm))
            for dtype in ("float16", "bfloat16", "float32"):
                digests.append(check(comm, dtype, "avg", 9001, algorithm, 1 / 3))
    return digests


@pytest.mark.parametrize("size", SIZES)
def test_every_schedule_gives_what_the_reference_gives(size: int) -> None:
    digests = on_ranks(size, every_schedule)
    assert all(d == digests[0] for d in digests), "ranks hold different bits"


def with_segments(segment_bytes: int) -> list[int]:
    with communicator(segment_bytes=segment_bytes) as comm:
        return [check(comm, "float32", "sum", 50_021, algorithm) for algorithm in names(comm.size)]


@pytest.mark.parametrize("size", [3, 4])
def test_a_result_does_not_depend_on_the_work_space(size: int) -> None:
    small, large = on_ranks(size, with_segments, 64), on_ranks(size, with_segments, 1 << 20)
    assert small == large
    assert all(d == small[0] for d in small), "ranks hold different bits"


def many_chunks() -> None:
    """More chunks than cache lines in the work space: they go in groups."""
    with communicator(segment_bytes=64) as comm:
        made = pipelined(tree(comm.size), 500)
        assert made.chunks > comm.settings.stage_bytes // 64
        for count in (100, 1537, 40_000):
            inputs = [elements("float64", count, rank) for rank in range(comm.size)]
            x = inputs[comm.rank].copy()
            comm.all_reduce(x, algorithm=made)
            with np.errstate(all="ignore"):
                wrong = difference(x, schedule.run(made, np.stack(inputs))[comm.rank], "float64")
            assert not wrong, f"{count}: {wrong}"


@pytest.mark.parametrize("size", [2, 3])
def test_chunks_that_do_not_fit_go_in_groups(size: int) -> None:
    on_ranks(size, many_chunks)


def random_schedule(size: int, seed: int) -> Any:
    """An all-reduce by a random tree: up to a random root through random parents, and down again, chunk by chunk."""
    rng = random.Random(seed)
    rounds: list[list[tuple[int, int, int, bool]]] = []

    def put(at: int, transfer: tuple[int, int, int, bool]) -> None:
        while len(rounds) <= at:
            rounds.append([])
        rounds[at].append(transfer)

    chunks = rng.randrange(1, 4)
    for chunk in range(chunks):
        order = rng.sample(range(size), size)
        at = rng.randrange(3)
        edges = [(order[i], order[rng.randrange(i)]) for i in range(size - 1, 0, -1)]
        for child, parent in edges:
            put(at, (child, parent, chunk, True))
            at += 1
        for child, parent in reversed(edges):
            put(at, (parent, child, chunk, False))
            at += rng.randrange(1, 3)
    made = schedule.from_rounds(f"random{seed}", size, chunks, [schedule.Round.of(r) for r in rounds])
    assert schedule.verify(made).ok
    return made


def random_schedules() -> None:
    with communicator(segment_bytes=64) as comm:
        for seed in range(60):
            made = random_schedule(comm.size, seed)
            inputs = [elements("float32", 1777, rank) for rank in range(comm.size)]
            x = inputs[comm.rank].copy()
            comm.all_reduce(x, algorithm=made)
            with np.errstate(all="ignore"):
                wrong = difference(x, schedule.run(made, np.stack(inputs))[comm.rank], "float32")
            assert not wrong, f"seed {seed}: {wrong}"


@pytest.mark.parametrize("size", [2, 4, 5])
def test_schedules_of_ones_own(size: int) -> None:
    on_ranks(size, random_schedules)


def refused() -> None:
    with communicator() as comm:
        x = np.ones(5)
        for name in sorted(ALGORITHMS):
            if by_name(name, comm.size).switches:
                with pytest.raises(UnsupportedError, match=f"{name} reduces in a switch, .* choose another"):
                    comm.all_reduce(x, algorithm=name)
        with pytest.raises(UsageError, match=f"ring is for {comm.size + 1} ranks, and there are {comm.size}"):
            comm.all_reduce(x, algorithm=schedule.ring(comm.size + 1))
        with pytest.raises(UsageError, match="reduce_scatter, not an all-reduce"):
            comm.all_reduce(x, algorithm=by_name("ring_reduce_scatter", comm.size))
        assert (x == 1).all()
        comm.all_reduce(x, algorithm="tree")
        assert (x == comm.size).all()


@pytest.mark.parametrize("size", [1, 3])
def test_what_cannot_run_here_is_refused(size: int) -> None:
    on_ranks(size, refused)
