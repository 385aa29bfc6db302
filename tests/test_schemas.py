"""docs/schemas: what commands print as JSON is what they describe; docs/json.md is made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from docs.generate.json_keys import SCHEMAS, page
from tests.support.golden import ROOT

from ringside.commands import main

jsonschema = pytest.importorskip("jsonschema", reason="pip install jsonschema")

RUNS, DATA = ROOT / "tests" / "golden" / "runs", ROOT / "tests" / "data"
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
}


def strict(schema: Any) -> Any:
    """Return a schema in which an object has no key but those that are described."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {"additionalProperties": False} if isinstance(schema.get("properties"), dict) else {}
    return closed | {key: strict(part) for key, part in schema.items()}


def test_every_schema_is_a_schema_and_has_outputs_to_describe() -> None:
    assert {path.stem for path in SCHEMAS.glob("*.json")} == set(COMMANDS)
    for path in SCHEMAS.glob("*.json"):
        jsonschema.Draft202012Validator.check_schema(json.loads(path.read_text()))


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_printed_is_what_the_schema_describes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    validator = jsonschema.Draft202012Validator(strict(json.loads((SCHEMAS / f"{name}.json").read_text())))
    for words in COMMANDS[name]:
        assert main(copied(words, tmp_path)) in (0, 1, 4)
        wrong = [
            f"{error.json_path}: {error.message[:200]}"
            for error in validator.iter_errors(json.loads(capsys.readouterr().out))
        ]
        assert wrong == [], words


def copied(words: str, place: Path) -> list[str]:
    """Return a command line in which recorded runs are copies: `report` writes into them."""
    import shutil

    for run in RUNS.iterdir():
        shutil.copytree(run, place / run.name, dirs_exist_ok=True)
    return words.replace(str(RUNS), str(place)).split()


def test_the_page_of_keys_is_made_from_the_schemas() -> None:
    assert (ROOT / "docs" / "json.md").read_text() == page(), "run `python -m docs.generate.json_keys > docs/json.md`"
