from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.doctor.dumps import call, dump, world, write
from tests.doctor.kineto_maker import Job
from tests.doctor.nccl_logs import job_log
from tests.doctor.shared_data import shared

from ringside.commands import build_parser, main
from ringside.commands.doctor import files_line, print_findings, standing_lines
from ringside.doctor.findings import Findings, Note, Sheet, Unjudged
from ringside.monitor.verdict import Verdict
from ringside.view.tui.console import SafeConsole


@pytest.fixture
def hung(tmp_path: Path) -> Path:
    usual = [*map(call, range(1, 6)), call(6, done=False)]
    return write(tmp_path / "hung", world(4, {2: usual[:5]}, usual))


@pytest.fixture
def healthy(tmp_path: Path) -> Path:
    return write(tmp_path / "healthy", world(4, {}, [*map(call, range(1, 6))]))


def test_exit_statuses(hung: Path, healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    assert main(["doctor", str(healthy)]) == 0
    assert main(["doctor", str(hung)]) == 1
    assert main(["doctor", str(tmp_path / "empty"), str(tmp_path / "noise")]) == 3
    assert main(["doctor", str(tmp_path / "not-there")]) == 3
    (hung / "nccl_trace_rank_1").unlink()
    (hung / "nccl_trace_rank_2").unlink()
    (healthy / "nccl_trace_rank_2").unlink()
    assert main(["doctor", str(hung)]) == 1
    assert main(["doctor", str(healthy)]) == 4

    for arguments in ([], ["--nonsense", str(hung)]):
        with pytest.raises(SystemExit) as caught:
            main(["doctor", *arguments])
        assert caught.value.code == 2
    capsys.readouterr()


def test_of_one_path_that_is_not_there_the_reason_is_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "not-there"]) == 3
    assert capsys.readouterr().out.startswith("not-there does not exist; ")


def test_the_verdict_is_first_and_files_are_last(hung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (hung / "poem.txt").write_text("roses are red")
    assert main(["doctor", str(hung)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Rank 2 did not arrive: the job hangs."
    assert lines[-1] == "Read: 4 flight-recorder dumps (ranks 0-3); ignored: 1 file (-v lists them)."
    assert main(["doctor", str(hung), "-v"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines[-5:]] == ["✗", "✓", "✓", "✓", "✓"]
    assert lines[-1].endswith("rank 3: 6 entries, 5 completed")


def test_where_the_ranks_of_the_culprits_group_stand(hung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", str(hung)])
    lines = capsys.readouterr().out.splitlines()
    table = lines[lines.index("Last entered and completed, by rank, in default_pg (group 0):") + 1 :]
    assert [line.split() for line in table[:3]] == [
        ["ranks", "last", "entered", "last", "completed", "open", "collective", "6"],
        ["2", "5", "5", "0", "culprit:", "never", "entered"],
        ["0,", "1,", "3", "6", "5", "1", "entered,", "not", "completed"],
    ]


def test_partial_evidence_is_never_health(hung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (1, 2):
        (hung / f"nccl_trace_rank_{rank}").unlink()
    main(["doctor", str(hung)])
    assert capsys.readouterr().out.splitlines()[0] == (
        "Hung; culprit unknown: ranks 0 and 3 wait in collectives that never completed; the dumps of ranks 1 and 2 "
        "are missing."
    )
    main(["doctor", str(shared("kineto/gloo_world300_rank34.json.gz"))])
    assert capsys.readouterr().out.startswith("Not enough to judge")


def test_two_causes_are_headed_as_two_and_advise_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = {rank: [call(1), call(2, group=str(1 + rank // 2), desc="tp", done=False)] for rank in (0, 2)}
    groups = {rank: {"0": range(4), str(1 + rank // 2): range(rank // 2 * 2, rank // 2 * 2 + 2)} for rank in range(4)}
    write(tmp_path, {rank: dump(entries.get(rank, [call(1)]), groups[rank]) for rank in range(4)})
    assert main(["doctor", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 1
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "2 causes: rank 1 (tp 1); rank 3 (tp 2)."
    assert text.count("Next: ") == 1
    assert "<h1>2 causes: rank 1 (tp 1); rank 3 (tp 2).</h1>" in (tmp_path / "page.html").read_text()


def test_hundreds_of_collectives_per_step_are_a_finding_from_their_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for count, status in ((20, 4), (404, 1)):
        for trace in Job(ranks=1, steps=5, sizes=[1] * count, work_us=20_000, transfer_us=10).traces():
            for event in trace["traceEvents"]:
                event["args"] = {
                    name: value for name, value in event["args"].items() if "nelems" not in name and "Dims" not in name
                }
            (tmp_path / "rank0.json").write_text(json.dumps(trace))
        assert main(["doctor", str(tmp_path)]) == status
    assert capsys.readouterr().out.splitlines()[-9].startswith("404 collectives per step are launched.")


def printed(*, width: int = 44, soft_wrap: bool = False, verbose: bool = False, **found: Any) -> list[str]:
    text = io.StringIO()
    print_findings(Findings(**found), SafeConsole(file=text, highlight=False, width=width, soft_wrap=soft_wrap),
                   verbose=verbose)  # fmt: skip
    return [line.rstrip() for line in text.getvalue().splitlines()]


SLOW = Verdict(kind="slow_rank", ranks=[1], since_step=0, detected_step=0, excess_ratio=0.3, cause="it " * 16 + "waits",
               cost_rank_seconds=70.0, advice="move it")  # fmt: skip
NOTES = [Note(file=f"rank_{n}", kind="log", text="3 lines", used=n > 1) for n in (10, 2, 1)]


def test_below_a_headline_all_is_indented_by_two_and_advice_is_given_once() -> None:
    same = msgspec.structs.replace(SLOW, ranks=[2], cause="")
    assert printed(verdicts=[SLOW, same], notes=NOTES) == [
        "Rank 1 is 30% slower than the others.",
        "  It it it it it it it it it it it it it it",
        "  it it waits.",
        "  Cost: 70.0 rank-seconds lost.",
        "  Next: Move it.",
        "Rank 2 is 30% slower than the others.",
        "  Cost: 70.0 rank-seconds lost.",
        "Read: 2 logs; ignored: 1 file (-v lists",
        "them).",
    ]
    assert printed(verdicts=[SLOW], notes=NOTES, soft_wrap=True)[1] == f"  It {'it ' * 15}waits."


def test_files_are_listed_by_their_numbers_those_left_out_first() -> None:
    assert printed(width=80, notes=NOTES, verbose=True) == [
        "Nothing wrong was found.", "✗ rank_1: log, 3 lines", "✓ rank_2: log, 3 lines", "✓ rank_10: log, 3 lines",
    ]  # fmt: skip
    unread = [Note(file=f"f{n}", kind="", text="is text", used=False) for n in range(13)]
    assert printed(width=80, notes=unread[:1]) == ["f0 is text"]
    lines = printed(width=80, notes=unread[:12])
    assert (lines[0], lines[1], len(lines)) == ("Nothing here could be read.", "✗ f0: is text", 13)
    lines = printed(width=80, notes=unread)
    assert (len(lines), lines[-1]) == (14, "… and 1 more file (-v lists them)")
    assert len(printed(width=80, notes=unread, verbose=True)) == 14


def test_what_would_be_without_stragglers_and_what_was_not_judged() -> None:
    one, other = {"slowdown": 1.5, "source": "a.json"}, {"slowdown": 1.2, "source": "b.json"}
    unjudged = [Unjudged(what="the network", why="no trace of it")]
    assert printed(width=80, notes=NOTES, what_if=one, unjudged=unjudged)[:3] == [
        "Not enough to judge: nothing wrong was found in what could be judged.",
        "Without stragglers: the job would run 1.50 × faster.",
        "Not judged: the network: no trace of it.",
    ]
    assert printed(width=80, notes=NOTES, what_if=one, more_what_if=[other, {"slowdown": 1.1}])[1:4] == [
        "Without stragglers: the job would run 1.50 × faster (a.json).",
        "Without stragglers: the job would run 1.20 × faster (b.json).",
        "Without stragglers: the job would run 1.10 × faster.",
    ]


def test_where_ranks_stand_is_a_table_of_sixteen_lines() -> None:
    rows: list[list[Any]] = [[n, 7 + n // 2, "open"] for n in range(6)] + [[None, 1, "open"], [6, 7, "open"]]
    sheet = Sheet(title="Where ranks stand", columns=["rank", "last", "now"], rows=rows, culprits=[3])
    assert standing_lines(sheet) == [
        "Where ranks stand:",
        "ranks    last  now",
        "3        8     open",
        "         1     open",
        "0, 1, 6  7     open",
        "2        8     open",
        "4, 5     9     open",
    ]
    for count, more in ((16, []), (17, ["… and 1 more row in --json"])):
        rows = [[n, n] for n in range(count)]
        lines = standing_lines(Sheet(title="t", columns=["rank", "last"], rows=rows))
        assert (len(lines) - len(more), lines[18:]) == (18, more)


def test_what_was_read_in_one_line() -> None:
    def said(kinds: list[str], **facts: Any) -> str:
        notes = [Note(file="f", kind=kind, text="", used=kind != "-") for kind in kinds]
        return files_line(Findings(notes=notes, facts=facts))

    assert said([]) == "Read: nothing (-v lists them)."
    assert said(["log", "log", "error", ""]) == "Read: 2 logs, 1 error file, 1 file (-v lists them)."
    assert said(["-", "-"]) == "Read: nothing; ignored: 2 files (-v lists them)."
    dumps = {"flight_recorder": {"ranks": [0, 1]}}
    kind = "flight-recorder dump"
    assert said([kind, kind], **dumps) == "Read: 2 flight-recorder dumps (ranks 0 and 1) (-v lists them)."
    assert said([kind], **dumps, **{"flight_recorder 2": {"ranks": [3]}}) == (
        "Read: 1 flight-recorder dump (-v lists them)."
    )


def test_json_is_all_that_is_on_stdout(hung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(hung), "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["verdicts"][0]["ranks"] == [2]
    assert content["verdicts"][0]["evidence"]["victims"] == "0, 1, 3"
    assert len(content["files"]) == 4
    assert content["questions"]["small_collectives"]["answer"] is None


def test_the_page_needs_nothing_else_and_escapes_what_files_say(
    hung: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (hung / "<script>alert(1).txt").write_text("<img src=x onerror=alert(2)>")
    (hung / "nccl.log").write_text(job_log([2, 2], order=[0, 2, 1, 3]).replace("node-1", "h<i>1"))
    page = tmp_path / "page.html"
    assert main(["doctor", str(hung), "--html", str(page)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == str(page)
    text = page.read_text()
    assert text.startswith("<!doctype html>")
    assert text.index("Rank 2 did not arrive") < text.index('class="lanes"') < text.index('class="topology"')
    assert "<script" not in text
    assert "<img" not in text
    assert "<i>1" not in text
    assert not re.search(r"<[^>]*(?:src|href)=|https?://|@import", text)


def test_the_page_is_written_though_the_reader_of_the_terminal_goes_away(hung: Path, tmp_path: Path) -> None:
    page, (reader, writer) = tmp_path / "page.html", os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "ringside", "doctor", str(hung), "--html", str(page)]
    ended = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert ended.stderr == ""
    assert page.read_text().startswith("<!doctype html>")


def test_a_page_that_cannot_be_written_is_one_line(hung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(hung), "--html", str(hung / "no" / "page.html")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_help_has_an_example_and_the_exit_statuses() -> None:
    with pytest.raises(SystemExit):
        build_parser(verbs=("doctor",)).parse_args(["doctor", "--help"])


def test_help_says_how(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    text = capsys.readouterr().out
    assert "$ ringside doctor" in text
    assert "exit status: 0" in text
