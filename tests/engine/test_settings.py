"""What can be set: explicit beats environment beats default, and what cannot be is refused."""

from __future__ import annotations

import math
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ringside.engine.settings import Settings, patience, timeout_seconds
from ringside.engine.topology import cache_bytes
from ringside.errors import UsageError

AGREED = ("one_shot_bytes", "segment_bytes", "message_bytes", "block_bytes")


def test_an_explicit_timeout_beats_the_environment_and_that_the_default() -> None:
    environ = {"RINGSIDE_TIMEOUT_S": "0.5"}
    assert Settings.of_environment({}) == Settings()
    assert Settings.of_environment(environ) == Settings(timeout_s=0.5)
    assert Settings.of_environment(environ, timeout=99) == Settings(timeout_s=99)
    assert Settings.of_environment(environ, timeout=None) == Settings(timeout_s=0.5)
    for text in ("soon", ""):
        with pytest.raises(UsageError, match=f"RINGSIDE_TIMEOUT_S='{text}' is not a number"):
            Settings.of_environment({"RINGSIDE_TIMEOUT_S": text})


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf, "30", True, timedelta(0)])
def test_a_timeout_that_cannot_be_is_refused_in_one_line(wrong: Any) -> None:
    assert timeout_seconds(timedelta(minutes=1)) == timeout_seconds(60) == 60.0
    with pytest.raises(UsageError, match=r"^timeout must be seconds or a timedelta, more than 0[^\n]+$"):
        timeout_seconds(wrong)


@pytest.mark.parametrize(
    ("name", "least", "refused"),
    [
        ("timeout_s", 1e-9, (0.0, -1.0, math.inf, math.nan)),
        ("segment_bytes", 64, (63, 0)),
        ("message_bytes", 64, (63, -64)),
        ("block_bytes", 64, (63, 0)),
        ("one_shot_bytes", 0, (-1,)),
    ],
)
def test_what_cannot_be_set_is_refused(name: str, least: Any, refused: tuple[Any, ...]) -> None:
    assert getattr(Settings(**{name: least}), name) == least
    for value in refused:
        with pytest.raises(UsageError, match="impossible settings"):
            Settings(**{name: value})


@pytest.mark.parametrize(
    ("segment_bytes", "stage_bytes"),
    [(64, 3 * 4096), (4096, 3 * 4096), (4097, 3 * 4160), (4160, 3 * 4160), (4161, 3 * 4224), (1 << 20, 3 << 20)],
)
def test_a_stage_holds_three_segments_of_whole_cache_lines(segment_bytes: int, stage_bytes: int) -> None:
    assert Settings(segment_bytes=segment_bytes).stage_bytes == stage_bytes


def test_ranks_agree_on_what_decides_their_paths_and_on_nothing_else() -> None:
    usual = Settings().agreed()
    for name in (field.name for field in fields(Settings)):
        assert (Settings(**{name: 128}).agreed() != usual) == (name in AGREED), name


def test_whose_time_is_not_rationed_looks_longer_before_it_sleeps() -> None:
    alone, rationed = patience(Settings(), 4, 4, False), patience(Settings(), 5, 4, False)
    beside = patience(Settings(), 1, 4, True)
    assert alone[0] > beside[0] > rationed[0] == 0
    assert alone[1] > rationed[1] > beside[1] > 0
    assert patience(Settings(), 99, math.inf, False) == alone, "without a quota the number of ranks says nothing"
    for ranks, background in ((1, False), (9, False), (1, True)):
        assert patience(Settings(spins=0, yields=0), ranks, 4, background) == (0, 0)
        assert patience(Settings(spins=7, yields=3), ranks, 4, background) == (7, 3)


@pytest.mark.parametrize(
    ("sizes", "largest"),
    [
        (["32K", "1024K", "512K"], 1 << 20),
        (["48K", "2M"], 2 << 20),
        (["3000"], 3000),
        ([""], 32 << 20),
        ([], 32 << 20),
    ],
)
def test_results_bypass_the_caches_from_the_largest_one_s_size_on(
    sizes: list[str], largest: int, tmp_path: Path
) -> None:
    for at, size in enumerate(sizes):
        (tmp_path / f"index{at}").mkdir()
        (tmp_path / f"index{at}" / "size").write_text(f"{size}\n")
    assert cache_bytes(tmp_path) == largest
