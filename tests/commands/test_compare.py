from __future__ import annotations

import argparse
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.recorded_runs import own_times, slow_run, write_run

from ringside.commands import main
from ringside.commands.compare import parse_share, print_comparison
from ringside.monitor.assessment import Assessment
from ringside.monitor.verdict import Verdict
from ringside.view.run.comparison import RunChange, RunComparison
from ringside.view.tui.console import SafeConsole


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    before = write_run(tmp_path / "before", own_times(120, 4, seed=1))
    return str(before), str(slow_run(tmp_path / "after", onset=0))


def test_the_answer_is_first_and_fits_a_terminal(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *runs]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("B is slower: step time +2")
    assert lines[1].startswith("New: rank 2 is ")
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24


@pytest.mark.parametrize(("limit", "status"), [("5%", 1), ("5", 1), ("60%", 0)])
def test_the_status_says_whether_the_limit_was_broken(
    runs: tuple[str, str], capsys: pytest.CaptureFixture[str], limit: str, status: int
) -> None:
    assert main(["compare", *runs, "--fail-over", limit]) == status
    assert ("Failed" in capsys.readouterr().out) == bool(status)
    assert main(["compare", *reversed(runs), "--fail-over", limit]) == 0


def test_json_holds_every_figure_and_the_decision(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *runs, "--fail-over", "5%", "--json"]) == 1
    content = json.loads(capsys.readouterr().out)
    assert content["failed"] is True
    assert content["fail_over"] == 0.05
    assert content["step"]["low"] > 0.2
    assert [change["name"] for change in content["changes"]][:2] == ["step time", "own time, slowest rank"]


def test_jobs_of_different_size_are_called_that_in_the_first_line(
    runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    larger = write_run(tmp_path / "larger", own_times(120, 8, seed=1))
    assert main(["compare", runs[0], str(larger)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "Different jobs: numbers of ranks: 4 and 8; numbers of hosts: 1 and 2."


def test_what_cannot_be_seen_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = own_times(120, 4, seed=1)
    own[60:] *= 1.6
    unsteady = str(write_run(tmp_path / "unsteady", own))
    assert main(["compare", unsteady, unsteady]) == 0
    assert "would not be detected: step times vary too much." in " ".join(capsys.readouterr().out.split())


def test_a_straggler_is_not_gone_where_a_run_is_too_unsteady_to_show_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = str(slow_run(tmp_path / "slow"))
    unsteady = str(write_run(tmp_path / "unsteady", own_times(120, 4, jitter=0.3, seed=1)))
    assert main(["compare", slow, unsteady]) == 0
    text = capsys.readouterr().out
    assert "In A, and not certain in B: rank 2 is " in text
    assert "Gone" not in text
    assert main(["compare", unsteady, slow]) == 0
    text = capsys.readouterr().out
    assert "In B, and not certain in A: rank 2 is " in text
    assert "New" not in text


def test_a_straggler_is_gone_where_one_so_slow_would_have_been_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that cannot show 10% may well show what there was before."""
    before = str(slow_run(tmp_path / "before"))
    after = str(write_run(tmp_path / "after", own_times(120, 4, jitter=0.05, seed=1)))
    assert main(["compare", before, after]) == 0
    text = capsys.readouterr().out
    assert "Gone: rank 2 is " in text
    assert "B: no verdict. A rank 10% slower might not have been found" in text


def test_what_is_no_run_or_no_percentage_is_refused_with_status_2(
    runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", runs[0], str(tmp_path / "nothing")]) == 2
    assert "is no run" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["compare", *runs, "--fail-over", "much"])
    assert caught.value.code == 2
    assert main(["compare", *runs, "--warm-up", "-1"]) == 2


def change(low: float, high: float, name: str = "step time") -> RunChange:
    ratio = (low + high) / 2
    return RunChange(name=name, before=0.1, after=0.1 * (1 + ratio), ratio=ratio, low=low, high=high)


def printed(step: RunChange, limit: float | None = None, failed: bool = False, **found: Any) -> str:
    fields: dict[str, Any] = {
        "changes": [step], "new_verdicts": [], "gone_verdicts": [], "uncertain_verdicts": [], "remarks": [],
        "unlike": [], "assessment": {"before": Assessment(state="none"), "after": Assessment(state="none")},
    }  # fmt: skip
    text = io.StringIO()
    console = SafeConsole(file=text, highlight=False, width=80, force_terminal=True, color_system="standard")
    print_comparison(RunComparison(step=step, **{**fields, **found}), limit, failed, console)
    return text.getvalue()


def words(text: str) -> list[str]:
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]


def test_what_is_printed_line_by_line() -> None:
    certain, unsure = change(0.1, 0.3), change(-0.02, 0.06, "exposed sync")
    faster = change(-0.3, -0.1, "backward")
    slow = Verdict(kind="slow_rank", ranks=[2], since_step=0, detected_step=0, excess_ratio=0.3)
    other = Verdict(kind="slow_rank", ranks=[3], since_step=0, detected_step=0, excess_ratio=0.3)
    text = printed(
        certain, 0.05, True, changes=[certain, unsure, faster], new_verdicts=[slow], gone_verdicts=[other],
        remarks=["ranks: 4 and 8", "of another day"], unlike=["ranks: 4 and 8"],
    )  # fmt: skip
    assert words(text) == [
        "Different jobs: ranks: 4 and 8.",
        "B is slower: step time +20.0% (95% interval +10.0% to +30.0%).",
        "Failed: the limit is +5% of a step's time.",
        "New: rank 2 is 30% slower than the others.",
        "Gone: rank 3 is 30% slower than the others.",
        "median per step             A        B  change     95% interval",
        "step time              100 ms   120 ms  +20.0%  +10.0% … +30.0%",
        "exposed communication  100 ms   102 ms   +2.0%    −2.0% … +6.0%",
        "backward               100 ms  80.0 ms  −20.0%  −30.0% … −10.0%",
        "Note: of another day.",
    ]
    colours = {line.split("\x1b")[1][:4].split("m")[0] for line in text.splitlines() if "step time  " in line}
    assert colours == {"[31"}, "red: slower beyond chance"
    assert "\x1b[32mbackward" in text
    assert "\x1b[32mexposed" not in text
    assert "\x1b[31mexposed" not in text


def test_what_may_be_hidden_is_said_from_a_tenth_on() -> None:
    hidden = "would not be detected"
    assert words(printed(change(-0.05, 0.10)))[:3] == [
        "No difference beyond chance: step time +2.5% (95% interval −5.0% to +10.0%).",
        "A change of up to +10.0% would not be detected: step times vary too much.",
        words(printed(change(-0.05, 0.10)))[2],
    ]
    assert hidden not in printed(change(-0.05, 0.0999))
    assert hidden not in printed(change(0.05, 0.15))
    assert words(printed(change(-0.3, -0.1), 0.0, False))[:2] == [
        "B is faster: step time −20.0% (95% interval −30.0% to −10.0%).", "Passed: the limit is +0% of a step's time.",
    ]  # fmt: skip
    assert printed(change(0.0, 0.2)).count("No difference") == printed(change(-0.2, 0.0)).count("No difference") == 1
    open_ = {"before": Assessment(state="none"), "after": Assessment(state="undecided")}
    unsure = [line for line in words(printed(change(0.1, 0.3), assessment=open_)) if "no verdict" in line]
    assert [line[:14] for line in unsure] == ["B: no verdict."]


def test_a_limit_is_a_percentage_from_0_on() -> None:
    assert [parse_share(text) for text in ("0", " 5% ", "2.5", "9999")] == [0.0, 0.05, 0.025, 99.99]
    for text in ("-1", "10000", "much", "", "nan"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no percentage; give for example 5%"):
            parse_share(text)


def test_a_warm_up_of_no_step_is_one(runs: tuple[str, str]) -> None:
    assert main(["compare", *runs, "--warm-up", "0"]) == 0
