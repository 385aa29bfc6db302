"""The benchmark's report, whole: every figure, every column, what comes first and what is said of the rest."""

from __future__ import annotations

import pytest

from ringside.bench import result as table
from ringside.bench.messages import Done, Limit, Message, Sample, Skipped
from ringside.bench.plan import BenchPlan
from ringside.bench.result import BenchResult, merge

PLAN = BenchPlan(
    key="test", ranks=4, sizes_bytes=(1 << 20, 3 << 20), dtype="float64", op="max", algorithms=("ring", "auto"),
    peers=("gloo", "mpi"), cache_bytes=4 << 20,
)  # fmt: skip


def rows(engine: str, algorithm: str, tensor: str, small_us: float, large_us: float, wrong: int = 0) -> list[Message]:
    sizes = ((1 << 20, "warm", 1, small_us), (1 << 20, "cold", 3, 2 * small_us), (3 << 20, "any", 1, large_us))
    return [
        Sample(
            engine, algorithm, tensor, cache, size, buffers, 7, (9.0, us * 1e-6, us * 1e-6), wrong, "numpy", 2e-6, 3e-6
        )
        for size, cache, buffers, us in sizes
    ]


def report(wrong: int = 0) -> list[Message]:
    return [
        Limit(1 << 20, (1e-3, 2e-3)),
        *rows("ringside", "ring", "symmetric", 400.0, 2000.0),
        *rows("ringside", "ring", "private", 500.0, 3000.0, wrong),
        *rows("ringside", "auto", "symmetric", 100.0, 1000.0),
        *rows("ringside", "auto", "private", 200.0, 1500.0),
        *rows("gloo", "auto", "private", 3980.0, 19_899.0),
        *rows("mpi", "auto", "private", 39_799.0, 199_000.0),
        Limit(1 << 20, (2e-3, 4e-3)),
        Done(),
    ]


def result(wrong: int = 0) -> BenchResult:
    skipped = [Skipped("mpi", "not on Sundays")]
    return merge(PLAN, 2, [[report(wrong), report(), report(wrong), report()]], skipped)


PAGE = """\
WRONG RESULTS in 3 of 18 rows, first: ringside priv ring, 1 MiB, warm: 10 elements
4 ranks on 2 cores, float64 max, in place
     1 MiB: 400 µs, 10.0x Gloo, 99.5x Open MPI

algorithm ring
              symmetric                              private
  size cache   time(us)     x Gloo x Open MPI  limit   time(us)     x Gloo x Open MPI
  1MiB  warm     400.00      10.0x      99.5x            500.00      7.96x      79.6x
  1MiB  cold     800.00      10.0x      99.5x           1000.00      7.96x      79.6x
  3MiB   any    2000.00      9.95x      99.5x           3000.00      6.63x      66.3x

#      size     count     type redop root engine             cache       time   algbw   busbw #wrong
#       (B)   (elems)                                                    (us)  (GB/s)  (GB/s)
    1048576    131072  float64   max   -1 ringside symm ring  warm     400.00    2.62    3.93      0
    1048576    131072  float64   max   -1 ringside symm ring  cold     800.00    1.31    1.97      0
    3145728    393216  float64   max   -1 ringside symm ring   any    2000.00    1.57    2.36      0
    1048576    131072  float64   max   -1 ringside priv ring  warm     500.00    2.10    3.15     10
    1048576    131072  float64   max   -1 ringside priv ring  cold    1000.00    1.05    1.57     10
    3145728    393216  float64   max   -1 ringside priv ring   any    3000.00    1.05    1.57     10
    1048576    131072  float64   max   -1 ringside symm       warm     100.00   10.49   15.73      0
    1048576    131072  float64   max   -1 ringside symm       cold     200.00    5.24    7.86      0
    3145728    393216  float64   max   -1 ringside symm        any    1000.00    3.15    4.72      0
    1048576    131072  float64   max   -1 ringside priv       warm     200.00    5.24    7.86      0
    1048576    131072  float64   max   -1 ringside priv       cold     400.00    2.62    3.93      0
    3145728    393216  float64   max   -1 ringside priv        any    1500.00    2.10    3.15      0
    1048576    131072  float64   max   -1 gloo                warm    3980.00    0.26    0.40      0
    1048576    131072  float64   max   -1 gloo                cold    7960.00    0.13    0.20      0
    3145728    393216  float64   max   -1 gloo                 any   19899.00    0.16    0.24      0
    1048576    131072  float64   max   -1 mpi                 warm   39799.00    0.03    0.04      0
    1048576    131072  float64   max   -1 mpi                 cold   79598.00    0.01    0.02      0
    3145728    393216  float64   max   -1 mpi                  any     199000    0.02    0.02      0

streaming limit 8.39 GB/s: 2 reads + 2 non-temporal writes on every rank;
  limit% is the part of it that symmetric tensors larger than the cache reach
  (2n bytes move per payload byte). Last-level cache 4 MiB.
cache: warm the same buffer again; cold rotating through 8 MiB
  over all ranks; any: one tensor is that large. Tiny sizes have no cold row
  (it would take too many buffers).
x Gloo: Gloo's time over ours. Median of rounds taken in turn; an iteration is
  the mean of a round on the slowest rank.
symm: symmetric memory (comm.empty); priv: any other memory.
Open MPI skipped: not on Sundays
"""


def test_the_whole_page() -> None:
    assert table.render(result(5), table.WIDE) == PAGE.rstrip("\n")
    narrow = table.render(result(5), table.WIDE - 1)
    assert len(narrow.splitlines()) == len(PAGE.splitlines())
    assert "redop" not in narrow


def test_the_page_as_data() -> None:
    data = result(5).to_json()
    row = data.pop("rows")[3]
    assert data == {
        "schema": 1, "ranks": 4, "cores": 2, "collective": "all_reduce", "cache_bytes": 4 << 20, "peers": [],
        "stream_limit_bytes_per_second": 4 * 4 * 2**20 / 2e-3,
        "skipped": [{"peer": "mpi", "reason": "not on Sundays"}], "wrong": 30,
    }  # fmt: skip
    assert row == {
        "size_bytes": 1 << 20, "count": 1 << 17, "type": "float64", "redop": "max", "root": -1, "engine": "ringside",
        "algorithm": "ring", "tensor": "private", "array": "numpy", "cache": "warm", "buffers": 1,
        "iterations": 7, "time_seconds": 5e-4,
        "rounds_seconds": [9.0, 5e-4, 5e-4], "call_median_seconds": 2e-6, "call_p99_seconds": 3e-6,
        "algbw_bytes_per_second": 2**20 / 5e-4,
        "busbw_bytes_per_second": pytest.approx(1.5 * 2**20 / 5e-4), "wrong": 10,
        "ratios": {"gloo": pytest.approx(7.96), "mpi": pytest.approx(79.598)}, "limit_share": None,
    }  # fmt: skip
    shares = {(row["engine"], row["algorithm"], row["tensor"], row["cache"]): row["limit_share"]
              for row in result().to_json()["rows"]}  # fmt: skip
    assert {key for key, share in shares.items() if share is not None} == {("ringside", "auto", "symmetric", "any")}
    share = 2 * 4 * (3 << 20) / 1e-3 / (4 * 4 * 2**20 / 2e-3)
    assert shares["ringside", "auto", "symmetric", "any"] == pytest.approx(share)


def test_ratios_have_three_digits() -> None:
    plan = BenchPlan(key="test", ranks=2, sizes_bytes=(8,), peers=("gloo",))
    said = []
    for ratio in (0.5, 9.949, 9.95001, 10.0, 99.49, 99.5, 1234.4):
        report: list[Message] = [Limit(8, (1.0,)), Sample("gloo", "auto", "private", "warm", 8, 1, 1, (ratio,), 0)]
        report += [
            Sample("ringside", "auto", tensor, "warm", 8, 1, 1, (1.0,), 0) for tensor in ("symmetric", "private")
        ]
        said.append(table.verdict(merge(plan, 2, [[report] * 2]))[1])
    assert [line.split()[-2] for line in said] == ["0.50x", "9.95x", "10.0x", "10.0x", "99.5x", "100x", "1234x"]


def test_where_no_size_is_a_landmark_the_first_and_the_last_are_told() -> None:
    plan = BenchPlan(key="test", ranks=2, sizes_bytes=(8, 16, 32))
    reports: list[list[Message]] = [
        [Limit(8, (1.0,)), *(Sample("ringside", "auto", tensor, "warm", size, 1, 1, (size * 1e-4,), 0)
                             for size in plan.sizes_bytes for tensor in ("symmetric", "private"))]
        for _ in range(2)
    ]  # fmt: skip
    assert table.verdict(merge(plan, 2, [reports]))[1:] == ["       8 B: 800 µs", "      32 B: 3.20 ms"]
