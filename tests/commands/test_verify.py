from __future__ import annotations

import json
from fractions import Fraction

import pytest

from ringside.commands import build_parser
from ringside.commands.verify import parse_counts
from ringside.errors import UsageError
from ringside.schedule import ALGORITHMS, COLLECTIVES, Round, Schedule, from_rounds


def run(*argv: str) -> int:
    args = build_parser(verbs=("verify",)).parse_args(["verify", *argv])
    return int(args.command.run(args))


def broken(n: int) -> Schedule:
    """Everybody sends its own to the right neighbour and calls it a day."""
    return from_rounds("broken", n, 1, [Round.of([(r, (r + 1) % n, 0, True) for r in range(n)])])


def rows(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines() if line.rstrip().endswith((" ok", " canonical"))]


def test_the_verdict_comes_first_and_the_table_has_every_schedule(capsys: pytest.CaptureFixture[str]):
    assert run("ring", "direct", "--ranks", "1-6") == 0
    output = capsys.readouterr().out
    assert output.splitlines()[0] == "all 12 schedules verified: ring, direct"
    assert [row[:2] for row in rows(output)] == [[name, str(n)] for name in ("ring", "direct") for n in range(1, 7)]


def test_the_table_of_everything_fits_a_terminal(capsys: pytest.CaptureFixture[str]):
    assert run("--all", "--ranks", "64") == 0
    table = rows(output := capsys.readouterr().out)
    assert [row[0] for row in table] == [*ALGORITHMS, *COLLECTIVES]
    assert max(len(line) for line in output.splitlines() if line.split()[1:2] == ["64"]) <= 80


def test_the_numbers_of_one_row(capsys: pytest.CaptureFixture[str]):
    assert run("ring", "--ranks", "5") == 0
    output = capsys.readouterr().out
    assert output.splitlines()[0] == "1 schedule verified: ring"
    assert rows(output) == [["ring", "5", "8", "3", "1.600", "1.600", "1.600", "1.600", "1", "ok"]]
    assert "lower bound" not in output


def test_a_canonical_sum_is_said(capsys: pytest.CaptureFixture[str]):
    assert run("chain", "--ranks", "5") == 0
    output = capsys.readouterr().out
    assert rows(output) == [["chain", "5", "8", "3", "2.000", "2.000", "1.600", "1.000", "1", "canonical"]]
    assert "canonical: verified, and every sum is ((x0+x1)+x2)+..." in output


def test_beating_a_bound_is_explained(capsys: pytest.CaptureFixture[str]):
    assert run("direct", "one_shot", "in_network", "--ranks", "7,8") == 0
    assert (
        "≥ is the lower bound for one port per rank and no switch that reduces; below it: direct, one_shot by more "
        "ports; in_network by a switch that reduces"
    ) in capsys.readouterr().out


def test_a_barrier_carries_nothing(capsys: pytest.CaptureFixture[str]):
    assert run("dissemination_barrier", "--ranks", "8") == 0
    assert rows(capsys.readouterr().out)[0][4:8] == ["0.000"] * 4


def test_progress_goes_to_a_terminal_only(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    assert run("ring", "--ranks", "2") == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert run("ring", "--ranks", "2") == 0
    out, err = capsys.readouterr()
    assert "verifying" in err
    assert "verifying" not in out


def test_json_carries_exact_fractions(capsys: pytest.CaptureFixture[str]):
    assert run("ring", "--ranks", "3,5", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["ok"], [a["ranks"] for a in data["audits"]]) == (1, True, [3, 5])
    audit = data["audits"][1]
    assert Fraction(audit["max_bytes_sent_exact"]) == Fraction(8, 5)
    assert audit["max_bytes_sent"] == 1.6
    assert (audit["rounds"], audit["max_ports"], audit["problems"]) == (8, 1, [])
    assert (audit["collective"], audit["canonical"], audit["busiest_link"]) == ("all_reduce", False, [0, 1])
    assert audit["chunks_sent"] == audit["chunks_received"] == [8] * 5
    assert "links" not in audit


def test_json_carries_links_when_asked(capsys: pytest.CaptureFixture[str]):
    assert run("in_network", "--ranks", "2", "--json", "--links") == 0
    (audit,) = json.loads(capsys.readouterr().out)["audits"]
    assert (audit["switches"], audit["beats_bounds"]) == (1, "")
    links = {(link["src"], link["dst"]): Fraction(link["bytes_exact"]) for link in audit["links"]}
    assert links == {(0, 2): 1, (1, 2): 1, (2, 0): 1, (2, 1): 1}


def test_a_broken_schedule_fails_and_is_named_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(ALGORITHMS, "broken", broken)
    assert run("broken", "ring", "--ranks", "3") == 1
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first == "1 of 2 schedules wrong:"
    assert second.startswith("  broken, 3 ranks: missing: chunk 0 of rank 0 ends as (x0+x2) (written in round 1)")
    assert run("broken", "--ranks", "3", "--json") == 1
    problem = json.loads(capsys.readouterr().out)["audits"][0]["problems"][0]
    assert (problem["kind"], problem["rank"], problem["chunk"], problem["round"]) == ("missing", 0, 0, 0)


def test_many_problems_are_counted_not_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ALGORITHMS, "broken", broken)
    assert run("broken", "--ranks", "20") == 1
    assert "  and 8 more (--json lists all)" in capsys.readouterr().out


def test_no_name_means_all_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]):
    assert run("--all", "--ranks", "2", "--json") == 0
    assert [a["algorithm"] for a in json.loads(capsys.readouterr().out)["audits"]] == [*ALGORITHMS, *COLLECTIVES]
    with pytest.raises(UsageError, match=r"there are chain, direct, .* two_tree"):
        run("butterfly")


@pytest.mark.parametrize(
    ("text", "counts"), [("8", [8]), ("2,4,8", [2, 4, 8]), ("1-4", [1, 2, 3, 4]), ("3-4,1,4", [1, 3, 4])]
)
def test_counts(text: str, counts: list[int]):
    assert parse_counts(text) == counts


@pytest.mark.parametrize("text", ["", "x", "0", "4-2", "-3", "1-", "1.5", "2,,3"])
def test_other_counts_are_refused(text: str):
    with pytest.raises(UsageError, match="--ranks takes"):
        parse_counts(text)


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run("--help")
    assert "$ ringside verify ring direct -n 4,8" in capsys.readouterr().out
