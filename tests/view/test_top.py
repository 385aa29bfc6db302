"""The words, rows and sources of `ringside top`, without a screen."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.recorded_runs import own_times, slow_run, write_run

from ringside.errors import RingsideError
from ringside.view.run.live import RankNow
from ringside.view.tui.console import in_ascii, printable, speaks_utf8
from ringside.view.tui.rank_table import (
    SORTS,
    SortOrder,
    Sparks,
    arrange_ranks,
    fit_columns,
    heading_line,
    matches_filter,
    rank_line,
)
from ringside.view.tui.source import Local, Snapshot, take_snapshot
from ringside.view.tui.text import all_verdicts, as_json, first_line, once_lines, rank_detail, verdict_block

VERDICT = {
    "kind": "slow_rank", "ranks": [2], "since_step": 60, "detected_step": 66, "excess_ratio": 0.3,
    "cause": "most of the extra time is in its backward pass", "cost_rank_seconds": 12.0, "advice": "move it",
    "evidence": {"own_seconds": 0.13, "others_own_seconds": 0.1},
}  # fmt: skip


def judged(path: Path, **changes: object) -> Path:
    """A run with a slow rank, and the verdict that says so."""
    slow_run(path)
    event = {"kind": "verdict", "unix": 1.0, "verdict": {**VERDICT, **changes}}
    (path / "events.jsonl").write_text(json.dumps(event) + "\n")
    return path


def rank(number: int, own: float = 0.1, host: str = "host", verdicts: tuple[str, ...] = ()) -> RankNow:
    return RankNow(number, host, 9, own, 0.01, 0.001, 0.0, verdicts)


def plain(lines: object) -> str:
    return str(getattr(lines, "plain", lines))


@pytest.mark.parametrize(
    ("sort", "reverse", "expected"),
    [
        ("own", False, [1, 0, 2, 3]),
        ("own", True, [2, 0, 1, 3]),
        ("rank", False, [0, 1, 2, 3]),
        ("rank", True, [3, 2, 1, 0]),
    ],
)
def test_order_puts_what_is_not_known_last(sort: str, reverse: bool, expected: list[int]) -> None:
    ranks = [rank(0, 0.2), rank(1, 0.3), rank(2, 0.1), rank(3, math.nan)]
    assert [one.rank for one in arrange_ranks(ranks, SortOrder(sort, reverse))] == expected


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("", True), ("12", True), ("1", False), ("8-15", True), ("13-15", False), ("NODE-3", True), ("node-4", False),
        ("slow", True), ("slow-rank", True), ("input", False), ("1,2 12", True), (" , ", True), ("9" * 14, False),
    ],
)  # fmt: skip
def test_filters(wanted: str, expected: bool) -> None:
    assert matches_filter(rank(12, host="node-3.cluster", verdicts=("slow_rank",)), wanted) is expected


def test_lines_of_blocks_share_one_scale_and_noise_stays_low(tmp_path: Path) -> None:
    snapshot = take_snapshot(Local(slow_run(tmp_path / "run")))
    sparks = Sparks(snapshot.steps, snapshot.own_seconds, 20)
    assert set(sparks.line(2)[-5:]) <= set("▆▇█")
    assert set(sparks.line(0) + sparks.line(2)[:5]) <= set("▁▂▃")
    assert len(sparks.line(0)) <= 20
    assert sparks.line(99) == ""


def test_lines_of_blocks_shift_while_a_run_goes_on_and_do_not_flicker() -> None:
    own = own_times(320, 1)
    own[200:240] *= 1.5
    lines = [Sparks(np.arange(n - 250, n), own[n - 250 : n], 20).line(0) for n in range(300, 320)]
    for before, after in itertools.pairwise(lines):
        assert before[2:-1] in after


def test_a_step_that_nobody_knows_is_a_gap() -> None:
    own = np.full((8, 2), 0.1)
    own[3, 1] = np.nan
    assert Sparks(np.arange(8), own, 8).line(1) == "▁▁▁ ▁▁▁▁"
    assert Sparks(np.arange(0), np.empty((0, 2)), 8).line(1) == ""


def test_a_row_says_more_than_by_its_colour_that_a_verdict_is_open(tmp_path: Path) -> None:
    snapshot = take_snapshot(Local(judged(tmp_path / "run")))
    columns = fit_columns(snapshot, 80)
    lines = [rank_line(one, columns) for one in snapshot.ranks]
    assert [line.startswith("▌") for line in lines] == [False, False, True, False]
    assert lines[2].endswith("slow rank  ") or lines[2].endswith("slow rank")
    assert "130 ms" in lines[2] or "129 ms" in lines[2] or "131 ms" in lines[2]


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 200), height=st.integers(0, 60), verdict=st.booleans())
def test_everything_fits_whatever_the_size(width: int, height: int, verdict: bool) -> None:
    snapshot = SNAPSHOTS[verdict]
    assert first_line(snapshot, width, remarks=["paused"]).cell_len <= width
    block = verdict_block(snapshot, width, height)
    assert len(block.plain.split("\n")) <= max(height, 1)
    assert all(len(line) <= width for line in block.plain.split("\n"))
    columns = fit_columns(snapshot, width)
    assert all(len(rank_line(one, columns, "▁" * 80)) <= width for one in snapshot.ranks)
    for sort in SORTS:
        assert len(heading_line(columns, SortOrder(sort)).rstrip()) <= max(width, 1)
    for text in (rank_detail(snapshot, 2, width), all_verdicts(snapshot, width)):
        assert text.plain


@pytest.fixture(autouse=True, scope="module")
def snapshots(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("top")
    SNAPSHOTS[True] = take_snapshot(Local(judged(path / "slow")))
    SNAPSHOTS[False] = take_snapshot(Local(write_run(path / "fine", own_times(50, 4))))


SNAPSHOTS: dict[bool, Snapshot] = {}


def test_the_verdict_block_tells_who_why_what_it_costs_and_what_to_do() -> None:
    told = plain(verdict_block(SNAPSHOTS[True], 80, 9))
    for words in (
        "● rank 2 is 30% slower than the others since step 60",
        "backward pass",
        "rank-seconds lost, summed over ranks",
        "move it",
    ):
        assert words in told
    assert "No straggler detected" in plain(verdict_block(SNAPSHOTS[False], 80, 9))


def test_many_verdicts_leave_room_for_the_ranks() -> None:
    one = SNAPSHOTS[True].verdicts[0]
    many = replace(SNAPSHOTS[True], verdicts=(one,) * 9)
    lines = plain(verdict_block(many, 80, 8)).split("\n")
    assert len(lines) <= 8
    assert lines[-1].endswith("and 5 more: v")
    assert plain(all_verdicts(many, 80)).count("● rank 2") == 9


def test_a_verdict_that_is_over_says_so_and_asks_for_nothing(tmp_path: Path) -> None:
    path = judged(tmp_path / "run")
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "repaired", "verdict": VERDICT}) + "\n")
    told = plain(verdict_block(take_snapshot(Local(path)), 80, 9))
    assert "(resolved)" in told
    assert "rank-seconds lost" in told
    assert "move it" not in told


def test_the_detail_of_a_rank_has_its_phases_and_the_numbers_of_its_verdict(tmp_path: Path) -> None:
    told = plain(rank_detail(take_snapshot(Local(judged(tmp_path / "run")), 2), 2, 80))
    for words in (
        "rank 2 · host-0 · pid 102 · newest step 119",
        "own 130 ms · others own 100 ms",
        "over its last 120 steps",
    ):
        assert words in told
    phases = {
        line.split("  ")[1].strip(): line for line in told.splitlines() if line.startswith("  ") and " ms" in line
    }
    assert phases["backward"].rstrip()[-1] in "▅▆▇█"
    assert max(map(len, told.splitlines())) <= 80


def test_the_detail_of_a_rank_has_its_vitals(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", own_times(30, 2))
    last = json.loads((path / "steps.jsonl").read_text().splitlines()[-1])
    last |= {
        "step": 30,
        "rank": 1,
        "vitals": {"seconds": 1.0, "cpus": 2, "gpu_clock_mhz": 1410, "throttled_seconds": 0.25},
    }
    with (path / "steps.jsonl").open("a") as file:
        file.write(json.dumps(last, separators=(",", ":")) + "\n")
    told = " ".join(plain(rank_detail(take_snapshot(Local(path), 1), 1, 100)).split())
    assert "gpu clock 1410 MHz" in told
    assert "throttled 250 ms" in told


def test_a_rank_that_is_gone_is_told() -> None:
    assert "not in this run any more" in plain(rank_detail(SNAPSHOTS[True], 77, 80))


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202etxt\r\nnode"


def test_nothing_that_a_terminal_acts_upon_gets_through(tmp_path: Path) -> None:
    path = judged(tmp_path / "run", cause=f"because {HOSTILE}", advice=HOSTILE, evidence={f"a{HOSTILE}": HOSTILE})
    info = json.loads((path / "run.json").read_text())
    info |= {"name": f"run{HOSTILE}", "hosts": [f"{HOSTILE}{n}" for n in range(4)], "engine": HOSTILE}
    (path / "run.json").write_text(json.dumps(info))
    snapshot = take_snapshot(Local(path), 2)
    texts = [
        *once_lines(snapshot, SortOrder(), 120), first_line(snapshot, 80, remarks=[HOSTILE]).plain,
        *plain(rank_detail(snapshot, 2, 80)).split("\n"), *plain(all_verdicts(snapshot, 80)).split("\n"),
        *plain(verdict_block(replace(snapshot, trouble=HOSTILE), 80, 9)).split("\n"),
    ]  # fmt: skip
    assert "owned" in " ".join(texts)
    assert [text for text in texts if not text.isprintable()] == []


@given(st.text(st.characters(), max_size=60))
def test_printable_text_stays_and_all_else_is_replaced_one_by_one(text: str) -> None:
    cleaned = printable(text)
    assert cleaned.isprintable()
    assert len(cleaned) == len(text)
    assert all(new == old or not old.isprintable() for new, old in zip(cleaned, text, strict=True))
    assert len(in_ascii(cleaned)) == len(cleaned)
    assert in_ascii(cleaned).isascii()


def test_encodings() -> None:
    assert [speaks_utf8(name) for name in ("UTF-8", "utf8", "ascii", "iso-8859-1", None)] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    source = Local(tmp_path / "run")
    snapshot = take_snapshot(source)
    assert (snapshot.info, snapshot.ranks, snapshot.trouble) == (None, (), "")
    assert "waiting for the first step" in plain(verdict_block(snapshot, 200, 5))
    write_run(tmp_path / "run", own_times(30, 2))
    assert len(take_snapshot(source).ranks) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "no run that this version can read"),
        (b'{"schema": 0, "name": "x", "world": 4}', "no run that this version can read"),
        (b"\xff\xfe", "no run that this version can read"),
    ],
)
def test_a_run_of_another_schema_is_trouble_and_no_crash(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "run.json").write_bytes(content)
    snapshot = take_snapshot(Local(tmp_path))
    assert said in snapshot.trouble
    assert said in plain(verdict_block(snapshot, 200, 9))


@pytest.mark.parametrize("ranks", [-1, 10**7, 10**15])
def test_a_run_with_impossibly_many_ranks_is_refused_before_memory_is(tmp_path: Path, ranks: int) -> None:
    path = write_run(tmp_path / "run", own_times(30, 2))
    info = json.loads((path / "run.json").read_text()) | {"world_size": ranks}
    (path / "run.json").write_text(json.dumps(info))
    with pytest.raises(RingsideError, match="damaged"):
        Local(path).poll()


@pytest.mark.parametrize(
    "event",
    [
        '{"kind": "stage", "stage": "training", "of": "many"}',
        '{"kind": "stage", "stage": 7, "done": [], "of": {}}',
        '{"kind": "verdict", "verdict": {"kind": "slow_rank", "ranks": [99], "since_step": 1, "detected_step": 2, '
        '"excess_ratio": 1}}',
        '{"kind": "verdict", "verdict": {"kind": "slow_rank", "ranks": [-7], "since_step": 1, "detected_step": 2, '
        '"excess_ratio": 1e308, "evidence": {"usual_excess_ratio": "x"}}}',
        "[[[[", "null", "\x00\x00",
    ],
)  # fmt: skip
def test_hostile_events_leave_the_ranks_on_the_screen(tmp_path: Path, event: str) -> None:
    path = slow_run(tmp_path / "run")
    (path / "events.jsonl").write_text(event + "\n")
    source = Local(path)
    take_snapshot(source)
    with (path / "steps.jsonl").open("a") as file:
        file.write('{"step": 120, "rank": 0, "ended_unix": 1, "step_seconds": 0.1, "own_seconds": 0.1}\n{"torn')
    snapshot = take_snapshot(source)
    assert [one.rank for one in snapshot.ranks] == [0, 1, 2, 3]
    assert math.isfinite(snapshot.ranks[2].own_seconds)
    assert list(once_lines(snapshot, SortOrder(), 80))


def test_a_long_run_says_how_far_it_has_been_read_until_it_is_judged(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", own_times(50, 4))
    source = Local(path, at_once=60)
    shown = []
    while (snapshot := take_snapshot(source)).reading:
        shown.append(plain(verdict_block(snapshot, 80, 3)))
        assert plain(first_line(snapshot, 80)).startswith("ringside top run · reading · 4 ranks")
    # The last line is of the poll that found the end: the next one judges.
    counts = (60, 120, 180, 200)
    assert [line.split(": ")[1] for line in shown] == [f"{count} so far …" for count in counts]
    assert all(line.startswith("○ reading ") for line in shown)
    assert plain(verdict_block(snapshot, 80, 3)).startswith("● No straggler detected.")
    assert take_snapshot(Local(path)).calm == snapshot.calm


def test_records_of_a_rank_come_from_the_end_of_a_large_file(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", own_times(200, 4))
    records = Local(path, tail_bytes=20_000).records(3)
    assert {record.rank for record in records} == {3}
    assert [record.step for record in records] == list(range(200 - len(records), 200))
    assert 5 < len(records) < 100
    assert Local(tmp_path / "nothing").records(3) == []


def test_json_knows_no_nan(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", own_times(3, 1))
    content = json.loads(json.dumps(as_json(take_snapshot(Local(path)), SortOrder()), allow_nan=False))
    assert content["ranks"][0]["excess_ratio"] is None
    assert content["ranks"][0]["own_seconds"] == pytest.approx(0.1, rel=0.2)
