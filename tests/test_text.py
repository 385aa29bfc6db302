"""Numbers, sizes and ranks in words, and sizes as people write them."""

from __future__ import annotations

import pytest

from ringside.errors import UsageError
from ringside.text import (
    did_you_mean,
    digits,
    duration,
    name_ranks,
    name_vertices,
    parse_ranks_per_host,
    parse_size,
    percent,
    rank_list,
    rank_time,
    rate,
    signed_percent,
    size,
    size_bytes,
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


def test_a_name_that_is_nearly_right_is_met_with_the_right_one() -> None:
    presets = ["dgx-a100", "dgx-h100", "dgx-h200", "p5"]
    assert [did_you_mean(name, presets) for name in ("dgx-h10", "h100", "100", "p", "nothing", "")] == [
        " (did you mean dgx-h100?)", " (did you mean dgx-h100?)", "", " (did you mean p5?)", "", "",
    ]  # fmt: skip


def test_ranks_per_host_are_a_number_or_a_list() -> None:
    assert (parse_ranks_per_host("8"), parse_ranks_per_host("3,2,4")) == (8, [3, 2, 4])
    for text in ("", "0", "x", "3,,2", "2,-1"):
        with pytest.raises(UsageError, match="a number from 1 on, or one per host"):
            parse_ranks_per_host(text)
