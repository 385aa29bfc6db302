from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.doctor.dumps import call, world, write
from tests.doctor.nccl_logs import job_log

from ringside.commands import build_parser, main


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
    for arguments in ([], ["--nonsense", str(hung)]):
        with pytest.raises(SystemExit) as caught:
            main(["doctor", *arguments])
        assert caught.value.code == 2
    capsys.readouterr()


def test_the_verdict_is_first_and_files_are_last(hung: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (hung / "poem.txt").write_text("roses are red")
    assert main(["doctor", str(hung)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Rank 2 did not arrive: the job hangs."
    assert [line[0] for line in lines[-5:]] == ["✗", "✓", "✓", "✓", "✓"]


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
    assert "Exit status: 0" in text
