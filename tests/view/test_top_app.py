"""The screen of `ringside top`, driven by textual's pilot; nothing here looks at a clock of its own."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.recorded_runs import own_times, slow_run, write_run
from tests.support.waiting import Clock

pytest.importorskip("textual", reason="textual is not installed here")

from textual import events

from ringside.view.tui.app import Page, TopApp
from ringside.view.tui.rank_table import SortOrder
from ringside.view.tui.rank_widget import RankTable
from ringside.view.tui.source import Local

VERDICT = {
    "kind": "slow_rank", "ranks": [5], "since_step": 80, "detected_step": 88, "excess_ratio": 0.3,
    "cause": "most of the extra time is in its backward pass (+21 ms per step)", "cost_rank_seconds": 1.9,
    "advice": "compare this rank's clocks with a healthy rank's", "evidence": {"own_seconds": 0.13},
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = slow_run(tmp_path / "run", ranks=8, steps=200, rank=5, onset=80)
    (path / "events.jsonl").write_text(json.dumps({"kind": "verdict", "unix": 1.0, "verdict": VERDICT}) + "\n")
    soon = time.time() + 3600.0
    os.utime(path / "steps.jsonl", (soon, soon))  # it goes on, however long the test takes
    return path


def app_on(path: Path, **changes: Any) -> TopApp:
    return TopApp(Local(path), refresh_s=None, **{"clock": Clock(0.0), **changes})


def screen(app: TopApp) -> list[str]:
    """Return the lines on the screen, as text."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip).rstrip() for strip in strips]


def shown_ranks(app: TopApp) -> list[int]:
    lines = screen(app)
    first = next(
        index for index, line in enumerate(lines) if "rank" in line.split()[:1] or "rank↓" in line or "rank↑" in line
    )
    return [int(line.lstrip("▌> ").split()[0]) for line in lines[first + 1 :] if line.lstrip("▌> ")[:1].isdigit()]


async def settled(app: TopApp, pilot: Any) -> None:
    await app.workers.wait_for_complete()
    await pilot.pause()


async def on_screen(app: TopApp, keys: str | tuple[str, ...], size: tuple[int, int] = (80, 24)) -> list[str]:
    """Start, press keys, and return what is on the screen."""
    async with app.run_test(size=size) as pilot:
        await settled(app, pilot)
        await pilot.press(*keys)
        await settled(app, pilot)
        return screen(app)


def drive(play: Callable[[Any], Any]) -> None:
    import asyncio

    asyncio.run(play(None))


def test_a_long_run_is_read_in_pieces_and_then_judged(run: Path) -> None:
    async def play(_: Any) -> None:
        app = TopApp(Local(run, at_once=100), refresh_s=None, clock=Clock(0.0))
        lines = await on_screen(app, ())
        assert lines[0].startswith("ringside top run · 200 steps · 8 ranks")
        assert app.snapshot is not None
        assert app.snapshot.reading == ""

    drive(play)


def test_verdicts_come_first_and_all_fits_80_by_24(run: Path) -> None:
    async def play(_: Any) -> None:
        lines = await on_screen(app_on(run), ())
        assert lines[0].startswith("ringside top run · 200 steps · 8 ranks")
        assert lines[1] == "● rank 5 is 30% slower than the others since step 80"
        assert any("cost" in line and "rank-seconds lost, summed over ranks" in line for line in lines[2:7])
        assert [line for line in lines if line.startswith("▌   5  host-1")]
        assert lines[-1].startswith("s sort  r reverse")
        assert (len(lines), max(map(len, lines)) <= 80) == (24, True)

    drive(play)


def test_sorting_and_turning_round(run: Path) -> None:
    async def play(_: Any) -> None:
        app = app_on(run)
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(app, pilot)
            assert shown_ranks(app)[0] == 5
            await pilot.press("s")
            assert (app.order.sort, shown_ranks(app)) == ("rank", list(range(8)))
            await pilot.press("r")
            assert shown_ranks(app) == list(range(7, -1, -1))
            await pilot.press("S", "S", "S")
            assert app.order == SortOrder("wait")
            assert shown_ranks(app)[-1] == 5  # the straggler waits least
            await pilot.press("s", "s", "s", "s", "s")
            assert app.order.sort == "wait"

    drive(play)


def test_filter_while_it_is_typed_and_taken_back(run: Path) -> None:
    async def play(_: Any) -> None:
        app = app_on(run, order=SortOrder("rank"))
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(app, pilot)
            await pilot.press("slash", *"host-1")
            await pilot.pause()
            assert shown_ranks(app) == [4, 5, 6, 7]
            assert "4 of 8 ranks" in screen(app)[0]
            await pilot.press("enter")
            await pilot.pause()
            assert app.focused is app.query_one(RankTable)
            await pilot.press("escape")
            await pilot.pause()
            assert (app.order.filter, shown_ranks(app)) == ("", list(range(8)))
            await pilot.press("slash", *"q77")
            await pilot.pause()
            assert shown_ranks(app) == []
            await pilot.press("enter", "enter")
            assert not isinstance(app.screen, Page)

    drive(play)


def test_keys_typed_ahead_go_into_the_filter(run: Path) -> None:
    async def play(_: Any) -> None:
        app = app_on(run, order=SortOrder("rank"))
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(app, pilot)
            assert app._driver is not None
            for key, character in (("slash", "/"), ("3", "3"), ("minus", "-"), ("5", "5"), ("enter", None)):
                app._driver.send_message(events.Key(key, character))
            await pilot.pause()
            assert (app.order.filter, shown_ranks(app)) == ("3-5", [3, 4, 5])
            assert not isinstance(app.screen, Page)

    drive(play)


def test_pause_stands_still_and_goes_on(tmp_path: Path, run: Path) -> None:
    async def play(_: Any) -> None:
        app = app_on(run)
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(app, pilot)
            await pilot.press("p")
            more(run, 200)
            await app.refresh_now()
            await pilot.pause()
            assert "200 steps" in screen(app)[0]
            assert screen(app)[0].endswith("paused")
            await pilot.press("p")
            await settled(app, pilot)
            assert "201 steps" in screen(app)[0]
            assert "paused" not in screen(app)[0]

    drive(play)


def more(path: Path, step: int, ranks: int = 8) -> None:
    """Append a step."""
    with (path / "steps.jsonl").open("a") as file:
        for rank in range(ranks):
            record = {"step": step, "rank": rank, "ended_unix": 1.0, "step_seconds": 0.2, "own_seconds": 0.15}
            file.write(json.dumps(record, separators=(",", ":")) + "\n")


def test_one_rank_in_detail_goes_on_with_the_run(run: Path) -> None:
    async def play(_: Any) -> None:
        app = app_on(run)
        async with app.run_test(size=(80, 30)) as pilot:
            await settled(app, pilot)
            await pilot.press("down", "enter")
            await settled(app, pilot)
            lines = screen(app)
            assert lines[1].startswith("rank 5 · host-1 · pid 105 · newest step 199")
            assert any(line.startswith("  facts") and "own 130 ms" in line for line in lines)
            assert any(line.startswith("  backward") for line in lines)
            more(run, 200)
            await app.refresh_now()
            await pilot.pause()
            assert "newest step 200" in screen(app)[1]
            await pilot.press("escape")
            await pilot.pause()
            assert screen(app)[1].startswith("● rank 5")

    drive(play)


def test_the_cursor_stays_on_its_rank_and_the_list_scrolls(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", own_times(40, 100))

    async def play(_: Any) -> None:
        app = app_on(path, order=SortOrder("rank"))
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(app, pilot)
            table = app.query_one(RankTable)
            first = shown_ranks(app)
            await pilot.press("pagedown", "pagedown", "down")
            assert table.chosen == 2 * len(first)
            assert table.chosen in shown_ranks(app)
            await pilot.press("r")
            assert table.chosen == 2 * len(first)
            assert table.chosen in shown_ranks(app)
            await pilot.press("end")
            assert shown_ranks(app)[-1] == table.chosen == 0
            await pilot.press("home")
            assert shown_ranks(app)[0] == table.chosen == 99
            await pilot.press("escape", "r")
            assert shown_ranks(app) == first

    drive(play)


def test_ranks_keep_four_lines_and_verdicts_have_the_rest(run: Path) -> None:
    """Title, heading, keys and one rank; two lines of the verdict, and more of it from 13 lines on."""

    async def play(_: Any) -> None:
        app, verdict = app_on(run), ("● rank 5", "  why", "  cost", "  do")
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(app, pilot)
            for height, shown in ((24, 4), (14, 4), (13, 3), (12, 2), (7, 2), (6, 2), (5, 1)):
                await pilot.resize_terminal(80, height)
                await settled(app, pilot)
                assert [sum(line.startswith(lead) for line in screen(app)) for lead in verdict] == [
                    int(number < shown) for number in range(4)
                ]  # fmt: skip

    drive(play)


def test_resized_to_nothing_and_back(run: Path) -> None:
    async def play(_: Any) -> None:
        app = app_on(run)
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(app, pilot)
            before = screen(app)
            for keys in ((), ("enter",), ("escape", "question_mark"), ("escape", "v"), ("escape", "slash")):
                await pilot.press(*keys)
                for size in ((1, 1), (2, 1), (1, 3), (9, 2), (300, 90), (80, 24)):
                    await pilot.resize_terminal(*size)
                    await settled(app, pilot)
                    await app.refresh_now()
                    assert len(screen(app)) == size[1]
            await pilot.press("enter", "escape", "escape")
            await settled(app, pilot)
            assert screen(app) == before

    drive(play)


def test_a_run_that_begins_late_breaks_and_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "run"

    async def play(_: Any) -> None:
        app = app_on(path)
        async with app.run_test(size=(120, 24)) as pilot:
            await settled(app, pilot)
            assert "no run yet" in screen(app)[0]
            write_run(path, own_times(40, 4))
            await app.refresh_now()
            await pilot.pause()
            assert len(shown_ranks(app)) == 4
            (path / "run.json").write_text("{torn")
            await app.refresh_now()
            await pilot.pause()
            assert "no run that this version can read" in " ".join(screen(app))
            assert len(shown_ranks(app)) == 4
            (path / "run.json").unlink()
            for name in ("steps.jsonl", "events.jsonl"):
                (path / name).unlink()
            write_run(path, own_times(30, 2))
            await app.refresh_now()
            await pilot.pause()
            assert len(shown_ranks(app)) == 2

    drive(play)


def test_silence_is_told_after_a_while_but_not_of_a_run_that_ended(run: Path) -> None:
    async def play(_: Any) -> None:
        clock = Clock(0.0)
        app = app_on(run, clock=clock)
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(app, pilot)
            clock.now = 42.0
            await app.refresh_now()
            await pilot.pause()
            assert screen(app)[0].endswith("nothing new for 42 s")
            with (run / "events.jsonl").open("a") as file:
                file.write('{"kind": "ended"}\n')
            await app.refresh_now()
            clock.now = 99.0
            await app.refresh_now()
            await pilot.pause()
            assert "nothing new" not in screen(app)[0]
            assert "ended" in screen(app)[0]

    drive(play)


def test_help_verdicts_colours_and_quit(run: Path) -> None:
    async def play(_: Any) -> None:
        app = app_on(run, remark="the newest of 2 jobs; the others: runs/b")
        async with app.run_test(size=(80, 34)) as pilot:
            await settled(app, pilot)
            assert screen(app)[-1] == "the newest of 2 jobs; the others: runs/b"
            await pilot.press("question_mark")
            await pilot.pause()
            assert any("the straggler waits least" in line for line in screen(app))
            assert screen(app)[19].startswith("Figures are")
            await pilot.press("q", "v")
            await pilot.pause()
            assert any("compare this rank's clocks" in line for line in screen(app))
            await pilot.press("escape")
            themes = []
            for _unused in range(3):
                await pilot.press("t")
                themes.append(app.theme)
            assert themes == ["textual-dark", "textual-light", "ansi-dark"]
            assert screen(app)[-1].startswith("s sort")
            await pilot.press("q")
        assert app.return_code == 0

    drive(play)


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[bold]x[/bold]"


def test_hostile_names_do_not_reach_the_terminal(run: Path, tmp_path: Path) -> None:
    info = json.loads((run / "run.json").read_text())
    info |= {"name": f"run{HOSTILE}", "hosts": [f"h{rank}{HOSTILE}" for rank in range(8)], "engine": HOSTILE}
    (run / "run.json").write_text(json.dumps(info))
    hostile = {**VERDICT, "cause": HOSTILE, "advice": HOSTILE, "evidence": {HOSTILE: HOSTILE}}
    (run / "events.jsonl").write_text(json.dumps({"kind": "verdict", "verdict": hostile}) + "\n")
    path = run.rename(tmp_path / f"run{HOSTILE.replace('/', '')}")

    async def play(_: Any) -> None:
        app = app_on(path, remark=HOSTILE)
        seen = []
        async with app.run_test(size=(150, 30)) as pilot:
            seen += screen(app)
            await settled(app, pilot)
            for keys in ((), ("enter",), ("escape", "v"), ("escape",)):
                await pilot.press(*keys)
                await settled(app, pilot)
                seen += screen(app)
            (path / "run.json").write_text("{")
            await app.refresh_now()
            await pilot.pause()
            seen += screen(app)
        assert any("owned" in line for line in seen)
        assert any("[bold]x" in line for line in seen)  # and it is no markup
        assert [line for line in seen if not line.isprintable()] == []

    drive(play)


def test_ascii_where_there_is_no_utf8(run: Path) -> None:
    async def play(_: Any) -> None:
        for keys in ((), ("enter",), ("question_mark",), ("v",), ("slash",)):
            lines = await on_screen(app_on(run, utf8=False), keys)
            assert "".join(lines).isascii(), keys

    drive(play)


def test_no_colour(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def play(_: Any) -> None:
        app = app_on(run)
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(app, pilot)
            strips = app.screen._compositor.render_strips()
            for each in app._filters:
                strips = [strip.apply_filter(each, app.background_colors[1]) for strip in strips]
            styles = [segment.style for strip in strips for segment in strip if segment.style]
            colours = {colour for style in styles for colour in (style.color, style.bgcolor)} - {None}
            assert styles
            assert {colour.name for colour in colours} <= {"default"}  # and not black on black

    drive(play)


def test_only_lines_that_changed_are_drawn_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(_: Any) -> None:
        app = app_on(run, order=SortOrder("rank"))
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(app, pilot)
            table, drawn = app.query_one(RankTable), []
            original = RankTable.refresh
            monkeypatch.setattr(RankTable, "refresh", lambda self, *r, **o: drawn.extend(r) or original(self, *r, **o))
            await app.refresh_now()
            assert drawn == []
            await pilot.press("down", "down")
            assert [(region.y, region.height) for region in drawn] == [(0, 1), (0, 1), (1, 1)]
            assert table.chosen == 1

    drive(play)


def test_a_page_that_is_still_being_made_is_passed_over(run: Path) -> None:
    async def play(_: Any) -> None:
        app = app_on(run)
        async with app.run_test(size=(80, 24)) as pilot:
            await settled(app, pilot)
            app.action_detail()
            app.show_snapshot()  # a look at the run that ends before the page has its parts
            await settled(app, pilot)
            assert isinstance(app.screen, Page)
            assert any("rank 5" in line for line in screen(app))

    drive(play)
