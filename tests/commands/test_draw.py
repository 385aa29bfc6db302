from __future__ import annotations

from pathlib import Path

import pytest

from ringside.commands import build_parser
from ringside.errors import RingsideError, UsageError


def run(*argv: str) -> int:
    args = build_parser(verbs=("draw",)).parse_args(["draw", *argv])
    return int(args.command.run(args))


def test_writes_a_page_into_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert run("ring", "-n", "4") == 0
    assert capsys.readouterr().out.splitlines()[-1] == "ring-4.html"
    page = (tmp_path / "ring-4.html").read_text(encoding="utf-8")
    assert "<h1>ring, 4 ranks</h1>" in page
    assert page.count('class="disc"') == 4


def test_writes_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    target = tmp_path / "picture.html"
    assert run("direct", "-n", "3", "-o", str(target)) == 0
    assert capsys.readouterr().out == f"{target}\n"
    assert "<h1>direct, 3 ranks</h1>" in target.read_text(encoding="utf-8")


def test_prints_for_the_terminal(capsys: pytest.CaptureFixture[str]):
    assert run("ring", "-n", "3", "--text") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "ring · 3 ranks · 3 chunks · 4 rounds"
    assert lines[-1] == "    2   012  012  012"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("ring", "-n", "65"), "room for 64 ranks"),
        (("ring", "-n", "0"), "ring needs at least 1 rank, not 0"),
        (("butterfly", "-n", "4"), "no algorithm 'butterfly'; there are direct, ring"),
    ],
)
def test_what_cannot_be_drawn_is_refused(argv: tuple[str, ...], words: str):
    with pytest.raises(UsageError, match=words):
        run(*argv)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(RingsideError, match=r"cannot write .*nowhere/x\.html: No such file or directory"):
        run("ring", "-n", "3", "-o", str(tmp_path / "nowhere" / "x.html"))


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run("--help")
    assert "$ ringside draw ring -n 4" in capsys.readouterr().out
