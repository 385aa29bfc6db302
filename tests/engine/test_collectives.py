"""reduce_scatter, all_gather, broadcast, reduce, gather, scatter and all_to_all on real processes, against NumPy."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.support.collective_log import drain
from tests.support.ranks import Team, communicator, hear, on_ranks, place, say

from ringside._core import numpy_kernels as twins
from ringside.engine import collectives
from ringside.engine.dtypes import DTYPES
from ringside.engine.request import KINDS
from ringside.engine.shm import communicator as shm_communicator
from ringside.engine.shm.log import PATHS
from ringside.errors import MismatchError, RingsideError, UnsupportedError, UsageError

from .oracle import ALLOWED, difference, elements

pytestmark = pytest.mark.native

SIZES = (1, 2, pytest.param(3, marks=pytest.mark.core), 4, 8)
MEMORY = ("symmetric", "private", "mixed")
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (5,), (3, 0, 2), (3, 7), (1031, 3))
NUMPY_DTYPES = tuple(dtype for dtype in DTYPES if dtype != "bfloat16")
# Dtypes that nothing can be reduced in, but that can be moved.
ODD_DTYPES = ("complex64", "complex128", "uint16", "uint64", "datetime64[ns]", "S5", ">f4", "f4,i2", "float16")


def numbers(dtype: Any, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Random bytes as elements; ordinary truth values."""
    kind = np.dtype(dtype)
    rng = np.random.default_rng([seed, *shape])
    if kind.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape).copy()


class Rooms:
    """Copies inputs into symmetric or private memory."""

    def __init__(self, comm: Any, size_bytes: int) -> None:
        self.comm, self.symmetric = comm, comm.empty(size_bytes, np.uint8)

    def put(self, x: np.ndarray, memory: str) -> np.ndarray:
        if memory == "private" or (memory == "mixed" and self.comm.rank == 0) or not x.size:
            return x.copy()
        room = self.symmetric[: x.nbytes].view(x.dtype).reshape(x.shape)
        room[...] = x
        return room


def bits(x: np.ndarray) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def check_moves(rooms: Rooms, dtype: Any, shape: tuple[int, ...], memory: str, root: int, way: bool) -> None:
    """Every collective that only moves elements, each once; `way`: asynchronously."""
    comm, label = rooms.comm, (dtype, shape, memory, root)
    n = comm.size

    def done(result: Any) -> Any:
        return result.result() if way else result

    given = [numbers(dtype, shape, rank) for rank in range(n)]
    rows = [numbers(dtype, (n, *shape), 100 + rank) for rank in range(n)]
    x = rooms.put(given[comm.rank], memory)
    y = done(comm.all_gather(x, way))
    assert y.shape == (n * (shape[0] if shape else 1), *shape[1:]), label
    assert y.dtype == x.dtype
    assert bits(y) == b"".join(map(bits, given)), label
    y = done(comm.gather(x, root, way))
    if comm.rank == root:
        assert y.shape == (n, *shape), label
        assert bits(y) == b"".join(map(bits, given)), label
    else:
        assert y is None
    assert bits(x) == bits(given[comm.rank]), "an input is not changed"
    assert done(comm.broadcast(x, root, way)) is x
    assert bits(x) == bits(given[root]), label
    z = rooms.put(rows[comm.rank], memory)
    y = done(comm.all_to_all(z, way))
    assert bits(y) == b"".join(bits(row[comm.rank : comm.rank + 1]) for row in rows), label
    out = rooms.put(given[comm.rank], "private")
    assert done(comm.scatter(out, z if comm.rank == root else None, root, way)) is out
    assert bits(out) == bits(rows[root][comm.rank : comm.rank + 1]), label
    assert bits(z) == bits(rows[comm.rank]), "an input is not changed"


def check_reductions(rooms: Rooms, dtype: str, op: str, shape: tuple[int, ...], memory: str, root: int, way: bool):
    comm, label = rooms.comm, (dtype, op, shape, memory, root)
    n = comm.size

    def done(result: Any) -> Any:
        return result.result() if way else result

    rows = [elements(dtype, n * int(np.prod(shape)), (rank, op)).reshape(n, *shape) for rank in range(n)]
    want = twins.fold(rows, dtype, op, divisor=n)
    x = rooms.put(rows[comm.rank], memory)
    y = done(comm.reduce_scatter(x, op, way))
    assert y.shape == (1, *shape)
    wrong = difference(y, want[comm.rank : comm.rank + 1], dtype)
    assert not wrong, (label, wrong)
    assert bits(x) == bits(rows[comm.rank]), "an input is not changed"
    assert done(comm.reduce(x, root, op, way)) is x
    wrong = difference(x, want if comm.rank == root else rows[comm.rank], dtype)
    assert not wrong, (label, wrong)


def moves(memory: str) -> None:
    with communicator(segment_bytes=4096) as comm:
        rooms, rng = Rooms(comm, 1 << 18), random.Random(3)
        for dtype in NUMPY_DTYPES:
            for shape in SHAPES:
                check_moves(rooms, dtype, shape, memory, rng.randrange(comm.size), rng.random() < 0.3)
        for dtype in ODD_DTYPES:
            for shape in ((), (3, 2), (211, 3)):
                check_moves(rooms, dtype, shape, memory, rng.randrange(comm.size), rng.random() < 0.3)
        paths = {PATHS[call.path] for call in drain(comm.log.core)}
        big = {"symmetric": {"push"}, "private": {"staged"}, "mixed": {"push", "staged"}}[memory]
        assert paths == ({"one_shot"} | big if comm.size > 1 else {"local"})


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("memory", MEMORY)
def test_collectives_that_move(size: int, memory: str) -> None:
    on_ranks(size, moves, memory)


def reductions(memory: str) -> None:
    with communicator(segment_bytes=4096) as comm:
        rooms, rng = Rooms(comm, 1 << 19), random.Random(4)
        for dtype, op in ALLOWED:
            if dtype == "bfloat16":
                continue
            for shape in ((), (0,), (7,), rng.choice([(1031, 3), (601, 2)])):
                check_reductions(rooms, dtype, op, shape, memory, rng.randrange(comm.size), rng.random() < 0.3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("memory", MEMORY)
def test_collectives_that_reduce(size: int, memory: str) -> None:
    on_ranks(size, reductions, memory)


def megabytes() -> list[tuple[str, str]]:
    with communicator() as comm:
        n = comm.size
        for make in (comm.empty, np.zeros):
            x = make((n, 300_007), np.float32)
            x[:] = np.arange(n)[:, None] + 10 * comm.rank
            assert (comm.reduce_scatter(x) == n * comm.rank + 10 * sum(range(n))).all()
            assert (comm.all_to_all(x) == (np.arange(n) * 10 + comm.rank)[:, None]).all()
            assert (comm.all_gather(x[0]).reshape(n, -1) == (np.arange(n) * 10)[:, None]).all()
            out = make(300_007, np.float32)
            comm.scatter(out, x if comm.rank == n - 1 else None, n - 1)
            assert (out == comm.rank + 10 * (n - 1)).all()
            comm.reduce(out, 0, "max")
            assert (out == (comm.rank or n - 1) + 10 * (n - 1)).all()
            comm.broadcast(out, n - 1)
            assert (out == 11 * (n - 1)).all()
            rows = comm.gather(out, 1)
            assert rows is None if comm.rank != 1 else (rows == 11 * (n - 1)).all()
        return [(KINDS[call.kind], PATHS[call.path]) for call in drain(comm.log.core)]


@pytest.mark.parametrize("size", [2, 3])
def test_megabytes(size: int) -> None:
    every = ("reduce_scatter", "all_to_all", "all_gather", "scatter", "reduce", "broadcast", "gather")
    for logged in on_ranks(size, megabytes):
        assert logged == [*((kind, "push") for kind in every), *((kind, "staged") for kind in every)]


# ------------------------------------------------------------------------------- what may be passed


def layouts() -> None:
    with communicator(segment_bytes=4096) as comm:
        n, rank = comm.size, comm.rank
        grid = np.arange(100 * n * 60.0).reshape(100 * n, 60)
        for x in (grid[:, ::3], grid.T[: 20 * n, 5:], np.asfortranarray(grid), grid[::-1]):
            frozen = x.view()
            frozen.flags.writeable = False
            k = len(x) // n
            want = (x * n)[rank * k : (rank + 1) * k]
            assert (comm.reduce_scatter(frozen) == want).all()
            assert (comm.all_gather(frozen) == np.concatenate([x] * n)).all()
            assert (comm.all_to_all(frozen) == np.concatenate([x[rank * k : (rank + 1) * k]] * n)).all()
            mine = grid.copy()[:, ::3] + rank
            assert (comm.broadcast(mine, n - 1) == grid[:, ::3] + n - 1).all()
            comm.reduce(mine, 0)
            assert (mine == (grid[:, ::3] + n - 1) * (n if rank == 0 else 1)).all()
            into = np.zeros((60, 9), np.complex64).T
            comm.scatter(into, np.arange(n * 540, dtype=np.complex64).reshape(n, 9, 60) if rank == 0 else None)
            assert (into == (np.arange(540) + 540 * rank).reshape(9, 60)).all()
        if rank == n - 1:
            grid.flags.writeable = False
        comm.broadcast(grid, n - 1)  # who gives, or does not get, is not written to
        if n > 1:
            comm.reduce(grid, 0)
        comm.gather(grid, 0)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_layouts_and_read_only_inputs(size: int) -> None:
    on_ranks(size, layouts)


def own_results(stream_bytes: int) -> None:
    with communicator(segment_bytes=4096, stream_bytes=stream_bytes) as comm:
        n, rank = comm.size, comm.rank
        for make in (np.zeros, comm.empty):
            for k in (2, 5000):
                x = make((n, k), np.float32)
                x[:] = rank
                out = make((n, k), np.float32)
                assert comm.all_gather(x[0], out=out[:, :].reshape(n * k)).base is not None
                assert (out == np.arange(n)[:, None]).all()
                out[:] = -1
                assert comm.all_to_all(x, out=out) is out
                assert (out == np.arange(n)[:, None]).all()
                part = make((1, k), np.float32)
                assert comm.reduce_scatter(x, "max", out=part) is part
                assert (part == n - 1).all()
                out[:] = -1
                assert comm.gather(x[0], n - 1, out=out) is (out if rank == n - 1 else None)
                assert (out == (np.arange(n)[:, None] if rank == n - 1 else -1)).all()
        for wrong in (np.zeros((n, 3)), np.zeros((n, 5000), np.float32).T, np.zeros((n, 10_000), np.float32)[:, ::2]):
            with pytest.raises(UsageError, match=r"out must be a contiguous tensor of shape"):
                comm.all_to_all(x, out=wrong)
        with pytest.raises(UsageError, match="overlap"):
            comm.all_to_all(x, out=x)
        comm.barrier()


@pytest.mark.parametrize("stream_bytes", [0, 1])  # 1: results bypass the caches, whatever their size
@pytest.mark.parametrize("size", [1, 2, 3])
def test_results_may_be_ones_own(size: int, stream_bytes: int) -> None:
    on_ranks(size, own_results, stream_bytes)


def both_ways(takes_torch: bool) -> None:
    """Each collective on contiguous tensors, by one call into the core, while the last rank goes the long way."""
    wrap: Callable[[Any], Any] = np.ascontiguousarray
    if takes_torch:
        import torch

        wrap = torch.from_numpy
    with communicator() as comm, pytest.MonkeyPatch.context() as patch:
        n, rank = comm.size, comm.rank
        is_long = rank == n - 1
        if not is_long:
            patch.setattr(collectives, "CoreRequest", None)
            patch.setattr(shm_communicator, "CoreRequest", None)
        for k in (1, 3, 5000):
            given = np.arange(2 * n * k, dtype=np.float32).reshape(2 * n, k) + rank
            every = [given + other - rank for other in range(n)]
            x = wrap(given.copy())

            def out(rows: int, k: int = k) -> dict[str, Any]:
                return {} if is_long else {"out": wrap(np.zeros((rows, k), np.float32))}

            assert (np.asarray(comm.all_gather(x, **out(2 * n * n))) == np.concatenate(every)).all()
            mine = slice(2 * rank, 2 * rank + 2)
            assert (np.asarray(comm.reduce_scatter(x, "max", **out(2))) == every[-1][mine]).all()
            assert (np.asarray(comm.all_to_all(x, **out(2 * n))) == np.concatenate([e[mine] for e in every])).all()
            for root in range(n):
                grid = given if not is_long else np.asfortranarray(given)
                reduced = grid.copy(order="K")
                assert comm.reduce(wrap(reduced) if not is_long else reduced, root) is not None
                assert (reduced == (sum(every) if rank == root else given)).all()
                moved = grid.copy(order="K")
                comm.broadcast(wrap(moved) if not is_long else moved, root)
                assert (moved == every[root]).all()
            total = wrap(given.copy()) if not is_long else np.asfortranarray(given)
            assert (np.asarray(comm.all_reduce(total)) == sum(every)).all()


@pytest.mark.parametrize("takes_torch", [False, pytest.param(True, id="torch")])
def test_the_short_way_into_the_core_and_the_long_one_are_the_same_call(takes_torch: bool) -> None:
    if takes_torch:
        pytest.importorskip("torch")
    on_ranks(3, both_ways, takes_torch)


def interrupted_by_a_handler(takes_torch: bool) -> str:
    """Rank 0 waits for rank 1, and a signal's handler raises meanwhile, as that of torch's data loader does."""
    with communicator(timeout_s=30.0) as comm:
        x: Any = np.ones(4, np.float32)
        if takes_torch:
            import torch

            x = torch.ones(4)
        comm.barrier()
        if comm.rank == 1:
            say("here")
            assert hear() == "go on"
            with pytest.raises(RingsideError):
                comm.all_gather(x, out=x.repeat(2))
            return ""

        def raises(*_: Any) -> None:
            raise RuntimeError("a worker was killed")

        before = signal.signal(signal.SIGUSR1, raises)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        try:
            comm.all_gather(x, out=x.repeat(2))
        except RuntimeError as error:
            return str(error)
        finally:
            signal.signal(signal.SIGUSR1, before)
        return "nothing"


@pytest.mark.parametrize("takes_torch", [False, pytest.param(True, id="torch")])
def test_what_a_signals_handler_raises_is_the_callers(takes_torch: bool) -> None:
    if takes_torch:
        pytest.importorskip("torch")
    with Team(2) as team:
        team.start(interrupted_by_a_handler, takes_torch)
        assert team.hear(1) == "here"
        assert team.finish_one(0).value == "a worker was killed"
        team.tell(1, "go on")
        assert team.finish_one(1).value == ""


def freed() -> None:
    torch = pytest.importorskip("torch")
    with communicator() as comm:
        x, out = torch.ones(4), torch.ones(4 * comm.size)
        out.untyped_storage().resize_(0)
        with pytest.raises(UsageError, match="its storage was freed"):
            comm.all_gather(x, out=out)
        assert x.tolist() == [1.0] * 4
        comm.barrier()


def test_a_result_whose_storage_was_freed_is_refused() -> None:
    on_ranks(2, freed)


def refusals() -> None:
    with communicator() as comm:
        n = comm.size
        x = np.ones((n + 1, 3), np.float32)
        frozen = np.ones(3)
        frozen.flags.writeable = False
        calls: list[tuple[Callable[[], Any], type[Exception], str]] = [
            (lambda: comm.reduce_scatter(np.ones(())), UsageError, "cannot be divided"),
            (lambda: comm.reduce_scatter(x, "plus"), UsageError, "unknown reduction"),
            (lambda: comm.reduce_scatter(x.astype(np.complex64)), UnsupportedError, "complex64"),
            (lambda: comm.reduce(x, 0, "band"), UnsupportedError, "band of float32"),
            (lambda: comm.all_gather([1, 2]), UnsupportedError, "list"),
            (lambda: comm.all_gather(np.array([None])), UnsupportedError, "object"),
            (lambda: comm.all_gather(np.array([("a", None)], dtype="U1,O")), UnsupportedError, "reduced"),
            (lambda: comm.scatter(frozen, np.ones((n, 3)) if comm.rank == 0 else None), UsageError, "read-only"),
        ]
        if n > 1:
            calls.append((lambda: comm.reduce_scatter(x), UsageError, f"must be a multiple of {n}"))
            calls.append((lambda: comm.all_to_all(x), UsageError, f"must be a multiple of {n}"))
        for root in (n, -1, 1.0, None, "0"):
            for name in ("broadcast", "reduce", "gather"):
                calls.append((lambda name=name, root=root: getattr(comm, name)(x, root), UsageError, "is no rank"))
            calls.append((lambda root=root: comm.scatter(x[0], x, root), UsageError, "is no rank"))
        if comm.rank == 0:
            calls.append((lambda: comm.scatter(x[0]), UsageError, "has to give x"))
            calls.append((lambda: comm.scatter(x[0], x[:, 0]), UsageError, "needs x of shape"))
            calls.append((lambda: comm.scatter(x[0], x[:n].astype(np.float64)), UsageError, "same dtype"))
        for call, error, words in calls:
            with pytest.raises(error, match=words):
                call()
        assert (x == 1).all()
        comm.broadcast(x)


@pytest.mark.parametrize("size", [1, 3])
def test_what_cannot_be_is_refused_before_anything_is_sent(size: int) -> None:
    on_ranks(size, refusals)


def mismatches(count: int) -> list[str]:
    told = []
    with communicator(segment_bytes=4096) as comm:
        odd = comm.rank == 1
        x = np.full((3, count), comm.rank, np.float32)
        calls: list[Callable[[], Any]] = [
            lambda: comm.broadcast(x, 2 if odd else 0),
            lambda: comm.reduce(x, 0, "max" if odd else "min"),
            lambda: comm.gather(x, 0) if odd else comm.all_gather(x),
            lambda: comm.all_to_all(x) if odd else comm.reduce_scatter(x),
            lambda: comm.scatter(x[0], x, 1 if odd else 0),
            lambda: comm.all_gather(x.view(np.int32) if odd else x),
            lambda: comm.all_gather(x.view("V4" if odd else np.uint32)),
            lambda: comm.broadcast(x[:, :-1] if odd else x),
            lambda: comm.reduce(x, 1) if odd else comm.all_reduce(x),
            lambda: comm.split(0) if odd else comm.gather(x),
            lambda: comm.all_gather(x, True).wait() if odd else comm.broadcast(x, 0, True).wait(),
        ]
        for call in calls:
            with pytest.raises(MismatchError) as caught:
                call()
            assert caught.value.ranks == (1,)
            assert (x == comm.rank).all(), "a mismatch changes nothing"
            told.append(str(caught.value))
        assert comm.broadcast(x, 2)[0, 0] == 2
    return told


@pytest.mark.parametrize("count", [3, 30_000])
def test_a_mismatch_tells_who_called_what(count: int) -> None:
    shape = f"float32, shape (3, {count})"
    for told in on_ranks(3, mismatches, count):
        assert f"ranks 0 and 2 called broadcast({shape}, root=0); rank 1 called broadcast({shape}, root=2)" in told[0]
        assert f"rank 1 called reduce(max, {shape}, root=0)" in told[1]
        assert f"ranks 0 and 2 called all_gather({shape}); rank 1 called gather({shape}, root=0)" in told[2]
        assert f"called reduce_scatter(sum, {shape}); rank 1 called all_to_all({shape})" in told[3]
        assert f"rank 1 called scatter(float32, shape ({count},), root=1)" in told[4]
        assert "int32" in told[5]
        assert "Detected mismatch" in told[6]
        assert f"(3, {count - 1})" in told[7]
        assert "rank 1 called reduce(sum" in told[8]
        assert "rank 1 called split()" in told[9]
        assert "rank 1 called all_gather(" in told[10]


# ------------------------------------------------------------------------------- torch


def torch_tensors() -> None:
    import torch

    torch.set_num_threads(1)
    with communicator(segment_bytes=4096) as comm:
        n, rank = comm.size, comm.rank
        for name in (*DTYPES[:-1], "complex64", "float8_e4m3fn"):
            dtype = getattr(torch, name)
            for k in (1, 3000):
                x = torch.full((n, k), rank + 1.0).to(dtype)
                y = comm.all_gather(x)
                assert y.dtype == dtype
                assert torch.equal(y.float(), torch.arange(1.0, n + 1).repeat_interleave(n)[:, None].expand(n * n, k))
                assert torch.equal(comm.all_to_all(x).float(), torch.arange(1.0, n + 1)[:, None].expand(n, k))
                rows = comm.gather(x, n - 1)
                assert rows is None if rank != n - 1 else rows.shape == (n, n, k)
                if name in DTYPES:
                    part = comm.reduce_scatter(x)
                    assert part.shape == (1, k)
                    assert bool((part == n * (n + 1) // 2).all())
                    comm.reduce(x, 0)
                    assert bool((x == (n * (n + 1) // 2 if rank == 0 else rank + 1)).all())
                out = torch.empty(k, dtype=dtype)
                comm.scatter(out, torch.arange(n).float()[:, None].expand(n, k).to(dtype) if rank == 0 else None)
                assert bool((out.float() == rank).all())
                comm.broadcast(out, n - 1)
                assert bool((out.float() == n - 1).all())
        leaf = torch.full((n, 4), float(rank), requires_grad=True)
        assert not comm.reduce_scatter(leaf).requires_grad
        comm.broadcast(leaf.detach().t(), n - 1)
        assert leaf.tolist() == [[n - 1.0] * 4] * n
        lazy = torch.tensor([1 + 2j]).conj()
        assert comm.all_gather(lazy).tolist() == [1 - 2j] * n
        with pytest.raises(UnsupportedError, match="meta"):
            comm.all_gather(torch.ones(2, device="meta"))
        with pytest.raises(UnsupportedError, match="sparse"):
            comm.all_gather(torch.ones(2, 2, dtype=torch.complex64).to_sparse())


def test_torch_tensors() -> None:
    on_ranks(2, torch_tensors)


# ------------------------------------------------------------------------------- many, in any order


def anything(seed: int, calls: int) -> None:
    shared, own = random.Random(seed), random.Random(f"{seed}/{place().rank}")
    with communicator(
        segment_bytes=shared.choice([64, 4096, 100_000]), one_shot_bytes=shared.choice([0, 4096])
    ) as comm:
        rooms = Rooms(comm, 1 << 18)
        for _ in range(calls):
            shape = shared.choice([(), (3,), (40, 7), (int(2 ** (shared.random() * 11)),)])
            root, way, memory = shared.randrange(comm.size), own.random() < 0.3, own.choice(MEMORY)
            dtype, op = shared.choice([pair for pair in ALLOWED if pair[0] != "bfloat16"])
            check_reductions(rooms, dtype, op, shape, memory, root, way)
            check_moves(rooms, shared.choice(NUMPY_DTYPES + ODD_DTYPES), shape, memory, root, way)


@pytest.mark.parametrize(("size", "seed"), [(2, 1), (3, 2), (4, 3), (8, 4)])
def test_any_sequence_of_collectives(size: int, seed: int) -> None:
    on_ranks(size, anything, seed, 240 // size)
