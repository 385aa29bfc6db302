from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from ringside.bench import result as table
from ringside.bench.result import BenchResult, merge

from .reports import PLAN, SIZE, report


@pytest.fixture
def result() -> BenchResult:
    return merge(PLAN, 2, [report(0.0), report(2e-6)])


def test_an_iteration_takes_what_the_slowest_rank_takes_and_rounds_their_median(result: BenchResult):
    first = result.rows[0]
    assert first.rounds_s == pytest.approx((2e-6, 3e-6, 9e-6))
    assert first.time_s == pytest.approx(3e-6)
    assert first.algbw == pytest.approx(1024 / 3e-6)
    assert first.busbw(2) == pytest.approx(1024 / 3e-6)
    assert first.busbw(4) == pytest.approx(1.5 * 1024 / 3e-6)


def test_ratios_are_the_peers_time_over_ours(result: BenchResult):
    assert result.ratio(result.rows[0], "gloo") == pytest.approx(200 / 3)
    assert result.ratio(result.rows[0], "mpi") is None
    data = result.to_json()["rows"]
    assert data[0]["ratios"] == {"gloo": pytest.approx(200 / 3)}
    assert data[2]["ratios"] == {}


def test_the_share_of_the_streaming_limit_is_for_symmetric_tensors_beyond_the_cache(result: BenchResult):
    assert result.limit == pytest.approx(4 * 1000 * 2 / 2e-6)
    shares = [row.limit_share for row in result.rows]
    assert [share is not None for share in shares] == [False, False, False, True, False, False]
    assert shares[3] == pytest.approx(2 * 2 * SIZE / 0.004 / 4e9)


def test_wrong_elements_of_all_ranks_are_added_and_come_first():
    result = merge(PLAN, 2, [report(0.0, wrong=3), report(0.0, wrong=4)])
    assert result.wrong == result.to_json()["wrong"] == 7
    assert table.verdict(result)[0] == "WRONG RESULTS in 1 of 6 rows, first: ringside symm, 1 KiB, warm: 7 elements"


def test_the_verdict_names_the_ratios(result: BenchResult):
    head, small, large = table.verdict(result)
    assert head == "2 ranks on 2 cores, float32 sum, in place"
    assert small.strip() == "1 KiB: 3.00 µs, 66.7x Gloo"
    assert large.strip().startswith("64 MiB: 4.00 ms, 10.0x Gloo, ")
    assert large.endswith("% of the streaming limit")


def test_of_one_rank_is_said_that_it_exchanges_nothing(result: BenchResult):
    alone = dataclasses.replace(result, plan=replace(PLAN, ranks=1))
    assert table.verdict(alone)[:2] == [
        "1 rank on 2 cores, float32 sum, in place",
        "  one rank exchanges nothing: what is timed is the call",
    ]


def test_the_report_fits_a_terminal_and_a_wide_one_has_all_of_nccl_tests_columns(result: BenchResult):
    narrow, wide = table.render(result, 80), table.render(result, 120)
    assert max(map(len, narrow.splitlines())) <= 80
    assert "redop" not in narrow
    assert all(word in wide for word in ("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"))
    assert "Open MPI skipped: sum of float32: not today" in narrow
