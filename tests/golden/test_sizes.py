"""The same views at many sizes: ranks of a drawing and of a report, columns and lines of a terminal.

A drawing's line has what is told of its layout and a checksum of all that is drawn: that a checksum is another says
where to look, and the two pictures say what has changed.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from tests.recorded_runs import own_times, write_run
from tests.support.golden import Golden

from ringside.monitor.run.directory import RunReader
from ringside.monitor.summary import assess_run
from ringside.monitor.verdict import Verdict
from ringside.schedule import ALGORITHMS, COLLECTIVES, Schedule, by_name, hierarchical, pipelined
from ringside.view.export.markdown import render_markdown
from ringside.view.export.perfetto import trace_events
from ringside.view.html.run_report import render_report
from ringside.view.run.follower import RunFollower
from ringside.view.run.recorded import Run
from ringside.view.schedule.arrange import arrange_vertices
from ringside.view.schedule.drawing import schedule_html, schedule_svg
from ringside.view.schedule.frames import ScheduleFrames
from ringside.view.schedule.layout import GraphLayout
from ringside.view.schedule.text import schedule_text
from ringside.view.terminal import closing_summary, live_picture, status_line
from ringside.view.tui.rank_table import SORTS, SortOrder
from ringside.view.tui.source import Local, take_snapshot
from ringside.view.tui.text import first_line, once_lines, verdict_block

FEW = (1, 2, 3, 4, 5, 8, 9)
COUNTS = {"ring": (*FEW, 12, 13, 16, 17, 33), "two_tree": (*FEW, 16, 33), "tree": (*FEW, 17, 33)}


def checksum(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def line_of(name: str, schedule: Schedule) -> str:
    layout = arrange_vertices(ScheduleFrames(schedule))
    box = " ".join(f"{value:.1f}" for value in layout.box)
    ends = " ".join(f"({layout.nodes[k].x:.1f} {layout.nodes[k].y:.1f})" for k in (0, -1))
    drawn = [schedule_svg(schedule, k) for k in sorted({0, min(1, schedule.rounds), schedule.rounds})]
    page = checksum(_data(schedule_html(schedule))) if schedule.ranks <= max(FEW) else "(as before)"
    sums = f"{checksum(''.join(drawn))} {checksum(schedule_text(schedule))} {page}"
    words = f"{layout.stripes} trees" if layout.stripes > 1 else f"{len(layout.rails)} rails"
    return f"{name:28} box {box:28} ends {ends:30} {words:8} {len(layout.rooms)} rooms  {_spread(layout)}  {sums}\n"


def _spread(layout: GraphLayout) -> str:
    return f"disc {layout.sizes.disc:g} cell {layout.sizes.cell:g} bend {layout.bend:g} labels {layout.labels:d}"


def _data(page: str) -> str:
    """The page without styles and scripts: its words, its picture and its messages as numbers."""
    return re.sub(r"<style>.*?</style>|<script>.*?</script>", "", page, flags=re.S)


DRAWN: dict[str, list[tuple[str, Schedule]]] = {
    **{name: [(f"{name} {n}", by_name(name, n)) for n in COUNTS.get(name, FEW)] for name in ALGORITHMS},
    "collectives": [(f"{name} {n}", by_name(name, n)) for name in COLLECTIVES for n in (1, 2, 5)],
    "hosts": [
        (f"hosts {','.join(map(str, sizes))}", hierarchical(sizes))
        for sizes in ([2, 2], [3, 2, 4], [1, 1], [4, 4, 4], [1, 5], [8, 8])
    ],
    "pipelined": [
        (f"{name} {n} in {m}", pipelined(by_name(name, n), m))
        for name, n, m in (("ring", 3, 4), ("chain", 6, 2), ("two_tree", 9, 3), ("direct", 4, 3))
    ],
}


@pytest.mark.parametrize("name", DRAWN)
def test_layouts_and_drawings_are_as_they_were(name: str, golden: Golden) -> None:
    golden.check(f"sizes/drawings/{name}.txt", "".join(line_of(each, schedule) for each, schedule in DRAWN[name]))


# ------------------------------------------------------------------------------------------------ reports

RANKS = (1, 2, 8, 9, 17, 33, 70)
TAGS = ("svg", "path", "rect", "line", "text", "tr", "section", "details")


def a_run(path: Path, ranks: int) -> Path:
    """A run of 40 steps with a verdict on its last rank: its own times are whole tenths of a millisecond."""
    own = np.round(own_times(40, ranks, seed=ranks), 4)
    own[20:, -1] += 0.03
    write_run(path, own)
    verdict = Verdict(
        kind="slow_rank", ranks=[ranks - 1], since_step=20, detected_step=26, excess_ratio=0.3,
        cause="it had a CPU less than the others",
        evidence={"own_seconds": 0.13, "others_own_seconds": 0.1, "until_step": 34 if ranks % 2 else 99},
    )  # fmt: skip
    event = {"kind": "verdict", "unix": 1.7e9, "verdict": msgspec.to_builtins(verdict)}
    with (path / "events.jsonl").open("a") as events:
        events.write(json.dumps(event) + "\n")
    return path


def test_reports_of_few_and_many_ranks_are_as_they_were(tmp_path: Path, golden: Golden) -> None:
    lines = []
    for ranks in RANKS:
        path = a_run(tmp_path / f"run-{ranks}", ranks)
        reader = RunReader(path)
        summary, table = assess_run(reader)
        page = _data(render_report(summary, reader.info, table))
        counts = " ".join(f"{tag} {len(re.findall(rf'<{tag}[ >]', page))}" for tag in TAGS)
        words = render_markdown(summary, reader.info)
        run = Run(path)
        events = list(trace_events(run.info, list(RunReader(path).iterate()), run.verdicts))
        kinds = " ".join(f"{ph}{sum(event['ph'] == ph for event in events)}" for ph in "XMsfi")
        shown = f"{checksum(page)} {checksum(words)} {checksum(run._repr_html_())}"
        lines.append(f"{ranks:3} ranks: {len(page)} characters, {counts}, events {kinds}  {shown}\n")
        if ranks == 33:
            golden.check("sizes/report-33.md", words)
    golden.check("sizes/reports.txt", "".join(lines))


# ------------------------------------------------------------------------------------------------ terminals


@pytest.mark.parametrize("run", ["hosts", "demo"])
def test_a_terminal_of_any_size_shows_what_it_did(run: str, place: Path, golden: Golden) -> None:
    snapshot = take_snapshot(Local(Path(run)), 1)
    told = []
    for width in (10, 16, 24, 40, 56, 72, 80, 120, 200):
        told += [f"== top, {width} columns", *once_lines(snapshot, SortOrder(), width)]
        told += [first_line(snapshot, width, remarks=["paused", "filtered"]).plain]
    for height in range(12):
        told += [f"== verdicts in {height} lines", verdict_block(snapshot, 60, height).plain]
    for sort in SORTS:
        for reverse in (False, True):
            rows = list(once_lines(snapshot, SortOrder(sort=sort, reverse=reverse), 60))[
                -snapshot.info.world_size - 1 :
            ]
            told += [f"== by {sort}{', the other way round' if reverse else ''}", *rows]
    golden.check(f"sizes/top-{run}.txt", "\n".join(told) + "\n")


def shown(renderable: object, width: int) -> str:
    written = io.StringIO()
    Console(width=width, file=written, no_color=True, legacy_windows=False).print(renderable)
    return "".join(f"{line.rstrip()}\n" for line in written.getvalue().splitlines())


@pytest.mark.parametrize("run", ["hosts", "demo"])
def test_a_picture_of_a_running_job_is_as_it_was(run: str, place: Path, golden: Golden) -> None:
    reader = RunReader(run)
    records, events = reader.poll(), reader.poll_events()
    following = RunFollower()
    pieces = [f"== before\n{shown(live_picture(following, 'a job', 0.0, 80), 80)}{status_line(following, 0.0)}\n"]
    following.start(reader.info)
    half = len(records) // 2
    for name, some, heard in (("begun", records[:half], events[:4]), ("done", records[half:], events[4:])):
        following.feed(some, heard)
        for width in (40, 80, 132):
            drawn = shown(live_picture(following, "a job", 75.0, width), width)
            pieces.append(f"== {name}, {width} columns\n{drawn}{status_line(following, 75.0)}\n")
    summary, _ = assess_run(RunReader(run))
    verdicts = Run(run).verdicts
    pieces += [f"== closing, {width} columns\n{shown(closing_summary(summary, verdicts), width)}" for width in (40, 80)]
    golden.check(f"sizes/picture-{run}.txt", "".join(pieces))
