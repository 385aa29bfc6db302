from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

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
    assert page.split("<script")[0].count('class="disc"') == 4


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


def test_writes_one_picture_of_all_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert run("two_tree", "-n", "7", "--svg") == 0
    assert capsys.readouterr().out == "two_tree-7.svg\n"
    root = ElementTree.parse(tmp_path / "two_tree-7.svg").getroot()
    assert root.get("aria-label") == "two_tree, 7 ranks: 2 chunks, 6 rounds"


@pytest.mark.parametrize(
    ("argv", "first"),
    [
        (("tree", "-n", "4", "--segments", "3"), "tree, 3 segments per chunk · 4 ranks · 3 chunks · 6 rounds"),
        (("ring", "-n", "4", "--order", "0,2,1,3"), "ring, in the order 0, 2, 1, 3 · 4 ranks · 4 chunks · 6 rounds"),
        (("hierarchical", "--ranks-per-host", "3,2"), "hierarchical on hosts of 3, 2 · 5 ranks · 12 chunks · 4 rounds"),
        (("hierarchical", "--hosts", "2", "-n", "4"), "hierarchical on hosts of 2, 2 · 4 ranks · 4 chunks · 4 rounds"),
        (("hierarchical", "--hosts", "2", "--ranks-per-host", "2"), "hierarchical on hosts of 2, 2 · 4 ranks"),
        (("hierarchical", "--ranks-per-host", "2", "-n", "4"), "hierarchical on hosts of 2, 2 · 4 ranks"),
        (("direct_gather", "-n", "3", "--root", "2"), "direct_gather, root 2 · 3 ranks · 3 chunks · 1 round"),
    ],
)
def test_what_is_drawn_is_said(argv: tuple[str, ...], first: str, capsys: pytest.CaptureFixture[str]):
    assert run(*argv, "--text") == 0
    assert capsys.readouterr().out.splitlines()[0].startswith(first)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("ring", "-n", "65"), "room for 64 ranks"),
        (("ring", "-n", "0"), "ring needs at least 1 rank, not 0"),
        (("butterfly", "-n", "4"), "no algorithm 'butterfly'; there are chain, direct"),
        (("rign",), r"no algorithm 'rign' \(did you mean ring\?\)"),
        (("ring",), "missing -n/--ranks, such as -n 4"),
        (("hierarchical",), "or --ranks-per-host 3,2,4"),
        (("ring", "--ranks-per-host", "2,2"), "are for hierarchical; ring does not know hosts"),
        (("hierarchical", "-n", "5", "--ranks-per-host", "2,2"), "2 hosts of 2, 2 have 4 ranks, not 5"),
        (("hierarchical", "--hosts", "3", "--ranks-per-host", "2,2"), "is for 2 hosts, not 3"),
        (("hierarchical", "--hosts", "2"), "give --ranks-per-host, or -n/--ranks"),
        (("hierarchical", "--hosts", "2", "-n", "5"), "that 2 hosts share evenly"),
        (("hierarchical", "--ranks-per-host", "2"), "give --hosts too"),
        (("hierarchical", "--hosts", "0", "-n", "2"), "--hosts 0: at least 1"),
        (("hierarchical", "--ranks-per-host", "2,x"), "a number from 1 on, or one per host, such as 3,2,4"),
        (("hierarchical", "--ranks-per-host", "2,0"), "a number from 1 on"),
        (("ring", "-n", "3", "--order", "0,1,1"), "names each of 0 to 2 once"),
        (("ring", "-n", "3", "--segments", "0"), "at least 1 segment"),
        (("ring", "-n", "3", "--root", "1"), "ring has no root"),
        (("binomial_broadcast", "-n", "3", "--root", "3"), "broadcast among 3 ranks cannot have root 3"),
        (("binomial_reduce", "-n", "3", "--root", "3"), "reduce among 3 ranks cannot have root 3"),
        (("chain_reduce", "-n", "3", "--root", "3"), "reduce among 3 ranks cannot have root 3"),
        (("direct_scatter", "-n", "3", "--root", "3"), "scatter among 3 ranks cannot have root 3"),
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
