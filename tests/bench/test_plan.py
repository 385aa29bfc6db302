from __future__ import annotations

import pytest

from ringside.bench.plan import (
    MAX_BUFFERS,
    ROTATION,
    Plan,
    format_size,
    parse_size,
    sizes_between,
    stride_of,
    whole_items,
)
from ringside.errors import UsageError

CACHE = 1 << 20


def plan(*sizes: int, ranks: int = 2) -> Plan:
    return Plan(key="test", ranks=ranks, sizes_bytes=sizes, cache_bytes=CACHE)


@pytest.mark.parametrize(
    ("text", "size"), [("4", 4), ("1K", 1024), ("2m", 2 << 20), ("1GiB", 1 << 30), ("64KB", 65536)]
)
def test_sizes_are_read_as_nccl_tests_writes_them(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "1.5M", "-4", "0", "1T", "big"])
def test_other_sizes_are_refused(text: str):
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


def test_sizes_are_printed_with_a_unit():
    assert [format_size(n) for n in (4, 1024, 1 << 20, 3 << 29)] == ["4 B", "1 KB", "1 MB", "1.5 GB"]


def test_a_range_of_sizes():
    assert sizes_between(4, 1024, 4) == [4, 16, 64, 256, 1024]
    assert sizes_between(4, 1000, 4)[-1] == 256
    with pytest.raises(UsageError, match="--step-factor 1"):
        sizes_between(4, 8, 1)
    with pytest.raises(UsageError, match="more than"):
        sizes_between(8, 4, 2)


def test_sizes_are_whole_items_each_once():
    assert whole_items([1, 4, 12, 17], "float64") == (8, 16)


def test_cold_buffers_leave_the_cache_and_large_tensors_have_one_case():
    cases = plan(4, 4096, CACHE).states(4096)
    assert [state for state, _ in cases] == ["warm", "cold"]
    assert cases[1][1] * 4096 * 2 >= ROTATION * CACHE
    assert plan(CACHE).states(CACHE) == [("any", 1)]


def test_sizes_that_cannot_fill_the_cache_are_measured_warm_only():
    asked = Plan(key="test", ranks=2, sizes_bytes=(4,), cache_bytes=64 * MAX_BUFFERS * 2)
    assert asked.states(4) == [("warm", 1)]


def test_pools_hold_every_case():
    asked = plan(4, 4096, CACHE, ranks=3)
    for size in asked.sizes_bytes:
        for _, buffers in asked.states(size):
            assert buffers * stride_of(size) <= asked.pool_bytes
    assert asked.needed_bytes > 3 * 2 * asked.pool_bytes
