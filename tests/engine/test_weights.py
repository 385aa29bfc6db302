"""Weighted means over ranks, against the twins, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support.ranks import communicator, on_ranks

from ringside._core import numpy_kernels as twins
from ringside.engine.dtypes import FLOATING
from ringside.errors import MismatchError, UnsupportedError, UsageError
from ringside.schedule import by_name, run

from .oracle import as_argument, difference, digest, elements

pytestmark = pytest.mark.native


def samples(size: int) -> list[float]:
    """Unequal weights: a zero, a fraction, and numbers of samples."""
    return [(0.0, 0.25, 3.0, 1000.0, 7.0, 1.0, 12.0, 5.0)[(rank + 2) % 8] for rank in range(size)]


def expected(inputs: list[np.ndarray], dtype: str, weights: list[float], algorithm: str | None) -> np.ndarray:
    if len(inputs) == 1:
        return inputs[0]
    if algorithm != "ring":
        return twins.fold(inputs, dtype, "avg", scales=weights, divisor=sum(weights))
    with np.errstate(all="ignore"):
        wide = np.stack([twins.widen(x, dtype) for x in inputs])
        wide = wide * np.array(weights, wide.dtype)[:, None]
        total = run(by_name("ring", len(inputs)), wide)[0]
        return twins.narrow(total / total.dtype.type(sum(weights)), dtype)


def means(way: bool) -> list[int]:
    """Return a digest of every result, which is the same on all ranks: one of them, in turn, asks the oracle."""
    digests = []
    with communicator(segment_bytes=4096) as comm:
        weights = samples(comm.size)
        memory = comm.empty(1 << 16, np.uint8)
        for dtype in sorted(FLOATING):
            for count in (0, 1, 7, 1001, 6007):
                for algorithm in (None, "one_shot", "direct", "ring"):
                    for mapped in (False, True):
                        for given in (weights, weights[comm.rank]):
                            x = mine = elements(dtype, count, comm.rank)
                            if mapped:
                                x = memory[: x.nbytes].view(x.dtype)
                                x[:] = mine
                            y = as_argument(x, dtype)
                            z = comm.all_reduce(y, "avg", way, algorithm=algorithm, weights=given)
                            assert (z.result() if way else z) is y
                            if comm.rank == len(digests) % comm.size:
                                inputs = [elements(dtype, count, rank) for rank in range(comm.size)]
                                wrong = difference(x, expected(inputs, dtype, weights, algorithm), dtype)
                                assert not wrong, (dtype, count, algorithm, mapped, wrong)
                            digests.append(digest(x))
    return digests


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_a_weighted_mean_is_that_of_the_twin_on_all_ranks(size: int) -> None:
    digests = on_ranks(size, means, size == 3)
    assert all(d == digests[0] for d in digests), "ranks hold different bits"


def equal_weights() -> None:
    with communicator() as comm:
        for dtype in ("float32", "float64", "float16"):
            for count in (5, 40_000):
                x = elements(dtype, count, comm.rank)
                y = x.copy()
                comm.all_reduce(x, "avg")
                comm.all_reduce(y, "avg", weights=1)
                assert not difference(x, y, dtype)
        per_sample = np.arange(4.0 * comm.size).reshape(4, comm.size)  # rank r has r + 1 samples of 4 numbers
        mine = per_sample[:, : comm.rank + 1].mean(axis=1)
        comm.all_reduce(mine, "avg", weights=comm.rank + 1)
        every = np.concatenate([per_sample[:, : rank + 1] for rank in range(comm.size)], axis=1)
        np.testing.assert_allclose(mine, every.mean(axis=1))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_equal_weights_give_the_average_and_samples_the_mean_of_all(size: int) -> None:
    on_ranks(size, equal_weights)


def refusals() -> None:
    with communicator() as comm:
        x = np.ones(5, np.float32)
        n = comm.size
        wrong: list[tuple[Any, str]] = [
            (-1.0, "not negative"),
            (float("nan"), "finite"),
            (float("inf"), "finite"),
            ([1.0] * (n + 1), f"{n} of them"),
            ([[1.0] * n], f"{n} of them"),
            ("heavy", "one number per rank"),
            ([0.0] * n, "sum to 0"),
        ]
        for weights, words in wrong:
            with pytest.raises(UsageError, match=words):
                comm.all_reduce(x, "avg", weights=weights)
        for op in ("sum", "max"):
            with pytest.raises(UsageError, match="weights= is for op='avg'"):
                comm.all_reduce(x, op, weights=1)
        with pytest.raises(UsageError, match="without a scale"):
            comm.all_reduce(x, "avg", weights=1, scale=0.5)
        with pytest.raises(UnsupportedError, match="avg of int32"):
            comm.all_reduce(x.astype(np.int32), "avg", weights=1)
        assert (x == 1).all()
        comm.barrier()


@pytest.mark.parametrize("size", [1, 3])
def test_what_cannot_be_is_refused_before_anything_is_sent(size: int) -> None:
    on_ranks(size, refusals)


def no_weight() -> None:
    with communicator(segment_bytes=4096) as comm:
        for count, algorithm in ((3, None), (9000, None), (9000, "ring"), (90_000, "one_shot")):
            for x in (np.full(count, comm.rank, np.float32), comm.empty(count)):
                x[:] = comm.rank
                with pytest.raises(UsageError, match="weights of all ranks sum to 0"):
                    comm.all_reduce(x, "avg", weights=0.0, algorithm=algorithm)
                assert (x == comm.rank).all()
                comm.all_reduce(x, "avg", weights=float(comm.rank == 0), algorithm=algorithm)
                assert (x == 0).all()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_weight_at_all_is_an_error_on_all_ranks(size: int) -> None:
    on_ranks(size, no_weight)


def mismatch() -> list[str]:
    told = []
    with communicator() as comm:
        odd = comm.rank == 1
        for count in (3, 9000):
            x = np.full(count, comm.rank, np.float32)
            for ours, theirs in ((1.0, None), ([1.0, 2.0, 3.0], [1.0, 2.0, 4.0]), ([1.0, 2.0, 3.0], 2.0)):
                with pytest.raises(MismatchError) as caught:
                    comm.all_reduce(x, "avg", weights=theirs if odd else ours)
                assert caught.value.ranks == (1,)
                told.append(str(caught.value))
                assert (x == comm.rank).all()
    return told


def test_weights_must_be_given_alike() -> None:
    for told in on_ranks(3, mismatch):
        assert all("each rank with its own weight" in words for words in told)
