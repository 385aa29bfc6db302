from __future__ import annotations

import msgspec
import pytest

from ringside.bench import plan as plans
from ringside.bench.plan import (
    ITEM_BYTES,
    MAX_BUFFERS,
    ROTATION,
    BenchPlan,
    dtype_named,
    parse_size,
    sizes_between,
    storage_dtype,
    stride_of,
    whole_items,
)
from ringside.errors import UsageError

CACHE = 1 << 20


def plan(*sizes: int, ranks: int = 2) -> BenchPlan:
    return BenchPlan(key="test", ranks=ranks, sizes_bytes=sizes, cache_bytes=CACHE)


@pytest.mark.parametrize(
    ("text", "size"), [("4", 4), ("1K", 1024), ("2m", 2 << 20), ("1GiB", 1 << 30), ("64KB", 65536)]
)
def test_sizes_are_read_as_nccl_tests_writes_them(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "1.5M", "-4", "0", "1T", "big"])
def test_other_sizes_are_refused(text: str):
    with pytest.raises(UsageError, match="is not a size"):
        parse_size(text)


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
    asked = BenchPlan(key="test", ranks=2, sizes_bytes=(4,), cache_bytes=64 * MAX_BUFFERS * 2)
    assert asked.states(4) == [("warm", 1)]


def test_pools_hold_every_case():
    asked = plan(4, 4096, CACHE, ranks=3)
    for size in asked.sizes_bytes:
        for _, buffers in asked.states(size):
            assert buffers * stride_of(size) <= asked.pool_bytes
    assert asked.needed_bytes > 3 * 2 * asked.pool_bytes


def test_what_a_plan_takes_is_counted_to_the_byte():
    asked = plan(4, 4096, CACHE, ranks=3)
    assert [asked.states(size) for size in asked.sizes_bytes] == [
        [("warm", 1), ("cold", 10923)],
        [("warm", 1), ("cold", 171)],
        [("any", 1)],
    ]
    assert asked.pool_bytes == CACHE
    assert plan(4, 4096, ranks=3).pool_bytes == 171 * 4096
    assert asked.limit_bytes == 4 << 20
    assert BenchPlan(key="test", ranks=3, sizes_bytes=(4,)).limit_bytes == (64 << 20) // 3 // 4096 * 4096
    each = 2 * CACHE + (100 << 20) + 4 * (4 << 20)
    assert asked.needed_bytes == 3 * each
    with_peers = BenchPlan(key="test", ranks=3, sizes_bytes=(4, CACHE), cache_bytes=CACHE, peers=("gloo",))
    assert with_peers.needed_bytes == 3 * (each + 2 * CACHE)


def test_a_tensor_is_cold_up_to_the_size_that_fills_the_cache_and_warm_only_where_too_many_would_be_needed():
    assert plan(CACHE - 64).states(CACHE - 64) == [("warm", 1), ("cold", 2)]
    most = BenchPlan(key="test", ranks=2, sizes_bytes=(4,), cache_bytes=64 * 65536)
    assert most.states(4) == [("warm", 1), ("cold", 65536)]
    assert msgspec.structs.replace(most, cache_bytes=64 * 65536 + 64).states(4) == [("warm", 1)]
    assert [stride_of(size) for size in (1, 64, 65)] == [64, 64, 128]


def test_what_is_asked_where_nothing_is():
    asked = BenchPlan(key="test", ranks=2, sizes_bytes=(4,))
    assert (asked.rounds, asked.iterations, asked.round_seconds, asked.cache_bytes) == (5, 0, 0.05, 32 << 20)
    assert (asked.dtype, asked.op, asked.algorithms, asked.peers) == ("float32", "sum", ("auto",), ())


def test_every_dtype_has_its_size_and_nccls_names_are_known():
    for name, item in ITEM_BYTES.items():
        assert storage_dtype(name).itemsize == item
    assert [dtype_named(name) for name in ("float", "half", "double", "int8")] == [
        "float32",
        "float16",
        "float64",
        "int8",
    ]
    with pytest.raises(UsageError, match=r"unknown dtype 'quad'; there are float32, .*, int64"):
        dtype_named("quad")


def test_ranges_may_hold_one_size_and_units_begin_where_they_do():
    assert sizes_between(8, 8, 2) == [8]
    assert sizes_between(8, 64, 2) == [8, 16, 32, 64]
    assert [parse_size(text) for text in ("1k", "3M", "2g", "5b")] == [1 << 10, 3 << 20, 2 << 30, 5]


def test_free_memory_is_the_least_of_what_the_machine_and_the_container_leave(monkeypatch, tmp_path):
    files = {"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    8 kB\n"}

    class Pretended(type(tmp_path)):
        def read_text(self):
            if str(self) not in files:
                raise OSError
            return files[str(self)]

    monkeypatch.setattr(plans, "Path", Pretended)
    assert plans.free_memory_bytes() == 8192
    files |= {"/sys/fs/cgroup/memory.max": "7000\n", "/sys/fs/cgroup/memory.current": "1000\n"}
    assert plans.free_memory_bytes() == 6000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert plans.free_memory_bytes() == 8192
    files.clear()
    assert plans.free_memory_bytes() == 1 << 62
