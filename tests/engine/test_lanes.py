"""reduce_scatter_ and all_gather_ with explicit lanes, on real processes against the twins."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from tests.support.collective_log import drain
from tests.support.ranks import communicator, on_ranks, place

from ringside._core import numpy_kernels as twins
from ringside.engine.buffers import Flat, flatten
from ringside.engine.dtypes import FLOATING
from ringside.engine.request import CoreRequest
from ringside.engine.shm.log import PATHS
from ringside.engine.shm.memory import Storage
from ringside.errors import MismatchError, UnsupportedError, UsageError

from .oracle import ALLOWED, as_argument, difference, elements, stored

pytestmark = pytest.mark.native

SIZES = (1, 2, 3, 4, 8)
MEMORY = ("symmetric", "private", "mixed")


def reduce_scatter(
    comm: Any, flat: Flat, storage: Storage | None, bounds: list[int], *, scale: float = 1.0, stamp_ns: int = 0
) -> None:
    """`reduce_scatter_` (sum) of a tensor in a shareable storage."""
    comm.execute(CoreRequest("reduce_scatter_", flat, flat.numel, bounds, scale=scale), stamp_ns, True, storage)


class Rooms:
    """Two tensors of each rank: one in symmetric memory, at an offset of the rank's own, and one in private memory."""

    def __init__(self, comm: Any, size_bytes: int) -> None:
        self.comm = comm
        self.symmetric = comm.empty(size_bytes + 4096, np.uint8)
        self.private = np.zeros(size_bytes + 4096, np.uint8)

    def put(self, x: np.ndarray, memory: str) -> np.ndarray:
        mapped = memory == "symmetric" or (memory == "mixed" and self.comm.rank != self.comm.size - 1)
        raw = self.symmetric if mapped else self.private
        start = 3 * self.comm.rank * x.itemsize
        room = raw[start : start + x.nbytes].view(x.dtype)
        room[:] = x
        return room


def lanes_to_try(size: int, count: int, rng: random.Random) -> list[list[int]]:
    """Equal lanes, everything to one rank, nothing to some, holes at both ends, and nothing at all."""
    cuts = sorted(rng.randrange(count + 1) for _ in range(size + 1))
    owner = rng.randrange(size)
    return [
        [count * r // size for r in range(size + 1)],
        [0] * (owner + 1) + [count] * (size - owner),
        [count // 3] * (owner + 1) + [count // 2] * (size - owner),
        cuts,
        [count // 2] * (size + 1),
    ]


@lru_cache(maxsize=1)
def inputs_of(size: int, dtype: str, op: str, count: int) -> list[np.ndarray]:
    """Return every rank's input, made once for all lanes that are tried."""
    return [elements(dtype, count, (rank, op)) for rank in range(size)]


def check(rooms: Rooms, dtype: str, op: str, bounds: list[int], count: int, memory: str, scale: float = 1.0) -> None:
    comm = rooms.comm
    inputs = inputs_of(comm.size, dtype, op, count)
    label = f"{dtype} {op} {count} {memory} {bounds} scale {scale}"
    own = slice(bounds[comm.rank], bounds[comm.rank + 1])
    x = rooms.put(inputs[comm.rank], memory)
    comm.reduce_scatter_(as_argument(x, dtype), bounds, op, scale=scale)
    want = inputs[comm.rank].copy()
    want[own] = twins.fold([y[own] for y in inputs], dtype, op, scale=scale, divisor=comm.size)
    wrong = difference(x, want, dtype)
    assert not wrong, f"reduce_scatter_ {label}: {wrong}"
    x[:] = inputs[comm.rank]
    comm.all_gather_(as_argument(x, dtype), bounds)
    want = inputs[comm.rank].copy()
    for rank, given in enumerate(inputs):
        lane = slice(bounds[rank], bounds[rank + 1])
        want[lane] = given[lane]
    assert x.tobytes() == want.tobytes(), f"all_gather_ {label}"


# ------------------------------------------------------------------------------- every dtype, operation, size, memory


def every_dtype_and_op(memory: str) -> None:
    with communicator(segment_bytes=4096) as comm:
        rooms, rng = Rooms(comm, 1 << 16), random.Random(7)
        for dtype, op in ALLOWED:
            for count in (0, 1, comm.size + 1, 1001, 5003):
                bounds = rng.choice(lanes_to_try(comm.size, count, rng))
                check(rooms, dtype, op, bounds, count, memory)
        for dtype in sorted(FLOATING):
            for op, scale in (("sum", 1 / 3), ("avg", -2.0)):
                for bounds in lanes_to_try(comm.size, 2003, rng):
                    check(rooms, dtype, op, bounds, 2003, memory, scale)


# Of three ranks with mixed memory each path is taken: in `make test`.
PLACES = [
    pytest.param(size, memory, marks=pytest.mark.core if (size, memory) == (3, "mixed") else ())
    for size in SIZES
    for memory in MEMORY
]


@pytest.mark.parametrize(("size", "memory"), PLACES)
def test_every_dtype_and_operation(size: int, memory: str) -> None:
    on_ranks(size, every_dtype_and_op, memory)


def around_thresholds(memory: str) -> set[str]:
    with communicator(segment_bytes=4096) as comm:
        rooms, rng = Rooms(comm, 1 << 18), random.Random(5)
        for dtype in ("float32", "bfloat16", "int8") if comm.size < 8 else ("bfloat16",):
            item = stored(dtype).itemsize
            for edge in (4096, 4096 * comm.size, comm.settings.stage_bytes, 65536, 200_000):
                for count in (edge // item - 1, edge // item, edge // item + 1):
                    for bounds in lanes_to_try(comm.size, count, rng):
                        if bounds[0] != bounds[-1]:
                            check(rooms, dtype, "sum", bounds, count, memory)
        paths = {PATHS[call.path] for call in drain(comm.log.core)}
        empty = [0] * (comm.size + 1)
        check(rooms, "float32", "sum", empty, 9000, memory)  # nobody gives anything: nothing needs to be mapped
        assert comm.size == 1 or drain(comm.log.core)[-1].path == PATHS.index("push")
        return paths


@pytest.mark.parametrize(("size", "memory"), PLACES)
def test_sizes_around_every_threshold(size: int, memory: str) -> None:
    big = {"symmetric": {"push"}, "private": {"staged"}, "mixed": {"push", "staged"}}[memory]
    for paths in on_ranks(size, around_thresholds, memory):
        assert paths == ({"one_shot"} | big if size > 1 else {"local"})


def tiny_segments() -> None:
    """The least there may be of everything: segments of one cache line, nothing travels with the flag."""
    with communicator(segment_bytes=64, one_shot_bytes=0) as comm:
        rooms, rng = Rooms(comm, 1 << 14), random.Random(3)
        for count in (1, 7, 64, 1000):
            for bounds in lanes_to_try(comm.size, count, rng):
                for memory in MEMORY:
                    check(rooms, "float64", "sum", bounds, count, memory)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_tiny_segments(size: int) -> None:
    on_ranks(size, tiny_segments)


def halves_of_an_all_reduce() -> None:
    with communicator() as comm:
        for memory in (comm.empty, np.zeros):
            x = memory(1_000_003, np.float32)
            x[:] = elements("float32", x.size, comm.rank)
            y = x.copy()
            bounds = [x.size * r // comm.size for r in range(comm.size + 1)]
            comm.all_gather_(comm.reduce_scatter_(x, bounds), bounds)
            comm.all_reduce(y)
            assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("size", [2, 3])
def test_the_two_halves_make_an_all_reduce(size: int) -> None:
    on_ranks(size, halves_of_an_all_reduce)


# ------------------------------------------------------------------------------- scales of their own


def own_scales(memory: str) -> None:
    with communicator(segment_bytes=4096) as comm:
        rooms = Rooms(comm, 1 << 16)
        scales = [0.5 + rank for rank in range(comm.size)]
        for dtype in sorted(FLOATING):
            for count in (5, 3001):
                for bounds in lanes_to_try(comm.size, count, random.Random(count)):
                    inputs = [elements(dtype, count, rank) for rank in range(comm.size)]
                    x = rooms.put(inputs[comm.rank], memory)
                    comm.reduce_scatter_(as_argument(x, dtype), bounds, scale=scales[comm.rank], own_scale=True)
                    own = slice(bounds[comm.rank], bounds[comm.rank + 1])
                    want = twins.fold([y[own] for y in inputs], dtype, "sum", scales=scales)
                    wrong = difference(x[own], want, dtype)
                    assert not wrong, f"{dtype} {count} {bounds}: {wrong}"
        x = np.ones(3, np.float32)
        with pytest.raises(UnsupportedError, match="scale"):
            comm.reduce_scatter_(x.astype(np.int32), [0] * (comm.size + 1), own_scale=True)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("memory", MEMORY)
def test_ranks_may_have_scales_of_their_own(size: int, memory: str) -> None:
    on_ranks(size, own_scales, memory)


# ------------------------------------------------------------------------------- storages


def storages(sealed: bool) -> list[str]:
    import fcntl
    import mmap
    import os
    import time

    with communicator(segment_bytes=4096) as comm:
        for count in (1000, 40_000, 40_000, 90_000):
            fd = os.memfd_create("ringside-test-storage", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, count * 4 + 64)
            if sealed:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            with mmap.mmap(fd, count * 4 + 64) as room:
                x = np.frombuffer(room, np.float32, count, 64)
                storage = Storage((os.fstat(fd).st_dev, os.fstat(fd).st_ino), fd, x.ctypes.data - 64, count * 4 + 64)
                bounds = [count * r // comm.size for r in range(comm.size + 1)]
                inputs = [elements("float32", count, (rank, "sum")) for rank in range(comm.size)]
                x[:] = inputs[comm.rank]
                flat, stamp = flatten(x), time.monotonic_ns()
                reduce_scatter(comm, flat, storage, bounds, scale=0.5, stamp_ns=stamp)
                comm.all_gather_storage_(flat, storage, bounds)
                assert not difference(x, twins.fold(inputs, "float32", "sum", scale=0.5), "float32")
                x[:] = comm.rank  # single lanes take the other way in the core
                reduce_scatter(comm, flat, storage, [3] + [count] * comm.size, scale=0.5)
                assert x[:3].tolist() == [comm.rank] * 3
                assert (x[3:] == (sum(range(comm.size)) * 0.5 if comm.rank == 0 else comm.rank)).all()
                reduce_scatter(comm, flat, None, [0] + [count] * comm.size)
                comm.memory.unregister(storage.inode)
                comm.barrier()
                del x, flat
            os.close(fd)
        rows = drain(comm.log.core)
        assert stamp in [row.submitted for row in rows]
        return [PATHS[row.path] for row in rows if row.kind in (3, 4)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_storages_are_exchanged_and_used_in_place(size: int) -> None:
    for paths in on_ranks(size, storages, True):
        if size > 1:
            assert paths[4:] == ["push", "push", "push", "staged"] * 3
            assert paths[:4] == ["one_shot"] * 4


@pytest.mark.parametrize("size", [1, 2])
def test_storages_that_peers_do_not_map_are_copied(size: int) -> None:
    """Files whose size is not sealed: all ranks give them up."""
    for paths in on_ranks(size, storages, False):
        assert size == 1 or "push" not in paths


# ------------------------------------------------------------------------------- refusals, mismatches, the log


def refusals() -> None:
    with communicator() as comm:
        x = np.ones(12, np.float32)
        n = comm.size
        for bad in ([0] * n, [0] * (n + 2), [0] * n + [13], [-1] + [12] * n, [5] + [3] * n, []):
            with pytest.raises(UsageError, match="ascending element offsets between 0 and 12"):
                comm.reduce_scatter_(x, bad)
            with pytest.raises(UsageError, match="ascending"):
                comm.all_gather_(x, bad)
        with pytest.raises(UsageError, match="unknown reduction"):
            comm.reduce_scatter_(x, [0] * (n + 1), "plus")
        with pytest.raises(UnsupportedError, match="scale"):
            comm.reduce_scatter_(x, [0] * (n + 1), "max", scale=2.0)
        assert (x == 1).all()
        comm.barrier()


@pytest.mark.parametrize("size", [1, 3])
def test_impossible_lanes_are_refused_before_anything_is_sent(size: int) -> None:
    on_ranks(size, refusals)


def mismatches(count: int) -> list[str]:
    told = []
    with communicator(segment_bytes=4096) as comm:
        odd = comm.rank == 1
        even = [count * r // comm.size for r in range(comm.size + 1)]
        other = [0] + [count] * comm.size
        for x in (comm.empty(count), np.zeros(count, np.float32)):
            x[:] = comm.rank
            for call in (
                lambda x=x: comm.reduce_scatter_(x, other if odd else even),
                lambda x=x: comm.all_gather_(x, other if odd else even),
                lambda x=x: comm.reduce_scatter_(x, even, scale=0.5 if odd else 0.25),
                lambda x=x: comm.reduce_scatter_(x, even, scale=0.5, own_scale=odd),
                lambda x=x: comm.reduce_scatter_(x, even, "max" if odd else "min"),
                lambda x=x: comm.all_gather_(x, even) if odd else comm.reduce_scatter_(x, even),
                lambda x=x: comm.all_reduce(x) if odd else comm.reduce_scatter_(x, even),
                lambda x=x: comm.all_gather_(x.view(np.int32) if odd else x, even),
                lambda x=x: comm.barrier() if odd else comm.all_gather_(x, even),
            ):
                with pytest.raises(MismatchError) as caught:
                    call()
                assert caught.value.ranks == (1,)
                assert (x == comm.rank).all(), "a mismatch changes nothing"
                told.append(str(caught.value))
        comm.barrier()
    return told


@pytest.mark.parametrize("count", [30, 30_000])
def test_a_mismatch_names_both_sides_and_changes_nothing(count: int) -> None:
    for told in on_ranks(3, mismatches, count):
        assert f"rank 1 called reduce_scatter_(sum, float32, shape ({count},), bounds=[0, {count}, {count}" in told[0]
        assert f"ranks 0 and 2 called all_gather_(float32, shape ({count},), bounds=[0, {count // 3}, " in told[1]
        assert "scale=0.5" in told[2]
        assert "scale=0.25" in told[2]
        assert "own weight" in told[3]
        assert "reduce_scatter_(max" in told[4]
        assert "all_gather_(" in told[5]
        assert "all_reduce(sum" in told[6]
        assert "int32" in told[7]
        assert "barrier()" in told[8]


def logged() -> None:
    with communicator() as comm:
        for x in (np.ones(6, np.int16), np.ones(60_000, np.int16)):
            bounds = [x.size * r // comm.size for r in range(comm.size + 1)]
            comm.reduce_scatter_(x, bounds)
            comm.all_gather_(x, bounds)
        rows = drain(comm.log.core)
        assert [row.kind for row in rows] == [3, 4, 3, 4]
        assert [row.payload_bytes for row in rows] == [12, 12, 120_000, 120_000]
        for row in rows:
            assert row.entered <= row.ready <= row.done
            assert len(row.arrivals) == comm.size
            assert row.arrivals[comm.rank] == row.submitted
            assert row.wait_seconds >= 0


@pytest.mark.parametrize("size", [1, 2])
def test_the_log_tells_kinds_and_arrivals(size: int) -> None:
    on_ranks(size, logged)


# ------------------------------------------------------------------------------- anything, many times


def anything(seed: int, calls: int) -> None:
    """Random collectives that all ranks draw alike, all-reduce among them; ranks place their tensors as they like."""
    shared, own = random.Random(seed), random.Random(f"{seed}/{place().rank}")
    with communicator(
        segment_bytes=shared.choice([64, 4096, 100_000]), one_shot_bytes=shared.choice([0, 4096])
    ) as comm:
        rooms = Rooms(comm, 1 << 18)
        for _ in range(calls):
            dtype, op = shared.choice(ALLOWED)
            count = int(2 ** (shared.random() * shared.choice([6, 11, 15])))
            if shared.random() < 0.3:
                x = rooms.put(elements(dtype, count, (comm.rank, op)), own.choice(MEMORY))
                comm.all_reduce(as_argument(x, dtype), op, algorithm=shared.choice([None, "ring", "direct"]))
            bounds = shared.choice(lanes_to_try(comm.size, count, shared))
            check(rooms, dtype, op, bounds, count, own.choice(MEMORY))


@pytest.mark.parametrize(("size", "seed"), [(2, 1), (3, 2), (4, 3), (8, 4)])
def test_any_sequence_of_collectives(size: int, seed: int) -> None:
    on_ranks(size, anything, seed, 1200 // size)
