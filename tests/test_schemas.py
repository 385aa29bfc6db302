"""docs/schemas: what commands print as JSON is what they describe; docs/json.md is made from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from docs.generate.json_keys import SCHEMAS, page
from tests.support.golden import ROOT
from tests.support.schemas import departures

from ringside.commands import main

jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")

RUNS, DATA = ROOT / "tests" / "golden" / "runs", ROOT / "tests" / "data"
SCORED = " ".join(  # scored, refused, with flags, of another collective
    f"{DATA}/bandwidth/{name}.csv"
    for name in ("osu_shm_2r", "dgxh100_2n16g_pathology", "vultr_b200_1n8g_allgather", "nccl_tuning_latencies", "INDEX")
)
H100 = "predict --preset dgx-h100 --hosts 4 --json"
COMMANDS = {
    "report": [f"report {RUNS}/demo --json", f"report {RUNS}/hosts --json"],
    "compare": [f"compare {RUNS}/demo {RUNS}/hosts --json --fail-over 5%", f"compare {RUNS}/hosts {RUNS}/demo --json"],
    "doctor": [
        f"doctor {RUNS}/demo {RUNS}/hosts --json",
        f"doctor {DATA}/flight_recorder --json",
        f"doctor {DATA}/kineto/dlrm_8rank.tar.gz --json",
        f"doctor {DATA}/what_if --json",
    ],
    "predict": [
        f"{H100} --model 7B --memory 80GB --compute-seconds 0.2",
        f"predict --run {RUNS}/hosts --preset ethernet-10g --hosts 2 --ranks-per-host 4 --json",
        "predict --preset dgx-a100 --hosts 1 --model 7000B --json",
    ],
    "predict-fit": [f"predict fit {DATA}/bandwidth/aws_p5_h100_2n16g.csv -o fabric.toml --json"],
    "predict-score": [
        f"predict score {DATA}/bandwidth/aws_p5_h100_2n16g.csv --json --points",
        f"predict score {SCORED} {DATA}/README.md --json",
    ],
    "predict-simulate": [
        "predict simulate ring --preset ethernet-10g --hosts 4 --bytes 4MB --slow-link 1:2=4 --json",
        "predict simulate hierarchical --preset dgx-h100 --hosts 2 --bytes 1GB --late 3=1ms --json",
    ],
    "top": [f"top --json {RUNS}/demo", f"top --json {RUNS}/hosts"],
    "verify": ["verify ring direct_all_to_all --ranks 4 --json --links", "verify --ranks 1-5 --json"],
    "what-if": [
        "what-if --preset dgx-h100 --hosts 4 --bytes 1GB --compute-seconds 0.25 --slow-rank 3=12% --price 2.5 "
        "--watts 700 --json",
        f"what-if {RUNS}/hosts --repair 5 --json",
        f"what-if {RUNS}/hosts --to-hosts 16 --preset ethernet-10g --json",
    ],
}
ELSEWHERE = {"bench", "lab", "probe", "demo-kill"}
"""These start processes or measure: tests that have their output hold it to the schema (`departures`)."""


def test_every_schema_is_a_schema_and_has_outputs_to_describe() -> None:
    assert {path.stem for path in SCHEMAS.glob("*.json")} == set(COMMANDS) | ELSEWHERE
    for path in SCHEMAS.glob("*.json"):
        jsonschema.Draft202012Validator.check_schema(json.loads(path.read_text()))


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_printed_is_what_the_schema_describes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in COMMANDS[name]:
        assert main(copied(words, tmp_path)) in (0, 1, 4)
        assert departures(name, json.loads(capsys.readouterr().out)) == [], words


def copied(words: str, place: Path) -> list[str]:
    """Return a command line in which recorded runs are copies: `report` writes into them."""
    import shutil

    for run in RUNS.iterdir():
        shutil.copytree(run, place / run.name, dirs_exist_ok=True)
    return words.replace(str(RUNS), str(place)).split()


def test_the_page_of_keys_is_made_from_the_schemas() -> None:
    assert (ROOT / "docs" / "json.md").read_text() == page(), "run `python -m docs.generate.json_keys > docs/json.md`"
