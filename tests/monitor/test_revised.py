"""A way that was decided anew, from the event to its words, in the summary and in every view; damage is passed over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ringside.monitor.run.directory import RunWriter
from ringside.monitor.run.records import NOTES_KEPT, SCHEMA, RunInfo, StepRecord, revisions
from ringside.monitor.summary import finish_run
from ringside.view.export.markdown import render_markdown
from ringside.view.html.run_report import render_report
from ringside.view.run.live import LiveRun
from ringside.view.server.state import page_state
from ringside.view.terminal import closing_summary
from ringside.view.tui.rank_table import SortOrder
from ringside.view.tui.source import Local, take_snapshot
from ringside.view.tui.text import all_verdicts, as_json, verdict_block

LINK = {"ranks": [0, 2], "hosts": ["a", "b"], "bytes_per_s": 11.4e6, "usual_bytes_per_s": 118e6}
EVENT = {
    "kind": "revised",
    "step": 527,
    "size_bytes": 4 << 20,
    "before": "hosts/ring",
    "after": "hosts/ring@0,2,1",
    "reason": "all-reduces of 4.2 MB take 3.1 times what they took",
    "links": [LINK],
    "seconds": 0.8,
}
WORDS = (
    "From step 527 on all-reduces of 4.19 MB go by hosts/ring@0,2,1 instead of hosts/ring: the link from rank 0 (a) to "
    "rank 2 (b) carries 11.4 MB/s, the others 118 MB/s."
)


def words(**changes: Any) -> str:
    (revised,) = revisions([{**EVENT, **changes}])
    return revised.describe()


def test_a_slow_link_is_named_and_without_one_the_reason_is() -> None:
    assert words() == WORDS
    assert words(links=[]).endswith("instead of hosts/ring: all-reduces of 4.2 MB take 3.1 times what they took.")
    assert "every link of the host of rank 3 (c) carries" in words(links=[{**LINK, "ranks": [3], "hosts": ["c"]}])
    assert "all-reduces of 4.19 MB still go by hosts/ring: the link from" in words(after="hosts/ring")


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "note"},
        {"step": "soon"},
        {"step": -1},
        {"links": [{"ranks": []}]},
        {"links": [{"ranks": [0, 1, 2]}]},
        {"links": 3},
        {"after": "hosts/ring", "links": []},  # nothing came of it
    ],
)
def test_what_is_no_revision_or_says_nothing_is_passed_over(damage: dict[str, Any]) -> None:
    assert revisions([{**EVENT, **damage}]) == []


def test_only_the_newest_are_kept() -> None:
    found = revisions({**EVENT, "step": step} for step in range(100))
    assert [one.step for one in found] == list(range(100 - NOTES_KEPT, 100))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    info = RunInfo(
        schema=SCHEMA,
        name="run",
        started_unix=0.0,
        command=[],
        world_size=3,
        hosts=["a", "c", "b"],
        pids=[],
        engine="x",
    )
    writer = RunWriter(tmp_path / "run", info)
    writer.event({"unix": 1.0, **EVENT})
    writer.append(
        StepRecord(step=step, rank=rank, ended_unix=float(step), step_seconds=0.1, own_seconds=0.1, wait_seconds=0.0)
        for step in range(30)
        for rank in range(3)
    )
    writer.event({"unix": 2.0, "kind": "ended", "steps": 30})
    return tmp_path / "run"


def test_the_summary_and_the_reports_tell_of_it(run: Path) -> None:
    summary = finish_run(run, render_report)
    (told,) = summary["revisions"]
    assert told["words"] == WORDS
    assert told["links"] == [LINK]
    assert json.loads((run / "summary.json").read_text())["revisions"] == [told]
    page = (run / "report.html").read_text()
    assert page.count("rank 2 (b) carries 11.4 MB/s") == 1
    console = Console(width=300)
    with console.capture() as text:
        console.print(closing_summary(summary, []))
    assert WORDS in text.get()
    info = msgspec.json.decode((run / "run.json").read_bytes(), type=RunInfo)
    assert "carries 11.4 MB/s" in render_markdown(summary, info)


def test_live_views_tell_of_it(run: Path) -> None:
    live = LiveRun(run)
    live.poll()
    assert page_state(live, [])["notes"] == [WORDS]
    snapshot = take_snapshot(Local(run))
    assert snapshot.notes == (WORDS,)
    lines = verdict_block(snapshot, 60, 9).plain.split("\n")
    assert lines[-1].startswith("○ From step 527 on")
    assert len(lines) <= 9
    assert max(map(len, lines)) <= 60
    assert WORDS in " ".join(all_verdicts(snapshot, 60).plain.split())
    assert as_json(snapshot, SortOrder())["notes"] == [WORDS]
