"""All-reduce on real processes against the twins and the reference executor: every path, dtype, operation and size."""

from __future__ import annotations

import itertools
import random
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from tests.support.collective_log import drain
from tests.support.ranks import communicator, on_ranks, place

from ringside.engine.dtypes import DTYPES
from ringside.engine.shm.log import PATHS
from ringside.errors import UnsupportedError, UsageError

from .oracle import ALLOWED, Brain, as_argument, difference, digest, elements, expected, stored

pytestmark = pytest.mark.native

SIZES = (1, 2, 3, 4, 8)
ALGORITHMS = (None, "one_shot", "direct", "ring")
# Of three ranks, every algorithm and every kind of memory: in `make test`.
CORE = {
    (3, "mixed", None),
    (3, "private", "direct"),
    (3, "private", "one_shot"),
    (3, "symmetric", "direct"),
    (3, "symmetric", "ring"),
}


def cases(*memories: str) -> list[Any]:
    """Return sizes, kinds of memory and algorithms, all with all."""
    together = itertools.product(SIZES, memories, ALGORITHMS)
    return [pytest.param(*case, marks=pytest.mark.core if case in CORE else ()) for case in together]


class Rooms:
    """Memory to put inputs into: symmetric memory at an offset of each rank's own, or private memory."""

    def __init__(self, comm: Any, size_bytes: int) -> None:
        self.symmetric = comm.empty(size_bytes + 4096, np.uint8)
        self.private = np.zeros(size_bytes + 4096, np.uint8)
        self.rank = comm.rank

    def put(self, x: np.ndarray, symmetric: bool, shift: int) -> np.ndarray:
        raw = self.symmetric if symmetric else self.private
        start = shift * x.itemsize
        room = raw[start : start + x.nbytes].view(x.dtype)
        room[:] = x
        return room


def check(
    comm: Any, rooms: Rooms, dtype: str, op: str, count: int, memory: str, algorithm: str | None, scale=1.0
) -> int:
    """All-reduce once; return a digest of the result, which is to be the same on all ranks.

    One of the ranks compares it with the oracle, for which it needs all inputs: not always the same one.
    """
    symmetric = memory == "symmetric" or (memory == "mixed" and comm.rank != comm.size - 1)
    room = rooms.put(elements(dtype, count, (comm.rank, op)), symmetric, shift=3 * comm.rank)
    comm.all_reduce(as_argument(room, dtype), op, algorithm=algorithm, scale=scale)
    if comm.rank == count % comm.size:
        inputs = [elements(dtype, count, (rank, op)) for rank in range(comm.size)]
        wrong = difference(room, expected(inputs, dtype, op, algorithm, scale), dtype)
        assert not wrong, f"{dtype} {op} {count} {memory} {algorithm} scale {scale}: {wrong}"
    # Different NaNs would satisfy the oracle; ranks must agree on every bit.
    return digest(room)


# ------------------------------------------------------------------------------- every dtype and operation


def every_dtype_and_op(memory: str, algorithm: str | None) -> list[int]:
    digests = []
    with communicator(segment_bytes=4096) as comm:
        rooms = Rooms(comm, 1 << 16)
        for dtype, op in ALLOWED:
            few = {1, comm.size + 1, 1001}
            for count in sorted(few if comm.size == 8 else {*few, 0, comm.size - 1}):
                digests.append(check(comm, rooms, dtype, op, count, memory, algorithm))
    return digests


@pytest.mark.parametrize(("size", "memory", "algorithm"), cases("symmetric", "private"))
def test_every_dtype_and_operation(size: int, memory: str, algorithm: str | None) -> None:
    digests = on_ranks(size, every_dtype_and_op, memory, algorithm)
    assert all(d == digests[0] for d in digests), "ranks hold different bits"


# ------------------------------------------------------------------------------- every size that could matter


def sizes_around_thresholds(memory: str, algorithm: str | None) -> tuple[list[int], set[str]]:
    digests = []
    with communicator(segment_bytes=4096) as comm:
        stage = comm.settings.stage_bytes
        rooms = Rooms(comm, 1 << 18)
        for dtype in ("float32", "bfloat16", "int8"):
            item = stored(dtype).itemsize
            for edge in (4096, 32768, 4096 * comm.size, 2 * 4096, stage, stage // comm.size, 65536):
                for count in (edge // item - 1, edge // item, edge // item + 1):
                    digests.append(check(comm, rooms, dtype, "sum", count, memory, algorithm))
        paths = {PATHS[call.path] for call in drain(comm.log.core)}
    return digests, paths


@pytest.mark.parametrize(("size", "memory", "algorithm"), cases("symmetric", "private", "mixed"))
def test_sizes_around_every_threshold(size: int, memory: str, algorithm: str | None) -> None:
    results = on_ranks(size, sizes_around_thresholds, memory, algorithm)
    assert all(digests == results[0][0] for digests, _ in results), "ranks hold different bits"
    big = {"symmetric": "push"}.get(memory, "staged")
    want = {None: {"one_shot", big}, "one_shot": {"one_shot"}, "direct": {big}, "ring": {"program"}}[algorithm]
    assert results[0][1] == (want if size > 1 else {"local"})


def megabytes() -> list[int]:
    """Default settings, sizes beyond every buffer, results beyond the caches."""
    digests = []
    with communicator(stream_bytes=1) as comm:
        rooms = Rooms(comm, 6 << 20)
        for memory, algorithm in (("symmetric", None), ("mixed", None), ("private", "ring")):
            for dtype, count in (("float32", 1_100_007), ("float16", 600_001)):
                digests.append(check(comm, rooms, dtype, "sum", count, memory, algorithm))
    return digests


@pytest.mark.parametrize("size", [2, 3])
def test_megabytes(size: int) -> None:
    digests = on_ranks(size, megabytes)
    assert all(d == digests[0] for d in digests)


# ------------------------------------------------------------------------------- scale, average, halves


def scaled() -> list[int]:
    digests = []
    with communicator(segment_bytes=4096) as comm:
        rooms = Rooms(comm, 1 << 16)
        for dtype in ("float32", "float64", "float16", "bfloat16"):
            for op in ("sum", "avg"):
                for algorithm in ALGORITHMS:
                    for scale in (0.5, 1 / 3, -2.0, 0.0, float("nan")):
                        for count in (5, 3001):
                            digests.append(check(comm, rooms, dtype, op, count, "symmetric", algorithm, scale))
        x = np.ones(4, np.int32)
        for op, y in (("sum", x), ("max", x.astype(np.float32))):
            with pytest.raises(UnsupportedError, match="scale"):
                comm.all_reduce(y, op, scale=2.0)
        comm.barrier()
    return digests


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_scale_multiplies_each_contribution(size: int) -> None:
    digests = on_ranks(size, scaled)
    assert all(d == digests[0] for d in digests), "ranks hold different bits"


def halves(algorithm: str | None) -> list[float]:
    """1 + 2^-11 + 2^-11 in f16: 1 where every addition rounds, 1 + 2^-10 where the sum is rounded once."""
    with communicator() as comm:
        x = np.full(40, 1.0 if comm.rank == 0 else 2.0**-11, np.float16)
        comm.all_reduce(x, algorithm=algorithm)
        bits = np.full(40, 0x3F80 if comm.rank == 0 else 0x3B80, np.uint16)  # 1 and 2^-8 as bfloat16
        comm.all_reduce(Brain(bits), algorithm=algorithm)
        return [*set(x.tolist()), *set(bits.tolist())]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_halves_are_summed_in_single_precision_and_rounded_once(algorithm: str | None) -> None:
    assert on_ranks(3, halves, algorithm) == [[1 + 2.0**-10, 0x3F81]] * 3


# ------------------------------------------------------------------------------- what may be passed


def layouts() -> None:
    with communicator(segment_bytes=4096) as comm:
        for shape in ((), (0,), (1,), (3, 0, 2), (7, 5), (2, 3, 4, 5), (100, 100)):
            x = np.full(shape, comm.rank + 1, np.float32)
            assert comm.all_reduce(x) is x
            assert x.shape == shape
            assert (x == sum(range(1, comm.size + 1))).all()
        grid = np.arange(10_000, dtype=np.int64).reshape(100, 100)
        for view in (np.s_[::2], np.s_[:, 3], np.s_[::-1], np.s_[1:90:3, 5:70:2]):
            x = grid.copy()
            untouched = np.ones(x.shape, bool)
            untouched[view] = False
            comm.all_reduce(x[view])
            assert (x[view] == grid[view] * comm.size).all()
            assert (x[untouched] == grid[untouched]).all()
        for turned in (grid.copy().T, np.asfortranarray(grid)):
            before = turned.copy()
            comm.all_reduce(turned, async_op=True).wait()
            assert (turned == before * comm.size).all()
        raw = np.zeros(8 * 3000 + 1, np.uint8)
        odd = raw[1:].view(np.float64)  # starts between two elements
        odd[:] = comm.rank
        comm.all_reduce(odd)
        assert (odd == sum(range(comm.size))).all()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shapes_and_layouts(size: int) -> None:
    on_ranks(size, layouts)


class OnGpu:
    """Looks like a CUDA tensor."""

    is_cpu, device, dtype, shape = False, "cuda:0", "torch.float32", (4,)

    def data_ptr(self) -> int:
        raise AssertionError("nobody may look at it")


def refusals() -> None:
    x = np.ones(4, np.float32)
    frozen = x.copy()
    frozen.flags.writeable = False
    with communicator() as comm:
        for wrong, error, words in (
            (x.astype(np.complex64), UnsupportedError, "complex64.*float32"),
            (x.astype(np.uint16), UnsupportedError, "uint16"),
            (x.astype(">f4"), UnsupportedError, "byte order|cannot be reduced"),
            (np.array(["a"]), UnsupportedError, "cannot be reduced"),
            (np.array([None]), UnsupportedError, "object"),
            (frozen, UsageError, "read-only"),
            (frozen[::2], UsageError, "read-only"),
            (OnGpu(), UnsupportedError, "cuda:0.*NCCL"),
            ([1.0, 2.0], UnsupportedError, "list"),
            (None, UnsupportedError, "NoneType"),
        ):
            with pytest.raises(error, match=words):
                comm.all_reduce(wrong)
        for op in ("add", "SUM", "", None, 3, ["sum"]):
            with pytest.raises(UsageError, match="sum, avg, prod, min, max, band, bor, bxor"):
                comm.all_reduce(x, op)
        for op in ("band", "bor", "bxor"):
            with pytest.raises(UnsupportedError, match=f"{op} of float32"):
                comm.all_reduce(x, op)
        with pytest.raises(UnsupportedError, match="avg of bool"):
            comm.all_reduce(np.ones(3, bool), "avg")
        with pytest.raises(UsageError, match=r"direct.*one_shot.*ring"):
            comm.all_reduce(x, algorithm="snake")
        with pytest.raises(UsageError):
            comm.empty((2, -1))
        with pytest.raises(UnsupportedError, match="complex128"):
            comm.empty(3, np.complex128)
        assert (x == 1).all(), "a refused call changes nothing"
        comm.all_reduce(x)
        assert (x == comm.size).all(), "nothing was sent by refused calls"


@pytest.mark.parametrize("size", [1, 2])
def test_what_cannot_be_is_refused_before_anything_is_sent(size: int) -> None:
    on_ranks(size, refusals)


class Op(str):
    """A subclass of str, as a StrEnum's members are."""

    __slots__ = ()


def named_otherwise() -> None:
    with communicator() as comm:
        x = np.full(3, comm.rank + 1.0)
        comm.all_reduce(x, Op("max"))
        comm.all_reduce(x, np.str_("sum"))
        assert (x == comm.size**2).all()


def test_an_operation_may_be_a_subclass_of_str() -> None:
    on_ranks(2, named_otherwise)


# ------------------------------------------------------------------------------- torch


def torch_tensors() -> None:
    import torch

    torch.set_num_threads(1)
    with communicator(segment_bytes=4096) as comm:
        total = sum(range(1, comm.size + 1))
        for name in DTYPES[:-1]:
            dtype = getattr(torch, name)
            for make in (lambda shape, d: torch.empty(shape, dtype=d), comm.empty):
                for shape in ((), (0,), (5,), (100, 33)):
                    x = make(shape, dtype)
                    x.fill_(comm.rank + 1)
                    assert comm.all_reduce(x) is x
                    assert x.dtype == dtype
                    assert x.shape == shape
                    assert bool((x == total).all())
        flags = torch.tensor([comm.rank == 0, True, False])
        comm.all_reduce(flags, "min")
        assert flags.tolist() == [comm.size == 1, True, False]
        grid = torch.arange(600.0).reshape(20, 30)
        for view in (grid.clone().t(), grid.clone()[::2, 1::3], grid.clone()[:, 4], grid.clone().expand(2, 20, 30)[0]):
            before = view.clone()
            comm.all_reduce(view, async_op=True).wait()
            assert torch.equal(view, before * comm.size)
        leaf = torch.ones(8, requires_grad=True)
        comm.all_reduce(leaf)
        comm.all_reduce(leaf[::2])
        assert leaf.tolist() == [comm.size**2, comm.size] * 4
        assert leaf.grad_fn is None
        for wrong, words in (
            (torch.ones(2, dtype=torch.complex64), "complex64"),
            (torch.ones(2).to(torch.float8_e4m3fn), "float8_e4m3fn"),
            (torch.ones(2, dtype=torch.uint16), "uint16"),
            (torch.ones(2, 2).to_sparse(), "sparse"),
            (torch.ones(2, device="meta"), "meta"),
        ):
            with pytest.raises(UnsupportedError, match=words):
                comm.all_reduce(wrong)
        memory = comm.empty((4, 4), torch.bfloat16)
        assert memory.dtype == torch.bfloat16
        assert not memory.any()


def test_torch_tensors() -> None:
    on_ranks(2, torch_tensors)


# ------------------------------------------------------------------------------- asynchronous


def many_in_flight() -> list[int]:
    with communicator(segment_bytes=4096) as comm:
        arrays = [np.full(1 + 997 * i % 20_000, comm.rank + i, np.int64) for i in range(60)]
        works = [comm.all_reduce(x, async_op=True) for x in arrays[:20]]
        comm.barrier()
        assert all(work.is_completed() for work in works)
        works += [comm.all_reduce(x, async_op=True) for x in arrays[20:40]]
        direct = np.full(3000, comm.rank, np.int64)
        comm.all_reduce(direct)
        assert all(work.is_completed() for work in works), "a synchronous call comes after those under way"
        memory = None
        for i, x in enumerate(arrays[40:]):
            works.append(comm.all_reduce(x, async_op=True, algorithm=ALGORITHMS[i % 4]))
            if i == 7:
                memory = comm.empty(5000, np.int64)
                memory[:] = comm.rank
                works.append(comm.all_reduce(memory, async_op=True))
        works.reverse()
        for work in works:
            work.wait()
            assert work.exception() is None
        base = sum(range(comm.size))
        assert (direct == base).all()
        assert memory is not None
        assert (memory == base).all()
        for i, x in enumerate(arrays):
            assert (x == base + comm.size * i).all(), i
        assert works[0].wait(timedelta(seconds=1)) is True
        assert works[0].result() is works[0].get_future().result() is arrays[-1]
        assert works[0].is_success()
        return [call.seq for call in drain(comm.log.core)]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_many_asynchronous_collectives_in_flight(size: int) -> None:
    logs = on_ranks(size, many_in_flight)
    assert all(log == logs[0] for log in logs)


def read_the_log_meanwhile() -> int:
    with communicator() as comm:
        if comm.rank == 0:
            work = comm.all_reduce(np.ones(4), async_op=True)
            for _ in range(100):  # rank 1 comes only when this is over: the log must not wait for the collective
                drain(comm.log.core)
                with pytest.raises(TimeoutError):
                    work.wait(0.001)
            comm2 = communicator("go")
            work.wait()
        else:
            comm2 = communicator("go")
            comm.all_reduce(np.ones(4))
        comm2.close()
        return len(drain(comm.log.core))


def test_the_log_can_be_read_while_a_collective_waits() -> None:
    assert on_ranks(2, read_the_log_meanwhile) == [1, 1]


# ------------------------------------------------------------------------------- symmetric memory and several at once


def memory_comes_and_goes() -> int:
    with communicator() as comm:
        addresses = set()
        for i in range(60):
            x = comm.empty(20_000 + i % 3, np.float32)
            assert not x.any(), "new memory is zero"
            addresses.add(x.ctypes.data)
            x[:] = comm.rank + i
            comm.all_reduce(x)
            assert (x == sum(range(comm.size)) + i * comm.size).all()
            view = x[64:]
            del x
            comm.all_reduce(view)  # a view keeps its memory
            assert (view == (sum(range(comm.size)) + i * comm.size) * comm.size).all()
            del view
        paths = {PATHS[call.path] for call in drain(comm.log.core)}
        assert paths == ({"push"} if comm.size > 1 else {"local"})
        return len(addresses)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_memory_freed_and_allocated_at_the_same_address(size: int) -> None:
    assert min(on_ranks(size, memory_comes_and_goes)) < 60, "no address came twice: the test tests nothing"


def outlives() -> float:
    with communicator() as comm:
        x = comm.empty(1000)
        x += comm.rank
        comm.all_reduce(x)
    del comm
    x += 1
    return float(x.sum())


def test_symmetric_memory_outlives_its_communicator() -> None:
    assert on_ranks(2, outlives) == [2000.0, 2000.0]


def several() -> None:
    comms = [communicator(str(k)) for k in range(4)]
    rooms = [comm.empty(3000, np.int32) for comm in comms]
    for i in range(20):
        works = []
        for k in random.Random(i).sample(range(4), 4):
            rooms[k][:] = comms[k].rank + k
            works.append((k, comms[k].all_reduce(rooms[k], async_op=True)))
        for k, work in works:
            work.wait()
            assert (rooms[k] == sum(range(comms[k].size)) + k * comms[k].size).all()
        # Memory of another communicator is private memory to this one.
        rooms[0][:] = 1
        comms[1].all_reduce(rooms[0])
        assert (rooms[0] == comms[0].size).all()
    for comm in comms:
        comm.close()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_several_communicators_at_once(size: int) -> None:
    on_ranks(size, several)


def open_descriptors() -> tuple[int, int]:
    import os

    def once(name: str) -> None:
        with communicator(name) as comm:
            comm.all_reduce(comm.empty(10_000))
            comm.all_reduce(np.ones(5), async_op=True).wait()

    once("warm")
    before = sorted(os.listdir("/proc/self/fd"))
    for k in range(8):
        once(str(k))
    return len(before), len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [1, 3])
def test_communicators_give_back_every_descriptor(size: int) -> None:
    for before, after in on_ranks(size, open_descriptors):
        assert after == before


# ------------------------------------------------------------------------------- anything, thousands of times


def anything(seed: int, calls: int) -> int:
    """A sequence of random collectives that all ranks draw alike; each rank places its tensors as it likes."""
    shared, own = random.Random(seed), random.Random(f"{seed}/{place().rank}")
    total = 0
    with communicator(
        segment_bytes=shared.choice([64, 4096, 100_000]), one_shot_bytes=shared.choice([0, 4096])
    ) as comm:
        rooms = Rooms(comm, 1 << 18)
        for _ in range(calls):
            kind = shared.random()
            if kind < 0.05:
                comm.barrier()
                continue
            if kind < 0.08:
                rooms = Rooms(comm, shared.choice([1 << 18, (1 << 18) + 5000]))
                continue
            dtype, op = shared.choice(ALLOWED)
            count = int(2 ** (shared.random() * shared.choice([6, 11, 15])))
            algorithm = shared.choice(ALGORITHMS)
            inputs = [elements(dtype, count, (rank, op)) for rank in range(comm.size)]
            room = rooms.put(inputs[comm.rank], own.random() < 0.8, own.randrange(100))
            if own.random() < 0.3:
                comm.all_reduce(as_argument(room, dtype), op, True, algorithm=algorithm).wait()
            else:
                comm.all_reduce(as_argument(room, dtype), op, algorithm=algorithm)
            want = expected(inputs, dtype, op, algorithm)
            wrong = difference(room, want, dtype)
            assert not wrong, f"seed {seed}: {dtype} {op} {count} {algorithm}: {wrong}"
            total = (total * 31 + digest(room)) % (1 << 61)
    return total


@pytest.mark.parametrize(("size", "seed"), [(2, 1), (2, 2), (3, 3), (4, 4), (8, 5)])
def test_any_sequence_of_collectives(size: int, seed: int) -> None:
    totals = on_ranks(size, anything, seed, 3000 // size)
    assert len(set(totals)) == 1, "ranks hold different bits"


def tiny_storm(calls: int) -> None:
    """As many collectives as fast as they go: lost wake-ups and reused slots show here."""
    with communicator() as comm:
        x, want = np.empty(3, np.int64), np.arange(3) * comm.size
        memory = comm.empty(600, np.int64)
        for i in range(calls):
            x[:] = np.arange(3) + comm.rank * i
            comm.all_reduce(x)
            assert (x == want + i * comm.size * (comm.size - 1) // 2).all(), i
            if i % 7 == 0:
                memory[:] = comm.rank + i
                comm.all_reduce(memory)
                assert (memory == comm.size * (comm.size - 1) // 2 + i * comm.size).all()
                comm.barrier()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_storm_of_tiny_collectives(size: int) -> None:
    on_ranks(size, tiny_storm, 16_000 // size**2)
