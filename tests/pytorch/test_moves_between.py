"""reduce_scatter, all_gather, broadcast, reduce and barrier among processes that pretend to be on several hosts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.engine.oracle import ALLOWED, difference, elements
from tests.support.ranks import on_ranks, place

from ringside._core import numpy_kernels as twins
from ringside.engine.dtypes import FLOATING
from ringside.errors import MismatchError

from .groups import communicator, meeting_point

pytestmark = pytest.mark.native

TEAM = 6
LIMIT_S = 150.0
ROWS = {"two hosts of two": [0, 0, 1, 1], "two of three": [0, 0, 0, 1, 1, 1], "three of two": [0, 0, 1, 1, 2, 2]}
OTHERS = {"interleaved": [0, 1, 0, 1], "three and two": [0, 0, 0, 1, 1], "one rank each": [0, 1, 2]}
LAYOUTS = {**ROWS, **OTHERS}
COUNTS = (0, 1, 7, 1000, 40_001)  # of a lane; the last goes piece by piece
NUMPY_ALLOWED = [(dtype, op) for dtype, op in ALLOWED if dtype != "bfloat16"]


def close(x: Any, rows: Any, dtype: str, op: str) -> str:
    """Return "" where a reduction is right: to the bit, or for sums of floats within their roundings in any order."""
    if dtype not in FLOATING or op in ("min", "max"):
        return difference(x, twins.fold(rows, dtype, op, divisor=len(rows)), dtype)
    wide = np.stack([row.astype(np.float64) for row in rows])
    want = wide.prod(0) if op == "prod" else wide.sum(0) / (len(rows) if op == "avg" else 1)
    size = np.abs(want) if op == "prod" else np.abs(wide).sum(0)
    allowed = (len(rows) + 2) * np.finfo(dtype).eps * size + np.finfo(dtype).tiny * len(rows)
    error = np.abs(x.astype(np.float64) - want)
    return "" if (error <= allowed).all() else f"off by {error.max()} where {allowed[error.argmax()]} is allowed"


def numbers(dtype: str, count: int, seed: Any, op: str) -> Any:
    """Elements whose sums and products stay finite."""
    if dtype not in FLOATING:
        return elements(dtype, count, seed)
    rng = np.random.default_rng([count, *repr(seed).encode()])
    return (rng.uniform(0.5, 1.5, count) if op == "prod" else rng.standard_normal(count)).astype(dtype)


def every_move(path: str, hosts: list[int], reproducible: bool) -> int:
    n = len(hosts)
    if place().rank >= n:
        return 0
    with (
        communicator(path, hosts, algorithm=None, reproducible=True)
        if reproducible
        else communicator(path, hosts) as comm
    ):
        cases = [("float32", "sum", count) for count in COUNTS] + [("float32", "avg", 40_001), ("float16", "avg", 501)]
        cases += [(dtype, op, 257) for dtype, op in NUMPY_ALLOWED]
        for number, (dtype, op, count) in enumerate(cases):
            root, label = number % n, (dtype, op, count)
            rows = [numbers(dtype, n * count, (rank, number), op) for rank in range(n)]
            x = rows[comm.rank].copy()
            check = (
                (lambda y, rows, dtype=dtype, op=op: difference(y, twins.fold(rows, dtype, op, divisor=n), dtype))
                if reproducible
                else (lambda y, rows, dtype=dtype, op=op: close(y, rows, dtype, op))
            )
            own = slice(comm.rank * count, (comm.rank + 1) * count)
            wrong = check(comm.reduce_scatter(x, op), [row[own] for row in rows])
            assert not wrong, ("reduce_scatter", label, wrong)
            assert x.tobytes() == rows[comm.rank].tobytes(), "an input is not changed"
            assert comm.reduce(x, root, op) is x
            wrong = check(x, rows) if comm.rank == root else difference(x, rows[comm.rank], dtype)
            assert not wrong, ("reduce", label, root, wrong)
            given = [row[:count].copy() for row in rows]
            y = comm.all_gather(given[comm.rank])
            assert y.tobytes() == b"".join(one.tobytes() for one in given), ("all_gather", label)
            z = rows[comm.rank].copy()
            z.flags.writeable = comm.rank != root  # who gives is only read
            comm.broadcast(z, root)
            assert z.tobytes() == rows[root].tobytes(), ("broadcast", label, root)
            if number % 8 == 0:
                comm.barrier()
    return len(cases)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_move_is_right(layout: str) -> None:
    hosts = LAYOUTS[layout]
    with meeting_point() as path:
        assert all(on_ranks(TEAM, every_move, path, hosts, False, limit_s=LIMIT_S)[: len(hosts)])


def test_reproducible_ones_are_added_up_in_rank_order() -> None:
    hosts = ROWS["three of two"]
    with meeting_point() as path:
        assert all(on_ranks(TEAM, every_move, path, hosts, True, limit_s=LIMIT_S))


def uneven_lanes(path: str, hosts: list[int]) -> None:
    """In place, with lanes of all lengths, holes before and after, and a scale."""
    n = len(hosts)
    if place().rank >= n:
        return
    with communicator(path, hosts) as comm:
        rng = np.random.default_rng(3)
        for count in (30, 5000, 300_000):
            cuts = sorted(rng.integers(0, count, n + 1).tolist())
            for bounds in (cuts, [count // 2] * (n + 1), [0, *[count] * n], [0] * n + [count]):
                rows = [numbers("float64", count, rank, "sum") for rank in range(n)]
                own = slice(bounds[comm.rank], bounds[comm.rank + 1])
                x = rows[comm.rank].copy()
                assert comm.reduce_scatter_(x, bounds, "avg", scale=3.0) is x
                wrong = close(x[own], [3.0 * row[own] for row in rows], "float64", "avg")
                assert not wrong, (bounds, wrong)
                x[own] = rows[comm.rank][own]
                assert x.tobytes() == rows[comm.rank].tobytes(), "other lanes are not changed"
                comm.all_gather_(x, bounds)
                want = rows[comm.rank].copy()
                for rank, row in enumerate(rows):
                    want[bounds[rank] : bounds[rank + 1]] = row[bounds[rank] : bounds[rank + 1]]
                assert x.tobytes() == want.tobytes(), bounds


@pytest.mark.parametrize("layout", ROWS)
def test_lanes_of_any_length(layout: str) -> None:
    with meeting_point() as path:
        on_ranks(TEAM, uneven_lanes, path, ROWS[layout], limit_s=LIMIT_S)


def what_leaves(path: str, hosts: list[int], what: str, count: int) -> tuple[int, int]:
    """Return what came to this rank from ranks of other hosts, and from those of its own, in one collective, bytes."""
    n = len(hosts)
    with communicator(path, hosts) as comm:
        x = np.ones(n * count, np.float32)
        before = len(comm.hops)
        getattr(comm, what)(x if what != "all_gather" else x[:count])
        hops = comm.hops[before:]
        away = sum(hop.size_bytes for hop in hops if hosts[hop.src] != hosts[comm.rank])
        return away, sum(hop.size_bytes for hop in hops) - away


@pytest.mark.parametrize(
    ("what", "tensors"), [("reduce_scatter", 2 / 3), ("all_gather", 2 / 3), ("broadcast", 1.0), ("reduce", 1.0)]
)
def test_only_what_hosts_do_not_share_is_sent(what: str, tensors: float) -> None:
    hosts, count = ROWS["three of two"], 60_000
    size = len(hosts) * count * 4
    with meeting_point() as path:
        told = on_ranks(TEAM, what_leaves, path, hosts, what, count, limit_s=LIMIT_S)
    assert all(inside == 0 for _, inside in told)
    busiest = max(told[2 * h][0] + told[2 * h + 1][0] for h in range(3))
    assert tensors * size <= busiest <= tensors * size + 4096


def differing(path: str, hosts: list[int], odd: int, what: str) -> str:
    """One rank calls with another shape; every rank is told."""
    with communicator(path, hosts, timeout=10.0) as comm:
        count = 6 * (100 if comm.rank != odd else 200)
        try:
            getattr(comm, what)(np.ones(count, np.float32))
        except MismatchError as error:
            return str(error)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("what", ["reduce_scatter", "all_gather", "broadcast", "reduce"])
def test_a_rank_that_calls_something_else_is_named(what: str) -> None:
    with meeting_point() as path:
        told = on_ranks(TEAM, differing, path, ROWS["three of two"], 3, what, limit_s=LIMIT_S)
    heard = [words for words in told if words]  # who only gives in a broadcast, or a reduce, may be through by then
    assert all("rank 3" in words for words in heard), told
    assert all(told[2:4]), "the host of the odd one hears of it"
    assert len(heard) == len(told) or what in ("broadcast", "reduce"), told
