"""The collectives besides all-reduce between hosts, each rank a thread and a host of its own, against NumPy."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ringside.engine.algorithm import AlgorithmSpec
from ringside.engine.buffers import flatten
from ringside.engine.dtypes import DTYPES, OP_CODES
from ringside.engine.net.collectives import SMALL_BYTES, run_collective
from ringside.engine.net.hierarchical import HierarchicalEngine
from ringside.engine.net.reduction import Reduction
from ringside.engine.request import CoreRequest, bounds_of_one, equal_bounds
from ringside.errors import MismatchError, UnsupportedError

from .threaded import on_threads

Array = np.ndarray[Any, Any]
UNTOUCHED = 77


def given(ranks: int, count: int, dtype: str = "int32") -> list[Array]:
    return [np.random.default_rng((rank, count)).integers(0, 9, count).astype(dtype) for rank in range(ranks)]


def moved(ranks: int, kind: str, xs: list[Array], bounds: list[int], out: bool = True, **how: Any) -> list[Array]:
    """Carry out a collective on all ranks; return what each has as its result, untouched elements being 77."""
    count = bounds[-1]

    def job(engine: HierarchicalEngine) -> Array:
        x = xs[engine.rank_map.rank].copy()
        result = np.full(count, UNTOUCHED, x.dtype) if out else x
        call = CoreRequest(kind, flatten(x), count, bounds, result.ctypes.data if out else 0, **how)
        run_collective(engine, call)
        return result

    return on_threads(ranks, job)


def own(xs: list[Array], bounds: list[int]) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(bounds)]


RANKS = (2, 3, 4)
COUNTS = (1, 5, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1)  # of elements, in all


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_lanes_are_added_up_in_place_or_beside(ranks: int, count: int) -> None:
    xs = given(ranks, count)
    bounds = sorted(np.random.default_rng(count).integers(0, count + 1, ranks - 1).tolist())
    bounds = [0, *bounds, count]
    for op, total in (("sum", sum(xs)), ("max", np.max(xs, axis=0)), ("avg", np.trunc(sum(xs) / ranks))):
        code = OP_CODES[op]
        for rank, x in enumerate(moved(ranks, "reduce_scatter_", xs, bounds, out=False, op=code)):
            want = xs[rank].copy()
            want[own(xs, bounds)[rank]] = total[own(xs, bounds)[rank]]
            np.testing.assert_array_equal(x, want)
        for rank, x in enumerate(moved(ranks, "reduce_scatter", xs, bounds, op=code)):
            lane = total[own(xs, bounds)[rank]]
            np.testing.assert_array_equal(x[: len(lane)], lane)
            assert (x[len(lane) :] == UNTOUCHED).all()
    halves = [x.astype("f4") for x in xs]
    for rank, x in enumerate(moved(ranks, "reduce_scatter_", halves, bounds, out=False, scale=0.5)):
        np.testing.assert_array_equal(x[own(xs, bounds)[rank]], sum(halves)[own(xs, bounds)[rank]] / 2)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_what_each_has_comes_to_all_or_to_one(ranks: int, count: int) -> None:
    lanes, bounds = given(ranks, count), equal_bounds(count, ranks)
    everything = np.concatenate(lanes)
    for x in moved(ranks, "all_gather", lanes, bounds):
        np.testing.assert_array_equal(x, everything)
    whole = [np.full(count * ranks, UNTOUCHED, "int32") for _ in lanes]
    for x, lane, where in zip(whole, lanes, own(lanes, bounds), strict=True):
        x[where] = lane
    for x in moved(ranks, "all_gather_", whole, bounds, out=False):
        np.testing.assert_array_equal(x, everything)
    for root in range(ranks):
        for rank, x in enumerate(moved(ranks, "gather", lanes, bounds, root=root)):
            np.testing.assert_array_equal(x, everything if rank == root else UNTOUCHED)
        one = bounds_of_one(root, ranks, count)
        for x in moved(ranks, "broadcast", lanes, one, out=False, root=root):
            np.testing.assert_array_equal(x, lanes[root])


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_one_deals_out_or_all_do_or_one_gets_the_sum(ranks: int, count: int) -> None:
    xs, bounds = given(ranks, count * ranks), equal_bounds(count, ranks)
    for root in range(ranks):
        for rank, x in enumerate(moved(ranks, "scatter", xs, bounds, root=root)):
            np.testing.assert_array_equal(x[:count], xs[root][own(xs, bounds)[rank]])
            assert (x[count:] == UNTOUCHED).all()
        one = bounds_of_one(root, ranks, count * ranks)
        for op, total in (("sum", sum(xs)), ("avg", np.trunc(sum(xs) / ranks))):
            code = OP_CODES[op]
            for rank, x in enumerate(moved(ranks, "reduce", xs, one, out=False, root=root, op=code)):
                np.testing.assert_array_equal(x, total if rank == root else xs[rank])
    for rank, x in enumerate(moved(ranks, "all_to_all", xs, bounds)):
        np.testing.assert_array_equal(x, np.concatenate([peer[own(xs, bounds)[rank]] for peer in xs]))


def test_a_barrier_ends_when_all_have_come() -> None:
    come: list[int] = []

    def job(engine: HierarchicalEngine) -> int:
        come.append(engine.rank_map.rank)
        run_collective(engine, CoreRequest("barrier", flatten(np.zeros(1)), 0))
        return len(come)

    assert on_threads(4, job) == [4] * 4


def test_one_comes_after_what_is_under_way() -> None:
    """A large tensor on its way is there when the next collective is."""
    all_done = threading.Barrier(2)

    def job(engine: HierarchicalEngine) -> bool:
        large, small = np.full(200_000, engine.rank_map.rank + 1.0, "f4"), np.zeros(2, "f4")
        what = Reduction(DTYPES.index("float32"), 0)
        engine.start(large.ctypes.data, large.size, what, AlgorithmSpec("ring", "hosts"))
        small[engine.rank_map.rank] = 1
        run_collective(engine, CoreRequest("all_gather_", flatten(small), 2, [0, 1, 2]))
        there = bool((large == 3).all() and (small == 1).all())
        all_done.wait(20.0)  # who leaves early takes with it what others have not taken yet
        engine.close()
        return there

    assert on_threads(2, job) == [True, True]


@pytest.mark.parametrize("odd", [{"bounds": [0, 2, 5]}, {"root": 1}, {"tag": 5}, {"scale": 2.0}, {"op": 3}])
def test_ranks_that_call_it_differently_find_out(odd: dict[str, Any]) -> None:
    def job(engine: HierarchicalEngine) -> str:
        how: dict[str, Any] = {"bounds": [0, 3, 5]} | (odd if engine.rank_map.rank == 0 else {})
        with pytest.raises(MismatchError) as raised:
            run_collective(engine, CoreRequest("reduce_scatter_", flatten(np.zeros(5, "f4")), 5, **how))
        return str(raised.value)

    for words in on_threads(2, job):
        assert "Detected mismatch" in words


def test_scales_of_one_s_own_are_refused() -> None:
    def job(engine: HierarchicalEngine) -> None:
        with pytest.raises(UnsupportedError, match="one scale"):
            run_collective(engine, CoreRequest("reduce_scatter_", flatten(np.zeros(4)), 4, [0, 2, 4], own_scale=True))

    on_threads(2, job)
