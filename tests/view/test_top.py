"""The words, rows and sources of `ringside top`, without a screen."""

from __future__ import annotations

import itertools
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.recorded_runs import own_times, slow_run, write_run

from ringside.errors import RingsideError
from ringside.monitor.assessment import Assessment
from ringside.monitor.run.records import RunInfo, StepRecord
from ringside.monitor.verdict import Verdict
from ringside.view.run.live import RankNow
from ringside.view.tui.console import REPLACEMENT, in_ascii, printable, speaks_utf8, without_controls
from ringside.view.tui.rank_table import (
    SORTS,
    SortOrder,
    Sparks,
    arrange_ranks,
    fit_columns,
    heading_line,
    rank_line,
)
from ringside.view.tui.source import Local, Open, Snapshot, take_snapshot
from ringside.view.tui.text import all_verdicts, as_json, first_line, once_lines, price_text, rank_detail, verdict_block
from ringside.view.verdict_text import FEWEST_STEPS, Calm

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
    assert SortOrder(filter=wanted).shows(rank(12, host="node-3.cluster", verdicts=("slow_rank",))) is expected


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


def test_columns_go_when_there_is_no_room_and_the_lines_of_blocks_first() -> None:
    """rank 5, excess 10, own 9, the verdict's kind 11, wait 9, wire 9, the host 6 at least, and blocks from 8 on."""
    run = a_run()
    run = replace(run, ranks=(run.ranks[0], replace(run.ranks[1], verdicts=("slow_rank",))))
    shown = {
        width: "".join(
            name[0] if size else "." for name, size in vars(fit_columns(run, width)).items() if name != "spark"
        )
        for width in (4, 5, 14, 15, 24, 35, 44, 53, 59)
    }
    # rank, place, host, own, wait, wire, excess, verdict; what would still fit behind one that did not is shown
    assert shown == {
        4: "........", 5: "r.......", 14: "r..o....", 15: "r.....e.", 24: "r..o..e.", 35: "r..o..ev", 44: "r..ow.ev",
        53: "r..owwev", 59: "r.howwev",
    }  # fmt: skip
    assert [fit_columns(run, width).spark for width in (59, 68, 69, 121, 122, 300)] == [0, 0, 8, 60, 60, 60]
    assert fit_columns(replace(run, ranks=run.ranks[:1]), 300).host == 0, "one host needs no name"
    assert fit_columns(replace(run, ranks=(replace(run.ranks[0], host="x" * 40), run.ranks[1])), 300).host == 18
    assert (fit_columns(run, 300).rank, fit_columns(replace(run, ranks=run.ranks[:1] * 10_001), 300).rank) == (5, 6)


def test_the_heading_has_an_arrow_where_it_is_sorted_and_names_the_window_where_there_is_room() -> None:
    columns = fit_columns(a_run(), 300)
    for order, said in (
        (SortOrder("own"), "own↓"), (SortOrder("own", True), "own↑"), (SortOrder("rank"), "rank↑"),
        (SortOrder("rank", True), "rank↓"),
    ):  # fmt: skip
        assert re.findall(r"\w+[↓↑]", heading_line(columns, order)) == [said]
    window = "(medians, last 16 steps)  own time"
    rooms = {room: heading_line(replace(columns, spark=room), SortOrder(), "last 16 steps") for room in (33, 34, 8)}
    assert [window in rooms[room] for room in (33, 34, 8)] == [False, True, False]
    assert rooms[8].endswith("  own time")
    assert "medians" not in heading_line(columns, SortOrder())


@settings(max_examples=60, deadline=None)
@given(width=st.integers(1, 200), height=st.integers(0, 60), verdict=st.booleans(), noted=st.booleans())
def test_everything_fits_whatever_the_size(width: int, height: int, verdict: bool, noted: bool) -> None:
    snapshot = replace(SNAPSHOTS[verdict], notes=("all-reduces go another way from now on, " * 6,) if noted else ())
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


def a_run(**changes: object) -> Snapshot:
    """A run of two ranks whose verdicts, steps and stage a test chooses."""
    info = RunInfo(schema=1, name="gpt", started_unix=0.0, command=[], world_size=2, hosts=["a", "b"], pids=[100, 101],
                   engine="ringside")  # fmt: skip
    ranks = tuple(RankNow(n, "ab"[n], 9, 0.1 + 0.05 * n, 0.05 - 0.05 * n, 0.002, 0.5 * n, ()) for n in range(2))
    fields = {
        "where": "runs/x", "info": info, "stage": "training", "step": 9, "recorded": 10, "of": 0, "ranks": ranks,
        "verdicts": (), "steps": np.arange(10), "own_seconds": np.full((10, 2), 0.1, dtype=np.float32),
    }  # fmt: skip
    return Snapshot(**{**fields, **changes})  # type: ignore[arg-type]


def an_open(kind: str = "slow_rank", cost: float = 7200.0, *, over: bool = False, **changes: object) -> Open:
    fields = {"ranks": [1], "since_step": 4, "detected_step": 9, "excess_ratio": 0.5, "cause": "its input",
              "advice": "cache it"}  # fmt: skip
    return Open(Verdict(kind=kind, **{**fields, **changes}), cost, over)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "ringside top gpt · 10 steps · 2 ranks · ringside"),
        ({"of": 40}, "ringside top gpt · 10 steps of at most 40 · 2 ranks · ringside"),
        ({"info": None}, "ringside top runs/x · no run yet"),
        ({"step": -1, "recorded": 0}, "ringside top gpt · the ranks are starting · 2 ranks · ringside"),
        ({"step": -1, "stage": "ended"}, "ringside top gpt · ended before its first step · 2 ranks · ringside"),
        ({"step": 0, "recorded": 1}, "ringside top gpt · 1 step · 2 ranks · ringside"),
        ({"stage": "ended"}, "ringside top gpt · ended · 10 steps · 2 ranks · ringside"),
        ({"step": 99}, "ringside top gpt · 10 steps (steps 90 to 99) · 2 ranks · ringside"),
        ({"step": 10, "of": 40}, "ringside top gpt · 10 steps (steps 1 to 10 of at most 40) · 2 ranks · ringside"),
    ],
)
def test_the_first_line_says_how_far_it_is(changes: dict[str, object], said: str) -> None:
    assert first_line(a_run(**changes), 100).plain == said
    with_remark = first_line(a_run(**changes), 100, remarks=["paused", "old"]).plain
    assert with_remark == said.ljust(100 - len("paused · old")) + "paused · old"
    short = first_line(a_run(**changes), 30, remarks=["paused"]).plain
    assert short == said[:22] + "… paused"


def test_verdicts_take_the_lines_that_there_are() -> None:
    first, died, over = an_open(), an_open("dead_rank", ranks=[0]), an_open(over=True)
    headline, why = "● rank 1 is 50% slower than the others since step 4", "  why    its input"
    cost, do = "  cost   2.00 rank-hours lost, summed over ranks", "  do     cache it"
    second, third = "● rank 0 died at step 4", f"{headline} (resolved)"
    whole = [headline, why, cost, do]

    def told(height: int, *verdicts: Open, notes: tuple[str, ...] = ()) -> list[str]:
        return verdict_block(a_run(verdicts=verdicts, notes=notes), 80, height).plain.split("\n")

    assert told(9, first) == told(4, first) == whole
    assert told(3, first) == whole[:3]
    assert told(9, over) == [third, why, cost], "what is over asks for nothing"
    assert told(9, died) == [second, why, do], "a death has no price"
    assert told(5, first, died) == [*whole, second]
    assert told(9, first, died, over) == [*whole, second, third]
    assert told(4, first, died) == [*whole[:3], f"{do}  and 1 more: v"]
    assert told(5, first, died, over) == [*whole, f"{second}  and 1 more: v"]
    assert told(99, first, *[died] * 4) == [*whole, *[second] * 2, f"{second}  and 1 more: v"], "three below at most"
    # the newest note has the last line, from three lines on
    assert told(5, first, notes=("old", "new")) == [*whole, "○ new"]
    assert told(3, first, notes=("new",)) == [*whole[:2], "○ new"]
    assert told(2, first, notes=("new",)) == whole[:2]
    # two lines for each part where there is room for them: from seven on
    long = an_open(cause="word " * 30)
    assert [line[:7] for line in told(7, long)] == ["● rank ", "  why  ", " " * 7, "  cost ", "  do   "]
    assert [line[:7] for line in told(6, long)] == ["● rank ", "  why  ", "  cost ", "  do   "]
    assert told(6, long)[1].endswith(" …")
    styles = [str(verdict_block(a_run(verdicts=(one,)), 80, 9).spans[0].style) for one in (first, over)]
    assert styles == ["bold red", "yellow"]


def test_a_price_is_said_where_there_is_one() -> None:
    assert price_text(an_open()) == "2.00 rank-hours lost, summed over ranks"
    for cost in (0.0, -1.0, math.nan, math.inf):
        assert price_text(an_open(cost=cost)) == ""
    for kind in ("dead_rank", "hang", "mismatch", "diverged", "broken_ring"):
        assert price_text(an_open(kind)) == ""


def test_without_a_verdict_it_says_how_sure_that_is() -> None:
    def told(steps: int, excess: tuple[float, ...] = (0.0, 0.02), **changes: object) -> str:
        own = own_times(steps, 2)
        ranks = tuple(RankNow(n, "", 9, 0.1, 0.0, 0.0, one, ()) for n, one in enumerate(excess))
        fields = {"step": steps - 1, "recorded": steps, "steps": np.arange(steps), "own_seconds": own, "ranks": ranks}
        return " ".join(verdict_block(a_run(**{**fields, **changes}), 200, 9).plain.split())

    assert told(60, step=-1) == "● waiting for the first step of runs/x"
    assert told(60, info=None) == "● waiting for the first step of runs/x"
    assert told(FEWEST_STEPS - 1) == f"● too few steps for a verdict: it takes {FEWEST_STEPS}"
    assert told(200, (0.0,)) == told(200, (0.0, math.nan)) == (
        "● there is nobody to wait for: one rank is all there is"
    )  # fmt: skip
    assert told(FEWEST_STEPS) == (
        "● no verdict so far; the slowest takes 2.0% longer than the others, in too few or too unsteady steps "
        "to be sure"
    )
    known = {"assessment": Assessment(state="none", found_ratio=0.1)}
    assert told(400, **known) == (
        "● no straggler; the slowest takes 2.0% longer than the others. A rank 10% slower would have been found."
    )
    assert told(400, (0.0, 0.1), **known).startswith("● no straggler; the slowest takes 10% ")
    assert told(400, (0.0, 0.101)) == "● no verdict so far; the slowest takes 10% longer than the others"
    assert told(60, undecided="rank 1 may be 30% slower") == "● no verdict so far; rank 1 may be 30% slower"
    calm = Calm("All is well.", "So it seems.", True)
    assert [str(verdict_block(a_run(calm=c), 80, 9).spans[0].style) for c in (calm, calm._replace(sure=False))] == [
        "green", "yellow",
    ]  # fmt: skip
    assert told(60, calm=calm) == "● All is well. So it seems."
    assert told(60, calm=calm, reading="reading") == "○ reading"
    assert told(60, calm=calm, reading="reading", trouble="no run") == "● no run"
    for name, lead in (("reading", "○ "), ("trouble", "● "), ("calm", "● ")):
        long = calm._replace(text="word " * 30) if name == "calm" else "word " * 30
        for height, lines in ((1, 1), (3, 3), (0, 1)):
            block = verdict_block(a_run(**{name: long}), 40, height).plain
            assert (block[:2], block.count("\n") + 1) == ((lead, lines) if height else ("", 1))


def test_the_detail_of_a_rank_line_by_line() -> None:
    records = tuple(
        StepRecord(step=step, rank=1, ended_unix=0.0, step_seconds=0.2, own_seconds=0.1 + 0.01 * step, wait_seconds=0.0,
                   backward_seconds=0.06, data_seconds=0.02 if step else math.nan, wire_seconds=0.0)
        for step in range(3)
    )  # fmt: skip
    verdict = an_open(evidence={"own_seconds": 0.13})
    found = rank_detail(a_run(detail=records, verdicts=(verdict, an_open(ranks=[0]))), 1, 46)
    assert [line.rstrip() for line in found.plain.split("\n")] == [
        "rank 1 · b · pid 101 · newest step 9",
        "own 150 ms  wait 0 s  wire 2.00 ms  excess +50.0%  (medians, last 16 steps)",
        "",
        "● rank 1 is 50% slower than the others since",
        "  step 4",
        "  why    its input",
        "  cost   2.00 rank-hours lost, summed over",
        "         ranks",
        "  do     cache it",
        "  facts  own 130 ms",
        "",
        "                  median   newest  over its last 3 steps",
        "  data loading   20.0 ms  20.0 ms   ▁▁",
        "  backward       60.0 ms  60.0 ms  ▁▁▁",
        "  own             110 ms   120 ms  ▁▄▇",  # the blocks' range is a quarter of the shortest at least
        "  wait               0 s      0 s  ▁▁▁",
        "  step            200 ms   200 ms  ▁▁▁",
    ]
    bold = [span for span in found.spans if str(span.style) == "bold"]
    assert [found.plain[span.start : span.end].split()[:1] for span in bold][-2:] == [["own"], ["step"]]
    unknown = rank_detail(
        a_run(info=None, ranks=(RankNow(0, "", -1, math.nan, math.nan, math.nan, math.nan, ()),)), 0, 80
    ).plain.split("\n")
    assert unknown == [
        "rank 0 · no step yet",
        "own –  wait –  wire –  excess –  (medians, last 16 steps)",
        "",
        "its phases are not known here",
    ]
    beyond = rank_detail(a_run(ranks=(RankNow(2, "c", 0, 0.1, 0.1, 0.1, 0.1, ()),)), 2, 80).plain
    assert beyond.startswith("rank 2 · c · newest step 0\n"), "of two process numbers it has none"


def test_lines_of_blocks_grow_with_the_screen_up_to_sixty() -> None:
    records = tuple(
        StepRecord(step=n, rank=1, ended_unix=0.0, step_seconds=0.2, own_seconds=0.1, wait_seconds=0.0)
        for n in range(100)
    )  # fmt: skip
    cells = {
        width: rank_detail(a_run(detail=records), 1, width).plain.split("\n")[-1].count("▁")
        for width in (39, 40, 61, 96, 200)
    }
    assert cells == {39: 0, 40: 4, 61: 25, 96: 50, 200: 50}, "of 60 cells fifty have two steps each"


def test_once_is_what_runs_then_the_verdicts_then_a_line_for_each_rank() -> None:
    own = np.array([[0.1, 0.15]] * 4 + [[0.1, math.nan]], dtype=np.float32)
    run = a_run(recorded=5, step=4, steps=np.arange(5), own_seconds=own)
    assert list(once_lines(run, SortOrder(), 60)) == [
        "ringside top gpt · 5 steps · 2 ranks · ringside",
        f"● too few steps for a verdict: it takes {FEWEST_STEPS}",
        "",
        "own time: work from one synchronisation to the next",
        " rank  host      own     wait     wire   excess↓  own time",
        "    1  b      150 ms      0 s  2.00 ms    +50.0%  ████",
        "    0  a      100 ms  50.0 ms  2.00 ms      0.0%  ▁▁▁▁▁",
    ]
    assert as_json(a_run(verdicts=(an_open(over=True),), notes=("note",)), SortOrder("rank", True, "1"))["ranks"] == [
        {"rank": 1, "host": "b", "step": 9, "own_seconds": 0.15000000000000002, "wait_seconds": 0.0,
         "wire_seconds": 0.002, "excess_ratio": 0.5, "verdicts": []}
    ]  # fmt: skip


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


def test_a_page_holds_no_control_character_but_the_ends_of_its_lines_and_tabs() -> None:
    whole = "".join(map(chr, range(0x250)))
    kept, controls = without_controls(whole), [*range(32), *range(0x7F, 0xA0)]
    assert [code for code, one in enumerate(kept) if one != chr(code)] == [c for c in controls if chr(c) not in "\n\t"]
    assert {kept[code] for code in controls} == {"\n", "\t", REPLACEMENT}


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
