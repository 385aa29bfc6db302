"""`ringside predict fit` as people call it: tables in, hardware out, and the plan that is made of it."""

import json
from pathlib import Path

import pytest
from tests.predict.shared_tables import published

from ringside.commands import main

TWO, FOUR = (str(published(f"issue309_aion_h100_{name}.csv")) for name in ("2n16g", "4n32g"))


def test_from_a_log_to_a_plan(tmp_path, capsys):
    out = tmp_path / "fabric.toml"
    assert main(["predict", "fit", TWO, FOUR, "-o", str(out)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{out}: dgx-h100: 4 hosts of 8 ranks")
    assert "on held-out rows" in told
    assert f"next: ringside predict --topology {out} --hosts 64" in told

    def seconds(*words):
        assert main(["predict", *words, "--hosts", "4", "--bytes", "256MiB", "--json"]) == 0
        return json.loads(capsys.readouterr().out)["priced"]["seconds"]

    assert main(["predict", "--topology", str(out), "--hosts", "64", "--model", "7B"]) == 0
    answer, where, *_ = capsys.readouterr().out.splitlines()
    assert answer.startswith("all-reduce of 14 GB among 512 ranks: about ")
    assert where.endswith("fitted to 2 tables")

    held, plain = seconds("--topology", str(out)), seconds("--preset", "dgx-h100")
    assert held["low"] < 2219.3e-6 < held["high"]  # as measured
    assert held["high"] / held["low"] < plain["high"] / plain["low"]


def test_json_names_the_tables_and_how_well_they_are_met(tmp_path, capsys):
    assert main(["predict", "fit", TWO, "-o", str(tmp_path / "fabric.toml"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"schema", "path", "topology", "tables"}
    (table,) = told["tables"]
    assert (table["ranks"], table["hosts"], table["rows"], table["flagged"]) == (16, 2, 14, 0)
    assert 0 < table["held_out"]["mape"] < 0.1
    assert table["other_scales"] is None


@pytest.mark.parametrize(("named", "told"), [("", "auto"), ("Ring", "Ring")])
def test_a_table_that_names_no_algorithm_is_of_the_librarys_choice(tmp_path, capsys, named, told):
    table, out = tmp_path / "named.csv", tmp_path / "fabric.toml"
    table.write_text(Path(TWO).read_text().replace("auto(Tree/NVLSTree)", named))
    assert main(["predict", "fit", str(table), "-o", str(out), "--json"]) == 0
    assert [one["algorithm"] for one in json.loads(capsys.readouterr().out)["tables"]] == [told]
    assert f'algorithm = "{told}"' in out.read_text()


def test_a_table_of_few_rows_says_that_nothing_was_checked(tmp_path, capsys):
    few = tmp_path / "few.csv"
    few.write_text("\n".join(Path(TWO).read_text().splitlines()[:4]))
    assert main(["predict", "fit", str(few), "-o", str(tmp_path / "fabric.toml")]) == 0
    assert "  check         none: 3 usable rows are too few to leave some out\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nothing.log", "-o", "fabric.toml"], "nothing.log"),
        ([TWO, "-o", "nowhere/fabric.toml"], "cannot write nowhere/fabric.toml"),
        ([TWO, "-o", "fabric.toml", "--preset", "ethernet-10g"], "ringside probe -o FILE"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    assert main(["predict", "fit", *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())
