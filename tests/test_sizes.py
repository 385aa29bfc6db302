"""Sizes as people write them."""

from __future__ import annotations

import pytest

from ringside.errors import UsageError
from ringside.text import parse_size, size_bytes


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
