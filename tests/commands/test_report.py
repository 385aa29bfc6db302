from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest

from ringside.commands import build_parser
from ringside.commands.report import parse_range, print_summary
from ringside.errors import UsageError
from ringside.monitor import RunInfo, StepRecord
from ringside.monitor.price import RATE
from ringside.monitor.run.directory import RunWriter
from ringside.monitor.summary import summarise
from ringside.monitor.verdict import Verdict
from ringside.view.tui.console import SafeConsole
from ringside.view.verdict_text import cost_text


def call(*arguments: str) -> int:
    args = build_parser(verbs=("report",)).parse_args(["report", *arguments])
    status: int = args.command.run(args)
    return status


@pytest.fixture
def sixteen_ranks(tmp_path: Path) -> Path:
    info = RunInfo(
        schema=1, name="run", started_unix=0, command=[], world_size=16, hosts=["a-rather-long-host-name"] * 16,
        pids=[0] * 16, engine="gloo",
    )  # fmt: skip
    own = 0.1 * np.exp(np.random.default_rng(0).normal(0, 0.02, (120, 16)))
    own[60:, 7] *= 1.3
    writer = RunWriter(tmp_path / "run", info)
    writer.append(
        StepRecord(step=s, rank=r, ended_unix=0, step_seconds=0.13, own_seconds=float(own[s, r]))
        for s in range(120)
        for r in range(16)
    )
    return writer.path


def test_the_verdict_is_first_and_the_path_is_last(sixteen_ranks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(sixteen_ranks)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Rank 7 is 30% slower than the others."
    assert lines[-1] == str(sixteen_ranks / "report.html")
    assert (sixteen_ranks / "report.html").read_text().startswith("<!doctype html>")
    assert max(map(len, lines[:-1])) <= 80
    assert len(lines) <= 24
    table = [line.split()[0] for line in lines if "host-name" in line]
    assert table[0] == "7"


def test_a_rate_tells_the_cost_in_money_and_is_kept(
    sixteen_ranks: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RATE, "")  # it is set by the command
    assert call(str(sixteen_ranks), "--price", "3600", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    (verdict,) = summary["verdicts"]
    assert summary["price_per_rank_hour"] == 3600
    assert verdict["cost_money"] == pytest.approx(verdict["cost_rank_seconds"])
    monkeypatch.setenv(RATE, "")
    assert call(str(sixteen_ranks)) == 0
    (cost,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Cost: ")]
    assert f"({verdict['cost_money']:,.2f} at 3600 an hour)" in cost
    assert call(str(sixteen_ranks), "--price", "1") == 0
    assert "at 1 an hour)" in capsys.readouterr().out


def test_what_is_no_rate_is_refused(sixteen_ranks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        call(str(sixteen_ranks), "--price", "cheap")
    assert "'cheap' is no rate" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["cheap", "-1", "nan", "0"])
def test_what_is_no_rate_is_refused_in_the_environment_too(
    text: str, sixteen_ranks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RATE, text)
    with pytest.raises(UsageError, match=f"^RINGSIDE_PRICE: '{text}' is no rate; give for example 2.5$"):
        call(str(sixteen_ranks))
    assert call(str(sixteen_ranks), "--price", "2") == 0, "what is given counts"


@pytest.mark.parametrize(
    ("rank_seconds", "rate", "words"),
    [
        (1.0, 2.5, "1.00 rank-seconds (under 0.01 at 2.5 an hour)"),
        (36720.0, 2.5, "10.2 rank-hours (25.50 at 2.5 an hour)"),
        (3600.0, 1_000_000.0, "1.00 rank-hours (1,000,000.00 at 1000000 an hour)"),
    ],
)
def test_a_price_in_words(rank_seconds: float, rate: float, words: str) -> None:
    assert cost_text(rank_seconds, {"price_per_rank_hour": rate}) == words


def printed(ranks: int, *verdicts: Verdict, slow: int = 2) -> list[str]:
    """What is printed of a run of sixty steps in which one rank works 30% longer, of at least 80 columns."""
    info = RunInfo(schema=1, name="run", started_unix=0, command=[], world_size=ranks,
                   hosts=[f"node-{rank}" for rank in range(ranks)], pids=[0] * ranks, engine="gloo")  # fmt: skip
    records = [
        StepRecord(step=s, rank=r, ended_unix=0, step_seconds=0.13, own_seconds=0.13 if r == slow else 0.1,
                   wait_seconds=0.0 if r == slow else 0.03)
        for s in range(60) for r in range(ranks)
    ]  # fmt: skip
    text = io.StringIO()
    print_summary(summarise(info, records, verdicts), SafeConsole(file=text, width=80, highlight=False))
    return text.getvalue().splitlines()


def test_what_is_printed_line_by_line() -> None:
    verdict = Verdict(kind="slow_rank", ranks=[1], since_step=3, detected_step=9, excess_ratio=0.3, cause="its input",
                      cost_rank_seconds=3.0, advice="cache it")  # fmt: skip
    assert printed(3, verdict) == [
        "Rank 1 is 30% slower than the others.",
        "Since step 3; detected at step 9.",
        "Its input.",
        "Cost: 3.00 rank-seconds: all 3 ranks lost 1.00 s each.",
        "Next: Cache it.",
        "Ranks: medians, whole run; own time: work from one synchronisation to the next",
        "rank  host       own     wait  excess",
        " 1 ◀  node-1  100 ms  30.0 ms",
        "   2  node-2  130 ms      0 s  +30.0%",
        "   0  node-0  100 ms  30.0 ms",
    ]
    assert printed(3, slow=9)[:3] == [
        "No straggler detected.",
        "A rank 10% slower would have been found. Over 60 steps, the slowest rank's own",
        "time is 0.0% above the median of the others'.",
    ]
    ten, eleven, twelve = (printed(ranks) for ranks in (10, 11, 12))
    assert [sum(" node-" in line for line in lines) for lines in (ten, eleven, twelve)] == [10, 10, 10]
    assert not any("less excess" in line for line in ten)
    assert eleven[-1].strip() == "and 1 rank with less excess"
    assert twelve[-1].strip() == "and 2 ranks with less excess"


def test_json_on_stdout_is_the_summary(sixteen_ranks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(sixteen_ranks), "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((sixteen_ranks / "summary.json").read_text())
    assert printed["verdicts"][0]["ranks"] == [7]


def test_what_is_no_run_is_refused_with_status_2(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no run") as caught:
        call(str(tmp_path / "nothing"))
    assert caught.value.exit_status == 2


def test_markdown_on_stdout(sixteen_ranks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(sixteen_ranks), "--markdown") == 0
    assert capsys.readouterr().out.startswith("# run\n\n## Rank 7 is 30% slower than the others.\n")


@pytest.mark.parametrize(
    ("text", "steps"), [("40:80", (40, 80)), (":200", (None, 200)), ("40:", (40, None)), (":", (None, None))]
)
def test_either_end_of_a_range_of_steps_may_be_left_out(text: str, steps: tuple[int | None, int | None]) -> None:
    assert parse_range(text) == steps


def test_a_trace_of_some_steps(sixteen_ranks: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(sixteen_ranks), "--perfetto", str(tmp_path / "t.json"), "--steps", "58:62") == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 't.json'}\n"
    assert "of 4 steps" in captured.err
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    steps = {event["name"] for event in events if event["name"].startswith("step ")}
    assert steps == {"step 58", "step 59", "step 60", "step 61"}
    assert not (sixteen_ranks / "report.html").exists()


@pytest.mark.parametrize(
    ("words", "said"), [(("--steps", "1:5"), "--steps is for a trace"), (("--perfetto", "x.txt"), r"ends in \.json")]
)
def test_a_trace_needs_a_file_that_is_one(sixteen_ranks: Path, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        call(str(sixteen_ranks), *words)


@pytest.mark.parametrize("steps", ["5", "a:b", "1:2:3"])
def test_a_range_of_steps_that_is_none_is_refused(sixteen_ranks: Path, steps: str) -> None:
    with pytest.raises(SystemExit):
        call(str(sixteen_ranks), "--perfetto", "t.json", "--steps", steps)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--steps", "1:5"), "give --perfetto FILE too"), (("--perfetto", "x.txt"), "ends in .json or .json.gz")],
)
def test_what_would_be_ignored_is_refused(sixteen_ranks: Path, arguments: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        call(str(sixteen_ranks), *arguments)
