"""`ringside top` as a command: what it chooses, what it prints once, and what terminals without this or that get."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.recorded_runs import own_times, slow_run, write_run

from ringside.commands import build_parser
from ringside.commands import top as command
from ringside.errors import RingsideError, UsageError
from ringside.monitor.run import registry
from ringside.view.tui.rank_table import SortOrder
from ringside.view.tui.source import Local

VERDICT = {
    "kind": "slow_rank", "ranks": [2], "since_step": 60, "detected_step": 66, "excess_ratio": 0.3,
    "cause": "most of the extra time is in its backward pass (+21.0 ms per step)", "cost_rank_seconds": 0.84,
    "advice": "compare its clocks and temperature with a healthy rank's", "evidence": {"own_seconds": 0.13},
}  # fmt: skip

GOLDEN = """\
ringside top run · 120 steps · 4 ranks · ringside
● rank 2 is 30% slower than the others since step 60
  why    most of the extra time is in its backward pass (+21.0 ms per step)
  cost   6.70 rank-seconds lost, summed over ranks
  do     compare its clocks and temperature with a healthy rank's

own time: work from one synchronisation to the next
 rank      own     wait     wire   excess↓  (medians, last 16 steps)  own time                            verdict
▌   2   130 ms      0 s      0 s    +29.2%  ▂▁▂▁▂▂▂▂▂▂▂▂▂▂▂▂▂▁▁▂▂▂▂▁▂▂▂▂▂▁██▇█▇▇▇▇▇▇▇██▇██▇▇▇█▇▇██▇▇▇▇▇▇  slow rank
    1   101 ms  28.1 ms      0 s     +0.5%  ▂▂▂▂▂▂▂▂▁▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▁▂▂▂▁▂▂▁▂▂▂▂▂▂▂▂▂▂▂▂▂▂▁▂▁▂▂▂▂▂▂▂▂
    0   100 ms  29.8 ms      0 s     −0.5%  ▂▁▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▁▂▂▂▂▂▂▂▂▂▂▂▂▁▂▂▂▂▂▂▂▂▂▁▂▂▁▂▁▂▁▂▂▂▂▁▂▂
    3   100 ms  28.2 ms      0 s     −0.9%  ▂▂▂▂▂▂▂▂▂▂▂▂▁▂▂▂▂▂▂▁▁▂▂▂▂▂▂▃▁▁▂▂▂▂▂▂▂▁▂▂▂▁▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂▂
"""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other job runs on this machine, and this is an empty directory."""
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setattr(registry.registry_directory, "__defaults__", (os.environ,))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = slow_run(tmp_path / "run")
    (path / "events.jsonl").write_text(json.dumps({"kind": "verdict", "unix": 1.0, "verdict": VERDICT}) + "\n")
    return path


def call(*arguments: str) -> int:
    args = build_parser(verbs=("top",)).parse_args(["top", *arguments])
    status: int = args.command.run(args)
    return status


def ringside_top(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ringside", "top", *arguments], env={**os.environ, **environment}, capture_output=True,
        encoding="utf-8", errors="surrogateescape", stdin=subprocess.DEVNULL, timeout=100,
    )  # fmt: skip


def test_once_prints_the_verdict_and_the_ranks(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(run), "--once") == 0
    assert capsys.readouterr().out == GOLDEN


def test_where_nothing_can_be_drawn_it_prints_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(run)) == 0
    assert capsys.readouterr().out.startswith("ringside top run")


class Slow(Local):
    """Knows nothing at the first two looks."""

    asked = 0

    def poll(self) -> bool:
        self.asked += 1
        return self.asked > 2 and super().poll()


def test_once_waits_for_whoever_only_begins_to_read(run: Path) -> None:
    stream = io.StringIO()
    assert command.print_once(Slow(run), SortOrder(), stream, as_data=False) == 0
    assert stream.getvalue() == GOLDEN


class Lost(Local):
    """Knows the run, and cannot read on."""

    def poll(self) -> bool:
        if self.snapshot().info is None:
            return super().poll()
        raise RingsideError("the disk is gone")


def test_once_shows_what_is_known_where_no_more_can_be_read(run: Path) -> None:
    lost = Lost(run)
    while lost.snapshot().info is None:
        lost.poll()
    stream = io.StringIO()
    assert command.print_once(lost, SortOrder(), stream, as_data=False) == 0
    assert "the disk is gone" in stream.getvalue()
    assert "\n    3   100 ms" in stream.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def without_textual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textual", None)
    monkeypatch.delitem(sys.modules, "ringside.view.tui.app", raising=False)


@pytest.mark.parametrize(
    ("term", "stdin", "stdout", "drawn"),
    [
        ("xterm-256color", Terminal(), Terminal(), True),
        ("dumb", Terminal(), Terminal(), False),
        (None, Terminal(), Terminal(), False),
        ("xterm", io.StringIO(), Terminal(), False),
        ("xterm", Terminal(), io.StringIO(), False),
    ],
)
def test_what_can_be_drawn_on(
    run: Path,
    term: str | None,
    stdin: io.StringIO,
    stdout: io.StringIO,
    drawn: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_textual(monkeypatch)
    monkeypatch.delenv("TERM", raising=False)
    if term is not None:
        monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(sys, "stdout", stdout)
    if drawn:
        with pytest.raises(UsageError, match="the live screen needs textual"):
            call(str(run))
    else:
        assert call(str(run)) == 0
        assert "rank 2 is 30% slower" in stdout.getvalue()


def test_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(str(run), "--json", "--sort", "rank", "--reverse", "--filter", "1-3") == 0
    content = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in content["ranks"]] == [3, 2, 1]
    assert content["ranks"][1]["verdicts"] == ["slow_rank"]
    assert content["verdicts"][0]["cost_rank_seconds"] == pytest.approx(6.7, abs=0.01)  # with the 53 steps after it
    assert (content["schema"], content["name"], content["step"]) == (1, "run", 119)


def test_without_an_argument_the_newest_job_of_this_machine(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_run(tmp_path / "other", own_times(30, 2))
    monkeypatch.setattr(command, "running_runs", lambda: [entry(run, 9.0), entry(other, 5.0)])
    assert call() == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("ringside top run ")
    assert printed.err == f"the newest of 2 jobs; the others: {other}\n"


def entry(path: Path, started: float) -> registry.Entry:
    return registry.Entry(path=os.fsencode(path), pid=1, born=1, started_unix=started, world_size=2)


def test_a_job_that_says_that_it_runs_is_found(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = registry.register(run, 4, 1.0)
    try:
        assert call("--once") == 0
    finally:
        registry.unregister(file)
    printed = capsys.readouterr()
    assert (printed.out.split(" · ")[0], printed.err) == ("ringside top run", "")


def test_without_a_job_the_newest_under_runs_and_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, age in (("b", 2), ("a", 1), ("c", 3)):
        file = write_run(tmp_path / "runs" / name, own_times(30, 2)) / "run.json"
        os.utime(file, ns=(10**18 - age, 10**18 - age))
    assert call() == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("ringside top a ")
    assert "no job runs on this machine; this is the newest under runs/" in printed.err


def test_nothing_to_show_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ringside run"):
        call()
    with pytest.raises(UsageError, match="is no run"):
        call(str(tmp_path / "nothing"))
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(RingsideError, match="no run that this version can read"):
        call(str(tmp_path))


@pytest.mark.parametrize(
    "environment",
    [
        {"LANG": "C", "LC_ALL": "C"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONIOENCODING": "iso-8859-1"},
    ],
)
def test_other_locales_raise_no_unicode_error(run: Path, environment: dict[str, str]) -> None:
    info = json.loads((run / "run.json").read_text()) | {"name": "läuft 実行 \x1b[31m"}
    (run / "run.json").write_text(json.dumps(info))
    result = ringside_top(str(run), "--once", **environment)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "rank 2 is 30% slower" in result.stdout
    assert "\x1b" not in result.stdout
    if "PYTHONIOENCODING" in environment or "PYTHONUTF8" in environment:
        assert result.stdout.isascii()


def test_without_textual_one_sentence_says_what_to_install(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_textual(monkeypatch)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stdout", Terminal())
    with pytest.raises(UsageError, match=r"pip install 'torch-ringside\[tui\]'"):
        call(str(run))
    assert call(str(run), "--once") == 0


def test_once_reads_a_long_run_to_its_end(run: Path) -> None:
    stream = io.StringIO()
    assert command.print_once(Local(run, at_once=10), SortOrder(), stream, as_data=False) == 0
    assert "reading" not in stream.getvalue()


@pytest.mark.parametrize(("lines", "left_out"), [(24, 0), (13, 0), (12, 2), (11, 3), (4, 4)])
def test_once_fits_the_screen(
    run: Path, lines: int, left_out: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LINES", str(lines))
    assert call(str(run), "--once") == 0
    shown = capsys.readouterr().out.splitlines()
    kept = GOLDEN.splitlines()[: 12 - left_out]
    assert shown == [*kept, *([f"… and {left_out} more ranks: --all"] if left_out else [])]
    assert len(shown) < lines or left_out == 4  # all ranks: the verdict is not cut
    assert call(str(run), "--once", "--all") == 0
    assert capsys.readouterr().out == GOLDEN


def test_where_there_is_no_terminal_a_line_is_as_long_as_160_cells(run: Path) -> None:
    event = {"kind": "verdict", "unix": 1.0, "verdict": {**VERDICT, "cause": "its input is late; " * 40}}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    stream = io.StringIO()
    assert command.print_once(Local(run), SortOrder(), stream, as_data=False) == 0
    assert 140 < max(map(len, stream.getvalue().splitlines())) <= 160


def test_into_a_pipe_all_ranks_are_printed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LINES", raising=False)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda fallback=(80, 24): os.terminal_size(fallback))
    assert call(str(run), "--once") == 0
    assert capsys.readouterr().out == GOLDEN
