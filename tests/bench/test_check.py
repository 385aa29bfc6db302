from __future__ import annotations

import numpy as np
import pytest

from ringside.bench.plan import ITEM_BYTES
from ringside.bench.worker import PERIOD, count_wrong, expected, fill, to_storage, whole_numbers

LENGTH = 3 * PERIOD + 17


def reduced(ranks: int, dtype: str) -> np.ndarray:
    """What a right all-reduce (sum) leaves, folded here one rank after the other."""
    array = np.zeros(LENGTH, dtype)
    for rank in range(ranks):
        own = np.empty(LENGTH, dtype)
        fill(own, to_storage(whole_numbers(rank, ranks, dtype, "sum"), dtype))
        array += own
    return array


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int64"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_right_result_has_nothing_wrong(dtype: str, ranks: int):
    assert count_wrong(reduced(ranks, dtype), expected(ranks, dtype, "sum")) == 0


def test_every_wrong_element_is_counted():
    array, right = reduced(2, "float32"), expected(2, "float32", "sum")
    array[[0, 5, PERIOD, 2 * PERIOD + 3, LENGTH - 1]] += 1
    assert count_wrong(array, right) == 5
    array[7] = np.nan
    assert count_wrong(array, right) == 6


def test_a_missing_rank_makes_every_element_wrong():
    array = reduced(3, "float32")
    own = np.empty(LENGTH, "float32")
    fill(own, to_storage(whole_numbers(1, 3, "float32", "sum"), "float32"))
    assert count_wrong(array - own, expected(3, "float32", "sum")) == LENGTH


@pytest.mark.parametrize("shift", [1, 16, 4096, 65536])
def test_an_element_from_a_wrong_place_is_seen(shift: int):
    array = np.roll(reduced(2, "float32"), shift)
    assert count_wrong(array, expected(2, "float32", "sum")) > 0.8 * LENGTH


def test_ranks_differ_from_each_other():
    a, b = (whole_numbers(rank, 2, "float32", "sum") for rank in (0, 1))
    assert np.count_nonzero(a != b) > 0.9 * PERIOD


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("op", ["sum", "avg", "prod", "min", "max"])
def test_sums_are_small_enough_to_be_exact_in_any_order(dtype: str, op: str):
    result = expected(8, dtype, op)
    assert result.shape == (PERIOD,)
    if dtype != "bfloat16":
        assert np.isfinite(result.astype(float)).all()
        assert result.min() >= 0 or dtype == "int8"  # products of int8 wrap


def test_bfloat16_is_rounded_to_nearest_even():
    bits = to_storage(np.array([1.0, 257.0, 259.0, -2.5]), "bfloat16").view(np.uint16)
    back = (bits.astype(np.uint32) << 16).view(np.float32)
    assert list(back) == [1.0, 256.0, 260.0, -2.5]
