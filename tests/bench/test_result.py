from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from ringside.bench import result as table
from ringside.bench.messages import Limit, Message, Sample, Skipped
from ringside.bench.result import BenchResult, merge

from .reports import PLAN, SIZE, report, sample


@pytest.fixture
def result() -> BenchResult:
    return merge(PLAN, 2, [[report(0.0), report(2e-6)]])


def test_an_iteration_takes_what_the_slowest_rank_takes_and_rounds_their_median(result: BenchResult):
    first = result.rows[0]
    assert first.rounds_s == pytest.approx((2e-6, 3e-6, 9e-6))
    assert first.time_s == pytest.approx(3e-6)
    assert first.algbw == pytest.approx(1024 / 3e-6)
    assert first.busbw(PLAN) == pytest.approx(1024 / 3e-6)
    assert first.busbw(replace(PLAN, ranks=4)) == pytest.approx(1.5 * 1024 / 3e-6)


@pytest.mark.parametrize(
    ("collective", "factor", "root"),
    [
        ("all_gather", 0.75, -1), ("reduce_scatter", 0.75, -1), ("all_to_all", 0.75, -1), ("broadcast", 1.0, 0),
        ("reduce", 1.0, 0), ("ddp", 1.5, -1), ("fsdp2", 3 * 0.75, -1), ("tensor_parallel", 4 * 1.5, -1),
    ],
)  # fmt: skip
def test_the_bus_carries_what_nccl_tests_says_of_each_collective(collective: str, factor: float, root: int):
    found = merge(replace(PLAN, collective=collective, ranks=4), 4, [[report(0.0)] * 4])
    row = found.to_json()["rows"][0]
    assert row["busbw_bytes_per_second"] == pytest.approx(factor * row["algbw_bytes_per_second"])
    assert row["root"] == root
    assert table.rows(found, 100)[2].split()[4] == str(root)


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
    result = merge(PLAN, 2, [[report(0.0, wrong=3), report(0.0, wrong=4)]])
    assert result.wrong == result.to_json()["wrong"] == 7
    assert table.verdict(result)[0] == "WRONG RESULTS in 1 of 6 rows, first: ringside symm, 1 KiB, warm: 7 elements"


def test_the_verdict_names_the_ratios(result: BenchResult):
    head, small, large = table.verdict(result)
    assert head == "2 ranks on 2 cores, float32 sum, in place"
    assert small.strip() == "1 KiB: 3.00 µs, 66.7x Gloo"
    assert large.strip().startswith("64 MiB: 4.00 ms, 10.0x Gloo, ")
    assert large.endswith("% of the streaming limit")


def of_sizes(*sizes: int, ours_s: float = 1e-3, gloo_s: float = 2e-3) -> BenchResult:
    """What two ranks found on tensors of some sizes, each warm and cold."""
    each: list[Message] = [Limit(1000, (1e-6,))]
    for size in sizes:
        for cache, times in (("warm", 1), ("cold", 3)):
            each += [sample("ringside", tensor, size, (ours_s,), cache) for tensor in ("symmetric", "private")]
            each.append(sample("gloo", "private", size, (times * gloo_s,), cache))
    return merge(replace(PLAN, sizes_bytes=sizes, peers=("gloo",)), 2, [[each, each]])


def test_the_verdict_tells_of_round_sizes_or_else_of_the_smallest_and_the_largest():
    def told(*sizes: int) -> list[str]:
        return [line.partition(":")[0].strip() for line in table.verdict(of_sizes(*sizes))[1:]]

    round_ones = ["4 B", "1 KiB", "1 MiB", "64 MiB", "256 MiB"]
    assert told(4, 8, 1 << 10, 1 << 11, 1 << 20, 1 << 21, 1 << 26, 1 << 27, 1 << 28, 1 << 29) == round_ones
    assert told(8, 16, 32, 128) == ["8 B", "128 B"]
    assert told(8, 16) == ["8 B", "16 B"]
    assert told(8) == ["8 B"]


def test_a_ratio_is_of_the_same_cache_state_and_shown_with_three_digits():
    for ours_s, gloo_s, shown in (
        (1.0, 1.0, "1.00x"), (1.0, 9.94, "9.94x"), (1.0, 9.96, "10.0x"), (2.0, 198.8, "99.4x"), (2.0, 199.0, "100x"),
    ):  # fmt: skip
        found = of_sizes(8, ours_s=ours_s, gloo_s=gloo_s)
        assert table.verdict(found)[1].endswith(f", {shown} Gloo")
        warm, cold = found.rows[0], found.rows[3]
        assert found.ratio(cold, "gloo") == pytest.approx(3 * gloo_s / ours_s)
        assert found.ratio(warm, "gloo") == pytest.approx(gloo_s / ours_s)
    for seconds, shown in ((0.09999, " 99990.00 "), (0.1, "    100000 ")):
        assert shown in table.rows(of_sizes(8, ours_s=seconds))[2]


def test_an_algorithm_that_was_asked_for_is_named_and_only_direct_has_a_share_of_the_limit(result: BenchResult):
    for algorithm, has_share in (("ring", False), ("direct", True)):
        reports = [
            [replace(m, algorithm=algorithm) if isinstance(m, Sample) and m.engine == "ringside" else m for m in one]
            for one in (report(0.0), report(0.0))
        ]
        found = merge(replace(PLAN, algorithms=(algorithm,)), 2, [reports])
        assert table.ratios(found)[0] == f"algorithm {algorithm}"
        assert f" ringside symm {algorithm} " in table.rows(found)[2]
        assert [row.limit_share is not None for row in found.rows] == [False] * 3 + [has_share] + [False] * 2
    assert table.ratios(result)[0].split() == ["symmetric", "private"]
    assert [line.split()[4] for line in table.ratios(result)[2:]] == ["4.00", "1678%"]  # the first has no share
    assert " ringside symm " in table.rows(result)[2]


def test_who_did_not_take_part_is_told_once_though_all_ranks_found_it():
    untried = Skipped("gloo", "no torch")
    for other in (report(0.0), report(0.0)[1:]):
        assert merge(PLAN, 2, [[report(0.0), other]], [untried]).skipped == (untried, report(0.0)[0])


def test_of_one_rank_is_said_that_it_exchanges_nothing(result: BenchResult):
    alone = dataclasses.replace(result, plan=replace(PLAN, ranks=1))
    assert table.verdict(alone)[:2] == [
        "1 rank on 2 cores, float32 sum, in place",
        "  one rank exchanges nothing: what is timed is the call",
    ]


def test_the_report_fits_a_terminal_and_a_wide_one_has_all_of_nccl_tests_columns(result: BenchResult):
    narrow, wide = table.render(result, 99), table.render(result, 100)
    assert max(map(len, narrow.splitlines())) <= 80
    assert "redop" not in narrow
    assert all(word in wide for word in ("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"))
    assert "Open MPI skipped: sum of float32: not today" in narrow
