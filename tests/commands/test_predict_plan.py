"""`ringside predict` as people call it: hardware and a model in, verdict and JSON out."""

import json
import re

import pytest

from ringside.commands import main
from ringside.errors import UsageError
from ringside.predict import presets
from ringside.text import size_bytes


def said(capsys, *words, status=0):
    assert main(["predict", *words]) == status
    return capsys.readouterr()


def test_the_issues_own_call(capsys):
    text = said(capsys, "--preset", "dgx-h100", "--hosts", "16", "--model", "70B").out
    lines = text.splitlines()
    assert re.match(r"all-reduce of 140 GB among 128 ranks: about \d+ ms \(\d+ ms to [\d.]+ s\)$", lines[0])
    assert "does not fit with plain data parallelism: 1.12 TB > 80 GB per rank" in text
    assert "  70B parameters × 16 bytes (weights, gradients, Adam)" in lines
    assert "fully sharded (ZeRO stage 3, FSDP): 8.75 GB per rank" in text
    assert "reduce-scatter + 2 all-gathers" in text
    assert "extrapolated" in text
    assert "why: bandwidth of infiniband between hosts" in text
    answer, fits, why = (text.index(words) for words in ("all-reduce of", "does not fit", "why: "))
    assert answer < fits < why
    assert len(lines) <= 24


def test_a_model_that_fits_no_way_is_a_failure(capsys):
    text = said(capsys, "--preset", "p5", "--hosts", "1", "--model", "1T", status=1).out
    assert "nor sharded over 8 ranks: 2 TB each" in text
    assert "needs 200 ranks" in text


def test_json_has_bands_and_what_was_asked(capsys):
    words = ("--preset", "ethernet-100g", "--hosts", "4", "--bytes", "25MiB", "--compute-seconds", "0.1", "--json")
    data = json.loads(said(capsys, *words).out)
    assert data["schema"] == 1
    assert data["question"]["size_bytes"] == 25 * 2**20
    assert (data["question"]["hosts"], data["question"]["ranks"]) == (4, 4)
    took = data["priced"]["seconds"]
    assert took["low"] < took["value"] < took["high"]
    assert data["ranking"][0]["algorithms"][0]["seconds"]["value"] > 0
    assert [one["hosts"] for one in data["scaling"]] == [1, 2, 4]
    assert data["buckets"][0]["exposed"]["value"] <= data["buckets"][-1]["exposed"]["value"]
    assert data["bounds"][0]["link"] == "ethernet"


def test_the_long_form_has_every_table(capsys):
    words = ("--preset", "dgx-h100", "--hosts", "4", "--model", "1B", "--compute-seconds", "0.5", "--all")
    text = said(capsys, *words).out
    for heading in ("by size, the three fastest", "memory of a rank", "buckets, size, exposed", "Goyal", "Malladi"):
        assert heading in text


def test_a_topology_of_ones_own_and_one_that_was_measured(tmp_path, capsys):
    toml = tmp_path / "two.toml"
    toml.write_text(
        'schema = 1\nname = "two"\nhosts = 2\nranks_per_host = 1\n'
        '[between]\nkind = "roce"\nalpha_s = 5e-6\nbytes_per_s = 3e9\n'
    )
    text = said(capsys, "--topology", str(toml), "--bytes", "3GB", "--algorithm", "ring").out
    assert "on two: 2 × 1 ranks, roce" in text
    assert "all-reduce of 3 GB among 2 ranks: about 1.0 s (" in text
    assert "2 rounds" in text
    link = {"alpha_s": 5e-6, "bytes_per_s": 1e9}
    probe = {"kind": "ringside topology", "schema": 1, "hosts": [{"ranks": 1}, {"ranks": 1}]}
    probe |= {"links": [{"src": 0, "dst": 1, **link}, {"src": 1, "dst": 0, **link}]}
    measured = tmp_path / "probe.json"
    measured.write_text(json.dumps(probe))
    text = said(capsys, "--topology", str(measured), "--bytes", "1GB", "--algorithm", "ring").out
    assert "all-reduce of 1 GB among 2 ranks: about 1.0 s (" in text


def test_parameters_are_counted_from_a_factory(tmp_path, capsys, monkeypatch):
    (tmp_path / "plan_model_here.py").write_text(
        "class Part:\n    def numel(self):\n        return 500\n"
        "class Model:\n    def parameters(self):\n        return [Part(), Part()]\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ("--preset", "loopback", "--params-from", "plan_model_here:Model", "--dtype", "fp32", "--json")
    assert json.loads(said(capsys, *words).out)["question"]["size_bytes"] == 4000


@pytest.mark.parametrize(
    "where", ["nowhere:at_all", "{0}:gone", "{0}", "{0}:raises", "{0}:leaves", "{0}:none", "{0}:empty"]
)
def test_a_factory_that_makes_no_model_is_one_clear_line(where, tmp_path, capsys, monkeypatch):
    (tmp_path / "plan_model_bad.py").write_text(
        "def raises():\n    raise RuntimeError('no weights\\nhere')\n"
        "def leaves():\n    print('on my way')\n    raise SystemExit(3)\n"
        "def none():\n    return None\n"
        "class empty:\n    def parameters(self):\n        return []\n"
    )
    monkeypatch.chdir(tmp_path)
    words = ("--preset", "loopback", "--params-from", where.format("plan_model_bad"))
    caught = said(capsys, *words, status=2)
    assert "--params-from" in caught.err
    assert caught.err.replace("on my way\n", "").count("\n") == 1
    assert caught.out == ""


def bare_seconds(data, path=""):
    """Yield where a JSON answer has a duration without its band."""
    if isinstance(data, dict) and set(data) != {"value", "low", "high"}:
        for key, inside in data.items():
            number = isinstance(inside, float) and ("second" in key or key.endswith("_s"))
            yield from [f"{path}.{key}"] if number else bare_seconds(inside, f"{path}.{key}")
    elif isinstance(data, list):
        for inside in data:
            yield from bare_seconds(inside, path)


def test_no_predicted_duration_is_without_its_band(capsys):
    """But what was given, and a played critical path, which is exact for its figures and says so."""
    words = ("--preset", "dgx-h100", "--hosts", "4", "--bytes", "1GB", "--compute-seconds", "0.2", "--json")
    assert set(bare_seconds(json.loads(said(capsys, *words).out))) == {".question.compute_seconds"}
    assert main(["what-if", *words, "--slow-link", "7:8=4", "--to-algorithm", "ring"]) == 0
    found = set(bare_seconds(json.loads(capsys.readouterr().out)))
    assert {one.split(".")[1] for one in found} <= {"critical_path"}


def test_a_crossover_has_a_band(capsys):
    words = ("--preset", "ethernet-10g", "--hosts", "8", "--json")
    crossovers = json.loads(said(capsys, *words).out)["crossovers"]
    assert crossovers
    for one in crossovers:
        assert one["band"]["low"] < one["band"]["value"] == one["size_bytes"] < one["band"]["high"]


@pytest.mark.parametrize(
    ("text", "count"),
    [("1GB", 1e9), ("1GiB", 2**30), ("1G", 2**30), ("16M", 2**24), ("16MB", 16e6), ("8", 8), ("8B", 8), ("1e15", 1e15)],
)
def test_gib_are_not_gb(text, count):
    assert size_bytes(text, "--bytes") == count


@pytest.mark.parametrize("text", ["", "GB", "1XB", "-1", "nan", "0", "1e999"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="--bytes"):
        size_bytes(text, "--bytes")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--preset", "p5", "--hosts", "0"), "hosts: at least 1, not 0"),
        (("--preset", "p5", "--hosts", "1000000"), "at most 262144"),
        (("--preset", "p5", "--ranks-per-host", "0"), "a number from 1 on, or one per host"),
        (("--preset", "ethernet-10g", "--hosts", "1"), "nobody to reduce with"),
        (("--preset", "p5", "--bytes", "0"), "more than 0"),
        (("--preset", "p5", "--bytes", "1e30"), "at most 1e+18"),
        (("--preset", "p5", "--model", "seventy"), "70B"),
        (("--preset", "p5", "--model", "0"), "70B"),
        (("--preset", "p5", "--algorithm", "magic"), "nvls_tree"),
        (("--preset", "p5", "--compute-seconds", "-1"), "more than 0"),
        (("--preset", "p5", "--batch-per-rank", "0"), "at least 1"),
        (("--topology", "no-such-file.toml"), "neither a preset nor a topology file"),
        ((), "--preset NAME or --topology FILE"),
        (("--preset", "p5", "--topology", "x.toml"), "--preset NAME or --topology FILE"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(words, reason, capsys):
    error = said(capsys, *words, status=2).err
    assert reason in error
    assert error.count("\n") == 1


def test_that_a_step_of_very_many_layers_takes_a_while_is_said(capsys):
    words = ("--preset", "ethernet-10g", "--hosts", "2", "--bytes", "1GB", "--compute-seconds", "1", "--zero", "1")
    found = said(capsys, *words, "--layers", "20000")
    told = "(20,000 layers of micro-batches are played for every host count and change: this takes seconds)\n"
    assert found.err == told
    assert found.out.startswith("step: ")
    assert said(capsys, *words, "--layers", "200").err == ""


def test_an_unknown_preset_lists_those_that_exist(capsys):
    error = said(capsys, "--preset", "dgx-9000", status=2).err
    assert all(name in error for name in presets())


def test_10_to_the_15_bytes_is_priced_and_called_extrapolated(capsys):
    text = said(capsys, "--preset", "dgx-h100", "--bytes", "1e15").out
    assert "1000 TB" in text
    assert "extrapolated: published tables end at 17 GB" in text


def test_help_has_an_example_and_score_is_still_there(capsys):
    with pytest.raises(SystemExit):
        main(["predict", "--help"])
    text = capsys.readouterr().out
    assert "ringside predict --preset dgx-h100 --hosts 16 --model 70B" in text
    assert "score" in text


def test_a_schedule_is_played_with_its_pictures(tmp_path, capsys):
    page, trace = tmp_path / "ring.html", tmp_path / "ring.json"
    words = ("simulate", "ring", "--preset", "ethernet-10g", "--hosts", "4", "--bytes", "4MB", "--slow-link", "1:2=4")
    plain = said(capsys, *words, "--late", "3=5ms").out
    assert plain.startswith("ring of 4 MB over ethernet-10g")
    assert "bottleneck: slow link 1 → 2 costs" in plain
    assert "extrapolated" in plain
    data = json.loads(said(capsys, *words, "--json", "--html", str(page), "--perfetto", str(trace)).out)
    assert len(data["finish_seconds"]) == 4
    assert data["band"]["low"] < data["band"]["value"] == data["seconds"] < data["band"]["high"]
    assert data["seconds"] == max(data["finish_seconds"])
    assert (data["guilty"]["kind"], data["guilty"]["ranks"]) == ("slow link", [1, 2])
    assert data["critical_path"][-1]["end_s"] == data["seconds"]
    assert "moving" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("ring",), "--preset NAME or --topology FILE"),
        (("ring", "--preset", "p5", "--late", "3"), "such as 3=5ms"),
        (("ring", "--preset", "p5", "--perfetto", "trace.txt"), "trace.txt: the name ends in .json or .json.gz"),
        (("ring", "--preset", "p5", "--late", "99=5ms"), "ranks are 0 to 15"),
        (("in_network", "--preset", "ethernet-10g"), "has no switch"),
        (("magic", "--preset", "p5"), "magic"),
        (("ring", "--preset", "p5", "--hosts", "1000000"), "at most 131072"),
    ],
)
def test_what_cannot_be_played_is_said_in_one_line(words, reason, capsys):
    error = said(capsys, "simulate", *words, status=2).err
    assert reason in error
    assert error.count("\n") == 1


def test_a_plan_as_a_page(tmp_path, capsys):
    page = tmp_path / "plan.html"
    said(capsys, "--preset", "ethernet-10g", "--hosts", "4", "--bytes", "10MB", "--html", str(page))
    assert "Time by size" in page.read_text()
    assert "cannot write" in said(capsys, "--preset", "p5", "--html", str(tmp_path / "no" / "plan.html"), status=1).err
