"""A job's mesh as views show it: ranks beside those that do the same work, waits along dimensions, chains of waits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.monitor.jobs import DATA, TENSOR, crossed_rows, peer_rows, run_info
from tests.support.schemas import departures

from ringside.commands import main
from ringside.monitor.collector import StepCollector
from ringside.monitor.groups import Blocked
from ringside.monitor.run.directory import RunReader, RunWriter
from ringside.monitor.run.records import Group, GroupUse, Row, StepRecord
from ringside.monitor.summary import assess_run
from ringside.monitor.verdict import Verdict
from ringside.view.export.markdown import render_markdown
from ringside.view.html.run_report import chain_figure, render_report
from ringside.view.mesh_text import blocked_cells, chain_dimensions, same_work
from ringside.view.tui.rank_table import SortOrder, arrange_ranks
from ringside.view.tui.source import Local, Remote, take_snapshot
from ringside.view.tui.text import all_verdicts, once_lines, rank_detail

CHAIN = "0 → 1 → 3: 0 waits for 3 by way of 1"


def write(path: Path, groups: list[Group], job: list[Row], *, end: bool = True) -> Path:
    ranks = len(job[0])
    collector = StepCollector(ranks, RunWriter(path, run_info(ranks)))
    first, *others = job[0].values()
    collector.add([msgspec.structs.replace(first, new_groups=tuple(groups)), *others])
    for row in job[1:]:
        collector.add(row.values())
    if end:
        collector.close()
    return path


@pytest.fixture
def crossed(tmp_path: Path) -> Path:
    return write(tmp_path / "run", [*DATA, *TENSOR], crossed_rows(160))


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """The same job, of which nothing but its own times is known."""
    bare = [
        {rank: msgspec.structs.replace(record, groups=()) for rank, record in row.items()} for row in crossed_rows(160)
    ]
    return write(tmp_path / "plain", [], bare)


def page_of(path: Path) -> str:
    reader = RunReader(path)
    summary, table = assess_run(reader)
    return render_report(summary, reader.info, table)


def large(stages: int = 4, replicas: int = 32, tensor: int = 8) -> tuple[list[Group], list[Row]]:
    """A few steps of 1,024 ranks in three dimensions."""
    ranks = stages * replicas * tensor
    groups, rows = [], []
    for rank in range(0, ranks, tensor):
        groups.append(Group(name=f"tp/{rank}", description="mesh_tp", ranks=tuple(range(rank, rank + tensor))))
    for stage in range(stages):
        for part in range(tensor):
            first = stage * replicas * tensor + part
            members = tuple(range(first, first + replicas * tensor, tensor))
            groups.append(Group(name=f"dp/{first}", description="mesh_dp", ranks=members))
    for first in range(replicas * tensor):
        members = tuple(range(first, ranks, replicas * tensor))
        groups.append(Group(name=f"pp/{first}", description="mesh_pp", ranks=members))
    for step in range(4):
        rows.append({
            rank: StepRecord(
                step=step, rank=rank, ended_unix=0.0, step_seconds=0.2, own_seconds=0.1, exposed_seconds=0.1,
                groups=(GroupUse(f"tp/{rank - rank % tensor}", -1, 1, 8, 0.01),),
            )
            for rank in range(ranks)
        })  # fmt: skip
    return groups, rows


# -------------------------------------------------------------------------------------------------
# The terminal.


def test_top_shows_places_waits_and_the_chain(crossed: Path) -> None:
    snapshot = take_snapshot(Local(crossed))
    lines = list(once_lines(snapshot, SortOrder(sort="rank"), 80))
    assert f"  chain  {CHAIN}" in lines
    assert any(line.startswith("blocked per step, mean rank: dp ") and " · tp " in line for line in lines)
    assert [line.split()[:5] for line in lines[-4:-1]] == [
        ["0", "dp", "0,", "tp", "0"], ["2", "dp", "1,", "tp", "0"], ["1", "dp", "0,", "tp", "1"],
    ]  # fmt: skip
    assert lines[-1].startswith("▌   3  dp 1, tp 1")
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    assert CHAIN in all_verdicts(snapshot, 80).plain
    detail = rank_detail(snapshot, 3, 80).plain
    assert "rank 3 · dp 1, tp 1 · host-0" in detail
    assert "blocked per step: dp 2.00 ms  tp 1.00 ms" in detail


def test_ranks_are_found_by_a_coordinate(crossed: Path) -> None:
    ranks = take_snapshot(Local(crossed)).ranks

    def found(words: str) -> list[int]:
        return [rank.rank for rank in arrange_ranks(ranks, SortOrder(sort="rank", filter=words))]

    assert found("tp1") == found("TP=1") == [1, 3]
    assert found("dp0") == [0, 1]
    assert found("tp2") == []


def test_1024_ranks_still_fold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    run = write(tmp_path / "run", *large())
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    assert main(["top", "--once", str(run), "--sort", "rank"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24
    assert lines[-1].startswith("… and ")
    first, second = lines[-3].split()[:7], lines[-2].split()[:7]
    assert first[1:6] == ["pp", "0,", "dp", first[4], "tp"], "its first stage, in it the replicas of one part"
    assert int(second[0]) - int(first[0]) == 8
    assert main(["report", str(run)]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 24
    rows = re.findall(r'<tr class="part">.*?</tr>', page_of(run))
    assert len(rows) == 32
    assert "pp 0, tp 0: 32 ranks" in rows[0]


@pytest.mark.parametrize("command", ["report", "top"])
def test_json_has_coordinates_and_blocked_time(command: str, crossed: Path, plain: Path, capsys: Any) -> None:
    assert main([command, "--json", str(crossed)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert departures(command, content) == []
    assert {each["rank"]: each["coordinates"] for each in content["ranks"]}[3] == {"dp": 1, "tp": 1}
    assert [one["dimension"] for one in content["blocked"]] == ["dp", "tp"]
    assert content["blocked"][0]["ranks"] == pytest.approx([0.002, 0.032, 0.002, 0.002])
    assert main([command, "--json", str(plain)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert not {"blocked", "waits"} & content.keys()
    assert not any("coordinates" in rank for rank in content["ranks"])


def test_the_report_in_text_and_markdown(crossed: Path, capsys: Any) -> None:
    assert main(["report", str(crossed)]) == 0
    text = capsys.readouterr().out
    assert f"Chain: {CHAIN}" in text
    assert [line.split()[0] for line in text.splitlines()[-5:-1]] == ["0", "2", "1", "3"]
    markdown = render_markdown(assess_run(RunReader(crossed))[0], run_info(4))
    assert f"- **Chain**: {CHAIN}" in markdown
    assert "| tp | 16.0 ms |" in markdown
    assert "| 3 | dp 1, tp 1 | host-0 |" in markdown


def test_top_at_an_address_shows_the_same(crossed: Path) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from tests.support.waiting import until
    from tests.view.served import serving

    here = take_snapshot(Local(crossed))
    with serving(crossed) as url:
        remote = Remote(url)
        until(lambda: len(take_snapshot(remote).steps) == 160 and take_snapshot(remote).stage == "ended")
        until(lambda: take_snapshot(remote).window == here.window)
        there = take_snapshot(remote)
    assert [rank.coordinates for rank in there.ranks] == [rank.coordinates for rank in here.ranks]
    assert list(map(blocked_cells, there.blocked)) == list(map(blocked_cells, here.blocked))
    assert CHAIN in all_verdicts(there, 80).plain


# -------------------------------------------------------------------------------------------------
# The report and the page.


def test_the_report_draws_the_chain_and_tables(crossed: Path) -> None:
    page = page_of(crossed)
    chain = re.search(r'<figure class="chain">.*?</figure>', page, re.DOTALL)
    assert chain is not None
    assert re.findall(r'<text class="along"[^>]*>(.*?)</text>', chain[0]) == ["tp", "dp"]
    assert re.findall(r'<text class="place"[^>]*>(.*?)</text>', chain[0]) == ["dp 0, tp 0", "dp 0, tp 1", "dp 1, tp 1"]
    assert "0 waits for 3 by way of 1" in chain[0]
    assert page.index(chain[0]) < page.index("</section>"), "beside its verdict"
    assert '<tr><th scope="row">tp</th><td>16.0 ms</td>' in page
    assert re.findall(r"tp \d: 2 ranks", page) == ["tp 0: 2 ranks", "tp 1: 2 ranks"]
    assert "<b>0 → 1</b> 30.0 ms per step" in page, "who waited, group by group"


def test_without_a_mesh_nothing_is_added(plain: Path) -> None:
    page = page_of(plain)
    assert not any(word in page for word in ("chain", "place</th>", "Blocked along", "tr.part"))
    lines = list(once_lines(take_snapshot(Local(plain)), SortOrder(), 160))
    assert not any(word in line for line in lines for word in ("chain", "place", "blocked"))


def test_of_a_long_chain_the_ends_are_drawn() -> None:
    by_way = " and ".join(map(str, range(1, 20)))
    evidence = {"by_way_of": f"0 waits for 20 by way of {by_way}"}
    verdict = Verdict(kind="slow_rank", ranks=[20], since_step=0, detected_step=0, excess_ratio=0.2, evidence=evidence)
    picture = chain_figure(verdict, [])
    assert re.findall(r'<text x="\d+" y="34">(.*?)</text>', picture) == ["0", "1", "2", "…", "18", "19", "20"]
    (high,) = re.findall(r'viewBox="0 0 \d+ (\d+)"', picture)
    assert all(0 < int(y) < int(high) for y in re.findall(r' y="(\d+)"', picture)), "all of it is in the picture"
    assert chain_figure(msgspec.structs.replace(verdict, evidence={}), []) == ""


def test_a_link_that_differs_in_two_dimensions_has_no_name() -> None:
    places = [{"dp": 0, "tp": 0}, {"dp": 1, "tp": 1}, {"dp": 1, "tp": 0}]
    assert chain_dimensions([0, 1, 2, 9], places) == ["", "tp", ""]


def test_ranks_that_all_differ_are_not_put_into_blocks() -> None:
    ranks: list[dict[str, Any]] = [{"rank": 0, "coordinates": {"tp": 0}}, {"rank": 1, "coordinates": {"tp": 1}}]
    assert same_work(ranks) == [("", ranks)]
    unplaced: list[dict[str, Any]] = [{"rank": 0, "coordinates": None}, {"rank": 1}]
    assert same_work(unplaced) == [("", unplaced)]
    unknown = Blocked(dimension="tp", seconds_per_step=0.1, step_ratio=float("nan"), ranks=[float("nan")])
    assert blocked_cells(unknown) == ("tp", "100 ms", "–", "", "")


def test_the_page_shows_the_mesh(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from tests.view.served import serving

    crossed = write(tmp_path / "run", [*DATA, *TENSOR], crossed_rows(160))
    with serving(crossed) as url:
        page = open_page(url)
        page.wait_for_selector(".chain")
        assert page.locator(".chain .along").all_text_contents() == ["tp", "dp"]
        assert page.locator(".chain .place").all_text_contents() == ["dp 0, tp 0", "dp 0, tp 1", "dp 1, tp 1"]
        page.wait_for_selector("#blocked tr")
        assert page.locator("#blocked tr").first.inner_text().split()[0] == "dp"
        rows = [text.split("\t")[0].split()[0] for text in page.locator("#rows tr").all_inner_texts()]
        assert rows == ["tp", "0", "2", "tp", "1", "3verdict"]
        assert page.evaluate("[0, 1, 2, 3].map((line) => ringside.heat.rankOf(line))") == [0, 2, 1, 3]
        assert page.evaluate("[0, 1, 2, 3].map((rank) => ringside.heat.lineOf(rank))") == [0, 2, 1, 3]
        page.focus("#heat")
        page.evaluate("ringside.heat.hooks.onSelect(100, 0)")
        page.keyboard.press("ArrowDown")
        assert page.locator("#reading").inner_text().startswith("Rank 2, step 100: place dp 1, tp 0")


def test_the_page_of_a_job_without_a_mesh_shows_none(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("uvicorn")
    from tests.view.served import serving

    with serving(write(tmp_path / "run", [], peer_rows(60))) as url:
        page = open_page(url)
        page.wait_for_selector("#rows tr")
        assert page.locator("#placehead").is_hidden()
        assert page.locator("#blockedcard").is_hidden()
        assert page.evaluate("ringside.heat.rankOf(3)") == 3
