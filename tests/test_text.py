"""Numbers, sizes and ranks in words, and sizes as people write them."""

from __future__ import annotations

import pytest

from ringside.errors import UsageError
from ringside.text import (
    clock,
    counted,
    did_you_mean,
    digits,
    duration,
    figure,
    first_line,
    giga,
    moment,
    name_ranks,
    name_vertices,
    parse_ranks_per_host,
    parse_size,
    percent,
    rank_list,
    rank_time,
    rate,
    ratio,
    signed_percent,
    size,
    size_bytes,
    sparkline,
    title,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0), ("1048576", 1 << 20), (" 7b ", 7), ("1k", 1 << 10), ("16M", 1 << 24), ("2 GiB", 1 << 31),
        ("1Ti", 1 << 40), ("1p", 1 << 50), ("1KB", 10**3), ("3mb", 3 * 10**6), ("1GB", 10**9), ("2.5TB", 2.5e12),
        (".5PB", 5e14), ("1.5e9", 1.5e9), ("1e+3k", 1024e3),
    ],
)  # fmt: skip
def test_a_size_is_read(text: str, size: float) -> None:
    assert parse_size(text) == size
    assert size == 0 or size_bytes(text, "--size") == size


def test_nccl_tests_mean_powers_of_two() -> None:
    assert parse_size("16MB", binary=True) == parse_size("16M", binary=True) == parse_size("16MiB") == 1 << 24
    assert parse_size("16b", binary=True) == 16


@pytest.mark.parametrize("text", ["", "M", "1 X", "-1", "1e-3", "1e400", "1..5", "1 2", "0x10", "nan", "1Bi"])
def test_what_is_no_size_is_refused(text: str) -> None:
    assert parse_size(text) is None
    with pytest.raises(UsageError, match=r"^--size .*: a size such as 1GB"):
        size_bytes(text, "--size")


def test_nothing_is_no_size_to_work_with() -> None:
    with pytest.raises(UsageError, match=r"^--size 0: more than 0 bytes$"):
        size_bytes("0", "--size")


def test_times_and_ratios_in_words() -> None:
    assert [duration(s) for s in (0.0123, 1.2, 7_200, 3e-6, 0, None, float("nan"))] == [
        "12.3 ms", "1.20 s", "2.00 h", "3.00 µs", "0 s", "–", "–",
    ]  # fmt: skip
    assert rank_time(10.2 * 86_400) == "10.2 rank-days"
    assert rank_time(0.5) == "0.500 rank-seconds"
    assert [percent(x) for x in (0.0994, 0.0996, 1.5, -0.2, None)] == ["9.9%", "10%", "150%", "−20%", "–"]
    assert (signed_percent(0.00049), signed_percent(-0.00049), signed_percent(0.0006)) == ("0.0%", "0.0%", "+0.1%")
    assert (percent(0.1234, 2), signed_percent(-0.0321), signed_percent(None)) == ("12.34%", "−3.2%", "–")
    assert [digits(x) for x in (99.96, 0.0, 1234.0, -2.5)] == ["100", "0", "1230", "-2.50"]


def test_a_unit_begins_where_it_is_whole() -> None:
    """The last figure of one unit, then the first of the next."""
    assert [duration(s) for s in (1e-6, 0.999e-6, 1e-3, 1.0, 0.999, 60.0, 59.9, 3_600.0, 3_599.0, 86_400.0, -0.5)] == [
        "1.00 µs", "999 ns", "1.00 ms", "1.00 s", "999 ms", "1.00 min", "59.9 s", "1.00 h", "60.0 min", "1.00 d",
        "-500 ms",
    ]  # fmt: skip
    assert [rank_time(s) for s in (3_599.0, 3_600.0, 86_399.0, 86_400.0)] == [
        "3600 rank-seconds", "1.00 rank-hours", "24.0 rank-hours", "1.00 rank-days",
    ]  # fmt: skip
    assert [size(n) for n in (1, 999, 1_000, 1e6, 1e9, 1e12)] == ["1 B", "999 B", "1 kB", "1 MB", "1 GB", "1 TB"]
    assert [size(2.0**n, binary=True) for n in (0, 20, 30, 40)] == ["1 B", "1 MiB", "1 GiB", "1 TiB"]
    assert [digits(x) for x in (0.001234, 0.01234, 1.0, 9.996, 12.34, 123.4, float("inf"))] == [
        "0.001", "0.012", "1.00", "10.0", "12.3", "123", "–",
    ]  # fmt: skip
    assert (giga(27.64e9), ratio(1.416), ratio(None), ratio(float("inf"))) == ("27.6", "1.42 ×", "–", "–")
    assert (percent(0.0), percent(-0.0996), percent(float("nan")), rate(float("inf"))) == ("0.0%", "−10%", "–", "–")


def test_times_of_a_clock() -> None:
    assert [clock(s) for s in (0, 59.9, 60, 61, 3_725)] == ["00:00", "00:59", "01:00", "01:01", "62:05"]
    assert (moment(0), moment(1_700_000_000.0)) == ("1970-01-01 00:00 UTC", "2023-11-14 22:13 UTC")
    assert (moment(1e30), moment(float("nan"))) == ("", "")


def test_a_series_is_a_line_of_blocks() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 6, 8, 3, 4], 3) == "▁█▅", "means of 0, 7 and 3.5: the lowest, the highest, half way"
    assert (sparkline([5, 5, 5], 9), sparkline([0.5, 1.0], 1)) == ("▁▁▁", "▁"), "never more blocks than samples"
    assert (sparkline([], 4), sparkline([1, 2], 0), sparkline([1, 2], -1)) == ("", "", "")


def test_a_figure_has_the_unit_of_its_name() -> None:
    rows = [
        ("step_seconds", 0.25, "step", "250 ms"), ("wait_s", 2.0, "wait", "2.00 s"),
        ("p_seconds_p99", 1.0, "p seconds p99", "1.00 s"),
        ("lost_ratio", 0.5, "lost", "50.0%"), ("wire_share", 0.123, "wire share", "12.3%"),
        ("price_rank_hours", 1.5, "price", "1.50 rank-hours"), ("out_bytes_per_second", 1e9, "out", "1 GB/s"),
        ("payload_bytes", 1500, "payload bytes", "1.50 kB"), ("bytes_each", 12, "bytes each", "12 B"),
        ("clock_mhz", 1410, "clock", "1410 MHz"), ("gpu_celsius", 61.5, "gpu", "61.5 °C"),
        ("power_watts", 300, "power", "300 W"),
        ("quota_cpus", 2.5, "quota", "2.50 CPUs"), ("collective_seq_id", 12345, "collective seq id", "12345"),
        ("host", "node-1", "host", "node-1"), ("known_seconds", True, "known", "True"), ("loss", None, "loss", "–"),
    ]  # fmt: skip
    assert [(title(name), figure(name, value)) for name, value, _, _ in rows] == [(t, f) for _, _, t, f in rows]


def test_counts_and_first_lines() -> None:
    assert [counted(n, "call") for n in (0, 1, 2, 12_345)] == ["0 calls", "1 call", "2 calls", "12,345 calls"]
    assert (counted(1, "entry", "entries"), counted(2, "entry", "entries")) == ("1 entry", "2 entries")
    assert (first_line("\n  what \nmore"), first_line(""), first_line("12345", 5)) == ("what", "", "12345")
    assert first_line("123456", 5) == "1234…"


def test_a_megabyte_is_decimal_and_a_mebibyte_is_not() -> None:
    assert [size(n) for n in (0, 12, 1500, 3_461_120, 2e12, None)] == [
        "0 B",
        "12 B",
        "1.50 kB",
        "3.46 MB",
        "2 TB",
        "–",
    ]
    assert [size(n, binary=True) for n in (1023, 1 << 10, (1 << 20) - 1, 1 << 20, 3 << 29)] == [
        "1023 B", "1 KiB", "1020 KiB", "1 MiB", "1.50 GiB",
    ]  # fmt: skip
    assert (rate(27.6e9), rate(None)) == ("27.6 GB/s", "–")


def test_ranks_in_words() -> None:
    assert rank_list([]) == name_ranks([]) == ""
    assert rank_list([3, 1, 2, 9, 11, 12]) == "1-3, 9, 11, 12"
    assert [name_ranks(ranks) for ranks in ([4], (3, 0), [0, 1, 2, 7])] == [
        "rank 4",
        "ranks 0 and 3",
        "ranks 0-2 and 7",
    ]
    assert name_ranks([0, 1, 2], "channel") == "channels 0-2"
    assert name_vertices([8, 0, 2, 1], 8) == "ranks 0-2 and switch 8"
    assert (name_vertices([9, 8], 8), name_vertices([7], 8)) == ("switches 8 and 9", "rank 7")


def test_a_name_that_is_nearly_right_is_met_with_the_right_one() -> None:
    presets = ["dgx-a100", "dgx-h100", "dgx-h200", "p5"]
    assert [did_you_mean(name, presets) for name in ("dgx-h10", "h100", "100", "p", "nothing", "")] == [
        " (did you mean dgx-h100?)", " (did you mean dgx-h100?)", "", " (did you mean p5?)", "", "",
    ]  # fmt: skip


def test_ranks_per_host_are_a_number_or_a_list() -> None:
    assert (parse_ranks_per_host("1"), parse_ranks_per_host("8"), parse_ranks_per_host("3,2,1")) == (1, 8, [3, 2, 1])
    for text in ("", "0", "x", "3,,2", "2,-1"):
        with pytest.raises(UsageError, match="a number from 1 on, or one per host"):
            parse_ranks_per_host(text)
