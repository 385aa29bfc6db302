"""`ringside predict score` as people call it: files in, verdict and JSON out."""

import json
import re

import numpy as np
import pytest

from ringside.commands import main
from ringside.predict.laws.fabric import PIPELINE

HEADER = "cluster,nodes,gpus,algo,size_bytes,time_us,algbw_GBps,busbw_GBps\n"
THETA = np.log([22e-6, 2.0, 7.0, 270e9])
TABLE_KEYS = {
    "name", "rows", "flagged", "mape", "median", "bias", "worst_size_bytes", "band_coverage", "baselines", "mape_large",
    "full_sweep", "ranks", "hosts", "collective", "law", "fitted_rows", "scored_rows", "path", "refused", "flags",
}  # fmt: skip


def write(path, scale=1.0, ranks=8, hosts=1, extra="", names_sizes=True):
    sizes = 2.0 ** np.arange(3, 34)
    lines = []
    for size, time in zip(sizes, scale * np.exp(PIPELINE.log_slopes(THETA, sizes)[0]) * 1e6, strict=True):
        rate = size / time / 1e3
        counts = f"{hosts},{ranks}" if names_sizes else ","
        lines.append(f"8x H100,{counts},auto,{size:.0f},{time:.2f},{rate:.2f},{rate * 2 * (ranks - 1) / ranks:.2f}")
    path.write_text(HEADER + "\n".join(lines) + "\n" + extra)
    return str(path)


def run_json(capsys, *words, status=0):
    assert main(["predict", "score", *words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_json_has_every_key_and_errors_are_ratios(tmp_path, capsys):
    data = run_json(capsys, write(tmp_path / "one.csv"))
    (table,) = data["tables"]
    assert set(table) == TABLE_KEYS
    assert data["schema"] == 1
    assert data["mode"] == "hold-out"
    assert (table["name"], table["rows"], table["flagged"], table["ranks"]) == ("one", 31, 0, 8)
    assert 0 <= table["mape"] < 0.03
    assert set(table["baselines"]) == {"hockney", "interpolation", "nccl_constants"}
    assert table["baselines"]["hockney"] > table["mape"]
    assert table["worst_size_bytes"] in (2 ** np.arange(3, 34)).tolist()
    assert table["fitted_rows"] == 16
    assert table["scored_rows"] == 15
    assert data["summary"]["tables"] == 1
    assert data["summary"]["mape"] == table["mape"]


def test_points_carry_their_band(tmp_path, capsys):
    data = run_json(capsys, write(tmp_path / "one.csv"), "--points", "--fit-below", "16M")
    points = data["tables"][0]["points"]
    assert len(points) == 9
    assert all(point["low_s"] < point["predicted_s"] < point["high_s"] for point in points)
    assert all(point["extrapolated"] for point in points)


def test_the_same_input_gives_the_same_output(tmp_path, capsys):
    path = write(tmp_path / "one.csv")
    assert run_json(capsys, path, "--points") == run_json(capsys, path, "--points")


def test_ranks_that_are_not_said_are_inferred(tmp_path, capsys):
    assert run_json(capsys, write(tmp_path / "one.csv", ranks=48, names_sizes=False))["tables"][0]["ranks"] == 48


def test_bad_rows_are_named_with_their_lines_and_the_rest_is_used(tmp_path, capsys):
    bad = "8x H100,1,8,auto,4096,0,0.1,0.2\n8x H100,1,8\n8x H100,1,8,auto,1048576,30,999.0,1748.25\n"
    path = write(tmp_path / "one.csv", extra=bad)
    table = run_json(capsys, path)["tables"][0]
    assert (table["rows"], table["flagged"]) == (34, 3)
    assert [flag["line"] for flag in table["flags"]] == [33, 34, 35]
    assert table["mape"] < 0.03
    assert main(["predict", "score", path]) == 0
    out = capsys.readouterr().out
    assert out.startswith("error ")
    assert "one, line 33: time 0 s" in out
    assert "one, line 34: 3 fields where the header has 8: cut by a line wrap" in out


def test_the_verdict_is_first_then_a_line_for_each_table_then_what_was_not_used(tmp_path, capsys):
    (tmp_path / "no.csv").write_text("hello\nworld\n")
    bad = "".join(f"8x H100,1,8,auto,{4096 + n},0,0.1,0.2\n" for n in range(31))
    paths = [write(tmp_path / "one.csv"), write(tmp_path / "two.csv", 1.1, extra=bad), str(tmp_path / "no.csv")]
    assert main(["predict", "score", *paths]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(
        r"2 tables, median error \d\.\d% \(rows 0, 2, 4, \.\.\. fitted, .*scored\); the 95% band holds ", lines[0]
    )
    assert lines[0].endswith(" of 30 rows")
    assert re.match(r"baselines: Hockney's line [\d.]+%, interpolation [\d.]+%, NCCL's constants [\d.]+%$", lines[1])
    heads = "table ranks rows flagged error ≥ 1 MiB bias worst at in band Hockney interp. NCCL"
    assert " ".join(lines[2].split()) == heads
    assert [line.split()[:4] for line in lines[3:5]] == [["one", "8", "31", "0"], ["two", "8", "62", "31"]]
    assert lines[5].startswith("not scored: no: ")
    assert lines[6] == "rows not used (31):"
    assert lines[7].startswith("  two, line 33: ")
    assert (len(lines[7:-1]), lines[-1]) == (30, "  and 1 more (--json lists all)")
    assert main(["predict", "score", paths[0]]) == 0
    (first, *_) = capsys.readouterr().out.splitlines()
    assert re.match(r"error \d\.\d% ", first)


def test_other_scale_and_preset(tmp_path, capsys):
    small, large = write(tmp_path / "a.csv", ranks=16, hosts=2), write(tmp_path / "b.csv", 1.2, ranks=32, hosts=4)
    data = run_json(capsys, "--fit", small, "--test", large)
    assert (data["mode"], [table["name"] for table in data["tables"]]) == ("other scale", ["b"])
    auto = run_json(capsys, small, "--preset", "auto")["tables"][0]
    named = run_json(capsys, small, "--preset", "dgx-h100")["tables"][0]
    assert auto["mape"] == named["mape"]
    assert auto["fitted_rows"] == 0
    assert auto["baselines"]["hockney"] is None


def test_files_that_are_no_table_are_named_and_the_others_scored(tmp_path, capsys):
    (tmp_path / "readme.csv").write_text("hello\nworld\n")
    good = write(tmp_path / "one.csv")
    data = run_json(capsys, good, str(tmp_path / "readme.csv"))
    refused = {table["name"]: table["refused"] for table in data["tables"]}
    assert "no columns of sizes and times" in refused["readme"]
    assert refused["one"] == ""
    (only,) = run_json(capsys, str(tmp_path))["tables"]
    assert only["name"] == "one"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "name a table"),
        (["--fit", "a.csv"], "needs --test"),
        (["a.csv", "--fit", "a.csv", "--test", "b.csv"], "neither TABLE"),
        (["a.csv", "--fit-below", "soon"], "a size such as 16M"),
        (["absent.csv"], "No such file"),
    ],
)
def test_what_cannot_be_asked_is_one_clear_line(capsys, words, reason):
    assert main(["predict", "score", *words]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
    assert error.startswith("ringside predict: ")


def test_a_preset_that_is_none_lists_those_that_are(tmp_path, capsys):
    assert main(["predict", "score", write(tmp_path / "one.csv"), "--preset", "dgx-z"]) == 2
    assert "dgx-h100" in capsys.readouterr().err


def test_when_no_table_can_be_scored_the_status_says_so(tmp_path, capsys):
    path = tmp_path / "short.csv"
    path.write_text(HEADER + "c,1,8,auto,1024,10,0.10,0.18\n")
    assert run_json(capsys, str(path), status=1)["tables"][0]["mape"] is None
    assert main(["predict", "score", str(path)]) == 1
    assert "no table could be scored" in capsys.readouterr().out
