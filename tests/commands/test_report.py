from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ringside.commands import build_parser
from ringside.errors import UsageError
from ringside.monitor import RunInfo, StepRecord
from ringside.monitor.run.directory import RunWriter


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
