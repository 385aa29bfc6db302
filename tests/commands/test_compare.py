from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.recorded_runs import own_times, slow_run, write_run

from ringside.commands import main


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
    assert "would not be seen: its times vary too much." in " ".join(capsys.readouterr().out.split())


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
